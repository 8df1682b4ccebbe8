"""Train a classifier end to end, resumable at any step with the same bits.

A state holds the weights, both moments of AdamW, the averaged weights, those of the epoch to report and the
evaluations' results (engine/training/states.py). Processes share each batch, and each share is split into micro-batches
that fit the device, so that a batch always has the recipe's size.
"""

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
from engine.training.schedules import SHOWN, TrainProgress, check_finite
from engine.training.states import (
    KEPT,
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

SAVE_EVERY = 60.0  # seconds of work that a kill may cost; more where saving is slow


class Training:
    """A training of a classifier.

    plan: how images make up steps and groups. groups: those of each step that this process works on. micro_batch_size:
    images in a forward pass. folder: of the training states. step: updates done. evaluated_at: updates before the last
    evaluation. history: a JSON entry for each evaluated epoch. arrays: by name, what the best and the last epoch got
    right. skipped: paths of unreadable images -> reason, of those to train on and held-out ones ("train") and of "val".
    reported: weights of the epoch to report, once it is known, on the CPU. request: of this process to stop;
    is_leaving: whether any process has been asked to stop, the same in all.
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
        self.averaged: nn.Module | None = None
        if settings.average:
            from timm.utils import ModelEmaV3

            self.averaged = ModelEmaV3(self.classifier, decay=settings.average)
        self.network: nn.Module = self.classifier
        if self.world.size > 1:
            # No module has buffers that change, so none need to be sent.
            self.network = DistributedDataParallel(self.classifier, broadcast_buffers=False)
        self.step, self.evaluated_at = 0, 0
        self.request, self.is_leaving = StopRequest(), False
        self.history: list[dict[str, Any]] = []
        self.arrays: dict[str, np.ndarray] = {}
        self.skipped: dict[str, dict[str, str]] = {"train": {}, "val": {}}
        self.reported: dict[str, Tensor] = {}
        self.losses: deque[float] = deque(maxlen=SHOWN)

    def autocast(self) -> AbstractContextManager[Any]:
        return autocast(self.space.device, self.space.precision)

    @property
    def evaluated(self) -> Classifier:
        """The network that is evaluated: the averaged one, where there is one."""
        return self.averaged.module if self.averaged is not None else self.classifier

    @property
    def progress(self) -> TrainProgress:
        """Where the training stands."""
        return TrainProgress(step=self.step, steps_per_epoch=self.plan.steps_per_epoch, epochs=self.settings.epochs)

    @property
    def steps(self) -> int:
        """Updates of the whole training."""
        return self.progress.steps

    @property
    def epoch(self) -> int:
        """Epochs that are over."""
        return self.progress.epoch

    def alone(self) -> AbstractContextManager[None]:
        """Lock this training for the length of a block; wait while another run does the same."""
        return self.world.held_by_rank0(locked(self.folder.with_suffix(".lock"), "it does the same training"))

    def resume(self, needs_weights: bool = False) -> None:
        """Load the newest state, where there is one. needs_weights: train again where a training of an earlier version
        is over, which kept none."""

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
        """Train to the end. batches: this process's groups from `step` on. evaluate: records an epoch.

        ValueError for a loss that is not finite, and whatever reading images raises; the last state stays on disk.
        Stopped, in all processes after the same step, once a signal has asked one of them to stop.
        """
        steps, saving = self.steps, Timer(SAVE_EVERY)
        progress = Progress(label, steps, "steps", quiet=not self.world.is_rank0)
        self.network.train()
        with listening(self.request.ask), progress:
            progress.resume(self.step)
            while self.evaluated_at < steps:
                if self.is_due():
                    self.run_evaluation(evaluate)
                else:
                    self.update(batches)
                    self.step += 1
                    progress.advance(1)
                if self.is_leaving or saving.is_due() or self.evaluated_at == steps:
                    with saving:
                        self.save()
                if self.is_leaving:
                    raise Stopped.after(self.step, steps, label, self.folder)

    def is_due(self) -> bool:
        """Whether an epoch has ended that is to be evaluated and has not been."""
        settings, (epoch, within) = self.settings, divmod(self.step, self.plan.steps_per_epoch)
        return (
            self.evaluated_at < self.step
            and within == 0
            and (epoch % settings.judge_every == 0 or epoch == settings.epochs)
        )

    def run_evaluation(self, evaluate: Callable[["Training"], None]) -> None:
        """Evaluate the current weights."""
        self.network.eval()
        evaluate(self)
        self.network.train()
        self.evaluated_at = self.step
        self.is_leaving = any(self.world.gather_objects(self.request.asked))

    def update(self, batches: Iterator[MixedGroup]) -> None:
        """One step of the optimiser on one batch of the recipe's size."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(group["lr_scale"])
        self.optimizer.zero_grad(set_to_none=True)
        last: list[Tensor] = []
        # Whatever can fail in one process alone comes before their first collective: the last backward pass.
        shares = self.world.gather_results(lambda: self.forward_backward(batches, last))
        for share in shares:
            self.skipped["train"] |= share.unreadable
        self.check(fmean(share.loss for share in shares))
        last[0].backward()
        if self.settings.clip:
            nn.utils.clip_grad_norm_(self.classifier.parameters(), self.settings.clip)
        self.optimizer.step()
        if self.averaged is not None:
            self.averaged.update(self.classifier)
        self.is_leaving = any(share.asked for share in shares)

    def rate(self, scale: float = 1.0) -> float:
        """The learning rate of this update for a layer's `scale`."""
        return self.schedule.at(self.settings.peak, self.progress, scale)

    def forward_backward(self, batches: Iterator[MixedGroup], last: list[Tensor]) -> "Share":
        """This process's share of a step. The last micro-batch's loss goes to `last`, without its backward pass."""
        count = len(self.groups) * self.plan.group // self.micro_batch_size
        total = torch.zeros((), device=self.space.device)
        unreadable: dict[str, str] = {}
        for number, (images, targets, place) in enumerate(self.micro_batches(batches, unreadable), start=1):
            is_last = number == count
            with nullcontext() if is_last or self.world.size == 1 else self.network.no_sync():
                loss = self.loss(images, targets, place) / count
                total += loss.detach()
                if is_last:
                    last.append(loss)
                else:
                    loss.backward()
        return Share(total.item(), unreadable, self.request.asked)

    def micro_batches(
        self, batches: Iterator[MixedGroup], unreadable: dict[str, str]
    ) -> Iterator[tuple[Tensor, Tensor, tuple[int, int]]]:
        """Micro-batches of this step on the device: images, targets, and their place (group, first image in it)."""
        for number in self.groups:
            group = next(batches)
            unreadable |= group.unreadable
            for first in range(0, len(group.images), self.micro_batch_size):
                chosen = slice(first, first + self.micro_batch_size)
                images, targets = (t[chosen].to(self.space.device, non_blocking=True) for t in group[:2])
                yield images, targets, (number, first)

    def loss(self, images: Tensor, targets: Tensor, place: tuple[int, int]) -> Tensor:
        """Cross-entropy with target probabilities. Drop path is seeded by the place in the training."""
        with seeded(DROP, self.space.seed, self.step, *place, device=self.space.device), self.autocast():
            logits = self.network(images)
        return F.cross_entropy(logits.float(), targets)

    def check(self, loss: float) -> None:
        """ValueError for a loss that is not finite."""
        progress = self.progress
        where = f"step {self.step} of {progress.steps} (epoch {progress.time:.2f}, learning rate {self.rate():.3g})"
        check_finite(loss, "loss", where, self.losses, "lower lr, or use float32 if this was bfloat16")
        self.losses.append(loss)

    def save(self) -> None:
        """Save the state; at the end of the training, the evaluations' results and the reported weights alone."""
        over = self.evaluated_at == self.steps
        # A broken gradient would show in the next step's loss only.
        finite = all(bool(parameter.isfinite().all()) for parameter in self.classifier.parameters())
        if not self.world.is_rank0 or not (over or finite):
            return
        tensors = {} if over else self.state()
        tensors |= {f"reported.{name}": tensor for name, tensor in self.reported.items()}
        tensors |= {f"train_state.{name}": torch.tensor(array) for name, array in self.arrays.items()}
        facts = {
            "step": self.step,
            "judged": self.evaluated_at,
            "losses": list(self.losses),
            "history": self.history,
            "skipped": self.skipped,
        }
        save_state(self.folder, self.step, State(tensors=tensors, facts=facts), kept=1 if over else KEPT)

    def state(self) -> dict[str, Tensor]:
        """Everything that the next step depends on."""
        tensors = {f"network.{name}": tensor for name, tensor in self.classifier.state_dict().items()}
        if self.averaged is not None:
            tensors |= {f"averaged.{name}": tensor for name, tensor in self.averaged.module.state_dict().items()}
        return tensors | optimizer_tensors(self.optimizer)

    def load(self, path: Path) -> None:
        """Load a state."""
        state = load_state(path)
        facts = state.facts
        self.step = facts["step"]
        self.evaluated_at = facts.get("judged", self.step)  # states before signals were heard have none
        self.losses.extend(facts["losses"])
        self.history = facts["history"]
        self.skipped = facts["skipped"]
        self.arrays = {name: tensor.numpy() for name, tensor in state.under("train_state.").items()}
        self.reported = state.under("reported.")
        if self.evaluated_at == self.steps:
            return
        self.classifier.load_state_dict(state.under("network."))
        if self.averaged is not None:
            self.averaged.module.load_state_dict(state.under("averaged."))
        load_optimizer(self.optimizer, state)


class Share(NamedTuple):
    """One process's part in a step."""

    loss: float  # mean over its images
    unreadable: dict[str, str]  # path -> reason
    asked: bool  # whether a signal has asked this process to stop
