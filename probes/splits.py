"""The two splits that a probe works on, opened and checked together."""

from engine.tasks import Workspace
from imagesets.sets import SPLITS, ImageSet, open_set, parse_url


def open_splits(space: Workspace, several_labels: bool = False) -> tuple[ImageSet, ImageSet]:
    """Training and validation images of `space.data`, limited as the workspace says.

    several_labels: whether the task evaluates on images that show several classes. Raises ValueError where they do and
    it does not, when their classes differ, and when there is only one class.
    """
    parse_url(space.data)  # the workspace may have labelled scenes open under this URL, which are for dense tasks
    train, val = (space.images(split, open_set) for split in SPLITS)
    if train.has_several_labels and not several_labels:
        raise ValueError(
            f"{space.data}: its images have several labels each, and this task knows one; of the probes, logistic "
            "regression on all training images takes them: logreg@dinov2"
        )
    if train.classes != val.classes:
        counts = f"{len(train.classes)} and {len(val.classes)}"
        raise ValueError(f"{space.data}: the classes of train and val differ ({counts}); give both the same folders")
    if len(train.classes) < 2:
        raise ValueError(f"{space.data}: there is only one class, {train.classes[0]!r}; accuracy needs two or more")
    return train, val
