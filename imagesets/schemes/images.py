"""images:PATH, all image files below a folder, without labels: only for pretraining."""

import os

import numpy as np

from engine.printing import counted
from imagesets.listing import images_below, require_folder, subfolders
from imagesets.sets import ImageSet, Split
from imagesets.walk import EXTENSIONS

PLACE = "PATH"
SPLITS = ("train",)


def open_split(place: str, split: Split) -> ImageSet:
    """All images below `place` as split train, folders sorted by path and files by name; every label is -1.

    Raises ValueError for split val, because without labels there is nothing to evaluate, and for a folder without
    images.
    """
    url = f"images:{place}"
    require_folder(place, url)
    if split == "val":
        raise ValueError(
            f"{url}: these images have no labels, so they can be pretrained on but not evaluated on; arrange them as "
            "train/CLASS/IMAGE and val/CLASS/IMAGE and write folder:PATH"
        )
    images, _ = images_below(place, ["."])
    if not len(images.names):
        raise ValueError(f"{url}: no image ({', '.join(EXTENSIONS)}) in {place} or the folders in it")
    folders = len({os.path.dirname(name) for name in images.names})
    notes = [f"no labels: for pretraining alone; images in {counted(folders, 'folder')}"]
    if {"train", "val"} <= set(subfolders(place)):
        notes.append(f"train and val are both read; for the training images alone write {url.rstrip('/')}/train")
    return ImageSet(
        url=url,
        split=split,
        classes=(),
        labels=np.full(len(images.names), -1),
        images=images,
        notes=tuple(notes),
    )
