"""Labels of ImageNet's flat val folder: Kaggle's CSV or the development kit's ground truth. Only ever read."""

import csv
import os

SOLUTION = "LOC_val_solution.csv"
DEVKIT = "ILSVRC2012_devkit_t12/data"
GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
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
    from scipy.io import loadmat

    meta = os.path.join(os.path.dirname(truth), "meta.mat")
    try:
        synsets = loadmat(meta, squeeze_me=True)["synsets"]
        wnid_of = {
            int(number): str(wnid) for number, wnid in zip(synsets["ILSVRC2012_ID"], synsets["WNID"], strict=True)
        }
        with open(truth, encoding="ascii") as file:
            return {f"ILSVRC2012_val_{line:08d}": wnid_of[int(text)] for line, text in enumerate(file, 1)}
    except FileNotFoundError as error:
        raise ValueError(f"{url}: no {meta} beside {truth}; unpack ILSVRC2012_devkit_t12.tar.gz again") from error
    except Exception as error:  # scipy's reader raises whatever a damaged field leads to
        why = " ".join(f"{type(error).__name__} {error}".split())
        raise ValueError(f"{url}: {meta} and {truth} cannot be read ({why}); unpack the kit again") from error
