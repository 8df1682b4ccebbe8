"""How are many linear classifiers trained at once? In groups, with the same results as one by one.

The weights of heads on the same features lie side by side, so that one matrix product computes a group of heads. A
group is so small that its logits fit the CPU's cache: one product for all heads would be slower than a loop over
groups. The gradient of the cross-entropy is written out, and the product that computes it adds it to SGD's momentum.

B images of a batch, D width, C classes, G heads of a group, H heads in all, h of them in this process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.optimisers import adapted
from engine.settings import BelowOne, PositiveFloat, ReadIf, Validated
from engine.training.schedules import Schedule

Optimizer = Literal["sgd", "lars", "msn", "adamw"]
Entry = Literal["plain", "batch_norm", "layer_norm"]
State = dict[str, Tensor]

LR_BATCH = 256  # batch that learning rates are stated for, in every source
MAX_LOGIT_BYTES = 12 << 20  # of a group: 3 heads of 1000 classes at batch 1024, the fastest of 1, 3 and 45 heads
MIN_SOFTMAX_CLASSES = 64  # with fewer classes torch.softmax is 10 times slower than its single steps
INIT_STD = 0.01  # of initial weights in every source; MAE truncates at 2, which is 200 standard deviations away
BETAS, ADAM_EPS = (0.9, 0.999), 1e-8  # of torch.optim.AdamW
PARAMETER = "parameter."  # prefix of the parameters among a head's tensors; those of its optimiser begin with "buffer."
BATCH_NORM_MOMENTUM = 0.1  # of BatchNorm's running statistics: torch's default, which the sources keep


@dataclass(frozen=True, kw_only=True)
class Head:
    """One linear classifier."""

    readout: str  # name of the features that it reads
    lr: float  # peak, already scaled to the batch
    weight_decay: float = 0.0
    schedule: Schedule | None = None  # of the learning rate, if not the sweep's; for attentive heads only
    decay: Schedule | None = None  # of the weight decay, if not constant; for attentive heads only


@dataclass(frozen=True, kw_only=True)
class HeadSettings(Validated):
    """Settings that all heads share."""

    optimizer: Optimizer = "sgd"  # sgd with momentum, LARS, MSN's own SGD, or AdamW
    momentum: Annotated[BelowOne, ReadIf("optimizer", "sgd", "lars", "msn")] = 0.9  # momentum of the optimizer
    entry: Entry = "plain"  # norm before a head: none, batch norm without parameters, or MSN's trained layer norm
    eps: Annotated[PositiveFloat, ReadIf("entry", "batch_norm", "layer_norm")] = 1e-5  # eps of the norm before a head


class HeadGroup:
    """G heads on one readout, with their weights (D, G*C) and biases (G*C,) side by side."""

    def __init__(self, heads: Sequence[Head], indices: range, weight: Tensor, settings: HeadSettings) -> None:
        """indices: of these heads among all H. weight: (D, G*C) initial weights; biases begin at 0."""
        self.indices, self.settings, self.readout = indices, settings, heads[0].readout
        self.size, self.classes = len(heads), weight.shape[1] // len(heads)
        self.parameters = {"weight": weight, "bias": weight.new_zeros(weight.shape[1])}
        self.add_parameters()
        self.buffers = {name: torch.zeros_like(value) for name, value in self.parameters.items()}
        self.lr = self._per_column([head.lr for head in heads])
        self.weight_decay = self._per_column([head.weight_decay for head in heads])
        self.has_weight_decay = any(head.weight_decay for head in heads)

    def add_parameters(self) -> None:
        """Hook for subclasses: add parameters other than weight and bias."""

    def logits(self, inputs: Tensor) -> Tensor:
        """(B, D) -> (B, G, C)."""
        return torch.addmm(self.parameters["bias"], inputs, self.parameters["weight"]).view(-1, self.size, self.classes)

    def step(self, inputs: Tensor, labels: Tensor, factor: float) -> Tensor:
        """One step on inputs (B, D), labels (B,) at `factor` times each head's rate -> losses (G,) before the step."""
        errors, losses = residuals(self.logits(inputs), labels)
        if self.settings.optimizer == "sgd":
            self._update_sgd_buffers(inputs, errors.flatten(1))
        else:
            self._update_lars_buffers(inputs, errors.flatten(1))
        for name, buffer in self.buffers.items():
            self.parameters[name].addcmul_(buffer, self.lr, value=-factor)
        return losses

    def _update_sgd_buffers(self, inputs: Tensor, errors: Tensor) -> None:
        """torch.optim.SGD: mu <- momentum mu + g + wd p, biases included. errors: (B, G*C)."""
        share, momentum = 1 / len(inputs), self.settings.momentum
        self.buffers["weight"].addmm_(inputs.T, errors, beta=momentum, alpha=share)
        self.buffers["bias"].mul_(momentum).add_(errors.sum(dim=0), alpha=share)
        for name, buffer in self.buffers.items() if self.has_weight_decay else ():
            buffer.addcmul_(self.parameters[name], self.weight_decay)

    def _update_lars_buffers(self, inputs: Tensor, errors: Tensor) -> None:
        """LARS as in MAE util/lars.py:31-45: biases are neither decayed nor scaled. errors: (B, G*C)."""
        per_head = (-1, self.size, self.classes)
        gradient = (inputs.T @ errors).div_(len(inputs)).view(per_head)
        decay = self.weight_decay.view(per_head)
        direction = adapted(gradient, self.parameters["weight"].view(per_head), decay, heads=1)
        self.buffers["weight"].mul_(self.settings.momentum).add_(direction.flatten(1))
        self.buffers["bias"].mul_(self.settings.momentum).add_(errors.sum(dim=0), alpha=1 / len(inputs))

    def _per_column(self, values: Sequence[float]) -> Tensor:
        """One value per head -> (G*C,)."""
        return self.parameters["weight"].new_tensor(values).repeat_interleave(self.classes)

    def head_tensors(self, index: int) -> State:
        """One head's parameters and buffers, as views of the group's: `parameter.NAME` and `buffer.NAME`."""
        number = self.indices.index(index)
        columns = slice(number * self.classes, (number + 1) * self.classes)
        return {name: value[..., columns] for name, value in self.tensors().items()}

    def tensors(self) -> State:
        """Everything that training changes of the group, named as in `head_tensors`."""
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
        """The head's inputs: vectors of unit length (B, D), their lengths before (B, 1), and the LayerNorm's output
        before gain and shift (B, D)."""
        normed = F.layer_norm(inputs, inputs.shape[1:], eps=self.settings.eps)
        scaled = torch.addcmul(self.parameters["shift"], normed, self.parameters["gain"])
        lengths = torch.linalg.vector_norm(scaled, dim=1, keepdim=True).clamp_min(1e-12)
        return scaled / lengths, lengths, normed

    def step(self, inputs: Tensor, labels: Tensor, factor: float) -> Tensor:
        unit, lengths, normed = self._unit(inputs)
        errors, losses = residuals(super().logits(unit), labels)
        errors = errors.flatten(1) / len(inputs)
        unit_gradient = errors @ self.parameters["weight"].T
        # Backward through the division by the length.
        scaled_gradient = (unit_gradient - unit * (unit_gradient * unit).sum(dim=1, keepdim=True)) / lengths
        gradients = {
            "weight": torch.addcmul(unit.T @ errors, self.parameters["weight"], self.weight_decay),
            "bias": errors.sum(dim=0),
            "gain": (scaled_gradient * normed).sum(dim=0),
            "shift": scaled_gradient.sum(dim=0),
        }
        rate, momentum = factor * float(self.lr[0]), self.settings.momentum
        for name, gradient in gradients.items():
            self.buffers[name].mul_(momentum).sub_(gradient, alpha=rate)
            self.parameters[name].sub_(gradient, alpha=rate).add_(self.buffers[name], alpha=momentum)
        return losses

    def head_tensors(self, index: int) -> State:
        return self.tensors()


class AdamGroup(HeadGroup):
    """Heads trained by torch.optim.AdamW with its defaults; biases decay too (BEiT run_linear_eval.py:135-138)."""

    def __init__(self, heads: Sequence[Head], indices: range, weight: Tensor, settings: HeadSettings) -> None:
        super().__init__(heads, indices, weight, settings)
        self.buffers |= {f"{name}_square": torch.zeros_like(value) for name, value in self.parameters.items()}
        self.buffers["updates"] = torch.zeros_like(self.lr)

    def step(self, inputs: Tensor, labels: Tensor, factor: float) -> Tensor:
        errors, losses = residuals(self.logits(inputs), labels)
        errors = errors.flatten(1) / len(inputs)
        updates, rate = self.buffers["updates"].add_(1), factor * self.lr
        for name, gradient in (("weight", inputs.T @ errors), ("bias", errors.sum(dim=0))):
            mean = self.buffers[name].lerp_(gradient, 1 - BETAS[0])
            square = self.buffers[f"{name}_square"].lerp_(gradient.square_(), 1 - BETAS[1])
            root_mean_square = (square / (1 - BETAS[1] ** updates)).sqrt_().add_(ADAM_EPS)
            step = mean / (1 - BETAS[0] ** updates) / root_mean_square
            self.parameters[name].mul_(1 - rate * self.weight_decay).sub_(step.mul_(rate))
        return losses


class Heads:
    """H heads in groups, of which this process trains h.

    A head's initial weights do not depend on which process trains it. Memory: weights and momentum of the own heads, 8
    D C bytes each in float32 (45 heads of 1000 classes on 1536 numbers: 553 MB), and the logits of one group.

    Attributes:
        own: Indices of the heads that this process trains.
        diverged: (h,) first step with a loss that was not finite; -1: none.
        readouts: Names of the features that the own heads read.
    """

    def __init__(
        self,
        heads: Sequence[Head],
        widths: Mapping[str, int],
        classes: int,
        settings: HeadSettings,
        *,
        batch: int,
        seed: int = 0,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        own: range | None = None,
    ) -> None:
        """widths: readout -> D. batch: images of a step, which decides the size of groups. own: all heads if None."""
        self.heads, self.settings, self.classes = tuple(heads), settings, classes
        self.own = range(len(heads)) if own is None else own
        generator = torch.Generator().manual_seed(seed)
        initial_weights: dict[int, Tensor] = {}
        for index, head in enumerate(heads[: self.own.stop] if self.own else ()):
            weight = torch.randn(classes, widths[head.readout], generator=generator, dtype=dtype)
            if index in self.own:
                initial_weights[index] = weight.mul_(INIT_STD).to(device)
        group_class = {"msn": NormedGroup, "adamw": AdamGroup}.get(settings.optimizer, HeadGroup)
        readouts = [heads[index].readout for index in self.own]
        fitting_heads = max(1, MAX_LOGIT_BYTES // (batch * classes * dtype.itemsize))
        max_heads = 1 if settings.entry == "layer_norm" else fitting_heads
        self.groups = [
            group_class(
                [heads[index] for index in indices],
                indices,
                torch.cat([initial_weights[index] for index in indices]).T.contiguous(),
                settings,
            )
            for indices in group_heads(readouts, max_heads, self.own.start)
        ]
        self.readouts = tuple(dict.fromkeys(readouts))
        self.running_statistics = {  # readout -> mean and variance (D,)
            readout: (
                torch.zeros(widths[readout], device=device, dtype=dtype),
                torch.ones(widths[readout], device=device, dtype=dtype),
            )
            for readout in self.readouts
            if settings.entry == "batch_norm"
        }
        self.steps = 0
        self.diverged = torch.full((len(self.own),), -1, dtype=torch.int64, device=device)

    def step(self, features: Mapping[str, Tensor], labels: Tensor, factor: float) -> Tensor:
        """One step of every head on features (B, D) of its readout and labels (B,) -> losses (h,) before the step."""
        inputs = self._normalized(features, training=True)
        losses = torch.cat([group.step(inputs[group.readout], labels, factor) for group in self.groups])
        self.diverged = torch.where(~losses.isfinite() & (self.diverged < 0), self.steps, self.diverged)
        self.steps += 1
        return losses

    def logits(self, features: Mapping[str, Tensor]) -> Tensor:
        """Features (B, D) of every readout -> logits (B, h, C); a BatchNorm uses its running statistics."""
        inputs = self._normalized(features, training=False)
        return torch.cat([group.logits(inputs[group.readout]) for group in self.groups], dim=1)

    def hits(self, features: Mapping[str, Tensor], labels: Tensor) -> Tensor:
        """For each own head, how many images it classifies correctly (h,) int64."""
        inputs = self._normalized(features, training=False)
        predictions = [group.logits(inputs[group.readout]).argmax(dim=2) for group in self.groups]
        return (torch.cat(predictions, dim=1) == labels[:, None]).sum(dim=0)

    def _normalized(self, features: Mapping[str, Tensor], training: bool) -> Mapping[str, Tensor]:
        """Features (B, D) of every readout after the BatchNorm, if any; it has no parameters, so heads share it."""
        if self.settings.entry != "batch_norm":
            return features
        return {
            readout: F.batch_norm(
                features[readout],
                mean,
                variance,
                training=training,
                momentum=BATCH_NORM_MOMENTUM,
                eps=self.settings.eps,
            )
            for readout, (mean, variance) in self.running_statistics.items()
        }

    def copy_head(self, index: int) -> "Heads":
        """A copy of one of the own heads, without its momentum."""
        head = self.heads[index]
        tensors = self._head_tensors(index)
        width = len(tensors["parameter.weight"])
        copy = Heads([head], {head.readout: width}, self.classes, self.settings, batch=1)
        copy.groups[0].parameters = {
            name.removeprefix(PARAMETER): value.clone() for name, value in tensors.items() if name.startswith(PARAMETER)
        }
        if self.running_statistics:
            mean, variance = self.running_statistics[head.readout]
            copy.running_statistics = {head.readout: (mean.clone(), variance.clone())}
        return copy

    @property
    def weights(self) -> State:
        """What a copy of one head computes with: weight (D, C), bias (C,), and those of its norm (D,)."""
        statistics = next(iter(self.running_statistics.values()), ())
        return self.groups[0].parameters | dict(zip(("mean", "variance"), statistics, strict=False))

    def _head_tensors(self, index: int) -> State:
        group = next(group for group in self.groups if index in group.indices)
        return group.head_tensors(index)

    def state(self) -> State:
        """Every tensor that training changes, as views named by head: those of all processes together are one state."""
        tensors = {"steps": torch.tensor(self.steps)}
        for number, index in enumerate(self.own):
            tensors |= {f"{index}.{name}": value for name, value in self._head_tensors(index).items()}
            tensors[f"{index}.diverged"] = self.diverged[number]
        for readout, (mean, variance) in self.running_statistics.items():
            tensors |= {f"running.{readout}.mean": mean, f"running.{readout}.variance": variance}
        return tensors

    def load(self, state: State) -> None:
        """Load the own heads' tensors from a `state`, of this process or of all together."""
        for name, value in self.state().items():
            value.copy_(state[name])
        self.steps = int(state["steps"])


def group_heads(readouts: Sequence[str], max_heads: int, first: int = 0) -> list[range]:
    """Divide heads into as few groups of nearly equal size as possible: up to `max_heads` neighbours on one readout.

    readouts: of each head. first: index of the first head. Returns the indices of each group's heads.
    """
    groups, start = [], 0
    for end in range(1, len(readouts) + 1):
        if end == len(readouts) or readouts[end] != readouts[start]:
            heads = end - start
            count = -(-heads // max_heads)
            bounds = [first + start + heads * number // count for number in range(count + 1)]
            groups += [range(*pair) for pair in pairwise(bounds)]
            start = end
    return groups


def residuals(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (B, G, C), which may be overwritten, and labels (B,) -> softmax minus one-hot (B, G, C), mean losses (G,).

    The loss of an image is at most -log of the smallest normal number, which is 87 in float32.
    """
    probabilities = softmax(logits)
    label_indices = labels[:, None, None].expand(-1, logits.shape[1], 1)
    label_probabilities = probabilities.gather(2, label_indices)
    tiny = torch.finfo(label_probabilities.dtype).tiny
    losses = -label_probabilities.clamp_min(tiny).log().mean(dim=(0, 2))
    return probabilities.scatter_(2, label_indices, label_probabilities - 1), losses


def softmax(logits: Tensor) -> Tensor:
    """Softmax over the last dimension; `logits` may be overwritten."""
    if logits.shape[-1] >= MIN_SOFTMAX_CLASSES:
        # In place: a copy would raise a group with weights and momentum from 21 to 34 MB, more than a cache of 32.
        return torch.softmax(logits, dim=-1, out=logits)
    probabilities = logits.sub_(logits.amax(dim=-1, keepdim=True)).exp_()
    return probabilities.div_(probabilities.sum(dim=-1, keepdim=True))
