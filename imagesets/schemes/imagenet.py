"""imagenet:ROOT, ImageNet-1k (or a subset of its classes), in any of its usual layouts.

- torchvision's ImageFolder: train/<wnid>/*.JPEG and val/<wnid>/*.JPEG;
- Kaggle: ILSVRC/Data/CLS-LOC/{train,val} with a flat val folder, labelled by LOC_val_solution.csv;
- a flat val folder, labelled by the development kit, ILSVRC2012_devkit_t12/data/{meta.mat, *_ground_truth.txt}.
ROOT may be any folder from the one above ILSVRC/ down to the one that holds train/ and val/. Class k is the k-th
WordNet id (wnid) in sorted order, as in torchvision. Files are only read, never moved.
"""

import csv
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence

import numpy as np

from engine.files import open_regular, read_text
from imagesets.listing import (
    class_tree,
    images_below,
    missing_split,
    require_folder,
    require_same_classes,
    short_list,
    subfolders,
)
from imagesets.sets import ImageSet, MissingSplit, Split

SOLUTION = "LOC_val_solution.csv"
DEVKIT = "ILSVRC2012_devkit_t12/data"
GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
CHILD_SECONDS = 60
# Limits the child process to 4 GiB of address space; the official file takes 0.3 GB, nearly all of it libraries.
LIMIT_MEMORY = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
import json
from scipy.io import loadmat
"""
LOAD_ALL = "for path in sys.argv[1:]: loadmat(path)"
READ_SYNSETS = """
synsets = loadmat(sys.argv[1], squeeze_me=True)["synsets"]
pairs = zip(synsets["ILSVRC2012_ID"], synsets["WNID"], strict=True)
print(json.dumps([[int(number), str(wnid)] for number, wnid in pairs]))
"""
MAX_LEVELS_UP = 4  # Kaggle's CSV is beside ILSVRC/, four folders above ILSVRC/Data/CLS-LOC/val

PLACE = "ROOT"
SPLITS = ("train", "val")
WNID = re.compile(r"n\d{8}")
BASES = ("", "ILSVRC/Data/CLS-LOC", "Data/CLS-LOC", "CLS-LOC")  # folders below ROOT that may hold train/ and val/


def open_split(place: str, split: Split) -> ImageSet:
    """Open one split below the folder `place`. Raises ValueError for other layouts than those above."""
    url = f"imagenet:{place}"
    require_folder(place, url)
    bases = [os.path.join(place, base) for base in BASES]
    base = next((base for base in bases if os.path.isdir(os.path.join(base, split))), None)
    if base is None:
        raise MissingSplit(f"{url}: {missing_split(place, (split,))}")
    root = os.path.join(base, split)
    train, val = wnids(url, os.path.join(base, "train")), wnids(url, os.path.join(base, "val"))
    if split == "val" and not val:
        return open_flat(url, root, train)
    classes = train if split == "train" else val
    if not classes:
        raise ValueError(f"{url}: no class folders in {root}; unpack the 1000 archives inside ILSVRC2012_img_train.tar")
    if train and val:
        require_same_classes(url, train, val)
    notes = [f"ImageFolder layout, {len(classes)} classes in {root}", *subset_note(classes)]
    return class_tree(url=url, split=split, root=root, classes=classes, notes=notes)


def wnids(url: str, folder: str) -> tuple[str, ...]:
    """The class folders in `folder`, sorted. Raises ValueError if one is not named by a WordNet id."""
    names = subfolders(folder)
    if other_names := [name for name in names if not WNID.fullmatch(name)]:
        raise ValueError(
            f"{url}: {short_list(other_names)} in {folder} are not WordNet ids such as n01440764; for other classes "
            "than ImageNet's use folder:PATH, else remove them"
        )
    return names


def open_flat(url: str, folder: str, train_classes: tuple[str, ...]) -> ImageSet:
    """Open a val folder without class folders, labelled by a file in or above it.

    train_classes: the wnids of split train, () if it is not there. Raises ValueError for images without a label, and
    for classes other than those of train.
    """
    images, _ = images_below(folder, ["."])
    names = list(images.names)
    if not names:
        raise ValueError(f"{url}: {folder} holds neither class folders nor images; unpack ILSVRC2012_img_val.tar there")
    wnid_of, source = find_labels(url, folder)
    if unknown := [name for name in names if stem(name) not in wnid_of]:
        raise ValueError(f"{url}: {source} has no label for {short_list(unknown)} in {folder}; remove these files")
    val_classes = tuple(sorted({wnid_of[stem(name)] for name in names}))
    classes = train_classes or val_classes
    require_same_classes(url, classes, val_classes)
    index_of = {wnid: index for index, wnid in enumerate(classes)}
    notes = [f"flat val folder {folder}, labelled by {source}", *subset_note(classes)]
    if len(names) < len(wnid_of):
        notes.append(f"{len(wnid_of) - len(names)} of the {len(wnid_of)} images that {source} labels are missing")
    return ImageSet(
        url=url,
        split="val",
        classes=classes,
        labels=np.array([index_of[wnid_of[stem(name)]] for name in names], np.int64),
        images=images,
        notes=tuple(notes),
    )


def stem(name: str) -> str:
    """ILSVRC2012_val_00000001.JPEG -> ILSVRC2012_val_00000001, the key in label files."""
    return os.path.splitext(os.path.basename(name))[0]


def subset_note(classes: tuple[str, ...]) -> list[str]:
    """A note for users if these are not the 1000 classes of ImageNet-1k."""
    return [] if len(classes) == 1000 else [f"{len(classes)} classes, ImageNet-1k has 1000"]


def find_labels(url: str, folder: str) -> tuple[dict[str, str], str]:
    """Stem of a file name -> wnid for the images of a flat val folder, and the path of the file with the labels.

    Looks in `folder` and up to four folders above it. Raises ValueError if there is no such file or it is damaged.
    """
    parent = os.path.abspath(folder)
    for _ in range(MAX_LEVELS_UP + 1):
        solution = os.path.join(parent, SOLUTION)
        if os.path.isfile(solution):
            return read_solution(url, solution), solution
        truth = os.path.join(parent, DEVKIT, GROUND_TRUTH)
        if os.path.isfile(truth):
            return read_devkit(url, truth), truth
        parent = os.path.dirname(parent)
    raise ValueError(
        f"{url}: the images in {folder} lie side by side without labels; put {SOLUTION} (from Kaggle) or "
        f"ILSVRC2012_devkit_t12/ (unpacked from its tar.gz) beside it"
    )


def read_solution(url: str, path: str) -> dict[str, str]:
    """Stem -> wnid from Kaggle's CSV. Raises ValueError if it is damaged.

    Its columns are `ImageId,PredictionString`, the latter `wnid x y x y` for each object, all with the same wnid.
    """
    rows = csv.reader(io.StringIO(read_text(path), newline=""))
    if next(rows, None) != ["ImageId", "PredictionString"]:
        raise ValueError(f"{url}: {path} does not start with ImageId,PredictionString; fetch it again from Kaggle")
    try:
        return {image: boxes.split()[0] for image, boxes in rows}
    except (ValueError, IndexError, csv.Error) as error:
        raise ValueError(f"{url}: {path} is damaged at line {rows.line_num}; fetch it again from Kaggle") from error


def read_devkit(url: str, truth: str) -> dict[str, str]:
    """Stem -> wnid from the development kit. Raises ValueError if it is incomplete or damaged.

    Line n of the ground truth has the ILSVRC2012_ID of ILSVRC2012_val_<n>; meta.mat maps these ids to wnids.
    """
    meta = os.path.join(os.path.dirname(truth), "meta.mat")
    try:
        wnid_of = {number: wnid for number, wnid in json.loads(_run_on_mats(READ_SYNSETS, meta))}
        lines = enumerate(read_text(truth).splitlines(), 1)
        return {f"ILSVRC2012_val_{line:08d}": wnid_of[int(text)] for line, text in lines}
    except FileNotFoundError as error:
        raise ValueError(f"{url}: no {meta} beside {truth}; unpack ILSVRC2012_devkit_t12.tar.gz again") from error
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        reason = " ".join(f"{type(error).__name__} {error}".split())
        raise ValueError(f"{url}: {meta} and {truth} cannot be read ({reason}); unpack the kit again") from error


def check_mats(paths: Sequence[str]) -> None:
    """Raise ValueError for .mat files that scipy cannot read, OSError for missing ones."""
    _run_on_mats(LOAD_ALL, *paths)


def _run_on_mats(code: str, *paths: str) -> str:
    """Output of Python code about .mat files, run in a process of its own, because damaged files crash scipy's reader.

    Raises ValueError if it fails, OSError for a missing file.
    """
    for path in paths:
        with open_regular(path):
            pass
    path_list, one_thread = ", ".join(paths), {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    try:
        child = subprocess.run(
            [sys.executable, "-I", "-c", LIMIT_MEMORY + code, *paths],
            capture_output=True,
            text=True,
            timeout=CHILD_SECONDS,
            env=os.environ | one_thread,
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"{path_list} takes more than {CHILD_SECONDS} s to read") from error
    if child.returncode:
        last_line = child.stderr.strip().split("\n")[-1]
        raise ValueError(last_line if child.returncode > 0 and last_line else f"{path_list} makes scipy's reader crash")
    return child.stdout
