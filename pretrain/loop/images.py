"""The views of a training in order, the same for any number of loader processes and after any restart.

Everything random about image i in epoch e is seeded by (seed, e, i), and for a repeated image by its number.
An update's batch is a range of the epoch's order. Each process takes an equal part of that range, in equal
micro-batches if memory requires it. Loader processes make micro-batches in small pieces; together they are two
micro-batches ahead.

B images of one micro-batch, or of a piece of it.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from math import ceil
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from engine.errors import option
from engine.machine import own_cores
from engine.seeding import AUGMENT, fork_rng, joined_order, seed, shuffled, windowed
from engine.training.loading import read_ahead
from engine.training.schedules import micro_batch_size, share_of
from imagesets.decoding import UnreadableImage
from imagesets.sets import ImageSet
from imagesets.stored import StoredImages
from imagesets.transforms import Photo
from pretrain.method import Views
from pretrain.parts.views import ImageViews, Unfinished

MAX_LOADERS = 12  # loader processes of a GPU; a core crops 100 to 270 ImageNet images a second (docs/speed.md)
PIECE_IMAGES, PIECE_SIDE = 16, 224  # a piece has 16 images of 224 x 224 pixels, or as many pixels in another size
MAX_PIECES = 64  # of a micro-batch: two micro-batches must stay far below the 1024 open files of a process
MICRO_BATCHES_AHEAD = 2  # micro-batches that the loader processes make in advance; at least so many pieces each


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchPlan:
    """How the images of an epoch are divided into updates, processes and micro-batches.

    Images that do not fill a batch are skipped, different ones in every epoch. If images are shuffled in windows of
    shards, an update has the same images with any number of processes, and each shard is read by one process only.
    """

    count: int  # training images
    batch: int  # images of an update
    processes: int  # processes that share a batch equally
    micro_batches: int  # forward passes of a process in an update
    seed: int  # of the order
    shards: Sequence[np.ndarray] = ()  # images (n,) of each shard
    window: int = 0  # shards among which images are shuffled; 0: among all images
    # Occurrences of an image in an epoch, which then shows fewer images. Repeats follow each other in the epoch's order
    # and go to different processes and micro-batches, as far as there are enough (DeiT samplers.py).
    repeats: int = 1

    @property
    def steps_per_epoch(self) -> int:
        return self.count // self.batch

    @property
    def micro_batch_size(self) -> int:
        """Images of one process in one forward pass."""
        return self.batch // self.processes // self.micro_batches

    @property
    def window_steps(self) -> int:
        """Number of updates that a window of shards lasts."""
        return ceil(self.window * self.repeats * self.count / len(self.shards) / self.batch)

    def positions(self, step: int, rank: int, micro_batch: int) -> range:
        """Positions of one micro-batch's images in the epoch's order, in which an image's repeats follow each other."""
        first = step % self.steps_per_epoch * self.batch  # of the update
        share = rank * self.micro_batches + micro_batch  # number of this micro-batch in the update
        stride = self.processes * self.micro_batches
        if self.window:
            # A shard's images are `window` positions apart, a multiple of the processes: process r, which gets the
            # positions r modulo the processes, reads shards of its own.
            return range(first + micro_batch * self.processes + rank, first + self.batch, stride)
        if self.repeats > 1:
            return range(first + share, first + self.batch, stride)
        start = first + share * self.micro_batch_size
        return range(start, start + self.micro_batch_size)

    def places(self, step: int, rank: int, micro_batch: int) -> list[int]:
        """Indices in the training set of the images of one micro-batch."""
        order = order_of(self, step // self.steps_per_epoch)
        return [int(order[position // self.repeats]) for position in self.positions(step, rank, micro_batch)]

    def class_spread(self, labels: np.ndarray) -> float:
        """Variance of the class frequencies within an update, divided by the variance expected if images were drawn at
        random; over at most 1000 updates. labels: (count,) int64."""
        size, class_shares = self.batch // self.repeats, np.bincount(labels) / len(labels)
        updates = order_of(self, 0)[: min(self.steps_per_epoch, 1000) * size].reshape(-1, size)
        squared_errors = []
        for indices in updates:
            shares_in_update = np.bincount(labels[indices], minlength=len(class_shares)) / size
            squared_errors.append(((shares_in_update - class_shares) ** 2).sum())
        expected = (1 - (class_shares**2).sum()) / size
        return float(np.mean(squared_errors) / expected)

    def shards_of(self, rank: int, steps: range) -> Iterator[tuple[int, np.ndarray]]:
        """The parts of shards that process `rank` reads during `steps`, those begun earlier included: pairs of the
        first update that needs a part and its images (n,)."""
        for epoch in range(steps.start // self.steps_per_epoch, ceil(steps.stop / self.steps_per_epoch)):
            earlier_steps = epoch * self.steps_per_epoch
            for start, images in parts_of(self, epoch):
                end = start + (len(images) - 1) * self.window  # position of the part's last image
                first_step = start * self.repeats // self.batch
                last_step = end * self.repeats // self.batch
                is_needed = first_step < self.steps_per_epoch and earlier_steps + last_step >= steps.start
                if start % self.processes == rank and is_needed:
                    yield earlier_steps + first_step, images


@lru_cache(maxsize=2)  # the current epoch, and the one that is read ahead
def parts_of(plan: BatchPlan, epoch: int) -> list[tuple[int, np.ndarray]]:
    """The start in an epoch's order and the images (n,) of each part of a shard, see `windowed`."""
    return windowed(plan.shards, plan.window, plan.seed, epoch) if plan.window else []


@lru_cache(maxsize=1)
def order_of(plan: BatchPlan, epoch: int) -> np.ndarray:
    """The indices of the images (count,) in the order of an epoch."""
    if not plan.window:
        return shuffled(plan.count, plan.seed, epoch)
    return joined_order(parts_of(plan, epoch), plan.window)


def batch_plan(
    count: int, batch: int, processes: int, largest: int | None, seed: int, url: str = "the set", repeats: int = 1
) -> BatchPlan:
    """The plan with the fewest micro-batches of at most `largest` images (None: no limit).

    Raises ValueError if the batch is larger than the set, or cannot be shared equally by the processes.
    """
    if batch > count:
        raise ValueError(
            f"batch={batch} is more than the {count} images of {url}; lower it with "
            f"{option('settings', {'batch': count})}"
        )
    share = share_of(batch, processes)
    micro_batches = share // micro_batch_size(share, largest or share)
    return BatchPlan(
        count=count, batch=batch, processes=processes, micro_batches=micro_batches, seed=seed, repeats=repeats
    )


class MicroBatch(NamedTuple):
    """A micro-batch on the device."""

    views: Mapping[str, Tensor]  # name -> (B, ...)
    unreadable: dict[int, str]  # index in the set -> reason; the next readable image replaces the unreadable one


class Piece(NamedTuple):
    """A piece of a micro-batch, made by a loader process."""

    views: Mapping[str, Tensor | Unfinished]
    unreadable: dict[int, str]


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatches:
    """The micro-batches of one process in order, as a sequence of pieces."""

    image_set: ImageSet
    views: Views  # of the method
    plan: BatchPlan
    rank: int  # of the process
    steps: range  # updates
    size: int = PIECE_IMAGES  # images of a piece; the last one of a micro-batch may be smaller
    labelled: bool = False  # whether to add the images' labels as the view "label" (B,) int64
    decode: Literal["exact", "fast"] = "exact"
    unfinished: bool = False  # whether colours and normalisation are left to the device

    @property
    def pieces(self) -> int:
        """Number of pieces of one micro-batch."""
        return ceil(self.plan.micro_batch_size / self.size)

    def __len__(self) -> int:
        return len(self.steps) * self.plan.micro_batches * self.pieces

    def __getitem__(self, item: int) -> Piece:
        micro_batches_before, piece = divmod(item, self.pieces)
        steps_before, micro_batch = divmod(micro_batches_before, self.plan.micro_batches)
        step = self.steps[steps_before]
        epoch = step // self.plan.steps_per_epoch
        span = slice(piece * self.size, (piece + 1) * self.size)
        places = self.plan.places(step, self.rank, micro_batch)[span]
        positions = self.plan.positions(step, self.rank, micro_batch)[span]
        unreadable: dict[int, str] = {}
        with fork_rng():
            samples = [
                self.sample(place, position % self.plan.repeats, epoch, unreadable)
                for place, position in zip(places, positions, strict=True)
            ]
        return Piece(default_collate(samples), unreadable)

    def sample(self, place: int, repeat: int, epoch: int, unreadable: dict[int, str]) -> dict[str, Any]:
        """Views and noise of the image at index `place`, or of the next readable one, with its label if `labelled`."""
        make = self.views.unfinished if self.unfinished and isinstance(self.views, ImageViews) else self.views

        def views_of(index: int) -> dict[str, Any]:
            image = Photo(self.image_set, index).pil_image(self.decode)
            seed(AUGMENT, self.plan.seed, epoch, place, *([repeat] if repeat else []))
            return make(image)

        views, index = self.image_set.next_readable(place, unreadable, views_of)
        return views | {"label": torch.tensor(int(self.image_set.labels[index]))} if self.labelled else views


def piece_of(side: int, micro_batch_size: int) -> int:
    """Images of a piece: as many pixels as PIECE_IMAGES images of PIECE_SIDE x PIECE_SIDE, or more if that makes more
    than MAX_PIECES.

    Each piece takes time to send, and one open file per tensor until it is received.
    """
    return max(1, PIECE_IMAGES * PIECE_SIDE**2 // side**2, ceil(micro_batch_size / MAX_PIECES))


def default_workers(device: str) -> int:
    """Default number of loader processes: one per core of a GPU's process up to MAX_LOADERS, and one on the CPU."""
    return min(MAX_LOADERS, own_cores()) if torch.device(device).type == "cuda" else 1


def load_micro_batches(micro_batches: MicroBatches, workers: int, device: str, skip_bad: bool) -> Generator[MicroBatch]:
    """All micro-batches in order, their views on `device`; close it to end the loader processes.

    Raises UnreadableImage unless `skip_bad`.
    """
    pieces_ahead = MICRO_BATCHES_AHEAD * micro_batches.pieces
    ahead = max(MICRO_BATCHES_AHEAD, ceil(pieces_ahead / max(workers, 1)))  # pieces of each process
    with (
        closing(read_ahead(micro_batches, workers, device, ahead)) as pieces,
        closing(steps_with_shards(micro_batches)) as steps,
    ):
        for _ in steps:
            for _ in range(micro_batches.plan.micro_batches):
                micro_batch = _joined(list(islice(pieces, micro_batches.pieces)), device)
                if micro_batch.unreadable and not skip_bad:
                    place, reason = next(iter(micro_batch.unreadable.items()))
                    raise UnreadableImage(micro_batches.image_set.path(place), reason)
                yield micro_batch


def steps_with_shards(micro_batches: MicroBatches) -> Generator[int]:
    """The updates in order; with windows of shards, a thread reads this process's shards ahead of them."""
    plan, images, steps = micro_batches.plan, micro_batches.image_set.images, micro_batches.steps
    if not plan.window:
        return (step for step in steps)
    assert isinstance(images, StoredImages)
    return images.read_ahead(plan.shards_of(micro_batches.rank, steps), steps, plan.window_steps)


def _joined(pieces: list[Piece], device: str) -> MicroBatch:
    """Join the pieces of a micro-batch on the device."""
    views = {name: on_device([piece.views[name] for piece in pieces], device) for name in pieces[0].views}
    return MicroBatch(views, {place: why for piece in pieces for place, why in piece.unreadable.items()})


def on_device(parts: Sequence[Tensor | Unfinished], device: str) -> Tensor:
    """Move the parts of a view to the device, from pinned memory to a GPU; concatenate and finish them there."""
    unfinished = [part for part in parts if isinstance(part, Unfinished)]
    if unfinished:
        pixels, changes, scales = zip(*unfinished, strict=True)
        return Unfinished(on_device(pixels, device), torch.cat(changes), on_device(scales, device)).finished()
    moved = [part.to(device, non_blocking=True) for part in parts if isinstance(part, Tensor)]
    return torch.cat(moved) if len(moved) > 1 else moved[0]
