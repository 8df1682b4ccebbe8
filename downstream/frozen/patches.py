"""Features and labels of the patches of square images, kept on disk, and the base of the tasks that compare patches.

For each patch a file holds D features and the labels of its P pixels. Tasks that read the same images, prepared in the
same way, share the file. An extraction that was killed continues after its last batch.

Disk: 4 D + P bytes per patch. CAPI's 196 patches of each of ADE20K's 22,210 images take 19 GB at D = 1024 and patches
of 16 pixels, Hummingbird's 10^7 patches of VOC 43 GB. Memory does not grow with the number of patches: a search takes
4 D (TILE_ROWS + 2 TILE_QUERIES) + 12 Q k bytes (engine/neighbours.py).

N images, n usable, B in a batch, L patches of an image, M patches of a file, D width, P pixels of a patch, K classes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from checkpoints.flops import forward_flops, frozen_bytes
from checkpoints.frozen import FrozenExport, FrozenSpec
from downstream.data.listing import IGNORED
from downstream.data.reading import loader_processes
from downstream.data.scenes import SceneSet, layout_of, scene_image, scene_mask, warn_of_masks
from downstream.frozen.task import (
    Batches,
    FrozenTask,
    UsableScenes,
    backbone_of,
    check_features,
    patch_maps,
    resampled_metrics,
    round_up_to_patch,
)
from downstream.metrics.previews import preview_arrays, preview_indices, thumbnail
from downstream.metrics.scores import scene_mious, weighted_scores, worst_and_median
from engine.files import locked, reserve
from engine.machine import run_on_core_threads
from engine.neighbours import Prepare, search, search_bytes
from engine.progress import Progress, with_progress
from engine.rows import Rows, release_pages, row_slices
from engine.tasks import Outcome, Shared, Workspace
from engine.training.loading import read_ahead
from engine.work import Part, Scale, Work
from imagesets.sets import training_folder

VERSION = 2  # of patch files; raise it if the same images would give different features
ROWS_READ = 16384  # patches that are read at once
LAYER = (-1, True)  # the last block, with the final norm
FEATURES = "layer-1-norm"  # name of the file with the features of LAYER
LABELS_FROM_ONE = ("ade20k",)  # layouts whose files use 0 for unlabelled pixels, which the sources count as a label

# Position among the usable images -> normalised image (3, S, S) and labels (S, S), numbered as in files.
ReadSquare = Callable[[int], tuple[Tensor, Tensor]]
# Labels (L, P) of an image's patches, and the image's position -> indices of the patches to keep.
SelectPatches = Callable[[np.ndarray, int], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class PatchFile:
    """Patches of n images, memory-mapped from disk: features (M, D) float32, and labels of their pixels (M, P) uint8.

    Labels are numbered as in the mask files: there are `classes` values, and `ignored` marks unlabelled pixels.
    """

    features: np.ndarray
    pixels: np.ndarray
    per_image: int  # patches of each image
    classes: int
    ignored: int
    forwards: int  # images that this call sent through the network

    def __len__(self) -> int:
        return len(self.pixels)

    def rows_of_images(self, positions: np.ndarray) -> np.ndarray:
        """Rows of all patches of the images at `positions` (m,), image by image."""
        return (positions[:, None] * self.per_image + np.arange(self.per_image)).ravel()

    @cached_property
    def labels(self) -> np.ndarray:
        """The most frequent label of each patch (M,)."""
        labels = np.empty(len(self), np.uint8)
        for part in with_progress([*row_slices(len(self), ROWS_READ)], "labels of patches", "blocks"):
            labels[part] = most_frequent(np.asarray(self.pixels[part]), axis=1)
            release_pages(self.pixels)
        return labels


def extract_patches(
    export: FrozenExport,
    images: UsableScenes,
    name: str,
    read: ReadSquare,
    space: Workspace,
    per_image: int,
    select: SelectPatches | None = None,
) -> PatchFile:
    """Patches of all usable images, computed unless they are on disk.

    On a CPU every core reads and computes its own batches, as for other features (probes/features/extract.py); a GPU
    is fed by loader processes.

    Args:
        name: identifies how images are prepared and patches selected.
        read: reads and prepares an image.
        per_image: patches kept of each image.
        select: chooses `per_image` patches of an image; None keeps all.
    """
    world, scenes, patch = space.world, images.scenes, export.spec.patch_size
    device, count = torch.device(space.device).type, len(images.indices)
    size = batch_size(space.batch_size, device)
    key = {"version": VERSION, "name": name, "batch": size, **images.key(export, space)}
    folder = world.on_rank0(lambda: training_folder(space.cache / "patches", key, [scenes]))
    shapes = {
        FEATURES: ((count * per_image, export.spec.width), np.float32),
        "pixels": ((count * per_image, patch * patch), np.uint8),
        f"{FEATURES}-done": ((count,), np.bool_),
    }
    with world.held_by_rank0(locked(Path(f"{folder}.lock"), f"features of patches of {scenes.url}")):
        world.on_rank0(lambda: _allocate(folder, shapes))
        features, pixels, done = (np.load(folder / f"{file}.npy", mmap_mode="r+") for file in shapes)

        def write(positions: range, maps: Tensor, labels: Tensor) -> None:
            """Store the patches of a batch: maps (B, D, h, w) and labels (B, S, S)."""
            batch = maps.flatten(2).transpose(1, 2).cpu().numpy()  # (B, L, D)
            for position, image_features, mask in zip(positions, batch, labels.numpy(), strict=True):
                check_features(torch.from_numpy(image_features), scenes.image_path(int(images.indices[position])))
                image_pixels = patchify_labels(mask, patch)
                kept = np.arange(per_image) if select is None else select(image_pixels, position)
                rows = slice(position * per_image, (position + 1) * per_image)
                pixels[rows], features[rows] = image_pixels[kept], image_features[kept]
            done[positions] = True
            release_pages(features)
            release_pages(pixels)

        # A batch that lacks an image is computed again as a whole, because the bits of features depend on the batch.
        # Rank 0 alone reads `done`, because faster processes may already be writing to it.
        missing = world.on_rank0(lambda: np.unique(np.flatnonzero(~done) // size))

        def extract_share() -> int:
            """Compute this process's batches; returns their number of images."""
            own_batches = missing[world.rank :: world.size].tolist()
            batches = [range(number * size, min((number + 1) * size, count)) for number in own_batches]
            if not batches:
                return 0
            backbone, total, reader = backbone_of(export, space), sum(map(len, batches)), Batches(read, batches)
            with Progress(f"patches of {scenes.url} {scenes.split}", total) as progress:

                def extract(item: int, squares: Tensor, labels: Tensor) -> None:
                    write(batches[item], patch_maps(backbone, squares, [LAYER])[0], labels)
                    progress.advance(len(batches[item]))

                if device == "cpu":
                    run_on_core_threads(lambda item: extract(item, *reader[item]), range(len(batches)), space.workers)
                else:
                    loaded = read_ahead(reader, loader_processes(space, total), space.device)
                    for item, (squares, labels) in enumerate(loaded):
                        extract(item, squares, labels)
            return total

        forwards = sum(world.gather_results(extract_share))
    features, pixels = (np.load(folder / f"{file}.npy", mmap_mode="r") for file in (FEATURES, "pixels"))
    _, classes, ignored = label_numbering(scenes)
    return PatchFile(
        features=features, pixels=pixels, per_image=per_image, classes=classes, ignored=ignored, forwards=forwards
    )


def batch_size(requested: int | None, device: str) -> int:
    """Images in a forward pass: as `--batch-size` says, or the default of the device type."""
    return requested or (4 if device == "cpu" else 32)


def _allocate(folder: Path, shapes: Mapping[str, tuple[tuple[int, ...], Any]]) -> None:
    """Create the files that are missing, filled with zeros. ValueError if the disk has no room for all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, (shape, dtype) in shapes.items():
        if not (folder / f"{file}.npy").is_file():
            np.lib.format.open_memmap(folder / f".{file}.npy", mode="w+", dtype=dtype, shape=shape).flush()
            (folder / f".{file}.npy").rename(folder / f"{file}.npy")
    reserve({path: path.stat().st_size for path in [folder / f"{file}.npy" for file in shapes]})


def patchify_labels(labels: np.ndarray, patch: int) -> np.ndarray:
    """Labels (H, W) -> labels of each patch (L, P), both in raster order."""
    height, width = (side // patch for side in labels.shape)
    return labels.reshape(height, patch, width, patch).swapaxes(1, 2).reshape(height * width, patch * patch)


def unpatchify_labels(pixels: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Labels of patches (L, P) on a grid (h, w) -> labels of the image (H, W): the inverse of `patchify_labels`."""
    side = round(pixels.shape[1] ** 0.5)
    return pixels.reshape(*grid, side, side).swapaxes(1, 2).reshape(grid[0] * side, grid[1] * side)


def most_frequent(labels: np.ndarray, axis: int) -> np.ndarray:
    """The most frequent label along an axis; the smallest one if several are equally frequent."""
    return torch.from_numpy(np.moveaxis(labels, axis, -1).copy()).mode(dim=-1).values.numpy()


def nearest_patches(
    memory: Rows, queries: Rows, k: int, space: Workspace, prepare: Prepare
) -> tuple[np.ndarray, np.ndarray]:
    """The k nearest patches of a memory (M, D) to each query (Q, D), in every process.

    Returns:
        Similarities (Q, k) float32, descending, and rows of the memory (Q, k) int64.
    """
    world = space.world
    if k > len(memory):
        raise ValueError(f"{k} neighbours among {len(memory)} patches of the memory; take more images or fewer of them")
    label = "searching neighbours of patches"
    neighbours = search(memory, queries, k, device=space.device, prepare=prepare, world=world, label=label)
    if world.size == 1:
        return neighbours.similarities, neighbours.indices
    similarities, indices = np.zeros((len(queries), k), np.float32), np.zeros((len(queries), k), np.int64)
    similarities[neighbours.places], indices[neighbours.places] = neighbours.similarities, neighbours.indices
    for values in (similarities, indices):
        world.all_reduce(torch.from_numpy(values))  # sums in place: each query was searched by one process
    return similarities, indices


def label_numbering(scenes: SceneSet) -> tuple[int, int, int]:
    """How the sources number labels: (offset added to the classes of a mask, number of values, ignored value).

    The ignored value is 255, or in ADE20K 0, which is one of the 151 values there.
    """
    if layout_of(scenes.url) in LABELS_FROM_ONE:
        return 1, len(scenes.classes) + 1, 0  # the mask's 255 becomes 0, in uint8
    return 0, len(scenes.classes), IGNORED


def read_labelled_image(scenes: SceneSet, index: int) -> tuple[Image.Image, np.ndarray]:
    """A scene's image, and its labels (H, W) uint8, numbered as in files."""
    image = scene_image(scenes, index)
    return image, scene_mask(scenes, index, image.size[::-1]) + np.uint8(label_numbering(scenes)[0])


class Evaluated(NamedTuple):
    """Areas (n, K', 3) of n images, facts, and position of an image -> its predicted labels (S, S), as in files."""

    areas: np.ndarray
    facts: Mapping[str, Any]
    predict: Callable[[int], np.ndarray]


class SquareTask(FrozenTask):
    """Base of tasks that predict labels of patches of square images from labelled patches of the training images."""

    side: int  # a setting that all subclasses define: side of the squares in pixels

    def transform_name(self, spec: FrozenSpec) -> str:
        """Name of the preparation of evaluated images."""
        raise NotImplementedError

    def read_square(self, export: FrozenExport, images: UsableScenes, position: int) -> tuple[Tensor, Tensor]:
        """An evaluated image, normalised (3, S, S), and its labels (S, S), numbered as in files."""
        raise NotImplementedError

    def evaluate(self, memory: PatchFile, queries: PatchFile, space: Workspace) -> Evaluated:
        """The evaluation of the validation images, whose patches are `queries`."""
        raise NotImplementedError

    def weighted_metrics(self, areas: np.ndarray, weights: np.ndarray) -> Mapping[str, np.ndarray]:
        """Areas (N, K', 3) and weights (R, N) of the images -> metric -> (R,) percent."""
        return {name: values for name, values in weighted_scores([areas], weights).items() if name != "mAcc"}

    def shares(self, export: FrozenExport, space: Workspace) -> Shared:
        return Shared(features={self.transform_name(export.spec): (LAYER,)})

    def patch_count(self, spec: FrozenSpec) -> int:
        """Patches of an image."""
        return (round_up_to_patch(self.side, spec) // spec.patch_size) ** 2

    def extract_split(self, export: FrozenExport, images: UsableScenes, space: Workspace) -> PatchFile:
        """All patches of images that are prepared like evaluated ones."""
        name, read = self.transform_name(export.spec), partial(self.read_square, export, images)
        return extract_patches(export, images, name, read, space, self.patch_count(export.spec))

    def extract_memory(self, export: FrozenExport, train: UsableScenes, space: Workspace) -> PatchFile:
        """The labelled patches of the training images."""
        return self.extract_split(export, train, space)

    def extraction_part(self, scale: Scale, split: str, transform: str = "", times: int = 1) -> Part:
        """The work of sending a split through the network, `times` times. transform: its name, if not the usual one."""
        flops = float(forward_flops(scale.spec, round_up_to_patch(self.side, scale.spec)))
        transform = transform or self.transform_name(scale.spec)
        return Part(kind="features", count=scale.images[split] * times, flops=flops, of=f"{split} {transform}")

    def work(self, scale: Scale, parts: Sequence[Part], patches: float, memory: float) -> Work:
        """These parts. patches: stored on disk. memory: bytes in addition to the network's."""
        spec, size = scale.spec, batch_size(scale.batch_size, torch.device(scale.device).type)
        network = frozen_bytes(spec, size, round_up_to_patch(self.side, spec))
        return Work(parts=tuple(parts), memory=memory + network, disk=patches * (4.0 * spec.width + spec.patch_size**2))

    def search_work(self, scale: Scale, passes: Sequence[Part], memory: float, pairs: float, k: int) -> Work:
        """`passes` through the network, and the search of k neighbours.

        memory: patches of the training images. pairs: compared pairs of patches.
        """
        queries, width = self.patch_count(scale.spec) * scale.images["val"], scale.spec.width
        search = Part(kind="heads", count=1, flops=2.0 * width * pairs)
        return self.work(scale, [*passes, search], memory + queries, search_bytes(int(memory), queries, width, k))

    def run(self, export: FrozenExport, space: Workspace) -> Outcome:
        train, val = self.load_scenes(export, space)
        masks = warn_of_masks(space, train.used, val.used)
        memory, queries = self.extract_memory(export, train, space), self.extract_split(export, val, space)
        usable_areas, facts, predict = self.evaluate(memory, queries, space)
        areas = np.zeros((len(val.scenes), *usable_areas.shape[1:]), np.int64)
        areas[val.indices] = usable_areas

        def small_mask(index: int) -> np.ndarray:
            """The classes of a scene in its square, as a thumbnail; the ignored class if it was skipped."""
            position = int(np.searchsorted(val.indices, index))
            if val.indices[position : position + 1] != [index]:
                return np.full((1, 1), IGNORED, np.uint8)
            return thumbnail(torch.from_numpy(predict(position) - np.uint8(label_numbering(val.scenes)[0])))

        shown, ranked = preview_indices(len(areas)), worst_and_median(scene_mious(areas))
        previews = preview_arrays(shown, [small_mask(index) for index in shown.tolist()])
        previews |= preview_arrays(ranked, [small_mask(index) for index in ranked], "ranked")
        return Outcome(
            metrics=resampled_metrics(partial(self.weighted_metrics, areas), len(areas)),
            arrays={"areas": areas, **previews},
            facts={"train": train.facts, "val": val.facts, "masks": masks, "patches": len(memory), **facts},
            cost={"forwards": memory.forwards + queries.forwards},
        )
