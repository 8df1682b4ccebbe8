"""One training under mmengine's Runner: quiet, resumable at any iteration, exact in what it repeats after a kill.

Rates, order of images, augmentation and dropout are functions of seed and iteration; weights, optimiser and batch
statistics come from the state on disk. So the bits after a resume are those of an uninterrupted run, where the Runner's
own resuming draws other augmentations.

Position p of the stream of training images is image p mod N of epoch p div N's permutation, augmented by random numbers
of its own. Step t of batch size b takes positions tb..(t+1)b-1, however processes and micro-batches share them. N
images of the set.
"""

import contextlib
import logging
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from mmengine.dataset import DefaultSampler, pseudo_collate
from mmengine.evaluator import Evaluator
from mmengine.hooks import Hook
from mmengine.model import MMDistributedDataParallel
from mmengine.optim import OptimWrapper
from mmengine.runner import IterBasedTrainLoop, Runner, ValLoop
from mmengine.visualization import Visualizer
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from downstream.data.reading import loader_processes
from downstream.loop.hooks import STATE_SUFFIX, EachIteration, KeepEvaluations, KeepState
from downstream.loop.training import Plan, norm_warnings
from downstream.models.operators import quiet_libraries
from engine.distributed import World
from engine.files import locked
from engine.precision import autocast
from engine.printing import say
from engine.progress import Progress
from engine.seeding import AUGMENT, seeded, shuffled
from engine.tasks import Workspace
from engine.training.interruptions import listening
from engine.training.loading import ignore_signals
from engine.training.states import newest_whole, save_interval


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
        model = plan.build(synchronised)
    batch_norms = any(isinstance(module, nn.BatchNorm2d | nn.SyncBatchNorm) for module in model.modules())
    batch = {
        "images": plan.batch,
        "at_once": size,
        "accumulated": accumulation,
        "processes": world.size,
        "batch_norm_over": size * (world.size if synchronised else 1) if batch_norms else None,
    }
    if world.is_rank0:
        say(*(f"{plan.label}: {line}" for line in norm_warnings(batch)), errors=True)
    *images, metric = plan.objects()
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
    optimiser, workers = plan.optimise(model), loader_processes(space, len(plan.train))
    for group in optimiser.param_groups:
        group["base_lr"] = group["lr"]  # a peak of its own
    state = world.on_rank0(lambda: newest_whole(folder / "states", STATE_SUFFIX))
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
