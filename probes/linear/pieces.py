"""Computed chunks of features put into order, exchanged among the processes and handed on piece by piece.

A chunk is what one forward pass computes. A piece is a few chunks of every process: process r of W computes chunks r,
r + W, r + 2 W, ... of it. M images of a piece, K feature kinds, D width.
"""

import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.distributed import World
from probes.features.extraction import Computed
from probes.features.kinds import FeatureKind

CHUNKS = 4  # of each process in a piece: fewer exchanges; alone 1, as there is nothing to exchange
AHEAD = 64  # chunks that may wait for their turn: the cores then wait for the heads

# Called with a piece: its places, features (M, K, D) and place -> why an image could not be read, its features zero.
Consume = Callable[[range, Tensor, Mapping[int, str]], None]


def pieces_of(chunks: range, world: World) -> list[list[Sequence[int]]]:
    """The pieces of some chunks: of each piece, the chunks of every process."""
    size = world.size * CHUNKS if world.size > 1 else 1
    pieces = [chunks[start : start + size] for start in range(0, len(chunks), size)]
    return [[piece[rank :: world.size] for rank in range(world.size)] for piece in pieces]


class Pieces:
    """Takes this process's chunks in any order and from any thread, and calls `consume` with the pieces in order.

    One thread at a time exchanges and consumes, while the others go on with chunks. If it fails, no piece follows.
    """

    def __init__(
        self,
        spans: Mapping[int, range],
        kinds: Sequence[FeatureKind],
        width: int,
        consume: Consume,
        world: World,
        device: torch.device,
    ) -> None:
        """spans: chunk -> its places, for consecutive chunks, of which the last alone may be shorter."""
        self.spans, self.kinds, self.width, self.consume = spans, kinds, width, consume
        self.world, self.device = world, device
        self.pieces = pieces_of(range(min(spans), max(spans) + 1), world)
        self._next, self._failed = 0, False
        self._waiting: dict[int, Computed] = {}
        self._lock, self._turn = threading.Lock(), threading.Lock()

    @property
    def own(self) -> dict[int, range]:
        """The chunks that this process computes."""
        return {number: self.spans[number] for piece in self.pieces for number in piece[self.world.rank]}

    def take(self, done: Computed) -> None:
        """Add a chunk; hand on what is complete, unless another thread does and few chunks wait."""
        with self._lock:
            self._waiting[done.number] = done
        self.hand_on(wait=len(self._waiting) > AHEAD)

    def hand_on(self, wait: bool = True) -> None:
        """Consume the next pieces as long as this process's chunks of them are there."""
        while self._is_ready():  # again after another thread's turn, which may just have missed the newest chunk
            if not self._turn.acquire(blocking=wait):
                return
            try:
                while self._is_ready():
                    self._step()
            except BaseException:
                self._failed = True
                raise
            finally:
                self._turn.release()

    def _is_ready(self) -> bool:
        if self._failed or self._next == len(self.pieces):
            return False
        with self._lock:
            return all(number in self._waiting for number in self.pieces[self._next][self.world.rank])

    def _step(self) -> None:
        piece = self.pieces[self._next]
        with self._lock:
            own = [self._waiting.pop(number) for number in piece[self.world.rank]]
        self._next += 1
        found = self.world.gather_results(lambda: [chunk.unreadable for chunk in own])
        bad = {place: reason for part in found for chunk in part for place, reason in chunk.items()}
        rows = self._exchanged(own, piece)
        places = range(self.spans[min(rows)].start, self.spans[max(rows)].stop)
        self.consume(places, torch.cat([rows[number] for number in sorted(rows)]), bad)

    def _exchanged(self, own: Sequence[Computed], piece: Sequence[Sequence[int]]) -> dict[int, Tensor]:
        """The features (B, K, D) of every chunk of a piece."""
        rows = [torch.from_numpy(np.stack([chunk.rows[kind] for kind in self.kinds], axis=1)) for chunk in own]
        if self.world.size == 1:
            return {chunk.number: each.to(self.device) for chunk, each in zip(own, rows, strict=True)}
        longest = len(self.spans[min(self.spans)])
        mine = torch.zeros(CHUNKS, longest, len(self.kinds), self.width)
        for room, values in zip(mine[: len(rows)], rows, strict=True):
            room[: len(values)] = values
        gathered = self.world.gather_tensors(mine.to(self.device))
        return {
            number: gathered[rank][at, : len(self.spans[number])]
            for rank, numbers in enumerate(piece)
            for at, number in enumerate(numbers)
        }
