"""How is a multinomial logistic regression solved, and how near is the solution to the optimum?

With an L2 penalty and no intercept, as in MSN's logistic_eval.py:175-187:

    f(W) = (1/n) sum_i CE(x_i W, y_i) + (lambda/2) ||W||_F^2

With intercepts, the last of the D columns of the features is 1, and its weights, the last row of W, are not penalised,
as in scikit-learn and cuML (cpp/src/glm/qn/glm_regularizer.cuh, reg_grad).

The solver is L-BFGS (Nocedal and Wright 2006, algorithm 7.4) with three changes:
- It works in the principal axes of the features, of which min(n, D) contain the optimum. The Hessian is nearly diagonal
  there, and an initial inverse Hessian from the spectrum reduces the steps on real features, at best to a tenth.
- It keeps the logits of all rows. So the line search needs no matrix product, and a step needs two: one with X, one
  with X^T.
- It uses float32 for as long as it makes progress, then float64. The gap is computed in float64 from the original
  features.

f is lambda-strongly convex, so f(W) - f* <= ||grad f(W)||^2 / (2 lambda): the gap, relative to f(W). If the
probabilities are taken as dual variables, the duality gap is the same number. For intercepts b, which have no penalty,
||grad_b f||^2 / (2 k lambda) is added: then f - f* exceeds the bound by (k lambda / 2) ||b - b*||^2 at most, and
k = INTERCEPT_SHARE makes that negligible against the penalty of the weights.

n rows, D width, C classes, R principal axes, B rows of a block.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from engine.rows import row_slices

HISTORY = 10  # pairs of steps and gradient changes in L-BFGS; 20 need as many iterations
# Added to the variance of each axis, in geometric means of all variances: the Hessian is flatter than the spectrum,
# because well-fitted rows contribute little curvature. Of 0 to 3 means or medians, this needed the fewest steps on
# digits and synthetic sets.
DAMPING = 3.0
INTERCEPT_SHARE = 1e-6  # of lambda, in the gap of the intercepts: their gradient must be a thousandth of the weights'
MAX_SLOPE_RATIO = 0.5  # a line search ends when the slope is at most this part of the first one
MAX_TRIALS = 40  # of a line search; one or two are usual
MAX_IDLE_ITERATIONS = 10  # without progress, before the solver gives up a precision
BLOCK_LOGITS = {"cpu": 1 << 20, "cuda": 1 << 26}  # computed at a time: on a CPU as many as fit its caches


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The solution of a fit."""

    weights: Tensor  # (D, C) float64
    objective: float  # f(W)
    gap: float  # upper bound of (f(W) - f*) / f(W)
    iterations: int


class Point(NamedTuple):
    """f and its derivatives at given weights."""

    weights: Tensor  # (R, C)
    objective: float
    gradient: Tensor  # (R, C)
    curvature: float  # mean of p (1 - p) over rows and classes
    gap: float
    margins: Tensor | None = None  # (n, C) of all rows, if they are kept


class LinePoint(NamedTuple):
    """f and its first two derivatives with respect to the step along a line."""

    value: float
    slope: float
    curvature: float


class Line(Protocol):
    """f along a direction from a starting point."""

    def at(self, step: float) -> LinePoint: ...
    def end(self, step: float) -> Point: ...  # the point at the step that `at` was last called with


class Objective(Protocol):
    """f in principal axes. Implementations differ in where the rows are: in memory, or read in blocks from a file."""

    @property
    def penalty(self) -> float: ...  # lambda
    @property
    def intercept(self) -> bool: ...  # the last row of the weights has no penalty
    @property
    def precision(self) -> float: ...  # relative rounding error of its matrix products

    def start(self, weights: Tensor) -> Point: ...  # (R, C)
    def line(self, start: Point, direction: Tensor) -> Line: ...  # (R, C)


def fit_lbfgs(
    features: Tensor,
    labels: Tensor,
    classes: int,
    penalty: float,
    *,
    tolerance: float = 1e-6,
    max_iterations: int = 1000,
    start: Tensor | None = None,
    intercept: bool = False,
) -> Fit:
    """Minimise f for features (n, D) and labels (n,) in 0..C-1.

    Ends when the gap is at most `tolerance`, after `max_iterations`, or when float64 allows no more progress; the
    caller checks the gap.

    Args:
        penalty: lambda.
        start: (D, C) initial weights; zeros if None.
        intercept: The last column of the features is 1, and its weights are not penalised.

    Raises: ValueError: For features that are not finite, labels out of range, fewer than two classes and a lambda of 0
        or less.
    """
    check_inputs(features, labels, classes, penalty)
    weights = features.new_zeros(features.shape[1], classes, dtype=torch.float64) if start is None else start

    def objective_in_axes(dtype: torch.dtype) -> tuple["MemoryObjective", Tensor, Tensor]:
        rows = features.to(dtype)
        if intercept:
            mean = rows[:, :-1].mean(dim=0)
            axes, spectrum = with_intercept(*principal_axes(rows[:, :-1] - mean), mean)
        else:
            axes, spectrum = principal_axes(rows)
        return MemoryObjective(rows @ axes, labels, penalty, intercept), axes, spectrum

    original = MemoryObjective(features, labels, penalty, intercept)
    return fit_in_axes(objective_in_axes, original.at, weights, tolerance, max_iterations)


def fit_in_axes(
    objective_in_axes: Callable[[torch.dtype], tuple[Objective, Tensor, Tensor]],
    point_at: Callable[[Tensor], Point],
    weights: Tensor,
    tolerance: float,
    max_iterations: int,
) -> Fit:
    """Minimise from weights (D, C) in float32, and then in float64 if the gap is still above `tolerance`.

    Args: objective_in_axes: Precision -> f in principal axes, the axes (D, R) and the spectrum (R, 1), as
        `principal_axes`. point_at: Weights (D, C) float64 -> f and its gap on the original features.
    """
    iterations = 0
    for dtype in (torch.float32, torch.float64):
        objective, axes, spectrum = objective_in_axes(dtype)
        start, remaining = along_axes(axes, weights.to(axes.dtype), objective.intercept), max_iterations - iterations
        solution, steps = lbfgs(objective, spectrum, start, 0.9 * tolerance, remaining)
        weights, iterations = axes.double() @ solution.double(), iterations + steps
        point = point_at(weights)
        if point.gap <= tolerance:
            break
    return Fit(weights=weights, objective=point.objective, gap=point.gap, iterations=iterations)


def certify(
    features: Tensor, labels: Tensor, weights: Tensor, penalty: float, intercept: bool = False
) -> tuple[float, float]:
    """f at weights (D, C) and its gap, computed in float64."""
    point = MemoryObjective(features, labels, penalty, intercept).at(weights.double())
    return point.objective, point.gap


def check_inputs(features: Tensor, labels: Tensor, classes: int, penalty: float) -> None:
    """ValueError for a problem without a solution."""
    check_labels_and_penalty(labels, classes, penalty)
    check_finite(features, 0)


def check_every_class(labels: Tensor, classes: int, solver: str) -> None:
    """ValueError if a class has no row in labels (n,), which a library's solver cannot fit."""
    if not (present := torch.bincount(labels, minlength=classes) > 0).all():
        absent = int((~present).nonzero()[0])
        raise ValueError(f"class {absent} has no training row, which {solver} cannot fit; use solver lbfgs")


def check_labels_and_penalty(labels: Tensor, classes: int, penalty: float) -> None:
    """ValueError for labels (n,), a number of classes or a lambda for which there is no solution."""
    if classes < 2:
        raise ValueError(f"{classes} classes: a classifier needs two or more")
    if not penalty > 0:
        raise ValueError(f"lambda={penalty}: give a number above 0, or the optimum may be infinitely far away")
    if labels.min() < 0 or labels.max() >= classes:
        labels_range = f"{int(labels.min())} to {int(labels.max())}"
        raise ValueError(
            f"labels run from {labels_range}, expected 0 to {classes - 1}; number the classes without gaps"
        )


def check_finite(features: Tensor, first: int) -> None:
    """ValueError for features (B, D) that are not finite. first: row number of the first one, for the message."""
    if not torch.isfinite(features).all():
        row = first + int((~torch.isfinite(features).all(dim=1)).nonzero()[0])
        raise ValueError(f"features of row {row} are not finite; check the checkpoint")


def principal_axes(features: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal axes (D, R) of features (n, D), R = min(n, D), and the mean squares along them (R, 1).

    Mean squares below the precision are raised to the smallest that it can represent relative to the largest.
    """
    count, width = features.shape
    if count < width:  # within the span of the rows: eigenvectors of 3072 x 3072 take 5 s, even for 10 rows
        basis = torch.linalg.qr(features.T).Q  # (D, n)
        axes, squares = principal_axes(features @ basis)
        return basis @ axes, squares
    return axes_of_moments(features.T @ features / count, features.dtype)


def axes_of_moments(moments: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`principal_axes` from the second moments X^T X / n (D, D) of features of this dtype."""
    squares, axes = torch.linalg.eigh(moments)  # ascending
    floor = squares[-1] * torch.finfo(dtype).eps
    return axes, squares[:, None].clamp(min=floor.item())


def with_intercept(axes: Tensor, spectrum: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Axes (D + 1, R + 1) of features with a last column of 1, and the spectrum (R + 1, 1).

    Along them the features are centred, so that the intercepts hardly depend on the weights. axes: (D, R) of the
    features without their mean (D,), with spectrum (R, 1).
    """
    extended = pad(torch.cat([axes, -(mean @ axes)[None]]), (0, 1))
    extended[-1, -1] = 1
    return extended, torch.cat([spectrum, torch.ones_like(spectrum[:1])])


def along_axes(axes: Tensor, weights: Tensor, intercept: bool) -> Tensor:
    """Weights (D, C) -> (R, C), whose product with `axes` they are."""
    if not intercept:
        return axes.T @ weights
    solution = axes[:-1].T @ weights[:-1]
    solution[-1] = weights[-1] - axes[-1, :-1] @ solution[:-1]
    return solution


def penalised(weights: Tensor, intercept: bool) -> Tensor:
    """The rows of weights (R, C) that have a penalty, a view."""
    return weights[:-1] if intercept else weights


@dataclass(frozen=True)
class MemoryObjective:
    """f for features (n, R) and labels (n,) in memory; computes in the weights' dtype.

    Margins (n, C) replace logits z: z_k - z_y for label y, and -inf for class y itself. With them the loss,
    log(1 + sum_k exp(z_k - z_y)) over the other classes, and 1 - p_y, the sum of their probabilities, stay accurate for
    rows that are fitted well.
    """

    features: Tensor
    labels: Tensor
    penalty: float
    intercept: bool = False  # the last feature is 1 along its own axis

    @property
    def precision(self) -> float:
        return torch.finfo(self.features.dtype).eps

    def start(self, weights: Tensor) -> Point:
        return self.at(weights, self.margins(weights))

    def line(self, start: Point, direction: Tensor) -> "MemoryLine":
        assert start.margins is not None  # lbfgs begins with `start`, whose points keep their margins
        return MemoryLine(self, start, start.margins, direction, self.margins(direction, at_label=0.0))

    def at(self, weights: Tensor, margins: Tensor | None = None) -> Point:
        """f at weights (R, C). margins: (n, C), if they are known."""
        loss = curvature = 0.0
        gradient = torch.zeros_like(weights)
        for rows in self.row_blocks(weights):
            block_margins = self.margins(weights, rows) if margins is None else margins[rows]
            features = self.features[rows].to(weights.dtype)
            block_loss, block_curvature = add_gradient(gradient, features, self.labels[rows], block_margins)
            loss, curvature = loss + block_loss, curvature + block_curvature
        point = point_from_sums(loss, gradient, curvature, len(self.labels), weights, self)
        return point._replace(margins=margins)

    def along(self, margins: Tensor, changes: Tensor, penalty: LinePoint, step: float) -> LinePoint:
        """f at `step` on a line.

        Args:
            margins: (n, C) at the start of the line.
            changes: (n, C) of the margins for a step of 1.
            penalty: (lambda/2) ||W||^2 and its derivatives at the start.
        """
        value = slope = curvature = 0.0
        for rows in self.row_blocks(margins):
            losses, others = probabilities(margins[rows] + step * changes[rows])
            weighted = others.mul_(changes[rows])
            means = weighted.sum(dim=1)  # of the changes under the probabilities
            value += losses.sum(dtype=torch.float64).item()
            slope += means.sum(dtype=torch.float64).item()
            curvature += (weighted.mul_(changes[rows]).sum() - means.square().sum()).item()
        count = len(self.labels)
        return LinePoint(
            value / count + penalty.value + step * (penalty.slope + step / 2 * penalty.curvature),
            slope / count + penalty.slope + step * penalty.curvature,
            curvature / count + penalty.curvature,
        )

    def margins(self, weights: Tensor, rows: slice = slice(None), at_label: float = -torch.inf) -> Tensor:
        """Margins (B, C) of `rows` under weights (R, C). at_label: value for the label's class; 0 for a direction."""
        return margins_of(self.features[rows].to(weights.dtype), self.labels[rows], weights, at_label)

    def row_blocks(self, logits: Tensor) -> Iterator[slice]:
        return row_slices(len(self.labels), rows_per_block(logits))


@dataclass(frozen=True)
class MemoryLine:
    """f along a direction. Evaluating it needs no matrix product."""

    objective: MemoryObjective
    start: Point
    margins: Tensor  # (n, C) at the start
    direction: Tensor  # (R, C)
    changes: Tensor  # (n, C) of the margins, for a step of 1

    @cached_property
    def penalty(self) -> LinePoint:
        """(lambda/2) ||W||^2 and its derivatives at the start."""
        weights, direction = (
            penalised(rows, self.objective.intercept) for rows in (self.start.weights, self.direction)
        )
        products = dot(weights, weights), dot(weights, direction), dot(direction, direction)
        value, slope, curvature = (self.objective.penalty * product for product in products)
        return LinePoint(value / 2, slope, curvature)

    def at(self, step: float) -> LinePoint:
        return self.objective.along(self.margins, self.changes, self.penalty, step)

    def end(self, step: float) -> Point:
        weights = self.start.weights + step * self.direction
        margins = self.margins.add_(self.changes, alpha=step)  # in place: the start is not needed any more
        return self.objective.at(weights, margins)


def rows_per_block(logits: Tensor) -> int:
    """Number of rows whose logits are computed at a time. logits: a tensor (_, C) on their device."""
    return max(1, BLOCK_LOGITS.get(logits.device.type, BLOCK_LOGITS["cpu"]) // logits.shape[1])


def margins_of(features: Tensor, labels: Tensor, weights: Tensor, at_label: float = -torch.inf) -> Tensor:
    """Margins (B, C) of features (B, R) under weights (R, C) of the same dtype."""
    logits, own = features @ weights, labels[:, None]
    return logits.sub_(logits.gather(1, own)).scatter_(1, own, at_label)


def probabilities(margins: Tensor) -> tuple[Tensor, Tensor]:
    """Margins (B, C) -> cross-entropies (B,) and the probabilities (B, C) of the other classes, 0 for the label's."""
    losses = softplus(margins.logsumexp(dim=1))
    return losses, (margins - losses[:, None]).exp_()


def add_gradient(gradient: Tensor, features: Tensor, labels: Tensor, margins: Tensor) -> tuple[float, float]:
    """Add X^T (p - y) of a block of features (B, R) with margins (B, C) to `gradient` (R, C).

    Returns the block's sums of cross-entropies and of p (1 - p).
    """
    losses, others = probabilities(margins)
    label_errors = others.sum(dim=1, keepdim=True)  # 1 - p_y
    curvature = (others.sum() - others.square().sum() + (label_errors - label_errors.square()).sum()).item()
    gradient.addmm_(features.T, others.scatter_(1, labels[:, None], -label_errors))
    return losses.sum(dtype=torch.float64).item(), curvature


def point_from_sums(
    loss: float, gradient: Tensor, curvature: float, count: int, weights: Tensor, objective: Objective
) -> Point:
    """The point at weights (R, C), from sums of losses, gradients (R, C; overwritten) and p (1 - p) over `count`
    rows."""
    slopes, shrunk = (penalised(rows, objective.intercept) for rows in (gradient.div_(count), weights))
    slopes.add_(shrunk, alpha=objective.penalty)
    value, squares = loss / count + objective.penalty / 2 * dot(shrunk, shrunk), dot(slopes, slopes)
    if objective.intercept:
        squares += dot(gradient[-1], gradient[-1]) / INTERCEPT_SHARE
    gap = squares / (2 * objective.penalty) / value
    return Point(weights, value, gradient, curvature / (count * weights.shape[1]), gap)


def lbfgs(
    objective: Objective, spectrum: Tensor, weights: Tensor, tolerance: float, max_iterations: int
) -> tuple[Tensor, int]:
    """Minimise from weights (R, C) until the gap is at most `tolerance`, or the precision allows no more progress.

    spectrum: (R, 1) mean squares of the features along their axes. Returns weights (R, C) and the number of steps.
    """
    point = objective.start(weights)
    history: deque[tuple[Tensor, Tensor, float]] = deque(maxlen=HISTORY)  # s, y and s^T y, from the oldest
    penalties = torch.full_like(spectrum, objective.penalty)
    penalties[len(penalties) - objective.intercept :] = 0
    damped_spectrum = spectrum + DAMPING * spectrum.log().mean().exp()
    smallest_gap, idle = point.gap, 0
    for iteration in range(max_iterations):
        if point.gap <= tolerance or idle == MAX_IDLE_ITERATIONS:
            return point.weights, iteration
        before = point
        inverse_hessian = 1 / (before.curvature * damped_spectrum + penalties)
        direction = two_loop_recursion(before.gradient, history, inverse_hessian)
        line = objective.line(before, direction)
        step = line_search(line, dot(before.gradient, direction), before.objective, objective.precision)
        if step is None:
            return point.weights, iteration
        point = line.end(step)
        s, y = step * direction, point.gradient - before.gradient
        if (product := dot(s, y)) > 0:
            history.append((s, y, product))
        is_lower = before.objective - point.objective > objective.precision * point.objective
        is_idle = not (is_lower or point.gap < 0.9 * smallest_gap)
        smallest_gap, idle = min(smallest_gap, point.gap), idle + 1 if is_idle else 0
    return point.weights, max_iterations


def two_loop_recursion(
    gradient: Tensor, history: deque[tuple[Tensor, Tensor, float]], inverse_hessian: Tensor
) -> Tensor:
    """The quasi-Newton direction (R, C) (Nocedal and Wright 2006, algorithm 7.4).

    Args: gradient: (R, C). history: Steps s (R, C), gradient changes y (R, C) and s^T y, from the oldest.
        inverse_hessian: (R, 1) diagonal of the initial inverse Hessian, up to a factor, which the newest pair
        determines.
    """
    direction = -gradient
    alphas = []
    for s, y, product in reversed(history):
        alphas.append(dot(s, direction) / product)
        direction.sub_(y, alpha=alphas[-1])
    direction *= inverse_hessian
    if history:
        _, y, product = history[-1]
        direction *= product / dot(y, inverse_hessian * y)
    for (s, y, product), alpha in zip(history, reversed(alphas), strict=True):
        direction.add_(s, alpha=alpha - dot(y, direction) / product)
    return direction


def line_search(line: Line, slope: float, objective: float, precision: float) -> float | None:
    """A step at which the slope is at most half as steep and f has not grown beyond rounding; None if rounding hides
    it.

    Newton's method on the slope within a bracket. f may grow by rounding errors as in Hager and Zhang 2005 (section
    4.1): a strict test would fail close to the optimum.

    slope, objective: at the start of the line. precision: relative rounding error of f.
    """
    if not slope < 0:
        return None
    max_value = objective * (1 + 10 * precision)
    low, high, step = 0.0, float("inf"), 1.0
    for _ in range(MAX_TRIALS):
        point = line.at(step)
        if abs(point.slope) <= MAX_SLOPE_RATIO * abs(slope) and point.value <= max_value:
            return step
        low, high = (step, high) if point.slope < 0 else (low, step)
        next_step = step - point.slope / point.curvature if point.curvature > 0 else float("inf")  # Newton's
        next_step = min(next_step, 10 * step)
        if not low < next_step < high:
            next_step = (low + high) / 2 if high < float("inf") else 2 * step
        step = next_step
    return None


def dot(one: Tensor, other: Tensor) -> float:
    """Sum of the products of the elements of two tensors of the same shape."""
    return torch.dot(one.flatten(), other.flatten()).item()
