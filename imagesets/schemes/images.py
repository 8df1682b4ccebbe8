"""images:PATH, every image file below a folder, without labels: for pretraining alone."""

import os

import numpy as np

from imagesets.listing import EXTENSIONS, images_below, require_folder, subfolders
from imagesets.names import PackedNames
from imagesets.sets import FileImages, ImageSet, Split

PLACE = "PATH"
SPLITS = ("train",)


def open_split(place: str, split: Split) -> ImageSet:
    """All images below `place`, folders by path and files by name, as split train; every label is -1.

    Raises ValueError for split val, which only sets with labels have, and for a folder without images.
    """
    url = f"images:{place}"
    require_folder(place, url)
    if split == "val":
        raise ValueError(
            f"{url}: these images have no labels, so they can be pretrained on but not evaluated on; arrange them as "
            "train/CLASS/IMAGE and val/CLASS/IMAGE and write folder:PATH"
        )
    files = [(name.removeprefix("./"), size) for name, size in images_below(place, ".")]
    if not files:
        raise ValueError(f"{url}: no image ({', '.join(EXTENSIONS)}) in {place} or the folders in it")
    folders = len({os.path.dirname(name) for name, _ in files})
    notes = [f"no labels: for pretraining alone; images in {folders} folder{'s' * (folders > 1)}"]
    if {"train", "val"} <= set(subfolders(place)):
        notes.append(f"train and val are both taken; for the training images alone write {url.rstrip('/')}/train")
    return ImageSet(
        url=url,
        split=split,
        classes=(),
        labels=np.full(len(files), -1),
        images=FileImages(
            root=place,
            names=PackedNames.pack(name for name, _ in files),
            sizes=np.array([size for _, size in files], np.int64),
        ),
        notes=tuple(notes),
    )
