"""Features and labels of patches on disk: images of one size, sent through the network once for all tasks.

A file of patches holds, image by image, D numbers and P labels of pixels for each patch. Tasks that read the same
images prepared in the same way share it, and layers that other tasks of a run want are written in the same pass
(`Workspace.wanted`). A killed extraction goes on behind the last image.

Disk: 4 D + P bytes for each patch, of each layer the first part: CAPI's 196 patches of 16 pixels of ADE20K's 22,210
images at D = 1024 take 19 GB, Hummingbird's 10^7 of VOC 43 GB. Memory: that of a search, engine/neighbours.py, 4 D
(GALLERY + 2 QUERIES) + 12 Q k bytes, whatever their number.

N images, n usable, L patches of an image, M patches of a file, D width, P pixels of a patch, K classes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from checkpoints.backbone import Backbone
from checkpoints.flops import forward_flops
from checkpoints.frozen import FrozenExport, FrozenSpec
from downstream.data.listing import IGNORED
from downstream.data.scenes import SceneSet, layout_of, mask_classes, scene_image
from downstream.frozen.neighbours import most_frequent, patch_pixels
from downstream.frozen.segmentation import areas_of
from downstream.frozen.task import FrozenTask, Layer, UsableScenes, backbone_of, own_share, patch_maps, whole_patches
from engine.files import locked
from engine.neighbours import SMALLEST_NORM, Prepare, search, tiles_of
from engine.progress import Progress
from engine.rows import Rows, release_pages, row_slices
from engine.tasks import Workspace
from engine.work import Part, Scale
from imagesets.sets import kept_folder

VERSION = 1  # raise it when the same images would give other features than before
READ = 16384  # patches that are read at once

Distance = Literal["cosine", "L2"]
# The network, a scene's number, and its place among those that are used -> normalised image (3, S, S), labels (S, S).
Prepared = Callable[[Backbone, int, int], tuple[Tensor, np.ndarray]]
Chosen = Callable[[np.ndarray, int], np.ndarray]  # labels (L, P) and the image's place -> patches that are kept


@dataclass(frozen=True, kw_only=True)
class PatchFile:
    """Patches of n images, `per_image` of each. features: (M, D) float32. pixels: (M, P) uint8. Both stay on disk."""

    features: np.ndarray
    pixels: np.ndarray
    per_image: int
    forwards: int  # images that went through the network in this call

    def of_images(self, places: np.ndarray) -> np.ndarray:
        """Rows of the patches of images (m,), in their order."""
        return (places[:, None] * self.per_image + np.arange(self.per_image)).ravel()


def patches_of(
    export: FrozenExport,
    images: UsableScenes,
    name: str,
    prepared: Prepared,
    space: Workspace,
    *,
    layer: Layer = (-1, True),
    per_image: int,
    patch: int,
    chosen: Chosen | None = None,
) -> PatchFile:
    """Patches of all usable images, from disk where they are there. name: says how images are prepared and chosen.

    chosen: `per_image` of an image's patches; None: all of them.
    """
    world, scenes = space.world, images.scenes
    key = {
        "version": VERSION,
        "export": export.digest,
        "images": scenes.fingerprint,
        "used": np.asarray(images.places).tolist() if len(images.places) < len(scenes) else None,
        "name": name,
        "machine": [torch.device(space.device).type, space.precision, space.compiled],
    }
    folder = world.on_rank0(lambda: kept_folder(space.cache / "patches", key, [scenes]))
    layers = list(dict.fromkeys([layer, *space.wanted.get(name, ())]))
    with world.held_by_rank0(locked(Path(f"{folder}.lock"), f"features of patches of {scenes.url}")):
        rows = len(images.places) * per_image
        shapes = {layer: (rows, export.spec.width) for layer in layers}
        world.on_rank0(lambda: _allocate(folder, shapes, (rows, patch * patch), len(images.places)))
        files = {layer: np.load(folder / f"{_name(layer)}.npy", mmap_mode="r+") for layer in layers}
        done = {layer: np.load(folder / f"{_name(layer)}-done.npy", mmap_mode="r+") for layer in layers}
        pixels = np.load(folder / "pixels.npy", mmap_mode="r+")

        # Told by one process, as the others may already be writing while the last one reads the marks.
        missing = world.on_rank0(lambda: np.flatnonzero(~np.all(list(done.values()), axis=0)))

        def work() -> int:
            own = own_share(missing, space).tolist()
            if not own:
                return 0
            backbone = backbone_of(export, space)
            with Progress(f"patches of {scenes.url} {scenes.split}", len(own), quiet=not world.is_rank0) as progress:
                for place in own:
                    index = int(images.places[place])
                    image, labels = prepared(backbone, index, place)
                    target, own_pixels = slice(place * per_image, (place + 1) * per_image), patch_pixels(labels, patch)
                    kept = np.arange(per_image) if chosen is None else chosen(own_pixels, place)
                    pixels[target] = own_pixels[kept]
                    for each, maps in zip(layers, patch_maps(backbone, image[None], layers), strict=True):
                        values = maps[0].flatten(1).T.cpu().numpy()
                        if not np.isfinite(values).all():
                            raise ValueError(f"{scenes.image(index)}: features of layer {each[0]} are not finite")
                        files[each][target] = values[kept]
                        done[each][place] = True
                    for mapped in (*files.values(), pixels):
                        release_pages(mapped)
                    progress.advance(1)
            return len(own)

        forwards = sum(world.gather_results(work))
    return PatchFile(
        features=np.load(folder / f"{_name(layer)}.npy", mmap_mode="r"),
        pixels=np.load(folder / "pixels.npy", mmap_mode="r"),
        per_image=per_image,
        forwards=forwards,
    )


def _name(layer: Layer) -> str:
    return f"layer{layer[0]}-{'norm' if layer[1] else 'raw'}"


def _allocate(folder: Path, shapes: Mapping[Layer, tuple[int, int]], pixels: tuple[int, int], images: int) -> None:
    """Files of zeros, which take no room until they are written, where there are none yet."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted: list[tuple[str, tuple[int, ...], Any]] = [("pixels", pixels, np.uint8)]
    for layer, shape in shapes.items():
        wanted += [(_name(layer), shape, np.float32), (f"{_name(layer)}-done", (images,), np.bool_)]
    for name, size, kind in wanted:
        if not (folder / f"{name}.npy").is_file():
            made = np.lib.format.open_memmap(folder / f".{name}.npy", mode="w+", dtype=kind, shape=size)
            made.flush()
            (folder / f".{name}.npy").rename(folder / f"{name}.npy")


def standardised_rows(values: np.ndarray, mean: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """(m, D) float32."""
    return ((values - mean) / spread).astype(np.float32)


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


def comparing(queries: Rows, mean: np.ndarray, spread: np.ndarray, distance: Distance) -> Prepare:
    """How standardised rows are read so that the largest inner product is the nearest patch: for cosines at length one;
    for the L2 distance with minus half of its squared length behind a row of the memory, and 1 behind a query."""

    def prepare(rows: Rows, part: slice) -> np.ndarray:
        values = standardised_rows(np.asarray(rows[part]), mean, spread)
        release_pages(rows)
        if distance == "cosine":
            return values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), SMALLEST_NORM)
        squares = np.square(values).sum(1, dtype=np.float64)
        ending = np.ones(len(values)) if rows is queries else -squares / 2
        return np.concatenate([values, ending[:, None]], axis=1).astype(np.float32)

    return prepare


def patch_labels(pixels: np.ndarray) -> np.ndarray:
    """(M, P) on disk -> the most frequent label of each patch (M,)."""
    found = np.empty(len(pixels), np.uint8)
    for part in row_slices(len(pixels), READ):
        found[part] = most_frequent(np.asarray(pixels[part]), axis=1)
        release_pages(pixels)
    return found


def nearest_patches(
    memory: Rows, queries: Rows, k: int, space: Workspace, prepare: Prepare
) -> tuple[np.ndarray, np.ndarray]:
    """Similarities and rows (Q, k) of the k patches of a memory nearest to each query, in every process."""
    world = space.world
    if k > len(memory):
        raise ValueError(f"{k} neighbours among {len(memory)} patches of the memory; take more images or fewer of them")
    tiles = sum(len(numbers) for _, numbers in tiles_of(len(memory), len(queries), world))
    with Progress("searching neighbours of patches", tiles, "tiles", quiet=not world.is_rank0) as progress:
        found = search(memory, queries, k, device=space.device, prepare=prepare, world=world, advance=progress.advance)
    if world.size == 1:
        return found.similarities, found.indices
    similarities, indices = np.zeros((len(queries), k), np.float32), np.zeros((len(queries), k), np.int64)
    similarities[found.places], indices[found.places] = found.similarities, found.indices
    both = torch.from_numpy(similarities), torch.from_numpy(indices)
    for values in both:
        world.add_up(values)
    return both[0].numpy(), both[1].numpy()


LABELS_FROM_ONE = ("ade20k",)  # layouts whose files call unlabelled pixels 0, which the sources keep as a value


def labels_in_file(scenes: SceneSet, classes: np.ndarray) -> tuple[np.ndarray, int, int]:
    """Classes (H, W) uint8 of a mask -> the values that the sources read, how many classes these have, and which value
    is ignored: 255, or in ADE20K 0, which is one of the 151."""
    if layout_of(scenes.url) in LABELS_FROM_ONE:
        return classes + np.uint8(1), len(scenes.classes) + 1, 0  # 255 becomes 0
    return classes, len(scenes.classes), IGNORED


class SquashedTask(FrozenTask):
    """Base of CAPI's evaluations: images squashed to a square, training images that select, standardised features.

    Annotated without a comment: settings that both have.
    """

    side: int
    holdout: float

    def view(self, spec: FrozenSpec, layer: Layer = (-1, True)) -> str:
        """Name of how images are prepared."""
        return f"squashed{whole_patches(self.side, spec)}_bicubic"

    def features(self, export: FrozenExport, space: Workspace) -> dict[str, tuple[Any, ...]]:
        return {self.view(export.spec): ((-1, True),)}

    def squashed(self, export: FrozenExport, images: UsableScenes, space: Workspace) -> PatchFile:
        """Patches of all usable images, with the labels of their pixels as they are in files."""
        side, patch = whole_patches(self.side, export.spec), export.spec.patch_size

        def prepared(backbone: Backbone, index: int, place: int) -> tuple[Tensor, np.ndarray]:
            image = scene_image(images.scenes, index)
            labels = mask_classes(images.scenes, index, image.size[::-1])
            pixels = np.asarray(image.resize((side, side), Image.Resampling.BICUBIC)).transpose(2, 0, 1).copy()
            small = np.asarray(Image.fromarray(labels).resize((side, side), Image.Resampling.NEAREST))
            return backbone.prepare(torch.from_numpy(pixels)[None])[0], labels_in_file(images.scenes, small)[0]

        count = (side // patch) ** 2
        return patches_of(export, images, self.view(export.spec), prepared, space, per_image=count, patch=patch)

    def divided(self, file: PatchFile, images: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows of a file of so many training images: those that are learnt, and those of the images that select."""
        held = int(self.holdout * images)
        if not held:
            raise ValueError(f"{images} training images, and a share of {self.holdout:g} selects: none; raise holdout")
        order = np.random.RandomState(seed).permutation(images)
        return file.of_images(np.sort(order[held:])), file.of_images(np.sort(order[:held]))

    def patch_work(self, scale: Scale) -> tuple[list[Part], int]:
        """Parts of both splits' extraction, and patches of an image."""
        side = whole_patches(self.side, scale.spec)
        flops, count = float(forward_flops(scale.spec, side)), (side // scale.spec.patch_size) ** 2
        return [
            Part(kind="features", count=images, flops=flops, of=f"{split} {self.view(scale.spec)}")
            for split, images in scale.images.items()
        ], count


def squashed_areas(predicted: np.ndarray, pixels: np.ndarray, classes: int, ignored: int) -> np.ndarray:
    """Labels that are predicted of pixels (L, P) of an image, and those in files -> areas (K+1, 3).

    The last class is the ignored value 255: predicting it counts as a class that is always wrong, as for scikit-learn.
    """
    shown, truth = (np.where(values == IGNORED, classes, values) for values in (predicted, pixels))
    return areas_of(shown, truth, classes + 1, (classes if ignored == IGNORED else ignored,))
