"""The interface of evaluation tasks: in a Workspace they compute an Outcome of Metrics; a Protocol is a named recipe.

A task is a frozen, keyword-only dataclass of its settings with `run(export, space) -> Outcome`. Its file also defines
`PROTOCOLS`, the recipes of the literature as instances of that dataclass, and `SUITES`.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar
from typing import Protocol as Interface

import numpy as np

from engine.distributed import World
from engine.progress import with_progress
from engine.settings import Validated
from engine.work import Scale, Work

Split = Literal["train", "val"]
SelectOn = Literal["holdout", "val"]
# What a head predicts for an image: classes, logits (C,); a mask, the class of each pixel (H, W) uint8; depth, metres
# (H, W) float32. "": a task keeps no head.
Predicts = Literal["", "classes", "mask", "depth"]


class Images(Interface):
    """One split of an image set: imagesets.sets.ImageSet, or downstream.data.scenes.SceneSet for dense tasks."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def contents(self) -> str: ...
    @property
    def warnings(self) -> tuple[str, ...]: ...
    def __len__(self) -> int: ...
    def limited(self, count: int) -> Self: ...


Reads = Mapping[str, Images | Path]  # name -> images, or a file such as ground truth
Opened = TypeVar("Opened", bound=Images)


class OpenedSets:
    """The image sets that this process has opened: each split once, for all tasks of a run.

    They are never sent to other processes, because annotations may be gigabytes.
    """

    def __init__(self) -> None:
        self.reread: set[Path] = set()  # folders of features that this run has extracted again
        self._sets: dict[tuple[str, str, int | None], Any] = {}

    def get(self, url: str, split: Split, opener: Callable[[str, Split], Opened], limit: int | None = None) -> Opened:
        """One split of a set, opened by `opener(url, split)` the first time; at most `limit` images of it."""
        if (url, split, limit) not in self._sets:
            image_set = opener(url, split) if limit is None else self.get(url, split, opener).limited(limit)
            self._sets[url, split, limit] = image_set
        return self._sets[url, split, limit]

    def known(self, url: str, split: Split) -> Any | None:
        """A whole split of a set if it is open already, else None."""
        return self._sets.get((url, split, None))


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Where and on what a task runs. Results may depend only on image set, decoder, precision, limit and seed.

    A single process needs a cache and a URL: `task.run(export, Workspace(cache=folder, data="digits:"))`. Under
    torchrun, and on one GPU of several, connect the processes first:
    `with start_world(device) as world: task.run(export, Workspace(..., device=device, world=world))`.
    """

    cache: Path  # features and other intermediates, shared by all tasks and checkpoints; safe to delete
    data: str  # URL of the image set that the task evaluates on, e.g. "imagenet:/data/imagenet"
    device: str = "cpu"  # cpu, cuda or cuda:N
    precision: Literal["float32", "bfloat16"] = "float32"  # of forward passes
    compiled: bool = False  # compile transformer blocks with torch.compile, which rounds differently
    decode: Literal["exact", "fast"] = "exact"  # fast: torchvision decodes JPEG (docs/images.md)
    seed: int = 0  # of everything random
    limit: int | None = None  # at most this many images of each split, evenly spread; for smoke runs
    skip_bad: bool = False  # count and record unreadable images instead of stopping
    reread: bool = False  # read images again even if their features are on disk
    batch_size: int | None = None  # None: chosen for the device
    workers: int | None = None  # None: chosen for the machine
    # Transform name -> kinds of features that other tasks of this run will read; extracted in the same pass.
    wanted: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    world: World = field(default_factory=World)  # the connected processes, which run every task together
    opened: OpenedSets = field(default_factory=OpenedSets, repr=False, compare=False)  # sets that are open already
    keep_heads: Path | None = None  # folder for heads; if given, outcomes include those that they report

    def images(self, split: Split, opener: Callable[[str, Split], Opened]) -> Opened:
        """One split of `data`, at most `limit` images of it; each process opens it once for all tasks."""
        return self.opened.get(self.data, split, opener, self.limit)


@dataclass(frozen=True, kw_only=True, eq=False)
class Metric:
    """One number of a task with its unit, direction and values per image. ValueError for contradictory fields.

    per_image: (N,) values of the validation images in their order, whose mean is `value`; NaN for a skipped image. For
    a metric in "%" they are shares from 0 to 1 (correctness), otherwise they are in its unit.
    resampled: for a metric that is not a mean over images, (R,) values in its unit on the resamples of `resampled`
    below. A metric with neither array has no interval and no paired test.
    resampled_units: the N of these resamples, if they do not draw from the validation images, but from videos or from
    the images of another set.
    """

    value: float  # in its unit
    unit: str = "%"  # "s", "MB"; "" for none
    higher_is_better: bool | None = True  # None: neither higher nor lower is better
    per_image: np.ndarray | None = None
    resampled: np.ndarray | None = None
    resampled_units: int | None = None
    chosen_on_val: bool = False  # whether it is the best of several on the validation images it is reported on
    deviation_of: str | None = None  # metric whose standard deviation over the task's repetitions this is

    def __post_init__(self) -> None:
        if self.per_image is not None and self.resampled is not None:
            raise ValueError("a metric has values per image or resampled values, not both")
        if self.resampled_units is not None and self.resampled is None:
            raise ValueError(f"resampled_units={self.resampled_units} without resampled values")
        if self.deviation_of is not None and self.higher_is_better is not None:
            raise ValueError(f"the deviation of {self.deviation_of} is neither better: set higher_is_better=None")

    def __eq__(self, other: object) -> bool:
        """Whether all fields are equal, arrays in every element."""
        if not isinstance(other, Metric):
            return NotImplemented
        pairs = [(getattr(self, entry.name), getattr(other, entry.name)) for entry in fields(self)]
        return all(
            np.array_equal(mine, its, equal_nan=True) if isinstance(mine, np.ndarray) else mine is its or mine == its
            for mine, its in pairs
        )


@dataclass(frozen=True, kw_only=True)
class Head:
    """The trained head whose numbers a task reports: what `Task.apply_head` needs in addition to the settings."""

    tensors: Mapping[str, Any]  # torch tensors by name
    classes: tuple[str, ...]  # names of the classes by number; empty for depth
    facts: Mapping[str, Any] = field(default_factory=dict)  # JSON values, such as the readout that was chosen


# Called with the index of an image and what a head predicts for it, or the reason why it cannot be read; from any
# thread, in almost any order.
Emit = Callable[[int, "np.ndarray | str"], object]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a task: metrics, with arrays and facts behind them."""

    metrics: Mapping[str, Metric]  # by name, the main one first
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)  # from which metrics can be recomputed, by name
    # JSON values on which the numbers depend (image-set fingerprints, transform, images seen, notes), the same however
    # often the task was killed and resumed. facts["train"] and facts["val"], if present, hold "skipped": path ->
    # reason of every unreadable image that was left out.
    facts: Mapping[str, Any] = field(default_factory=dict)
    # What this run spent, which depends on what was on disk: "forwards" (images through the backbone) and
    # "extraction_seconds" (time for these).
    cost: Mapping[str, float] = field(default_factory=dict)
    head: Head | None = field(default=None, repr=False)  # with `Workspace.keep_heads`, at least in rank 0

    @property
    def numbers(self) -> dict[str, float]:
        """Metric name -> value."""
        return {name: metric.value for name, metric in self.metrics.items()}


# (tasks, export, space) -> (index, outcome or error) of each task, as soon as it ends. An error that is raised, not
# yielded, applies to all tasks that have not ended.
Together = Callable[[Sequence[Any], Any, Workspace], Iterator[tuple[int, Outcome | Exception]]]
Features = Mapping[str, tuple[Any, ...]]  # transform name -> kinds of frozen features


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What a task shares with others of a run on the same images."""

    features: Features = field(default_factory=dict)  # that it reads: one pass over the images extracts those of all
    # Evaluates all tasks that name this function, side by side; None: the task runs alone.
    together: Together | None = None
    # Name of what such a task computes throughout training, such as features of augmented images. Tasks of different
    # streams still share earlier steps, such as decoding images.
    stream: str = ""


def all_features(features: Iterable[Features]) -> dict[str, tuple[Any, ...]]:
    """The features of several tasks, each kind once."""
    kinds_by_transform: dict[str, tuple[Any, ...]] = {}
    for of_task in features:
        for transform, kinds in of_task.items():
            kinds_by_transform[transform] = tuple(dict.fromkeys([*kinds_by_transform.get(transform, ()), *kinds]))
    return kinds_by_transform


@dataclass(frozen=True, kw_only=True)
class Task(Validated):
    """Base of every task: a frozen, keyword-only dataclass of settings that can evaluate one export.

    Each setting has a comment, on its line or above it, that explains it; `bench list` shows these comments.
    """

    COST: ClassVar[float] = 1.0  # rough cost in passes over the images: cheap tasks run first
    LAYOUT: ClassVar[str] = ""  # layout of the scene sets that a dense task evaluates on; empty: an image set
    NEEDS_TRAIN: ClassVar[bool] = True  # False: the validation images alone are enough

    @property
    def is_random(self) -> bool:
        """Whether another seed can give other numbers. Override it where not: `is_random: ClassVar[bool] = False`."""
        return True

    def run(self, export: Any, space: Workspace) -> Outcome:
        """Evaluate an export. ValueError for what a user can cause."""
        raise NotImplementedError(f"task {type(self).__name__} does not define run()")

    @property
    def predicts(self) -> Predicts:
        """What the head predicts that an outcome includes with `Workspace.keep_heads`; "" if it has none."""
        return ""

    def apply_head(self, head: Head, export: Any, images: Any, space: Workspace, emit: Emit, first: int = 0) -> None:
        """Predict images of an ImageSet by a kept head, with the pixels and the arithmetic of the evaluation.

        export: the network on which the head was trained. emit: called once for each image from index `first` on, and
        perhaps for a few before it. Raises UnreadableImage unless `space.skip_bad`.
        """
        raise NotImplementedError(f"task {type(self).__name__} keeps no head")

    def shares(self, export: Any, space: Workspace) -> Shared:
        """What `run` computes that other tasks of the run on the same images can use."""
        return Shared()

    def takes(self, images: Any) -> bool:
        """Whether the task can evaluate on an image set; by default not on sets with several labels per image."""
        return not getattr(images, "has_several_labels", False)

    def check_network(self, spec: Any) -> None:
        """Check that the task can evaluate a network. ValueError if not, such as for a user's own network in a task
        that trains blocks.

        spec: the export's. A run then leaves the task out before it starts, and prints why.
        """

    def check_images(self, space: Workspace) -> None:
        """Check that the task can evaluate on the images. ValueError if not, such as for fewer than a batch, with the
        setting to change.

        A run then leaves the job out before it starts, and prints why. Called in one process; may read annotations, but
        decodes no images.
        """

    def reads(self, space: Workspace) -> Reads:
        """What the task reads besides the splits of `space.data`. ValueError if it cannot be used.

        A result belongs to it: the job runs again if something is added; a result is refused if something that it was
        measured with was changed or removed since. Names must not depend on where the files are.
        """
        return {}

    def cost(self, scale: Scale) -> Work:
        """Work, memory and disk, counted before a run and by `bench plan`. ValueError for settings that do not fit."""
        return Work()

    def selecting(self, select: SelectOn) -> "Task":
        """The task with `--select` applied: it selects its head or epoch on held-out training images or on the
        validation images. A task that selects nothing returns itself."""
        return self


# Metadata of a setting that was added to a published task. `settings_of` omits it at its default, so that older digests
# of protocols, names of results and training states stay valid.
ADDED = {"added": True}


def settings_of(task: Any, complete: bool = False) -> dict[str, Any]:
    """Settings of a task as JSON values (tuples become lists).

    complete: include settings that were ADDED later and have their defaults.
    """
    added = {} if complete else added_settings(task)
    return as_json({name: value for name, value in asdict(task).items() if name not in added or value != added[name]})


def added_settings(task: Any) -> dict[str, Any]:
    """The defaults of a task's settings that were ADDED."""
    return {entry.name: entry.default for entry in fields(task) if entry.metadata.get("added")}


def as_json(values: Any) -> Any:
    """Values as JSON has them: tuples become lists, sets sorted lists, and what else it lacks text."""
    return json.loads(json.dumps(values, default=lambda value: sorted(value) if isinstance(value, Set) else str(value)))


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """A named recipe: the settings that a source used. Another value of a setting needs a new `version`."""

    task: Task  # with the recipe's settings
    version: int  # raised when a setting changes
    source: str  # paper and code of the settings
    reported: "Protocol | None" = None  # the variant NAME_paper: as the source reports it, chosen on the val images

    def changed(self, version: int, source: str, **settings: Any) -> "Protocol":
        """A recipe derived from this one by changing settings, with its own version and source."""
        return Protocol(task=replace(self.task, **settings), version=version, source=source)


def smoke_protocol(task: Task, what: str) -> Protocol:
    """A protocol that takes a few seconds, for tests. what: short description for its source."""
    return Protocol(task=task, version=1, source=f"ours: {what}; not to be compared with published numbers")


AS_REPORTED = "_paper"  # ending of the names of such variants


def as_reported(protocols: Mapping[str, Protocol], version: int = 1, **settings: Any) -> dict[str, Protocol]:
    """Protocols with a variant `NAME_paper` that chooses hyperparameters as the source does: on the validation images.

    It trains on all images and reports the epoch (and head) that is best on the validation images; the protocol itself
    holds out training images or keeps the last epoch. The variant's numbers are optimistic, and results mark them.
    version: of the variants. settings: further settings of the source.
    """
    protocols_with_variant = {}
    for name, protocol in protocols.items():
        chosen_on_val = protocol.task.selecting("val")
        changes = settings if chosen_on_val == protocol.task else {"select": "val", **settings}
        listed = ", ".join(f"{setting}={value}" for setting, value in changes.items())
        source = f"{name} as its source reports it ({listed}): {protocol.source}"
        variant = Protocol(task=replace(chosen_on_val, **settings), version=version, source=source)
        protocols_with_variant[name] = replace(protocol, reported=variant)
    return protocols_with_variant


def with_reported(protocols: Mapping[str, Protocol]) -> dict[str, Protocol]:
    """Protocols by name, followed by their variants `NAME_paper`."""
    variants = {f"{name}{AS_REPORTED}": protocol.reported for name, protocol in protocols.items() if protocol.reported}
    return {**protocols, **variants}


# With 20,000 resamples of 24 images, the smallest p of a test is 0.0009, and Holm over 50 can still reject.
MAX_RESAMPLES = 20_000
MAX_DRAWN_IMAGES = 20_000_000  # of all resamples: 4000 times COCO's 5000, for which AP of boxes or masks takes 80 s
RESAMPLES_AT_ONCE = 50  # so that the N x RESAMPLES_AT_ONCE weights stay small


# Weights (r, N) float64 of images -> name -> (r,) values of the metric.
Score = Callable[[np.ndarray], Mapping[str, np.ndarray]]


def resamples_of(images: int) -> int:
    """Number of bootstrap resamples for N images."""
    return min(MAX_RESAMPLES, -(-MAX_DRAWN_IMAGES // images))


def resampled(score: Score, images: int, most: int = MAX_RESAMPLES) -> dict[str, np.ndarray]:
    """Name -> (R,) values of a score on R bootstrap resamples of the N validation images.

    A metric of a whole set of images, such as mIoU or AP, is not a mean over images. Its values on sets drawn from the
    images with replacement (bootstrap) show how much it, or the difference of two checkpoints, varies with the choice
    of images. The resamples depend on N alone, so that outcomes on the same images can be paired.

    score: maps weights (r, N) float64, how often each image counts, to name -> (r,). most: upper limit of R.
    """
    counts = _counts(images, min(resamples_of(images), most))
    blocks = [counts[first : first + RESAMPLES_AT_ONCE] for first in range(0, len(counts), RESAMPLES_AT_ONCE)]
    shown = with_progress(blocks, "bootstrap over images", f"blocks of {RESAMPLES_AT_ONCE} resamples")
    parts = [score(block.astype(np.float64)) for block in shown]
    if not isinstance(parts[0], Mapping):
        raise ValueError(f"the score of resampled() returned {type(parts[0]).__name__}; return name -> (r,) in a dict")
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@lru_cache(maxsize=2)
def _counts(images: int, resamples: int) -> np.ndarray:
    """How often each image is in each resample (R, N), at most 20 MB.

    uint8 is enough: with so many images, none is drawn 256 times.
    """
    generator = np.random.RandomState(0)  # draws the same in every version of NumPy; default_rng may not
    counts = np.empty((resamples, images), np.uint8)
    for first in range(0, resamples, RESAMPLES_AT_ONCE):
        rows = counts[first : first + RESAMPLES_AT_ONCE]
        rows[:] = generator.multinomial(images, np.full(images, 1 / images), size=len(rows))
    return counts
