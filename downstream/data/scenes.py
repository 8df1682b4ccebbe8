"""Labelled scenes: images with a mask of classes, or with outlines of things, in the folders of the known sets.

    LAYOUT:ROOT      a folder as downloaded; a layout is a file of downstream/layouts/, or a plugin
    tiny-LAYOUT:     scenes of scikit-learn's digits in the same layout, drawn below the cache

A set is a listing of one split, in sorted order; nothing is decoded to make it. N images, K classes, H x W pixels.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from downstream.data.instances import Instances
from downstream.data.listing import IGNORED, Listing
from downstream.data.reading import check_pixels, check_values, naming
from engine.choices import meant
from engine.distributed import World
from engine.extensions import extensions, load_extension
from engine.files import folder_atomic
from imagesets.decoding import open_image
from imagesets.sets import SPLITS, Split

TINY = "tiny-"
TINY_VERSION = 1  # raise it when the same names would hold other pixels


@dataclass(frozen=True, kw_only=True)
class SceneSet:
    """One split. listing: its files below root, and what their masks or outlines mean."""

    url: str
    split: Split
    root: Path
    listing: Listing | Instances

    def __len__(self) -> int:
        return len(self.listing.images)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.listing.classes

    @property
    def notes(self) -> tuple[str, ...]:
        return self.listing.notes

    @property
    def masked(self) -> Listing:
        """The listing of a set of masks. ValueError of a set of outlines."""
        if not isinstance(self.listing, Listing):
            raise ValueError(
                f"{self.url}: it holds outlines of objects, no masks; give a set of masks, such as ade20k:"
            )
        return self.listing

    @property
    def outlined(self) -> Instances:
        """The listing of a set of outlines. ValueError of a set of masks."""
        if not isinstance(self.listing, Instances):
            raise ValueError(f"{self.url}: it holds masks, no outlines of objects; give a set of these, such as coco:")
        return self.listing

    def image(self, index: int) -> Path:
        return self.root / self.listing.images[index]

    def mask(self, index: int) -> Path:
        return self.root / self.masked.masks[index]

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 of names and sizes in bytes of images and annotations, in order; where they lie plays no part."""
        state = hashlib.sha256()
        for name in self.listing.files:
            state.update(f"{name} {(self.root / name).stat().st_size}\n".encode(errors="surrogateescape"))
        return state.hexdigest()

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


def drawn_first(urls: Iterable[str], cache: Path, world: World) -> None:
    """The first process draws the tiny sets among `urls` before the others look for them."""
    if layouts := [layout_of(url) for url in urls if url.startswith(TINY)]:
        world.on_rank0(lambda: [tiny_folder(layout, cache) for layout in layouts if layout])


def layout_of(url: str) -> str:
    """The layout that a URL's scheme names, "" if it names no set of labelled scenes."""
    layout = url.partition(":")[0].removeprefix(TINY)
    return layout if layout in extensions("layouts") else ""


def serves(url: str, layout: str) -> bool:
    """Whether tasks on scenes of `layout` run on the set that a URL names, too."""
    own = layout_of(url)
    return own == layout or (bool(own) and layout in stands_in_for(own))


def stands_in_for(layout: str) -> tuple[str, ...]:
    """Layouts whose tasks run on sets of `layout` too; empty for those that have tasks of their own."""
    return tuple(getattr(load_extension("layouts", layout), "SERVES", ()))


def parse_scene_url(url: str) -> tuple[str, str]:
    """Layout and place of a URL, with ~ expanded. ValueError for an unknown scheme or a misplaced path."""
    scheme, colon, place = url.partition(":")
    layout = scheme.removeprefix(TINY)
    if not colon or layout not in extensions("layouts"):
        places = {name: f"{name}:{what}" for name, what in scene_schemes().items()}
        raise ValueError(f"{url!r} is no set of labelled scenes{meant(scheme, places, rest=f':{place}')}")
    if scheme.startswith(TINY) and place:
        raise ValueError(f"{url}: the tiny set is drawn and takes no path; write {scheme}:")
    if not scheme.startswith(TINY) and not place:
        raise ValueError(f"{url}: give the folder, {scheme}:/data/{scheme}")
    return layout, os.path.expanduser(place)


def classes_of_mask(values: np.ndarray, size: tuple[int, int], listing: Listing, path: Path | str) -> np.ndarray:
    """What a mask's file holds, (H, W) values or (H, W, 3) colours -> classes (H, W). ValueError, naming the file,
    unless it fits the classes and an image of `size` (height, width)."""
    try:
        mask = listing.coded(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    check_mask(mask, size, listing, path)
    return mask


def check_mask(mask: np.ndarray, size: tuple[int, int], listing: Listing, path: Path | str) -> None:
    """ValueError unless `mask` (H, W), values 0..K-1 or IGNORED, fits an image of `size` (height, width)."""
    if mask.shape != tuple(size):
        raise ValueError(
            f"{path}: the mask is {' x '.join(map(str, mask.shape))} pixels and its image {size[0]} x {size[1]}; "
            "take both from the same download"
        )
    if outside := sorted({int(number) for number in np.unique(mask)} - {*range(len(listing.classes)), IGNORED}):
        value = listing.classes_of.index(outside[0])
        raise ValueError(
            f"{path}: the mask holds the value {value}, allowed are {listing.allowed}; "
            "is this the annotation of another version of the set?"
        )


def check_scene(scenes: SceneSet, index: int) -> None:
    """ValueError or OSError for a scene that cannot be used."""
    with naming(scenes.image(index)):
        image = open_image(scenes.image(index).read_bytes())
        check_pixels(image)
        image.load()
    height, width = image.size[::-1]
    if isinstance(scenes.listing, Instances):
        return scenes.listing.check_size(index, height, width)
    path, coloured = scenes.mask(index), bool(scenes.listing.colours)
    with naming(path):
        mask = open_image(path.read_bytes())
        check_values(mask, coloured)
        values = np.asarray(mask.convert("RGB") if coloured else mask, np.uint8)
    classes_of_mask(values, (height, width), scenes.listing, path)


def problems_of(scenes: SceneSet, advance: Callable[[int], None] = lambda count: None) -> list[str]:
    """Decode every image and mask: one line for each scene that cannot be used."""
    found = []
    for index in range(len(scenes)):
        try:
            check_scene(scenes, index)
        except (OSError, ValueError) as error:
            found.append(str(error) if isinstance(error, ValueError) else f"{scenes.image(index)}: {error}")
        advance(1)
    return found
