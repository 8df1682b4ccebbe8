"""Cityscapes' fine annotations, 19 classes, and the few-image splits of French et al. 2020.

    ROOT/leftImg8bit/{train,val}/<city>/<city>_<sequence>_<frame>_leftImg8bit.png
    ROOT/gtFine/{train,val}/<city>/<city>_<sequence>_<frame>_gtFine_labelTrainIds.png      2975 and 500 of each

A download has only ..._labelIds.png. These are converted to the 19 classes when they are read; no file is written.
"""

from pathlib import Path

import numpy as np

from downstream.data.listing import IGNORED, Listing, files_below, find_folder, named_files
from downstream.data.tiny_scenes import save_image, tiny_scenes
from imagesets.sets import Split

IMAGES = {"train": "leftImg8bit/train", "val": "leftImg8bit/val"}
IMAGE_ENDING = "_leftImg8bit.png"
COUNTS = {"train": 2975, "val": 500}
# cityscapesScripts helpers/labels.py: the ids of the 19 classes that count, in the order of their train ids.
CLASS_IDS = {
    "road": 7,
    "sidewalk": 8,
    "building": 11,
    "wall": 12,
    "fence": 13,
    "pole": 17,
    "traffic light": 19,
    "traffic sign": 20,
    "vegetation": 21,
    "terrain": 22,
    "sky": 23,
    "person": 24,
    "rider": 25,
    "car": 26,
    "truck": 27,
    "bus": 28,
    "train": 31,
    "motorcycle": 32,
    "bicycle": 33,
}
CLASSES = tuple(CLASS_IDS)
MAX_ID = 33  # larger values mean nothing; -1, the licence plate, is stored as 255
# Class of each value of a mask, of train ids and of label ids; Listing.to_classes refuses numbers from 19 to 254.
CLASS_OF_TRAIN_ID = tuple(range(256))
TRAIN_IDS = {label_id: train_id for train_id, label_id in enumerate(CLASS_IDS.values())}
CLASS_OF_LABEL_ID = tuple(TRAIN_IDS.get(value, IGNORED if value <= MAX_ID else value) for value in range(256))
SEEDS = (12345, 23456, 34567, 45678, 56789)  # of the five few-image splits: CutMix-semisup-seg README.md:98-105


def recognised(root: Path) -> Path:
    """`root`, if it has leftImg8bit/ and gtFine/."""
    advice = "unpack leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip"
    return find_folder(root, ("leftImg8bit/", "gtFine/"), advice)


def listed(root: Path, split: Split) -> Listing:
    """All scenes of one split, sorted by train/<city>/<name>. Raises ValueError if something is missing."""
    names = sorted({name[: -len(IMAGE_ENDING)] for name in files_below(root / IMAGES[split], IMAGE_ENDING)})
    images = named_files(root, IMAGES[split], names, f"images of {split}", (IMAGE_ENDING,))
    folder = f"gtFine/{split}"
    kind, classes_of = "labelTrainIds", CLASS_OF_TRAIN_ID
    if not files_below(root / folder, "_labelTrainIds.png"):
        kind, classes_of = "labelIds", CLASS_OF_LABEL_ID
    hint = "; unpack the whole of gtFine_trainvaltest.zip"
    masks = named_files(root, folder, names, f"annotations of {split}", (f"_gtFine_{kind}.png",), hint)
    notes = [f"masks are {kind}" + (", mapped to the 19 classes in memory" if kind == "labelIds" else "")]
    if len(names) != COUNTS[split]:
        notes.append(f"{len(names)} images, the set has {COUNTS[split]}")
    return Listing(
        images=images,
        masks=masks,
        classes=CLASSES,
        classes_of=classes_of,
        notes=tuple(notes),
    )


def write_tiny(root: Path, split: Split) -> None:
    """Write one split of the tiny set, with masks of both kinds."""
    label_ids = np.zeros(256, np.uint8)  # label id of each class; 0 is unlabelled
    label_ids[: len(CLASS_IDS)] = list(CLASS_IDS.values())
    for number, (pixels, classes) in enumerate(tiny_scenes(split)):
        city = ("aachen", "bochum")[number % 2]
        name = f"{split}/{city}/{city}_{number:06d}_000019"
        save_image(root / "leftImg8bit" / f"{name}_leftImg8bit.png", pixels)
        save_image(root / "gtFine" / f"{name}_gtFine_labelTrainIds.png", classes)
        save_image(root / "gtFine" / f"{name}_gtFine_labelIds.png", label_ids[classes])


def few_image_split(count: int, images: int, seed: int) -> np.ndarray:
    """Indices (images,) of a few of `count` training scenes sorted by name: the start of a permutation drawn by `seed`.

    With 2975 scenes and SEEDS these are the published splits (CutMix-semisup-seg datapipe/datasets.py:47-90); the 100
    images of a seed are among its 372.
    """
    return np.random.RandomState(seed).permutation(count)[:images]
