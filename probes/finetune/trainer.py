"""How is a classifier trained end to end? A training can be resumed at any step with the same bits.

A state holds the weights, both moments of AdamW, the averaged weights, the weights of the epoch to report, and the
results of evaluations (engine/training/states.py). Processes share each batch, and each share is split into
micro-batches that fit the device, so a batch always has the recipe's size.

m images of a micro-batch, S side in pixels, C classes.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from engine.files import locked
from engine.optimisers import layer_groups
from engine.precision import autocast, compile_blocks, fit_attention
from engine.progress import Progress
from engine.seeding import DROP, seeded
from engine.tasks import Workspace
from engine.training.interruptions import Stopped, StopRequest, Timer, listening
from engine.training.schedules import MAX_SHOWN_LOSSES, TrainProgress, check_finite
from engine.training.states import (
    KEPT_STATES,
    State,
    load_optimizer,
    load_state,
    newest_intact,
    optimizer_tensors,
    save_state,
)
from probes.finetune.classifier import Classifier
from probes.finetune.settings import FinetuneSettings
from probes.finetune.training_groups import GroupPlan, MixedGroup

SAVE_EVERY = 60.0  # seconds of work that a kill may cost; more if saving is slow


class Training:
    """The training of a classifier.

    Attributes:
        groups: The groups of each step that this process computes.
        step: Updates done.
        evaluated_at: Updates done at the last evaluation.
        history: JSON values of each evaluated epoch.
        arrays: Results on the validation images of the best and the last epoch, by name.
        skipped: Path of each unreadable image -> reason; "train": images to train on and held-out ones, "val".
        reported: Weights of the epoch to report on the CPU, once it is known.
        request: Whether this process was asked to stop.
        stop_requested: Whether any process was asked to stop; the same in all of them.
    """

    def __init__(
        self,
        classifier: Classifier,
        settings: FinetuneSettings,
        space: Workspace,
        *,
        plan: GroupPlan,
        micro_batch_size: int,
        folder: Path,
    ) -> None:
        """plan: steps and groups of images. micro_batch_size: images of a forward pass. folder: of the states."""
        self.settings, self.space, self.world = settings, space, space.world
        self.plan, self.micro_batch_size, self.folder = plan, micro_batch_size, folder
        share = plan.groups // self.world.size
        self.groups = range(self.world.rank * share, (self.world.rank + 1) * share)
        self.classifier = classifier.to(self.space.device)
        fit_attention(self.classifier, self.space.device, self.space.precision)
        if self.space.compiled:
            compile_blocks(self.classifier, self.space.device)
        parameters, depth = self.classifier.timm_parameters(), classifier.vit.spec.depth
        groups = layer_groups(parameters, depth, settings.layer_decay, settings.weight_decay, settings.decay_tokens)
        self.optimizer, self.schedule = torch.optim.AdamW(groups, lr=settings.peak, fused=True), settings.rates()
        self.ema: nn.Module | None = None
        if settings.average:
            from timm.utils import ModelEmaV3

            self.ema = ModelEmaV3(self.classifier, decay=settings.average)
        self.network: nn.Module = self.classifier
        if self.world.size > 1:
            # No module has buffers that change, so they need not be broadcast.
            self.network = DistributedDataParallel(self.classifier, broadcast_buffers=False)
        self.step, self.evaluated_at = 0, 0
        self.request, self.stop_requested = StopRequest(), False
        self.history: list[dict[str, Any]] = []
        self.arrays: dict[str, np.ndarray] = {}
        self.skipped: dict[str, dict[str, str]] = {"train": {}, "val": {}}
        self.reported: dict[str, Tensor] = {}
        self.losses: deque[float] = deque(maxlen=MAX_SHOWN_LOSSES)

    def autocast(self) -> AbstractContextManager[Any]:
        return autocast(self.space.device, self.space.precision)

    @property
    def evaluated_network(self) -> Classifier:
        """The network that is evaluated: the one with averaged weights, if there is one."""
        return self.ema.module if self.ema is not None else self.classifier

    @property
    def progress(self) -> TrainProgress:
        """Updates done, for schedules."""
        return TrainProgress(step=self.step, steps_per_epoch=self.plan.steps_per_epoch, epochs=self.settings.epochs)

    @property
    def steps(self) -> int:
        """Updates of the whole training."""
        return self.progress.steps

    @property
    def epoch(self) -> int:
        """Epochs done."""
        return self.progress.epoch

    def lock(self) -> AbstractContextManager[None]:
        """Lock this training in a `with` block; waits while another run has it."""
        return self.world.held_by_rank0(locked(self.folder.with_suffix(".lock"), "it does the same training"))

    def resume(self, needs_weights: bool = False) -> None:
        """Load the newest state, if there is one.

        needs_weights: train again if the training has ended in an earlier version, which did not keep the weights.
        """

        def newest() -> Path | None:
            path = newest_intact(self.folder)
            if path and needs_weights:
                state = load_state(path)
                if state.facts.get("judged", state.facts["step"]) == self.steps and not state.under("reported."):
                    path.unlink()
                    return None
            return path

        if (path := self.world.on_rank0(newest)) is not None:
            self.world.on_all_ranks(lambda: self.load(path))

    def run(self, batches: Iterator[MixedGroup], evaluate: Callable[["Training"], None], label: str) -> None:
        """Train to the end.

        Args:
            batches: Groups of this process, from `step` on.
            evaluate: Called with this training after an epoch; records its results.
            label: Name of the training for messages.

        Raises:
            ValueError: For a loss that is not finite, and whatever reading images raises. The last state stays on disk.
            Stopped: In all processes after the same step, when one of them was asked to stop.
        """
        steps, save_timer = self.steps, Timer(SAVE_EVERY)
        progress = Progress(label, steps, "steps")
        self.network.train()
        with listening(self.request.ask), progress:
            progress.resume(self.step)
            while self.evaluated_at < steps:
                if self.evaluation_is_due():
                    self.run_evaluation(evaluate)
                else:
                    self.update(batches)
                    self.step += 1
                    progress.advance(1)
                if self.stop_requested or save_timer.is_due() or self.evaluated_at == steps:
                    with save_timer:
                        self.save()
                if self.stop_requested:
                    raise Stopped.after(self.step, steps, label, self.folder)

    def evaluation_is_due(self) -> bool:
        """Whether an epoch has just ended that is to be evaluated and was not evaluated yet."""
        epoch, step_in_epoch = divmod(self.step, self.plan.steps_per_epoch)
        is_chosen = epoch % self.settings.judge_every == 0 or epoch == self.settings.epochs
        return self.evaluated_at < self.step and step_in_epoch == 0 and is_chosen

    def run_evaluation(self, evaluate: Callable[["Training"], None]) -> None:
        """Evaluate the current weights, and exchange requests to stop."""
        self.network.eval()
        evaluate(self)
        self.network.train()
        self.evaluated_at = self.step
        self.stop_requested = any(self.world.gather_objects(self.request.asked))

    def update(self, batches: Iterator[MixedGroup]) -> None:
        """One step of the optimizer, on one batch of the recipe's size."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(group["lr_scale"])
        self.optimizer.zero_grad(set_to_none=True)
        last_loss: list[Tensor] = []
        # The last backward pass averages gradients over processes. All that may fail in one process comes before it.
        shares = self.world.gather_results(lambda: self.forward_backward(batches, last_loss))
        for share in shares:
            self.skipped["train"] |= share.unreadable
        loss = fmean(share.loss for share in shares)
        self.check("loss", loss)
        last_loss[0].backward()
        norm = nn.utils.clip_grad_norm_(self.classifier.parameters(), self.settings.clip or math.inf)
        self.check("gradient norm", norm.item())
        self.losses.append(loss)
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update(self.classifier)
        self.stop_requested = any(share.stop_requested for share in shares)

    def rate(self, scale: float = 1.0) -> float:
        """Learning rate of this update. scale: factor of a layer."""
        return self.schedule.at(self.settings.peak, self.progress, scale)

    def forward_backward(self, batches: Iterator[MixedGroup], last_loss: list[Tensor]) -> "StepShare":
        """This process's share of a step. Appends the loss of the last micro-batch to `last_loss`, and leaves its
        backward pass to the caller."""
        count = len(self.groups) * self.plan.group // self.micro_batch_size
        total = torch.zeros((), device=self.space.device)
        unreadable: dict[str, str] = {}
        for number, (images, targets, position) in enumerate(self.micro_batches(batches, unreadable), start=1):
            is_last = number == count
            with nullcontext() if is_last or self.world.size == 1 else self.network.no_sync():
                loss = self.loss(images, targets, position) / count
                total += loss.detach()
                if is_last:
                    last_loss.append(loss)
                else:
                    loss.backward()
        return StepShare(total.item(), unreadable, self.request.asked)

    def micro_batches(
        self, batches: Iterator[MixedGroup], unreadable: dict[str, str]
    ) -> Iterator[tuple[Tensor, Tensor, tuple[int, int]]]:
        """This step's micro-batches on the device: images (m, 3, S, S), targets (m, C), (group, first image in it).

        Adds the unreadable images to `unreadable`.
        """
        for number in self.groups:
            group = next(batches)
            unreadable |= group.unreadable
            for first in range(0, len(group.images), self.micro_batch_size):
                rows = slice(first, first + self.micro_batch_size)
                images = group.images[rows].to(self.space.device, non_blocking=True)
                targets = group.targets[rows].to(self.space.device, non_blocking=True)
                yield images, targets, (number, first)

    def loss(self, images: Tensor, targets: Tensor, position: tuple[int, int]) -> Tensor:
        """Mean cross-entropy of images (m, 3, S, S) with target probabilities (m, C).

        position: group and first image of the micro-batch; seeds drop path, together with the step.
        """
        with seeded(DROP, self.space.seed, self.step, *position, device=self.space.device), self.autocast():
            logits = self.network(images)
        return F.cross_entropy(logits.float(), targets)

    def check(self, what: str, value: float) -> None:
        """ValueError if the loss or the norm of the gradient is not finite."""
        progress = self.progress
        where = f"step {self.step} of {progress.steps} (epoch {progress.time:.2f}, learning rate {self.rate():.3g})"
        check_finite(value, what, where, self.losses, "lower lr, or use float32 if this was bfloat16")

    def save(self) -> None:
        """Save the state in rank 0; at the end of the training, only the reported weights and results of
        evaluations."""
        is_finished = self.evaluated_at == self.steps
        if not self.world.is_rank0:
            return
        tensors = {} if is_finished else self.state()
        tensors |= {f"reported.{name}": tensor for name, tensor in self.reported.items()}
        tensors |= {f"train_state.{name}": torch.tensor(array) for name, array in self.arrays.items()}
        facts = {
            "step": self.step,
            "judged": self.evaluated_at,
            "losses": list(self.losses),
            "history": self.history,
            "skipped": self.skipped,
        }
        save_state(self.folder, self.step, State(tensors=tensors, facts=facts), kept=1 if is_finished else KEPT_STATES)

    def state(self) -> dict[str, Tensor]:
        """Everything that the next step depends on."""
        tensors = {f"network.{name}": tensor for name, tensor in self.classifier.state_dict().items()}
        if self.ema is not None:
            tensors |= {f"averaged.{name}": tensor for name, tensor in self.ema.module.state_dict().items()}
        return tensors | optimizer_tensors(self.optimizer)

    def load(self, path: Path) -> None:
        """Resume from a state."""
        state = load_state(path)
        facts = state.facts
        self.step = facts["step"]
        self.evaluated_at = facts.get("judged", self.step)  # absent in states of versions that did not handle signals
        self.losses.extend(facts["losses"])
        self.history = facts["history"]
        self.skipped = facts["skipped"]
        self.arrays = {name: tensor.numpy() for name, tensor in state.under("train_state.").items()}
        self.reported = state.under("reported.")
        if self.evaluated_at == self.steps:
            return
        self.classifier.load_state_dict(state.under("network."))
        if self.ema is not None:
            self.ema.module.load_state_dict(state.under("averaged."))
        load_optimizer(self.optimizer, state)


class StepShare(NamedTuple):
    """What one process computed of a step."""

    loss: float  # mean over its images
    unreadable: dict[str, str]  # path -> reason
    stop_requested: bool  # whether this process was asked to stop
