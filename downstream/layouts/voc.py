"""Pascal VOC's semantic segmentation: 20 classes and background, masks as palette images.

    VOC2012/JPEGImages/*.jpg
    VOC2012/SegmentationClass/*.png
    VOC2012/ImageSets/Segmentation/{train,val}.txt      1464 and 1449 names in VOC 2012

For the 10 582 training images of SBD ("trainaug"), put its masks into SegmentationClass/ and its names into train.txt.

    VOC2012/classes.txt         your own classes instead, as in masks:, such as `0 background` and `1 cell`
    VOC2012/labelmap.txt        the same in the format of CVAT, with colours: NAME:RED,GREEN,BLUE:PARTS:ACTIONS
"""

from pathlib import Path

from downstream.data.listing import Listing, find_folder, named_files, read_names
from downstream.data.tiny_scenes import save_image, save_lines, tiny_scenes
from downstream.layouts.masks import CLASSES as CLASSES_FILE
from downstream.layouts.masks import ClassList, class_of_value, read_classes
from engine.files import read_text
from imagesets.sets import Split

IMAGES = {"train": "JPEGImages", "val": "JPEGImages"}
SERVES = ("ade20k", "cityscapes")  # layouts whose tasks run on these sets too
LABELMAP = "labelmap.txt"
COUNTS = {"train": 1464, "val": 1449}
# The classes of the values 0..20: VOCdevkit's VOCinit.m, and the background, which its scores count as a class.
CLASSES = (
    *("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)


def recognised(root: Path) -> Path:
    """The folder with JPEGImages/ and SegmentationClass/: `root`, or VOC2012 or VOCdevkit/VOC2012 in it."""
    advice = "give the unpacked VOCdevkit/VOC2012, or, of boxes in Annotations/, vocboxes:ROOT"
    return find_folder(root, ("JPEGImages/", "SegmentationClass/"), advice, ("VOC2012", "VOCdevkit/VOC2012"))


def listed(root: Path, split: Split) -> Listing:
    """All scenes of one split, in the order of its list. Raises ValueError if something is missing."""
    file = root / "ImageSets" / "Segmentation" / f"{split}.txt"
    names = read_names(file, "unpack the whole of VOCtrainval_11-May-2012.tar")
    images = named_files(root, "JPEGImages", names, f"images of {split}")
    masks = named_files(root, "SegmentationClass", names, f"masks of {split}", (".png",))
    own_classes = read_own_classes(root)
    notes = []
    if not own_classes:
        notes.append("the 21 classes of Pascal VOC; classes.txt in the folder would list others")
        if len(names) != COUNTS[split]:
            notes.append(f"{len(names)} images, VOC 2012 has {COUNTS[split]}")
    classes, classes_of, colours = own_classes or (CLASSES, class_of_value(list(range(len(CLASSES)))), ())
    return Listing(
        images=images,
        masks=masks,
        classes=classes,
        classes_of=classes_of,
        colours=colours,
        own_classes=own_classes is not None,
        notes=tuple(notes),
    )


def read_own_classes(root: Path) -> ClassList | None:
    """The classes in the set's classes.txt or CVAT's labelmap.txt; None if it has neither."""
    if (root / CLASSES_FILE).is_file():
        return read_classes(read_text(root / CLASSES_FILE))
    if not (root / LABELMAP).is_file():
        return None
    lines = []
    for number, line in enumerate(read_text(root / LABELMAP).splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, _, rest = line.partition(":")
        colour = rest.partition(":")[0].replace(",", " ")
        if len(colour.split()) != 3:
            raise ValueError(f"{LABELMAP}, line {number}: {line!r}; write NAME:RED,GREEN,BLUE::")
        lines.append(f"{colour} {name}")
    return read_classes("\n".join(lines), LABELMAP)


def write_tiny(root: Path, split: Split) -> None:
    """Write one split of the tiny set."""
    names = []
    for number, (pixels, classes) in enumerate(tiny_scenes(split)):
        names.append(f"{split}_{number:06d}")
        save_image(root / "JPEGImages" / f"{names[-1]}.jpg", pixels, quality=95)
        save_image(root / "SegmentationClass" / f"{names[-1]}.png", classes)
    save_lines(root / f"ImageSets/Segmentation/{split}.txt", names)
