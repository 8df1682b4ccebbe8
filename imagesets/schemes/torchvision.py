"""torchvision:NAME:ROOT, a classification set of torchvision.datasets, as its class finds it below ROOT.

torchvision reads lists, labels and arrays, and its own checks of files stay on: CIFAR's pickles are loaded after their
MD5 sums were compared with those of the official files, so no other pickle ever is. Nothing is downloaded. Images in
files are read as those of a folder are; those in arrays count as PPM files, whose bytes are a header and the pixels.

Classes are in the order of their names, so that the set is the one that folders would be. N images.
"""

import glob
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.printing import meant
from imagesets.listing import images_below, require_folder
from imagesets.names import PackedNames
from imagesets.official_sets import SETS, OfficialImages, Options, by_loader
from imagesets.sets import FileImages, ImageSet, Split
from imagesets.stored import StoredImages, stored_set
from imagesets.val_labels import check_mats

PLACE = "NAME:ROOT"
SPLITS = ("train", "val")


def open_split(place: str, split: Split) -> ImageSet:
    """Open one split. ValueError for an unknown NAME, and for files that are missing or not the official ones."""
    url = f"torchvision:{place}"
    name, _, root = place.partition(":")
    if name not in SETS:
        raise ValueError(f"{url}: no set {name!r}{meant(name, list(SETS))}")
    if not root:
        raise ValueError(f"{url}: no folder after the name; write torchvision:{name}:/path/to/folder")
    root, known = os.path.abspath(os.path.expanduser(root)), SETS[name]
    require_folder(root, url)
    parts = known.train if split == "train" else known.val
    if lacking := [path for path in known.needs if not os.path.exists(os.path.join(root, path))]:
        raise ValueError(f"{url}: {root} lacks {', '.join(lacking)}; {_remedy(name, root, parts)}")
    found = _joined([_official(url, name, root, options) for options in parts])
    found = found.take(known.divide(root, split, found)) if known.divide else found
    classes, labels = (found.classes, found.labels) if found.labels.ndim == 2 else _in_order(found)
    where, held = f"torchvision:{name}", found.images
    images = in_memory(where, held) if isinstance(held, np.ndarray) else in_files(url, held)
    return stored_set(
        url=url, split=split, classes=classes, labels=labels, images=images, notes=(known.split,), reports=known.reports
    )


def _official(url: str, name: str, root: str, options: Options) -> OfficialImages:
    from torchvision import datasets

    known = SETS[name]
    loader = {"loader": str} if known.read is by_loader else {}  # paths in place of images
    try:
        if name == "StanfordCars":  # torchvision compares the sums of other sets' .mat files
            check_mats(glob.glob(f"{glob.escape(root)}/stanford_cars/**/*.mat", recursive=True))
        return known.read(getattr(datasets, known.dataset or name)(root, **options, **loader))
    except Exception as error:  # torchvision's RuntimeError, and whatever a damaged list leads to
        why = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{url}: torchvision cannot read it ({why}); {_remedy(name, root, [options])}") from error


def _remedy(name: str, root: str, parts: Sequence[Options]) -> str:
    """How to get what is missing."""
    known = SETS[name]
    if known.advice:
        return known.advice
    what = known.dataset or name
    calls = [", ".join([repr(root), *(f"{key}={value!r}" for key, value in each.items())]) for each in parts]
    made = "; ".join(f"{what}({call}, download=True)" for call in calls)
    return f'fetch it with python -c "from torchvision.datasets import {what}; {made}"'


def _joined(parts: Sequence[OfficialImages]) -> OfficialImages:
    if len(parts) == 1:
        return parts[0]
    labels = np.concatenate([part.labels for part in parts])
    return OfficialImages(
        classes=parts[0].classes, labels=labels, images=[path for part in parts for path in part.images]
    )


def _in_order(found: OfficialImages) -> tuple[list[str], np.ndarray]:
    """Classes as names of folders, sorted, and the labels (N,) among them."""
    names = [name.strip("/").replace("/", "_") for name in found.classes]
    order = sorted(range(len(names)), key=names.__getitem__)
    return [names[at] for at in order], np.argsort(order)[found.labels]


def in_files(url: str, paths: Sequence[str]) -> FileImages:
    """Files, called by their own names, with sizes. ValueError where some are missing."""
    base = os.path.commonpath([os.path.dirname(path) for path in paths])
    wanted = {path[len(base) + 1 :]: row for row, path in enumerate(paths)}
    listed, _ = images_below(base, ["."]) if os.path.isdir(base) else (None, None)
    places = np.full(len(paths), -1)
    for place, name in enumerate(listed.names if listed else ()):
        if (row := wanted.get(name)) is not None:
            places[row] = place
    if listed is None or (places < 0).any():
        first = paths[int((places < 0).argmax())]
        raise ValueError(
            f"{url}: {(places < 0).sum()} of its {len(paths)} images are missing, {first} first; unpack again"
        )
    return listed.renamed(places, PackedNames.pack(map(os.path.basename, paths)))


@dataclass(frozen=True, eq=False)
class PixelStore:
    """Pixels (N, H, W, 3) or (N, H, W) uint8 as the bytes of PPM or PGM files, which decode to just these pixels."""

    pixels: np.ndarray

    def read(self, place: int) -> bytes:
        return self.header + np.ascontiguousarray(self.pixels[place]).tobytes()

    @property
    def header(self) -> bytes:
        height, width = self.pixels.shape[1:3]
        return b"P%d\n%d %d\n255\n" % (6 if self.pixels.ndim == 4 else 5, width, height)  # as Pillow writes it


def in_memory(where: str, pixels: np.ndarray) -> StoredImages:
    """Images by their numbers in the official order. where: what stands before their names in messages."""
    store, ending = PixelStore(pixels), "ppm" if pixels.ndim == 4 else "pgm"
    return StoredImages(
        store=store,
        where=where,
        names=PackedNames.pack(f"{number:06d}.{ending}" for number in range(len(pixels))),
        sizes=np.full(len(pixels), len(store.header) + pixels[:1].size),
        places=np.arange(len(pixels)),
        changed=np.array([(0, zlib.crc32(image.tobytes())) for image in pixels], np.int64).reshape(-1, 2),
    )
