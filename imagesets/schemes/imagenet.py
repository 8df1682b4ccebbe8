"""imagenet:ROOT, ImageNet-1k (or a subset of its classes) in the layouts that people have, mapped in memory.

- torchvision ImageFolder: train/<wnid>/*.JPEG and val/<wnid>/*.JPEG;
- Kaggle: ILSVRC/Data/CLS-LOC/{train,val} with all of val in one folder, labelled by LOC_val_solution.csv;
- a flat val/ labelled by the development kit, ILSVRC2012_devkit_t12/data/{meta.mat, *_ground_truth.txt}.
ROOT may be any folder from the one above ILSVRC/ down to the one that holds train/ and val/. Class k is the k-th
WordNet id (wnid) in sorted order, as in torchvision.

Labels of a flat val folder are Kaggle's CSV or the development kit's ground truth, which are only ever read.
"""

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence

import numpy as np

from engine.files import open_regular
from imagesets.listing import (
    class_tree,
    images_below,
    missing_split,
    require_folder,
    require_same_classes,
    short_list,
    subfolders,
)
from imagesets.sets import ImageSet, Split

SOLUTION = "LOC_val_solution.csv"
DEVKIT = "ILSVRC2012_devkit_t12/data"
GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
CHILD_SECONDS = 60
# Memory that it may map; the official file takes 0.3 GB, nearly all of it libraries.
LIMITS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
import json
from scipy.io import loadmat
"""
READ_ANY = "for path in sys.argv[1:]: loadmat(path)"
READ_SYNSETS = """
synsets = loadmat(sys.argv[1], squeeze_me=True)["synsets"]
pairs = zip(synsets["ILSVRC2012_ID"], synsets["WNID"], strict=True)
print(json.dumps([[int(number), str(wnid)] for number, wnid in pairs]))
"""
# From ILSVRC/Data/CLS-LOC/val, Kaggle's CSV lies beside ILSVRC/: four folders up.
LEVELS_UP = 4


def find_labels(url: str, folder: str) -> tuple[dict[str, str], str]:
    """Image stem -> wnid for the images of the val folder `folder`, and the file that says so.

    Looks in `folder` and up to four folders above it. Raises ValueError when no file is found or one is damaged.
    """
    place = os.path.abspath(folder)
    for _ in range(LEVELS_UP + 1):
        solution = os.path.join(place, SOLUTION)
        if os.path.isfile(solution):
            return read_solution(url, solution), solution
        truth = os.path.join(place, DEVKIT, GROUND_TRUTH)
        if os.path.isfile(truth):
            return read_devkit(url, truth), truth
        place = os.path.dirname(place)
    raise ValueError(
        f"{url}: the images in {folder} lie side by side without labels; put {SOLUTION} (from Kaggle) or "
        f"ILSVRC2012_devkit_t12/ (unpacked from its tar.gz) beside it"
    )


def read_solution(url: str, path: str) -> dict[str, str]:
    """Kaggle's CSV: `ImageId,PredictionString`, the latter `wnid x y x y` once per object, all of one wnid."""
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        rows = csv.reader(file)
        if next(rows, None) != ["ImageId", "PredictionString"]:
            raise ValueError(f"{url}: {path} does not start with ImageId,PredictionString; fetch it again from Kaggle")
        try:
            return {image: boxes.split()[0] for image, boxes in rows}
        except (ValueError, IndexError, csv.Error) as error:
            raise ValueError(f"{url}: {path} is damaged at line {rows.line_num}; fetch it again from Kaggle") from error


def read_devkit(url: str, truth: str) -> dict[str, str]:
    """The development kit: line n of the ground truth is the ILSVRC2012_ID of ILSVRC2012_val_<n>; meta.mat maps the
    ids to wnids."""
    meta = os.path.join(os.path.dirname(truth), "meta.mat")
    try:
        wnid_of = {number: wnid for number, wnid in json.loads(_in_child(READ_SYNSETS, meta))}
        with open(truth, encoding="ascii") as file:
            return {f"ILSVRC2012_val_{line:08d}": wnid_of[int(text)] for line, text in enumerate(file, 1)}
    except FileNotFoundError as error:
        raise ValueError(f"{url}: no {meta} beside {truth}; unpack ILSVRC2012_devkit_t12.tar.gz again") from error
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        why = " ".join(f"{type(error).__name__} {error}".split())
        raise ValueError(f"{url}: {meta} and {truth} cannot be read ({why}); unpack the kit again") from error


def check_mats(paths: Sequence[str]) -> None:
    """ValueError for .mat files that scipy cannot read."""
    _in_child(READ_ANY, *paths)


def _in_child(code: str, *paths: str) -> str:
    """What code prints about .mat files in a process of its own, since damaged ones make scipy's reader crash.
    ValueError where it fails, OSError where there is no file."""
    for path in paths:
        with open_regular(path):
            pass
    named, one_thread = ", ".join(paths), {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    try:
        child = subprocess.run(
            [sys.executable, "-I", "-c", LIMITS + code, *paths],
            capture_output=True,
            text=True,
            timeout=CHILD_SECONDS,
            env=os.environ | one_thread,
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"{named} takes more than {CHILD_SECONDS} s to read") from error
    if child.returncode:
        last_line = child.stderr.strip().split("\n")[-1]
        raise ValueError(last_line if child.returncode > 0 and last_line else f"{named} makes scipy's reader crash")
    return child.stdout


PLACE = "ROOT"
SPLITS = ("train", "val")
WNID = re.compile(r"n\d{8}")
INSIDE = ("", "ILSVRC/Data/CLS-LOC", "Data/CLS-LOC", "CLS-LOC")


def open_split(place: str, split: Split) -> ImageSet:
    """Open one split below `place`. Raises ValueError for whatever is none of the layouts above."""
    url = f"imagenet:{place}"
    require_folder(place, url)
    base = next((b for b in (os.path.join(place, i) for i in INSIDE) if os.path.isdir(os.path.join(b, split))), None)
    if base is None:
        raise ValueError(f"{url}: {missing_split(place, (split,))}")
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
    """The class folders in `folder`, sorted. Raises ValueError when one is not named by a WordNet id."""
    names = subfolders(folder)
    strange = [name for name in names if not WNID.fullmatch(name)]
    if strange:
        advice = "for other classes than ImageNet's use folder:PATH, else remove them"
        raise ValueError(f"{url}: {short_list(strange)} in {folder} are not WordNet ids such as n01440764; {advice}")
    return names


def open_flat(url: str, folder: str, train: tuple[str, ...]) -> ImageSet:
    """Open a val folder whose images lie side by side, labelled by a file near it."""
    images, _ = images_below(folder, ["."])
    files = list(images.names)
    if not files:
        raise ValueError(f"{url}: {folder} holds neither class folders nor images; unpack ILSVRC2012_img_val.tar there")
    wnid_of, source = find_labels(url, folder)
    unknown = [name for name in files if stem(name) not in wnid_of]
    if unknown:
        raise ValueError(f"{url}: {source} has no label for {short_list(unknown)} in {folder}; remove these files")
    present = tuple(sorted({wnid_of[stem(name)] for name in files}))
    classes = train or present
    require_same_classes(url, classes, present)
    index = {wnid: number for number, wnid in enumerate(classes)}
    notes = [f"flat val folder {folder}, labelled by {source}", *subset_note(classes)]
    if len(files) < len(wnid_of):
        notes.append(f"{len(wnid_of) - len(files)} of the {len(wnid_of)} images that {source} labels are missing")
    return ImageSet(
        url=url,
        split="val",
        classes=classes,
        labels=np.array([index[wnid_of[stem(name)]] for name in files], np.int64),
        images=images,
        notes=tuple(notes),
    )


def stem(name: str) -> str:
    """ILSVRC2012_val_00000001.JPEG -> ILSVRC2012_val_00000001; the key that label files use."""
    return os.path.splitext(os.path.basename(name))[0]


def subset_note(classes: tuple[str, ...]) -> list[str]:
    """A note when this is not all of ImageNet-1k."""
    return [] if len(classes) == 1000 else [f"{len(classes)} classes, ImageNet-1k has 1000"]
