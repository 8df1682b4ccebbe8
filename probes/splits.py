"""The images of a probe: its two splits, opened and checked together, and training images held out for selection.

Heads and epochs are selected on held-out training images instead of the validation images.
"""

from collections.abc import Sequence

import numpy as np

from engine.errors import option
from engine.tasks import Workspace
from imagesets.selection import held_out_sample
from imagesets.sets import SPLITS, ImageSet, open_set, parse_url


def open_splits(space: Workspace, several_labels: bool = False) -> tuple[ImageSet, ImageSet]:
    """Training and validation images of `space.data`, at most `space.limit` of each.

    several_labels: whether the task supports images with several labels. Raises ValueError if it does not and images
    have them, if the classes of the splits differ, and if there is only one class.
    """
    parse_url(space.data)  # refuses URLs of scene sets, which a dense task may have opened in this workspace
    train, val = (space.images(split, open_set) for split in SPLITS)
    if train.has_several_labels and not several_labels:
        raise ValueError(
            f"{space.data}: its images have several labels each, but this task supports one; use logistic regression "
            "on all training images: logreg@dinov2"
        )
    if train.classes != val.classes:
        counts = f"{len(train.classes)} and {len(val.classes)}"
        raise ValueError(f"{space.data}: the classes of train and val differ ({counts}); give both the same folders")
    if len(train.classes) < 2:
        raise ValueError(f"{space.data}: there is only one class, {train.classes[0]!r}; accuracy needs two or more")
    return train, val


def held_out(train: ImageSet, share: float, seed: int) -> np.ndarray:
    """Ascending indices (n,) of held-out images: a share of every class, at least one of its images and never all.

    A class with one image has none held out. Raises ValueError if all classes have one image.
    """
    indices = held_out_sample(train.labels, len(train.classes), share, seed)
    if not len(indices):
        raise ValueError(
            f"{train.url}: every class has one training image, so none can be held out for selection; add images, "
            f"raise {option('limit')}, or {option('select', 'val')}"
        )
    return indices


def not_held_out_warning(labels: np.ndarray, classes: Sequence[str]) -> str:
    """A warning about classes with one training image, which is not held out; "" if there are none. labels: (N,)."""
    single = np.flatnonzero(np.bincount(labels, minlength=len(classes)) == 1)
    if not len(single):
        return ""
    first = f"{classes[single[0]]!r}{' first' if len(single) > 1 else ''}"
    return f"{len(single)} of {len(classes)} classes, {first}, have one training image: none of theirs is held out"


def check_labels(trained: np.ndarray, evaluated: np.ndarray, train: ImageSet) -> None:
    """Raises ValueError for classes that are evaluated (labels (V,)) and not trained on (labels (N,))."""
    missing = np.setdiff1d(evaluated, trained)
    if len(missing):
        names = ", ".join(train.classes[label] for label in missing[:3])
        raise ValueError(
            f"{train.url}: {len(missing)} classes of the validation images have no training image ({names}"
            f"{', ...' if len(missing) > 3 else ''}); add training images, or raise {option('limit')}"
        )
