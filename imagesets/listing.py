"""Listing image files on disk, in torchvision's order, and the errors that a wrong folder deserves. Nothing is written.

The order of torchvision.datasets.ImageFolder (DatasetFolder.make_dataset): classes by name, below a class the folders
by path, in a folder the files by name. Links are followed, and hidden folders count as classes, as they do there.
"""

import os
from collections.abc import Iterator, Sequence

import numpy as np

from imagesets.names import PackedNames
from imagesets.sets import FileImages, ImageSet, Split

# torchvision.datasets.folder.IMG_EXTENSIONS, compared in lower case.
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


def subfolders(folder: str) -> tuple[str, ...]:
    """Names of the folders in `folder`, sorted; empty when `folder` is none itself."""
    if not os.path.isdir(folder):
        return ()
    with os.scandir(folder) as entries:
        return tuple(sorted(entry.name for entry in entries if entry.is_dir()))


def require_folder(folder: str, url: str) -> None:
    """Raise ValueError unless `folder` is a folder that can be listed; the message names the part that is missing."""
    if not folder:
        raise ValueError(f"{url}: no path after the colon; write {url}/path/to/folder")
    if os.path.isfile(folder):
        raise ValueError(f"{url}: {folder} is a file; give the folder that holds the images")
    if not os.path.isdir(folder):
        there = os.path.abspath(folder)
        while not os.path.isdir(there):
            there = os.path.dirname(there)
        raise ValueError(f"{url}: no folder {folder}; the path exists as far as {there}: correct it, or mount the data")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise ValueError(f"{url}: no permission to list {folder}; run chmod u+rx on it, or ask its owner")


def images_below(folder: str, prefix: str) -> Iterator[tuple[str, int]]:
    """(prefix/relative name, size in bytes) of every image file below `folder`, in torchvision's order."""
    found = []
    pending = [(folder, prefix)]
    while pending:
        place, name = pending.pop()
        images = []
        with os.scandir(place) as entries:
            for entry in entries:
                if entry.is_dir():
                    pending.append((entry.path, f"{name}/{entry.name}"))
                elif entry.name.lower().endswith(EXTENSIONS):
                    images.append((entry.name, _size(entry)))
        found.append((name, sorted(images)))
    for name, images in sorted(found):
        for image, size in images:
            yield f"{name}/{image}", size


def _size(entry: os.DirEntry) -> int:
    try:
        return entry.stat().st_size
    except OSError:  # a broken link: listed as torchvision lists it, and UnreadableImage once it is read
        return -1


def class_tree(*, url: str, split: Split, root: str, classes: Sequence[str], notes: Sequence[str]) -> ImageSet:
    """The set of root/CLASS/**/IMAGE. Raises ValueError for a class without images."""
    names: list[str] = []
    sizes, counts = [], []
    for name in classes:
        before = len(names)
        for image, size in images_below(os.path.join(root, name), name):
            names.append(image)
            sizes.append(size)
        counts.append(len(names) - before)
    empty = [name for name, count in zip(classes, counts, strict=True) if not count]
    if empty:
        what = "every class folder" if len(empty) == len(classes) else f"class folder {short_list(empty)}"
        raise ValueError(f"{url}: {what} in {root} holds no image ({', '.join(EXTENSIONS)}); fill or remove it")
    return ImageSet(
        url=url,
        split=split,
        classes=tuple(classes),
        labels=np.repeat(np.arange(len(classes)), counts),
        images=FileImages(root=root, names=PackedNames.pack(names), sizes=np.array(sizes, np.int64)),
        notes=tuple(notes),
    )


def require_same_classes(url: str, train: Sequence[str], val: Sequence[str]) -> None:
    """Raise ValueError when the class folders of the two splits differ: labels would mean different things."""
    only_train, only_val = sorted(set(train) - set(val)), sorted(set(val) - set(train))
    parts = [
        f"{short_list(names)} only in {split}" for names, split in ((only_train, "train"), (only_val, "val")) if names
    ]
    if parts:
        raise ValueError(f"{url}: the class folders of train and val differ: {'; '.join(parts)}; make them the same")


def short_list(names: Sequence[str], most: int = 3) -> str:
    """A few names for a message: 'a', 'b', 'c' and 7 more."""
    listed = ", ".join(repr(name) for name in names[:most])
    return f"{listed} and {len(names) - most} more" if len(names) > most else listed
