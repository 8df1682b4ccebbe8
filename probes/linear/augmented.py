"""The papers' training augmentation, and batches of features that the frozen backbone computes from augmented images.

A crop depends on seed, epoch and image alone, so neither the number of workers nor a kill changes a training. Images go
through the backbone as in probes/features/extraction.py: on a CPU each core reads, decodes, crops and computes chunks
of its own. The thread that completes a batch then updates the heads with it.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.random import RandomState
from PIL import Image
from torch import Tensor

from checkpoints.backbone import Backbone
from imagesets.random_crops import CropRule, OwnDraws, RandomResizedCrop
from imagesets.sets import ImageSet
from imagesets.transforms import planes
from probes.features.extraction import Computed, Extractor, Reader, run_extraction
from probes.features.readouts import joined
from probes.linear.batches import EpochPlan, Readouts, Step


@dataclass(frozen=True, kw_only=True)
class TrainTransform:
    """A random window of the image, resized by Pillow, mirrored with chance 1/2; --decode fast does not apply."""

    size: int  # S, side in pixels
    interpolation: Literal["bilinear", "bicubic"]
    rule: CropRule  # whose rule draws the window
    seed: int
    epoch: int
    names: np.ndarray  # (N,) numbers that seed the images' draws

    def __call__(self, image_set: ImageSet, index: int) -> Tensor:
        """Image `index` of the set -> (3, S, S) uint8. Raises UnreadableImage."""
        generator = RandomState([self.seed, self.epoch, int(self.names[index])])
        crop = RandomResizedCrop(
            size=self.size, interpolation=self.interpolation, rule=self.rule, draws=OwnDraws(generator)
        )
        image = crop(image_set.image(index))
        mirrored = generator.random_sample() < 0.5
        return planes(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else image)


@dataclass(kw_only=True)
class AugmentedBatches:
    """Batches of features that are computed in every epoch."""

    image_set: ImageSet
    rows: np.ndarray  # (n,) images of the set to train on
    backbone: Backbone
    readouts: Readouts
    plan: EpochPlan
    interpolation: Literal["bilinear", "bicubic"]
    rule: CropRule
    chunk: int  # images of a forward pass
    skip_bad: bool
    workers: int | None  # see probes/features/extraction.py
    skipped: dict[int, str] = field(default_factory=dict)  # image -> why it could not be read
    forwards: int = 0  # images through the backbone so far

    def run(self, epoch: int, step: Step, first: int = 0) -> None:
        order = self.rows[self.plan.order(epoch)]
        images = self.image_set.subset(order, f"epoch-{epoch}")
        transform = TrainTransform(
            size=self.backbone.spec.side,
            interpolation=self.interpolation,
            rule=self.rule,
            seed=self.plan.seed,
            epoch=epoch,
            names=order,
        )
        kinds = list(dict.fromkeys(kind for kinds in self.readouts.values() for kind in kinds))
        extractor = Extractor(backbone=self.backbone, kinds=kinds, image_set=images, skip_bad=self.skip_bad)
        batches = chunked(len(order), self.plan.size, self.chunk)[first:]
        spans = dict(enumerate(span for spans in batches for span in spans))
        counts = [len(spans) for spans in batches]
        joiner = Joiner(counts, spans, images.labels, self.readouts, step, first, self.device)
        try:
            run_extraction(Reader(images, transform, spans), extractor, joiner.take, self.workers)
        finally:  # a signal may stop it on the way
            self.skipped |= {int(order[place]): reason for place, reason in joiner.unreadable.items()}
        self.forwards += len(order) - first * self.plan.size

    @property
    def device(self) -> torch.device:
        return self.backbone.mean.device


def chunked(rows: int, batch: int, chunk: int) -> list[list[range]]:
    """The chunks of every batch, as places in an epoch's order; no chunk spans two batches."""
    ends = [min(start + batch, rows) for start in range(0, rows, batch)]
    return [
        [range(at, min(at + chunk, end)) for at in range(start, end, chunk)]
        for start, end in zip(range(0, rows, batch), ends, strict=True)
    ]


class Joiner:
    """Collects computed chunks, in any order and from any thread, and calls `step` with the batches in order.

    first: number of the first batch. Unreadable images are left out of their batch; `unreadable`: their places in the
    epoch -> reason.
    """

    def __init__(
        self,
        counts: Sequence[int],
        spans: dict[int, range],
        labels: np.ndarray,
        readouts: Readouts,
        step: Step,
        first: int,
        device: torch.device,
    ) -> None:
        self.spans, self.labels, self.readouts, self.device = spans, labels, readouts, device
        self.step, self.first = step, first
        ends = np.cumsum(counts).tolist()
        self._numbers = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
        self.unreadable: dict[int, str] = {}
        self._next = 0
        self._waiting: dict[int, Computed] = {}
        self._lock = threading.Lock()

    def take(self, done: Computed) -> None:
        """Add a chunk. If it completes the next batch, this thread calls `step` with that batch."""
        with self._lock:
            self._waiting[done.number] = done
            while self._next < len(self._numbers) and all(n in self._waiting for n in self._numbers[self._next]):
                chunks = [self._waiting.pop(number) for number in self._numbers[self._next]]
                self._next += 1
                self._step(self.first + self._next - 1, chunks)

    def _step(self, number: int, chunks: Sequence[Computed]) -> None:
        places = np.concatenate([np.arange(*self._bounds(chunk)) for chunk in chunks])
        bad = {place: reason for chunk in chunks for place, reason in chunk.unreadable.items()}
        self.unreadable |= bad
        kept = ~np.isin(places, np.array(list(bad), np.int64))
        rows = {kind: np.concatenate([chunk.rows[kind] for chunk in chunks]) for kind in chunks[0].rows}
        features = {
            name: torch.from_numpy(joined(rows, kinds, kept)).to(self.device) for name, kinds in self.readouts.items()
        }
        if kept.any():
            self.step(number, features, torch.from_numpy(self.labels[places[kept]]).to(self.device))

    def _bounds(self, chunk: Computed) -> tuple[int, int]:
        span = self.spans[chunk.number]
        return span.start, span.stop
