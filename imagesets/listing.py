"""Open image files in class folders, PATH/train/CLASS/IMAGE and PATH/val/CLASS/IMAGE, with helpful errors for others.

Also the words for splits, and the checks of folders and classes, that all schemes share.
"""

import os
import re
from collections.abc import Mapping, Sequence

import numpy as np

from imagesets.sets import NO_VAL, FileImages, ImageSet, MissingSplit, Split
from imagesets.walk import EXTENSIONS, find_images, is_hidden

# Words in the names of folders, files and splits that mean a split, the preferred one first; case is ignored.
SPLIT_WORDS: Mapping[Split, tuple[str, ...]] = {
    "train": ("train", "training"),
    "val": ("val", "validation", "valid", "dev", "test", "testing"),
}
# Scheme of a scene set -> folders by which its layout is recognised.
SCENES = {
    "voc": ("JPEGImages", "SegmentationClass"),
    "vocboxes": ("JPEGImages", "Annotations"),
    "masks": ("images", "masks"),
    "yolo": ("images", "labels"),
}
HOLD_OUT = "or append '?val=0.2' to the URL, which holds out a fifth of each class of the training images"


def subfolders(folder: str) -> tuple[str, ...]:
    """Names of the folders in `folder`, sorted, without hidden ones; empty if `folder` does not exist."""
    if not os.path.isdir(folder):
        return ()
    with os.scandir(folder) as entries:
        return tuple(sorted(entry.name for entry in entries if entry.is_dir() and not is_hidden(entry.name)))


def optional_path(folder: str, name: str) -> str:
    """The path of what may be in `folder`, such as a part of a set; "" if it is not there.

    Raises ValueError for a broken link, and for the name in another spelling (`Fog`, `gaussian-noise`), which would be
    ignored.
    """
    path = os.path.join(folder, name)
    if os.path.exists(path):
        return path
    for entry in os.listdir(folder) if os.path.isdir(folder) else ():
        if entry.lower().replace("_", "-") == name.replace("_", "-"):
            problem = "is a broken link" if entry == name else f"is not spelled {name}"
            raise ValueError(f"{folder}/{entry} {problem}, so it would be ignored; mend, rename or remove it")
    return ""


def refuse_broken_links(folder: str, url: str) -> None:
    """Raise ValueError for a broken link in `folder` that may be one to a folder of images, which would be left out."""
    with os.scandir(folder) as entries:
        links = [entry.name for entry in entries if entry.is_symlink() and not entry.name.lower().endswith(EXTENSIONS)]
    for name in sorted(links):
        if not is_hidden(name) and not os.path.exists(path := os.path.join(folder, name)):
            raise ValueError(f"{url}: {path} is a broken link, whose images would be left out; mend or remove it")


def require_folder(folder: str, url: str) -> None:
    """Raise ValueError unless `folder` is a folder that can be listed; the message says how far the path exists."""
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
    """All image files below each root/FOLDER of K `folders`, and their counts (K,) int64.

    The order is torchvision's. FOLDER "." is the root itself. Large listings are cached (imagesets/walk.py). Raises
    OSError for a folder that cannot be listed.
    """
    listing, listing_file = find_images(root, folders)
    images = FileImages(
        root=root, names=listing.names, sizes=listing.sizes, changed=listing.changed, listing_file=listing_file
    )
    return images, listing.counts


def open_tree(url: str, place: str, split: Split) -> ImageSet:
    """Open the split of `place`/SPLIT/CLASS/IMAGE; `url` is the URL of the set. Raises ValueError for other layouts."""
    require_folder(place, url)
    folders = {name: split_folder(place, name) for name in SPLIT_WORDS}
    if not any(folders.values()) and (scheme := _scene_scheme(place)):
        raise ValueError(
            f"{url}: {place} holds {' and '.join(SCENES[scheme])}, as scenes with masks or boxes do, not a folder per "
            f"class; write {scheme}:{place}"
        )
    if split == "train" and not any(folders.values()) and subfolders(place) and not is_split(place):
        folders["train"] = place
    if not folders[split]:
        refuse_broken_links(place, url)
        raise MissingSplit(f"{url}: {missing_split(place, ('train',) if split == 'train' else ('val', 'test'))}")
    classes = subfolders(folders[split])
    if not classes:
        raise ValueError(
            f"{url}: no class folders in {folders[split]}; put the images into one folder per class, "
            "or append '?labels=FILE.csv' to the URL, a table of file names and labels"
        )
    notes = [f"ImageFolder layout, {len(classes)} classes in {folders[split]}"]
    if split == "val" and (name := os.path.basename(folders["val"])).lower() in ("test", "testing"):
        notes.append(f"there is no val folder: {name} is used as val")
    notes += [f"folder {name} is not read" for name in _folders_of(place, split)[1:]]
    if folders["train"] and folders["val"]:
        require_same_classes(url, subfolders(folders["train"]), subfolders(folders["val"]))
    else:
        notes.append("there is no train split to compare the classes with" if split == "val" else NO_VAL)
    return class_tree(url=url, split=split, root=folders[split], classes=classes, notes=notes)


def split_folder(place: str, split: Split) -> str:
    """Path of the folder in `place` that serves as `split`, or "" if there is none. ValueError for Train and train."""
    folder = next(iter(_folders_of(place, split)), None)
    return os.path.join(place, folder) if folder else ""


def _folders_of(place: str, split: Split) -> list[str]:
    """Names of the folders in `place` that could serve as `split`, the preferred first."""
    present, names = subfolders(place), list[str]()
    for word in SPLIT_WORDS[split]:
        same = [name for name in present if name.lower() == word]
        if len(same) > 1:
            raise ValueError(f"{place} holds both {same[0]} and {same[1]}; rename or remove one")
        names += same
    return names


def check_minus_one(where: str, classes: Sequence[str]) -> None:
    """Raise ValueError if the class -1 stands beside 0, as it does where images have no label."""
    if {"-1", "0"} <= {*classes}:
        raise ValueError(
            f"{where}: labels of -1 beside 0 usually mean none; take these images out, or write the classes' names"
        )


def doubtful_classes(classes: Sequence[str]) -> list[str]:
    """Notes on classes whose names seem to be one class, or none: `cat` and `Cat`, `7` and `007`, `nan`."""
    notes = []
    by_name: dict[str, list[str]] = {}
    for name in classes:
        by_name.setdefault(re.sub(r"(?<=.)[\s_-]+", " ", name.casefold()).strip().lstrip("0"), []).append(name)
    if alike := [names for names in by_name.values() if len(names) > 1]:
        notes.append(f"classes with names alike, {short_list(alike[0])}, count as different: if not, write one name")
    if missing := [name for name in classes if name.casefold() in ("nan", "na", "n/a", "none", "null", "?")]:
        notes.append(f"{missing[0]!r} counts as a class: if it means no label, take these images out")
    return notes


def _scene_scheme(place: str) -> str:
    """The scheme of the scene set whose folders are in `place`, which would pass for classes; "" if it is none."""
    folders = set(subfolders(place))
    return next((scheme for scheme, needed in SCENES.items() if folders.issuperset(needed)), "")


def missing_split(place: str, words: Sequence[str]) -> str:
    """Error message, without the URL, if `place` has none of the folders `words` of a split (the preferred first)."""
    problem = f"no {' or '.join(words)} folder in {place}"
    if is_split(place):
        return f"{problem}; give the folder above it, {os.path.dirname(os.path.abspath(place))}"
    present = subfolders(place)
    holds = f"it holds {short_list(present)}" if present else "it holds no folders"
    other = f", {HOLD_OUT}" if words[0] == "val" else ""
    return f"{problem} ({holds}); arrange the images as {words[0]}/CLASS/IMAGE{other}"


def is_split(folder: str) -> bool:
    """Whether the name of a folder means a split."""
    return os.path.basename(os.path.normpath(folder)).lower() in {*SPLIT_WORDS["train"], *SPLIT_WORDS["val"]}


def class_tree(*, url: str, split: Split, root: str, classes: Sequence[str], notes: Sequence[str]) -> ImageSet:
    """The set of images root/CLASS/**/IMAGE of these classes. Raises ValueError for a class without images."""
    refuse_broken_links(root, url)
    images, counts = images_below(root, classes)
    notes = [*notes, *doubtful_classes(classes)]
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
    """Raise ValueError if the classes of the two splits differ, since equal labels would mean different classes."""
    only_train, only_val = sorted(set(train) - set(val)), sorted(set(val) - set(train))
    problems = []
    if only_train:
        problems.append(f"{short_list(only_train)} only in train")
    if only_val:
        problems.append(f"{short_list(only_val)} only in val")
    if problems:
        raise ValueError(f"{url}: the class folders of train and val differ: {'; '.join(problems)}; make them the same")


def short_list(names: Sequence[str], most: int = 3) -> str:
    """The first names, quoted, for a message: 'a', 'b', 'c' and 7 more."""
    text = ", ".join(repr(name) for name in names[:most])
    return f"{text} and {len(names) - most} more" if len(names) > most else text
