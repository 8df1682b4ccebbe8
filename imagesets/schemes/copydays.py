"""copydays:FOLDER, INRIA Copydays (Douze et al. 2009): train is the database of originals, val holds altered copies.

FOLDER/original, strong, jpegqual/QUALITY and crops/PERCENT hold the images as unpacked. The class of an image is the
first four characters of its name, which a copy shares with its original. Images in FOLDER/distractors, if there are
any, belong to the database as well, in a class of their own.
"""

import os
from functools import partial

import numpy as np

from imagesets.listing import (
    images_below,
    optional_path,
    refuse_broken_links,
    require_folder,
    short_list,
    subfolders,
)
from imagesets.sets import ImageSet, Split

PLACE = "FOLDER"
SPLITS = ("train", "val")
ORIGINAL, DISTRACTORS = "original", "distractors"
COPIES = ("strong", "jpegqual", "crops")
CLASS_CHARACTERS = 4  # facebookresearch/dino eval_copy_detection.py


def open_split(place: str, split: Split) -> ImageSet:
    """Open one split. Raises ValueError for a folder without originals, and for a copy without an original."""
    url = f"copydays:{place}"
    require_folder(place, url)
    if ORIGINAL not in subfolders(place):
        raise ValueError(f"{url}: no folder {ORIGINAL} in {place}; unpack the original images of Copydays into it")
    strong, *graded = COPIES
    graded_folders: list[str] = []
    for name in filter(partial(optional_path, place), graded):
        refuse_broken_links(os.path.join(place, name), url)
        if not (grades := subfolders(os.path.join(place, name))):
            raise ValueError(f"{url}: {name} holds no folders of copies; unpack it again, or remove it")
        graded_folders += [f"{name}/{grade}" for grade in grades]
    optional = [name for name in ([DISTRACTORS] if split == "train" else [strong]) if optional_path(place, name)]
    folders = [ORIGINAL, *optional, *(graded_folders if split == "val" else ())]
    images, counts = images_below(place, folders)
    if empty := [name for name, count in zip(folders, counts, strict=True) if not count]:
        raise ValueError(f"{url}: no image in {short_list(empty)}; unpack the set again, or remove the folder")
    paths = [os.path.relpath(name) for name in images.names]
    class_names = [
        DISTRACTORS if path.startswith(DISTRACTORS) else os.path.basename(path)[:CLASS_CHARACTERS] for path in paths
    ]
    first_of: dict[str, str] = {}  # class -> its original
    for path, name in zip(paths[: counts[0]], class_names, strict=False):
        if (first := first_of.setdefault(name, path)) != path:
            raise ValueError(
                f"{url}: the names of {first} and {path} begin with the same {CLASS_CHARACTERS} characters, so that a "
                "copy of one would count as found with the other; give originals and their copies names that differ"
            )
    classes = (*sorted(first_of), DISTRACTORS)
    index_of = {name: index for index, name in enumerate(classes)}
    for path, name in zip(paths, class_names, strict=True):
        if name not in index_of:
            raise ValueError(f"{url}: {path} is a copy of no image in {ORIGINAL}, by its name; unpack the set again")
    return ImageSet(
        url=url,
        split=split,
        classes=classes,
        labels=np.array([index_of[name] for name in class_names]),
        images=images,
        notes=(f"{counts[0]} originals, {counts[1:].sum()} {'distractors' if split == 'train' else 'copies'}",),
        reports="retrieval",
    )
