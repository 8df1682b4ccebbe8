"""The two splits that a probe works on, opened and checked together; and features of both for many probes at once."""

from collections.abc import Iterable
from typing import Any

from checkpoints.export import ViTExport
from engine.tasks import Workspace
from imagesets.sets import ImageSet, Split, open_set
from imagesets.transforms import EvalTransform
from probes.features import extract
from probes.kinds import FeatureKind


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


def extract_for(tasks: Iterable[Any], export: ViTExport, space: Workspace) -> int:
    """Extract, in one pass over each split, all that `tasks` want of whole splits; returns the images forwarded.

    A task says so by `features() -> tuple[FeatureKind, ...]` and `transform(export, space) -> EvalTransform`; one that
    lacks either method is passed over. The tasks then find their features on disk.
    """
    wanted: dict[EvalTransform, set[FeatureKind]] = {}
    for task in tasks:
        if hasattr(task, "features") and hasattr(task, "transform") and task.features():
            wanted.setdefault(task.transform(export, space), set()).update(task.features())
    if not wanted:
        return 0
    splits = open_splits(space)
    return sum(
        extract(export, image_set, sorted(kinds, key=lambda kind: kind.name), space, transform).forwards
        for transform, kinds in wanted.items()
        for image_set in splits
    )
