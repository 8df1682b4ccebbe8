"""Your own scenes with masks: images/, masks/ and a list of the classes.

    ROOT/images/{train,val}/**/NAME.jpg      or .png, .webp, ...; images/test if there is no images/val
    ROOT/masks/{train,val}/**/NAME.png
    ROOT/classes.txt                         one line per class, all in one of three forms:

    road                  masks hold 0, 1, 2, ... in the order of the lines
    7 road                masks hold these values
    128 64 128 road       masks show these colours: red, green, blue

A line whose name is `ignore` (`11 ignore`) makes its value or colour one that loss and score do not count. So are the
value 255 and white, unless the list gives them to a class. A mask with any other value or colour is refused when it is
read. The list for binary masks of 0 and 255 is

    0 background
    255 cell

SegNet's folders are read too: ROOT/{train,val,test}/ next to ROOT/{train,val,test}annot/ with the masks.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from downstream.data.listing import IGNORED, Listing, files_below, find_folder, mask_paths
from downstream.data.tiny_scenes import GROUND, save_image, tiny_scenes
from engine.files import read_text
from imagesets.listing import SPLIT_WORDS
from imagesets.sets import Split
from imagesets.walk import EXTENSIONS

IMAGES = {"train": "images/train", "val": "images/val"}
IGNORE = "ignore"  # name, in any case, of what loss and score do not count
SERVES = ("ade20k", "cityscapes")  # layouts whose tasks run on these sets too
CLASSES = "classes.txt"
FORMS = {0: "NAME", 1: "NUMBER NAME", 3: "RED GREEN BLUE NAME"}  # count of numbers before the name -> form of a line
ADVICE = f"write a line for each class, all as {', all as '.join(FORMS.values())} ('0 background' and '255 cell')"
TINY_COLOURS = ((0, 0, 0), (220, 20, 60))  # of background and digits in the tiny set
# names, classes_of and colours of a Listing
ClassList = tuple[tuple[str, ...], tuple[int, ...], tuple[tuple[int, ...], ...]]


def recognised(root: Path) -> Path:
    """`root`, if it has classes.txt, and images/ and masks/ or SegNet's folders."""
    if any((root / f"{word}annot").is_dir() for words in SPLIT_WORDS.values() for word in words):
        return find_folder(root, (CLASSES,), ADVICE)
    advice = (
        f"put images into images/train and images/val, masks into masks/train and masks/val, and the classes into "
        f"{CLASSES}: {ADVICE}"
    )
    return find_folder(root, ("images/", "masks/", CLASSES), advice)


def listed(root: Path, split: Split) -> Listing:
    """All scenes of one split. Raises ValueError if a folder or mask is missing, or a line of classes.txt is wrong."""
    image_folder, mask_folder = _folders(root, split)
    images = files_below(root / image_folder, EXTENSIONS)
    masks = mask_paths(root, split, images, mask_folder)
    names, classes_of, colours = read_classes(read_text(root / CLASSES))
    notes = [f"{len(names)} classes of {CLASSES}"]
    if split == "val" and image_folder.rpartition("/")[2] in ("test", "testing"):
        notes.append(f"there is no val folder: {image_folder} is used as val")
    return Listing(
        images=tuple(f"{image_folder}/{name}" for name in images),
        masks=masks,
        classes=names,
        classes_of=classes_of,
        colours=colours,
        own_classes=True,
        notes=tuple(notes),
    )


def _folders(root: Path, split: Split) -> tuple[str, str]:
    """Folders of the images and the masks of a split: the first that are there; images/SPLIT if none are."""
    choices = [(f"images/{word}", f"masks/{word}") for word in SPLIT_WORDS[split]]
    choices += [(word, f"{word}annot") for word in SPLIT_WORDS[split]]
    return next((pair for pair in choices if (root / pair[0]).is_dir()), choices[0])


def read_classes(text: str, file: str = CLASSES) -> ClassList:
    """Names, classes_of and colours of a Listing from the text of a list of classes.

    file: its name for error messages. Raises ValueError, naming the line, if one is wrong.
    """
    listed_names, keys = parse_class_list(text, file)
    names = tuple(name for name in listed_names if name != IGNORE)
    own_keys = [key for key, name in zip(keys, listed_names, strict=True) if name != IGNORE]
    ignored_keys = [key for key, name in zip(keys, listed_names, strict=True) if name == IGNORE]
    if len(keys[0]) == 3:
        return names, tuple(range(256)), (*own_keys, *ignored_keys)
    return names, class_of_value([value for (value,) in own_keys], [value for (value,) in ignored_keys]), ()


def parse_class_list(text: str, file: str = CLASSES) -> tuple[tuple[str, ...], list[tuple[int, ...]]]:
    """Names of the lines of a list, IGNORE among them, and for each its value (1,) or its colour (3,).

    Raises ValueError, naming the line, if one is wrong; or for equal names, equal values or too few or many classes.
    """
    lines = {number: line.split() for number, line in enumerate(text.splitlines(), 1) if line.strip()}
    if not lines:
        raise ValueError(f"{file} names no class; {ADVICE}")
    form = _leading_numbers(next(iter(lines.values())))
    names: list[str] = []
    keys: list[tuple[int, ...]] = []
    for number, words in lines.items():
        if _leading_numbers(words) != form or form not in FORMS or len(words) == form:
            raise ValueError(f"{file}, line {number}: {' '.join(words)!r}; {ADVICE}")
        key = tuple(int(word) for word in words[:form]) or (len(keys),)
        if max(key) > 255:
            raise ValueError(f"{file}, line {number}: {max(key)}; masks hold values and colours to 255")
        name = " ".join(words[form:])
        names.append(IGNORE if name.lower() == IGNORE else name)
        keys.append(key)
    classes = [name for name in names if name != IGNORE]
    if len(set(classes)) < len(classes):
        raise ValueError(f"{file}: two classes have one name")
    if len(set(keys)) < len(keys):
        raise ValueError(f"{file}: two classes have one value")
    if not 1 < len(classes) <= IGNORED:
        raise ValueError(f"{file} lists {len(classes)}; a score needs 2 to {IGNORED} classes, background included")
    return tuple(names), keys


def _leading_numbers(words: list[str]) -> int:
    """Count of numbers before the name in the words of a line."""
    return next((index for index, word in enumerate(words) if not word.isdecimal()), len(words))


def class_of_value(values: list[int], ignored: Sequence[int] = ()) -> tuple[int, ...]:
    """Class of each value 0..255 of a mask (256,), where class k has the value values[k].

    `ignored` values are of no class, and 255 is not unless a class has it. Every other value without a class becomes K,
    which Listing.to_classes refuses.
    """
    classes = dict.fromkeys((IGNORED, *ignored), IGNORED) | {value: k for k, value in enumerate(values)}
    return tuple(classes.get(value, len(values)) for value in range(256))


def write_tiny(root: Path, split: Split) -> None:
    """Write one split of the tiny set: two classes, background and digit, as colours."""
    (root / CLASSES).write_text("0 0 0 ground\n220 20 60 digit\n", encoding="utf-8")
    for number, (pixels, classes) in enumerate(tiny_scenes(split)):
        colours = np.full((*classes.shape, 3), 255, np.uint8)
        colours[classes == GROUND] = TINY_COLOURS[0]
        colours[(classes != IGNORED) & (classes != GROUND)] = TINY_COLOURS[1]
        save_image(root / IMAGES[split] / f"scene_{number:04d}.png", pixels)
        save_image(root / "masks" / split / f"scene_{number:04d}.png", colours)
