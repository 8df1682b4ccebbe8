"""Boxes in Pascal VOC's format, one XML file per image, as in BCCD or written by LabelImg: for detection by box AP.

    ROOT/JPEGImages/NAME.jpg                     or .png, ...
    ROOT/Annotations/NAME.xml
    ROOT/ImageSets/Main/{train,val}.txt          names, one per line; test.txt if there is no val.txt

The classes are the names of the objects in both lists, sorted. Objects marked as difficult are neither trained nor
scored. VOC counts pixels from 1, so a box extends from xmin - 1 to xmax; parts outside of the image are cut off. An
image with objects and an EXIF orientation is refused unless its annotation states its size as it is stored. Other
lists, such as test.txt beside val.txt, are not read.
"""

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

from downstream.data.boxes import size_for_boxes
from downstream.data.listing import Instances, find_folder, named_files, read_names
from downstream.data.tiny_scenes import save_image, save_lines, tiny_objects
from downstream.layouts.coco import Annotation, Category, CocoFile, ImageEntry, parse_instances
from engine.files import read_regular
from imagesets.decoding import MAX_BYTES
from imagesets.sets import Split

IMAGES = {"train": "JPEGImages", "val": "JPEGImages"}
SERVES = ("coco",)  # layouts whose tasks run on these sets too
LISTS = {"train": ("train.txt",), "val": ("val.txt", "test.txt")}
LIST_ADVICE = "write the names of the images there, one a line"
MAX_DEPTH = 100  # levels of an annotation's elements; VOC's parts of persons are on the fifth
CORNERS = ("xmin", "ymin", "xmax", "ymax")

Object = tuple[str, list[float], bool]  # class; x1, y1, x2, y2 in pixels from 0; whether it is difficult


def recognised(root: Path) -> Path:
    """The folder with JPEGImages/ and Annotations/: `root`, or VOC2012 or VOC2007 in it or in its VOCdevkit."""
    inner = [f"{devkit}{year}" for devkit in ("", "VOCdevkit/") for year in ("VOC2012", "VOC2007")]
    return find_folder(root, ("JPEGImages/", "Annotations/"), "give the folder that holds both and ImageSets/", inner)


def listed(root: Path, split: Split) -> Instances:
    """All images of one split, in the order of its list. Raises ValueError if a file is missing or cannot be read."""
    names = {}
    for name, lists in LISTS.items():
        files = [root / "ImageSets" / "Main" / file for file in lists]
        names[name] = read_names(next((file for file in files if file.is_file()), files[0]), LIST_ADVICE)
    listing = read_boxes(root, names[split], [*names["train"], *names["val"]], split)
    val, test = (root / "ImageSets" / "Main" / name for name in LISTS["val"])
    if split == "val" and val.is_file() and test.is_file():
        unread = f"{test.name}, with {len(read_names(test, LIST_ADVICE))} images, is not read beside {val.name}"
        return replace(listing, notes=(*listing.notes, unread))
    return listing


def read_boxes(root: Path, names: list[str], names_for_classes: list[str], split: Split) -> Instances:
    """The listing of the images `names` of one split and their objects.

    names_for_classes: images whose objects define the classes, including `names`. Raises ValueError if an image or
    annotation is missing or cannot be read.
    """
    paths = named_files(root, "JPEGImages", names, f"images of {split}")
    images = {name: path.removeprefix("JPEGImages/") for name, path in zip(names, paths, strict=True)}
    annotations = {
        name: _read_annotation(root / "Annotations" / f"{name}.xml") for name in dict.fromkeys(names_for_classes)
    }
    classes = sorted({title for _, objects in annotations.values() for title, _, _ in objects})
    category_ids = {title: number for number, title in enumerate(classes, 1)}
    entries: list[ImageEntry] = []
    boxes: list[Annotation] = []
    for image_id, name in enumerate(names, 1):
        size, objects = annotations[name]
        width, height = size or size_for_boxes(root, f"JPEGImages/{images[name]}", has_boxes=bool(objects))
        entries.append(ImageEntry(id=image_id, file_name=images[name], height=height, width=width))
        for title, (x1, y1, x2, y2), difficult in objects:
            boxes.append(
                Annotation(
                    id=f"{name}.xml",
                    image_id=image_id,
                    category_id=category_ids[title],
                    bbox=(x1, y1, x2 - x1, y2 - y1),
                    iscrowd=difficult,
                )
            )
    categories = [Category(id=number, name=title) for title, number in category_ids.items()]
    return parse_instances(
        CocoFile(images=entries, annotations=boxes, categories=categories),
        split,
        "JPEGImages",
        "Annotations",
        annotation_files=tuple(f"Annotations/{name}.xml" for name in names),
        form=f"{', '.join(CORNERS)} in pixels",
    )


def _read_annotation(path: Path) -> tuple[tuple[int, int] | None, list[Object]]:
    """Width and height in pixels, or None if the file does not give them, and the objects.

    Raises ValueError if the file is missing or cannot be read.
    """
    try:
        parser = ElementTree.XMLParser(target=_ShallowTree())
        parser.feed(read_regular(path, MAX_BYTES))
        tree = parser.close()
        width, height = (int(float(tree.findtext(f"size/{side}") or 0)) for side in ("width", "height"))
        return (width, height) if min(width, height) > 0 else None, list(_objects(tree))
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}; an image without objects needs one too") from None
    except (ElementTree.ParseError, ValueError, OverflowError, LookupError) as error:  # LookupError: of the encoding
        raise ValueError(f"{path} is no annotation of Pascal VOC ({error}); correct it") from error


class _ShallowTree(ElementTree.TreeBuilder):
    """A tree of at most MAX_DEPTH levels, because deleting a deep one overflows the stack, and without entities."""

    depth = 0

    def start(self, tag: Any, attrs: Any, /) -> ElementTree.Element:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ValueError(f"it has more than {MAX_DEPTH} levels of elements")
        return super().start(tag, attrs)

    def end(self, tag: str, /) -> ElementTree.Element:
        self.depth -= 1
        return super().end(tag)

    def doctype(self, name: str, public: str | None, system: str | None) -> None:  # may declare gigabytes of entities
        raise ValueError("it declares a document type; save it without")


def _objects(tree: ElementTree.Element) -> Iterator[Object]:
    """The objects of an annotation. Raises ValueError for one without a name or finite corners."""
    for number, item in enumerate(tree.iterfind("object"), 1):
        title = (item.findtext("name") or "").strip()
        x1, y1, x2, y2 = corners = [float(item.findtext(f"bndbox/{corner}") or "nan") for corner in CORNERS]
        if not title or not all(map(isfinite, corners)):
            raise ValueError(f"object {number} needs a name and finite bndbox/{', '.join(CORNERS)}")
        x1, y1 = (max(edge - 1, min(edge, 0.0)) for edge in (x1, y1))  # 0 stays 0, in files that count from 0
        yield title, [x1, y1, x2, y2], (item.findtext("difficult") or "").strip() == "1"


def write_tiny(root: Path, split: Split) -> None:
    """Write one split of the tiny set: the boxes of the scenes in coco's."""
    names = []
    for number, (pixels, digits) in enumerate(tiny_objects(split)):
        names.append(f"{split}_{number:06d}")
        save_image(root / "JPEGImages" / f"{names[-1]}.jpg", pixels, quality=95)
        height, width = pixels.shape[:2]
        lines = [f"<annotation><size><width>{width}</width><height>{height}</height></size>"]
        for value, top, left, rows in digits:
            corners = (left + rows[:, 0].min() + 1, top + 1, left + rows[:, 1].max(), top + len(rows))
            box = "".join(f"<{name}>{corner}</{name}>" for name, corner in zip(CORNERS, corners, strict=True))
            lines.append(f"<object><name>digit {value}</name><bndbox>{box}</bndbox></object>")
        save_lines(root / f"Annotations/{names[-1]}.xml", [*lines, "</annotation>"])
    save_lines(root / f"ImageSets/Main/{split}.txt", names)
