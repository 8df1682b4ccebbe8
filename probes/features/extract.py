"""Extraction of features of an image set, once for all probes: features that are on disk are not computed again.

On a CPU each core reads, decodes, resizes and computes batches of its own (engine.machine). With loader processes and
one forward pass on all cores, each operator would wait for the core that a decoder occupies, and images would cross
processes. `tests/benchmarks/extraction.py` compares the two. A GPU is fed by loader processes.

N: images of a set. n: those that are readable. D: width. B: images of a batch. H x W: pixels.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from checkpoints.backbone import Backbone
from checkpoints.flops import forward_flops, frozen_bytes
from checkpoints.frozen import FrozenExport
from engine.machine import own_cores, run_on_core_threads
from engine.progress import Progress
from engine.rows import ChosenRows, Rows
from engine.tasks import Emit, Workspace
from engine.training.loading import read_ahead
from engine.work import Kind, Part, Scale, Work
from imagesets.decoding import UnreadableImage
from imagesets.sets import ImageSet, cache_folder
from imagesets.transforms import EvalTransform
from probes.features.kinds import FeatureKind, feature_bytes, feature_rows
from probes.features.store import Store, Writer

VERSION = 1  # raise it when the same export and images would give different features

# Images of a forward pass. CPU: 8 to 32 are equally fast, and fewer need less memory and lose less work to a kill
# (tests/benchmarks/extraction.py). CUDA: enough to fill a large GPU with a ViT-B at 224 px; not measured.
BATCH = {"cpu": 8, "cuda": 128}
MAX_LOADERS = 8  # loader processes for a GPU; a core decodes about 300 ImageNet files a second


class ImageTransform(Protocol):
    """A transform of images to one size."""

    @property
    def shape(self) -> tuple[int, ...]: ...  # (3, H, W), or (R, 3, H, W) for R crops of each image
    @property
    def name(self) -> str: ...  # of everything that pixels depend on, apart from the images

    def __call__(self, image_set: ImageSet, index: int) -> Tensor: ...  # uint8 of this shape


class Preparation(Protocol):
    """How images are prepared: by the settings of a task, or as an export states."""

    @property
    def crop(self) -> float: ...
    @property
    def interpolation(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class FeatureSet:
    """Features of the n readable images of a set of N, in the order of the set.

    arrays: kind -> (n, D) float32, memory-mapped and read-only; if images were skipped, rows are read when they are
    indexed (engine/rows.py).
    labels: (n,) int64, or (n, C) for images with several labels. indices: (n,) int64, of the rows' images in the set.
    unreadable: index of each skipped image -> reason.
    forwards: images that went through the backbone in this call, 0 if all features were on disk. seconds: time for
    these.
    facts: JSON values about how the features were computed, the same in every call.
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
        """(n, D) of the first kind that was requested."""
        return next(iter(self.arrays.values()))

    def __getitem__(self, kind: FeatureKind) -> Rows:
        return self.arrays[kind]

    def __len__(self) -> int:
        return len(self.labels)


def transform_of(export: FrozenExport, space: Workspace, task: Preparation | None = None) -> EvalTransform:
    """The evaluation transform for an export, with the crop and interpolation of `task`, or of the export if None."""
    preparation: Preparation = task or export
    return EvalTransform(
        size=export.spec.size, crop=preparation.crop, interpolation=preparation.interpolation, decode=space.decode
    )


def forward_batch(device: str) -> int:
    """Images of a forward pass on a device, unless --batch-size is given."""
    return BATCH.get(torch.device(device).type, BATCH["cpu"])


def feature_pass(scale: Scale, images: float, of: str, kind: Kind = "features") -> Part:
    """The work of `images` through the frozen network. of: which images they are; tasks with equal ones share it."""
    return Part(kind=kind, count=images, flops=forward_flops(scale.spec), of=of)


def feature_work(scale: Scale, passes: Mapping[str, float], *parts: Part, kinds: int = 1, memory: float = 0.0) -> Work:
    """The work of a task on stored features: passes over images, by what they are, and further parts.

    kinds: number of features that are stored of an image. memory: bytes besides the forward pass.
    """
    stored = tuple(feature_pass(scale, images, of) for of, images in passes.items())
    network = frozen_bytes(scale.spec, scale.batch_size or forward_batch(scale.device))
    disk = feature_bytes(scale.spec, sum(passes.values()), kinds)
    return Work(parts=stored + parts, memory=network + memory, disk=disk)


def batch_spans(images: int, size: int) -> dict[int, range]:
    """Number of each batch of up to `size` images -> their indices."""
    return {number: range(first, min(first + size, images)) for number, first in enumerate(range(0, images, size))}


def facts_of_pass(
    images: ImageSet, unreadable: Mapping[int, str], transform: str, space: Workspace, batch: int
) -> dict[str, Any]:
    """JSON values about how features of images were computed. unreadable: index of each skipped image -> reason."""
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
    transform: ImageTransform | None = None,
) -> FeatureSet:
    """Features of every image for every kind: from disk, and in one pass over the images what is missing there.

    Kinds that other tasks of the run will read of the same images (`space.wanted`) are extracted in the same pass. A
    killed extraction is resumed, and the processes of `space.world` share the work.

    Raises:
        UnreadableImage: Unless `space.skip_bad`; it names the file.
        ValueError: For features that are not finite (names layer and image), a class token that the network lacks, a
            precision that is not supported, an empty set or a full disk.
    """
    transform = transform or transform_of(export, space)
    shared_kinds = [kind for kind in space.wanted.get(transform.name, ()) if kind.exists_in(export.spec)]
    kinds = tuple(dict.fromkeys([*kinds, *shared_kinds]))
    extraction = Extraction(export=export, image_set=image_set, kinds=kinds, space=space, transform=transform)
    extraction.check()
    store = space.world.on_rank0(extraction.open_store)
    started = time.perf_counter()
    is_complete = space.world.on_rank0(lambda: extraction.is_complete(store))
    forwards = 0 if is_complete else extraction.fill(store)
    seconds = time.perf_counter() - started if forwards else 0.0
    return extraction.collect(store, forwards, seconds)


@dataclass(frozen=True, kw_only=True)
class Extraction:
    """The steps of one call of `extract`."""

    export: FrozenExport
    image_set: ImageSet
    kinds: tuple[FeatureKind, ...]
    space: Workspace
    transform: ImageTransform

    def check(self) -> None:
        """Raises ValueError for an empty set, no kinds, and a precision or batch size that is not supported."""
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
        """Everything that the bits of the features depend on. Matrix products of another batch size round
        differently."""
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
        """The store of these features, without those of images that changed since they were extracted.

        With `space.reread` it is emptied when a run opens it for the first time.
        """
        key, images, reread = self.key, self.image_set, self.space.opened.reread
        folder = cache_folder(self.space.cache / "features", key, [images])
        store = Store.of(folder, key, len(images), key["batch_size"], self.export.spec.width)
        if self.space.reread and images.contents and folder not in reread:
            with store.locked():
                store.clear()
        reread.add(folder)
        if images.changed is not None:
            store.forget_changed(images.changed)
        return store

    def is_complete(self, store: Store) -> bool:
        """Whether all features are on disk. Unreadable images are tried again unless `space.skip_bad`."""
        return all(
            store.is_finished(kind.name) and (self.space.skip_bad or not store.unreadable(kind.name))
            for kind in self.kinds
        )

    def fill(self, store: Store) -> int:
        """Extract what is missing; returns the number of images that all processes together put through the
        backbone."""
        world = self.space.world
        with world.held_by_rank0(store.locked()):
            missing = world.on_rank0(lambda: self.allocate(store))
            forwards = world.gather_results(lambda: self.compute(store, missing))
            world.on_rank0(lambda: self.finish(store))
        return sum(forwards)

    def allocate(self, store: Store) -> dict[str, set[int]]:
        """Allocate files for incomplete kinds. Returns the name of each -> the numbers of its missing batches."""
        store.allocate([kind.name for kind in self.kinds if not store.is_finished(kind.name)])
        missing = {kind.name: set(store.missing(kind.name, self.space.skip_bad)) for kind in self.kinds}
        return {name: batches for name, batches in missing.items() if batches}

    def compute(self, store: Store, missing: Mapping[str, set[int]]) -> int:
        """Extract this process's share of the missing batches; returns the number of its images."""
        world, batches = self.space.world, sorted(set().union(*missing.values()))
        sizes = [len(store.span(number)) for number in batches]
        places = range(world.rank, len(batches), world.size)
        spans = {batches[place]: store.span(batches[place]) for place in places}
        if not spans:
            return 0
        # While this process computes a batch, the others compute theirs; progress counts all of them.
        advances = {batches[place]: sum(sizes[place : place + world.size]) for place in places}
        reader = Reader(self.image_set, self.transform, spans, self.space.skip_bad)
        extractor = Extractor(
            backbone=Backbone(self.export, self.space.device, self.space.precision, self.space.compiled),
            kinds=[kind for kind in self.kinds if kind.name in missing],
            image_set=self.image_set,
        )
        label = f"features of {self.image_set.title}"
        progress = Progress(label, store.count)
        with Writer(store=store, missing=missing) as writer, progress:
            progress.resume(store.count - sum(sizes))

            def compute_batch(batch: DecodedBatch, span: range) -> None:
                rows = {kind.name: features for kind, features in extractor(batch, span).items()}
                writer.write(batch.number, rows, batch.unreadable)
                progress.advance(advances[batch.number])

            for_each_batch(reader, compute_batch, self.space.device, self.space.workers)
        return sum(map(len, spans.values()))

    def finish(self, store: Store) -> None:
        for kind in self.kinds:
            store.finish(kind.name)

    def collect(self, store: Store, forwards: int, seconds: float) -> FeatureSet:
        """The features of a complete store. Raises ValueError if no image could be read."""
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


class DecodedBatch(NamedTuple):
    """Decoded images of one batch.

    pixels: (B, 3, H, W) uint8, or (B, R, 3, H, W) for R crops of each image; 0 for unreadable images.
    unreadable: index of each unreadable image -> reason.
    """

    number: int
    pixels: Tensor
    unreadable: dict[int, str]


OnBatch = Callable[[DecodedBatch, range], object]  # called with a batch and the indices of its images


class Reader:
    """A sequence of decoded batches.

    spans: number of each batch -> indices of its images. skip_bad: record unreadable images in the batch; otherwise the
    first one raises UnreadableImage.
    """

    def __init__(
        self, image_set: ImageSet, transform: ImageTransform, spans: Mapping[int, range], skip_bad: bool
    ) -> None:
        self.image_set, self.transform, self.spans, self.skip_bad = image_set, transform, list(spans.items()), skip_bad

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, item: int) -> DecodedBatch:
        number, span = self.spans[item]
        pixels = torch.zeros(len(span), *self.transform.shape, dtype=torch.uint8)
        unreadable = {}
        for row, index in enumerate(span):
            try:
                pixels[row] = self.transform(self.image_set, index)
            except UnreadableImage as error:
                if not self.skip_bad:
                    raise
                unreadable[index] = error.reason
        return DecodedBatch(number, pixels, unreadable)


@dataclass(frozen=True, kw_only=True)
class Extractor:
    """Computes the features of decoded batches."""

    backbone: Backbone
    kinds: Sequence[FeatureKind]
    image_set: ImageSet

    def __call__(self, batch: DecodedBatch, span: range) -> dict[FeatureKind, np.ndarray]:
        """Kind -> (B, D) float32, of patches (B, L, D), of the images `span`; 0 for unreadable images.

        Raises ValueError for features that are not finite.
        """
        device = self.backbone.mean.device
        images = self.backbone.prepare(batch.pixels.to(device, non_blocking=True))
        rows = feature_rows(self.backbone, images, self.kinds)
        for kind, features in rows.items():
            self._check_finite(kind, features, span)
            features[[index - span.start for index in batch.unreadable]] = 0
        return rows

    def _check_finite(self, kind: FeatureKind, features: np.ndarray, span: range) -> None:
        is_broken = ~np.isfinite(features).all(axis=tuple(range(1, features.ndim)))
        if is_broken.any():
            path = self.image_set.path(span[int(is_broken.argmax())])
            raise ValueError(
                f"{path}: features of layer {kind.layer} ({kind.name}) are not finite; check the checkpoint, or run "
                "in float32 if this was bfloat16"
            )


def for_each_batch(reader: Reader, work: OnBatch, device: str | torch.device, workers: int | None) -> None:
    """Call `work` with every batch: on a CPU from several threads, otherwise from this thread, fed by loader processes.

    workers: threads on a CPU, loader processes otherwise; None: as suits the machine. Raises UnreadableImage unless the
    reader skips unreadable images.
    """
    if torch.device(device).type == "cpu":
        run_on_core_threads(lambda item: work(reader[item], reader.spans[item][1]), range(len(reader)), workers)
    else:
        loaders = min(MAX_LOADERS, own_cores()) if workers is None else workers
        read_with_loaders(reader, work, loaders, device)


def emit_logits(
    logits_of: Callable[[DecodedBatch, range], Tensor],
    images: ImageSet,
    transform: ImageTransform,
    space: Workspace,
    emit: Emit,
    first: int = 0,
) -> None:
    """Emit the logits (C,) float32 of each image from `first` on, read in the batches of an extraction.

    logits_of: a decoded batch and the indices of its images -> (B, C).
    """
    spans = batch_spans(len(images), space.batch_size or forward_batch(space.device))
    remaining = {number: span for number, span in spans.items() if span.stop > first}

    def work(batch: DecodedBatch, span: range) -> None:
        with torch.inference_mode():
            rows = logits_of(batch, span).float().cpu().numpy()
        for index, row in zip(span, rows, strict=True):
            emit(index, batch.unreadable.get(index, row))

    for_each_batch(Reader(images, transform, remaining, space.skip_bad), work, space.device, space.workers)


def read_with_loaders(reader: Reader, work: OnBatch, loaders: int, device: str | torch.device) -> None:
    """Call `work` with every batch in this thread, while `loaders` processes decode; for devices other than the CPU."""
    for batch, (_, span) in zip(read_ahead(reader, loaders, device), reader.spans, strict=True):
        work(DecodedBatch(*batch), span)
