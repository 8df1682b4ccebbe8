"""Labelled scenes: images with a mask of classes, or with outlines of things, in the folders of the known sets.

    LAYOUT:ROOT      a folder as downloaded; a layout is a file of downstream/layouts/, or a plugin
    tiny-LAYOUT:     scenes of scikit-learn's digits in the same layout, drawn below the cache

A set is a listing of one split, in sorted order; nothing is decoded to make it. N images, K classes, H x W pixels.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from PIL import Image

from downstream.data.listing import IGNORED, DepthMaps, ImagePairs, Instances, Listing, Pair
from downstream.data.reading import check_pixels, check_values, naming
from engine.distributed import World
from engine.extensions import extensions, load_extension
from engine.files import folder_atomic, read_regular
from engine.machine import run_on_core_threads
from engine.printing import did_you_mean
from engine.progress import Progress
from engine.tasks import Workspace
from imagesets.decoding import MAX_BYTES, decode_rgb, open_image
from imagesets.sets import SPLITS, Split, contents_of, head_of
from imagesets.walk import LARGEST

TINY = "tiny-"
TINY_VERSION = 1  # raise it when the same names would hold other pixels
NAMED = 8  # classes that a line names
MASKS_READ = 2000  # masks of a split, at most, in which a run looks for classes before it trains

Kind = TypeVar("Kind", Listing, Instances, DepthMaps, ImagePairs)


@dataclass(frozen=True, kw_only=True)
class SceneSet:
    """One split. listing: its files below root, and what their masks, outlines or depths mean."""

    url: str
    split: Split
    root: Path
    listing: Listing | Instances | DepthMaps | ImagePairs

    def __len__(self) -> int:
        return len(self.listing.images)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.listing.classes

    @property
    def notes(self) -> tuple[str, ...]:
        return self.listing.notes

    @property
    def mask_listing(self) -> Listing:
        """The listing of a set of masks. ValueError of others."""
        return self._of_kind(Listing, "ade20k")

    @property
    def instances(self) -> Instances:
        """The listing of a set of outlines. ValueError of others."""
        return self._of_kind(Instances, "coco")

    @property
    def image_pairs(self) -> ImagePairs:
        """The listing of a set of pairs of images. ValueError of others."""
        return self._of_kind(ImagePairs, "spair")

    @property
    def depth_maps(self) -> DepthMaps:
        """The listing of a set of depth maps. ValueError of others."""
        return self._of_kind(DepthMaps, "nyu")

    def _of_kind(self, kind: type[Kind], example: str) -> Kind:
        if not isinstance(self.listing, kind):
            raise ValueError(
                f"{self.url}: it holds {self.listing.HOLDS}, no {kind.HOLDS}; give a set of these, such as {example}:"
            )
        return self.listing

    @property
    def facts(self) -> dict[str, Any]:
        """What results record about the set."""
        return {"url": self.url, "images": len(self), "fingerprint": self.fingerprint}

    def image_path(self, index: int) -> Path:
        return self.root / self.listing.images[index]

    def mask_path(self, index: int) -> Path:
        return self.root / self.mask_listing.masks[index]

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 of names and sizes in bytes of images and annotations, in order, and of a list of own classes;
        where they lie plays no part."""
        state = hashlib.sha256()
        for name, size in zip(self.listing.files, self.facts_of_files[:, 0].tolist(), strict=True):
            state.update(f"{name} {size}\n".encode(errors="surrogateescape"))
        if isinstance(self.listing, Listing) and self.listing.own_classes:
            state.update(repr((self.listing.classes, self.listing.classes_of, self.listing.colours)).encode())
        return state.hexdigest()

    @cached_property
    def facts_of_files(self) -> np.ndarray:
        """(F, 3) int64: sizes in bytes, times of modification in ns and inodes of images and annotations."""
        stats = [(self.root / name).stat() for name in self.listing.files]
        facts = [(stat.st_size, stat.st_mtime_ns, stat.st_ino & LARGEST) for stat in stats]
        return np.array(facts, np.int64).reshape(-1, 3)

    @cached_property
    def contents(self) -> str:
        """As ImageSet.contents."""
        return contents_of(self.facts_of_files[:, 1:], lambda index: head_of(self.root / self.listing.files[index]))

    @property
    def modified(self) -> int:
        """As ImageSet.modified."""
        return int(self.facts_of_files[:, 1].max(initial=0))

    @cached_property
    def unusable(self) -> dict[int, str]:
        """Scenes that cannot be used -> why, for runs with --skip-bad: every file is decoded, once for all tasks."""
        with Progress(f"checking scenes of {self.url} {self.split}", len(self)) as progress:
            return decode_scenes(self, progress.advance)[0]

    @cached_property
    def pixels(self) -> "ClassPixels":
        """How many of each class the masks hold, read once for all tasks of a run; of more than MASKS_READ masks as
        many, evenly spread. ValueError names one that cannot be used."""
        masks, counts = min(len(self), MASKS_READ), []
        with Progress(f"reading masks of {self.split}", masks, "masks") as progress:

            def read(index: int) -> None:
                counts.append(count_pixels(scene_mask(self, index), len(self.classes)))
                progress.advance(1)

            run_on_core_threads(read, (np.arange(masks) * len(self) // masks).tolist())
        return ClassPixels(self, np.sum(counts, axis=0), masks)

    def subset(self, indices: Sequence[int] | np.ndarray, name: str) -> "SceneSet":
        """The scenes at `indices` (M,), in that order; `name` is appended to the URL."""
        return replace(self, url=f"{self.url}#{name}", listing=self.listing.take(indices))

    def limited(self, count: int) -> "SceneSet":
        """At most `count` scenes, evenly spread."""
        if count >= len(self):
            return self
        if count < 1:
            raise ValueError(f"{self.url}: a limit of {count} images leaves none; give 1 or more")
        return self.subset(np.arange(count) * len(self) // count, f"limited-{count}")


def open_scenes(url: str, split: Split, cache: Path) -> SceneSet:
    """One split of the set that `url` names; tiny sets are drawn into `cache` unless they are there.

    ValueError, one line: an unknown scheme, a missing folder, an empty split, images without annotations.
    """
    layout, place = parse_scene_url(url)
    tiny = url.startswith(TINY)
    root = tiny_folder(layout, cache) if tiny else Path(place)
    module = load_extension("layouts", layout)
    try:
        if not tiny:
            if not root.is_dir():
                raise ValueError(f"no folder {root}")
            root = module.recognised(root)
        listing = module.listed(root, split)
    except (ValueError, OSError) as error:
        raise ValueError(f"{url}: {error}") from error
    if not listing.images:
        raise ValueError(f"{url}: the {split} split is empty; it needs images in {root / module.IMAGES[split]}")
    return SceneSet(url=url, split=split, root=root, listing=listing)


def tiny_folder(layout: str, cache: Path) -> Path:
    """The folder of a tiny set, drawn at its first use."""
    folder = cache / f"{TINY}{layout}-{TINY_VERSION}"
    if not folder.is_dir():
        with folder_atomic(folder) as root:
            for split in SPLITS:
                load_extension("layouts", layout).write_tiny(root, split)
    return folder


def scene_schemes() -> dict[str, str]:
    """Scheme of a URL of labelled scenes -> what follows its colon."""
    layouts = extensions("layouts")
    return dict.fromkeys(layouts, "ROOT") | {TINY + layout: "" for layout in layouts}


def draw_tiny_sets(urls: Iterable[str], cache: Path, world: World) -> None:
    """The first process draws the tiny sets among `urls` before the others look for them."""
    if layouts := [layout_of(url) for url in urls if url.startswith(TINY)]:
        world.on_rank0(lambda: [tiny_folder(layout, cache) for layout in layouts if layout])


def open_both(space: Workspace) -> tuple[SceneSet, SceneSet]:
    """Training and validation scenes of the workspace's set.

    Every process reads the annotations itself: COCO's take seconds to parse, and would be gigabytes to send.
    """
    draw_tiny_sets([space.data], space.cache, space.world)
    opener = partial(open_scenes, cache=space.cache)
    train, val = space.world.on_all_ranks(lambda: [space.images(split, opener) for split in SPLITS])
    return train, val


def layout_of(url: str) -> str:
    """The layout that a URL's scheme names, "" if it names no set of labelled scenes."""
    layout = url.partition(":")[0].removeprefix(TINY)
    return layout if layout in extensions("layouts") else ""


def serves(url: str, layout: str) -> bool:
    """Whether tasks on scenes of `layout` run on the set that a URL names, too."""
    own = layout_of(url)
    return own == layout or (bool(own) and layout in served_layouts(own))


def check_layout(url: str, layout: str) -> None:
    """ValueError unless tasks on scenes of `layout` run on the set that a URL names."""
    parse_scene_url(url)
    if not serves(url, layout):
        raise ValueError(f"{url}: this task needs {layout}:ROOT or tiny-{layout}:")


def served_layouts(layout: str) -> tuple[str, ...]:
    """Layouts whose tasks run on sets of `layout` too; empty for those that have tasks of their own."""
    return tuple(getattr(load_extension("layouts", layout), "SERVES", ()))


def parse_scene_url(url: str) -> tuple[str, str]:
    """Layout and place of a URL, with ~ expanded. ValueError for an unknown scheme or a misplaced path."""
    scheme, colon, place = url.partition(":")
    layout = scheme.removeprefix(TINY)
    if not colon or layout not in extensions("layouts"):
        urls = {name: f"{name}:{place}" for name, place in scene_schemes().items()}
        raise ValueError(f"{url!r} is no set of labelled scenes{did_you_mean(scheme, urls, rest=f':{place}')}")
    if scheme.startswith(TINY) and place:
        raise ValueError(f"{url}: the tiny set is drawn and takes no path; write {scheme}:")
    if not scheme.startswith(TINY) and not place:
        raise ValueError(f"{url}: give the folder, {scheme}:/data/{scheme}")
    return layout, os.path.expanduser(place)


def classes_of_mask(values: np.ndarray, size: tuple[int, int], listing: Listing, path: Path | str) -> np.ndarray:
    """What a mask's file holds, (H, W) values or (H, W, 3) colours -> classes (H, W). ValueError, naming the file,
    unless it fits the classes and an image of `size` (height, width)."""
    if values.shape[:2] != tuple(size):
        raise ValueError(
            f"{path}: the mask is {' x '.join(map(str, values.shape[:2]))} pixels and its image {size[0]} x {size[1]}; "
            "take both from the same download"
        )
    try:
        return listing.to_classes(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def scene_mask(scenes: SceneSet, index: int, size: tuple[int, int] | None = None) -> np.ndarray:
    """Classes (H, W) uint8 of a scene's pixels, IGNORED where there is none. ValueError, which names the file, for a
    mask that cannot be read or does not fit an image of `size` (height, width)."""
    path, coloured = scenes.mask_path(index), bool(scenes.mask_listing.colours)
    with naming(path):
        mask = open_image(read_regular(path, MAX_BYTES))
        check_values(mask, coloured)
        values = np.asarray(mask.convert("RGB") if coloured else mask, np.uint8)
    height, width = size or values.shape[:2]
    return classes_of_mask(values, (height, width), scenes.mask_listing, path)


def scene_image(scenes: SceneSet, index: int) -> Image.Image:
    """A scene's image, RGB. ValueError, naming the file, where it cannot be read."""
    path = scenes.image_path(index)
    with naming(path):
        return decode_rgb(read_regular(path, MAX_BYTES), str(path))


def scene_depth(scenes: SceneSet, index: int, size: tuple[int, int]) -> np.ndarray:
    """Metres (H, W) float32 of a scene's pixels, 0 where nothing was measured. ValueError, naming the file, where it
    cannot be used with an image of `size` (height, width)."""
    listing = scenes.depth_maps
    path = scenes.root / listing.depths[index]
    with naming(path):
        values = np.asarray(open_image(read_regular(path, MAX_BYTES)))
    try:
        return listing.metres(values, size)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def scene_pair(scenes: SceneSet, number: int, sizes: Mapping[int, tuple[int, int]]) -> Pair:
    """What a pair's file holds. ValueError, naming it, where it cannot be used with images of `sizes`: place of a
    source or target -> width and height in pixels."""
    path = scenes.root / scenes.image_pairs.pairs[number]
    try:
        pair = msgspec.json.decode(read_regular(path, MAX_BYTES), type=Pair)
        if len(pair.src_kps) != len(pair.trg_kps):
            raise ValueError(f"{len(pair.src_kps)} keypoints of the source and {len(pair.trg_kps)} of the target")
        for end, index in enumerate(scenes.image_pairs.ends[number].tolist()):
            if index in sizes:
                pair.check_end(end, sizes[index])
    except ValueError as error:  # msgspec's are
        raise ValueError(f"{path}: {error}") from error
    return pair


def count_pixels(mask: np.ndarray, classes: int) -> np.ndarray:
    """Classes (H, W) of a mask -> pixels (K+1,) of each class, and last of none."""
    counts = np.bincount(mask.ravel(), minlength=IGNORED + 1)
    return np.append(counts[:classes], counts[IGNORED])


def check_scene(scenes: SceneSet, index: int) -> np.ndarray | None:
    """Pixels (K+1,) of each class in a scene's mask, and last of none; None of others. ValueError or OSError for a
    scene that cannot be used."""
    with naming(scenes.image_path(index)):
        image = open_image(read_regular(scenes.image_path(index), MAX_BYTES))
        check_pixels(image)
        image.load()
    height, width = image.size[::-1]
    if isinstance(scenes.listing, Listing):
        return count_pixels(scene_mask(scenes, index, (height, width)), len(scenes.classes))
    if isinstance(scenes.listing, Instances):
        scenes.listing.check_size(index, height, width)
    elif isinstance(scenes.listing, DepthMaps):
        scene_depth(scenes, index, (height, width))
    else:
        for number in np.flatnonzero((scenes.listing.ends == index).any(1)).tolist():
            scene_pair(scenes, number, {index: (width, height)})
    return None


def decode_scenes(
    scenes: SceneSet, advance: Callable[[int], None] = lambda count: None
) -> tuple[dict[int, str], "ClassPixels | None"]:
    """Decode every image and what belongs to it: place of each unusable scene -> a line that says why; and the pixels
    of each class in the masks."""
    problems, counts = {}, []
    for index in range(len(scenes)):
        try:
            counts.append(check_scene(scenes, index))
        except (OSError, ValueError) as error:
            problems[index] = str(error) if isinstance(error, ValueError) else f"{scenes.image_path(index)}: {error}"
        advance(1)
    known = [pixels for pixels in counts if pixels is not None]
    return problems, ClassPixels(scenes, np.sum(known, axis=0), len(known)) if known else None


class ClassPixels:
    """Pixels of each class in the masks of a set. counts (K+1,), the last of no class, over `masks` masks."""

    def __init__(self, scenes: SceneSet, counts: np.ndarray, masks: int) -> None:
        self.scenes, self.counts, self.masks = scenes, counts, masks

    @property
    def ignored(self) -> float:
        """Share of the pixels that are of no class."""
        return float(self.counts[-1] / self.counts.sum())

    @property
    def absent(self) -> list[str]:
        """Names of the classes that occur in no mask."""
        return [name for name, count in zip(self.scenes.classes, self.counts[:-1], strict=True) if not count]

    def lines(self) -> list[str]:
        """What the masks lack, for people."""
        split, classes, absent = self.scenes.split, len(self.scenes.classes), self.absent
        where = f"the masks of {split}"
        if self.masks < len(self.scenes):
            where = f"{self.masks} of the {len(self.scenes)} masks of {split}"
        share = "less than 0.1" if self.ignored < 0.001 else f"{100 * self.ignored:.1f}"
        lines = []
        if self.ignored:
            lines.append(f"{share} % of the pixels in {where} are of no class: neither loss nor score counts them")
        if absent:
            named = ", ".join(absent[:NAMED]) + (f" and {len(absent) - NAMED} more" if len(absent) > NAMED else "")
            lines.append(f"without a pixel in {where}: {len(absent)} of {classes} classes, {named}")
        return lines

    def check(self) -> None:
        """ValueError where fewer than two classes occur, as a score over one says nothing."""
        present = [name for name in self.scenes.classes if name not in self.absent]
        if len(present) < 2:
            raise ValueError(
                f"{self.scenes.url}: the masks of {self.scenes.split} hold {', '.join(present) or 'no class'} alone, "
                f"and {100 * self.ignored:.1f} % of their pixels are of no class; a score needs two classes. If 255 is "
                "a class, give its number: lines '0 background' and '255 cell' in classes.txt"
            )
