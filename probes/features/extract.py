"""Features of an image set, extracted once: every probe asks here, and what is on disk is not computed again.

On a CPU every core reads, decodes, resizes and computes its own batches (engine.machine). With the usual loader
processes beside one forward pass on all cores, each operator would wait for the core that a decoder took; and nothing
crosses processes here. `tests/benchmarks/extraction.py` compares the two. A GPU is fed by loader processes.

Letters: N images, n readable images, D width, B images of a batch, H x W pixels.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from checkpoints.backbone import Backbone
from checkpoints.flops import frozen_bytes
from checkpoints.frozen import FrozenExport
from engine.machine import own_cores, run_on_core_threads
from engine.progress import Progress
from engine.rows import ChosenRows, Rows
from engine.tasks import Workspace
from engine.training.loading import read_ahead
from engine.work import Scale
from imagesets.decoding import UnreadableImage
from imagesets.sets import ImageSet, kept_folder
from imagesets.transforms import EvalTransform
from probes.features.kinds import FeatureKind, feature_rows
from probes.features.store import Store, Writer

LOADERS = 8  # loader processes at most, for a GPU; a core decodes about 300 ImageNet files a second


class Loaded(NamedTuple):
    """Decoded images of batch `number`: (B, 3, H, W) uint8, of R crops (B, R, 3, H, W); black where unreadable."""

    number: int
    pixels: Tensor
    unreadable: dict[int, str]


OnBatch = Callable[[Loaded, range], object]  # told of a batch and of its places in the image set


class Windowed(Protocol):
    """A transform of images to one size."""

    @property
    def shape(self) -> tuple[int, ...]: ...  # (3, H, W), or (R, 3, H, W) of R crops of each image
    @property
    def name(self) -> str: ...  # all that decides about pixels, beside the images

    def __call__(self, image_set: ImageSet, index: int) -> Tensor: ...  # of this shape, uint8


class Reader:
    """Item i is the i-th of `spans` (batch number -> places in the image set), decoded.

    skip_bad: leave out unreadable images; else the first one raises UnreadableImage.
    """

    def __init__(self, image_set: ImageSet, transform: Windowed, spans: Mapping[int, range], skip_bad: bool) -> None:
        self.image_set, self.transform, self.spans, self.skip_bad = image_set, transform, list(spans.items()), skip_bad

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, item: int) -> Loaded:
        number, span = self.spans[item]
        pixels = torch.zeros(len(span), *self.transform.shape, dtype=torch.uint8)
        unreadable = {}
        for place, index in enumerate(span):
            try:
                pixels[place] = self.transform(self.image_set, index)
            except UnreadableImage as error:
                if not self.skip_bad:
                    raise
                unreadable[index] = error.reason
        return Loaded(number, pixels, unreadable)


@dataclass(frozen=True, kw_only=True)
class Extractor:
    """Turns decoded batches into features."""

    backbone: Backbone
    kinds: Sequence[FeatureKind]
    image_set: ImageSet

    def __call__(self, loaded: Loaded, span: range) -> dict[FeatureKind, np.ndarray]:
        """Kind -> rows (B, D) float32 of the images `span`, of patches (B, L, D); zero where unreadable. ValueError for
        features that are not finite."""
        device = self.backbone.mean.device
        images = self.backbone.prepare(loaded.pixels.to(device, non_blocking=True))
        rows = feature_rows(self.backbone, images, self.kinds)
        for kind, values in rows.items():
            self._check_finite(kind, values, span)
            values[[index - span.start for index in loaded.unreadable]] = 0
        return rows

    def _check_finite(self, kind: FeatureKind, values: np.ndarray, span: range) -> None:
        broken = ~np.isfinite(values).all(axis=tuple(range(1, values.ndim)))
        if broken.any():
            path = self.image_set.path(span[int(broken.argmax())])
            raise ValueError(
                f"{path}: features of layer {kind.layer} ({kind.name}) are not finite; check the checkpoint, or run "
                "in float32 if this was bfloat16"
            )


def read_with_loaders(reader: Reader, work: OnBatch, loaders: int, device: str | torch.device) -> None:
    """Call `work` with every batch in this thread while `loaders` processes decode; for devices other than the CPU."""
    for batch, (_, span) in zip(read_ahead(reader, loaders, device), reader.spans, strict=True):
        work(Loaded(*batch), span)


def for_each_batch(reader: Reader, work: OnBatch, device: str | torch.device, workers: int | None) -> None:
    """Call `work` with every batch and its places, in the way that suits the device: on a CPU from several threads.

    workers: threads on a CPU, loader processes otherwise; chosen for the machine when None. Raises UnreadableImage
    unless the reader skips such images.
    """
    if torch.device(device).type == "cpu":
        run_on_core_threads(lambda item: work(reader[item], reader.spans[item][1]), range(len(reader)), workers)
    else:
        loaders = min(LOADERS, own_cores()) if workers is None else workers
        read_with_loaders(reader, work, loaders, device)


VERSION = 1  # raise it when the same export and images would give other features than before

# Images of a forward pass. CPU: 8 to 32 are equally fast, fewer need less memory and leave less to do again after a
# kill (tests/benchmarks/extraction.py). CUDA: enough to fill a large GPU with a ViT-B at 224 px; not measured.
BATCH = {"cpu": 8, "cuda": 128}


@dataclass(frozen=True, kw_only=True)
class FeatureSet:
    """Features of the n readable images of a set of N, in the set's order.

    arrays: kind -> (n, D) float32, memory-mapped and read-only; where images were left out, rows that
    are read when they are asked for (engine/rows.py).
    labels: (n,) int64. indices: (n,) int64, place of each row in the image set.
    forwards: images that went through the backbone in this call; 0 when all was on disk. seconds: what they took.
    facts: JSON values about how the features came about, the same whenever they are asked for.
    """

    arrays: Mapping[FeatureKind, Rows]
    labels: np.ndarray
    indices: np.ndarray
    unreadable: Mapping[int, str]
    forwards: int
    seconds: float
    facts: Mapping[str, Any]

    @property
    def features(self) -> Rows:
        """(n, D) of the first kind that was asked for."""
        return next(iter(self.arrays.values()))

    def __getitem__(self, kind: FeatureKind) -> Rows:
        return self.arrays[kind]

    def __len__(self) -> int:
        return len(self.labels)


class Prepares(Protocol):
    """What says how images are prepared: a task's settings, or an export."""

    @property
    def crop(self) -> float: ...
    @property
    def interpolation(self) -> str: ...


def transform_of(export: FrozenExport, space: Workspace, task: Prepares | None = None) -> EvalTransform:
    """How images are prepared for an export, as `task` says, else as its own source does."""
    prepares: Prepares = task or export
    return EvalTransform(
        size=export.spec.size, crop=prepares.crop, interpolation=prepares.interpolation, decode=space.decode
    )


def forward_batch(device: str) -> int:
    """Images of a forward pass on a device, unless --batch-size is given."""
    return BATCH.get(torch.device(device).type, BATCH["cpu"])


def batch_spans(images: int, size: int) -> dict[int, range]:
    """Number of each batch of up to `size` images -> its places."""
    return {number: range(first, min(first + size, images)) for number, first in enumerate(range(0, images, size))}


def forward_bytes(scale: Scale) -> float:
    """Memory of a forward pass of the frozen network."""
    return frozen_bytes(scale.spec, scale.batch_size or forward_batch(scale.device))


def facts_of_pass(
    images: ImageSet, unreadable: Mapping[int, str], transform: str, space: Workspace, batch: int
) -> dict[str, Any]:
    """JSON values about how features of images came about. unreadable: image -> why it was left out."""
    return {
        **images.facts,
        "skipped": {images.path(index): unreadable[index] for index in sorted(unreadable)},
        "transform": transform,
        "precision": space.precision,
        "batch_size": batch,
        **({"compiled": True} if space.compiled else {}),
    }


def extract(
    export: FrozenExport,
    image_set: ImageSet,
    kinds: Sequence[FeatureKind],
    space: Workspace,
    transform: Windowed | None = None,
) -> FeatureSet:
    """Features of every image for every kind, from disk where they are there, else in one pass over what is missing.

    What other tasks of the run will want of the same images (`space.wanted`) is extracted along.
    A killed extraction goes on where it was; the processes of `space.world` share the work. Raises UnreadableImage,
    with the path, unless `space.skip_bad`; ValueError for non-finite features (naming layer and image), a class token
    that the model lacks, a precision that is not offered, an empty set and a full disk.
    """
    transform = transform or transform_of(export, space)
    shared_kinds = [kind for kind in space.wanted.get(transform.name, ()) if kind.exists_in(export.spec)]
    kinds = tuple(dict.fromkeys([*kinds, *shared_kinds]))
    order = Order(export=export, image_set=image_set, kinds=kinds, space=space, transform=transform)
    order.check()
    store = space.world.on_rank0(order.open_store)
    started = time.perf_counter()
    forwards = 0 if space.world.on_rank0(lambda: order.is_filled(store)) else order.fill(store)
    seconds = time.perf_counter() - started if forwards else 0.0
    return order.collect(store, forwards, seconds)


@dataclass(frozen=True, kw_only=True)
class Order:
    """One call of `extract`: what is asked for, and the steps that bring it about."""

    export: FrozenExport
    image_set: ImageSet
    kinds: tuple[FeatureKind, ...]
    space: Workspace
    transform: Windowed

    def check(self) -> None:
        if not len(self.image_set):
            raise ValueError(f"{self.image_set.url}: no images in its {self.image_set.split} split")
        if not self.kinds:
            raise ValueError("no feature kinds to extract; give at least one")
        if self.space.precision not in ("float32", "bfloat16"):
            # float16 on a CPU: 1 to 3 GFLOP/s measured, 130 times less than bfloat16
            slow = ", which a CPU computes over 100 times slower" if self.space.precision == "float16" else ""
            raise ValueError(f"precision {self.space.precision!r}{slow}: choose float32 or bfloat16")
        if self.space.batch_size is not None and self.space.batch_size < 1:
            raise ValueError(f"batch size {self.space.batch_size}: give 1 or more")

    @property
    def key(self) -> dict[str, Any]:
        """Everything that decides about the bits. Matrix products round differently in batches of another size."""
        return {
            "version": VERSION,
            "export": self.export.digest,
            "image_set": self.image_set.fingerprint,
            "transform": self.transform.name,
            "precision": self.space.precision,
            "device": torch.device(self.space.device).type,
            "batch_size": self.space.batch_size or forward_batch(self.space.device),
            **({"compiled": True} if self.space.compiled else {}),
        }

    def open_store(self) -> Store:
        """The store of these features, without those of images that changed since; with `space.reread` an empty one at
        its first use in a run."""
        key, images, reread = self.key, self.image_set, self.space.opened.reread
        folder = kept_folder(self.space.cache / "features", key, [images])
        store = Store.of(folder, key, len(images), key["batch_size"], self.export.spec.width)
        if self.space.reread and images.contents and folder not in reread:
            with store.locked():
                store.clear()
        reread.add(folder)
        if images.changed is not None:
            store.forget_changed(images.changed)
        return store

    def is_filled(self, store: Store) -> bool:
        """Whether all is on disk; images that were unreadable are tried again unless they may be skipped."""
        return all(
            store.is_finished(kind.name) and (self.space.skip_bad or not store.unreadable(kind.name))
            for kind in self.kinds
        )

    def fill(self, store: Store) -> int:
        """Extract what is missing; returns how many images all processes put through the backbone together."""
        world = self.space.world
        with world.held_by_rank0(store.locked()):
            missing = world.on_rank0(lambda: self.prepare(store))
            forwards = world.gather_results(lambda: self.compute(store, missing))
            world.on_rank0(lambda: self.finish(store))
        return sum(forwards)

    def prepare(self, store: Store) -> dict[str, set[int]]:
        """Name of every kind that lacks something -> the batches it lacks; with room for them on disk."""
        store.allocate([kind.name for kind in self.kinds if not store.is_finished(kind.name)])
        missing = {kind.name: set(store.missing(kind.name, self.space.skip_bad)) for kind in self.kinds}
        return {name: batches for name, batches in missing.items() if batches}

    def compute(self, store: Store, missing: Mapping[str, set[int]]) -> int:
        """This process's share of the missing batches; returns how many images it put through the backbone."""
        world, batches = self.space.world, sorted(set().union(*missing.values()))
        sizes = [len(store.span(number)) for number in batches]
        places = range(world.rank, len(batches), world.size)
        shares = {batches[place]: store.span(batches[place]) for place in places}
        # While this process does one batch, the others do theirs: so many images are done when it is.
        rounds = {batches[place]: sum(sizes[place : place + world.size]) for place in places}
        if not shares:
            return 0
        reader = Reader(self.image_set, self.transform, shares, self.space.skip_bad)
        extractor = Extractor(
            backbone=Backbone(self.export, self.space.device, self.space.precision, self.space.compiled),
            kinds=[kind for kind in self.kinds if kind.name in missing],
            image_set=self.image_set,
        )
        label = f"features of {self.image_set.title}"
        progress = Progress(label, store.count, quiet=not world.is_rank0)
        with Writer(store=store, wanted=missing) as writer, progress:
            progress.resume(store.count - sum(sizes))

            def compute(loaded: Loaded, span: range) -> None:
                rows = {kind.name: values for kind, values in extractor(loaded, span).items()}
                writer.write(loaded.number, rows, loaded.unreadable)
                progress.advance(rounds[loaded.number])

            for_each_batch(reader, compute, self.space.device, self.space.workers)
        return sum(map(len, shares.values()))

    def finish(self, store: Store) -> None:
        for kind in self.kinds:
            store.finish(kind.name)

    def collect(self, store: Store, forwards: int, seconds: float) -> FeatureSet:
        image_set = self.image_set
        unreadable = {index: why for kind in self.kinds for index, why in store.unreadable(kind.name).items()}
        indices = np.setdiff1d(np.arange(len(image_set)), np.array(list(unreadable), np.int64))
        if not len(indices):
            raise ValueError(f"{image_set.url}: none of the {len(image_set)} images of {image_set.split} can be read")
        arrays: dict[FeatureKind, Rows] = {kind: store.rows(kind.name) for kind in self.kinds}
        if unreadable:
            arrays = {kind: ChosenRows(store.rows(kind.name), indices) for kind in self.kinds}
        facts = facts_of_pass(image_set, unreadable, self.transform.name, self.space, store.batch)
        return FeatureSet(
            arrays=arrays,
            labels=image_set.labels[indices],
            indices=indices,
            unreadable=unreadable,
            forwards=forwards,
            seconds=seconds,
            facts=facts,
        )
