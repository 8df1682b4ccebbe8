"""Segmentation by comparing patches of square images: their features and labels on disk, and a base of such tasks.

A file of patches holds, image by image, D numbers and P labels of pixels for each patch. Tasks that read the same
images prepared in the same way share it. A killed extraction goes on behind the last batch.

Disk: 4 D + P bytes for each patch: CAPI's 196 patches of 16 pixels of ADE20K's 22,210
images at D = 1024 take 19 GB, Hummingbird's 10^7 of VOC 43 GB. Memory: that of a search, engine/neighbours.py, 4 D
(GALLERY + 2 QUERIES) + 12 Q k bytes, whatever their number.

N images, n usable, B of a batch, L patches of an image, M patches of a file, D width, P pixels of a patch, K classes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from checkpoints.flops import forward_flops, frozen_bytes
from checkpoints.frozen import FrozenExport, FrozenSpec
from downstream.data.listing import IGNORED
from downstream.data.reading import loader_processes
from downstream.data.scenes import SceneSet, layout_of, scene_image, scene_mask
from downstream.frozen.task import (
    Batches,
    FrozenTask,
    UsableScenes,
    areas_of,
    areas_score,
    backbone_of,
    check_classes,
    check_features,
    normalised_pixels,
    own_share,
    patch_maps,
    resampled_metrics,
    resamples,
    whole_patches,
)
from downstream.metrics.scores import closing_seconds, scores, weighted_scores
from engine.files import locked
from engine.machine import run_on_core_threads
from engine.neighbours import SMALLEST_NORM, Prepare, search
from engine.progress import Progress
from engine.rows import ChosenRows, Rows, release_pages, row_slices
from engine.tasks import Outcome, Workspace
from engine.training.loading import read_ahead
from engine.work import Kind, Part, Scale, Work, seconds_of
from imagesets.sets import kept_folder

VERSION = 2  # raise it when the same images would give other features than before
READ = 16384  # patches that are read at once
LAYER = (-1, True)  # the last block behind the final norm
FEATURES = "layer-1-norm"  # name of its file
TIMED = 4  # images that a plan times
LABELS_FROM_ONE = ("ade20k",)  # layouts whose files call unlabelled pixels 0, which the sources keep as a value

Distance = Literal["cosine", "L2"]
# The place of an image among those that are used -> normalised image (3, S, S), labels as in its file (S, S).
Square = Callable[[int], tuple[Tensor, Tensor]]
Chosen = Callable[[np.ndarray, int], np.ndarray]  # labels (L, P) and the image's place -> patches that are kept


@dataclass(frozen=True, kw_only=True)
class PatchFile:
    """Patches of n images, `per_image` of each. features: (M, D) float32. pixels: (M, P) uint8. Both stay on disk.

    Labels are numbered as in files: there are `classes` values, and pixels of the value `ignored` have none.
    """

    features: np.ndarray
    pixels: np.ndarray
    per_image: int
    classes: int
    ignored: int
    forwards: int  # images that went through the network in this call

    def __len__(self) -> int:
        return len(self.pixels)

    def of_images(self, places: np.ndarray) -> np.ndarray:
        """Rows of the patches of images (m,), in their order."""
        return (places[:, None] * self.per_image + np.arange(self.per_image)).ravel()

    @cached_property
    def labels(self) -> np.ndarray:
        """The most frequent label of each patch (M,)."""
        labels = np.empty(len(self), np.uint8)
        for part in row_slices(len(self), READ):
            labels[part] = most_frequent(np.asarray(self.pixels[part]), axis=1)
            release_pages(self.pixels)
        return labels


def patches_of(
    export: FrozenExport,
    images: UsableScenes,
    name: str,
    square: Square,
    space: Workspace,
    per_image: int,
    chosen: Chosen | None = None,
) -> PatchFile:
    """Patches of all usable images, from disk where they are there. name: says how images are prepared and chosen.

    chosen: `per_image` of an image's patches; None: all of them. On a CPU every core reads and computes its own
    batches, as for other features (probes/features/extract.py); a GPU is fed by loader processes.
    """
    world, scenes, patch = space.world, images.scenes, export.spec.patch_size
    kind, count = torch.device(space.device).type, len(images.places)
    size = batch_size(space.batch_size, kind)
    key = {"version": VERSION, "name": name, "batch": size, **images.key(export, space)}
    folder = world.on_rank0(lambda: kept_folder(space.cache / "patches", key, [scenes]))
    shapes = {
        FEATURES: ((count * per_image, export.spec.width), np.float32),
        "pixels": ((count * per_image, patch * patch), np.uint8),
        f"{FEATURES}-done": ((count,), np.bool_),
    }
    with world.held_by_rank0(locked(Path(f"{folder}.lock"), f"features of patches of {scenes.url}")):
        world.on_rank0(lambda: _allocate(folder, shapes))
        features, pixels, done = (np.load(folder / f"{file}.npy", mmap_mode="r+") for file in shapes)

        def write(places: range, maps: Tensor, labels: Tensor) -> None:
            """Patches of a batch: maps (B, D, h, w) and labels (B, S, S)."""
            values = maps.flatten(2).transpose(1, 2).cpu().numpy()
            for place, own, mask in zip(places, values, labels.numpy(), strict=True):
                check_features(torch.from_numpy(own), scenes.image_path(int(images.places[place])))
                own_pixels = patch_pixels(mask, patch)
                kept = np.arange(per_image) if chosen is None else chosen(own_pixels, place)
                rows = slice(place * per_image, (place + 1) * per_image)
                pixels[rows], features[rows] = own_pixels[kept], own[kept]
            done[places] = True
            release_pages(features)
            release_pages(pixels)

        # A batch that lacks an image is computed again as a whole, because the bits of features depend on their batch.
        # Rank 0 alone decides, as other processes may already be writing while the last one reads the marks.
        numbers = world.on_rank0(lambda: np.unique(np.flatnonzero(~done) // size))

        def work() -> int:
            batches = [range(at * size, min((at + 1) * size, count)) for at in own_share(numbers, space).tolist()]
            if not batches:
                return 0
            backbone, total, reader = backbone_of(export, space), sum(map(len, batches)), Batches(square, batches)
            with Progress(f"patches of {scenes.url} {scenes.split}", total, quiet=not world.is_rank0) as progress:

                def finish(item: int, squares: Tensor, labels: Tensor) -> None:
                    write(batches[item], patch_maps(backbone, squares, [LAYER])[0], labels)
                    progress.advance(len(batches[item]))

                if kind == "cpu":
                    run_on_core_threads(lambda item: finish(item, *reader[item]), range(len(batches)), space.workers)
                else:
                    loaded = read_ahead(reader, loader_processes(space, total), space.device)
                    for item, (squares, labels) in enumerate(loaded):
                        finish(item, squares, labels)
            return total

        forwards = sum(world.gather_results(work))
    features, pixels = (np.load(folder / f"{file}.npy", mmap_mode="r") for file in (FEATURES, "pixels"))
    _, classes, ignored = file_labels(scenes)
    return PatchFile(
        features=features, pixels=pixels, per_image=per_image, classes=classes, ignored=ignored, forwards=forwards
    )


def batch_size(asked: int | None, device: str) -> int:
    """Images of a forward pass."""
    return asked or (4 if device == "cpu" else 32)


def _allocate(folder: Path, shapes: Mapping[str, tuple[tuple[int, ...], Any]]) -> None:
    """Files of zeros, which take no room until they are written, where there are none yet."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, (shape, dtype) in shapes.items():
        if not (folder / f"{file}.npy").is_file():
            np.lib.format.open_memmap(folder / f".{file}.npy", mode="w+", dtype=dtype, shape=shape).flush()
            (folder / f".{file}.npy").rename(folder / f"{file}.npy")


def patch_pixels(labels: np.ndarray, patch: int) -> np.ndarray:
    """Labels (H, W) -> those of each patch, row by row: (L, P)."""
    height, width = (side // patch for side in labels.shape)
    return labels.reshape(height, patch, width, patch).swapaxes(1, 2).reshape(height * width, patch * patch)


def most_frequent(labels: np.ndarray, axis: int) -> np.ndarray:
    """The most frequent value along an axis, the smallest of ties."""
    return torch.from_numpy(np.moveaxis(labels, axis, -1).copy()).mode(dim=-1).values.numpy()


def moments(features: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation (D,) of rows (M,) of a file, in two passes; 1 for a constant column."""
    total, squares = np.zeros(features.shape[1]), np.zeros(features.shape[1])
    for part in row_slices(len(rows), READ):
        total += features[rows[part]].sum(0, dtype=np.float64)
        release_pages(features)
    mean = total / len(rows)
    for part in row_slices(len(rows), READ):
        squares += np.square(features[rows[part]] - mean).sum(0)
        release_pages(features)
    spread = np.sqrt(squares / len(rows))
    return mean, np.where(spread > 10 * np.finfo(np.float64).eps * np.maximum(np.abs(mean), 1), spread, 1.0)


@dataclass(frozen=True, kw_only=True)
class PatchRows:
    """Some patches of a file, standardised. rows: (M,) of the file. mean, spread: (D,) of the features."""

    file: PatchFile
    rows: np.ndarray
    mean: np.ndarray
    spread: np.ndarray

    @cached_property
    def features(self) -> ChosenRows:
        """(M, D) float32, as they are in the file."""
        return ChosenRows(self.file.features, self.rows)

    def standardised(self, part: slice = slice(None)) -> np.ndarray:
        """(m, D) float32."""
        values = ((self.features[part] - self.mean) / self.spread).astype(np.float32)
        release_pages(self.features)
        return values


def comparing(memory: PatchRows, queries: PatchRows, distance: Distance) -> Prepare:
    """Prepare standardised rows so that the nearest patch has the largest inner product. Cosine: rows are normalised.
    L2: minus half of its squared length is appended to a row of the memory, and 1 to a query."""

    def prepare(rows: Rows, part: slice) -> np.ndarray:
        is_query = rows is queries.features
        values = (queries if is_query else memory).standardised(part)
        if distance == "cosine":
            return values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), SMALLEST_NORM)
        ending = np.ones(len(values)) if is_query else -np.square(values).sum(1, dtype=np.float64) / 2
        return np.concatenate([values, ending[:, None]], axis=1).astype(np.float32)

    return prepare


def nearest_patches(
    memory: Rows, queries: Rows, k: int, space: Workspace, prepare: Prepare
) -> tuple[np.ndarray, np.ndarray]:
    """Similarities and rows (Q, k) of the k patches of a memory nearest to each query, in every process."""
    world = space.world
    if k > len(memory):
        raise ValueError(f"{k} neighbours among {len(memory)} patches of the memory; take more images or fewer of them")
    label = "searching neighbours of patches"
    neighbours = search(memory, queries, k, device=space.device, prepare=prepare, world=world, label=label)
    if world.size == 1:
        return neighbours.similarities, neighbours.indices
    similarities, indices = np.zeros((len(queries), k), np.float32), np.zeros((len(queries), k), np.int64)
    similarities[neighbours.places], indices[neighbours.places] = neighbours.similarities, neighbours.indices
    both = torch.from_numpy(similarities), torch.from_numpy(indices)
    for values in both:
        world.all_reduce(values)
    return both[0].numpy(), both[1].numpy()


def file_labels(scenes: SceneSet) -> tuple[int, int, int]:
    """How the sources number labels: what is added to the classes of a mask, how many values there are, and which one
    is ignored: 255, or in ADE20K 0, which is one of the 151."""
    if layout_of(scenes.url) in LABELS_FROM_ONE:
        return 1, len(scenes.classes) + 1, 0  # 255 becomes 0
    return 0, len(scenes.classes), IGNORED


def labelled_image(scenes: SceneSet, index: int) -> tuple[Image.Image, np.ndarray]:
    """A scene's image, and its labels (H, W) uint8 as in files."""
    image = scene_image(scenes, index)
    return image, scene_mask(scenes, index, image.size[::-1]) + np.uint8(file_labels(scenes)[0])


class SquareTask(FrozenTask):
    """Base of evaluations by patches of images made square. The bare annotation is a setting that all define."""

    side: int

    def view(self, spec: FrozenSpec) -> str:
        """Name of how evaluated images are prepared."""
        raise NotImplementedError

    def square(self, export: FrozenExport, images: UsableScenes, place: int) -> tuple[Tensor, Tensor]:
        """An evaluated image as a `Square`."""
        raise NotImplementedError

    def measured(self, memory: PatchFile, queries: PatchFile, space: Workspace) -> tuple[np.ndarray, Mapping[str, Any]]:
        """Areas (n, K', 3) of the validation images, and facts."""
        raise NotImplementedError

    def scored(self, areas: np.ndarray, weights: np.ndarray) -> Mapping[str, np.ndarray]:
        """Areas (N, K', 3) and weights (R, N) of the images -> metric -> (R,) percent."""
        return {name: values for name, values in weighted_scores([areas], weights).items() if name != "mAcc"}

    def features(self, export: FrozenExport, space: Workspace) -> dict[str, tuple[Any, ...]]:
        return {self.view(export.spec): (LAYER,)}

    def patches(self, spec: FrozenSpec) -> int:
        """Patches of an image."""
        return (whole_patches(self.side, spec) // spec.patch_size) ** 2

    def evaluated(self, export: FrozenExport, images: UsableScenes, space: Workspace) -> PatchFile:
        """All patches of images prepared as those that are evaluated."""
        square = partial(self.square, export, images)
        return patches_of(export, images, self.view(export.spec), square, space, self.patches(export.spec))

    def remembered(self, export: FrozenExport, train: UsableScenes, space: Workspace) -> PatchFile:
        """Labelled patches of the training images."""
        return self.evaluated(export, train, space)

    def pass_of(self, scale: Scale, split: str, view: str = "", times: int = 1) -> Part:
        """The pass of one split through the network."""
        flops = float(forward_flops(scale.spec, whole_patches(self.side, scale.spec)))
        view = view or self.view(scale.spec)
        return Part(kind="features", count=scale.images[split] * times, flops=flops, of=f"{split} {view}")

    def work(self, scale: Scale, parts: Sequence[Part], patches: float, memory: float) -> Work:
        """Work of these parts and of the resamples, with so many patches on disk, and bytes beside the network in
        memory."""
        spec, size = scale.spec, batch_size(scale.batch_size, torch.device(scale.device).type)
        network = frozen_bytes(spec, size, whole_patches(self.side, spec))
        disk = patches * (4.0 * spec.width + spec.patch_size**2)
        return Work(parts=(*parts, resamples(scale)), memory=memory + network, disk=disk)

    def benchmark(self, export: FrozenExport, space: Workspace, seconds: float) -> dict[Kind, float]:
        """Seconds of an image through the network."""
        _, val = self.opened(export, space)
        few = val.subset(np.arange(min(TIMED, len(val.places))))
        backbone = backbone_of(export, space)

        def extract() -> None:
            squares = [self.square(export, few, place)[0] for place in range(len(few.places))]
            patch_maps(backbone, torch.stack(squares), [LAYER])[0].sum().item()

        return {
            "features": seconds_of(extract, seconds / 2) / len(few.places),
            "closing": closing_seconds(areas_score(val.scenes), len(val.scenes)),
        }

    def run(self, export: FrozenExport, space: Workspace) -> Outcome:
        train, val = self.opened(export, space)
        check_classes(space, train, val)
        memory, queries = self.remembered(export, train, space), self.evaluated(export, val, space)
        usable, facts = self.measured(memory, queries, space)
        areas = np.zeros((len(val.scenes), *usable.shape[1:]), np.int64)
        areas[val.places] = usable
        return Outcome(
            metrics=resampled_metrics(partial(self.scored, areas), len(areas)),
            arrays={"areas": areas},
            facts={"train": train.facts, "val": val.facts, "patches": len(memory), **facts},
            cost={"forwards": memory.forwards + queries.forwards},
        )


Choice = Mapping[str, Any]  # setting -> the value that is tried


class CapiTask(SquareTask):
    """Base of CAPI's evaluations: training images that are held out choose a setting; features are standardised."""

    holdout: float

    @property
    def choices(self) -> list[Choice]:
        """What is tried, in the source's order: of equals the first is taken."""
        raise NotImplementedError

    def predicted(
        self, choices: Sequence[Choice], memory: PatchRows, queries: PatchRows, space: Workspace
    ) -> Iterator[tuple[Choice, np.ndarray]]:
        """Each choice with the labels (Q, P) that it predicts for the queries from the memory's labelled patches, in
        every process; (Q, 1) if it predicts one label for a whole patch."""
        raise NotImplementedError

    def view(self, spec: FrozenSpec) -> str:
        return f"squashed{whole_patches(self.side, spec)}_bicubic"

    def square(self, export: FrozenExport, images: UsableScenes, place: int) -> tuple[Tensor, Tensor]:
        size = (whole_patches(self.side, export.spec),) * 2
        image, labels = labelled_image(images.scenes, int(images.places[place]))
        small = np.asarray(Image.fromarray(labels).resize(size, Image.Resampling.NEAREST))
        squashed = image.resize(size, Image.Resampling.BICUBIC)
        return normalised_pixels(squashed, export.mean, export.std), torch.from_numpy(small.copy())

    def summary(self, spec: FrozenSpec, images: Mapping[str, int]) -> dict[str, Any]:
        self.check_network(spec)
        return {
            "image size": whole_patches(self.side, spec),
            "patches of an image": self.patches(spec),
            "choices": len(self.choices),
            "images that choose": int(self.holdout * images["train"]),
            "forward passes": images["train"] + images["val"],
        }

    def measured(self, memory: PatchFile, queries: PatchFile, space: Workspace) -> tuple[np.ndarray, Mapping[str, Any]]:
        images = len(memory) // memory.per_image
        count = int(self.holdout * images)
        if not count:
            raise ValueError(f"{images} training images, and a share of {self.holdout:g} selects: none; raise holdout")
        order = np.random.RandomState(space.seed).permutation(images)
        learnt, held = (memory.of_images(np.sort(part)) for part in (order[count:], order[:count]))
        mean, spread = moments(memory.features, learnt)
        rows = partial(PatchRows, mean=mean, spread=spread)
        labelled = memory.labels != memory.ignored
        known, asked = rows(file=memory, rows=learnt[labelled[learnt]]), rows(file=memory, rows=held)
        scored = {
            self.choices.index(choice): scores(areas_of_patches(pixels, asked))["mIoU"]
            for choice, pixels in self.predicted(self.choices, known, asked, space)
        }
        tried = [{**choice, "mIoU": scored[number]} for number, choice in enumerate(self.choices)]
        best = self.choices[max(scored, key=lambda number: (scored[number], -number))]
        every = rows(file=memory, rows=np.flatnonzero(labelled))
        asked = rows(file=queries, rows=np.arange(len(queries)))
        ((_, pixels),) = self.predicted([best], every, asked, space)
        return areas_of_patches(pixels, asked), {"patches": len(every.rows), **best, "tried": tried}


def areas_of_patches(predicted: np.ndarray, queries: PatchRows) -> np.ndarray:
    """Labels (Q, P) or (Q, 1) predicted of the patches of whole images -> their areas (n, K+1, 3).

    The last class is the value 255: predicting it counts as a class that is always wrong, as for scikit-learn.
    """
    file, areas = queries.file, []
    classes, ignored = file.classes, file.classes if file.ignored == IGNORED else file.ignored
    for part in row_slices(len(queries.rows), file.per_image):
        truth = np.asarray(file.pixels[queries.rows[part]])
        shown, truth = (np.where(values == IGNORED, classes, values) for values in (predicted[part], truth))
        areas.append(areas_of(np.broadcast_to(shown, truth.shape), truth, classes + 1, (ignored,)))
    return np.stack(areas)
