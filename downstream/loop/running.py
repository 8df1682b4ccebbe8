"""One training under mmengine's Runner: quiet, resumable at any iteration, exact in what it repeats after a kill.

Rates, order of images, augmentation and dropout are functions of seed and iteration; weights, optimiser and batch
statistics come from the state on disk. So the bits after a resume are those of an uninterrupted run, where the Runner's
own resuming draws other augmentations. An iteration is one forward and backward pass; `accumulation` of them make an
optimiser step.

Position p of the stream of training images is image p mod N of epoch p div N's permutation, augmented by random numbers
of its own. Step t of batch size b takes positions tb..(t+1)b-1, however processes and micro-batches share them. N
images of the set.
"""

import contextlib
import io
import json
import logging
import os
import shutil
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.dataset import DefaultSampler, pseudo_collate
from mmengine.dist import all_reduce, broadcast
from mmengine.evaluator import Evaluator
from mmengine.hooks import Hook
from mmengine.model import MMDistributedDataParallel
from mmengine.optim import OptimWrapper
from mmengine.runner import IterBasedTrainLoop, Runner, ValLoop
from mmengine.visualization import Visualizer
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from downstream.data.reading import loader_processes
from downstream.loop.training import Plan, batch_norm_warnings
from downstream.models.operators import quiet_libraries
from engine.distributed import World
from engine.files import locked, write_atomic
from engine.precision import autocast
from engine.printing import say
from engine.progress import Progress, span
from engine.seeding import AUGMENT, DROP, seeded, shuffled, stream_seeds
from engine.tasks import Workspace
from engine.training.interruptions import Stopped, listening
from engine.training.loading import ignore_signals
from engine.training.schedules import SHOWN, Schedule, TrainProgress, check_finite
from engine.training.states import newest_intact, save_interval, write_state

SAME_SIGNAL = 0.5  # seconds within which a second signal is the first one's copy, as torchrun passes them on
STATE_SUFFIX = ".pth"  # of mmengine's own format


class EachIteration(Hook):
    """Sets every group's rate and seeds dropout and drop path before an iteration, both by its number alone, so that a
    resumed training has the same bits. After it: ValueError for a loss that is not finite, and `bar` goes on, our
    progress bar in place of mmengine's log lines, which the caller opens and closes."""

    priority = "HIGHEST"

    def __init__(self, schedule: Schedule, start: TrainProgress, accumulation: int, seed: int, bar: Progress) -> None:
        self.schedule, self.start, self.accumulation, self.seed, self.bar = schedule, start, accumulation, seed, bar
        self.losses: deque[float] = deque(maxlen=SHOWN)

    def before_train(self, runner: Runner) -> None:
        self.bar.resume(runner.iter)

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        progress = replace(self.start, step=batch_idx // self.accumulation)
        for group in runner.optim_wrapper.optimizer.param_groups:
            group["lr"] = self.schedule.at(group["base_lr"], progress)
        torch.manual_seed(int(stream_seeds(DROP, self.seed, batch_idx, runner.rank)[2]))

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        assert outputs is not None
        mean = outputs["loss"].detach().clone()
        all_reduce(mean, "mean")  # so that all processes stop together
        where = f"step {batch_idx // self.accumulation} of {self.start.steps}"
        check_finite(mean.item(), "loss", where, self.losses, "lower lr, or use float32 if this was bfloat16")
        self.losses.append(mean.item())
        self.bar.advance(1)


class KeepState(Hook):
    """Saves the state every `interval` optimiser steps, and when a signal has asked any process to stop.

    Such a signal ends the training at the end of the step; a second one drops a step whose passes are not all done, and
    saves the state before it. What is waited for is said. The two newest states are kept, as in all trainings. Weights
    that are not finite are not saved: a broken update shows only in the next loss.
    """

    priority = "LOWEST"

    def __init__(self, folder: Path, interval: int, accumulation: int, label: str, world: World) -> None:
        self.folder, self.interval, self.accumulation = folder, interval, accumulation
        self.label, self.world = label, world
        self.asked: list[float] = []  # when signals came, by time.monotonic
        self.place = (0, 0)  # of the pass in work: its iteration, and how many there are
        self.begun, self.seconds, self.passes = time.monotonic(), 0.0, 0  # of that pass; all that were timed
        self.evaluating = False
        self.statistics: list[torch.Tensor] = []  # of batch norms before the step, which its passes change

    def ask(self) -> None:
        """At a signal: say from a thread, as this one may be in the middle of printing, what is waited for."""
        now = time.monotonic()
        if self.asked and now - self.asked[-1] < SAME_SIGNAL:
            return
        self.asked.append(now)
        if self.label and not self.world.rank:
            threading.Thread(target=say, args=(f"{self.label}: {self.waiting(now)}",), kwargs={"errors": True}).start()

    def waiting(self, now: float) -> str:
        """What a stop waits for, and about how long."""
        iteration, iterations = self.place
        if self.evaluating:
            return "asked to stop: waits for the evaluation" + (" and a step" if iteration < iterations else "")
        step, done = divmod(iteration, self.accumulation)
        drops = len(self.asked) > 1 and self.accumulation > 1
        left = 1 if drops else self.accumulation - done
        seconds = left * self.seconds / self.passes - (now - self.begun) if self.passes else None
        about = "" if seconds is None else f", about {span(max(seconds, 1.0))}"
        if drops:
            return f"drops step {step + 1}: waits for the pass in work{about}, and saves the state after step {step}"
        again = f"; a second signal drops this step ({done} of {self.accumulation} passes done)"
        return (
            f"asked to stop: waits for step {step + 1} of {iterations // self.accumulation}{about}, and saves the state"
            + (again if left > 1 else "")
        )

    def before_val(self, runner: Runner) -> None:
        self.evaluating = True

    def after_val(self, runner: Runner) -> None:
        self.evaluating, self.begun = False, time.monotonic()

    def before_train(self, runner: Runner) -> None:
        self.place, self.begun = (runner.iter, runner.max_iters), time.monotonic()

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        if self.accumulation > 1 and batch_idx % self.accumulation == 0:
            self.statistics = [buffer.clone() for buffer in norm_buffers(runner.model)]

    def drop_step(self, runner: Runner) -> None:
        """Drop the unfinished step, which has not changed the weights yet: go back to the end of the step before it."""
        for buffer, before in zip(norm_buffers(runner.model), self.statistics, strict=True):
            buffer.copy_(before)
        runner.train_loop._iter = runner.iter // self.accumulation * self.accumulation - 1
        if not runner.rank:
            self.save(runner)
        raise self.stopped(runner.iter + 1, runner.max_iters)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        now = time.monotonic()
        self.seconds, self.passes = self.seconds + now - self.begun, self.passes + 1
        self.place, self.begun = (batch_idx + 1, runner.max_iters), now
        if not self.every_n_train_iters(runner, self.accumulation):
            if any(count > 1 for count in self.world.gather_objects(len(self.asked))):
                self.drop_step(runner)
            return
        leaving = self.leaving()
        due = self.every_n_train_iters(runner, self.interval * self.accumulation) or self.is_last_train_iter(runner)
        if (due or leaving) and not runner.rank:
            self.save(runner)
        if leaving:
            raise self.stopped(runner.iter + 1, runner.max_iters)

    def after_train(self, runner: Runner) -> None:
        if self.leaving():  # asked during the last evaluation
            raise self.stopped(runner.iter, runner.max_iters)

    def leaving(self) -> bool:
        """Whether any process was asked to stop; all processes call this together."""
        return any(self.world.gather_objects(len(self.asked)))

    def stopped(self, iteration: int, iterations: int) -> Stopped:
        step, steps = iteration // self.accumulation, iterations // self.accumulation
        return Stopped.after(step, steps, self.label, self.folder)

    def save(self, runner: Runner) -> None:
        if all(bool(parameter.isfinite().all()) for parameter in runner.model.parameters()):
            write_state(self.folder, runner.iter + 1, partial(self.write, runner), STATE_SUFFIX)

    @staticmethod
    def write(runner: Runner, path: str) -> None:
        folder, name = os.path.split(path)
        runner.save_checkpoint(folder, name, by_epoch=False, save_param_scheduler=False)


def norm_buffers(model: nn.Module) -> list[torch.Tensor]:
    """Running statistics of the batch norms."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    return [buffer for norm in norms for buffer in norm.buffers()]


class KeepEvaluations(Hook):
    """Writes the metrics of every evaluation, and the arrays of the one that counts, as soon as they are known.

    metric: of mmseg or mmdet, with `arrays` from which its numbers can be recomputed, on rank 0 alone. best: the metric
    whose highest value decides which evaluation counts; "" for the last evaluation.
    """

    def __init__(self, folder: Path, metric: Any, every: int, best: str) -> None:
        self.folder, self.metric, self.every, self.best = folder, metric, every, best

    def before_train(self, runner: Runner) -> None:
        due = runner.iter and (runner.iter % self.every == 0 or runner.iter == runner.max_iters)
        if due and str(runner.iter) not in self.read():  # killed between the iteration's state and its evaluation
            runner.val_loop.run()

    def before_val(self, runner: Runner) -> None:
        for buffer in runner.model.buffers():  # batch statistics, which differ between processes on CPU
            broadcast(buffer)

    def after_val_epoch(self, runner: Runner, metrics: Mapping[str, float] | None = None) -> None:
        if runner.rank:
            return
        assert metrics is not None
        evaluations = self.read() | {str(runner.iter): {name: float(value) for name, value in metrics.items()}}
        if self.counts(evaluations) == str(runner.iter):
            arrays = io.BytesIO()
            np.savez_compressed(arrays, **self.metric.arrays)
            write_atomic(self.folder / "arrays.npz", arrays.getvalue())
        write_atomic(self.folder / "judgements.json", json.dumps(evaluations))

    def read(self) -> dict[str, dict[str, float]]:
        """Iteration -> metrics."""
        path = self.folder / "judgements.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def counts(self, evaluations: Mapping[str, Mapping[str, float]]) -> str:
        """The iteration whose evaluation is the result."""
        latest = max(evaluations, key=int)
        return max(evaluations, key=lambda step: (evaluations[step][self.best], int(step))) if self.best else latest


class Stream(Dataset):
    """Endless passes over `images`, a dataset of the mm libraries; item p is the image at position p."""

    def __init__(self, images: Any, seed: int) -> None:
        self.images, self.seed = images, seed

    @property
    def metainfo(self) -> dict[str, Any]:
        """Class names, for the Runner."""
        return self.images.metainfo

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, position: int) -> Any:
        epoch, place = divmod(position, len(self.images))
        with seeded(AUGMENT, self.seed, position):
            return self.images[int(shuffled(len(self.images), self.seed, epoch)[place])]


class Positions(Sampler[int]):
    """The positions of one process: `micro_batches` times `size` of them. mmengine's loop calls `skip` on resuming."""

    def __init__(self, size: int, micro_batches: int, rank: int, processes: int) -> None:
        self.size, self.micro_batches, self.rank, self.processes = size, micro_batches, rank, processes
        self.done = 0

    def skip(self, images: int) -> None:
        """Leave out the first `images` of this process."""
        self.done += images // self.size

    def __len__(self) -> int:
        return self.micro_batches * self.size

    def __iter__(self) -> Iterator[int]:
        for number in range(self.done, self.micro_batches):
            first = (number * self.processes + self.rank) * self.size
            yield from range(first, first + self.size)


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """The result of a training."""

    metrics: dict[str, float]  # of the evaluation that counts
    arrays: dict[str, np.ndarray]  # from which they can be recomputed
    step: int  # optimiser step of that evaluation
    history: dict[str, dict[str, float]]  # step -> metrics, of all evaluations
    batch: Mapping[str, Any]  # facts: how the images of a step were divided


class QuietRunner(Runner):
    """mmengine's Runner with logs in files alone, and the device that it is told."""

    def __init__(self, device: str, **settings: Any) -> None:
        self.device = device
        super().__init__(**settings)

    def build_logger(self, *values: Any, **settings: Any) -> logging.Logger:
        logger = super().build_logger(*values, **settings)
        for handler in list(logger.handlers):
            if not isinstance(handler, logging.FileHandler):
                logger.removeHandler(handler)
        return logger

    def wrap_model(self, model_wrapper_cfg: Any, model: nn.Module) -> nn.Module:
        model = model.to(self.device)
        if not self.distributed:
            return model
        devices = [torch.cuda.current_device()] if self.device.startswith("cuda") else None
        return MMDistributedDataParallel(module=model, device_ids=devices, broadcast_buffers=False)

    def _init_model_weights(self) -> None:
        """Nothing: whoever builds the model draws its heads, from a seed."""

    def dump_config(self) -> None:
        """Nothing: there is no configuration file."""

    def load_checkpoint(self, filename: str, map_location: Any = "cpu", **settings: Any) -> dict[str, Any]:
        with quiet_libraries():  # which print that they load
            return super().load_checkpoint(filename, map_location, **settings | {"strict": True})


class AgreedLoader(DataLoader):
    """Batches that all processes have, or none: an image that cannot be used in one stops all with its message.

    Costs a small message between processes a batch; without it the others would wait for that one's gradients.
    """

    def __init__(self, images: Any, world: World, **settings: Any) -> None:
        super().__init__(images, collate_fn=pseudo_collate, worker_init_fn=ignore_signals, **settings)
        self.world = world

    def __iter__(self) -> Iterator[Any]:
        batches = super().__iter__()
        while (batch := self.world.on_all_ranks(partial(next, batches, None))) is not None:
            yield batch


class Precise(OptimWrapper):
    """Optimiser steps whose forward passes run in `precision`; bfloat16 needs no loss scaling."""

    def __init__(self, device: str, precision: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.device, self.precision = device, precision

    @contextlib.contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        with super().optim_context(model), autocast(self.device, self.precision):
            yield


class EvaluationLoop(ValLoop):
    """mmengine's evaluation with a progress bar of its own; in float32 whatever the training's precision, as in mmseg
    and mmdet."""

    def run(self) -> dict[str, float]:
        quiet = self.runner.rank > 0
        with Progress("evaluating", len(self.dataloader), quiet=quiet) as self.bar:
            return super().run()

    def run_iter(self, idx: int, data_batch: Any) -> None:
        super().run_iter(idx, data_batch)
        self.bar.advance(1)


def run_plan(plan: Plan, space: Workspace) -> TrainedModel:
    """Train to the end, from the last state on disk if there is one, and evaluate. A finished training is read from
    disk, and one that another run does is waited for.

    ValueError for a loss that is not finite, for too little memory, and for unreadable images; the last state stays on
    disk. Stopped, in all processes after the same step, once a signal has asked one of them to stop.
    """
    world, size, accumulation = space.world, plan.micro_batch_size(space), plan.accumulation(space)
    folder = plan.folder(space)
    synchronised = world.size > 1 and torch.device(space.device).type == "cuda"
    with quiet_libraries():
        model = plan.build_model(synchronised)
    batch_norms = any(isinstance(module, nn.BatchNorm2d | nn.SyncBatchNorm) for module in model.modules())
    batch = {
        "images": plan.batch,
        "at_once": size,
        "accumulated": accumulation,
        "processes": world.size,
        "batch_norm_over": size * (world.size if synchronised else 1) if batch_norms else None,
    }
    if world.is_rank0:
        say(*(f"{plan.label}: {line}" for line in batch_norm_warnings(batch)), errors=True)
    *images, metric = plan.build_data()
    evaluations = KeepEvaluations(folder, metric, (plan.judge_every or plan.start.steps) * accumulation, plan.best)
    with world.held_by_rank0(locked(folder.with_suffix(".lock"), "it does the same training")):
        if not world.on_rank0((folder / "finished").exists):
            _run(model, images, evaluations, plan, space)
        return world.on_rank0(lambda: _trained(evaluations, accumulation, batch))


def _run(model: nn.Module, images: Sequence[Any], evaluations: KeepEvaluations, plan: Plan, space: Workspace) -> None:
    """images: of training and of validation, datasets of the mm libraries."""
    steps, accumulation, world = plan.start.steps, plan.accumulation(space), space.world
    bar = Progress(plan.label, steps, "steps", parts=accumulation, quiet=not world.is_rank0)
    keeping = KeepState(evaluations.folder / "states", save_interval(steps), accumulation, plan.label, world)
    hooks = [EachIteration(plan.schedule, plan.start, accumulation, space.seed, bar), keeping, evaluations]
    runner = runner_of(model, images, hooks, evaluations, plan, space)
    with listening(keeping.ask), bar, _explaining(plan, space), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries' notes about their own calls
        runner.train()
    world.barrier()
    if world.is_rank0:
        (evaluations.folder / "finished").touch()
        shutil.rmtree(evaluations.folder / "states", ignore_errors=True)


def runner_of(
    model: nn.Module,
    images: Sequence[Any],
    hooks: list[Hook],
    evaluations: KeepEvaluations,
    plan: Plan,
    space: Workspace,
) -> Runner:
    """The Runner, built from objects: nothing is looked up by name, and no configuration is read or written."""
    world, folder, size = space.world, evaluations.folder, plan.micro_batch_size(space)
    iterations, (train_images, val_images) = plan.start.steps * plan.accumulation(space), images
    optimiser, workers = plan.build_optimizer(model), loader_processes(space, len(plan.train))
    for group in optimiser.param_groups:
        group["base_lr"] = group["lr"]  # a peak of its own
    state = world.on_rank0(lambda: newest_intact(folder / "states", STATE_SUFFIX))
    loading = {"num_workers": workers, "persistent_workers": workers > 0}
    positions = Positions(size, iterations, world.rank, world.size)
    name = f"{folder.name}_{time.time_ns()}"  # mmengine's loggers and message hubs are global, by name
    with quiet_libraries():
        return QuietRunner(
            device=space.device,
            model=model,
            work_dir=str(folder),
            train_dataloader=AgreedLoader(
                Stream(train_images, space.seed), world, batch_size=size, sampler=positions, **loading
            ),
            train_cfg={
                "type": IterBasedTrainLoop,
                "max_iters": iterations,
                "val_begin": 1,
                "val_interval": evaluations.every,
            },
            optim_wrapper=Precise(
                space.device, space.precision, optimizer=optimiser, accumulative_counts=plan.accumulation(space)
            ),
            val_dataloader=AgreedLoader(
                val_images, world, sampler=DefaultSampler(val_images, shuffle=False), **loading
            ),
            val_cfg={"type": EvaluationLoop},
            val_evaluator=Evaluator([evaluations.metric]),
            default_hooks={"param_scheduler": None, "checkpoint": None, "sampler_seed": None},
            custom_hooks=hooks,
            load_from=str(state) if state else None,
            resume=state is not None,
            launcher="pytorch" if world.size > 1 else "none",
            randomness={"seed": space.seed},
            log_processor={"by_epoch": False},
            visualizer=Visualizer(name=name, vis_backends=[]),
            default_scope=None,
            experiment_name=name,
        )


def _trained(evaluations: KeepEvaluations, accumulation: int, batch: Mapping[str, Any]) -> TrainedModel:
    history = evaluations.read()
    chosen = evaluations.counts(history)
    with np.load(evaluations.folder / "arrays.npz") as arrays:
        kept = {name: arrays[name] for name in arrays.files}
    by_step = {str(int(iteration) // accumulation): metrics for iteration, metrics in history.items()}
    step = int(chosen) // accumulation
    return TrainedModel(metrics=history[chosen], arrays=kept, step=step, history=by_step, batch=batch)


@contextlib.contextmanager
def _explaining(plan: Plan, space: Workspace) -> Iterator[None]:
    """Raise the errors of a training with messages for the user."""
    try:
        yield
    except (RuntimeError, MemoryError, ValueError) as error:
        explained = _explained(error, plan, space)
        if hasattr(error, "reported_by"):
            vars(explained)["reported_by"] = error.reported_by
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
