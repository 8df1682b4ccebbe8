"""COCO 2017's instances, or your own set of the same form: images, and one JSON file per split with boxes and outlines.

    ROOT/annotations/instances_{train,val}2017.json
    ROOT/train2017/, ROOT/val2017/                          118 287 and 5000 images, 80 classes

    ROOT/annotations/instances_{train,val}.json             your own set, with any categories
    ROOT/train/, ROOT/val/

    ROOT/{train,valid}/_annotations.coco.json               the same as Roboflow exports it, next to the images

The categories of the file are the classes, in the order of their ids, which may have gaps (COCO's are 1 to 90). For a
file without outlines ("segmentation" is empty or absent everywhere) only boxes are trained and scored. Objects whose
box is less than a pixel wide or high in its image are left out of both, as crowds are and objects marked as "ignore";
boxes that reach beyond their image are cut off; a note counts all of these. If they are more than a fifth of a split, a
run warns of boxes in another form, and `bench data check` refuses them. The ids of annotations may be anything.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from PIL import Image

from downstream.data.boxes import BEYOND, NO_AREA, THIN, Box, box_fault, cut_at_border
from downstream.data.listing import Entry, Instances, check_different, check_present, garbage_collection_paused
from downstream.data.tiny_scenes import HEIGHT, WIDTH, tiny_objects
from engine.files import read_json
from imagesets.sets import Split

IMAGES = {"train": "train2017", "val": "val2017"}
FILES = {  # possible annotation files of each split -> folder of their images
    "train": {
        "annotations/instances_train2017.json": "train2017",
        "annotations/instances_train.json": "train",
        "train/_annotations.coco.json": "train",
    },
    "val": {
        "annotations/instances_val2017.json": "val2017",
        "annotations/instances_val.json": "val",
        "valid/_annotations.coco.json": "valid",
        "val/_annotations.coco.json": "val",
    },
}
COUNTS = {"train": 118287, "val": 5000}
MAX_OFFSET, MAX_OFFSET_SHARE = 2.0, 0.1  # of a box from its outline: in pixels, and in longer sides of the box
MAX_REMARKED = 0.2  # share of the objects with one remark, above which the boxes of a file seem to be in another form
MARKED = "the mark 'ignore': neither trained on nor scored, like crowds"  # a remark that is no sign of it
TINY_CATEGORIES = {0: 2, 1: 3, 4: 44, 7: 90}  # digit -> category id in the tiny set, with gaps as in COCO
CROWD_PERIOD = 8  # one of so many scenes of the tiny set has a crowd

Id = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]  # integers that are exact in JSON
Side = Annotated[int, msgspec.Meta(ge=1, le=10**6)]


class RunLengths(msgspec.Struct):
    """A mask of size (height, width) as lengths of alternating runs of 0 and 1: numbers, or COCO's text for them."""

    size: tuple[int, int]
    counts: list[int] | str


class ImageEntry(msgspec.Struct):
    """An entry of "images"."""

    id: Id
    file_name: str
    height: Side
    width: Side


class Annotation(msgspec.Struct, kw_only=True):
    """An entry of "annotations": one object."""

    id: Any = None  # only for messages: files repeat ids, leave them out, or begin at 0
    image_id: Id
    category_id: Id
    bbox: tuple[float, float, float, float]  # x, y, width, height in pixels
    area: float = 0.0
    iscrowd: int | bool = 0
    ignore: int | bool = 0
    # Polygons x1, y1, x2, y2, ..., or a mask.
    segmentation: list[Annotated[list[float], msgspec.Meta(min_length=1)]] | RunLengths | None = None


class Category(msgspec.Struct):
    """An entry of "categories"."""

    id: Id
    name: str | int | float


class CocoFile(msgspec.Struct):
    """The fields that are read of an annotation file."""

    images: list[ImageEntry]
    annotations: list[Annotation]
    categories: Annotated[list[Category], msgspec.Meta(min_length=1)]


def recognised(root: Path) -> Path:
    """`root`, if it has annotations/, or an annotation file next to the training images."""
    if not (root / "annotations").is_dir() and not any((root / file).is_file() for file in FILES["train"]):
        raise ValueError(
            "no folder annotations/ there; unpack annotations_trainval2017.zip next to train2017/ and val2017/, or put "
            "your own annotations into annotations/instances_train.json and instances_val.json next to train/ and val/"
        )
    return root


def listed(root: Path, split: Split) -> Instances:
    """All images of one split, sorted by id. Raises ValueError if something is missing or inconsistent."""
    files = FILES[split]
    name = next((name for name in files if (root / name).is_file()), "")
    if not name:
        raise ValueError(f"there is no file {' nor '.join(files)}")
    with garbage_collection_paused():
        listing = parse_instances(read_json(root / name, type=CocoFile), split, files[name], name)
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
    content: CocoFile,
    split: Split,
    folder: str,
    name: str,
    annotation_files: tuple[str, ...] | None = None,
    form: str = "x, y, width, height in pixels",
) -> Instances:
    """The listing of the images and objects in the contents of an annotation file.

    Args:
        content: of the annotation file, or in its form.
        split: the split of the images, for notes.
        folder: folder of the images, relative to the root.
        name: the annotation file, or the folder of the annotation files, relative to the root.
        annotation_files: the annotation files in the folder `name`; None if `name` is the only one.
        form: what boxes of the layout are, for messages.

    Raises:
        ValueError: the contents are inconsistent; the message names the entry.
    """
    for kind, entries in (("images", content.images), ("categories", content.categories)):
        if len({entry.id for entry in entries}) < len(entries):
            raise ValueError(f"{name}: two of its {kind} have one id")
    images = sorted(content.images, key=attrgetter("id"))
    check_different((image.file_name for image in images), f"images of {name}")
    categories = {category.id: str(category.name) for category in sorted(content.categories, key=attrgetter("id"))}
    sizes = {image.id: (image.height, image.width) for image in images}
    has_outlines = any(annotation.segmentation for annotation in content.annotations)
    objects: dict[int, list[Entry]] = {image.id: [] for image in images}
    counts: dict[str, list[str]] = {}  # text of a note -> the annotations that it counts
    boxes = set()
    for number, annotation in enumerate(content.annotations, 1):
        title = f"annotation {number if annotation.id is None else annotation.id!r}"
        remarks, entry = _object(name, title, annotation, categories, sizes, has_outlines)
        box = (annotation.image_id, annotation.category_id, annotation.bbox)
        for remark in (*remarks, "the class and box of another object") if box in boxes else remarks:
            counts.setdefault(remark, []).append(title)
        boxes.add(box)
        if entry:
            objects[annotation.image_id].append(entry)
    notes, warnings = _notes(split, list(objects.values()), categories, has_outlines), []
    for remark, titles in counts.items():
        line = f"{len(titles)} of {len(content.annotations)} objects in {split} with {remark}; the first is {titles[0]}"
        if len(titles) > MAX_REMARKED * len(content.annotations) and remark != MARKED:
            warnings.append(f"{name}: {line}: correct the annotations (boxes are {form})")
        else:
            notes.append(line)
    return Instances(
        images=tuple(f"{folder}/{image.file_name}" for image in images),
        entries=tuple(msgspec.structs.asdict(image) for image in images),
        objects=tuple(tuple(annotations) for annotations in objects.values()),
        categories=categories,
        annotations=name,
        annotation_files=(name,) if annotation_files is None else annotation_files,
        notes=tuple(notes),
        warnings=tuple(warnings),
    )


def _object(
    name: str,
    title: str,
    annotation: Annotation,
    categories: Mapping[int, str],
    sizes: Mapping[int, tuple[int, int]],
    has_outlines: bool,
) -> tuple[list[str], Entry]:
    """Remarks on an annotation, for notes, and its entry in a listing, empty if it is neither trained on nor scored.

    sizes: id of an image -> height and width in pixels. has_outlines: whether annotations of the file have outlines.

    Raises:
        ValueError: the annotation does not fit the categories and images of the file `name`.
    """
    outline: Any = annotation.segmentation
    if annotation.category_id not in categories:
        raise ValueError(
            f"{name}: {title} is of category {annotation.category_id}, which is none of its "
            f"{len(categories)} categories; is this the annotation of another version of the set?"
        )
    if annotation.image_id not in sizes:
        raise ValueError(f"{name}: {title} is of image {annotation.image_id}, which it does not list")
    if has_outlines and not outline:
        raise ValueError(
            f"{name}: {title} has a box but no outline, while others have outlines; give all objects "
            "polygons, or none of them to use only boxes"
        )
    height, width = size = sizes[annotation.image_id]
    if isinstance(outline, RunLengths):
        _check_run_lengths(name, title, outline, size)
        outline = {"size": list(size), "counts": outline.counts}
    elif outline:
        for polygon in outline:
            _check_polygon(name, title, polygon, size)
        # Others are no polygons for mmdet (LoadAnnotations._process_masks), and boxes or errors for pycocotools.
        outline = [polygon for polygon in outline if len(polygon) >= 6 and len(polygon) % 2 == 0]
        if not outline:
            return ["no polygon of three points: neither trained on nor scored"], {}
    x, y, w, h = annotation.bbox
    box, remarks = (x, y, x + w, y + h), []
    if (fault := box_fault(box, (width, height))) == BEYOND:
        remarks.append(f"{BEYOND}, which are cut off")
        x, y, *_ = box = cut_at_border(box, (width, height))
        w, h = box[2] - x, box[3] - y
        fault = box_fault(box, (width, height))
    if fault == NO_AREA:
        return [f"{NO_AREA}: neither trained on nor scored"], {}
    if fault == THIN:
        remarks.append(f"{THIN}: scored, but not trained on")
    if outline:
        edges = zip(box, cut_at_border(_box_around(outline), (width, height)), strict=True)
        if max(abs(edge - other) for edge, other in edges) > max(MAX_OFFSET, MAX_OFFSET_SHARE * max(w, h)):
            remarks.append("a box elsewhere than their outline")
    if annotation.ignore and not annotation.iscrowd:
        remarks.append(MARKED)
    entry = {
        "image_id": annotation.image_id,
        "category_id": annotation.category_id,
        "bbox": [x, y, w, h],
        "area": annotation.area if annotation.area > 0 else w * h,  # mmdet does not train on objects of area 0
        "iscrowd": int(bool(annotation.iscrowd or annotation.ignore)),
    }
    return remarks, entry | {"segmentation": outline} if outline else entry


def _box_around(outline: Any) -> Box:
    """The box around all polygons, or around a mask."""
    if isinstance(outline, list):
        xs, ys = ([value for polygon in outline for value in polygon[start::2]] for start in (0, 1))
        return min(xs), min(ys), max(xs), max(ys)
    from pycocotools import mask

    lengths = mask.frPyObjects(outline, *outline["size"]) if isinstance(outline["counts"], list) else outline
    x, y, width, height = mask.toBbox(lengths).tolist()
    return x, y, x + width, y + height


def _check_polygon(name: str, title: str, values: Sequence[float], size: tuple[int, int]) -> None:
    """Raise ValueError unless all coordinates are at most the longer side outside of the image.

    Drawing a polygon takes memory for its whole extent, however far outside of the image it is.
    """
    longer = max(size)
    if not (-longer <= min(values) and max(values) <= 2 * longer):
        wrong = next(value for value in values if not -longer <= value <= 2 * longer)
        raise ValueError(
            f"{name}: the polygon of {title} holds the coordinate {wrong:g}, but its image is {size[0]} x "
            f"{size[1]} pixels (height x width); correct or remove the annotation"
        )


def _check_run_lengths(name: str, title: str, outline: RunLengths, size: tuple[int, int]) -> None:
    """Raise ValueError unless the run lengths of the annotation `title` are a mask of `size` (height, width)."""
    if outline.size != size:
        raise ValueError(
            f"{name}: the mask of {title} is {list(outline.size)} pixels and its image "
            f"{list(size)}; take both from the same download"
        )
    lengths = decode_run_lengths(outline.counts) if isinstance(outline.counts, str) else outline.counts
    if sum(lengths) != size[0] * size[1] or min(lengths, default=0) < 0:
        raise ValueError(
            f"{name}: the run lengths of {title} are no mask of {size[0]} x {size[1]} pixels: they add up "
            f"to {sum(lengths)}, the least is {min(lengths, default=0)}; correct or remove the annotation"
        )


def decode_run_lengths(text: str) -> list[int]:
    """Run lengths from COCO's text (pycocotools maskApi.c, rleFrString); the last is -1 if the text is damaged.

    A character, counted from "0", holds five bits of a number, the lowest first; its sixth bit says that more follow.
    From the fourth number on, they are differences to the last but one.
    """
    lengths: list[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - 48
        if shift > 60:  # the number is too long for 64 bits
            break
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            value -= (1 << shift) if bits & 16 else 0
            lengths.append(value + (lengths[-2] if len(lengths) > 2 else 0))
            value = shift = 0
    return [*lengths, -1] if shift else lengths  # shift: the last number has no end


def _notes(
    split: Split, objects: Sequence[Sequence[Entry]], categories: Mapping[int, str], has_outlines: bool
) -> list[str]:
    """Notes on the objects of a split: their number, images without any, and categories without any."""
    notes = [f"{sum(map(len, objects))} objects in {split}" + ("" if has_outlines else ", by their boxes alone")]
    if empty_images := sum(not annotations for annotations in objects):
        not_trained = ", not trained on" if split == "train" else ""
        notes.append(f"{empty_images} images of {split} without objects{not_trained}")
    used = {annotation["category_id"] for annotations in objects for annotation in annotations}
    if unused := [title for number, title in categories.items() if number not in used]:
        notes.append(f"{len(unused)} of {len(categories)} categories have no object in {split}, such as {unused[0]}")
    return notes


def write_tiny(root: Path, split: Split) -> None:
    """Write one split of the tiny set.

    The outline of a digit follows its outer edge, as run lengths for a crowd and as a polygon otherwise.
    """
    (root / IMAGES[split]).mkdir()
    (root / "annotations").mkdir(exist_ok=True)
    images: list[Entry] = []
    annotations: list[Entry] = []
    for number, (pixels, digits) in enumerate(tiny_objects(split), 1):
        name = f"{number:012d}.jpg"
        Image.fromarray(pixels).save(root / IMAGES[split] / name, quality=95)
        images.append({"id": number, "file_name": name, "height": HEIGHT, "width": WIDTH})
        for index, (value, top, left, rows) in enumerate(digits):
            crowd = number % CROWD_PERIOD == 1 and index == len(digits) - 1
            ids = {"id": len(annotations) + 1, "image_id": number, "category_id": TINY_CATEGORIES[value]}
            annotations.append(ids | _outline(rows + left, top, crowd))
    categories = [{"id": number, "name": f"digit {value}"} for value, number in TINY_CATEGORIES.items()]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (root / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(content))


def _outline(spans: np.ndarray, top: int, crowd: bool) -> Entry:
    """bbox, area, iscrowd and segmentation of a digit, as in COCO's files.

    spans: (h, 2) first and end column of each row from the row `top` on.
    """
    left, right = int(spans[:, 0].min()), int(spans[:, 1].max())
    return {
        "bbox": [left, top, right - left, len(spans)],
        "area": int((spans[:, 1] - spans[:, 0]).sum()),
        "iscrowd": int(crowd),
        "segmentation": _run_lengths(spans, top) if crowd else [_polygon(spans, top)],
    }


def _polygon(spans: np.ndarray, top: int) -> list[int]:
    """x1, y1, x2, y2, ... of the outline, down the right edge and up the left one."""
    right = [point for row, (_, x) in enumerate(spans, top) for point in ((x, row), (x, row + 1))]
    left = [point for row, (x, _) in enumerate(spans, top) for point in ((x, row), (x, row + 1))]
    return [int(coordinate) for point in (*right, *reversed(left)) for coordinate in point]


def _run_lengths(spans: np.ndarray, top: int) -> Entry:
    """The mask as lengths of alternating runs of 0 and 1, column by column."""
    mask = np.zeros((HEIGHT, WIDTH), bool)
    for row, (start, end) in enumerate(spans, top):
        mask[row, start:end] = True
    pixels = np.concatenate([[False], mask.ravel(order="F")])
    changes = np.flatnonzero(np.diff(pixels))
    return {"size": [HEIGHT, WIDTH], "counts": np.diff([0, *changes, mask.size]).tolist()}
