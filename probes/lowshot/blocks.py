"""How is a logistic regression fitted to more rows than fit into memory? Rows are read from their file in blocks.

Objective, gap and solver are those of probes/lowshot/logistic.py. Only the rows are read again for each evaluation,
which needs two matrix products with each row: as many as a step of the fit in memory, which keeps the logits. Products
are float32 for as long as it makes progress, then float64; sums over blocks are exact. With several processes each has
a run of blocks: rank 0 runs the solver, and the others compute the sums of their blocks for the weights that it sends.

Blocks have a fixed size, and their sums are added as integers (`ExactSum`). So neither the number of processes nor
their order changes a bit, where products round alike: on one kind of processor with the same number of threads.

Memory of a process: 8 D C (2 HISTORY + 8) bytes for weights, gradients and the history of the solver, 12 D BLOCK_ROWS
for a block of rows, 8 D^2 3 for their second moments, about 40 bytes for each of logistic.BLOCK_LOGITS logits, and 16 n
for labels and row numbers. For D = 768, C = 1000, n = 1.28 M these are 172 + 75 + 14 + 42 + 20 = 323 MB.

N rows of the file, n of a fit, B of a block, D width, C classes, R principal axes.
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
from probes.lowshot.logistic import (
    Fit,
    LinePoint,
    Point,
    add_gradient,
    dot,
    margins_of,
    point_from_sums,
    rows_per_block,
)

Preprocess = Literal["centre_and_normalise", "normalise", "none"]
READ_ROWS = 8192  # rows that are prepared at a time
BLOCK_ROWS = 8192  # rows that a process reads before it adds their sums to the total
SUM_BITS = 62  # of the integers that sums are kept in


@dataclass(frozen=True, kw_only=True)
class PreparedRows:
    """The rows of features (N, D) on disk, preprocessed whenever they are read. Nothing is kept in memory."""

    features: Rows
    preprocess: Preprocess
    device: str = "cpu"  # of the rows that are returned
    intercept: bool = False  # D + 1 numbers in a row, of which the last is 1

    def __len__(self) -> int:
        return len(self.features)

    @property
    def width(self) -> int:
        return self.features.shape[1] + self.intercept

    def read(self, rows: np.ndarray) -> Tensor:
        """Rows (B,) -> features (B, D) float32."""
        prepared, _ = prepare_rows(copy_rows(self.features, rows), self.preprocess)
        if self.intercept:
            prepared = np.pad(prepared, ((0, 0), (0, 1)), constant_values=1)
        return torch.from_numpy(prepared).to(self.device)

    def pieces(self, rows: np.ndarray) -> Iterator[Tensor]:
        """Features (B, D) float32 of rows (n,), at most READ_ROWS at a time."""
        return (self.read(rows[part]) for part in row_slices(len(rows), READ_ROWS))

    def count_constant(self, rows: np.ndarray) -> int:
        """How many of the rows (n,) are constant, as in `prepare_rows`."""
        parts = row_slices(len(rows), READ_ROWS)
        return sum(prepare_rows(copy_rows(self.features, rows[part]), self.preprocess)[1] for part in parts)


def prepare_rows(rows: np.ndarray, preprocess: Preprocess) -> tuple[np.ndarray, int]:
    """Features (N, D) float32 as the classifier reads them, and how many of them are constant.

    "centre_and_normalise" subtracts from each row the mean over its D values and divides by its length (cyanure's
    preprocess with columns=False, MSN logistic_eval.py:172 and :214), "normalise" only divides. Constant rows, or with
    "normalise" zero rows, have no direction: they become zero, with equal scores for all classes. cyanure gives them a
    random direction (its matrix.h, normalize); iBOT's and MOCA's code divides by a number near zero.
    """
    if preprocess == "none":
        return np.array(rows), 0
    prepared = rows - rows.mean(axis=1, keepdims=True) if preprocess == "centre_and_normalise" else np.array(rows)
    lengths = np.linalg.norm(prepared, axis=1, keepdims=True)
    # In float32, centring a constant row leaves rounding errors, not zeros.
    is_constant = lengths <= 1e-6 * np.linalg.norm(rows, axis=1, keepdims=True)
    prepared /= np.where(is_constant, np.float32(np.inf), lengths)
    return prepared, int(is_constant.sum())


@dataclass(frozen=True, kw_only=True)
class BlockedRows:
    """The rows of a fit, which the processes share in blocks of BLOCK_ROWS."""

    source: PreparedRows
    rows: np.ndarray  # (n,) of `source`
    labels: Tensor  # (n,) on the device
    world: World

    def __len__(self) -> int:
        return len(self.rows)

    def own_blocks(self) -> list[slice]:
        """The blocks of this process, which follow each other."""
        blocks = list(row_slices(len(self), BLOCK_ROWS))
        first, last = (rank * len(blocks) // self.world.size for rank in (self.world.rank, self.world.rank + 1))
        return blocks[first:last]

    def read(self, block: slice) -> Tensor:
        """The features (B, D) of a block."""
        return self.source.read(self.rows[block])

    def pieces(self, block: slice, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Features (B, D) and labels (B,) of a block, at most `size` rows at a time."""
        for part in row_slices(block.stop - block.start, size):
            piece = slice(block.start + part.start, block.start + part.stop)
            yield self.read(piece), self.labels[piece]


class ExactSum:
    """Sum of many float tensors, kept in integer multiples of 2^-shift: the same in any order."""

    def __init__(self, shape: Sequence[int], max_value: float, device: torch.device) -> None:
        """max_value: bound of the absolute values of the sum at any time. An addend loses at most max_value * 2^-61."""
        self.scale = 2.0 ** (SUM_BITS - math.frexp(max_value)[1]) if max_value > 0 else 1.0
        self.total = torch.zeros(tuple(shape), dtype=torch.int64, device=device)

    def add(self, values: Tensor) -> None:
        self.total += (values.double() * self.scale).round_().to(torch.int64)

    def value(self, world: World) -> Tensor:
        """The sum over all processes, float64. All of them must call it."""
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
    """`logistic.fit_lbfgs` for rows that stay in their file. All processes must call it; all get the result."""
    logistic.check_labels_and_penalty(features.labels, classes, penalty)
    max_feature = max_absolute_value(features)
    moments = second_moments(features, max_feature)
    intercept = features.source.intercept
    objective = BlockObjective(
        features=features, classes=classes, penalty=penalty, max_feature=max_feature, intercept=intercept
    )

    def work() -> Fit | None:
        if not features.world.is_rank0:
            serve(objective)
            return None
        try:
            fit = solve(objective, moments, tolerance, max_iterations, start)
        except Exception as error:
            if not hasattr(error, "reported_by"):  # otherwise the other processes have raised it, too
                features.world.from_rank0(None)
            raise
        features.world.from_rank0(None)
        return fit

    fit = features.world.gather_results(work)[0]
    assert fit is not None  # that of rank 0
    return fit


def solve(
    objective: "BlockObjective", moments: Tensor, tolerance: float, max_iterations: int, start: Tensor | None
) -> Fit:
    """Run the solver in rank 0. moments: X^T X / n (D, D). start: (D, C) initial weights; zeros if None."""
    weights = moments.new_zeros(len(moments), objective.classes) if start is None else start.to(moments)

    def objective_in_axes(dtype: torch.dtype) -> tuple[BlockObjective, Tensor, Tensor]:
        if objective.intercept:
            mean = moments[-1, :-1]
            centred = moments[:-1, :-1] - torch.outer(mean, mean)
            axes, spectrum = logistic.with_intercept(*logistic.axes_of_moments(centred, dtype), mean)
        else:
            axes, spectrum = logistic.axes_of_moments(moments, dtype)
        return replace(objective, axes=axes, dtype=dtype), axes, spectrum

    return logistic.fit_in_axes(objective_in_axes, objective.at, weights, tolerance, max_iterations)


def serve(objective: "BlockObjective") -> None:
    """In the other processes: compute sums for the weights that rank 0 sends, until it sends None."""
    while (request := objective.features.world.from_rank0(None)) is not None:
        weights, dtype = request
        replace(objective, dtype=dtype).sums(weights)


@dataclass(frozen=True, kw_only=True)
class BlockObjective:
    """f for rows in blocks. Weights (R, C) are along `axes`, in float64; products are of `dtype`."""

    features: BlockedRows
    classes: int
    penalty: float
    max_feature: float  # largest absolute value in the features
    intercept: bool = False  # the last feature is 1
    axes: Tensor | None = None  # (D, R); None: those of the features
    dtype: torch.dtype = torch.float64

    @property
    def precision(self) -> float:
        return torch.finfo(self.dtype).eps

    def start(self, weights: Tensor) -> Point:
        return self.at(weights)

    def line(self, start: Point, direction: Tensor) -> "BlockLine":
        return BlockLine(self, start, direction)

    def at(self, weights: Tensor) -> Point:
        """f at weights (R, C). Rank 0 alone calls it, while the others `serve`."""
        feature_weights = weights if self.axes is None else self.axes @ weights  # (D, C)
        self.features.world.from_rank0((feature_weights, self.dtype))
        loss, gradient, curvature = self.sums(feature_weights)
        gradient = gradient if self.axes is None else self.axes.T @ gradient
        return point_from_sums(loss, gradient, curvature, len(self.features), weights, self)

    def sums(self, weights: Tensor) -> tuple[float, Tensor, float]:
        """At weights (D, C): cross-entropy, gradient (D, C) and p (1 - p), summed over the rows of all processes."""
        world = self.features.world
        weights = weights.to(self.features.labels.device)
        # p - y is between -1 and 1, so no sum over rows exceeds n times the largest feature.
        gradient = ExactSum(weights.shape, len(self.features) * self.max_feature, weights.device)
        rounded = weights.to(self.dtype)
        sums_by_rank = world.gather_results(
            lambda: [self.add_block(block, rounded, gradient) for block in self.features.own_blocks()]
        )
        losses, curvatures = zip(*(sums for of_rank in sums_by_rank for sums in of_rank), strict=True)
        return math.fsum(losses), gradient.value(world), math.fsum(curvatures)

    def add_block(self, block: slice, weights: Tensor, total_gradient: ExactSum) -> tuple[float, float]:
        """Add the gradient of a block to the total. Returns the block's sums of cross-entropies and of p (1 - p)."""
        gradient, sums = torch.zeros_like(weights), []
        for features, labels in self.features.pieces(block, min(BLOCK_ROWS, rows_per_block(weights))):
            features = features.to(weights.dtype)
            sums.append(add_gradient(gradient, features, labels, margins_of(features, labels, weights)))
        total_gradient.add(gradient)
        losses, curvatures = zip(*sums, strict=True)
        return math.fsum(losses), math.fsum(curvatures)


class BlockLine:
    """f along a direction. A point costs as much as a gradient and has one, which the next step of the solver uses."""

    def __init__(self, objective: BlockObjective, start: Point, direction: Tensor) -> None:
        self.objective, self.start, self.direction = objective, start, direction
        self.start_slope = dot(start.gradient, direction)
        self.point: Point | None = None  # the last one that was computed

    def at(self, step: float) -> LinePoint:
        """f and its slope; the curvature is the mean over the step, from the slopes at its ends."""
        self.point = self.objective.at(self.start.weights + step * self.direction)
        slope = dot(self.point.gradient, self.direction)
        return LinePoint(self.point.objective, slope, (slope - self.start_slope) / step)

    def end(self, step: float) -> Point:
        assert self.point is not None
        return self.point


def max_absolute_value(features: BlockedRows) -> float:
    """The largest absolute value in all rows. ValueError for rows that are not finite."""

    def work() -> float:
        largest = 0.0
        for block in features.own_blocks():
            rows = features.read(block)
            logistic.check_finite(rows, block.start)
            largest = max(largest, rows.abs().max().item())
        return largest

    return max(features.world.gather_results(work))


def second_moments(features: BlockedRows, max_feature: float) -> Tensor:
    """X^T X / n (D, D) float64, from float32 products of each block."""
    width, count = features.source.width, len(features)
    total = ExactSum((width, width), count * max_feature**2, features.labels.device)

    def work() -> None:
        for block in features.own_blocks():
            rows = features.read(block)
            total.add(rows.T @ rows)

    features.world.on_all_ranks(work)
    return total.value(features.world) / count
