"""The views a training sees, in order: the same whatever the number of loader processes, and after any restart.

Everything random about image i in epoch e comes from (seed, e, i), and the repeat's number where it occurs again. An
update's batch is a stretch of the epoch's order; each process takes an equal stretch of it, and goes through that in
equal micro-batches where memory asks for it. Loader processes make a micro-batch in small pieces, so that together they
work two ahead however many they are.

B images of one micro-batch, or of a piece of it.
"""

import os
import signal
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from engine.seeding import AUGMENT, kept, seed, shuffled
from engine.training.micro_batches import micro_batch_size, share_of
from imagesets.decoding import UnreadableImage
from imagesets.sets import ImageSet
from pretrain.method import Views

LOADERS = 12  # at most beside a GPU; a core makes 50 to 100 augmented ImageNet views a second
PIECE, SIDE = 16, 224  # images of so many pixels a side that a loader process makes and hands over at once, at most
PIECES = 64  # of a micro-batch, at most: two ahead must stay far below the 1024 open files of a process
AHEAD = 2  # micro-batches that all loader processes make in advance, and pieces that each of them does at least
DEAF = 60  # seconds that a loader process outlives a SIGTERM


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """How `count` images become updates of `batch` images, those become the shares of `world` processes, and a share
    becomes `micro_batches` forward passes. What does not fill a batch is left out, other images in every epoch.

    repeats: how often an image occurs in an epoch, which then shows fewer images: one after the other, in other
    processes and micro-batches where there are as many (DeiT samplers.py).
    """

    count: int
    batch: int
    world: int
    micro_batches: int
    seed: int
    repeats: int = 1

    @property
    def steps_per_epoch(self) -> int:
        return self.count // self.batch

    @property
    def micro_batch_size(self) -> int:
        """Images of one process in one forward pass."""
        return self.batch // self.world // self.micro_batches

    def positions(self, step: int, rank: int, micro_batch: int) -> range:
        """Where one micro-batch's images are in the epoch's sequence, in which an image's repeats follow each other."""
        first, share = step % self.steps_per_epoch * self.batch, rank * self.micro_batches + micro_batch
        if self.repeats > 1:
            return range(first + share, first + self.batch, self.world * self.micro_batches)
        start = first + share * self.micro_batch_size
        return range(start, start + self.micro_batch_size)

    def places(self, step: int, rank: int, micro_batch: int) -> list[int]:
        """Places in the training set of the images of one micro-batch."""
        order = shuffled(self.count, self.seed, step // self.steps_per_epoch)
        return [int(order[position // self.repeats]) for position in self.positions(step, rank, micro_batch)]


def batch_plan(
    count: int, batch: int, world: int, most: int | None, seed: int, url: str = "the set", repeats: int = 1
) -> BatchPlan:
    """The plan with the fewest micro-batches of at most `most` images. ValueError where batch, set and processes do not
    fit."""
    if batch > count:
        raise ValueError(f"batch={batch} is more than the {count} images of {url}; lower it with --set batch={count}")
    share = share_of(batch, world)
    micro_batches = share // micro_batch_size(share, most or share)
    return BatchPlan(count=count, batch=batch, world=world, micro_batches=micro_batches, seed=seed, repeats=repeats)


class MicroBatch(NamedTuple):
    """A micro-batch, or a piece of one. views: name -> (B, ...). unreadable: place -> why, replaced by the next image
    that can be read."""

    views: Mapping[str, Tensor]
    unreadable: dict[int, str]


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatches(Dataset):
    """The micro-batches of process `rank` for `steps`, in order, in pieces of `size` images, the last one of each maybe
    smaller.

    In place of a piece that cannot be made, the error: one that a loader process raises would arrive as the text of its
    traceback. labelled: the images' labels come along, as the view "label" (B,) int64.
    """

    image_set: ImageSet
    views: Views
    plan: BatchPlan
    rank: int
    steps: range
    size: int = PIECE
    labelled: bool = False

    @property
    def pieces(self) -> int:
        """Pieces of one micro-batch."""
        return ceil(self.plan.micro_batch_size / self.size)

    def __len__(self) -> int:
        return len(self.steps) * self.plan.micro_batches * self.pieces

    def __getitem__(self, item: int) -> MicroBatch | ValueError | OSError:
        try:
            return self.piece(item)
        except (ValueError, OSError) as error:
            return error

    def piece(self, item: int) -> MicroBatch:
        whole, piece = divmod(item, self.pieces)
        update, micro_batch = divmod(whole, self.plan.micro_batches)
        step = self.steps[update]
        chosen = slice(piece * self.size, (piece + 1) * self.size)
        places = self.plan.places(step, self.rank, micro_batch)[chosen]
        repeats = [at % self.plan.repeats for at in self.plan.positions(step, self.rank, micro_batch)[chosen]]
        epoch = step // self.plan.steps_per_epoch
        unreadable: dict[int, str] = {}
        with kept():
            found = [self.sample(*which, epoch, unreadable) for which in zip(places, repeats, strict=True)]
        return MicroBatch(default_collate(found), unreadable)

    def sample(self, place: int, repeat: int, epoch: int, unreadable: dict[int, str]) -> dict[str, Tensor]:
        """Views and noise of the image at `place`, or of the next one that can be read, with its label where asked."""
        image, found = self.image_set.next_readable(place, unreadable)
        seed(AUGMENT, self.plan.seed, epoch, place, *([repeat] if repeat else []))
        views = self.views(image)
        return views | {"label": torch.tensor(int(self.image_set.labels[found]))} if self.labelled else views


def piece_of(side: int, micro_batch_size: int) -> int:
    """How many images of side x side pixels are as much as PIECE of SIDE x SIDE; more where there would be too many
    pieces. Handing one over takes time, and an open file for each of its tensors until it is taken."""
    return max(1, PIECE * SIDE**2 // side**2, ceil(micro_batch_size / PIECES))


def default_workers(device: str) -> int:
    """Loader processes where none were asked for: the cores of a GPU's process, one beside a training on the CPU."""
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(LOADERS, cores)) if torch.device(device).type == "cuda" else 1


def stream(micro_batches: MicroBatches, workers: int, device: str, skip_bad: bool) -> Generator[MicroBatch]:
    """All micro-batches in order, their views on `device`; close it to end the loader processes.

    Raises UnreadableImage unless `skip_bad`.
    """
    loader = iter(
        DataLoader(
            micro_batches,
            batch_size=None,
            num_workers=workers,
            pin_memory=torch.device(device).type == "cuda",
            prefetch_factor=max(AHEAD, ceil(AHEAD * micro_batches.pieces / workers)) if workers else None,
            worker_init_fn=_settle,
        )
    )
    try:
        for _ in range(len(micro_batches) // micro_batches.pieces):
            yield _joined([_good(next(loader), micro_batches, skip_bad) for _ in range(micro_batches.pieces)], device)
    finally:
        del loader  # the last reference, even where an error holds this frame: its processes end now


def _good(found: MicroBatch | Exception, micro_batches: MicroBatches, skip_bad: bool) -> MicroBatch:
    """A piece as it came out of the loader; raises what is wrong with it."""
    if isinstance(found, Exception):
        raise found
    piece = MicroBatch(*found)
    if piece.unreadable and not skip_bad:
        place, reason = next(iter(piece.unreadable.items()))
        raise UnreadableImage(micro_batches.image_set.path(place), reason)
    return piece


def _joined(pieces: list[MicroBatch], device: str) -> MicroBatch:
    """One micro-batch. Pieces go to a GPU as they are, from pinned memory, and are put together there."""
    views = {
        name: _together([piece.views[name].to(device, non_blocking=True) for piece in pieces])
        for name in pieces[0].views
    }
    return MicroBatch(views, {place: why for piece in pieces for place, why in piece.unreadable.items()})


def _together(tensors: list[Tensor]) -> Tensor:
    """One after the other; a single one as it is."""
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def _settle(worker: int) -> None:
    """In a loader process: one core, and deaf to what is meant for the training.

    A terminal and a scheduler signal all processes of a job at once, but the training still needs its images to reach
    the end of an update. It ends its loaders itself; should it fail to, an alarm ends them a while after a SIGTERM.
    """
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(DEAF))
