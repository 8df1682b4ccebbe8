"""ADE20K's scene parsing set as its 2016 challenge packed it: 150 classes, masks with 0 for unlabelled pixels.

ADEChallengeData2016/images/{training,validation}/*.jpg
ADEChallengeData2016/annotations/{training,validation}/*.png      20 210 and 2000 of each
"""

from pathlib import Path

import numpy as np

from downstream.data.listing import IGNORED, Listing, files_below, find_folder, mask_paths
from downstream.data.tiny_scenes import save_image, tiny_scenes
from imagesets.sets import Split

FOLDERS = {"train": "training", "val": "validation"}
IMAGES = {split: f"images/{name}" for split, name in FOLDERS.items()}
COUNTS = {"train": 20210, "val": 2000}
CLASSES = tuple(f"class {number}" for number in range(1, 151))  # mmseg's ADE20KDataset has the names
# Values 0 and 255 are unlabelled, 1..150 are the classes; all others are passed on, for Listing.to_classes to refuse.
TABLE = (IGNORED, *range(254), IGNORED)


def recognised(root: Path) -> Path:
    """The folder that holds images/ and annotations/: `root`, or ADEChallengeData2016 in it."""
    needed, inner = ("images/", "annotations/"), ("ADEChallengeData2016",)
    return find_folder(root, needed, "give the unpacked ADEChallengeData2016", inner)


def listed(root: Path, split: Split) -> Listing:
    """All scenes of one split. ValueError names a missing folder, or images without a mask."""
    pictures = files_below(root / IMAGES[split], ".jpg")
    folder = f"annotations/{FOLDERS[split]}"
    masks = mask_paths(root, split, pictures, folder, "; unpack the whole of ADEChallengeData2016.zip")
    notes = () if len(pictures) == COUNTS[split] else (f"{len(pictures)} images, the set has {COUNTS[split]}",)
    return Listing(
        images=tuple(f"{IMAGES[split]}/{name}" for name in pictures),
        masks=masks,
        classes=CLASSES,
        classes_of=TABLE,
        notes=notes,
    )


def write_tiny(root: Path, split: Split) -> None:
    """The tiny set's split."""
    for number, (pixels, classes) in enumerate(tiny_scenes(split)):
        name, mask = f"ADE_{split}_{number:08d}", np.where(classes == IGNORED, 0, classes + 1).astype(np.uint8)
        save_image(root / IMAGES[split] / f"{name}.jpg", pixels, quality=95)
        save_image(root / "annotations" / FOLDERS[split] / f"{name}.png", mask)
