"""COCO 2017's instances, or your own of the same form: images, and a JSON file a split with boxes and outlines.

    ROOT/annotations/instances_{train,val}2017.json
    ROOT/train2017/, ROOT/val2017/                          118 287 and 5000 images, 80 classes

    ROOT/annotations/instances_{train,val}.json             your own, of any categories
    ROOT/train/, ROOT/val/

    ROOT/{train,valid}/_annotations.coco.json               the same as Roboflow writes it, beside the images

The file's categories are the classes, in the order of their numbers, which may have gaps, as COCO's have (1..90). Of a
file without outlines ("segmentation" is empty or absent everywhere) boxes alone are trained and scored.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from PIL import Image

from downstream.data.listing import Entry, Instances, check_present, garbage_collection_paused
from downstream.data.tiny_scenes import HEIGHT, WIDTH, tiny_objects
from imagesets.sets import Split

IMAGES = {"train": "train2017", "val": "val2017"}
FILES = {  # annotations, and the folder of their images
    split: {
        f"annotations/instances_{split}2017.json": f"{split}2017",
        f"annotations/instances_{split}.json": split,
        **{f"{folder}/_annotations.coco.json": folder for folder in folders},
    }
    for split, folders in {"train": ("train",), "val": ("valid", "val")}.items()
}
COUNTS = {"train": 118287, "val": 5000}
TINY_CATEGORIES = {0: 2, 1: 3, 4: 44, 7: 90}  # of the tiny set's digits: with gaps, as in COCO
CROWDED = 8  # every so manyth scene of the tiny set has a crowd

Id = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
Side = Annotated[int, msgspec.Meta(ge=1, le=10**6)]


class RunLengths(msgspec.Struct):
    """A mask: lengths of runs of 0 and 1 in turn, as numbers or as COCO writes them in text."""

    size: tuple[int, int]
    counts: list[int] | str


class Picture(msgspec.Struct):
    """An entry of "images"."""

    id: Id
    file_name: str
    height: Side
    width: Side


class Annotation(msgspec.Struct):
    """An entry of "annotations"."""

    id: Id
    image_id: Id
    category_id: Id
    bbox: tuple[float, float, float, float]  # x, y, width, height in pixels
    area: float = 0.0
    iscrowd: int | bool = 0
    segmentation: list[Annotated[list[float], msgspec.Meta(min_length=1)]] | RunLengths | None = None


class Category(msgspec.Struct):
    """An entry of "categories"."""

    id: Id
    name: str | int | float


class CocoFile(msgspec.Struct):
    """What is read of a file."""

    images: list[Picture]
    annotations: list[Annotation]
    categories: Annotated[list[Category], msgspec.Meta(min_length=1)]


def recognised(root: Path) -> Path:
    """`root`, if it holds annotations/, or annotations beside its images."""
    if not (root / "annotations").is_dir() and not any((root / file).is_file() for file in FILES["train"]):
        raise ValueError(
            "no folder annotations/ there; unpack annotations_trainval2017.zip beside train2017/, val2017/, or put "
            "your own into annotations/instances_train.json and instances_val.json beside train/, val/"
        )
    return root


def listed(root: Path, split: Split) -> Instances:
    """All images of one split, sorted by number. ValueError names what is missing or does not fit together."""
    files = FILES[split]
    name = next((name for name in files if (root / name).is_file()), "")
    if not name:
        raise ValueError(f"there is no file {' nor '.join(files)}")
    with garbage_collection_paused():
        listing = parse_instances(read_json(root / name, name), split, files[name], name)
    folder = root / files[name]
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    present = (path.name for path in folder.iterdir())
    check_present([entry["file_name"] for entry in listing.entries], present, f"images of {split}", folder.name)
    count = len(listing.images)
    if name.endswith("2017.json") and count != COUNTS[split]:
        return replace(listing, notes=(*listing.notes, f"{count} images, COCO 2017 has {COUNTS[split]}"))
    return listing


def parse_instances(
    content: Mapping[str, Any],
    split: Split,
    folder: str,
    name: str,
    annotation_files: tuple[str, ...] | None = None,
    notes: tuple[str, ...] = (),
) -> Instances:
    """The images in `folder` and the things in them, of what the file `name`, or annotation_files in the folder `name`,
    hold. ValueError names what does not fit together."""
    try:
        msgspec.convert(content, CocoFile)
    except msgspec.ValidationError as error:  # names the entry
        raise ValueError(f"{name}: {error}") from error
    by_id = itemgetter("id")
    categories = {category["id"]: str(category["name"]) for category in sorted(content["categories"], key=by_id)}
    entries = sorted(content["images"], key=by_id)
    objects: dict[int, list[Entry]] = {entry["id"]: [] for entry in entries}
    for kind in ("images", "annotations", "categories"):
        if len({entry["id"] for entry in content[kind]}) < len(content[kind]):
            raise ValueError(f"{name}: two of its {kind} have one id")
    sizes = {entry["id"]: (entry["height"], entry["width"]) for entry in entries}
    outlined = any(annotation.get("segmentation") for annotation in content["annotations"])
    for annotation in content["annotations"]:
        _check_object(name, annotation, categories, sizes, outlined)
        if "area" not in annotation:
            annotation = annotation | {"area": annotation["bbox"][2] * annotation["bbox"][3]}
        objects[annotation["image_id"]].append(annotation)
    return Instances(
        images=tuple(f"{folder}/{entry['file_name']}" for entry in entries),
        entries=tuple(entries),
        objects=tuple(tuple(own) for own in objects.values()),
        categories=categories,
        annotations=name,
        annotation_files=(name,) if annotation_files is None else annotation_files,
        notes=(*_notes(split, list(objects.values()), categories, outlined), *notes),
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


def read_json(path: Path, name: str) -> Entry:
    """What the file `name` holds. ValueError where it is no JSON of images."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # of the JSON, or of the encoding
        raise ValueError(f"{name} is no JSON ({error}); write or unpack it again") from error
    if not isinstance(content, dict) or not isinstance(content.get("images"), list):
        raise ValueError(f"{name} has no list 'images'; give COCO's instances, with images, annotations and categories")
    return content


def _check_object(
    name: str,
    annotation: Entry,
    categories: Mapping[int, str],
    sizes: Mapping[int, tuple[int, int]],
    outlined: bool,
) -> None:
    number, outline = annotation["id"], annotation.get("segmentation")
    if annotation["category_id"] not in categories:
        raise ValueError(
            f"{name}: annotation {number} is of category {annotation['category_id']}, which is none of its "
            f"{len(categories)} categories; is this the annotation of another version of the set?"
        )
    if annotation["image_id"] not in sizes:
        raise ValueError(f"{name}: annotation {number} is of image {annotation['image_id']}, which it does not list")
    size = sizes[annotation["image_id"]]
    x, y, width, height = annotation["bbox"]
    _check_coordinates(name, number, "box", [x, y, x + width, y + height], size)
    if outlined and not outline:
        raise ValueError(
            f"{name}: annotation {number} has a box but no outline, and others have one; give each thing its polygon, "
            "or none of them, for boxes alone"
        )
    if isinstance(outline, dict):
        _check_run_lengths(name, number, outline, size)
    for polygon in outline if isinstance(outline, list) else ():
        _check_coordinates(name, number, "polygon", polygon, size)


def _check_coordinates(name: str, number: int, what: str, values: Sequence[float], size: tuple[int, int]) -> None:
    """ValueError unless all are numbers, and no further outside the image than its longer side: drawing them would take
    memory for whatever they enclose."""
    side = max(size)
    if not (isfinite(sum(values)) and -side <= min(values) and max(values) <= 2 * side):
        far = next((v for v in values if not -side <= v <= 2 * side), sum(values))
        raise ValueError(
            f"{name}: the {what} of annotation {number} holds the coordinate {far:g}, and its image is {size[0]} x "
            f"{size[1]} pixels; correct it or leave it out"
        )


def _check_run_lengths(name: str, number: int, outline: Mapping[str, Any], size: tuple[int, int]) -> None:
    if tuple(outline["size"]) != size:
        raise ValueError(
            f"{name}: the mask of annotation {number} is {outline['size']} pixels and its image "
            f"{list(size)}; take both from the same download"
        )
    counts = outline["counts"]
    lengths = list(decode_run_lengths(counts)) if isinstance(counts, str) else counts
    if sum(lengths) != size[0] * size[1] or min(lengths, default=0) < 0:
        raise ValueError(
            f"{name}: the run lengths of annotation {number} are no mask of {size[0]} x {size[1]} pixels: they add up "
            f"to {sum(lengths)}, the least is {min(lengths, default=0)}; correct them or leave it out"
        )


def decode_run_lengths(text: str) -> Iterator[int]:
    """Run lengths from COCO's text: five bits a character from "0" on, the lowest first, the sixth says that more
    follow; from the fourth number on, differences to the last but one (pycocotools maskApi.c, rleFrString)."""
    lengths: list[int] = []
    value = shift = 0
    for sign in text:
        bits = ord(sign) - 48
        if shift > 60:
            break
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            value -= (1 << shift) if bits & 16 else 0
            lengths.append(value + (lengths[-2] if len(lengths) > 2 else 0))
            yield lengths[-1]
            value = shift = 0
    if shift:  # a number without an end, or with none that fits
        yield -1


def _notes(
    split: Split, objects: Sequence[Sequence[Entry]], categories: Mapping[int, str], outlined: bool
) -> tuple[str, ...]:
    notes = [f"{sum(map(len, objects))} objects in {split}" + ("" if outlined else ", by their boxes alone")]
    if bare := sum(not annotations for annotations in objects):
        notes.append(f"{bare} images of {split} without objects" + (", not trained on" if split == "train" else ""))
    used = {annotation["category_id"] for annotations in objects for annotation in annotations}
    if empty := [title for number, title in categories.items() if number not in used]:
        notes.append(f"{len(empty)} of {len(categories)} categories have no object in {split}, such as {empty[0]}")
    return tuple(notes)


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
