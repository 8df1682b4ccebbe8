"""How a dense model is trained: mmengine's Runner without output, resumable after any step with the same bits.

The Runner's own resuming would draw other augmentations. Here learning rates, the order of the images, augmentation and
dropout are functions of the seed and of the iteration or position, while weights, optimiser and batch statistics come
from the state on disk. So a resumed training has the bits of an uninterrupted one.

An iteration is one forward and backward pass; `accumulation` iterations make one optimiser step. Training images are
numbered by position: of N images, position p is image p mod N in the permutation of epoch p div N, augmented with
random numbers of its own. Step t with batch size b reads the positions tb to (t+1)b - 1, however processes and
micro-batches share them.
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
from collections.abc import Generator, Iterator, Mapping, Sequence
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
from engine.errors import option
from engine.files import locked, open_regular, read_json, write_atomic
from engine.precision import autocast
from engine.printing import say
from engine.progress import Progress, span
from engine.seeding import AUGMENT, DROP, seeded, shuffled, stream_seeds
from engine.tasks import Workspace
from engine.training.interruptions import Stopped, listening
from engine.training.loading import ignore_signals, loaded_by
from engine.training.schedules import MAX_SHOWN_LOSSES, Schedule, TrainProgress, check_finite
from engine.training.states import newest_intact, save_interval, write_state

SAME_SIGNAL_SECONDS = 0.5  # a second signal within this time is a copy of the first, such as torchrun passes on
STATE_SUFFIX = ".pth"  # of mmengine's own format


class IterationHook(Hook):
    """Sets the learning rates and the seed of dropout before each iteration; checks the loss after it.

    Both depend only on the number of the iteration, so that a resumed training has the same bits. Raises ValueError for
    a loss that is not finite. bar: progress bar in place of mmengine's log lines; the caller opens and closes it.
    """

    priority = "HIGHEST"

    def __init__(self, schedule: Schedule, start: TrainProgress, accumulation: int, seed: int, bar: Progress) -> None:
        self.schedule, self.start, self.accumulation, self.seed, self.bar = schedule, start, accumulation, seed, bar
        self.losses: deque[float] = deque(maxlen=MAX_SHOWN_LOSSES)

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
        loss = outputs["loss"].detach().clone()
        all_reduce(loss, "mean")  # so that all processes stop together
        where = f"step {batch_idx // self.accumulation} of {self.start.steps}"
        check_finite(loss.item(), "loss", where, self.losses, "lower lr, or use float32 if this was bfloat16")
        self.losses.append(loss.item())
        self.bar.advance(1)


class StateHook(Hook):
    """Saves the state every `interval` optimiser steps, and after a signal that asked any process to stop.

    One signal ends the training after the current step. A second one drops that step if iterations of it are missing,
    and saves the state before it. At each signal the user is told what the stop waits for. The two newest states are
    kept. A state with weights that are not finite is not saved.
    """

    priority = "LOWEST"

    def __init__(self, folder: Path, interval: int, accumulation: int, label: str, world: World) -> None:
        self.folder, self.interval, self.accumulation = folder, interval, accumulation
        self.label, self.world = label, world
        self.signal_times: list[float] = []  # time.monotonic() at each signal
        self.iteration, self.iterations = 0, 0  # the current iteration, and how many there are
        self.iteration_start = time.monotonic()
        self.timed_seconds, self.timed_iterations = 0.0, 0
        self.evaluating = False
        self.saved_norm_buffers: list[torch.Tensor] = []  # as they were before the step, whose iterations change them

    def on_signal(self) -> None:
        """Record a signal, and say what the stop waits for.

        In another thread, because the signal may have interrupted this one while it was printing.
        """
        now = time.monotonic()
        if self.signal_times and now - self.signal_times[-1] < SAME_SIGNAL_SECONDS:
            return
        self.signal_times.append(now)
        if self.label and not self.world.rank:
            message = f"{self.label}: {self.stop_message(now)}"
            threading.Thread(target=say, args=(message,), kwargs={"errors": True}).start()

    def stop_message(self, now: float) -> str:
        """What a stop waits for, and for about how long. now: time.monotonic()."""
        if self.evaluating:
            step_too = " and a step" if self.iteration < self.iterations else ""
            return f"asked to stop: waits for the evaluation{step_too}"
        step, done = divmod(self.iteration, self.accumulation)
        drops_step = len(self.signal_times) > 1 and self.accumulation > 1
        left = 1 if drops_step else self.accumulation - done
        about = ""
        if self.timed_iterations:
            seconds = left * self.timed_seconds / self.timed_iterations - (now - self.iteration_start)
            about = f", about {span(max(seconds, 1.0))}"
        if drops_step:
            return f"drops step {step + 1}: waits for the pass in work{about}, and saves the state after step {step}"
        steps = self.iterations // self.accumulation
        message = f"asked to stop: waits for step {step + 1} of {steps}{about}, and saves the state"
        if left > 1:
            message += f"; a second signal drops this step ({done} of {self.accumulation} passes done)"
        return message

    def before_val(self, runner: Runner) -> None:
        self.evaluating = True

    def after_val(self, runner: Runner) -> None:
        self.evaluating, self.iteration_start = False, time.monotonic()

    def before_train(self, runner: Runner) -> None:
        self.iteration, self.iterations = runner.iter, runner.max_iters
        self.iteration_start = time.monotonic()

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        if self.accumulation > 1 and batch_idx % self.accumulation == 0:
            self.saved_norm_buffers = [buffer.clone() for buffer in norm_buffers(runner.model)]

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        now = time.monotonic()
        self.timed_seconds += now - self.iteration_start
        self.timed_iterations += 1
        self.iteration, self.iterations, self.iteration_start = batch_idx + 1, runner.max_iters, now
        if not self.every_n_train_iters(runner, self.accumulation):  # within a step
            if any(count > 1 for count in self.world.gather_objects(len(self.signal_times))):
                self.drop_step(runner)
            return
        stopping = self.stop_requested()
        due = self.every_n_train_iters(runner, self.interval * self.accumulation) or self.is_last_train_iter(runner)
        if (due or stopping) and not runner.rank:
            self.save(runner)
        if stopping:
            raise self.stopped(runner.iter + 1, runner.max_iters)

    def after_train(self, runner: Runner) -> None:
        if self.stop_requested():  # during the last evaluation
            raise self.stopped(runner.iter, runner.max_iters)

    def stop_requested(self) -> bool:
        """Whether a signal reached any process; all processes must call this together."""
        return any(self.world.gather_objects(len(self.signal_times)))

    def drop_step(self, runner: Runner) -> None:
        """Save the state before the current step, which has not changed the weights yet, and raise Stopped."""
        for buffer, saved in zip(norm_buffers(runner.model), self.saved_norm_buffers, strict=True):
            buffer.copy_(saved)
        runner.train_loop._iter = runner.iter // self.accumulation * self.accumulation - 1  # the last done iteration
        if not runner.rank:
            self.save(runner)
        raise self.stopped(runner.iter + 1, runner.max_iters)

    def stopped(self, iteration: int, iterations: int) -> Stopped:
        step, steps = iteration // self.accumulation, iterations // self.accumulation
        return Stopped.after(step, steps, self.label, self.folder)

    def save(self, runner: Runner) -> None:
        def write(path: str) -> None:
            folder, name = os.path.split(path)
            runner.save_checkpoint(folder, name, by_epoch=False, save_param_scheduler=False)

        if has_finite_weights(runner.model):
            write_state(self.folder, runner.iter + 1, write, STATE_SUFFIX)


def has_finite_weights(model: nn.Module) -> bool:
    """Whether no update has broken the weights, which would show only in the next loss."""
    return all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def norm_buffers(model: nn.Module) -> list[torch.Tensor]:
    """Running statistics of the batch norms."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    return [buffer for norm in norms for buffer in norm.buffers()]


class EvaluationHook(Hook):
    """Writes the metrics of each evaluation as soon as they are known, and the arrays of the one to report.

    Args:
        folder: folder of the training.
        metric: metric of mmseg or mmdet with `arrays`, from which its numbers can be recomputed, on rank 0.
        every: iterations between evaluations.
        best: metric whose highest value selects the evaluation to report; "" for the last evaluation.
    """

    def __init__(self, folder: Path, metric: Any, every: int, best: str) -> None:
        self.folder, self.metric, self.every, self.best = folder, metric, every, best

    def before_train(self, runner: Runner) -> None:
        due = runner.iter and (runner.iter % self.every == 0 or runner.iter == runner.max_iters)
        if due and str(runner.iter) not in self.read():  # killed after the state was saved and before its evaluation
            runner.val_loop.run()

    def before_val(self, runner: Runner) -> None:
        if not has_finite_weights(runner.model):
            where = f"after iteration {runner.iter} of {runner.max_iters}"
            raise ValueError(f"weights are not finite {where}; lower lr, or use float32 if this was bfloat16")
        for buffer in runner.model.buffers():  # batch statistics, which differ between processes on CPU
            broadcast(buffer)

    def after_val_epoch(self, runner: Runner, metrics: Mapping[str, float] | None = None) -> None:
        if runner.rank:
            return
        assert metrics is not None
        evaluations = self.read() | {str(runner.iter): {name: float(value) for name, value in metrics.items()}}
        if self.reported_iteration(evaluations) == str(runner.iter):
            arrays = io.BytesIO()
            np.savez_compressed(arrays, **self.metric.arrays)
            write_atomic(self.folder / "arrays.npz", arrays.getvalue())
        write_atomic(self.folder / "judgements.json", json.dumps(evaluations))

    def read(self) -> dict[str, dict[str, float]]:
        """Iteration -> metrics of all evaluations so far."""
        path = self.folder / "judgements.json"
        return read_json(path) if path.exists() else {}

    def reported_iteration(self, evaluations: Mapping[str, Mapping[str, float]]) -> str:
        """The iteration whose evaluation is reported; of equal ones the latest."""
        if not self.best:
            return max(evaluations, key=int)
        return max(evaluations, key=lambda iteration: (evaluations[iteration][self.best], int(iteration)))


class PositionDataset(Dataset):
    """Training images by position, over endless epochs. images: dataset of mmseg or mmdet."""

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


class PositionSampler(Sampler[int]):
    """The positions that process `rank` reads, in `micro_batches` of `size` images."""

    def __init__(self, size: int, micro_batches: int, rank: int, processes: int) -> None:
        self.size, self.micro_batches, self.rank, self.processes = size, micro_batches, rank, processes
        self.done = 0  # micro-batches to skip

    def skip(self, images: int) -> None:
        """Leave out the first `images` of this process; mmengine's loop calls this when it resumes a training."""
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

    metrics: dict[str, float]  # of the reported evaluation
    arrays: dict[str, np.ndarray]  # arrays from which these metrics can be recomputed
    step: int  # optimiser step of the reported evaluation
    history: dict[str, dict[str, float]]  # step -> metrics, of all evaluations
    batch: Mapping[str, Any]  # facts on how the images of a step were divided


class QuietRunner(Runner):
    """mmengine's Runner on the given device, which logs to files only and leaves the model's weights as they are."""

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
        """Do nothing: the weights are pretrained, and the heads were drawn from the seed when the model was built."""

    def dump_config(self) -> None:
        """Do nothing: there is no configuration file."""

    def train(self) -> nn.Module:
        """Train. The loader processes end with it: the training's have not read all, and an error would keep them."""
        try:
            return super().train()
        finally:
            self._train_dataloader.close()
            self._val_dataloader.close()

    def load_checkpoint(self, filename: str, map_location: Any = "cpu", **settings: Any) -> dict[str, Any]:
        with quiet_libraries():  # they print that they load
            return super().load_checkpoint(filename, map_location, **settings | {"strict": True})


class SynchronisedLoader(DataLoader):
    """Loader that gives all processes a batch, or raises in all of them the error that one has with an image.

    This costs one small message between processes per batch; otherwise the others would wait for gradients forever.
    """

    batches: Generator[Any] | None = None  # of the newest pass

    def __init__(self, images: Any, world: World, **settings: Any) -> None:
        super().__init__(images, collate_fn=pseudo_collate, worker_init_fn=ignore_signals, **settings)
        self.world = world

    def __iter__(self) -> Iterator[Any]:
        self.batches = loaded_by(self)
        while (batch := self.world.on_all_ranks(partial(next, self.batches, None))) is not None:
            yield batch

    def close(self) -> None:
        """End the loader processes of a pass that did not come to its end."""
        if self.batches:
            self.batches.close()


class AutocastWrapper(OptimWrapper):
    """Optimiser wrapper that runs forward passes in `precision`; bfloat16 needs no loss scaling."""

    def __init__(self, device: str, precision: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.device, self.precision = device, precision

    @contextlib.contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        with super().optim_context(model), autocast(self.device, self.precision):
            yield


class EvaluationLoop(ValLoop):
    """mmengine's evaluation with a progress bar; in float32 in any precision of training, as in mmseg and mmdet."""

    def run(self) -> dict[str, float]:
        with Progress("evaluating", len(self.dataloader)) as self.bar:
            return super().run()

    def run_iter(self, idx: int, data_batch: Any) -> None:
        super().run_iter(idx, data_batch)
        self.bar.advance(1)


def run_plan(plan: Plan, space: Workspace) -> TrainedModel:
    """Train, from the last state on disk if there is one, and evaluate.

    A finished training is read from disk. If another run does the same training, this one waits for it.

    Raises:
        ValueError: the loss is not finite, memory ran out, or an image cannot be read; the last state stays on disk.
        Stopped: a signal asked a process to stop; in all processes, after the same step.
    """
    world, size, accumulation = space.world, plan.micro_batch_size(space), plan.accumulation(space)
    folder = plan.folder(space)
    synchronised = world.size > 1 and torch.device(space.device).type == "cuda"
    with quiet_libraries():
        model = plan.build_model(synchronised)
    has_batch_norm = any(isinstance(module, nn.BatchNorm2d | nn.SyncBatchNorm) for module in model.modules())
    batch = {
        "images": plan.batch,
        "at_once": size,
        "accumulated": accumulation,
        "processes": world.size,
        "batch_norm_over": size * (world.size if synchronised else 1) if has_batch_norm else None,
    }
    if world.is_rank0:
        say(*(f"{plan.label}: {line}" for line in batch_norm_warnings(batch)), errors=True)
    *images, metric = plan.build_data()
    evaluations = EvaluationHook(folder, metric, (plan.judge_every or plan.start.steps) * accumulation, plan.best)
    with world.held_by_rank0(locked(folder.with_suffix(".lock"), "it does the same training")):
        if not world.on_rank0((folder / "finished").exists):
            _train(model, images, evaluations, plan, space)
        return world.on_rank0(lambda: _read_result(evaluations, accumulation, batch))


def _train(model: nn.Module, images: Sequence[Any], evaluations: EvaluationHook, plan: Plan, space: Workspace) -> None:
    """Train to the end, and mark the training as finished. images: training and validation datasets."""
    steps, accumulation, world = plan.start.steps, plan.accumulation(space), space.world
    bar = Progress(plan.label, steps, "steps", parts=accumulation)
    states = StateHook(evaluations.folder / "states", save_interval(steps), accumulation, plan.label, world)
    hooks = [IterationHook(plan.schedule, plan.start, accumulation, space.seed, bar), states, evaluations]
    runner = build_runner(model, images, hooks, evaluations, plan, space)
    with listening(states.on_signal), bar, _errors_explained(plan, space), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries' warnings about their own calls
        runner.train()
    world.barrier()
    if world.is_rank0:
        (evaluations.folder / "finished").touch()
        shutil.rmtree(evaluations.folder / "states", ignore_errors=True)


def build_runner(
    model: nn.Module,
    images: Sequence[Any],
    hooks: list[Hook],
    evaluations: EvaluationHook,
    plan: Plan,
    space: Workspace,
) -> Runner:
    """The Runner, made of objects: without registries and configuration files."""
    world, folder = space.world, evaluations.folder
    size, accumulation = plan.micro_batch_size(space), plan.accumulation(space)
    iterations = plan.start.steps * accumulation
    optimizer = plan.build_optimizer(model)
    for group in optimizer.param_groups:
        group["base_lr"] = group["lr"]  # the group's peak rate
    state = world.on_rank0(lambda: newest_intact(folder / "states", STATE_SUFFIX))
    train_images, val_images = images
    workers = loader_processes(space, len(plan.train))
    positions = PositionSampler(size, iterations, world.rank, world.size)
    name = f"{folder.name}_{time.time_ns()}"  # mmengine's loggers and message hubs are global, by name
    with quiet_libraries():
        return QuietRunner(
            device=space.device,
            model=model,
            work_dir=str(folder),
            train_dataloader=SynchronisedLoader(
                PositionDataset(train_images, space.seed),
                world,
                batch_size=size,
                sampler=positions,
                num_workers=workers,
            ),
            train_cfg={
                "type": IterBasedTrainLoop,
                "max_iters": iterations,
                "val_begin": 1,
                "val_interval": evaluations.every,
            },
            optim_wrapper=AutocastWrapper(
                space.device, space.precision, optimizer=optimizer, accumulative_counts=accumulation
            ),
            val_dataloader=SynchronisedLoader(
                val_images, world, sampler=DefaultSampler(val_images, shuffle=False), num_workers=workers
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


def _read_result(evaluations: EvaluationHook, accumulation: int, batch: Mapping[str, Any]) -> TrainedModel:
    """The result of a finished training, from the files of its evaluations."""
    history = evaluations.read()
    reported = evaluations.reported_iteration(history)
    with open_regular(evaluations.folder / "arrays.npz") as file:
        arrays = dict(np.load(file))
    return TrainedModel(
        metrics=history[reported],
        arrays=arrays,
        step=int(reported) // accumulation,
        history={str(int(iteration) // accumulation): metrics for iteration, metrics in history.items()},
        batch=batch,
    )


@contextlib.contextmanager
def _errors_explained(plan: Plan, space: Workspace) -> Iterator[None]:
    """Raise errors of a training with messages for the user, reported by the same process."""
    try:
        yield
    except (RuntimeError, MemoryError, ValueError) as error:
        explained = _explained(error, plan, space)
        if hasattr(error, "reported_by"):
            vars(explained)["reported_by"] = error.reported_by
        raise explained from error


def _explained(error: Exception, plan: Plan, space: Workspace) -> Exception:
    """The error with a message that names the setting to change, or without the traceback of a loader process."""
    text = str(error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text:
        return ValueError(
            f"out of memory with {plan.micro_batch_size(space)} images at once on {space.device}: lower "
            f"{option('batch_size')}; accumulation keeps the recipe's batch of {plan.batch}"
        )
    if "more than 1 value per channel" in text:
        return ValueError(f"batch norm needs statistics of two images at once: give {option('batch_size', 2)} or more")
    if "Original Traceback" in text:  # torch's message for an error in a loader process; its last line is the error
        kind = ValueError if isinstance(error, ValueError) else RuntimeError
        return kind(text.strip().splitlines()[-1].partition(": ")[2])
    return error
