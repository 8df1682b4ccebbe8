"""imagenet:ROOT, ImageNet-1k (or a subset of its classes) in the layouts that people have, mapped in memory.

- torchvision ImageFolder: train/<wnid>/*.JPEG and val/<wnid>/*.JPEG;
- Kaggle: ILSVRC/Data/CLS-LOC/{train,val} with all of val in one folder, labelled by LOC_val_solution.csv;
- a flat val/ labelled by the development kit, ILSVRC2012_devkit_t12/data/{meta.mat, *_ground_truth.txt}.
ROOT may be any folder from the one above ILSVRC/ down to the one that holds train/ and val/. Class k is the k-th
WordNet id (wnid) in sorted order, as in torchvision.
"""

import os
import re

import numpy as np

from imagesets.listing import (
    class_tree,
    images_below,
    missing,
    require_folder,
    require_same_classes,
    short_list,
    subfolders,
)
from imagesets.sets import ImageSet, Split
from imagesets.val_labels import find_labels

PLACE = "ROOT"
SPLITS = ("train", "val")
WNID = re.compile(r"n\d{8}")
INSIDE = ("", "ILSVRC/Data/CLS-LOC", "Data/CLS-LOC", "CLS-LOC")


def open_split(place: str, split: Split) -> ImageSet:
    """Open one split below `place`. Raises ValueError for whatever is none of the layouts above."""
    url = f"imagenet:{place}"
    require_folder(place, url)
    base = next((b for b in (os.path.join(place, i) for i in INSIDE) if os.path.isdir(os.path.join(b, split))), None)
    if base is None:
        raise ValueError(f"{url}: {missing(place, (split,))}")
    root = os.path.join(base, split)
    train, val = wnids(url, os.path.join(base, "train")), wnids(url, os.path.join(base, "val"))
    if split == "val" and not val:
        return open_flat(url, root, train)
    classes = train if split == "train" else val
    if not classes:
        raise ValueError(f"{url}: no class folders in {root}; unpack the 1000 archives inside ILSVRC2012_img_train.tar")
    if train and val:
        require_same_classes(url, train, val)
    notes = [f"ImageFolder layout, {len(classes)} classes in {root}", *subset_note(classes)]
    return class_tree(url=url, split=split, root=root, classes=classes, notes=notes)


def wnids(url: str, folder: str) -> tuple[str, ...]:
    """The class folders in `folder`, sorted. Raises ValueError when one is not named by a WordNet id."""
    found = subfolders(folder)
    strange = [name for name in found if not WNID.fullmatch(name)]
    if strange:
        advice = "for other classes than ImageNet's use folder:PATH, else remove them"
        raise ValueError(f"{url}: {short_list(strange)} in {folder} are not WordNet ids such as n01440764; {advice}")
    return found


def open_flat(url: str, folder: str, train: tuple[str, ...]) -> ImageSet:
    """Open a val folder whose images lie side by side, labelled by a file near it."""
    images, _ = images_below(folder, ["."])
    files = list(images.names)
    if not files:
        raise ValueError(f"{url}: {folder} holds neither class folders nor images; unpack ILSVRC2012_img_val.tar there")
    wnid_of, source = find_labels(url, folder)
    unknown = [name for name in files if stem(name) not in wnid_of]
    if unknown:
        raise ValueError(f"{url}: {source} has no label for {short_list(unknown)} in {folder}; remove these files")
    present = tuple(sorted({wnid_of[stem(name)] for name in files}))
    classes = train or present
    require_same_classes(url, classes, present)
    index = {wnid: number for number, wnid in enumerate(classes)}
    notes = [f"flat val folder {folder}, labelled by {source}", *subset_note(classes)]
    if len(files) < len(wnid_of):
        notes.append(f"{len(wnid_of) - len(files)} of the {len(wnid_of)} images that {source} labels are missing")
    return ImageSet(
        url=url,
        split="val",
        classes=classes,
        labels=np.array([index[wnid_of[stem(name)]] for name in files], np.int64),
        images=images,
        notes=tuple(notes),
    )


def stem(name: str) -> str:
    """ILSVRC2012_val_00000001.JPEG -> ILSVRC2012_val_00000001; the key that label files use."""
    return os.path.splitext(os.path.basename(name))[0]


def subset_note(classes: tuple[str, ...]) -> list[str]:
    """A note when this is not all of ImageNet-1k."""
    return [] if len(classes) == 1000 else [f"{len(classes)} classes, ImageNet-1k has 1000"]
