"""The interface of evaluation tasks: from a Workspace to an Outcome of Metrics; a Protocol is a named recipe of one.

A task is a frozen, keyword-only dataclass of its settings with `run(export, space) -> Outcome`. The file it lives in
also defines `PROTOCOLS`, the recipes of the literature as values of that dataclass, and `SUITES`.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar
from typing import Protocol as Interface

import numpy as np

from engine.distributed import World
from engine.settings import Validated
from engine.work import Kind, Scale, Work

Split = Literal["train", "val"]
SelectOn = Literal["holdout", "val"]


class Images(Interface):
    """One split of an image set: imagesets.sets.ImageSet, or downstream.data.scenes.SceneSet for dense tasks."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def contents(self) -> str: ...
    def __len__(self) -> int: ...
    def limited(self, count: int) -> Self: ...


Opened = TypeVar("Opened", bound=Images)


class OpenedSets:
    """The image sets that this process has open, each split once, for all tasks of a run.

    They are never sent to other processes: annotations may be gigabytes.
    """

    def __init__(self) -> None:
        self.reread: set[Path] = set()  # folders of features that this run has made anew
        self._sets: dict[tuple[str, str, int | None], Any] = {}

    def get(self, url: str, split: Split, opener: Callable[[str, Split], Opened], limit: int | None = None) -> Opened:
        """One split of a set, opened by `opener(url, split)` the first time; at most `limit` images of it."""
        if (url, split, limit) not in self._sets:
            image_set = opener(url, split) if limit is None else self.get(url, split, opener).limited(limit)
            self._sets[url, split, limit] = image_set
        return self._sets[url, split, limit]

    def known(self, url: str, split: Split) -> Any | None:
        """One split of a set, whole, if it is open already."""
        return self._sets.get((url, split, None))


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Where and on what a task runs. Results may depend on image set, decoder, precision, limit and seed alone.

    A single process needs a cache and a URL: `task.run(export, Workspace(cache=folder, data="digits:"))`. Under
    torchrun, and on one GPU of several, connect the processes first:
    `with start_world(device) as world: task.run(export, Workspace(..., device=device, world=world))`.
    """

    cache: Path  # features and other intermediates, shared by all tasks and checkpoints; safe to delete
    data: str  # URL of the image set that the task evaluates on, e.g. "imagenet:/data/imagenet"
    device: str = "cpu"  # cpu, cuda or cuda:N
    precision: Literal["float32", "bfloat16"] = "float32"  # of forward passes
    compiled: bool = False  # transformer blocks by torch.compile, which rounds otherwise
    decode: Literal["exact", "fast"] = "exact"  # fast: torchvision decodes JPEG (docs/images.md)
    seed: int = 0  # of everything random
    limit: int | None = None  # at most this many images of each split, evenly spread; for smoke runs
    skip_bad: bool = False  # count and record unreadable images instead of stopping
    reread: bool = False  # read images again whose features are on disk
    batch_size: int | None = None  # None: chosen for the device
    workers: int | None = None  # None: chosen for the machine
    # Transform name -> what other tasks of this run will read off the same images; extracted in the same pass.
    wanted: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    world: World = field(default_factory=World)  # the connected processes, which run every task together
    opened: OpenedSets = field(default_factory=OpenedSets, repr=False, compare=False)  # sets that are open already

    def images(self, split: Split, opener: Callable[[str, Split], Opened]) -> Opened:
        """One split of `data`, at most `limit` images of it: opened by the first task that asks, in every process."""
        return self.opened.get(self.data, split, opener, self.limit)


@dataclass(frozen=True, kw_only=True, eq=False)
class Metric:
    """One number of a task, and what it is. ValueError for a description that contradicts itself.

    per_image: (N,) values of the validation images in their order, of which `value` is the mean; NaN for a skipped
    image. Of a metric in "%" they are shares from 0 to 1 (correctness), otherwise they are in its unit.
    resampled: (R,) values in the metric's unit on the resamples of engine/tasks.py, where it is no mean over
    images. A metric with neither array has no interval and no paired test.
    """

    value: float  # in its unit
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
    """What a task returns."""

    metrics: Mapping[str, Metric]  # by name, the main one first
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)  # from which metrics can be recomputed, by name
    # JSON values that the numbers rest on (image-set fingerprints, transform, images seen, notes), the same however
    # often the task was killed and resumed. facts["train"] and facts["val"], where given, hold "skipped": path ->
    # reason of every unreadable image that was left out.
    facts: Mapping[str, Any] = field(default_factory=dict)
    # What this run spent, which depends on what was on disk: "forwards" (images through the backbone) and
    # "extraction_seconds" (what these took).
    cost: Mapping[str, float] = field(default_factory=dict)
    random: bool = True  # whether another seed could give other numbers

    @property
    def numbers(self) -> dict[str, float]:
        """Metric -> its value alone."""
        return {name: metric.value for name, metric in self.metrics.items()}


@dataclass(frozen=True, kw_only=True)
class Task(Validated):
    """Base of every task: a frozen, keyword-only dataclass of settings that can evaluate one export.

    A comment beside each setting, or above it, says what it means; `bench list` shows these comments.
    """

    COST: ClassVar[float] = 1.0  # roughly, in passes over the images: cheap tasks run first
    LAYOUT: ClassVar[str] = ""  # layout of the scene sets that a dense task evaluates on; empty: an image set
    # Patterns (fnmatch) of metrics that no values of single images give: of all images together, or of others. A record
    # is not asked for their values.
    WITHOUT_VALUES: ClassVar[tuple[str, ...]] = ()
    # What the literature does otherwise, FIELD=VALUE, several with a space between them: for `bench sensitivity`.
    VARIATIONS: ClassVar[tuple[str, ...]] = ()

    def run(self, export: Any, space: Workspace) -> Outcome:
        """Evaluate. ValueError for what a user can cause."""
        raise NotImplementedError(f"task {type(self).__name__} does not define run()")

    def stream(self, export: Any, space: Workspace) -> str:
        """Name of what `run` computes for as long as it trains and other tasks of its kind can use too, such as
        features of augmented images. `together` runs all tasks that have a name, as they also share what is below, such
        as decoded images. "": nothing."""
        return ""

    @classmethod
    def together(
        cls, tasks: Sequence[Self], export: Any, space: Workspace
    ) -> Iterator[tuple[int, Outcome | Exception]]:
        """Evaluate several tasks of one stream, or one task: the place of each with its outcome, or with why it
        failed, as soon as it ends. An error that is raised is that of all which have not ended."""
        for place, task in enumerate(tasks):
            yield place, task.run(export, space)

    def features(self, export: Any, space: Workspace) -> Mapping[str, tuple[Any, ...]]:
        """Transform name -> kinds of frozen features that `run` will read; several tasks share one pass for them."""
        return {}

    def takes(self, images: Any) -> bool:
        """Whether it evaluates on an image set, that is on as many labels an image as the set has."""
        return not getattr(images, "has_several_labels", False)

    def check_network(self, spec: Any) -> None:
        """ValueError for a network that it cannot evaluate, such as one of the user's own where blocks are trained.

        spec: the export's. A run leaves the task out before it starts, and says why.
        """

    def check_images(self, space: Workspace) -> None:
        """ValueError for images that it cannot evaluate on, such as fewer than a batch, with the one setting that mends
        it. A run leaves the job out before it starts, and says why. Labels are read, no pixels; in one process."""

    def summary(self, spec: Any, images: Mapping[str, int]) -> Mapping[str, Any]:
        """Key numbers of a run, for `--dry-run`: name -> a number or text.

        spec: the export's. images: count of each split. Shares of these are approximate, as they are drawn
        class by class. ValueError where the settings do not fit.
        """
        return {}

    def cost(self, scale: Scale) -> Work:
        """Counted work, memory and disk of a run, for `--dry-run` and `bench plan`. ValueError where the settings do
        not fit."""
        return Work()

    def benchmark(self, export: Any, space: Workspace, seconds: float) -> Mapping[Kind, float]:
        """Kind of work -> seconds per unit, timed on a small sample for `bench plan` in about `seconds`; nothing is
        saved.

        For work that only this task does. The passes for features and for random crops, which tasks share, are timed
        once for all, unless this task gives its own, as those on scenes do.
        """
        return {}

    def selecting(self, select: SelectOn) -> "Task":
        """The same task for `--select`: it selects among its heads or epochs by held-out training images, or by the
        validation images. Tasks without such a selection stay as they are."""
        return self


# Metadata of a setting that published tasks gained later. `settings_of` leaves it out at its default, so that digests
# of protocols, names of results and states of trainings from before it existed still hold.
ADDED = {"added": True}


def settings_of(task: Any, complete: bool = False) -> dict[str, Any]:
    """Settings of a task as JSON values (tuples become lists).

    complete: with settings that were ADDED later and have their defaults.
    """
    late = {} if complete else {entry.name: entry.default for entry in fields(task) if entry.metadata.get("added")}
    settings = {name: value for name, value in asdict(task).items() if name not in late or value != late[name]}
    return json.loads(json.dumps(settings, default=str))


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """A named recipe: the settings that a source used. Another value of a setting needs a new `version`."""

    task: Task  # with the recipe's settings
    version: int  # rises when a setting changes
    source: str  # paper and code of the settings

    def changed(self, version: int, source: str, **settings: Any) -> "Protocol":
        """This recipe with other settings, under a source and version of its own."""
        return Protocol(task=replace(self.task, **settings), version=version, source=source)


def smoke_protocol(task: Task, what: str) -> Protocol:
    """A protocol of a few seconds, to try the machinery."""
    return Protocol(task=task, version=1, source=f"ours: {what}; not to be compared with published numbers")


def as_reported(protocols: Mapping[str, Protocol], version: int = 1, **settings: Any) -> dict[str, Protocol]:
    """`NAME_paper` of each protocol: what its source reports, where ours holds images out or keeps the last epoch.

    That is training on all images, and the epoch (and head) that does best on the validation images: numbers that are
    too good, marked as such in results. version: of these. settings: what else is the source's own.
    """
    changes = {"select": "val", **settings}
    listed = ", ".join(f"{name}={value}" for name, value in changes.items())
    return {
        f"{name}_paper": protocol.changed(
            version, f"{name} as its source reports it ({listed}): {protocol.source}", **changes
        )
        for name, protocol in protocols.items()
    }


# On 24 images the smallest p of a test is then 0.0009, and Holm over 50 can still reject.
MAX_RESAMPLES = 20_000
DRAWN = 20_000_000  # images in all resamples: 4000 times COCO's 5000, whose AP takes 80 s then, of boxes and of masks
BLOCK = 50  # resamples at once: N x BLOCK weights stay small


Score = Callable[[np.ndarray], Mapping[str, np.ndarray]]


def resamples_of(images: int) -> int:
    """How many resamples of N images are drawn."""
    return min(MAX_RESAMPLES, -(-DRAWN // images))


def resampled(score: Score, images: int, most: int = MAX_RESAMPLES) -> dict[str, np.ndarray]:
    """Name -> (R,) values of `score` on R resamples of the N validation images, the same for every outcome on as many.

    A metric of a whole set of images, such as mIoU or AP, is no mean over images. Its values on sets that are drawn
    with replacement from the images (bootstrap) show how far other images could move it, or the difference of two
    checkpoints.

    score: maps weights (r, N) float64, how often each image counts, to name -> (r,). most: resamples.
    """
    counts = _counts(images, min(resamples_of(images), most))
    parts = [score(counts[first : first + BLOCK].astype(np.float64)) for first in range(0, len(counts), BLOCK)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@lru_cache(maxsize=2)
def _counts(images: int, resamples: int) -> np.ndarray:
    # How often each image is in each resample (R, N), at most 20 MB; 256 times in none, where there are so many images.
    generator = np.random.RandomState(0)  # draws the same in every version of numpy, which default_rng may not
    counts = np.empty((resamples, images), np.uint8)
    for first in range(0, resamples, BLOCK):
        rows = counts[first : first + BLOCK]
        rows[:] = generator.multinomial(images, np.full(images, 1 / images), size=len(rows))
    return counts
