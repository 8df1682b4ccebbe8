"""The images on which object discovery is measured: all of Pascal VOC's trainval, or COCO 20k, with boxes.

    VOC2007/ImageSets/Main/trainval.txt         5011 names, 11 540 in VOC2012
    VOC2007/JPEGImages/, Annotations/           as in vocboxes:

    COCO/coco_20k_filenames.txt                 19 817 paths, from the folder datasets/ of valeoai/LOST; put it there
    COCO/annotations/instances_train2014.json   or instances_train2017.json, with the same images by number
    COCO/train2014/                             or train2017/

Nothing is trained, so both splits are the same images. Difficult objects count, crowds do not.
"""

from dataclasses import replace
from pathlib import Path

from downstream.data.listing import (
    Instances,
    check_different,
    check_present,
    files_below,
    garbage_collection_paused,
    read_names,
)
from downstream.layouts import coco, vocboxes
from engine.files import read_json, read_text
from imagesets.sets import Split

IMAGES = {"train": "JPEGImages", "val": "JPEGImages"}
NOTHING_TRAINED = True  # so that both splits may have the same images
VOC_LIST, COCO_LIST = "ImageSets/Main/trainval.txt", "coco_20k_filenames.txt"
COCO_FILES = {f"annotations/instances_train{year}.json": f"train{year}" for year in ("2014", "2017")}  # -> images'


def recognised(root: Path) -> Path:
    """`root` if it has the list of COCO 20k, else the folder of Pascal VOC that `vocboxes.recognised` finds."""
    if (root / COCO_LIST).is_file():
        return root
    try:
        return vocboxes.recognised(root)
    except ValueError as error:
        raise ValueError(f"{error}; or, for COCO 20k, put {COCO_LIST} next to annotations/") from None


def listed(root: Path, split: Split) -> Instances:
    """All images, in the order of VOC's list or of COCO's ids. Raises ValueError if something is missing."""
    if (root / COCO_LIST).is_file():
        return _listed_coco(root)
    names = read_names(root / VOC_LIST, vocboxes.LIST_ADVICE)
    listing = vocboxes.read_boxes(root, names, names, "val")
    objects = (tuple(box | {"iscrowd": 0} for box in boxes) for boxes in listing.objects)  # count difficult objects
    return replace(listing, objects=tuple(objects))


def _listed_coco(root: Path) -> Instances:
    name = next((name for name in COCO_FILES if (root / name).is_file()), None)
    if name is None:
        raise ValueError(f"there is no file {' nor '.join(COCO_FILES)}; unpack the annotations of COCO")
    folder = COCO_FILES[name]
    lines = read_text(root / COCO_LIST).split()
    check_different(lines, f"images of {COCO_LIST}")
    try:
        ids = {int(Path(line).stem.rpartition("_")[2]) for line in lines}
    except ValueError as error:
        raise ValueError(
            f"{COCO_LIST}: {error}; its lines end in a number, as COCO_train2014_000000000009.jpg"
        ) from error
    with garbage_collection_paused():
        content = read_json(root / name, type=coco.CocoFile)
        content.images = [image for image in content.images if image.id in ids]
        content.annotations = [annotation for annotation in content.annotations if annotation.image_id in ids]
        listing = coco.parse_instances(content, "val", folder, name)
    file_names = [entry["file_name"] for entry in listing.entries]
    if missing := ids - {entry["id"] for entry in listing.entries}:
        raise ValueError(f"{name} lacks {len(missing)} of {len(ids)} images of {COCO_LIST}: {min(missing)}, ...")
    check_present(file_names, files_below(root / folder, ".jpg"), f"images of {COCO_LIST}", folder)
    return listing


def write_tiny(root: Path, split: Split) -> None:
    """Write the tiny set: the validation images of vocboxes's."""
    if split == "val":
        vocboxes.write_tiny(root, split)
        (root / "ImageSets/Main/val.txt").rename(root / VOC_LIST)
