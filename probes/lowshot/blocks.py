"""Features as the classifier sees them, prepared as they are read, and logistic regression on more of them than memory
holds: objective and gradient in blocks, read from the features' file.

The descent is that of probes/lowshot/logistic.py, on the same objective, to the same certified gap. Only the rows are
read anew for every evaluation: two products with each row, as a step of the fit in memory, whose logits are carried.
Products are float32 as far as it leads, then float64; all sums over blocks are exact. Under several processes each one
has a run of blocks, rank 0 descends, and the others compute their blocks' sums for the weights that it sends.

Blocks are of fixed size, and what they sum up to is added as integers (`Whole`): where products round alike, as they do
on one kind of processor with as many threads, neither the number of processes nor their order changes a bit.

Memory of a process: 8 D C (2 HISTORY + 8) bytes for the weights, gradients and history of a descent, 12 D BLOCK_ROWS
for a block of rows, 8 D^2 3 for their second moments, about 40 bytes for each of logistic.BLOCK logits, and 16 n
for labels and places. For D = 768, C = 1000, n = 1.28 M these are 172 + 75 + 14 + 42 + 20 = 323 MB.

N rows of the file, n of a fit, B of a block, D width, C classes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from engine.distributed import World
from engine.rows import Rows, copy_rows, row_slices
from probes.lowshot import logistic
from probes.lowshot.logistic import Along, Fit, Point, add_gradient, dot, margins_of, point_of, rows_of_block

Preprocess = Literal["centre_and_normalise", "normalise", "none"]
READ = 8192  # rows prepared at once


@dataclass(frozen=True, kw_only=True)
class PreparedRows:
    """The rows of `features` (N, D) prepared in the way `how`, on `device`. Nothing is kept in memory."""

    features: Rows
    how: Preprocess
    device: str = "cpu"

    def __len__(self) -> int:
        return len(self.features)

    @property
    def width(self) -> int:
        return self.features.shape[1]

    def read(self, rows: np.ndarray) -> Tensor:
        """Some rows (B,) -> (B, D) float32."""
        return torch.from_numpy(preprocessed(copy_rows(self.features, rows), self.how)[0]).to(self.device)

    def pieces(self, rows: np.ndarray) -> Iterator[Tensor]:
        """The same, at most READ rows at a time."""
        return (self.read(rows[part]) for part in row_slices(len(rows), READ))

    def shapeless(self, rows: np.ndarray) -> int:
        """How many of some rows (n,) have no direction."""
        parts = row_slices(len(rows), READ)
        return sum(preprocessed(copy_rows(self.features, rows[part]), self.how)[1] for part in parts)


def preprocessed(rows: np.ndarray, how: Preprocess) -> tuple[np.ndarray, int]:
    """Features (N, D) float32 as the classifier sees them, and how many have no direction.

    "centre_and_normalise" subtracts from each row the mean over its D values and divides by its length (cyanure's
    preprocess with columns=False, MSN logistic_eval.py:172 and :214), "normalise" divides only. Rows without direction,
    constant or zero, become zero here, on which all classes score alike. cyanure gives them a random direction (its
    matrix.h, normalize); iBOT's and MOCA's own code divide by something near zero.
    """
    if how == "none":
        return np.array(rows), 0
    moved = rows - rows.mean(axis=1, keepdims=True) if how == "centre_and_normalise" else np.array(rows)
    lengths = np.linalg.norm(moved, axis=1, keepdims=True)
    # What float32 leaves of a constant row after centring is rounding, not zero.
    shapeless = lengths <= 1e-6 * np.linalg.norm(rows, axis=1, keepdims=True)
    moved /= np.where(shapeless, np.float32(np.inf), lengths)
    return moved, int(shapeless.sum())


BLOCK_ROWS = 8192  # that a process reads before it adds their sums to the others'
BITS = 62  # of the integers that sums are kept in


@dataclass(frozen=True, kw_only=True)
class BlockedRows:
    """The rows that a fit is made on: `rows` (n,) of a file of features, with labels (n,), shared by the processes."""

    source: PreparedRows
    rows: np.ndarray
    labels: Tensor  # on the device
    world: World

    def __len__(self) -> int:
        return len(self.rows)

    def mine(self) -> list[slice]:
        """This process's blocks: a run of all."""
        blocks = list(row_slices(len(self), BLOCK_ROWS))
        first, last = (rank * len(blocks) // self.world.size for rank in (self.world.rank, self.world.rank + 1))
        return blocks[first:last]

    def pieces(self, block: slice, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Features (B, D) and labels (B,) of a block, `size` rows at a time: what caches hold."""
        for part in row_slices(block.stop - block.start, size):
            rows = slice(block.start + part.start, block.start + part.stop)
            yield self.source.read(self.rows[rows]), self.labels[rows]


class Whole:
    """Sum of many (D, C) float tensors, kept as integers of 2^-shift: exact, and the same in any order.

    largest: of the absolute values of the sum, at any time. What an addend loses is below largest * 2^-61.
    """

    def __init__(self, shape: Sequence[int], largest: float, device: torch.device) -> None:
        self.scale = 2.0 ** (BITS - math.frexp(largest)[1]) if largest > 0 else 1.0
        self.total = torch.zeros(tuple(shape), dtype=torch.int64, device=device)

    def add(self, part: Tensor) -> None:
        self.total += (part.double() * self.scale).round_().to(torch.int64)

    def value(self, world: World) -> Tensor:
        """The sum over all processes, float64; all of them call it."""
        world.all_reduce(self.total)
        return self.total.double() / self.scale


def fit_in_blocks(
    features: BlockedRows,
    classes: int,
    penalty: float,
    *,
    tolerance: float = 1e-6,
    max_iterations: int = 1000,
    start: Tensor | None = None,
) -> Fit:
    """`logistic.fit_lbfgs` for rows that stay in their file. All processes call it, and all get the result."""
    logistic.check_posed(features.labels, classes, penalty)
    largest = largest_value(features)
    moments = second_moments(features, largest)
    task = Blocks(features=features, classes=classes, penalty=penalty, largest=largest)

    def work() -> Fit | None:
        if not features.world.is_rank0:
            serve(task)
            return None
        try:
            fit = led(task, moments, tolerance, max_iterations, start)
        except Exception as error:
            if not hasattr(error, "reported_by"):  # else the others have raised it as well
                features.world.from_rank0(None)
            raise
        features.world.from_rank0(None)
        return fit

    fit = features.world.gather_results(work)[0]
    assert fit is not None  # rank 0 has it
    return fit


def led(task: "Blocks", moments: Tensor, tolerance: float, max_iterations: int, start: Tensor | None) -> Fit:
    """What rank 0 does: descend in the principal axes."""
    weights = moments.new_zeros(len(moments), task.classes) if start is None else start.to(moments)

    def in_axes(dtype: torch.dtype) -> tuple[Blocks, Tensor, Tensor]:
        axes, spectrum = logistic.axes_of(moments, dtype)
        return replace(task, axes=axes, dtype=dtype), axes, spectrum

    return logistic.fit(in_axes, task.at, weights, tolerance, max_iterations)


def serve(task: "Blocks") -> None:
    """What the other processes do: their blocks' sums, for the weights that rank 0 sends, until it sends none."""
    while (asked := task.features.world.from_rank0(None)) is not None:
        weights, dtype = asked
        replace(task, dtype=dtype).sums(weights)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """f for rows in blocks; weights (R, C) are along `axes` (D, R), all float64; products are of `dtype`.

    largest: absolute value in the features.
    """

    features: BlockedRows
    classes: int
    penalty: float
    largest: float
    axes: Tensor | None = None
    dtype: torch.dtype = torch.float64

    @property
    def precision(self) -> float:
        return torch.finfo(self.dtype).eps

    def start(self, weights: Tensor) -> Point:
        return self.at(weights)

    def line(self, start: Point, direction: Tensor) -> "BlockLine":
        return BlockLine(self, start, direction)

    def at(self, weights: Tensor) -> Point:
        """Where weights (R, C) stand; rank 0 alone calls it."""
        wide = weights if self.axes is None else self.axes @ weights
        self.features.world.from_rank0((wide, self.dtype))
        loss, gradient, curvature = self.sums(wide)
        gradient = gradient if self.axes is None else self.axes.T @ gradient
        return point_of(loss, gradient, curvature, len(self.features), weights, self.penalty)

    def sums(self, weights: Tensor) -> tuple[float, Tensor, float]:
        """Cross-entropy, gradient (D, C) and p(1 - p) at weights (D, C), summed over the rows of all processes."""
        world = self.features.world
        weights = weights.to(self.features.labels.device)
        # p - y is within -1 and 1, so that no sum over rows exceeds this.
        whole = Whole(weights.shape, len(self.features) * self.largest, weights.device)
        near = weights.to(self.dtype)
        parts = world.gather_results(lambda: [self.of_block(block, near, whole) for block in self.features.mine()])
        losses, curvatures = zip(*(pair for part in parts for pair in part), strict=True)
        return math.fsum(losses), whole.value(world), math.fsum(curvatures)

    def of_block(self, block: slice, weights: Tensor, whole: Whole) -> tuple[float, float]:
        """Add a block's gradient to the whole; returns its sums of cross-entropies and of p(1 - p)."""
        gradient, sums = torch.zeros_like(weights), []
        for features, labels in self.features.pieces(block, min(BLOCK_ROWS, rows_of_block(weights))):
            features = features.to(weights.dtype)
            sums.append(add_gradient(gradient, features, labels, margins_of(features, labels, weights)))
        whole.add(gradient)
        losses, curvatures = zip(*sums, strict=True)
        return math.fsum(losses), math.fsum(curvatures)


class BlockLine:
    """Points along a direction. Each costs as much as a gradient, and gives one, which the next step begins with."""

    def __init__(self, problem: Blocks, start: Point, direction: Tensor) -> None:
        self.problem, self.start, self.direction = problem, start, direction
        self.slope = dot(start.gradient, direction)
        self.asked: Point | None = None

    def at(self, step: float) -> Along:
        """f and its slope; the curvature is the mean over the step, from the two slopes."""
        self.asked = self.problem.at(self.start.weights + step * self.direction)
        slope = dot(self.asked.gradient, self.direction)
        return Along(self.asked.objective, slope, (slope - self.slope) / step)

    def end(self, step: float) -> Point:
        assert self.asked is not None
        return self.asked


def largest_value(features: BlockedRows) -> float:
    """Largest absolute value of all rows. ValueError for rows that are not finite."""

    def work() -> float:
        largest = 0.0
        for block in features.mine():
            rows = features.source.read(features.rows[block])
            logistic.check_rows(rows, block.start)
            largest = max(largest, rows.abs().max().item())
        return largest

    return max(features.world.gather_results(work))


def second_moments(features: BlockedRows, largest: float) -> Tensor:
    """X^T X / n (D, D) float64, of float32 products in each block."""
    width, count = features.source.width, len(features)
    whole = Whole((width, width), count * largest**2, features.labels.device)

    def work() -> None:
        for block in features.mine():
            rows = features.source.read(features.rows[block])
            whole.add(rows.T @ rows)

    features.world.on_all_ranks(work)
    return whole.value(features.world) / count
