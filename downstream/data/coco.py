"""COCO 2017's instances: images, and one JSON file a split with boxes and outlines of things of 80 classes.

    ROOT/annotations/instances_{train,val}2017.json
    ROOT/train2017/, ROOT/val2017/                          118 287 and 5000 images

Categories are numbered with gaps there (1..90); classes 0..K-1 follow in the order of these numbers.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from imagesets.sets import Split

IMAGES = {"train": "train2017", "val": "val2017"}
COUNTS = {"train": 118287, "val": 5000}
LEAST_SIDE = 32  # pixels; mmdet configs/_base_/datasets/coco_instance.py filter_cfg
UNPACK = "unpack annotations_trainval2017.zip again"
OF_AN_OBJECT = ("id", "image_id", "category_id", "bbox", "area", "segmentation")
Entry = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Instances:
    """images: paths (N,) below a root, by image number. entries: theirs in the JSON file. objects: of each image.

    categories: number -> name, in the order of the classes. annotations: path of the JSON file below the root.
    """

    images: tuple[str, ...]
    entries: tuple[Entry, ...]
    objects: tuple[tuple[Entry, ...], ...]
    categories: Mapping[int, str]
    annotations: str
    notes: tuple[str, ...] = ()

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.categories.values())

    @property
    def files(self) -> tuple[str, ...]:
        """What a fingerprint is of."""
        return (*self.images, self.annotations)

    @cached_property
    def learnable(self) -> np.ndarray:
        """Indices of the images that training reads: with an object, and not too small."""
        sides = [min(entry["width"], entry["height"]) for entry in self.entries]
        return np.flatnonzero([bool(own) and side >= LEAST_SIDE for own, side in zip(self.objects, sides, strict=True)])

    def take(self, indices: Sequence[int] | np.ndarray) -> "Instances":
        images, entries, objects = self.images, self.entries, self.objects
        return replace(
            self,
            images=tuple(images[i] for i in indices),
            entries=tuple(entries[i] for i in indices),
            objects=tuple(objects[i] for i in indices),
        )

    def check_size(self, index: int, height: int, width: int) -> None:
        """ValueError unless an image's pixels are as many as its entry says."""
        entry = self.entries[index]
        if (entry["height"], entry["width"]) != (height, width):
            raise ValueError(
                f"{self.images[index]}: the image is {height} x {width} pixels and {self.annotations} says "
                f"{entry['height']} x {entry['width']}; take both from the same download"
            )


def recognised(root: Path) -> Path:
    """`root`, if it holds annotations/."""
    if not (root / "annotations").is_dir():
        raise ValueError(
            "no folder annotations/ there; unpack annotations_trainval2017.zip beside train2017/, val2017/"
        )
    return root


def listed(root: Path, split: Split) -> Instances:
    """All images of one split, sorted by number. ValueError names what is missing or does not fit together."""
    name = f"annotations/instances_{split}2017.json"
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
    _check_files(root / IMAGES[split], split, [entry["file_name"] for entry in entries])
    return Instances(
        images=tuple(f"{IMAGES[split]}/{entry['file_name']}" for entry in entries),
        entries=tuple(entries),
        objects=tuple(tuple(own) for own in objects.values()),
        categories=categories,
        annotations=name,
        notes=_notes(split, list(objects.values())),
    )


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


def _notes(split: Split, objects: Sequence[Sequence[Entry]]) -> tuple[str, ...]:
    found = [f"{sum(map(len, objects))} objects in {split}"]
    if bare := sum(not own for own in objects):
        found.append(f"{bare} images of {split} without objects" + (", not trained on" if split == "train" else ""))
    if len(objects) != COUNTS[split]:
        found.append(f"{len(objects)} images, the set has {COUNTS[split]}")
    return tuple(found)
