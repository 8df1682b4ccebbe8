"""All images with boxes of Pascal VOC's trainval, or of COCO 20k: those on which the discovery of objects is measured.

    VOC2007/ImageSets/Main/trainval.txt         5011 names, 11 540 in VOC2012
    VOC2007/JPEGImages/, Annotations/           as in vocboxes:

    COCO/coco_20k_filenames.txt                 19 817 paths, from the folder datasets/ of valeoai/LOST; put it there
    COCO/annotations/instances_train2014.json   or instances_train2017.json, with the same images by number
    COCO/train2014/                             or train2017/

Nothing is trained, and both splits are the same images. Difficult objects count, crowds do not.
"""

from dataclasses import replace
from pathlib import Path

from downstream.data.listing import Instances, check_present, files_below, garbage_collection_paused
from downstream.layouts import coco, vocboxes
from imagesets.sets import Split

IMAGES = {"train": "JPEGImages", "val": "JPEGImages"}
LIST, COCO_LIST = "ImageSets/Main/trainval.txt", "coco_20k_filenames.txt"
YEARS = ("2014", "2017")


def recognised(root: Path) -> Path:
    """The folder of VOC that `vocboxes.recognised` finds, or `root` with COCO's list."""
    if (root / COCO_LIST).is_file():
        return root
    try:
        return vocboxes.recognised(root)
    except ValueError as error:
        raise ValueError(f"{error}; or, of COCO 20k, put {COCO_LIST} beside annotations/") from None


def listed(root: Path, split: Split) -> Instances:
    """All images, in the order of VOC's list or of COCO's numbers. ValueError names what is missing."""
    if (root / COCO_LIST).is_file():
        return _of_coco(root)
    names = vocboxes.unique_names(root / LIST, "trainval")
    found = vocboxes.read_boxes(root, names, names, "val")
    objects = (tuple(entry | {"iscrowd": 0} for entry in own) for own in found.objects)
    return replace(found, objects=tuple(objects))


def _of_coco(root: Path) -> Instances:
    files = {f"annotations/instances_train{year}.json": f"train{year}" for year in YEARS}
    name = next((name for name in files if (root / name).is_file()), None)
    if name is None:
        raise ValueError(f"there is no file {' nor '.join(files)}; unpack the annotations of COCO")
    lines = (root / COCO_LIST).read_text(encoding="utf-8").split()
    try:
        numbers = {int(Path(line).stem.rpartition("_")[2]) for line in lines}
    except ValueError as error:
        raise ValueError(
            f"{COCO_LIST}: {error}; its lines end in a number, as COCO_train2014_000000000009.jpg"
        ) from error
    with garbage_collection_paused():
        whole = coco.parse_instances(coco.read_json(root / name, name), "train", files[name], name)
    chosen = whole.take([place for place, entry in enumerate(whole.entries) if entry["id"] in numbers])
    if lacking := numbers - {entry["id"] for entry in chosen.entries}:
        raise ValueError(f"{name} lacks {len(lacking)} of {len(numbers)} images of {COCO_LIST}: {min(lacking)}, ...")
    pictures = [entry["file_name"] for entry in chosen.entries]
    check_present(pictures, files_below(root / files[name], ".jpg"), f"images of {COCO_LIST}", files[name])
    return replace(chosen, notes=())


def write_tiny(root: Path, split: Split) -> None:
    """The tiny set, which vocboxes draws for validation."""
    if split == "val":
        vocboxes.write_tiny(root, split)
        (root / "ImageSets/Main/val.txt").rename(root / LIST)
