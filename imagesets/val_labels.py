"""Labels of ImageNet's flat val folder: Kaggle's CSV or the development kit's ground truth. Only ever read."""

import csv
import json
import os
import subprocess
import sys
from collections.abc import Sequence

from engine.files import open_regular

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
        said = child.stderr.strip().split("\n")[-1]
        raise ValueError(said if child.returncode > 0 and said else f"{named} makes scipy's reader crash")
    return child.stdout
