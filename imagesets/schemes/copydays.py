"""copydays:FOLDER, INRIA Copydays (Douze et al. 2009): train is the database of originals, val holds altered copies.

FOLDER/original, strong, jpegqual/QUALITY and crops/PERCENT hold the images as they unpack; copies have the first four
characters of their names, which are the class, in common with the original. Images of FOLDER/distractors, where there
are any, belong to the database too, in a class of their own.
"""

import os

import numpy as np

from imagesets.listing import images_below, require_folder, subfolders
from imagesets.sets import ImageSet, Split

PLACE = "FOLDER"
SPLITS = ("train", "val")
ORIGINAL, DISTRACTORS = "original", "distractors"
COPIES = ("strong", "jpegqual", "crops")
SHARED = 4  # characters (facebookresearch/dino eval_copy_detection.py)


def open_split(place: str, split: Split) -> ImageSet:
    """Open one split. ValueError for a folder without originals, and for a copy of none of them."""
    url = f"copydays:{place}"
    require_folder(place, url)
    if ORIGINAL not in subfolders(place):
        raise ValueError(f"{url}: no folder {ORIGINAL} in {place}; unpack the original images of Copydays into it")
    strong, *graded = COPIES
    altered = [f"{name}/{part}" for name in graded for part in subfolders(os.path.join(place, name))]
    folders = [ORIGINAL, *([DISTRACTORS] if split == "train" else [strong, *altered])]
    images, counts = images_below(place, [name for name in folders if os.path.isdir(os.path.join(place, name))])
    names = [os.path.relpath(name) for name in images.names]
    starts = [DISTRACTORS if name.startswith(DISTRACTORS) else os.path.basename(name)[:SHARED] for name in names]
    classes = (*sorted(set(starts[: counts[0]])), DISTRACTORS)
    if strange := next((name for name, start in zip(names, starts, strict=True) if start not in classes), None):
        raise ValueError(f"{url}: {strange} is a copy of no image in {ORIGINAL}, by its name; unpack the set again")
    numbers = {start: number for number, start in enumerate(classes)}
    return ImageSet(
        url=url,
        split=split,
        classes=classes,
        labels=np.array([numbers[start] for start in starts]),
        images=images,
        notes=(f"{counts[0]} originals, {counts[1:].sum()} {'distractors' if split == 'train' else 'copies'}",),
        reports="retrieval",
    )
