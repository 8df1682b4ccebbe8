"""Train a classifier end to end; go on after a kill at any step as if nothing had happened.

The state (weights, both moments of AdamW, the averaged weights, what was judged) is one file, replaced in one step.
Generators need no place in it: see engine/seeding.py. A batch is back-propagated in parts that fit the device, over as
many processes as there are, and always has the recipe's size.
"""

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from engine.distributed import World
from engine.files import locked, write_atomic
from engine.layer_decay import layer_groups
from engine.precision import autocast, fit_attention
from engine.progress import Progress
from engine.seeding import DROP, seeded
from engine.step_rates import StepRates
from probes.classifier import Classifier
from probes.training_groups import Group

SAVE_EVERY = 60.0  # seconds of work that a kill may cost,
SAVE_SHARE = 0.02  # or more, where saving would take more than this share of the time
LOGS = 5  # losses that a message about a divergence shows


@dataclass(frozen=True, kw_only=True)
class Course:
    """How a training goes. layer_decay, weight_decay: of engine/layer_decay.py. clip: norm of the gradient, 0 for any.

    average: decay of the averaged weights, 0 for none; with it, they are what is judged. judge_every: epochs; the last
    one is always judged. groups: those of each step that are this process's, of `group` images, `part` at once.
    """

    rates: StepRates
    layer_decay: float
    weight_decay: float
    clip: float
    average: float
    groups: range
    group: int
    part: int
    judge_every: int
    device: str
    precision: Literal["float32", "bfloat16"]
    seed: int
    path: Path


@dataclass(kw_only=True)
class Standing:
    """What training and judging have found so far. history: a JSON entry an epoch. arrays: by name.

    skipped: paths of unreadable images -> why, of those to train on ("train"), with those held out, and of "val".
    """

    history: list[dict[str, Any]] = field(default_factory=list)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    skipped: dict[str, dict[str, str]] = field(default_factory=lambda: {"train": {}, "val": {}})


class Training:
    """A training under way. step: updates done."""

    def __init__(self, classifier: Classifier, course: Course, world: World) -> None:
        self.classifier, self.course, self.world = classifier.to(course.device), course, world
        fit_attention(self.classifier, course.device, course.precision)
        parameters, depth = self.classifier.timm_parameters(), classifier.vit.spec.depth
        groups = layer_groups(parameters, depth, course.layer_decay, course.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=course.rates.lr, fused=True)
        self.averaged = self._averaged() if course.average else None
        self.network: nn.Module = self.classifier
        if world.size > 1:
            # No module has buffers that change, so none need be sent.
            self.network = DistributedDataParallel(self.classifier, broadcast_buffers=False)
        self.step = 0
        self.standing = Standing()
        self.losses: deque[float] = deque(maxlen=LOGS)

    def autocast(self) -> AbstractContextManager[Any]:
        return autocast(self.course.device, self.course.precision)

    def _averaged(self) -> nn.Module:
        from timm.utils import ModelEmaV3

        return ModelEmaV3(self.classifier, decay=self.course.average)

    @property
    def judged(self) -> Classifier:
        """The network whose accuracy counts."""
        return self.averaged.module if self.averaged is not None else self.classifier

    @property
    def epoch(self) -> int:
        """Epochs that are over."""
        return self.step // self.course.rates.steps_per_epoch

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait while another run does the same training, then keep others from it for the length of a block."""
        lock = locked(self.course.path.with_suffix(".lock"), "it does the same training")
        with ExitStack() as held:
            self.world.first(lambda: held.enter_context(lock))
            yield

    def resume(self) -> None:
        """Go on from the saved state, where there is one."""
        if self.world.gather_objects(self.course.path.exists())[0]:
            self.load()

    def run(self, batches: Iterator[Group], judge: Callable[["Training"], None], label: str) -> None:
        """Train to the end. `batches`: this process's groups, from `step` on. `judge` may write to `standing`.

        Raises ValueError for a loss that is not finite, and what reading images raises; the last state stays.
        """
        rates, saved, cost = self.course.rates, time.monotonic(), 0.0
        self.network.train()
        with Progress(label, rates.steps, "steps", quiet=not self.world.is_first) as progress:
            progress.resume(self.step)
            while self.step < rates.steps:
                self.update(batches)
                self.step += 1
                if self.is_due():
                    self.network.eval()
                    judge(self)
                    self.network.train()
                if time.monotonic() - saved >= max(SAVE_EVERY, cost / SAVE_SHARE) or self.step == rates.steps:
                    started = time.monotonic()
                    self.save()
                    saved = time.monotonic()
                    cost = saved - started
                progress.advance(1)

    def is_due(self) -> bool:
        """Whether an epoch is over that is to be judged."""
        rates, (epoch, within) = self.course.rates, divmod(self.step, self.course.rates.steps_per_epoch)
        return within == 0 and (epoch % self.course.judge_every == 0 or epoch == rates.epochs)

    def update(self, batches: Iterator[Group]) -> None:
        """One step of the optimiser on one batch of the recipe's size."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.course.rates.at(self.step, group["lr_scale"])
        self.optimizer.zero_grad(set_to_none=True)
        last: list[Tensor] = []
        # What can fail in one process alone comes before the first exchange between them: the last part's backward.
        shares = self.world.together(lambda: self.forward_backward(batches, last))
        for share in shares:
            self.standing.skipped["train"] |= share.unreadable
        self.check(fmean(share.loss for share in shares))
        last[0].backward()
        if self.course.clip:
            nn.utils.clip_grad_norm_(self.classifier.parameters(), self.course.clip)
        self.optimizer.step()
        if self.averaged is not None:
            self.averaged.update(self.classifier)

    def forward_backward(self, batches: Iterator[Group], last: list[Tensor]) -> "Share":
        """This process's share of a step. The last part's loss goes to `last`, still to be propagated back."""
        count = len(self.course.groups) * self.course.group // self.course.part
        total, unreadable = torch.zeros((), device=self.course.device), {}
        for number, (images, targets, place) in enumerate(self.parts(batches, unreadable), start=1):
            is_last = number == count
            with nullcontext() if is_last or self.world.size == 1 else self.network.no_sync():
                loss = self.loss(images, targets, place) / count
                total += loss.detach()
                if is_last:
                    last.append(loss)
                else:
                    loss.backward()
        return Share(total.item(), unreadable)

    def parts(
        self, batches: Iterator[Group], unreadable: dict[str, str]
    ) -> Iterator[tuple[Tensor, Tensor, tuple[int, int]]]:
        """Images and targets of this step on the device, a part at a time, with its place: group and first image."""
        for number in self.course.groups:
            group = next(batches)
            unreadable |= group.unreadable
            for first in range(0, len(group.images), self.course.part):
                chosen = slice(first, first + self.course.part)
                images, targets = (t[chosen].to(self.course.device, non_blocking=True) for t in group[:2])
                yield images, targets, (number, first)

    def loss(self, images: Tensor, targets: Tensor, place: tuple[int, int]) -> Tensor:
        """Cross-entropy with target probabilities, its drop path drawn for this place in the training."""
        with seeded(DROP, self.course.seed, self.step, *place, device=self.course.device), self.autocast():
            logits = self.network(images)
        return F.cross_entropy(logits.float(), targets)

    def check(self, loss: float) -> None:
        """ValueError for a loss that is not finite."""
        if not math.isfinite(loss):
            rates, before = self.course.rates, ", ".join(f"{value:.4g}" for value in self.losses) or "none"
            raise ValueError(
                f"the loss is {loss} in step {self.step} of {rates.steps} (epoch "
                f"{self.step / rates.steps_per_epoch:.2f}, rate {rates.at(self.step):.3g}, losses before: {before}); "
                "lower lr, or use float32 if this was bfloat16"
            )
        self.losses.append(loss)

    def save(self) -> None:
        """Replace the state on disk; once the training is over, by what judging found alone."""
        over = self.step == self.course.rates.steps
        if not self.world.is_first or not (over or self.is_finite()):
            return
        tensors = {} if over else self.state()
        tensors |= {f"standing.{name}": torch.tensor(array) for name, array in self.standing.arrays.items()}
        facts = {
            "step": self.step,
            "losses": list(self.losses),
            "history": self.standing.history,
            "skipped": self.standing.skipped,
        }
        tensors = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        write_atomic(self.course.path, save(tensors, metadata={"facts": json.dumps(facts)}))

    def is_finite(self) -> bool:
        """Whether the weights are worth keeping; a broken gradient shows in the next step's loss only."""
        return all(bool(parameter.isfinite().all()) for parameter in self.classifier.parameters())

    def state(self) -> dict[str, Tensor]:
        """Everything that the next step depends on."""
        found = {f"network.{name}": tensor for name, tensor in self.classifier.state_dict().items()}
        if self.averaged is not None:
            found |= {f"averaged.{name}": tensor for name, tensor in self.averaged.module.state_dict().items()}
        for place, moments in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{place}.{name}": tensor for name, tensor in moments.items()}
        return found

    def load(self) -> None:
        """Take up the state on disk."""
        with safe_open(self.course.path, "pt") as file:
            facts = json.loads(file.metadata()["facts"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        self.step = facts["step"]
        self.losses.extend(facts["losses"])
        self.standing.history = facts["history"]
        self.standing.skipped = facts["skipped"]
        self.standing.arrays = {name: tensor.numpy() for name, tensor in part(tensors, "standing.").items()}
        if self.step == self.course.rates.steps:
            return
        self.classifier.load_state_dict(part(tensors, "network."))
        if self.averaged is not None:
            self.averaged.module.load_state_dict(part(tensors, "averaged."))
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in part(tensors, "optimizer.").items():
            place, _, kind = name.partition(".")
            moments.setdefault(int(place), {})[kind] = tensor
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": moments})


class Share(NamedTuple):
    """What a process did of a step: its mean loss, and path -> why of the images it could not read."""

    loss: float
    unreadable: dict[str, str]


def part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, under the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
