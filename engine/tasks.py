"""What every evaluation task takes and gives back: Workspace in, Outcome of Metrics out, and named recipes (Protocol).

A task is a frozen, keyword-only dataclass of its settings with `run(export, space) -> Outcome`. The file it lives in
also defines `PROTOCOLS`, the recipes of the literature as values of that dataclass, and `SUITES`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar
from typing import Protocol as Interface

import numpy as np

from engine.distributed import World

Split = Literal["train", "val"]
SelectOn = Literal["holdout", "val"]


class Images(Interface):
    """One split of an image set: imagesets.sets.ImageSet, or downstream.data.scenes.SceneSet for dense tasks."""

    @property
    def fingerprint(self) -> str: ...
    def __len__(self) -> int: ...
    def limited(self, count: int) -> Self: ...


Opened = TypeVar("Opened", bound=Images)


class OpenedSets:
    """The image sets that this process has open, each split once: they are shared by all tasks of a run.

    Nothing of it travels between processes: annotations may be gigabytes.
    """

    def __init__(self) -> None:
        self._sets: dict[tuple[str, str, int | None], Any] = {}

    def get(self, url: str, split: Split, opener: Callable[[str, Split], Opened], limit: int | None = None) -> Opened:
        """One split of a set, opened by `opener(url, split)` the first time; at most `limit` images of it."""
        if (url, split, limit) not in self._sets:
            found = opener(url, split) if limit is None else self.get(url, split, opener).limited(limit)
            self._sets[url, split, limit] = found
        return self._sets[url, split, limit]


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Where, on what and how a task runs. Nothing in here may change what a correct result is, except what
    `Outcome.facts` records: image set, decoder, precision, limit and seed.

    One process needs no more than a cache and a URL: `task.run(export, Workspace(cache=folder, data="digits:"))`.
    Under torchrun, and on one GPU of several, connect first and pass the world on:
    `with start_world(device) as world: task.run(export, Workspace(..., device=device, world=world))`.
    """

    cache: Path  # features and other intermediates, shared by all tasks and checkpoints; safe to delete
    data: str  # URL of the image set that the task evaluates on, e.g. "imagenet:/data/imagenet"
    device: str = "cpu"
    precision: Literal["float32", "bfloat16"] = "float32"
    decode: Literal["exact", "fast"] = "exact"
    seed: int = 0
    limit: int | None = None  # at most this many images of each split, evenly spread; for smoke runs
    skip_bad: bool = False  # count and record unreadable images instead of stopping
    batch_size: int | None = None  # None: chosen for the device
    workers: int | None = None  # None: chosen for the machine
    # Transform name -> what other tasks of this run will read off the same images; extracted in the same pass.
    wanted: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    world: World = field(default_factory=World)  # the connected processes, which run every task together
    opened: OpenedSets = field(default_factory=OpenedSets, repr=False, compare=False)

    def images(self, split: Split, opener: Callable[[str, Split], Opened]) -> Opened:
        """One split of `data`, at most `limit` images of it: opened by the first task that asks, in every process."""
        return self.opened.get(self.data, split, opener, self.limit)


@dataclass(frozen=True, kw_only=True, eq=False)
class Metric:
    """One number that a task found, and what it is. ValueError for a description that contradicts itself.

    per_image: (N,) values of the validation images in their order, of which `value` is the mean; NaN for a skipped
    image. Of a metric in "%" they are shares from 0 to 1 (correctness), otherwise they are in its unit.
    resampled: (R,) values in the metric's unit on the resamples of engine/resampling.py, where it is no mean over
    images. A metric with neither array has no interval and no paired test.
    """

    value: float
    unit: str = "%"  # "s", "MB"; "" where there is none
    higher_is_better: bool | None = True  # None: neither
    per_image: np.ndarray | None = None
    resampled: np.ndarray | None = None
    chosen_on_val: bool = False  # the best of several on the validation images that it is reported on
    deviation_of: str | None = None  # metric whose standard deviation over the task's repetitions this is

    def __post_init__(self) -> None:
        if self.per_image is not None and self.resampled is not None:
            raise ValueError("a metric has values per image or resampled values, not both")
        if self.deviation_of is not None and self.higher_is_better is not None:
            raise ValueError(f"the deviation of {self.deviation_of} is neither better: set higher_is_better=None")

    def __eq__(self, other: object) -> bool:
        """Equal in every field, arrays in every element."""
        if not isinstance(other, Metric):
            return NotImplemented
        pairs = [(getattr(self, entry.name), getattr(other, entry.name)) for entry in fields(self)]
        return all(
            np.array_equal(mine, its, equal_nan=True) if isinstance(mine, np.ndarray) else mine is its or mine == its
            for mine, its in pairs
        )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a task found.

    metrics: name -> Metric, the main one first.
    arrays: name -> any other array from which metrics can be computed again, such as areas and detections.
    facts: JSON values that say what the numbers rest on (image-set fingerprints, transform, images seen, notes); the
    same however often the task was killed and begun again. facts["train"] and facts["val"], where given, hold
    "skipped": path -> reason of every unreadable image that was left out.
    cost: what this very run spent, which depends on what was on disk: "forwards" (images through the backbone) and
    "extraction_seconds" (what these took).
    random: whether another seed could give other numbers.
    """

    metrics: Mapping[str, Metric]
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    cost: Mapping[str, float] = field(default_factory=dict)
    random: bool = True

    @property
    def numbers(self) -> dict[str, float]:
        """Metric -> its value alone."""
        return {name: metric.value for name, metric in self.metrics.items()}


class Task:
    """Base of every task: a frozen, keyword-only dataclass of settings that can evaluate one export.

    A setting is one line, and what it means is the comment on that line, or above it: `bench list` shows them.
    """

    COST: ClassVar[float] = 1.0  # rough price in passes over the images: cheap tasks run first
    LAYOUT: ClassVar[str] = ""  # of the labelled scenes that a dense task evaluates on; empty: on an image set

    def run(self, export: Any, space: Workspace) -> Outcome:
        """Evaluate. ValueError for what a user can cause."""
        raise NotImplementedError

    def features(self, export: Any, space: Workspace) -> Mapping[str, tuple[Any, ...]]:
        """Transform name -> kinds of frozen features that `run` will ask for, so that one pass serves several tasks."""
        return {}

    def sizes(self, spec: Any, images: Mapping[str, int]) -> Mapping[str, Any]:
        """What `run` will do in numbers, for `--dry-run`: name -> a number or text.

        spec: the export's ViTSpec. images: how many there are of each split; shares of them are approximate, as drawing
        goes by classes. ValueError where the settings do not fit these.
        """
        return {}

    def selecting(self, select: SelectOn) -> "Task":
        """The same task for `--select`: what chooses among its heads or epochs are held-out training images, or the
        validation images. Tasks that choose nothing stay as they are."""
        return self


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """A named recipe: the settings a source used. Changing a number in one means a new `version`."""

    task: Task
    version: int
    source: str
