"""Your own scenes with masks of classes: images/, masks/ and a list of the classes.

    ROOT/images/{train,val}/**/NAME.jpg      or .png, .webp, ...
    ROOT/masks/{train,val}/**/NAME.png
    ROOT/classes.txt                         a line for each class, all in one of three forms:

    road                  masks hold 0, 1, 2, ... in the order of the lines
    7 road                masks hold these numbers
    128 64 128 road       masks show these colours: red, green, blue

Pixels of the value 255, or white, belong to no class where the list gives neither to one: no loss and no score counts
them. Any other value or colour is refused when its mask is read. Of binary masks of 0 and 255 the list is

    0 background
    255 cell
"""

from pathlib import Path

import numpy as np

from downstream.data.listing import IGNORED, Listing, files_below, find_folder, mask_paths
from downstream.data.tiny_scenes import GROUND, save_image, tiny_scenes
from imagesets.sets import Split
from imagesets.walk import EXTENSIONS

IMAGES = {"train": "images/train", "val": "images/val"}
SERVES = ("ade20k", "cityscapes")  # layouts whose tasks run on these sets too
CLASSES = "classes.txt"
FORMS = {0: "NAME", 1: "NUMBER NAME", 3: "RED GREEN BLUE NAME"}  # by the numbers in front of a name
HOW = f"write a line for each class, all as {', all as '.join(FORMS.values())} ('0 background' and '255 cell')"
TINY_COLOURS = ((0, 0, 0), (220, 20, 60))  # of the tiny set's ground and digits


def recognised(root: Path) -> Path:
    """`root`, if it holds images/, masks/ and classes.txt."""
    advice = (
        f"put images into images/train and images/val, masks into masks/train and masks/val, and the classes into "
        f"{CLASSES}: {HOW}"
    )
    return find_folder(root, ("images/", "masks/", CLASSES), advice)


def listed(root: Path, split: Split) -> Listing:
    """All scenes of one split. ValueError names a missing folder or mask, or a line of classes.txt that is wrong."""
    pictures = sorted(name for suffix in EXTENSIONS for name in files_below(root / IMAGES[split], suffix))
    masks = mask_paths(root, split, pictures, f"masks/{split}")
    names, values, colours = read_classes((root / CLASSES).read_text(encoding="utf-8"))
    return Listing(
        images=tuple(f"{IMAGES[split]}/{name}" for name in pictures),
        masks=masks,
        classes=names,
        classes_of=values,
        colours=colours,
        own_classes=True,
        notes=(f"{len(names)} classes of {CLASSES}",),
    )


ClassList = tuple[tuple[str, ...], tuple[int, ...], tuple[tuple[int, ...], ...]]  # names, classes_of, colours


def read_classes(text: str, file: str = CLASSES) -> ClassList:
    """Names, classes_of and colours of a Listing from a list of classes. ValueError names the line of `file` that is
    wrong."""
    names, keys = parse_class_list(text, file)
    if len(keys[0]) == 3:
        return names, tuple(range(256)), tuple(keys)
    return names, class_of_value([key[0] for key in keys]), ()


def parse_class_list(text: str, file: str = CLASSES) -> tuple[tuple[str, ...], list[tuple[int, ...]]]:
    """Names of the classes, and of each its value, or its colour. ValueError names the line that is wrong."""
    lines = {number: line.split() for number, line in enumerate(text.splitlines(), 1) if line.strip()}
    if not lines:
        raise ValueError(f"{file} names no class; {HOW}")
    form = _numbers(next(iter(lines.values())))
    names: list[str] = []
    keys: list[tuple[int, ...]] = []
    for number, words in lines.items():
        if _numbers(words) != form or form not in FORMS or len(words) == form:
            raise ValueError(f"{file}, line {number}: {' '.join(words)!r}; {HOW}")
        key = tuple(int(word) for word in words[:form]) or (len(keys),)
        if max(key) > 255:
            raise ValueError(f"{file}, line {number}: {max(key)}; masks hold values and colours to 255")
        names.append(" ".join(words[form:]))
        keys.append(key)
    for column, entries in (("name", names), ("value", keys)):
        if len(set(entries)) < len(entries):
            raise ValueError(f"{file}: two classes have one {column}")
    if not 1 < len(names) <= IGNORED:
        raise ValueError(f"{file} lists {len(names)}; a score needs 2 to {IGNORED} classes, background included")
    return tuple(names), keys


def _numbers(words: list[str]) -> int:
    """How many numbers stand in front of a name."""
    return next((place for place, word in enumerate(words) if not word.isdecimal()), len(words))


def class_of_value(values: list[int]) -> tuple[int, ...]:
    """Class of each value 0..255 of a mask, where class k has the value values[k].

    255 is of no class unless it is among the values; every other value is K, which Listing.to_classes refuses.
    """
    classes = {IGNORED: IGNORED} | {value: number for number, value in enumerate(values)}
    return tuple(classes.get(value, len(values)) for value in range(256))


def write_tiny(root: Path, split: Split) -> None:
    """The tiny set's split: two classes, ground and digit, as colours."""
    (root / CLASSES).write_text("0 0 0 ground\n220 20 60 digit\n", encoding="utf-8")
    for number, (pixels, classes) in enumerate(tiny_scenes(split)):
        colours = np.full((*classes.shape, 3), 255, np.uint8)
        for kind, colour in enumerate(TINY_COLOURS):
            colours[(classes != IGNORED) & ((classes != GROUND) == kind)] = colour
        save_image(root / IMAGES[split] / f"scene_{number:04d}.png", pixels)
        save_image(root / "masks" / split / f"scene_{number:04d}.png", colours)
