"""How a model of mmsegmentation or mmdetection is trained around an export: the plan, the loop, its states.

A pass sends a micro-batch forward and back; `accumulation` of them make an optimiser step. Rates, order of images,
augmentation, dropout and drop path are functions of seed and pass; weights, optimiser and batch statistics come from
the state on disk. So a training that was killed and goes on has the bits of an uninterrupted one.

Position p of the stream of training images is image p mod N of epoch p div N's permutation, augmented by random numbers
of its own. Step t of batch size b takes positions tb..(t+1)b-1, however processes and micro-batches share them. N
images of the set.
"""

import contextlib
import io
import json
import shutil
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from checkpoints.frozen import FrozenExport
from checkpoints.reading import read_foreign
from downstream.data.scenes import SceneSet
from downstream.models.operators import quiet_libraries
from engine.distributed import World
from engine.files import locked, write_atomic
from engine.machine import own_cores
from engine.optimisers import layer_groups
from engine.precision import autocast
from engine.printing import say
from engine.progress import Progress, span
from engine.seeding import AUGMENT, DROP, seeded, shuffled, stream_seeds
from engine.tasks import Workspace
from engine.training.interruptions import Stopped, ignore_signals, listening, loaded_by
from engine.training.schedules import SHOWN, Schedule, TrainProgress, check_finite, micro_batch_size, share_of
from engine.training.states import (
    OPTIMIZER,
    State,
    load_optimizer,
    load_state,
    newest_whole,
    optimizer_tensors,
    save_interval,
    save_state,
)
from imagesets.sets import kept_folder

VERSION = 2  # of a training's state on disk; raise it when the same settings would train otherwise
LOADERS = 8  # processes that read images, at most
MIN_IMAGES = 500  # training images below which starting such processes takes longer than they save
LOGGED = 10  # steps between two lines of the log
SAME_SIGNAL = 0.5  # seconds within which a second signal is the first one's copy, as torchrun passes them on
OLD_SUFFIX = ".pth"  # of states that mmengine's Runner wrote
TRUNK = "backbone.vit.trunk."  # what stands before an export's names in a dense model


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One training of an export.

    epochs of steps_per_epoch optimiser steps; 1 epoch where the source counts in steps.
    """

    task: str  # name of a folder in the cache
    export: FrozenExport
    settings: Mapping[str, Any]  # JSON: everything that the numbers depend on besides export, images and workspace
    train: SceneSet  # training scenes
    val: SceneSet  # validation scenes
    batch: int  # images of an optimiser step
    largest: int  # images in a forward pass, unless --batch-size is given
    schedule: Schedule  # of the learning rates
    epochs: int
    steps_per_epoch: int
    judge_every: int  # optimiser steps between evaluations; 0: one at the end
    best: str  # metric whose highest value decides which evaluation counts; "" for the last evaluation
    # Makes training images, validation images and metric, objects of the mm libraries. The metric keeps `arrays` from
    # which its numbers can be recomputed, in rank 0.
    objects: Callable[[], tuple[Any, Any, Any]]
    build: Callable[[bool], nn.Module]  # makes the model, its heads initialised; True: batch norms over all processes
    optimise: Callable[[nn.Module], torch.optim.Optimizer]  # makes its optimiser; its groups have their own peak rates
    label: str  # of the progress bar

    @property
    def start(self) -> TrainProgress:
        """The progress before the first optimiser step."""
        return TrainProgress(step=0, steps_per_epoch=self.steps_per_epoch, epochs=self.epochs)

    def micro_batch_size(self, space: Workspace) -> int:
        """Images of one process in a forward pass."""
        return micro_batch_size(share_of(self.batch, space.world.size), space.batch_size or self.largest)

    def folder(self, space: Workspace) -> Path:
        """The training's own folder, named by a digest of everything that its bits depend on. All processes call it."""
        key = {
            "version": VERSION,
            "settings": dict(self.settings),
            "export": self.export.digest,
            "images": [self.train.fingerprint, self.val.fingerprint],
            "at_once": [self.micro_batch_size(space), space.world.size],
            "machine": [space.device, space.precision],
            "seed": space.seed,
        }
        return space.world.on_rank0(lambda: kept_folder(space.cache / self.task, key, [self.train, self.val]))


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """The result of a training."""

    metrics: dict[str, float]  # of the evaluation that counts
    arrays: dict[str, np.ndarray]  # from which they can be recomputed
    step: int  # optimiser step of that evaluation
    history: dict[str, dict[str, float]]  # step -> metrics, of all evaluations
    batch: Mapping[str, Any]  # facts: how the images of a step were divided


def run_plan(plan: Plan, space: Workspace) -> TrainedModel:
    """Train to the end, from the last state if there is one, and evaluate. A finished training is read from disk, and
    one that another run does is waited for.

    ValueError for a loss that is not finite, for too little memory, and for unreadable images; the last state stays on
    disk. Stopped, in all processes after the same step, once a signal has asked one of them to stop.
    """
    world, training = space.world, Training(plan, space)
    if world.is_rank0:
        for line in norm_warnings(training.batch):
            say(f"{plan.label}: {line}", errors=True)
    with world.held_by_rank0(locked(training.folder.with_suffix(".lock"), "it does the same training")):
        if not world.on_rank0((training.folder / "finished").exists):
            with _explaining(plan, space):
                training.run()
            world.barrier()
            if world.is_rank0:
                (training.folder / "finished").touch()
                shutil.rmtree(training.folder / "states", ignore_errors=True)
        return world.on_rank0(training.result)


def norm_warnings(batch: Mapping[str, Any]) -> list[str]:
    """A warning where batch norms cover fewer images than in the sources, which synchronise them over the whole batch.

    batch: facts of a TrainedModel.
    """
    over, images = batch["batch_norm_over"], batch["images"]
    if over in (None, images):
        return []
    return [
        f"batch norm is over {over} images, in the recipe over all {images} of a step: start "
        f"{images // batch['at_once']} processes with a GPU each, or give --batch-size {images} if memory allows"
    ]


class Training:
    """One training of a plan. All processes of a run make the same calls."""

    def __init__(self, plan: Plan, space: Workspace) -> None:
        self.plan, self.space, self.world = plan, space, space.world
        self.folder, self.at_once = plan.folder(space), plan.micro_batch_size(space)
        self.accumulation = plan.batch // (self.at_once * self.world.size)
        self.passes, self.done = plan.start.steps * self.accumulation, 0
        synchronised = self.world.size > 1 and torch.device(space.device).type == "cuda"
        with quiet_libraries():
            self.model: Any = plan.build(synchronised).to(space.device)
        self.wrapped: nn.Module = self.model  # what a pass goes through: around it what exchanges gradients
        self.optimiser = plan.optimise(self.model)
        self.peaks = [group["lr"] for group in self.optimiser.param_groups]
        self.train_images, self.val_images, self.metric = plan.objects()
        self.metric.dataset_meta = self.val_images.metainfo
        norms = any(isinstance(module, nn.BatchNorm2d | nn.SyncBatchNorm) for module in self.model.modules())
        self.batch = {
            "images": plan.batch,
            "at_once": self.at_once,
            "accumulated": self.accumulation,
            "processes": self.world.size,
            "batch_norm_over": self.at_once * (self.world.size if synchronised else 1) if norms else None,
        }
        self.loaders = space.workers  # processes that read images
        if self.loaders is None:
            self.loaders = min(LOADERS, own_cores()) if len(plan.train) >= MIN_IMAGES else 0
        self.losses: deque[float] = deque(maxlen=SHOWN)
        self.statistics: list[Tensor] = []  # of batch norms before the step, which its passes change
        self.signals: list[float] = []  # when they came, by time.monotonic
        self.begun, self.seconds, self.timed = time.monotonic(), 0.0, 0  # of the pass in work; of all timed ones
        self.evaluating = False

    def run(self) -> None:
        """Go on from the newest state to the end."""
        import cv2

        cv2.setNumThreads(0)  # its threads would wait for ever in loader processes
        plan, world, space = self.plan, self.world, self.space
        self.folder.mkdir(parents=True, exist_ok=True)
        self.resume()
        if world.size > 1:
            devices = [torch.cuda.current_device()] if space.device.startswith("cuda") else None
            self.wrapped = DistributedDataParallel(self.model, device_ids=devices, broadcast_buffers=False)
        bar = Progress(plan.label, plan.start.steps, "steps", parts=self.accumulation, quiet=not world.is_rank0)
        with listening(self.ask), bar, warnings.catch_warnings(), contextlib.closing(self.batches()) as batches:
            warnings.simplefilter("ignore")  # the libraries' notes about their own calls
            bar.resume(self.done)
            if self.evaluation_due and str(self.done) not in world.on_rank0(self.evaluations):
                self.evaluate()  # killed between the pass's state and its evaluation
            self.begun = time.monotonic()
            for batch in batches:
                self.train_on(batch)
                bar.advance(1)
                self.keep()
                if self.evaluation_due:
                    self.evaluate()
            if self.leaving():  # asked during the last evaluation
                raise self.stopped()

    def batches(self) -> Generator[Any]:
        """This process's micro-batches of the passes that are left."""
        positions = own_positions(range(self.done, self.passes), self.at_once, self.world)
        return self.loaded(Stream(self.train_images, self.space.seed), batch_sampler=positions)

    def loaded(self, images: Any, **settings: Any) -> Generator[Any]:
        """Batches that all processes have, or none: an image that cannot be used in one stops all with its message.

        Costs a small message between processes a batch; without it the others would wait for that one's gradients.
        """
        from mmengine.dataset import pseudo_collate

        loader = DataLoader(
            images,
            collate_fn=pseudo_collate,
            num_workers=self.loaders,
            worker_init_fn=ignore_signals,
            **settings,
        )
        with contextlib.closing(loaded_by(loader)) as batches:
            while (batch := self.world.on_all_ranks(partial(next, batches, None))) is not None:
                yield batch

    def train_on(self, batch: Any) -> None:
        """One pass, and behind the last one of a step the optimiser. ValueError for a loss that is not finite."""
        (step, within), seed = divmod(self.done, self.accumulation), self.space.seed
        if not within and self.accumulation > 1:
            self.statistics = [buffer.clone() for buffer in norm_buffers(self.model)]
        progress = replace(self.plan.start, step=step)
        for group, peak in zip(self.optimiser.param_groups, self.peaks, strict=True):
            group["lr"] = self.plan.schedule.at(peak, progress)
        torch.manual_seed(int(stream_seeds(DROP, seed, self.done, self.world.rank)[2]))  # dropout and drop path
        self.wrapped.train()
        is_last = within == self.accumulation - 1
        if isinstance(self.wrapped, DistributedDataParallel):
            self.wrapped.require_backward_grad_sync = is_last  # as its no_sync() does
        loss = self.loss_of(batch)
        (loss / self.accumulation).backward()
        # Of all processes, so that they stop together.
        mean = torch.stack(self.world.gather_tensors(loss.detach())).mean().item()
        where = f"step {step} of {self.plan.start.steps}"
        check_finite(mean, "loss", where, self.losses, "lower lr, or use float32 if this was bfloat16")
        self.losses.append(mean)
        if is_last:
            self.optimiser.step()
            self.optimiser.zero_grad()
            if self.world.is_rank0 and (step + 1) % LOGGED == 0:
                self.log({"step": step + 1, "loss": mean, "lr": self.optimiser.param_groups[-1]["lr"]})
        self.done += 1

    def loss_of(self, batch: Any) -> Tensor:
        """The sum of a micro-batch's losses, ()."""
        with autocast(self.space.device, self.space.precision):
            losses = self.wrapped(**self.model.data_preprocessor(batch, True), mode="loss")
        return self.model.parse_losses(losses)[0]

    def keep(self) -> None:
        """Save the state where it is due, and leave once a signal has asked any process to.

        Such a signal ends the training at the end of the step; a second one drops a step whose passes are not all done,
        and saves the state before it. All processes call it together.
        """
        now = time.monotonic()
        self.seconds, self.timed, self.begun = self.seconds + now - self.begun, self.timed + 1, now
        step, within = divmod(self.done, self.accumulation)
        if within:
            if any(count > 1 for count in self.world.gather_objects(len(self.signals))):
                self.drop_step()
            return
        leaving = self.leaving()
        due = step % save_interval(self.plan.start.steps) == 0 or self.done == self.passes
        if (due or leaving) and self.world.is_rank0:
            self.save()
        if leaving:
            raise self.stopped()

    def drop_step(self) -> None:
        """Drop the unfinished step, which has not changed the weights yet: go back to the end of the step before it."""
        for buffer, before in zip(norm_buffers(self.model), self.statistics, strict=True):
            buffer.copy_(before)
        self.done = self.done // self.accumulation * self.accumulation
        if self.world.is_rank0:
            self.save()
        raise self.stopped()

    def leaving(self) -> bool:
        """Whether any process was asked to stop; all processes call this together."""
        return any(self.world.gather_objects(len(self.signals)))

    def stopped(self) -> Stopped:
        step, steps = self.done // self.accumulation, self.plan.start.steps
        return Stopped.after(step, steps, self.plan.label, self.folder / "states")

    def ask(self) -> None:
        """At a signal: say from a thread, as this one may be in the middle of printing, what is waited for."""
        now = time.monotonic()
        if self.signals and now - self.signals[-1] < SAME_SIGNAL:
            return
        self.signals.append(now)
        if self.world.is_rank0:
            line = f"{self.plan.label}: {self.waiting(now)}"
            threading.Thread(target=say, args=(line,), kwargs={"errors": True}).start()

    def waiting(self, now: float) -> str:
        """What a stop waits for, and about how long."""
        if self.evaluating:
            return "asked to stop: waits for the evaluation" + (" and a step" if self.done < self.passes else "")
        step, within = divmod(self.done, self.accumulation)
        drops = len(self.signals) > 1 and self.accumulation > 1
        left = 1 if drops else self.accumulation - within
        seconds = left * self.seconds / self.timed - (now - self.begun) if self.timed else None
        about = "" if seconds is None else f", about {span(max(seconds, 1.0))}"
        if drops:
            return f"drops step {step + 1}: waits for the pass in work{about}, and saves the state after step {step}"
        again = f"; a second signal drops this step ({within} of {self.accumulation} passes done)"
        return f"asked to stop: waits for step {step + 1} of {self.plan.start.steps}{about}, and saves the state" + (
            again if left > 1 else ""
        )

    def save(self) -> None:
        """Unless weights are not finite: a broken update shows only in the next loss."""
        if all(bool(parameter.isfinite().all()) for parameter in self.model.parameters()):
            tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
            save_state(self.folder / "states", self.done, State(tensors=tensors | optimizer_tensors(self.optimiser)))

    def resume(self) -> None:
        """Go on from the newest state, if there is one."""
        states = self.folder / "states"
        path = self.world.on_rank0(lambda: newest_whole(states) or newest_whole(states, OLD_SUFFIX))
        if path is None:
            return
        state = load_state(path) if path.suffix != OLD_SUFFIX else _old_state(path)
        self.model.load_state_dict(state.under("model."))
        load_optimizer(self.optimiser, state)
        self.done = int(path.name.split("-")[1])

    @property
    def evaluation_due(self) -> bool:
        """Whether the passes done are followed by an evaluation."""
        every = (self.plan.judge_every or self.plan.start.steps) * self.accumulation
        return self.done > 0 and (self.done % every == 0 or self.done == self.passes)

    def evaluate(self) -> None:
        """Write the metrics, and the arrays if this evaluation is the one that counts, as soon as they are known."""
        self.evaluating, world = True, self.world
        if world.size > 1:
            for buffer in self.model.buffers():  # batch statistics, which differ between processes on CPU
                distributed.broadcast(buffer, 0)
        self.model.eval()
        count = -(-len(self.val_images) // world.size)  # the same in all processes: the first images come again
        own = [(number * world.size + world.rank) % len(self.val_images) for number in range(count)]
        loaded = self.loaded(self.val_images, sampler=own)
        with Progress("evaluating", count, quiet=not world.is_rank0) as bar, contextlib.closing(loaded) as batches:
            for batch in batches:
                self.predict(batch)
                bar.advance(1)
        metrics = self.metric.evaluate(len(self.val_images))
        if world.is_rank0:
            self.record(metrics)
        self.evaluating, self.begun = False, time.monotonic()

    @torch.no_grad()
    def predict(self, batch: Any) -> None:
        """Keep of a batch what its score needs; in float32, whatever the training's precision."""
        samples = self.model.val_step(batch)
        self.metric.process(batch, [sample.to_dict() for sample in samples])

    def record(self, metrics: Mapping[str, float]) -> None:
        evaluations = self.evaluations() | {str(self.done): {name: float(value) for name, value in metrics.items()}}
        self.log({"step": self.done // self.accumulation} | evaluations[str(self.done)])
        if self.counts(evaluations) == str(self.done):
            arrays = io.BytesIO()
            np.savez_compressed(arrays, **self.metric.arrays)
            write_atomic(self.folder / "arrays.npz", arrays.getvalue())
        write_atomic(self.folder / "judgements.json", json.dumps(evaluations))

    def evaluations(self) -> dict[str, dict[str, float]]:
        """Passes done -> metrics."""
        path = self.folder / "judgements.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def counts(self, evaluations: Mapping[str, Mapping[str, float]]) -> str:
        """The evaluation that is the result."""
        if not self.plan.best:
            return max(evaluations, key=int)
        return max(evaluations, key=lambda passes: (evaluations[passes][self.plan.best], int(passes)))

    def log(self, line: Mapping[str, float]) -> None:
        with open(self.folder / "log.jsonl", "a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")

    def result(self) -> TrainedModel:
        """Of a finished training, from disk."""
        evaluations = self.evaluations()
        chosen = self.counts(evaluations)
        with np.load(self.folder / "arrays.npz") as arrays:
            kept = {name: arrays[name] for name in arrays.files}
        by_step = {str(int(passes) // self.accumulation): metrics for passes, metrics in evaluations.items()}
        step = int(chosen) // self.accumulation
        return TrainedModel(metrics=evaluations[chosen], arrays=kept, step=step, history=by_step, batch=self.batch)


class Stream(Dataset):
    """Endless passes over `images`, a dataset of the mm libraries; item p is the image at position p."""

    def __init__(self, images: Any, seed: int) -> None:
        self.images, self.seed = images, seed

    def __getitem__(self, position: int) -> Any:
        epoch, place = divmod(position, len(self.images))
        with seeded(AUGMENT, self.seed, position):
            return self.images[int(shuffled(len(self.images), self.seed, epoch)[place])]


def own_positions(passes: range, size: int, world: World) -> list[range]:
    """Positions in the stream of the `size` images that this process takes in each of the passes."""
    firsts = ((number * world.size + world.rank) * size for number in passes)
    return [range(first, first + size) for first in firsts]


def norm_buffers(model: nn.Module) -> list[Tensor]:
    """Running statistics of the batch norms."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    return [buffer for norm in norms for buffer in norm.buffers()]


def _old_state(path: Path) -> State:
    """A state that mmengine's Runner wrote."""
    tensors = read_foreign(path).tensors
    model = {name.replace("state_dict.", "model.", 1): tensor for name, tensor in tensors.items()}
    return State(tensors={name.replace("optimizer.state.", OPTIMIZER, 1): tensor for name, tensor in model.items()})


@contextlib.contextmanager
def _explaining(plan: Plan, space: Workspace) -> Iterator[None]:
    """Raise the errors of a training with messages for the user."""
    try:
        yield
    except (RuntimeError, MemoryError, ValueError) as error:
        explained = _explained(error, plan, space)
        if hasattr(error, "told_by"):
            vars(explained)["told_by"] = error.told_by
        raise explained from error


def _explained(error: Exception, plan: Plan, space: Workspace) -> Exception:
    """The error to raise: for memory that ran out, which setting to lower; of a loader process, what it was about."""
    text = str(error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text:
        return ValueError(
            f"out of memory with {plan.micro_batch_size(space)} images at once on {space.device}: lower --batch-size; "
            f"accumulation keeps the recipe's batch of {plan.batch}"
        )
    if "more than 1 value per channel" in text:
        return ValueError("batch norm needs statistics of two images at once: give --batch-size 2 or more")
    if "Original Traceback" in text:  # torch's wrapping of what a loader process raised
        kind = ValueError if isinstance(error, ValueError) else RuntimeError
        return kind(text.strip().splitlines()[-1].partition(": ")[2])
    return error


def optimizer_groups(
    model: nn.Module, depth: int, decay: float, rate: float, weight_decay: float, decay_tokens: bool
) -> list[dict[str, Any]]:
    """Parameters that train -> optimiser groups with keys params, names, lr and weight_decay.

    Of L blocks the rate is decay^(L + 1 - layer), necks and heads are layer L + 1. decay_tokens: the mm codebases
    exempt pos_embed and cls_token by their bare names, which never match behind "backbone.", so that they do decay
    them (iBOT, BEiT and CAE segmentation; mmseg: layer_decay_optimizer_constructor.py).
    """
    own = {
        name.removeprefix(TRUNK) if name.startswith(TRUNK) else f"head.{name}": name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    parameters = [(ours, model.get_parameter(name)) for ours, name in own.items()]
    return [
        {
            "params": group["params"],
            "names": [own[ours] for ours in group["names"]],
            "lr": rate * group["lr_scale"],
            "weight_decay": group["weight_decay"],
        }
        for group in layer_groups(parameters, depth, decay, weight_decay, decay_tokens)
    ]


def adamw_by_layer(
    model: nn.Module, depth: int, *, lr: float, layer_decay: float, weight_decay: float, decay_tokens: bool
) -> torch.optim.AdamW:
    """AdamW over what trains of a model around a network of `depth` blocks, see `optimizer_groups`."""
    groups = optimizer_groups(model, depth, layer_decay, lr, weight_decay, decay_tokens)
    return torch.optim.AdamW([{k: v for k, v in group.items() if k != "names"} for group in groups])
