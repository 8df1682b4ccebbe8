"""ADE20K as the scene parsing challenge of 2016 distributed it: 150 classes, masks with 0 for unlabelled pixels.

ADEChallengeData2016/images/{training,validation}/*.jpg
ADEChallengeData2016/annotations/{training,validation}/*.png      20 210 and 2000 of each
"""

from pathlib import Path

import numpy as np

from downstream.data.listing import IGNORED, Listing, files_below, find_folder, mask_paths
from downstream.data.tiny_scenes import save_image, tiny_scenes
from imagesets.sets import Split
from imagesets.walk import EXTENSIONS

FOLDERS = {"train": "training", "val": "validation"}
IMAGES = {split: f"images/{name}" for split, name in FOLDERS.items()}
COUNTS = {"train": 20210, "val": 2000}
CLASSES = tuple(f"class {number}" for number in range(1, 151))  # mmseg's ADE20KDataset has the names
# Class of each value of a mask: 0 and 255 are unlabelled, 1..150 are the classes, and the others become numbers above
# 149, which Listing.to_classes refuses.
CLASS_OF_VALUE = (IGNORED, *range(254), IGNORED)


def recognised(root: Path) -> Path:
    """The folder with images/ and annotations/: `root`, or ADEChallengeData2016 in it."""
    advice = "give the unpacked ADEChallengeData2016"
    return find_folder(root, ("images/", "annotations/"), advice, ("ADEChallengeData2016",))


def listed(root: Path, split: Split) -> Listing:
    """All scenes of one split. Raises ValueError if a folder or a mask is missing."""
    images = files_below(root / IMAGES[split], EXTENSIONS)
    folder = f"annotations/{FOLDERS[split]}"
    masks = mask_paths(root, split, images, folder, "; unpack the whole of ADEChallengeData2016.zip")
    notes = () if len(images) == COUNTS[split] else (f"{len(images)} images, the set has {COUNTS[split]}",)
    return Listing(
        images=tuple(f"{IMAGES[split]}/{name}" for name in images),
        masks=masks,
        classes=CLASSES,
        classes_of=CLASS_OF_VALUE,
        notes=notes,
    )


def write_tiny(root: Path, split: Split) -> None:
    """Write one split of the tiny set."""
    for number, (pixels, classes) in enumerate(tiny_scenes(split)):
        name = f"ADE_{split}_{number:08d}"
        mask = np.where(classes == IGNORED, 0, classes + 1).astype(np.uint8)
        save_image(root / IMAGES[split] / f"{name}.jpg", pixels, quality=95)
        save_image(root / "annotations" / FOLDERS[split] / f"{name}.png", mask)
