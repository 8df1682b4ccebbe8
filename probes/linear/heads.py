"""Many linear classifiers trained together on the same features, with the same results as one by one.

The weights of heads on the same features lie side by side, so that one matrix product computes a group of heads. The
logits of a group fit the cache: a single product for all heads is slower than a loop over them. The gradient of the
cross-entropy is written out, and the product that computes it adds it to SGD's momentum.

B images of a batch, D width, C classes, G heads of a group, H heads in all, h of them in this process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.optimisers import adapted
from engine.settings import BelowOne, PositiveFloat, Validated
from engine.training.schedules import Schedule

Optimizer = Literal["sgd", "lars", "msn", "adamw"]
Entry = Literal["plain", "batch_norm", "layer_norm"]
State = dict[str, Tensor]

LR_BATCH = 256  # batch that learning rates are stated for, in every source
CACHE = 12 << 20  # bytes of a group's logits: 3 heads of 1000 classes at batch 1024, the quickest of 1, 3 and 45
MIN_CLASSES = 64  # for torch's softmax, which is 10 times slower than its single steps over fewer classes
SCALE = 0.01  # standard deviation of initial weights in every source; MAE's truncation at 2 is 200 deviations away
BETAS, ADAM_EPS = (0.9, 0.999), 1e-8  # of torch.optim.AdamW
PARAMETER = "parameter."  # prefix of a head's own tensors, beside those of its optimiser
RUNNING = 0.1  # share of a batch in BatchNorm's running statistics: torch's default, which the sources keep


@dataclass(frozen=True, kw_only=True)
class Head:
    """One linear classifier."""

    readout: str  # name of the features that it reads
    lr: float  # peak, for the batch that is used
    weight_decay: float = 0.0
    schedule: Schedule | None = None  # of an attentive head's learning rate, where it is not that of the sweep
    decay: Schedule | None = None  # of an attentive head's weight decay, where it is not constant


@dataclass(frozen=True, kw_only=True)
class HeadSettings(Validated):
    """Settings that all heads share."""

    optimizer: Optimizer = "sgd"  # sgd with momentum, LARS, MSN's own SGD, or AdamW
    momentum: BelowOne = 0.9  # of the optimizer
    entry: Entry = "plain"  # norm in front of a head: none, batch norm without parameters, or MSN's trained layer norm
    eps: PositiveFloat = 1e-5  # of that norm


class HeadGroup:
    """G heads of one readout; their weights (D, G*C) and biases (G*C,) lie side by side.

    places: of these heads among all.
    """

    def __init__(self, heads: Sequence[Head], places: range, weight: Tensor, recipe: HeadSettings) -> None:
        self.places, self.recipe, self.readout = places, recipe, heads[0].readout
        self.size, self.classes = len(heads), weight.shape[1] // len(heads)
        self.parameters = {"weight": weight, "bias": weight.new_zeros(weight.shape[1])}
        self.add_parameters()
        self.buffers = {name: torch.zeros_like(value) for name, value in self.parameters.items()}
        self.lr = self._each([head.lr for head in heads])
        self.weight_decay = self._each([head.weight_decay for head in heads])
        self.decays = any(head.weight_decay for head in heads)

    def add_parameters(self) -> None:
        """Add parameters beside weight and bias; none here."""

    def logits(self, inputs: Tensor) -> Tensor:
        """(B, D) -> (B, G, C)."""
        return torch.addmm(self.parameters["bias"], inputs, self.parameters["weight"]).view(-1, self.size, self.classes)

    def step(self, inputs: Tensor, labels: Tensor, factor: float) -> Tensor:
        """One step on inputs (B, D) and labels (B,), at `factor` times each head's rate -> losses (G,) before it."""
        errors, losses = residuals(self.logits(inputs), labels)
        if self.recipe.optimizer == "sgd":
            self._accumulate(inputs, errors.flatten(1))
        else:
            self._accumulate_adapted(inputs, errors.flatten(1))
        for name, buffer in self.buffers.items():
            self.parameters[name].addcmul_(buffer, self.lr, value=-factor)
        return losses

    def _accumulate(self, inputs: Tensor, errors: Tensor) -> None:
        # torch.optim.SGD: mu <- momentum mu + g + wd p, biases included
        share, momentum = 1 / len(inputs), self.recipe.momentum
        self.buffers["weight"].addmm_(inputs.T, errors, beta=momentum, alpha=share)
        self.buffers["bias"].mul_(momentum).add_(errors.sum(dim=0), alpha=share)
        for name, buffer in self.buffers.items() if self.decays else ():
            buffer.addcmul_(self.parameters[name], self.weight_decay)

    def _accumulate_adapted(self, inputs: Tensor, errors: Tensor) -> None:
        # MAE util/lars.py:31-45: biases are neither decayed nor scaled
        stacked = (-1, self.size, self.classes)
        gradient = (inputs.T @ errors).div_(len(inputs)).view(stacked)
        decay = self.weight_decay.view(stacked)
        direction = adapted(gradient, self.parameters["weight"].view(stacked), decay, heads=1)
        self.buffers["weight"].mul_(self.recipe.momentum).add_(direction.flatten(1))
        self.buffers["bias"].mul_(self.recipe.momentum).add_(errors.sum(dim=0), alpha=1 / len(inputs))

    def _each(self, values: Sequence[float]) -> Tensor:
        # one value a head -> (G*C,)
        return self.parameters["weight"].new_tensor(values).repeat_interleave(self.classes)

    def head(self, place: int) -> State:
        """One head's parameters and buffers, views of the group's, as `parameter.NAME` and `buffer.NAME`."""
        at = self.places.index(place)
        columns = slice(at * self.classes, (at + 1) * self.classes)
        return {name: value[..., columns] for name, value in self.tensors().items()}

    def tensors(self) -> State:
        """What training changes of all heads, by the names of `head`."""
        tensors = {f"{PARAMETER}{name}": value for name, value in self.parameters.items()}
        return tensors | {f"buffer.{name}": value for name, value in self.buffers.items()}


class NormedGroup(HeadGroup):
    """One head of MSN (linear_eval.py:251-266): LayerNorm with trained gain and shift (D,), unit length, linear layer.

    MSN's own Nesterov SGD trains it, which keeps the rate inside the buffer (src/sgd.py): mu <- momentum mu - lr d,
    p <- p - lr d + momentum mu. Vectors are not decayed (linear_eval.py:367-374).
    """

    def add_parameters(self) -> None:
        width = len(self.parameters["weight"])
        bias = self.parameters["bias"]
        self.parameters |= {"gain": bias.new_ones(width), "shift": bias.new_zeros(width)}

    def logits(self, inputs: Tensor) -> Tensor:
        return super().logits(self._unit(inputs)[0])

    def _unit(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # unit vectors (B, D), the lengths (B, 1) they had, and what gain is multiplied with (B, D)
        normed = F.layer_norm(inputs, inputs.shape[1:], eps=self.recipe.eps)
        moved = torch.addcmul(self.parameters["shift"], normed, self.parameters["gain"])
        lengths = torch.linalg.vector_norm(moved, dim=1, keepdim=True).clamp_min(1e-12)
        return moved / lengths, lengths, normed

    def step(self, inputs: Tensor, labels: Tensor, factor: float) -> Tensor:
        unit, lengths, normed = self._unit(inputs)
        errors, losses = residuals(super().logits(unit), labels)
        errors = errors.flatten(1) / len(inputs)
        back = errors @ self.parameters["weight"].T
        back = (back - unit * (back * unit).sum(dim=1, keepdim=True)) / lengths  # through the division by the length
        gradients = {
            "weight": torch.addcmul(unit.T @ errors, self.parameters["weight"], self.weight_decay),
            "bias": errors.sum(dim=0),
            "gain": (back * normed).sum(dim=0),
            "shift": back.sum(dim=0),
        }
        rate, momentum = factor * float(self.lr[0]), self.recipe.momentum
        for name, gradient in gradients.items():
            self.buffers[name].mul_(momentum).sub_(gradient, alpha=rate)
            self.parameters[name].sub_(gradient, alpha=rate).add_(self.buffers[name], alpha=momentum)
        return losses

    def head(self, place: int) -> State:
        return self.tensors()


class AdamGroup(HeadGroup):
    """Heads trained by torch.optim.AdamW with its defaults; biases decay too (BEiT run_linear_eval.py:135-138)."""

    def __init__(self, heads: Sequence[Head], places: range, weight: Tensor, recipe: HeadSettings) -> None:
        super().__init__(heads, places, weight, recipe)
        self.buffers |= {f"{name}_square": torch.zeros_like(value) for name, value in self.parameters.items()}
        self.buffers["updates"] = torch.zeros_like(self.lr)

    def step(self, inputs: Tensor, labels: Tensor, factor: float) -> Tensor:
        errors, losses = residuals(self.logits(inputs), labels)
        errors, updates, rate = errors.flatten(1) / len(inputs), self.buffers["updates"].add_(1), factor * self.lr
        for name, gradient in (("weight", inputs.T @ errors), ("bias", errors.sum(dim=0))):
            mean = self.buffers[name].lerp_(gradient, 1 - BETAS[0])
            square = self.buffers[f"{name}_square"].lerp_(gradient.square_(), 1 - BETAS[1])
            size = (square / (1 - BETAS[1] ** updates)).sqrt_().add_(ADAM_EPS)
            step = mean / (1 - BETAS[0] ** updates) / size
            self.parameters[name].mul_(1 - rate * self.weight_decay).sub_(step.mul_(rate))
        return losses


class Heads:
    """H heads in groups, or this process's share of them; their initial weights do not depend on the division.

    widths: D of every readout. batch: images of a step, which decides the size of the groups. own: places (h,) of the
    heads that this process trains, all unless given. diverged: (h,) first step with a loss that was not finite, -1
    where there is none. Memory: weights and momentum of the own heads, 8 D C bytes each in float32 (45 heads of 1000
    classes on 1536 numbers: 553 MB), and the logits of one group.
    """

    def __init__(
        self,
        heads: Sequence[Head],
        widths: Mapping[str, int],
        classes: int,
        recipe: HeadSettings,
        *,
        batch: int,
        seed: int = 0,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        own: range | None = None,
    ) -> None:
        self.heads, self.recipe, self.classes = tuple(heads), recipe, classes
        self.own = range(len(heads)) if own is None else own
        generator = torch.Generator().manual_seed(seed)
        drawn: dict[int, Tensor] = {}
        for place, head in enumerate(heads[: self.own.stop] if self.own else ()):
            weight = torch.randn(classes, widths[head.readout], generator=generator, dtype=dtype)
            if place in self.own:
                drawn[place] = weight.mul_(SCALE).to(device)
        kind = {"msn": NormedGroup, "adamw": AdamGroup}.get(recipe.optimizer, HeadGroup)
        readouts = [heads[place].readout for place in self.own]
        largest = 1 if recipe.entry == "layer_norm" else max(1, CACHE // (batch * classes * dtype.itemsize))
        self.groups = [
            kind(
                [heads[place] for place in places],
                places,
                torch.cat([drawn[place] for place in places]).T.contiguous(),
                recipe,
            )
            for places in grouped(readouts, largest, self.own.start)
        ]
        self.readouts = tuple(dict.fromkeys(readouts))  # that the own heads read
        self.running = {
            readout: (
                torch.zeros(widths[readout], device=device, dtype=dtype),
                torch.ones(widths[readout], device=device, dtype=dtype),
            )
            for readout in self.readouts
            if recipe.entry == "batch_norm"
        }
        self.steps = 0
        self.diverged = torch.full((len(self.own),), -1, dtype=torch.int64, device=device)

    def step(self, features: Mapping[str, Tensor], labels: Tensor, factor: float) -> Tensor:
        """One step of every head on features (B, D) of its readout and labels (B,) -> losses (h,) before the step."""
        inputs = self._entered(features, training=True)
        losses = torch.cat([group.step(inputs[group.readout], labels, factor) for group in self.groups])
        self.diverged = torch.where(~losses.isfinite() & (self.diverged < 0), self.steps, self.diverged)
        self.steps += 1
        return losses

    def logits(self, features: Mapping[str, Tensor]) -> Tensor:
        """Features (B, D) of every readout -> logits (B, h, C); a BatchNorm uses its running statistics."""
        inputs = self._entered(features, training=False)
        return torch.cat([group.logits(inputs[group.readout]) for group in self.groups], dim=1)

    def hits(self, features: Mapping[str, Tensor], labels: Tensor) -> Tensor:
        """Number of images that each head gets right (h,) int64."""
        inputs = self._entered(features, training=False)
        guesses = [group.logits(inputs[group.readout]).argmax(dim=2) for group in self.groups]
        return (torch.cat(guesses, dim=1) == labels[:, None]).sum(dim=0)

    def _entered(self, features: Mapping[str, Tensor], training: bool) -> Mapping[str, Tensor]:
        # BatchNorm has no parameters here, so heads on one readout share it.
        if self.recipe.entry != "batch_norm":
            return features
        return {
            readout: F.batch_norm(
                features[readout], mean, variance, training=training, momentum=RUNNING, eps=self.recipe.eps
            )
            for readout, (mean, variance) in self.running.items()
        }

    def alone(self, place: int) -> "Heads":
        """A copy of one of the own heads, without its momentum."""
        head = self.heads[place]
        tensors = self._group(place).head(place)
        width = len(tensors["parameter.weight"])
        copied = Heads([head], {head.readout: width}, self.classes, self.recipe, batch=1)
        copied.groups[0].parameters = {
            name.removeprefix(PARAMETER): value.clone() for name, value in tensors.items() if name.startswith(PARAMETER)
        }
        if self.running:
            copied.running = {head.readout: tuple(tensor.clone() for tensor in self.running[head.readout])}
        return copied

    def _group(self, place: int) -> HeadGroup:
        return next(group for group in self.groups if place in group.places)

    def state(self) -> State:
        """Every tensor that training changes, by head and name, not copied: the same however heads are divided."""
        tensors = {"steps": torch.tensor(self.steps)}
        for number, place in enumerate(self.own):
            tensors |= {f"{place}.{name}": value for name, value in self._group(place).head(place).items()}
            tensors[f"{place}.diverged"] = self.diverged[number]
        for readout, (mean, variance) in self.running.items():
            tensors |= {f"running.{readout}.mean": mean, f"running.{readout}.variance": variance}
        return tensors

    def load(self, state: State) -> None:
        """Load the `state` of heads of the same arguments, or of all processes' shares of them."""
        for name, value in self.state().items():
            value.copy_(state[name])
        self.steps = int(state["steps"])


def grouped(readouts: Sequence[str], largest: int, first: int = 0) -> list[range]:
    """Ranges of adjacent heads with the same readout: as few as possible of up to `largest` heads, nearly equal.

    first: place of the first of these heads among all.
    """
    groups, start = [], 0
    for end in range(1, len(readouts) + 1):
        if end == len(readouts) or readouts[end] != readouts[start]:
            pieces = -(-(end - start) // largest)
            cuts = [first + start + (end - start) * piece // pieces for piece in range(pieces + 1)]
            groups += [range(*pair) for pair in pairwise(cuts)]
            start = end
    return groups


def residuals(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (B, G, C), which may be overwritten, and labels (B,) -> softmax minus one-hot (B, G, C), mean losses (G,).

    The loss of an image is at most -log of the smallest normal number, 87 in float32.
    """
    chances = softmax(logits)
    places = labels[:, None, None].expand(-1, logits.shape[1], 1)
    true = chances.gather(2, places)
    losses = -true.clamp_min(torch.finfo(true.dtype).tiny).log().mean(dim=(0, 2))
    return chances.scatter_(2, places, true - 1), losses


def softmax(logits: Tensor) -> Tensor:
    """Softmax over the last dimension; `logits` may be overwritten."""
    if logits.shape[-1] >= MIN_CLASSES:
        # In place: a copy would raise a group with weights and momentum from 21 to 34 MB, more than a cache of 32.
        return torch.softmax(logits, dim=-1, out=logits)
    chances = logits.sub_(logits.amax(dim=-1, keepdim=True)).exp_()
    return chances.div_(chances.sum(dim=-1, keepdim=True))
