"""COCO 2017's instances, or your own of the same form: images, and a JSON file a split with boxes and outlines.

    ROOT/annotations/instances_{train,val}2017.json
    ROOT/train2017/, ROOT/val2017/                          118 287 and 5000 images, 80 classes

    ROOT/annotations/instances_{train,val}.json             your own, of any categories
    ROOT/train/, ROOT/val/

The file's categories are the classes, in the order of their numbers, which may have gaps, as COCO's have (1..90).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from downstream.data.instances import Entry, Instances
from downstream.data.tiny_objects import tiny_objects
from downstream.data.tiny_scenes import HEIGHT, WIDTH
from imagesets.sets import Split

IMAGES = {"train": "train2017", "val": "val2017"}
YEARS = ("2017", "")  # endings of files and folders: COCO's, and those of other sets
COUNTS = {"train": 118287, "val": 5000}
UNPACK = "unpack annotations_trainval2017.zip again"
OF_AN_OBJECT = ("id", "image_id", "category_id", "bbox", "area", "segmentation")
TINY_CATEGORIES = {0: 2, 1: 3, 4: 44, 7: 90}  # of the tiny set's digits: with gaps, as in COCO
CROWDED = 8  # every so manyth scene of the tiny set has a crowd


def recognised(root: Path) -> Path:
    """`root`, if it holds annotations/."""
    if not (root / "annotations").is_dir():
        raise ValueError(
            "no folder annotations/ there; unpack annotations_trainval2017.zip beside train2017/, val2017/"
        )
    return root


def listed(root: Path, split: Split) -> Instances:
    """All images of one split, sorted by number. ValueError names what is missing or does not fit together."""
    files = {f"annotations/instances_{split}{year}.json": f"{split}{year}" for year in YEARS}
    name = next((name for name in files if (root / name).is_file()), next(iter(files)))
    folder = files[name]
    content = _read(root / name, name)
    categories = {each["id"]: str(each["name"]) for each in sorted(content["categories"], key=lambda each: each["id"])}
    entries = sorted(content["images"], key=lambda entry: entry["id"])
    objects: dict[int, list[Entry]] = {entry["id"]: [] for entry in entries}
    _check_unique(name, "images", entries)
    _check_unique(name, "annotations", content["annotations"])
    sizes = {entry["id"]: [entry["height"], entry["width"]] for entry in entries}
    for each in content["annotations"]:
        _check_object(name, each, categories, sizes)
        objects[each["image_id"]].append(each)
    _check_files(root / folder, split, [entry["file_name"] for entry in entries])
    return Instances(
        images=tuple(f"{folder}/{entry['file_name']}" for entry in entries),
        entries=tuple(entries),
        objects=tuple(tuple(own) for own in objects.values()),
        categories=categories,
        annotations=name,
        notes=_notes(split, list(objects.values()), categories),
    )


def write_tiny(root: Path, split: Split) -> None:
    """The tiny set's split: an outline follows a digit's outer edge; crowds are run lengths, all others polygons."""
    (root / IMAGES[split]).mkdir()
    (root / "annotations").mkdir(exist_ok=True)
    images: list[Entry] = []
    objects: list[Entry] = []
    for number, (pixels, own) in enumerate(tiny_objects(split), 1):
        name = f"{number:012d}.jpg"
        Image.fromarray(pixels).save(root / IMAGES[split] / name, quality=95)
        images.append({"id": number, "file_name": name, "height": HEIGHT, "width": WIDTH})
        for place, (digit, top, left, rows) in enumerate(own):
            crowd = number % CROWDED == 1 and place == len(own) - 1
            facts = {"id": len(objects) + 1, "image_id": number, "category_id": TINY_CATEGORIES[digit]}
            objects.append(facts | _outline(rows, top, left, crowd))
    categories = [{"id": value, "name": f"digit {digit}"} for digit, value in TINY_CATEGORIES.items()]
    content = {"images": images, "annotations": objects, "categories": categories}
    (root / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(content))


def _read(path: Path, name: str) -> Entry:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"there is no file {name}; unpack annotations_trainval2017.zip there") from None
    except ValueError as error:  # of the JSON, or of the encoding
        raise ValueError(f"{name} is no JSON ({error}); {UNPACK}") from error
    lacking = [key for key in ("images", "annotations", "categories") if not isinstance(_get(content, key), list)]
    if lacking:
        raise ValueError(f"{name} has no list {lacking[0]!r}; {UNPACK}")
    for kind, keys in (("images", ("id", "file_name", "height", "width")), ("categories", ("id", "name"))):
        for each in content[kind]:
            _check_keys(name, kind, each, keys)
    if not content["categories"]:
        raise ValueError(f"{name} names no categories; {UNPACK}")
    return content


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _check_keys(name: str, kind: str, each: Any, keys: Sequence[str]) -> None:
    lacking = [key for key in keys if _get(each, key) is None]
    if lacking:
        raise ValueError(f"{name}: an entry of {kind} ({_get(each, 'id')}) has no {lacking[0]!r}; {UNPACK}")


def _check_unique(name: str, kind: str, entries: Sequence[Entry]) -> None:
    if len({_get(entry, "id") for entry in entries}) < len(entries):
        raise ValueError(f"{name}: two of its {kind} have one id; {UNPACK}")


def _check_object(name: str, each: Entry, categories: Mapping[int, str], sizes: Mapping[int, list[int]]) -> None:
    _check_keys(name, "annotations", each, OF_AN_OBJECT)
    number = each["id"]
    if each["category_id"] not in categories:
        raise ValueError(
            f"{name}: annotation {number} is of category {each['category_id']}, which is none of its "
            f"{len(categories)} categories; is this the annotation of another version of the set?"
        )
    if each["image_id"] not in sizes:
        raise ValueError(
            f"{name}: annotation {number} is of image {each['image_id']}, which it does not list; {UNPACK}"
        )
    outline = each["segmentation"]
    if not outline:
        raise ValueError(
            f"{name}: annotation {number} has a box but no outline; Mask R-CNN learns from outlines: give each thing "
            "its polygon, at least that of its box"
        )
    if isinstance(outline, dict) and list(outline.get("size", ())) != sizes[each["image_id"]]:
        raise ValueError(
            f"{name}: the mask of annotation {number} is {outline.get('size')} pixels and its image "
            f"{sizes[each['image_id']]}; take both from the same download"
        )


def _check_files(folder: Path, split: Split, names: Sequence[str]) -> None:
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    there = {path.name for path in folder.iterdir()}
    lacking = [name for name in names if name not in there]
    if lacking:
        raise ValueError(
            f"{len(lacking)} of {len(names)} images of {split} are not there, such as {folder.name}/{lacking[0]}; "
            f"unpack the whole of {folder.name}.zip"
        )


def _notes(split: Split, objects: Sequence[Sequence[Entry]], categories: Mapping[int, str]) -> tuple[str, ...]:
    found = [f"{sum(map(len, objects))} objects in {split}"]
    if bare := sum(not own for own in objects):
        found.append(f"{bare} images of {split} without objects" + (", not trained on" if split == "train" else ""))
    there = {thing["category_id"] for own in objects for thing in own}
    if empty := [title for number, title in categories.items() if number not in there]:
        found.append(f"{len(empty)} of {len(categories)} categories have no object in {split}, such as {empty[0]}")
    if len(objects) != COUNTS[split]:
        found.append(f"{len(objects)} images, the set has {COUNTS[split]}")
    return tuple(found)


def _outline(rows: np.ndarray, top: int, left: int, crowd: bool) -> dict[str, Any]:
    """bbox, area, iscrowd and segmentation, as in COCO's file."""
    edges = rows + left
    low, high = int(edges[:, 0].min()), int(edges[:, 1].max())
    return {
        "bbox": [low, top, high - low, len(rows)],
        "area": int((rows[:, 1] - rows[:, 0]).sum()),
        "iscrowd": int(crowd),
        "segmentation": _run_lengths(edges, top) if crowd else [_polygon(edges, top)],
    }


def _polygon(edges: np.ndarray, top: int) -> list[int]:
    """x1, y1, x2, y2, ...: down the right edge and up the left one."""
    right = [point for row, (_, x) in enumerate(edges, top) for point in ((x, row), (x, row + 1))]
    left = [point for row, (x, _) in enumerate(edges, top) for point in ((x, row), (x, row + 1))]
    return [int(value) for point in (*right, *reversed(left)) for value in point]


def _run_lengths(edges: np.ndarray, top: int) -> dict[str, Any]:
    """Lengths of runs of 0 and 1 in turn, down one column after the other."""
    mask = np.zeros((HEIGHT, WIDTH), bool)
    for row, (low, high) in enumerate(edges, top):
        mask[row, low:high] = True
    column = np.concatenate([[False], mask.ravel(order="F")])
    changes = np.flatnonzero(np.diff(column))
    return {"size": [HEIGHT, WIDTH], "counts": np.diff([0, *changes, mask.size]).tolist()}
