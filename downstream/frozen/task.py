"""What tasks on the patches of a frozen network share: scenes, features of patches, and the training of linear heads.

A head is trained on random crops. All processes make the same step on the same batch: each sends its share of the crops
through the network, in pieces whose size does not depend on how many processes there are, and the features are
exchanged. So a training has the same bits on any number of processes, and batch norms cover the whole batch.

B images, D width, h x w patches.
"""

from collections import ChainMap
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

from checkpoints.backbone import Backbone, Features
from checkpoints.export import ViTExport
from checkpoints.flops import forward_flops, frozen_bytes
from checkpoints.frozen import FrozenExport, FrozenSpec
from downstream.data.scenes import SceneSet, check_layout, open_both
from downstream.frozen.segmentation import Random
from downstream.metrics.scores import weighted_scores
from engine.files import locked
from engine.machine import own_cores, sharing_memory
from engine.progress import Progress
from engine.resampling import BLOCK, Score, resampled, resamples_of
from engine.seeding import AUGMENT, DROP, shuffled, stream_seeds
from engine.tasks import Metric, Task, Workspace, settings_of
from engine.training.interruptions import Stopped, StopRequest, ignore_signals, listening, loaded_by
from engine.training.schedules import FallingOneCycle, TrainProgress, check_finite, micro_batch_size
from engine.training.states import (
    State,
    load_optimizer,
    load_state,
    newest_whole,
    optimizer_tensors,
    save_interval,
    save_state,
)
from engine.work import Kind, Part, Scale, seconds_of
from imagesets.sets import kept_folder

VERSION = 1  # of a training's state; raise it when the same settings would train otherwise
PIECE = 2  # crops in a forward pass, unless --batch-size is given
LOADERS = 8  # processes that read images, at most
MIN_IMAGES = 500  # training images below which starting such processes takes longer than they save
TIMED = 2  # crops that a plan times at once

Each = TypeVar("Each")
Layer = tuple[int, bool]  # number of a block, negative from the end; whether the final norm follows


class UsableScenes(NamedTuple):
    """One split, and what a run with --skip-bad leaves out. places: (n,) of the scenes that can be used."""

    scenes: SceneSet
    places: np.ndarray
    skipped: Mapping[str, str]  # path -> why

    @property
    def facts(self) -> dict[str, Any]:
        scenes = self.scenes
        return {
            "url": scenes.url,
            "images": len(scenes),
            "fingerprint": scenes.fingerprint,
            "skipped": dict(self.skipped),
        }

    def key(self, export: FrozenExport, space: Workspace) -> dict[str, Any]:
        """What their features depend on, under which they are kept."""
        return {
            "export": export.digest,
            "images": self.scenes.fingerprint,
            "used": np.asarray(self.places).tolist() if len(self.places) < len(self.scenes) else None,
            "machine": [torch.device(space.device).type, space.precision, space.compiled],
        }

    def subset(self, chosen: np.ndarray) -> "UsableScenes":
        """The usable scenes at `chosen` places of `places` alone."""
        return self._replace(places=self.places[np.sort(chosen)])


class FrozenTask(Task):
    """Base of these tasks."""

    KEY: ClassVar[str]  # name of its file, and of its folder in the cache

    def check_network(self, spec: FrozenSpec) -> None:
        if not spec.has_patches:
            raise ValueError(
                f"{getattr(spec, 'reference', spec.label)} gives one vector of an image, and {self.KEY} reads patch "
                "tokens: let it return class token or None, patch tokens and their grid"
            )

    def check_images(self, space: Workspace) -> None:
        check_layout(space.data, self.LAYOUT)
        if space.decode != "exact":
            raise ValueError(f"{space.data}: dense tasks read images exactly; run them without --decode {space.decode}")

    def opened(self, export: FrozenExport, space: Workspace) -> tuple[UsableScenes, UsableScenes]:
        """Training and validation scenes. ValueError for a network or images that cannot be evaluated, and where a run
        with --skip-bad would leave no image."""
        self.check_network(export.spec)
        self.check_images(space)
        usable = []
        for scenes in open_both(space):
            bad = space.world.on_rank0(partial(getattr, scenes, "unusable")) if space.skip_bad else {}
            places = np.setdiff1d(np.arange(len(scenes)), np.array(list(bad), np.int64))
            if not len(places):
                raise ValueError(f"{scenes.url}: none of the {len(scenes)} scenes of {scenes.split} can be used")
            usable.append(UsableScenes(scenes, places, {str(scenes.image(place)): why for place, why in bad.items()}))
        return usable[0], usable[1]


class SizedBackbone(Backbone):
    """A backbone that makes tables of relative positions anew for each size of images; others take any size."""

    def __init__(self, export: FrozenExport, space: Workspace) -> None:
        super().__init__(export, space.device, space.precision, space.compiled)
        self.export, self.space = export, space
        self.others: dict[tuple[int, int], SizedBackbone] = {}

    def of_size(self, images: Tensor) -> "SizedBackbone":
        """The backbone whose tables fit these images."""
        size, export = (images.shape[-2], images.shape[-1]), self.export
        if not isinstance(export, ViTExport) or export.spec.relative_position == "none" or size == export.spec.size:
            return self
        if size not in self.others:
            self.others[size] = SizedBackbone(export.at_size(size), self.space)
        return self.others[size]

    def views(self, images: Tensor, wanted: Sequence[Layer]) -> dict[Layer, Features]:
        return Backbone.views(self.of_size(images), images, wanted)

    def keys(self, images: Tensor) -> Tensor:
        return Backbone.keys(self.of_size(images), images)


def backbone_of(export: FrozenExport, space: Workspace) -> Backbone:
    """The frozen network on the workspace's device."""
    return SizedBackbone(export, space)


def patch_maps(backbone: Backbone, images: Tensor, layers: Sequence[Layer], cls: bool = False) -> list[Tensor]:
    """Normalised images (B, 3, H, W), H and W multiples of the patch -> of each layer (B, D, h, w); registers and class
    tokens are no patches. cls: with the class token beside each patch, (B, 2D, h, w)."""
    views = backbone.views(images.to(backbone.mean.device), layers)
    maps = []
    for layer in layers:
        patches = views[layer].patches.permute(0, 3, 1, 2)
        if cls:
            token = views[layer].cls
            assert token is not None  # checked by check_network
            patches = with_class_token(patches, token)
        # A copy outside of inference mode, on which heads can be trained; channels first, or convolutions would round
        # otherwise than on what processes exchange.
        maps.append(patches.clone(memory_format=torch.contiguous_format))
    return maps


def check_features(features: Tensor, path: Path) -> None:
    """ValueError, naming the image's file, for features that are NaN or infinite."""
    if not features.isfinite().all():
        raise ValueError(f"{path}: its features are not finite; check the image, or the checkpoint's weights")


def with_class_token(patches: Tensor, cls: Tensor) -> Tensor:
    """Patch map (B, D, h, w) and class tokens (B, D) -> (B, 2D, h, w)."""
    return torch.cat([patches, cls[..., None, None].expand_as(patches)], dim=1)


def whole_patches(side: int, spec: FrozenSpec) -> int:
    """The next multiple of the patch from `side` on."""
    return -(-side // spec.patch_size) * spec.patch_size


def own_share(places: np.ndarray, space: Workspace) -> np.ndarray:
    """Those of this process."""
    return places[space.world.rank :: space.world.size]


def shared_out(
    items: np.ndarray, work: Callable[[int], Each], space: Workspace, label: str, unit: str = "images"
) -> dict[int, Each]:
    """Item -> what `work` gives of it, in order and in every process, of which each does its share."""
    world = space.world

    def share() -> dict[int, Each]:
        own, results = own_share(items, space).tolist(), {}
        with Progress(label, len(own), unit, quiet=not world.is_rank0) as progress:
            for item in own:
                results[item] = work(item)
                progress.advance(1)
        return results

    return dict(sorted(ChainMap(*world.gather_results(share)).items()))


class Batches(Dataset):
    """Item i: images (B, 3, H, W) and targets (B, H', W') that `read_one` gives of `batches[i]`, and why one cannot be
    read or ""."""

    def __init__(self, read_one: Callable[[int], tuple[Tensor, Tensor]], batches: Sequence[Sequence[int]]) -> None:
        self.read_one, self.batches = read_one, batches

    def __len__(self) -> int:
        return len(self.batches)

    def read(self, item: int) -> tuple[Tensor, Tensor]:
        """Images and targets; ValueError where one cannot be read."""
        images, targets = zip(*map(self.read_one, self.batches[item]), strict=True)
        return torch.stack(images), torch.stack(targets)

    def __getitem__(self, item: int) -> tuple[Tensor, Tensor, str]:
        try:
            images, targets = self.read(item)
        except ValueError as error:  # out of a loader process it would come as several lines
            return torch.empty(0), torch.empty(0), str(error)
        if get_worker_info() is not None:
            with sharing_memory():
                images.share_memory_()
                targets.share_memory_()
        return images, targets, ""


def loaded_batches(reader: Batches, space: Workspace, few: bool = False) -> Generator[tuple[Tensor, Tensor]]:
    """All items, read by loader processes. few: so few images that starting such processes would take longer."""
    loaders = space.workers
    if loaders is None:
        loaders = 0 if few else min(LOADERS, own_cores())
    loader = DataLoader(
        reader,
        batch_size=None,
        num_workers=loaders,
        worker_init_fn=ignore_signals,
        prefetch_factor=4 if loaders else None,
        pin_memory=torch.device(space.device).type == "cuda",
    )
    with closing(loaded_by(loader)) as loaded:
        for images, targets, problem in loaded:
            if problem:
                raise ValueError(problem)
            yield images, targets


class HeadTask(FrozenTask):
    """Base of tasks that train linear heads. Annotated without a comment: settings that all of them have."""

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
        """A training crop: normalised image (3, H, W) and what it is labelled with (H', W')."""
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
        """What each head makes of one scene, which goes through the network once."""
        raise NotImplementedError

    def evaluated(
        self, backbone: Backbone, heads: Sequence["KeptHead"], images: UsableScenes, space: Workspace
    ) -> dict[int, Any]:
        """Place of every usable scene -> what is `judged` of it, in every process."""
        scenes = images.scenes
        modules = [self.head(backbone.spec, len(scenes.classes)).to(space.device).eval() for _ in heads]
        for module, head in zip(modules, heads, strict=True):
            module.load_state_dict(dict(head.state))

        judged = partial(self.judged, backbone, modules, scenes)
        return shared_out(images.places, judged, space, f"evaluating on {scenes.url} {scenes.split}")

    def train_heads(self, export: FrozenExport, train: UsableScenes, space: Workspace) -> list["KeptHead"]:
        """Train a head for each rate on the same crops; those after each `kept` part of the steps, or as they are kept
        on disk. A killed training goes on where it was, with the same bits."""
        piece = micro_batch_size(self.batch, space.batch_size or PIECE)
        settings = {name: value for name, value in settings_of(self).items() if name not in self.after_training()}
        key = {"version": VERSION, "settings": settings, "piece": piece, "seed": space.seed, **train.key(export, space)}
        world = space.world
        folder = world.on_rank0(lambda: kept_folder(space.cache / self.KEY, key, [train.scenes]))
        with world.held_by_rank0(locked(Path(f"{folder}.lock"), f"training heads on {train.scenes.url}")):
            training = HeadTraining(self, export, train, space, folder, piece)
            training.run()
        return training.kept

    def after_training(self) -> tuple[str, ...]:
        """Settings on which the training does not depend."""
        return ()

    def cost_of_training(self, scale: Scale) -> list[Part]:
        """Parts of the work that all of these tasks have."""
        side = max(self.crop_side(scale.spec))
        flops = float(forward_flops(scale.spec, side)) if scale.spec.has_patches else 0.0
        return [
            Part(kind="crops", count=self.steps * self.batch, flops=flops),
            Part(kind="updates", count=self.steps),
            Part(kind="states", count=self.steps // save_interval(self.steps)),
        ]

    def memory(self, scale: Scale) -> float:
        """Bytes of the network at work and of the features of a batch, with gradients of the heads' own."""
        side, spec = max(self.crop_side(scale.spec)), scale.spec
        cells = np.prod(spec.grid_of(self.crop_side(spec)))
        return frozen_bytes(spec, scale.batch_size or PIECE, side) + 12.0 * self.batch * spec.width * float(cells)

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


def resampled_metrics(score: Score, images: int) -> dict[str, Metric]:
    """The metrics of `score` (engine/resampling.py) on so many images, and their values on resamples of these."""
    values, drawn = score(np.ones((1, images))), resampled(score, images)
    return {name: Metric(value=float(value[0]), resampled=drawn[name]) for name, value in values.items()}


def closing_seconds(score: Score, images: int) -> float:
    """Seconds of one resample of so many images."""
    return seconds_of(lambda: resampled(score, images, BLOCK), 0.0) / min(BLOCK, resamples_of(images))


def areas_score(scenes: SceneSet) -> Score:
    """The score of areas of images, of the size that a set's have."""
    return partial(weighted_scores, [np.ones((len(scenes), max(len(scenes.classes), 1), 3), np.int64)])


@dataclass(frozen=True, kw_only=True)
class KeptHead:
    """A head after some steps. state: of the module."""

    lr: float
    step: int
    state: Mapping[str, Tensor]


class HeadTraining:
    """One training of several heads, a rate each."""

    def __init__(
        self, task: HeadTask, export: FrozenExport, train: UsableScenes, space: Workspace, folder: Path, piece: int
    ) -> None:
        self.task, self.export, self.train, self.space, self.folder = task, export, train, space, folder
        self.piece = piece
        generator = torch.random.get_rng_state()
        torch.manual_seed(space.seed)
        first = task.head(export.spec, len(train.scenes.classes))
        torch.random.set_rng_state(generator)
        self.heads = [task.head(export.spec, len(train.scenes.classes)) for _ in task.lr]
        for head in self.heads:  # all begin with the same weights
            head.load_state_dict(first.state_dict())
            head.to(space.device).train()
        self.optimisers = [
            torch.optim.AdamW(head.parameters(), lr=lr, betas=(0.9, task.beta2), weight_decay=task.weight_decay)
            for head, lr in zip(self.heads, task.lr, strict=True)
        ]
        self.step = 0
        self.kept: list[KeptHead] = []
        self.losses: list[float] = []

    def run(self) -> None:
        """Go on from the newest state to the end. Stopped at a signal, with the state saved."""
        task, world = self.task, self.space.world
        state = world.on_rank0(lambda: load_state(newest) if (newest := newest_whole(self.folder)) else None)
        if state is not None:
            self.load(state)
        if self.step == task.steps:
            return
        request, interval = StopRequest(), save_interval(task.steps)
        label = f"{task.KEY} on {self.train.scenes.url}"
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

        with closing(loaded_batches(reader, space, few=len(self.train.places) < MIN_IMAGES)) as loaded:
            for _ in range(self.step, task.steps):
                yield self.exchanged(space.world.on_all_ranks(partial(features, loaded)), own)

    def exchanged(self, pieces: Sequence[tuple[Tensor, Tensor]], own: range) -> tuple[Tensor, Tensor]:
        """The whole batch, from each process's pieces: sums, as all but one are zero."""
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
        world.add_up(maps)
        world.add_up(targets)
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
        if self.step in kept_steps(task.steps, task.kept):
            for head, lr in zip(self.heads, task.lr, strict=True):
                weights = {name: tensor.detach().cpu().clone() for name, tensor in head.state_dict().items()}
                self.kept.append(KeptHead(lr=lr, step=self.step, state=weights))

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
        self.kept = [
            KeptHead(lr=lr, step=step, state=state.under(f"kept{place}."))
            for place, (lr, step) in enumerate(state.facts["kept"])
        ]


def kept_steps(steps: int, kept: int) -> set[int]:
    """After which steps heads are kept: `kept` times, evenly, the last time at the end."""
    return {steps * (number + 1) // kept for number in range(kept)}


def drawn_crop(
    task: HeadTask, export: FrozenExport, train: UsableScenes, seed: int, number: int
) -> tuple[Tensor, Tensor]:
    """Crop `number` of a training that goes through its images in a new order in each epoch."""
    count = len(train.places)
    epoch, within = divmod(number, count)
    index = int(train.places[shuffled(count, seed, epoch)[within]])
    return task.crop(export, train.scenes, index, np.random.RandomState(stream_seeds(AUGMENT, seed, epoch, index)))
