"""Boxes in YOLO's format, one text file per image, as ultralytics reads and Roboflow exports them: for box AP.

    ROOT/images/{train,val}/**/NAME.jpg          or .png, ...; also images/train2017, ...
    ROOT/labels/{train,val}/**/NAME.txt          a line per object: CLASS X Y WIDTH HEIGHT

    ROOT/{train,valid}/{images,labels}/          the same as Roboflow exports it

    ROOT/data.yaml                               names of the classes; or classes.txt, a name per line

CLASS counts from 0; X and Y are the centre of the box, and all four are shares of the image's sides. An image without
label file has no objects. One with boxes and an EXIF orientation is refused, because labelling tools turn it. Paths in
data.yaml are not followed. A folder for test is read only if there is none for val.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from downstream.data.boxes import size_for_boxes
from downstream.data.listing import MIN_SIDE, Instances, check_different, files_below
from downstream.data.tiny_scenes import DIGIT_VALUES, save_image, save_lines, tiny_objects
from downstream.layouts.coco import Annotation, Category, CocoFile, ImageEntry, parse_instances
from engine.files import read_text
from imagesets.decoding import UnreadableImage
from imagesets.listing import SPLIT_WORDS, subfolders
from imagesets.sets import Split
from imagesets.walk import EXTENSIONS

IMAGES = {"train": "images/train", "val": "images/val"}
SERVES = ("coco",)  # layouts whose tasks run on these sets too
CLASSES = "classes.txt"
NAME_FILES = ("data.yaml", "data.yml", CLASSES, f"labels/{CLASSES}")
ADVICE = f"name the classes in data.yaml, as 'names: [cat, dog]', or in {CLASSES}, one a line"


def recognised(root: Path) -> Path:
    """`root`, if it has images and labels of a split in one of the two arrangements."""
    if not any(_folders(root, split) for split in SPLIT_WORDS):
        raise ValueError("no images/train with labels/train there, nor train/images with train/labels; give their root")
    return root


def listed(root: Path, split: Split) -> Instances:
    """All images of one split. Raises ValueError if something is missing, or if a line of a label file is wrong."""
    if not (folders := _folders(root, split)):
        raise ValueError(f"no images/{split} with labels/{split} there, nor {split}/images with {split}/labels")
    folder, labels = folders[0]
    names_file, names = read_class_names(root)
    files = files_below(root / folder, EXTENSIONS)
    stems = [os.path.splitext(name)[0] for name in files]
    check_different(stems, f"names of images in {folder}, without suffixes,")
    label_files = {os.path.splitext(name)[0]: f"{labels}/{name}" for name in files_below(root / labels, ".txt")}
    content = CocoFile(images=[], annotations=[], categories=[])
    content.categories = [Category(id=number, name=name) for number, name in enumerate(names)]
    for number, (name, stem) in enumerate(zip(files, stems, strict=True), 1):
        rows = [*_objects(root, label_files[stem], len(names))] if stem in label_files else []
        width = height = MIN_SIDE  # of an unreadable image, which is reported when it is read
        with suppress(UnreadableImage, OSError):
            width, height = size_for_boxes(root, f"{folder}/{name}", has_boxes=bool(rows))
        content.images.append(ImageEntry(id=number, file_name=name, height=height, width=width))
        for title, label, (x, y, w, h) in rows:
            box = ((x - w / 2) * width, (y - h / 2) * height, w * width, h * height)
            content.annotations.append(Annotation(id=title, image_id=number, category_id=label, bbox=box))
    label_paths = [label_files[stem] for stem in stems if stem in label_files]
    files_read = (names_file, *label_paths)
    return parse_instances(
        content, split, folder, labels, files_read, form="CLASS X Y WIDTH HEIGHT, in shares of the image"
    )


def _folders(root: Path, split: Split) -> list[tuple[str, str]]:
    """Existing folders of the images and of the labels of a split, relative to `root`; the preferred ones first."""
    pairs = []
    for word in SPLIT_WORDS[split]:
        inner = [name for name in subfolders(str(root / "images")) if name.lower() in (word, f"{word}2017")]
        pairs += [(f"images/{name}", f"labels/{name}") for name in inner]
        pairs += [(f"{name}/images", f"{name}/labels") for name in subfolders(str(root)) if name.lower() == word]
    return [pair for pair in pairs if all((root / folder).is_dir() for folder in pair)]


def read_class_names(root: Path) -> tuple[str, list[str]]:
    """The file that names the classes, relative to `root`, and the names. Raises ValueError for none or equal ones."""
    file = next((name for name in NAME_FILES if (root / name).is_file()), "")
    if not file:
        raise ValueError(f"no data.yaml and no {CLASSES} in {root}; {ADVICE}")
    text = read_text(root / file, 1 << 20)
    names: Any = [line.strip() for line in text.splitlines() if line.strip()]
    if not file.endswith(CLASSES):
        try:  # BaseLoader is as safe as SafeLoader, and leaves names such as no, 1 and 2e3 as they are
            content = yaml.load(text, Loader=yaml.BaseLoader)
        except (yaml.YAMLError, RecursionError, ValueError) as error:
            raise ValueError(f"{file} is no YAML ({' '.join(str(error).split())[:200]}); {ADVICE}") from error
        names = content.get("names") if isinstance(content, dict) else None
        if isinstance(names, dict):
            names = [names.get(str(number)) for number in range(len(names))]
        if isinstance(names, list) and content.get("nc", str(len(names))) != str(len(names)):
            raise ValueError(f"{file} has {len(names)} names and another nc, the number of classes; correct it")
    if not names or not isinstance(names, list) or not all(isinstance(name, str) and name.strip() for name in names):
        raise ValueError(f"{file} has no list of names, nor a mapping from 0, 1, ... to names; {ADVICE}")
    check_different(names, f"classes of {file}")
    return file, names


def _objects(root: Path, file: str, classes: int) -> Iterator[tuple[str, int, list[float]]]:
    """File and line, class, and box (4,) in shares of the image, of each object of a label file.

    Raises ValueError, naming file and line, for a line that is no box of one of the `classes`.
    """
    for number, line in enumerate(read_text(root / file).splitlines(), 1):
        words, title = line.split(), f"{file}, line {number}"
        if not words:
            continue
        try:
            label, *box = map(float, words)
        except ValueError:
            raise ValueError(f"{title}: a word is no number; write CLASS X Y WIDTH HEIGHT") from None
        if len(box) != 4:
            kind = " of a polygon" if len(box) >= 6 and len(box) % 2 == 0 else ""
            raise ValueError(f"{title}: {len(words)} numbers{kind}; write CLASS X Y WIDTH HEIGHT, the object's box")
        if label not in range(classes):
            raise ValueError(f"{title}: class {words[0]}; there are {classes} classes, 0 to {classes - 1}")
        if not all(0 <= value <= 1 for value in box):
            raise ValueError(f"{title}: {' '.join(words[1:])}; X Y WIDTH HEIGHT are shares, from 0 to 1")
        yield title, int(label), box


def write_tiny(root: Path, split: Split) -> None:
    """Write one split of the tiny set: the boxes of the scenes in coco's."""
    save_lines(root / "data.yaml", ["names:", *(f"  - digit {value}" for value in DIGIT_VALUES)])
    for number, (pixels, digits) in enumerate(tiny_objects(split)):
        name, (height, width), lines = f"{split}_{number:06d}", pixels.shape[:2], []
        save_image(root / IMAGES[split] / f"{name}.jpg", pixels, quality=95)
        for value, top, left, rows in digits:
            x1, x2 = left + rows[:, 0].min(), left + rows[:, 1].max()
            box = ((x1 + x2) / 2 / width, (top + len(rows) / 2) / height, (x2 - x1) / width, len(rows) / height)
            lines.append(" ".join(map(str, (DIGIT_VALUES.index(value), *box))))
        save_lines(root / f"labels/{split}/{name}.txt", lines)
