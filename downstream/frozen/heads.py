"""Linear heads on the patches of a frozen network: a base of tasks that train them, and the training.

A head is trained on random crops. All processes make the same step on the same batch: each sends its share of the crops
through the network, in pieces whose size does not depend on how many processes there are, and the features are
exchanged. So a training has the same bits on any number of processes, and batch norms cover the whole batch.

B images, D' channels of a map, h x w patches.
"""

import copy
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from checkpoints.backbone import Backbone
from checkpoints.flops import forward_flops, frozen_bytes
from checkpoints.frozen import FrozenExport, FrozenSpec
from downstream.data.reading import loader_processes
from downstream.data.scenes import SceneSet
from downstream.frozen.task import (
    Batches,
    FrozenTask,
    Random,
    UsableScenes,
    areas_score,
    backbone_of,
    shared_out,
)
from downstream.metrics.scores import closing_seconds
from engine.files import locked
from engine.progress import Progress
from engine.seeding import AUGMENT, DROP, shuffled, stream_seeds
from engine.tasks import Workspace, settings_of
from engine.training.interruptions import Stopped, StopRequest, listening
from engine.training.loading import read_ahead
from engine.training.schedules import FallingOneCycle, TrainProgress, check_finite, micro_batch_size
from engine.training.states import (
    State,
    load_optimizer,
    load_state,
    newest_intact,
    optimizer_tensors,
    save_interval,
    save_state,
)
from engine.work import Kind, Part, Scale, Work, seconds_of
from imagesets.sets import kept_folder

VERSION = 1  # of a training's state; raise it when the same settings would train otherwise
PIECE = 2  # crops in a forward pass, unless --batch-size is given
TIMED = 2  # crops that a plan times at once


class HeadTask(FrozenTask):
    """Base of tasks that train linear heads. The bare annotations are settings that all of them define."""

    AFTER_TRAINING: ClassVar[tuple[str, ...]] = ()  # names of settings that the evaluation alone reads

    lr: tuple[float, ...]
    steps: int
    batch: int
    weight_decay: float
    beta2: float
    clip: float
    kept: int

    def schedule(self) -> FallingOneCycle:
        """Of the learning rates."""
        raise NotImplementedError

    def crop_side(self, spec: FrozenSpec) -> tuple[int, int]:
        """Height and width of what goes through the network in training."""
        raise NotImplementedError

    def crop(self, export: FrozenExport, scenes: SceneSet, index: int, random: Random) -> tuple[Tensor, Tensor]:
        """A training crop: normalised image (3, H, W), and its labels or depths (H', W')."""
        raise NotImplementedError

    def head(self, spec: FrozenSpec, classes: int) -> nn.Module:
        """A head with random weights, drawn from torch's generator."""
        raise NotImplementedError

    def maps(self, backbone: Backbone, images: Tensor) -> Tensor:
        """What heads read of normalised images: (B, D', h, w)."""
        raise NotImplementedError

    def loss(self, head: nn.Module, maps: Tensor, targets: Tensor, step: int, random: Random) -> Tensor:
        """Of one head on a batch."""
        raise NotImplementedError

    def judged(self, backbone: Backbone, heads: Sequence[nn.Module], scenes: SceneSet, index: int) -> Any:
        """The result of each head on one scene, which goes through the network once."""
        raise NotImplementedError

    def evaluated(
        self, backbone: Backbone, heads: Sequence["KeptHead"], images: UsableScenes, space: Workspace
    ) -> dict[int, Any]:
        """Place of every usable scene -> its result of `judged`, in every process."""
        scenes = images.scenes
        modules = [self.head(backbone.spec, len(scenes.classes)).to(space.device).eval() for _ in heads]
        for module, head in zip(modules, heads, strict=True):
            module.load_state_dict(dict(head.state))

        judged = partial(self.judged, backbone, modules, scenes)
        return shared_out(images.places, judged, space, f"evaluating on {scenes.url} {scenes.split}")

    def train_heads(
        self, export: FrozenExport, train: UsableScenes, val: UsableScenes, space: Workspace
    ) -> list["KeptHead"]:
        """Train a head for each rate on the same crops; copies of the heads, made `kept` times at even intervals. A
        finished training is read from disk, and a killed one goes on where it was, with the same bits.

        ValueError, before a training that may take hours, for a validation scene that cannot be used.
        """
        piece = micro_batch_size(self.batch, space.batch_size or PIECE)
        settings = {name: value for name, value in settings_of(self).items() if name not in self.AFTER_TRAINING}
        key = {"version": VERSION, "settings": settings, "piece": piece, "seed": space.seed, **train.key(export, space)}
        world = space.world
        folder = world.on_rank0(lambda: kept_folder(space.cache / self.KEY, key, [train.scenes]))
        with world.held_by_rank0(locked(Path(f"{folder}.lock"), f"training heads on {train.scenes.url}")):
            training = HeadTraining(self, export, train, space, folder, piece)
            if training.step < self.steps and not space.skip_bad:
                for problem in world.on_rank0(lambda: val.scenes.unusable).values():
                    raise ValueError(problem)
            training.run()
        return training.kept

    def evaluation(self, scale: Scale) -> list[Part]:
        """The work of choosing among the heads and of evaluating one."""
        raise NotImplementedError

    def cost(self, scale: Scale) -> Work:
        """In memory the network at work, and the features of a batch with gradients of the heads' own."""
        self.check_network(scale.spec)
        spec, size = scale.spec, self.crop_side(scale.spec)
        parts = (
            Part(kind="crops", count=self.steps * self.batch, flops=float(forward_flops(spec, max(size)))),
            Part(kind="updates", count=self.steps),
            Part(kind="states", count=self.steps // save_interval(self.steps)),
            *self.evaluation(scale),
        )
        features = 12.0 * self.batch * spec.width * math.prod(spec.grid_of(size))
        network = frozen_bytes(spec, scale.batch_size or PIECE, max(size))
        return Work(parts=parts, iterations=self.steps, memory=network + features)

    def benchmark(self, export: FrozenExport, space: Workspace, seconds: float) -> dict[Kind, float]:
        """Seconds of a crop through the network, of a step of the heads, and of an evaluated image."""
        train, val = self.opened(export, space)
        backbone, random, places = backbone_of(export, space), np.random.RandomState(0), iter(np.tile(train.places, 99))

        def crops() -> tuple[Tensor, Tensor]:
            pairs = [self.crop(export, train.scenes, int(next(places)), random) for _ in range(TIMED)]
            images, targets = (torch.stack(tensors) for tensors in zip(*pairs, strict=True))
            return self.maps(backbone, images.to(space.device)), targets.to(space.device)

        heads = [self.head(export.spec, len(train.scenes.classes)).to(space.device) for _ in self.lr]
        maps, targets = crops()

        def update() -> None:
            for head in heads:
                self.loss(head, maps, targets, self.steps - 1, random).backward()

        def evaluate() -> Any:
            return self.judged(backbone, [head.eval() for head in heads[:1]], val.scenes, int(val.places[0]))

        return {
            "crops": seconds_of(lambda: crops()[0].sum().item(), seconds / 3) / TIMED,
            "updates": seconds_of(update, seconds / 3) * self.batch / TIMED,
            "evaluation": seconds_of(evaluate, seconds / 3),
            "closing": closing_seconds(areas_score(val.scenes), len(val.scenes)),
        }


class KeptHead(NamedTuple):
    """A head after some steps. state: of the module."""

    lr: float
    step: int
    state: Mapping[str, Tensor]


class HeadTraining:
    """One training of several heads, a rate each, from its newest state on."""

    def __init__(
        self, task: HeadTask, export: FrozenExport, train: UsableScenes, space: Workspace, folder: Path, piece: int
    ) -> None:
        self.task, self.export, self.train, self.space, self.folder = task, export, train, space, folder
        self.piece = piece
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(space.seed)
            first = task.head(export.spec, len(train.scenes.classes))
        self.heads = [copy.deepcopy(first).to(space.device).train() for _ in task.lr]  # all begin alike
        self.optimisers = [
            torch.optim.AdamW(head.parameters(), lr=lr, betas=(0.9, task.beta2), weight_decay=task.weight_decay)
            for head, lr in zip(self.heads, task.lr, strict=True)
        ]
        self.step = 0
        self.kept: list[KeptHead] = []
        self.losses: list[float] = []
        state = space.world.on_rank0(lambda: load_state(newest) if (newest := newest_intact(folder)) else None)
        if state is not None:
            self.load(state)

    def run(self) -> None:
        """Go on to the end. Stopped at a signal, with the state saved."""
        task, world = self.task, self.space.world
        if self.step == task.steps:
            return
        request, interval = StopRequest(), save_interval(task.steps)
        label = f"{task.KEY} on {self.train.scenes.url.removesuffix(':')}"
        backbone = backbone_of(self.export, self.space)
        progress = Progress(f"training {label}", task.steps, "steps", quiet=not world.is_rank0)
        with listening(request.ask), progress:
            progress.resume(self.step)
            batches = self.batches(backbone)
            for maps, targets in batches:
                self.update(maps, targets)
                progress.advance(1)
                stop = any(world.gather_results(lambda: request.asked))
                if self.step % interval == 0 or self.step == task.steps or stop:
                    world.on_rank0(lambda: save_state(self.folder, self.step, self.state()))
                if stop and self.step < task.steps:
                    batches.close()
                    raise Stopped.after(self.step, task.steps, label, self.folder)

    def batches(self, backbone: Backbone) -> Generator[tuple[Tensor, Tensor]]:
        """Features (B, D', h, w) and targets (B, H, W) of each step that is left, the same in all processes."""
        task, space = self.task, self.space
        own = range(space.world.rank, task.batch // self.piece, space.world.size)
        starts = [step * task.batch + number * self.piece for step in range(self.step, task.steps) for number in own]
        read = partial(drawn_crop, task, self.export, self.train, space.seed)
        reader = Batches(read, [range(start, start + self.piece) for start in starts])

        def features(loaded: Iterator[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
            """Of this process's pieces of a step."""
            return [
                (task.maps(backbone, images.to(space.device, non_blocking=True)), targets.to(space.device))
                for images, targets in islice(loaded, len(own))
            ]

        loaders = loader_processes(space, len(self.train.places))
        with closing(read_ahead(reader, loaders, space.device)) as loaded:
            for _ in range(self.step, task.steps):
                yield self.exchanged(space.world.on_all_ranks(partial(features, loaded)), own)

    def exchanged(self, pieces: Sequence[tuple[Tensor, Tensor]], own: range) -> tuple[Tensor, Tensor]:
        """The whole batch in every process: each fills its own pieces into zeros, and the batch is their sum."""
        world = self.space.world
        if world.size == 1:
            return torch.cat([maps for maps, _ in pieces]), torch.cat([targets for _, targets in pieces])
        described = [(maps.shape[1:], targets.shape[1:], targets.dtype) for maps, targets in pieces[:1]]
        shapes = next(shapes[0] for shapes in world.gather_objects(described) if shapes)
        maps = torch.zeros(self.task.batch, *shapes[0], device=self.space.device)
        targets = torch.zeros(self.task.batch, *shapes[1], dtype=shapes[2], device=self.space.device)
        for number, (own_maps, own_targets) in zip(own, pieces, strict=True):
            place = slice(number * self.piece, (number + 1) * self.piece)
            maps[place], targets[place] = own_maps, own_targets
        world.all_reduce(maps)
        world.all_reduce(targets)
        return maps, targets

    def update(self, maps: Tensor, targets: Tensor) -> None:
        """One step of every head. ValueError at the first loss that is not finite."""
        task, schedule = self.task, self.task.schedule()
        progress = TrainProgress(step=self.step, steps_per_epoch=task.steps, epochs=1)
        for head, optimiser, lr in zip(self.heads, self.optimisers, task.lr, strict=True):
            group = optimiser.param_groups[0]
            group["lr"] = schedule.at(lr, progress)
            if schedule.momenta is not None:
                group["betas"] = (schedule.beta1_at(progress), task.beta2)
            random = np.random.RandomState(stream_seeds(DROP, self.space.seed, self.step))
            loss = task.loss(head, maps, targets, self.step, random)
            where = f"step {self.step} of {task.steps} (rate {lr:g})"
            check_finite(loss.item(), "loss", where, self.losses, "set a lower lr")
            self.losses = [*self.losses[-4:], loss.item()]
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            if task.clip:
                nn.utils.clip_grad_norm_(head.parameters(), task.clip)
            optimiser.step()
        self.step += 1
        if self.step in [task.steps * number // task.kept for number in range(1, task.kept + 1)]:  # evenly
            for head, lr in zip(self.heads, task.lr, strict=True):
                weights = {name: tensor.detach().cpu().clone() for name, tensor in head.state_dict().items()}
                self.kept.append(KeptHead(lr, self.step, weights))

    def state(self) -> State:
        tensors: dict[str, Tensor] = {}
        for place, (head, optimiser) in enumerate(zip(self.heads, self.optimisers, strict=True)):
            tensors |= {f"head{place}.{name}": tensor for name, tensor in head.state_dict().items()}
            tensors |= {f"rate{place}.{name}": tensor for name, tensor in optimizer_tensors(optimiser).items()}
        for place, kept in enumerate(self.kept):
            tensors |= {f"kept{place}.{name}": tensor for name, tensor in kept.state.items()}
        facts = {"step": self.step, "kept": [[kept.lr, kept.step] for kept in self.kept], "losses": self.losses}
        return State(tensors=tensors, facts=facts)

    def load(self, state: State) -> None:
        for place, (head, optimiser) in enumerate(zip(self.heads, self.optimisers, strict=True)):
            head.load_state_dict(state.under(f"head{place}."))
            load_optimizer(optimiser, State(tensors=state.under(f"rate{place}.")))
        self.step, self.losses = state.facts["step"], list(state.facts["losses"])
        kept = enumerate(state.facts["kept"])
        self.kept = [KeptHead(lr, step, state.under(f"kept{place}.")) for place, (lr, step) in kept]


def drawn_crop(
    task: HeadTask, export: FrozenExport, train: UsableScenes, seed: int, number: int
) -> tuple[Tensor, Tensor]:
    """Crop `number` of a training that goes through its images in a new order in each epoch."""
    count = len(train.places)
    epoch, within = divmod(number, count)
    index = int(train.places[shuffled(count, seed, epoch)[within]])
    return task.crop(export, train.scenes, index, np.random.RandomState(stream_seeds(AUGMENT, seed, epoch, index)))
