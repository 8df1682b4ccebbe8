"""The two splits that a probe works on, opened and checked together."""

from engine.tasks import Workspace
from imagesets.sets import ImageSet, Split, open_set


def open_splits(space: Workspace) -> tuple[ImageSet, ImageSet]:
    """Training and validation images of `space.data`, limited as the workspace says.

    Raises ValueError when their classes differ, and when there is only one class.
    """
    train, val = _open(space, "train"), _open(space, "val")
    if train.classes != val.classes:
        counts = f"{len(train.classes)} and {len(val.classes)}"
        raise ValueError(f"{space.data}: the classes of train and val differ ({counts}); give both the same folders")
    if len(train.classes) < 2:
        raise ValueError(f"{space.data}: there is only one class, {train.classes[0]!r}; accuracy needs two or more")
    return train, val


def _open(space: Workspace, split: Split) -> ImageSet:
    image_set = open_set(space.data, split)
    return image_set if space.limit is None else image_set.limited(space.limit)
