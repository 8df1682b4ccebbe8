"""Boxes as Pascal VOC writes them, an XML file an image, such as BCCD's or LabelImg's: for detection, by box AP alone.

    ROOT/JPEGImages/NAME.jpg                     or .png, ...
    ROOT/Annotations/NAME.xml
    ROOT/ImageSets/Main/{train,val}.txt          names, one a line; test.txt where there is no val.txt

Classes are the names of the objects in both lists, sorted. Objects that are called difficult are neither learnt nor
scored. VOC counts pixels from 1, so that a box goes from xmin - 1 to xmax; parts outside the image are cut off.
"""

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any

from downstream.data.listing import Instances, check_present, find_folder, read_names
from downstream.data.tiny_scenes import save_image, save_lines, tiny_objects
from downstream.layouts.coco import parse_instances
from engine.files import read_regular
from imagesets.decoding import MAX_BYTES, UnreadableImage, open_image, read_bytes
from imagesets.sets import SPLITS, Split
from imagesets.walk import EXTENSIONS

IMAGES = {"train": "JPEGImages", "val": "JPEGImages"}
SERVES = ("coco",)  # layouts whose tasks run on these sets too
LISTS = {"train": ("train.txt",), "val": ("val.txt", "test.txt")}
CORNERS = ("xmin", "ymin", "xmax", "ymax")

Object = tuple[str, list[float], bool]  # name; x1, y1, x2, y2 in pixels, counted from 0; whether it is difficult


def recognised(root: Path) -> Path:
    """The folder that holds JPEGImages/ and Annotations/: `root`, or VOC2012 or VOC2007 in it or in its VOCdevkit."""
    inner = [f"{devkit}{year}" for devkit in ("", "VOCdevkit/") for year in ("VOC2012", "VOC2007")]
    return find_folder(root, ("JPEGImages/", "Annotations/"), "give the folder that holds both and ImageSets/", inner)


def listed(root: Path, split: Split) -> Instances:
    """All images of one split, in the order of its list. ValueError names what is missing or cannot be read."""
    lists = {of_split: _names(root, of_split) for of_split in SPLITS}
    return read_boxes(root, lists[split], [*lists["train"], *lists["val"]], split)


def read_boxes(root: Path, names: list[str], in_any_list: list[str], split: Split) -> Instances:
    """The images `names` of one split. in_any_list: images whose objects' names are the classes, these among them."""
    pictures = {path.stem: path.name for path in (root / "JPEGImages").iterdir() if path.suffix.lower() in EXTENSIONS}
    check_present(names, pictures, f"images of {split}", "JPEGImages")
    read = {name: _read(root / "Annotations" / f"{name}.xml") for name in dict.fromkeys(in_any_list)}
    titles = sorted({title for _, objects in read.values() for title, _, _ in objects})
    numbers = {title: number for number, title in enumerate(titles, 1)}
    entries: list[dict[str, Any]] = []
    boxes: list[dict[str, Any]] = []
    empty: list[str] = []  # names of images, once for each box without an area
    for number, name in enumerate(names, 1):
        size, objects = read[name]
        width, height = size or _size(root / "JPEGImages" / pictures[name])
        entries.append({"id": number, "file_name": pictures[name], "height": height, "width": width})
        for title, corners, difficult in objects:
            bounds = (width, height, width, height)
            x1, y1, x2, y2 = (min(max(value, 0.0), bound) for value, bound in zip(corners, bounds, strict=True))
            if x1 >= x2 or y1 >= y2:
                empty.append(name)
                continue
            facts = {"id": len(boxes) + 1, "image_id": number, "category_id": numbers[title]}
            boxes.append(facts | {"bbox": [x1, y1, x2 - x1, y2 - y1], "iscrowd": int(difficult)})
    return parse_instances(
        {
            "images": entries,
            "annotations": boxes,
            "categories": [{"id": number, "name": title} for title, number in numbers.items()],
        },
        split,
        "JPEGImages",
        "Annotations",
        annotation_files=tuple(f"Annotations/{name}.xml" for name in names),
        notes=(f"boxes of {split} without an area are left out: {len(empty)}, the first in {empty[0]}.xml",)
        if empty
        else (),
    )


def _names(root: Path, split: Split) -> list[str]:
    files = [root / "ImageSets" / "Main" / file for file in LISTS[split]]
    return unique_names(next((file for file in files if file.is_file()), files[0]), split)


def unique_names(file: Path, split: str) -> list[str]:
    """The images' names in a list. ValueError where there is none, or an image stands there twice."""
    names = read_names(file, f"write the names of the images of {split} there, one a line")
    if len(set(names)) < len(names):
        raise ValueError(f"{file} lists an image twice")
    return names


def _read(path: Path) -> tuple[tuple[int, int] | None, list[Object]]:
    """Width and height in pixels, None where the file gives none, and the objects. ValueError for a file that cannot be
    read."""
    try:
        content = read_regular(path, MAX_BYTES)
        if b"<!DOCTYPE" in content:  # it may declare entities that stand for gigabytes
            raise ValueError("it declares a document type; save it without")
        tree = ElementTree.fromstring(content)
        width, height = (int(float(tree.findtext(f"size/{side}") or 0)) for side in ("width", "height"))
        return (width, height) if min(width, height) > 0 else None, list(_objects(tree))
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}; an image without objects needs one too") from None
    except (ElementTree.ParseError, ValueError, OverflowError) as error:
        raise ValueError(f"{path} is no annotation of Pascal VOC ({error}); correct it") from error


def _size(path: Path) -> tuple[int, int]:
    """Width and height in pixels, of an image whose annotation does not give them."""
    try:
        return open_image(read_bytes(str(path))).size
    except UnreadableImage as error:
        raise ValueError(
            f"{path} cannot be read ({error.reason}), and its annotation gives no size; replace the file"
        ) from error


def _objects(tree: ElementTree.Element) -> Iterator[Object]:
    for number, item in enumerate(tree.iterfind("object"), 1):
        title = (item.findtext("name") or "").strip()
        values = [float(item.findtext(f"bndbox/{corner}") or "nan") for corner in CORNERS]
        if not title or not all(map(isfinite, values)):
            raise ValueError(f"object {number} needs a name and finite bndbox/{', '.join(CORNERS)}")
        yield title, [values[0] - 1, values[1] - 1, *values[2:]], (item.findtext("difficult") or "").strip() == "1"


def write_tiny(root: Path, split: Split) -> None:
    """The tiny set's split: the boxes of coco's."""
    names = []
    for number, (pixels, own) in enumerate(tiny_objects(split)):
        names.append(f"{split}_{number:06d}")
        save_image(root / "JPEGImages" / f"{names[-1]}.jpg", pixels, quality=95)
        height, width = pixels.shape[:2]
        lines = [f"<annotation><size><width>{width}</width><height>{height}</height></size>"]
        for digit, top, left, rows in own:
            corners = (left + rows[:, 0].min() + 1, top + 1, left + rows[:, 1].max(), top + len(rows))
            box = "".join(f"<{name}>{value}</{name}>" for name, value in zip(CORNERS, corners, strict=True))
            lines.append(f"<object><name>digit {digit}</name><bndbox>{box}</bndbox></object>")
        save_lines(root / f"Annotations/{names[-1]}.xml", [*lines, "</annotation>"])
    save_lines(root / f"ImageSets/Main/{split}.txt", names)
