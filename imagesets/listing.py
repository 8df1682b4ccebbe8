"""Image files in folders, such as trees of PATH/train/CLASS/IMAGE and PATH/val/CLASS/IMAGE, and the errors that wrong
folders deserve."""

import os
from collections.abc import Mapping, Sequence

import numpy as np

from imagesets.sets import NO_VAL, FileImages, ImageSet, Split
from imagesets.walk import EXTENSIONS, find_images

# Words in the names of folders, files and splits that mean a split, the proper one first; capitals do not matter.
SPLIT_WORDS: Mapping[Split, tuple[str, ...]] = {
    "train": ("train", "training"),
    "val": ("val", "validation", "valid", "dev", "test", "testing"),
}
# Scheme of labelled scenes -> folders by which it is known.
SCENES = {
    "voc": ("JPEGImages", "SegmentationClass"),
    "vocboxes": ("JPEGImages", "Annotations"),
    "masks": ("images", "masks"),
}
HOLD_OUT = "or append '?val=0.2' to the URL, which holds out a fifth of each class of the training images"


def subfolders(folder: str) -> tuple[str, ...]:
    """Names of the folders in `folder`, sorted; empty when `folder` is none itself."""
    if not os.path.isdir(folder):
        return ()
    with os.scandir(folder) as entries:
        return tuple(sorted(entry.name for entry in entries if entry.is_dir()))


def require_folder(folder: str, url: str) -> None:
    """Raise ValueError unless `folder` is a folder that can be listed; the message names the part that is missing."""
    if not folder:
        raise ValueError(f"{url}: no path after the colon; write {url}/path/to/folder")
    if os.path.isfile(folder):
        raise ValueError(f"{url}: {folder} is a file; give the folder that holds the images")
    if not os.path.isdir(folder):
        existing = os.path.abspath(folder)
        while not os.path.isdir(existing):
            existing = os.path.dirname(existing)
        raise ValueError(
            f"{url}: no folder {folder}; the path exists as far as {existing}: correct it, or mount the data"
        )
    if not os.access(folder, os.R_OK | os.X_OK):
        raise ValueError(f"{url}: no permission to list {folder}; run chmod u+rx on it, or ask its owner")


def images_below(root: str, folders: Sequence[str]) -> tuple[FileImages, np.ndarray]:
    """All image files below root/FOLDER of every one of `folders`, in torchvision's order, and how many are below each.

    FOLDER "." is the root itself. OSError for what cannot be listed. A large listing is kept (walk.py).
    """
    listing, kept_in = find_images(root, folders)
    images = FileImages(root=root, names=listing.names, sizes=listing.sizes, changed=listing.changed, kept_in=kept_in)
    return images, listing.counts


def open_tree(url: str, place: str, split: Split) -> ImageSet:
    """Open PATH/<split>/CLASS/IMAGE under any scheme's URL. Raises ValueError for whatever is not this layout."""
    require_folder(place, url)
    folders = {of_split: split_folder(place, of_split) for of_split in SPLIT_WORDS}
    if not any(folders.values()) and (scheme := _scheme_of_scenes(place)):
        raise ValueError(
            f"{url}: {place} holds {' and '.join(SCENES[scheme])}, as scenes with masks or boxes do, not a folder per "
            f"class; write {scheme}:{place}"
        )
    if split == "train" and not any(folders.values()) and subfolders(place) and not is_split(place):
        folders["train"] = place
    if not folders[split]:
        raise ValueError(f"{url}: {missing(place, ('train',) if split == 'train' else ('val', 'test'))}")
    classes = subfolders(folders[split])
    if not classes:
        raise ValueError(
            f"{url}: no class folders in {folders[split]}; put the images into one folder per class, "
            "or append '?labels=FILE.csv' to the URL, a table of file names and labels"
        )
    notes = [f"ImageFolder layout, {len(classes)} classes in {folders[split]}"]
    if split == "val" and (name := os.path.basename(folders["val"])).lower() in ("test", "testing"):
        notes.append(f"there is no val folder: {name} is used as val")
    other = folders["train" if split == "val" else "val"]
    if other:
        pair = (classes, subfolders(other))
        require_same_classes(url, *(pair if split == "train" else reversed(pair)))
    else:
        notes.append("there is no train split to compare the classes with" if split == "val" else NO_VAL)
    return class_tree(url=url, split=split, root=folders[split], classes=classes, notes=notes)


def split_folder(place: str, split: Split) -> str:
    """Path of the folder that serves as `split`, empty when there is none."""
    by_lower = {name.lower(): name for name in reversed(subfolders(place))}  # of train and Train, train
    by_lower |= {name: name for name in by_lower.values()}
    folder = next((by_lower[word] for word in SPLIT_WORDS[split] if word in by_lower), None)
    return os.path.join(place, folder) if folder else ""


def _scheme_of_scenes(place: str) -> str:
    """The scheme of labelled scenes whose folders lie in `place`, "" for none: they would pass for classes."""
    present = set(subfolders(place))
    return next((scheme for scheme, folders in SCENES.items() if present.issuperset(folders)), "")


def missing(place: str, words: Sequence[str]) -> str:
    """What to say when `place` has none of the folders `wanted` of a split, the proper one first."""
    problem = f"no {' or '.join(words)} folder in {place}"
    if is_split(place):
        return f"{problem}; give the folder above it, {os.path.dirname(os.path.abspath(place))}"
    present = subfolders(place)
    holds = f"it holds {short_list(present)}" if present else "it holds no folders"
    other = f", {HOLD_OUT}" if words[0] == "val" else ""
    return f"{problem} ({holds}); arrange the images as {words[0]}/CLASS/IMAGE{other}"


def is_split(folder: str) -> bool:
    """Whether a folder is called as those of splits are."""
    return os.path.basename(os.path.normpath(folder)).lower() in {*SPLIT_WORDS["train"], *SPLIT_WORDS["val"]}


def class_tree(*, url: str, split: Split, root: str, classes: Sequence[str], notes: Sequence[str]) -> ImageSet:
    """The set of root/CLASS/**/IMAGE. Raises ValueError for a class without images."""
    images, counts = images_below(root, classes)
    empty = [name for name, count in zip(classes, counts, strict=True) if not count]
    if empty:
        kinds = ", ".join(EXTENSIONS)
        raise ValueError(f"{url}: no image ({kinds}) in class folder {short_list(empty)} of {root}; fill or remove it")
    return ImageSet(
        url=url,
        split=split,
        classes=tuple(classes),
        labels=np.repeat(np.arange(len(classes)), counts),
        images=images,
        notes=tuple(notes),
    )


def require_same_classes(url: str, train: Sequence[str], val: Sequence[str]) -> None:
    """Raise ValueError when the class folders of the two splits differ: labels would mean different things."""
    only_train, only_val = sorted(set(train) - set(val)), sorted(set(val) - set(train))
    parts = [
        f"{short_list(names)} only in {split}" for names, split in ((only_train, "train"), (only_val, "val")) if names
    ]
    if parts:
        raise ValueError(f"{url}: the class folders of train and val differ: {'; '.join(parts)}; make them the same")


def short_list(names: Sequence[str], most: int = 3) -> str:
    """A few names for a message: 'a', 'b', 'c' and 7 more."""
    listed = ", ".join(repr(name) for name in names[:most])
    return f"{listed} and {len(names) - most} more" if len(names) > most else listed
