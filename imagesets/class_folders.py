"""Trees of PATH/train/CLASS/IMAGE and PATH/val/CLASS/IMAGE, which several schemes read."""

import os

from imagesets.listing import class_tree, require_folder, require_same_classes, short_list, subfolders
from imagesets.sets import ImageSet, Split

# Which folder may serve as which split, best first.
FOLDERS: dict[Split, tuple[str, ...]] = {"train": ("train",), "val": ("val", "test")}


def open_tree(url: str, place: str, split: Split) -> ImageSet:
    """Open PATH/<split>/CLASS/IMAGE under any scheme's URL. Raises ValueError for whatever is not this layout."""
    require_folder(place, url)
    found = {wanted: split_folder(place, wanted) for wanted in FOLDERS}
    if not found[split]:
        raise ValueError(f"{url}: {missing(place, FOLDERS[split])}")
    classes = subfolders(found[split])
    if not classes:
        raise ValueError(f"{url}: no class folders in {found[split]}; put the images into one folder per class")
    notes = [f"ImageFolder layout, {len(classes)} classes in {found[split]}"]
    if split == "val" and os.path.basename(found["val"]) != "val":
        notes.append("there is no val folder: test is used as val")
    other = found["train" if split == "val" else "val"]
    if other:
        pair = (classes, subfolders(other))
        require_same_classes(url, *(pair if split == "train" else reversed(pair)))
    else:
        notes.append(f"there is no {'train' if split == 'val' else 'val'} split to compare the classes with")
    return class_tree(url=url, split=split, root=found[split], classes=classes, notes=notes)


def split_folder(place: str, split: Split) -> str:
    """Path of the folder that serves as `split`, empty when there is none."""
    paths = (os.path.join(place, name) for name in FOLDERS[split])
    return next((path for path in paths if os.path.isdir(path)), "")


def missing(place: str, wanted: tuple[str, ...]) -> str:
    """What to say when `place` has none of the folders `wanted` of a split, the proper one first."""
    what = f"no {' or '.join(wanted)} folder in {place}"
    if os.path.basename(os.path.normpath(place)) in ("train", "val", "test"):
        return f"{what}; give the folder above it, {os.path.dirname(os.path.abspath(place))}"
    there = subfolders(place)
    holds = f"it holds {short_list(there)}" if there else "it holds no folders"
    return f"{what} ({holds}); arrange the images as {wanted[0]}/CLASS/IMAGE"
