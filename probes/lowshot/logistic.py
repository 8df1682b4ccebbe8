"""Multinomial logistic regression with an L2 penalty and no intercept, solved to a certified gap.

    f(W) = (1/n) sum_i CE(x_i W, y_i) + (lambda/2) ||W||_F^2        the objective of MSN's logistic_eval.py:175-187

The solver is L-BFGS (Nocedal and Wright 2006, algorithm 7.4) in three steps of its own:
- In the features' principal axes, of which min(n, D) hold the optimum, and in which the Hessian is nearly diagonal: an
  initial inverse Hessian from the spectrum takes down to a tenth of the steps on real features.
- Logits are carried along: a line search needs no matrix product, so that a step costs two, one with X, one with X^T.
- float32 as far as it leads, then float64; the gap is certified in float64 on the features as given.
f is lambda-strongly convex, so f(W) - f* <= ||grad f(W)||^2 / (2 lambda). With the probabilities as dual variables the
duality gap is this same number, so one test serves both.

n rows, D width, C classes, R principal axes kept.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import softplus

from engine.rows import row_slices

HISTORY = 10  # pairs of steps and gradient changes; 20 need as many iterations
# Geometric means of the variances, added to each in the initial Hessian, which is flatter than the spectrum since rows
# that are fitted hardly curve it. Of 0 to 3 means or medians, too, this took fewest steps on digits and synthetic sets.
DAMPING = 3.0
FLATTER = 0.5  # a step is long enough when the slope along it has halved
TRIALS = 40  # of a line search; one or two are the rule
PATIENCE = 10  # iterations without progress before a precision is given up
BLOCK = {"cpu": 1 << 20, "cuda": 1 << 26}  # logits handled at once: on a CPU what its caches hold


@dataclass(frozen=True, kw_only=True)
class Fit:
    """weights: (D, C) float64. objective: f(W). gap: certified bound of (f(W) - f*) / f(W). iterations: steps taken."""

    weights: Tensor
    objective: float
    gap: float
    iterations: int


class Point(NamedTuple):
    """Where a descent stands. weights, gradient: (R, C). curvature: mean of p(1 - p) over rows and classes. margins:
    (n, C) of the rows, where they are carried along."""

    weights: Tensor
    objective: float
    gradient: Tensor
    curvature: float
    gap: float
    margins: Tensor | None = None


class Along(NamedTuple):
    """f and its first two derivatives along a line."""

    value: float
    slope: float
    curvature: float


def fit_lbfgs(
    features: Tensor,
    labels: Tensor,
    classes: int,
    penalty: float,
    *,
    tolerance: float = 1e-6,
    max_iterations: int = 1000,
    start: Tensor | None = None,
) -> Fit:
    """Minimise f for features (n, D) and labels (n,) in 0..C-1. penalty: lambda. start: (D, C), zeros unless given.

    Ends when the certified gap is at most `tolerance`, when `max_iterations` are spent, or when float64 has no more
    digits to give; the caller looks at `gap`. ValueError for features that are not finite and labels out of range.
    """
    check_solvable(features, labels, classes, penalty)
    weights = features.new_zeros(features.shape[1], classes, dtype=torch.float64) if start is None else start

    def in_axes(dtype: torch.dtype) -> tuple["Problem", Tensor, Tensor]:
        rows = features.to(dtype)
        axes, spectrum = principal_axes(rows)
        return Problem(rows @ axes, labels, penalty), axes, spectrum

    return fit(in_axes, Problem(features, labels, penalty).at, weights, tolerance, max_iterations)


def fit(
    in_axes: "Callable[[torch.dtype], tuple[Objective, Tensor, Tensor]]",
    at: Callable[[Tensor], Point],
    weights: Tensor,
    tolerance: float,
    max_iterations: int,
) -> Fit:
    """Descend from weights (D, C) in float32, and on in float64 where the gap is still above `tolerance`.

    in_axes: precision -> f in the principal axes, these (D, R), and the mean squares along them (R, 1). at: where
    weights (D, C) float64 stand on the features as given.
    """
    iterations = 0
    for dtype in (torch.float32, torch.float64):
        problem, axes, spectrum = in_axes(dtype)
        begin, remaining = axes.T @ weights.to(axes.dtype), max_iterations - iterations
        solution, spent = descend(problem, spectrum, begin, 0.9 * tolerance, remaining)
        weights, iterations = axes.double() @ solution.double(), iterations + spent
        point = at(weights)
        if point.gap <= tolerance:
            break
    return Fit(weights=weights, objective=point.objective, gap=point.gap, iterations=iterations)


def certified(features: Tensor, labels: Tensor, weights: Tensor, penalty: float) -> tuple[float, float]:
    """f at weights (D, C), and the bound of its distance to the optimum relative to it; computed in float64."""
    point = Problem(features, labels, penalty).at(weights.double())
    return point.objective, point.gap


def check_solvable(features: Tensor, labels: Tensor, classes: int, penalty: float) -> None:
    """ValueError for what has no solution."""
    check_posed(labels, classes, penalty)
    check_rows(features, 0)


def check_posed(labels: Tensor, classes: int, penalty: float) -> None:
    """ValueError for labels (n,), a number of classes or a lambda that have no solution."""
    if classes < 2:
        raise ValueError(f"{classes} classes: a classifier needs two or more")
    if not penalty > 0:
        raise ValueError(f"lambda={penalty}: give a number above 0, or the optimum may be infinitely far away")
    if labels.min() < 0 or labels.max() >= classes:
        labels_range = f"{int(labels.min())} to {int(labels.max())}"
        raise ValueError(
            f"labels run from {labels_range}, expected 0 to {classes - 1}; number the classes without gaps"
        )


def check_rows(features: Tensor, first: int) -> None:
    """ValueError for features (B, D) that are not finite; the first one is row number `first`."""
    if not torch.isfinite(features).all():
        row = first + int((~torch.isfinite(features).all(dim=1)).nonzero()[0])
        raise ValueError(f"features of row {row} are not finite; check the checkpoint")


def principal_axes(features: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal axes (D, R) of features (n, D), R = min(n, D), and the mean squares along them (R, 1).

    Beyond n axes there is nothing. Mean squares too small for the precision count as the smallest that it can tell.
    """
    count, width = features.shape
    if count < width:  # within what the rows span: 3072 x 3072 has 5 s of eigenvectors for the sake of 10 rows
        basis = torch.linalg.qr(features.T).Q  # (D, n)
        axes, squares = principal_axes(features @ basis)
        return basis @ axes, squares
    return axes_of(features.T @ features / count, features.dtype)


def axes_of(moments: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same of second moments X^T X / n (D, D), for features of this dtype."""
    squares, axes = torch.linalg.eigh(moments)  # ascending
    floor = squares[-1] * torch.finfo(dtype).eps
    return axes, squares[:, None].clamp(min=floor.item())


@dataclass(frozen=True)
class Problem:
    """f for features (n, R); computes in the weights' dtype.

    Margins (n, C) stand for logits: z_k - z_y, and -inf at the label itself. So the loss, log(1 + sum_k exp(z_k - z_y))
    over the other classes, and 1 - p_y, their probabilities' sum, keep their digits when a row is fitted well.
    """

    features: Tensor
    labels: Tensor
    penalty: float

    def margins(self, weights: Tensor, rows: slice = slice(None), at_label: float = -torch.inf) -> Tensor:
        """Margins of `rows` under weights (R, C); `at_label` is 0 for those of a direction."""
        return margins_of(self.features[rows].to(weights.dtype), self.labels[rows], weights, at_label)

    def at(self, weights: Tensor, margins: Tensor | None = None) -> Point:
        """Where weights (R, C) stand; from `margins` (n, C), which are carried along, when they are known."""
        loss = curvature = 0.0
        gradient = torch.zeros_like(weights)
        for rows in self.blocks(weights):
            margin = self.margins(weights, rows) if margins is None else margins[rows]
            here = add_gradient(gradient, self.features[rows].to(weights.dtype), self.labels[rows], margin)
            loss, curvature = loss + here[0], curvature + here[1]
        return point_of(loss, gradient, curvature, len(self.labels), weights, self.penalty)._replace(margins=margins)

    def along(self, margins: Tensor, changes: Tensor, penalty: Along, step: float) -> Along:
        """f at `step` on the line where margins move by `changes` and the penalty is `penalty` at 0."""
        value = slope = curvature = 0.0
        for rows in self.blocks(margins):
            losses, others = probabilities(margins[rows] + step * changes[rows])
            moving = others.mul_(changes[rows])
            mean = moving.sum(dim=1)
            value += losses.sum(dtype=torch.float64).item()
            slope += mean.sum(dtype=torch.float64).item()
            curvature += (moving.mul_(changes[rows]).sum() - mean.square().sum()).item()
        count = len(self.labels)
        return Along(
            value / count + penalty.value + step * (penalty.slope + step / 2 * penalty.curvature),
            slope / count + penalty.slope + step * penalty.curvature,
            curvature / count + penalty.curvature,
        )

    def start(self, weights: Tensor) -> Point:
        return self.at(weights, self.margins(weights))

    def line(self, start: Point, direction: Tensor) -> "CarriedLine":
        assert start.margins is not None  # descend begins with `start`
        return CarriedLine(self, start, start.margins, direction, self.margins(direction, at_label=0.0))

    @property
    def precision(self) -> float:
        return torch.finfo(self.features.dtype).eps

    def blocks(self, like: Tensor) -> Iterator[slice]:
        return row_slices(len(self.labels), rows_of_block(like))


def rows_of_block(like: Tensor) -> int:
    """How many rows' logits are handled at once, of the shape and on the device of `like` (_, C)."""
    return max(1, BLOCK.get(like.device.type, BLOCK["cpu"]) // like.shape[1])


def margins_of(features: Tensor, labels: Tensor, weights: Tensor, at_label: float = -torch.inf) -> Tensor:
    """Margins (B, C) of features (B, R) under weights (R, C), of one dtype."""
    logits, own = features @ weights, labels[:, None]
    return logits.sub_(logits.gather(1, own)).scatter_(1, own, at_label)


def add_gradient(gradient: Tensor, features: Tensor, labels: Tensor, margins: Tensor) -> tuple[float, float]:
    """Add X^T (p - y) of a block of features (B, R) with these margins (B, C) to `gradient` (R, C).

    Returns the sums of its cross-entropies and of p(1 - p).
    """
    losses, others = probabilities(margins)
    wrong = others.sum(dim=1, keepdim=True)
    curvature = (others.sum() - others.square().sum() + (wrong - wrong.square()).sum()).item()
    gradient.addmm_(features.T, others.scatter_(1, labels[:, None], -wrong))
    return losses.sum(dtype=torch.float64).item(), curvature


def point_of(loss: float, gradient: Tensor, curvature: float, count: int, weights: Tensor, penalty: float) -> Point:
    """The point at weights (R, C), from sums over `count` rows; `gradient` (R, C) is divided in place."""
    gradient.div_(count).add_(weights, alpha=penalty)
    objective = loss / count + penalty / 2 * dot(weights, weights)
    gap = dot(gradient, gradient) / (2 * penalty) / objective
    return Point(weights, objective, gradient, curvature / (count * weights.shape[1]), gap)


def probabilities(margins: Tensor) -> tuple[Tensor, Tensor]:
    """Margins (B, C) -> cross-entropies (B,) and the probabilities of the classes other than the label (B, C)."""
    losses = softplus(margins.logsumexp(dim=1))
    return losses, (margins - losses[:, None]).exp_()


class Line(Protocol):
    """The points from where a descent stands along a direction."""

    def at(self, step: float) -> Along: ...
    def end(self, step: float) -> Point: ...  # there, for the step that `at` was last asked for


class Objective(Protocol):
    """f, however its rows are read."""

    @property
    def penalty(self) -> float: ...
    @property
    def precision(self) -> float: ...  # relative, of its matrix products

    def start(self, weights: Tensor) -> Point: ...  # (R, C)
    def line(self, start: Point, direction: Tensor) -> Line: ...


@dataclass(frozen=True)
class CarriedLine:
    """What `changes` (n, C) of the margins make of f; no step along it costs a product."""

    problem: Problem
    start: Point
    margins: Tensor
    direction: Tensor
    changes: Tensor

    @cached_property
    def penalty(self) -> Along:
        weights, direction = self.start.weights, self.direction
        squares = [dot(one, other) for one, other in ((weights, weights), (weights, direction), (direction, direction))]
        value, slope, curvature = (self.problem.penalty * square for square in squares)
        return Along(value / 2, slope, curvature)

    def at(self, step: float) -> Along:
        return self.problem.along(self.margins, self.changes, self.penalty, step)

    def end(self, step: float) -> Point:
        weights = self.start.weights + step * self.direction
        return self.problem.at(weights, self.margins.add_(self.changes, alpha=step))  # the start needs them no more


def descend(
    problem: Objective, spectrum: Tensor, weights: Tensor, tolerance: float, max_iterations: int
) -> tuple[Tensor, int]:
    """L-BFGS from weights (R, C) until the gap is met, iterations are spent or the precision gives no more.

    spectrum: (R, 1) mean squares of the features along their axes. Returns weights and the number of steps.
    """
    point = problem.start(weights)
    history: deque[tuple[Tensor, Tensor, float]] = deque(maxlen=HISTORY)
    damped = spectrum + DAMPING * spectrum.log().mean().exp()
    smallest, idle = point.gap, 0
    for iteration in range(max_iterations):
        if point.gap <= tolerance or idle == PATIENCE:
            return point.weights, iteration
        before = point
        scale = 1 / (before.curvature * damped + problem.penalty)
        direction = quasi_newton(before.gradient, history, scale)
        line = problem.line(before, direction)
        step = line_search(line, dot(before.gradient, direction), before.objective, problem.precision)
        if step is None:
            return point.weights, iteration
        point = line.end(step)
        moved, turned = step * direction, point.gradient - before.gradient
        if (product := dot(moved, turned)) > 0:
            history.append((moved, turned, product))
        gained = before.objective - point.objective > problem.precision * point.objective
        worked = gained or point.gap < 0.9 * smallest
        smallest, idle = min(smallest, point.gap), 0 if worked else idle + 1
    return point.weights, max_iterations


def quasi_newton(gradient: Tensor, history: deque[tuple[Tensor, Tensor, float]], scale: Tensor) -> Tensor:
    """Direction (R, C): minus the inverse Hessian, as `history` and the diagonal `scale` have it, times gradient."""
    direction = -gradient
    shares = []
    for moved, turned, product in reversed(history):
        shares.append(dot(moved, direction) / product)
        direction.sub_(turned, alpha=shares[-1])
    direction *= scale
    if history:
        _, turned, product = history[-1]
        direction *= product / dot(turned, scale * turned)
    for (moved, turned, product), share in zip(history, reversed(shares), strict=True):
        direction.add_(moved, alpha=share - dot(turned, direction) / product)
    return direction


def line_search(line: Line, slope: float, objective: float, precision: float) -> float | None:
    """A step along which the slope has halved and f has not grown beyond rounding; None when rounding hides any.

    slope, objective: at the beginning. Newton's method on the slope, held in a bracket. The tolerance on f is that of
    Hager and Zhang 2005 (section 4.1): a strict test would fail for ever close to the optimum.
    """
    if not slope < 0:
        return None
    highest = objective * (1 + 10 * precision)
    low, high, step = 0.0, float("inf"), 1.0
    for _ in range(TRIALS):
        here = line.at(step)
        if abs(here.slope) <= FLATTER * abs(slope) and here.value <= highest:
            return step
        low, high = (step, high) if here.slope < 0 else (low, step)
        guess = step - here.slope / here.curvature if here.curvature > 0 else float("inf")
        guess = min(guess, 10 * step)
        step = guess if low < guess < high else (low + high) / 2 if high < float("inf") else 2 * step
    return None


def dot(one: Tensor, other: Tensor) -> float:
    """Sum of products of two tensors of one shape."""
    return torch.dot(one.flatten(), other.flatten()).item()
