"""Logistic regressions on prepared features: fit rows, select lambda, evaluate on the validation images.

The sources' lambda means different things: iBOT takes it as the coefficient of 0.5 ||W||^2 against the mean loss, MSN,
MOCA and (as 1 / C) DINOv2 divide it by n first. Undivided, 0.1 fits nothing, and accuracy alone does not show it; so
every fit records both numbers and its certified gap, and warns where nothing was fitted.

n training rows, D width, C classes, V validation images.

The processes of a run share the fits of several subsets and lambdas by units, a subset with a chain of lambdas each.
All processes together make a large one, which they share by rows; each of the others is made by one process. Who makes
what changes no number.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.distributed import World
from engine.progress import Progress
from engine.settings import BelowOne, OneOrMoreDifferent, PositiveFloat, PositiveInt, Validated
from imagesets.selection import quotas, stratified_sample
from probes.lowshot import cyanure_solver, logistic
from probes.lowshot.blocks import BlockedRows, PreparedRows, fit_in_blocks
from probes.scores import class_mean

Solver = Literal["lbfgs", "cyanure"]
# What minimises, to which certified relative gap, in how many iterations at most. MSN and MOCA give cyanure 1e-3 and
# 300 epochs (logistic_eval.py:175-187).
SOLVERS: Mapping[Solver, tuple[Callable[..., logistic.Fit], float, int]] = {
    "lbfgs": (logistic.fit_lbfgs, 1e-6, 5000),
    "cyanure": (cyanure_solver.fit_cyanure, 1e-3, 300),
}
# Rows times classes, or times D where that is more, up to which a fit holds its rows and logits in memory: at 16 bytes
# for each of both kinds 0.5 GB. 1 % of ImageNet is below, 10 % above.
IN_MEMORY = 1 << 24
CHAIN = 5  # lambdas whose fits begin with the weights of the one before; fixed, so that processes can share the others
UNFITTED = 0.9  # of ln C, the objective at W = 0


@dataclass(frozen=True, kw_only=True)
class FitSettings(Validated):
    """How every subset is fitted."""

    lambdas: OneOrMoreDifferent[PositiveFloat] = (0.1,)  # weights of the penalty, as the source writes them
    # How a lambda becomes the coefficient of 0.5 ||W||^2 against the mean loss: divided by the number n of training
    # images, or as it is.
    lambda_convention: Literal["divided by n", "as is"] = "divided by n"
    # Share of the training images that chooses among the lambdas, of which one is then fitted to all images and
    # reported; 0: every lambda is reported.
    holdout: BelowOne = 0.0
    solver: Solver = "lbfgs"  # library that minimises: ours, or cyanure as in the source
    tolerance: PositiveFloat | None = None  # certified relative gap to stop at; none: the solver's own
    max_iterations: PositiveInt | None = None  # of a fit, epochs for cyanure; none: the solver's own

    @property
    def gap_allowed(self) -> float:
        return SOLVERS[self.solver][1] if self.tolerance is None else self.tolerance

    @property
    def iterations_allowed(self) -> int:
        return self.max_iterations or SOLVERS[self.solver][2]

    def effective(self, raw: float, count: int) -> float:
        """Coefficient of 0.5 ||W||^2 against the mean loss of `count` images, for a lambda."""
        return raw / count if self.lambda_convention == "divided by n" else raw


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """One fit and how it does.

    correct: (V,) bool. predicted: (V,) int32. confidence: the probability of these classes, (V,) float32. nll: minus
    the logarithm of the true classes' probability, (V,) float32. record: JSON values about it. warning: why to doubt
    it, or empty.
    """

    raw: float
    correct: np.ndarray
    predicted: np.ndarray
    confidence: np.ndarray
    nll: np.ndarray
    record: Mapping[str, Any]
    warning: str


class Tried(NamedTuple):
    """A lambda tried on held-out rows. top1, per_class (mean over the classes): accuracies in percent."""

    raw: float
    top1: float
    per_class: float
    gap: float
    iterations: int

    @property
    def record(self) -> dict[str, float]:
        return {"lambda": self.raw, "top1": self.top1, "per_class": self.per_class, "gap": self.gap}


@dataclass(frozen=True, kw_only=True)
class Fitter:
    """Settings of the fits, and what they work on.

    train (N, D), val (V, D): prepared features in their files. labels (N,), val_labels (V,): int64 in 0..C-1.
    per_class: whether held-out rows select lambda by the mean of the accuracies in each class, else by top-1 accuracy
    (dinov2 eval/log_regression.py:328).
    Where `is_large` says so, the rows of a fit stay in their file (probes/lowshot/blocks.py), and the processes of the
    world given share them; any other fit is one process's own, with its rows in memory.
    """

    settings: FitSettings
    train: PreparedRows
    labels: np.ndarray
    val: PreparedRows
    val_labels: np.ndarray
    classes: int
    seed: int
    per_class: bool = False

    def is_large(self, count: int) -> bool:
        """Whether a fit of `count` rows is made in blocks. Decided by sizes alone, so that numbers do not depend on the
        machine."""
        return self.settings.solver == "lbfgs" and count * max(self.classes, self.train.width) > IN_MEMORY

    def chains(self) -> list[Sequence[float]]:
        """The lambdas, a few at a time: those whose fits begin where the one before ended."""
        lambdas = self.settings.lambdas
        return [lambdas[start : start + CHAIN] for start in range(0, len(lambdas), CHAIN)]

    def fit(
        self, name: str, rows: np.ndarray, lambdas: Sequence[float], tried: Sequence[Tried], world: World
    ) -> list[Fitted]:
        """A fit of some rows for every lambda. tried: what selected them, for the record.

        Raises ValueError, beginning with `name`, where the certified gap is above tolerance.
        """
        fits, weights = [], None
        for raw in lambdas:
            fit = self.minimised(rows, raw, weights, world)
            self.demand(name, raw, len(rows), fit.gap, fit.iterations)
            fits.append(self.evaluated(rows, raw, fit, tried, world))
            weights = fit.weights
        return fits

    def try_out(self, name: str, rows: np.ndarray, lambdas: Sequence[float], world: World) -> list[Tried]:
        """How fits of some rows, but for a share of each class, do on that share. Gaps are recorded, not demanded."""
        counts = np.bincount(self.labels[rows], minlength=self.classes)
        total = round(self.settings.holdout * len(rows))
        shares = quotas(counts, total)
        if (shares >= counts).any():  # not always: equal shares of other classes would change with these bounds
            shares = quotas(counts - 1, total)
        if not shares.any():
            raise ValueError(
                f"{name}: holding out {self.settings.holdout:g} of {len(rows)} images leaves nothing to choose lambda "
                "by; --set lowshot.holdout=0, or use more images"
            )
        held = np.zeros(len(rows), bool)
        held[stratified_sample(self.labels[rows], shares, self.seed)] = True
        tried, weights = [], None
        for raw in lambdas:
            fit = self.minimised(rows[~held], raw, weights, world)
            weights = fit.weights
            right = self.right(rows[held], weights, world)
            of_classes = class_mean(right, self.labels[rows[held]])
            tried.append(Tried(raw, 100.0 * float(right.mean()), of_classes, fit.gap, fit.iterations))
        return tried

    def choose(self, name: str, rows: np.ndarray, tried: Sequence[Tried]) -> float:
        """The lambda that did best on held-out rows, the first of equals; fits above tolerance are not chosen."""
        certain = [entry for entry in tried if entry.gap <= self.settings.gap_allowed]
        if not certain:
            self.demand(name, tried[-1].raw, len(rows), tried[-1].gap, tried[-1].iterations)
        return max(certain, key=lambda entry: entry.per_class if self.per_class else entry.top1).raw

    def minimised(self, rows: np.ndarray, raw: float, start: Tensor | None, world: World) -> logistic.Fit:
        """The fit of some rows, begun from `start` (D, C) by the solver that can; the caller checks its gap."""
        settings, labels = self.settings, torch.from_numpy(self.labels[rows]).to(self.train.device)
        penalty, gap, most = settings.effective(raw, len(rows)), settings.gap_allowed, settings.iterations_allowed
        if self.is_large(len(rows)):
            blocks = BlockedRows(source=self.train, rows=rows, labels=labels, world=world)
            return fit_in_blocks(blocks, self.classes, penalty, tolerance=gap, max_iterations=most, start=start)
        begin = {"start": start} if settings.solver == "lbfgs" else {}
        minimise, features = SOLVERS[settings.solver][0], self.train.read(rows)
        return minimise(features, labels, self.classes, penalty, tolerance=gap, max_iterations=most, **begin)

    def right(self, rows: np.ndarray, weights: Tensor, world: World) -> np.ndarray:
        """Which of some training rows weights (D, C) get right (n,) bool; the processes share them."""
        bounds = [rank * len(rows) // world.size for rank in range(world.size + 1)]
        own = rows[bounds[world.rank] : bounds[world.rank + 1]]

        def work() -> np.ndarray:
            # A loop's variable would keep one piece while the next is read.
            guesses = map(lambda features: predictions(features, weights), self.train.pieces(own))
            return np.concatenate([np.empty(0, np.int64), *guesses]) == self.labels[own]

        return np.concatenate(world.gather_results(work))

    def demand(self, name: str, raw: float, count: int, gap: float, iterations: int) -> None:
        """ValueError for a fit that is not certified to be near the optimum: no number comes of it."""
        settings = self.settings
        if not gap <= settings.gap_allowed:
            raise ValueError(
                f"{name}: the optimum for lambda {raw:g} ({settings.effective(raw, count):.3g} against the mean loss) "
                f"was not reached: gap {gap:.1e} after {iterations} iterations of {settings.solver}, "
                f"{settings.gap_allowed:.0e} asked; raise --set lowshot.max_iterations=N, or lambdas"
            )

    def evaluated(
        self, rows: np.ndarray, raw: float, fit: logistic.Fit, tried: Sequence[Tried], world: World
    ) -> Fitted:
        """Accuracy of a fit, and what it rests on."""
        predicted, confidence, nll = judged(self.val, self.val_labels, fit.weights)
        correct = predicted == self.val_labels
        fitted = self.right(rows, fit.weights, world)
        record: dict[str, Any] = {
            "images": len(rows),
            "lambda": raw,
            "lambda_convention": self.settings.lambda_convention,
            "lambda_effective": self.settings.effective(raw, len(rows)),
            "objective": fit.objective,
            "gap": fit.gap,
            "iterations": fit.iterations,
            "train_top1": 100.0 * float(fitted.mean()),
            "top1": 100.0 * float(correct.mean()),
        }
        record |= {"holdout": [entry.record for entry in tried]} if tried else {}
        return Fitted(
            raw=raw,
            correct=correct,
            predicted=predicted.astype(np.int32),
            confidence=confidence,
            nll=nll,
            record=record,
            warning=self.doubt(raw, len(rows), fit.objective),
        )

    def doubt(self, raw: float, count: int, objective: float) -> str:
        """Why this is not a fit, or nothing."""
        untouched = math.log(self.classes)
        if objective <= UNFITTED * untouched:
            return ""
        convention, penalty = self.settings.lambda_convention, self.settings.effective(raw, count)
        remedy = "; MSN and MOCA divide lambda by n" if convention == "as is" else ""
        return (
            f"nothing was fitted: the objective ends at {objective:.4f} and began at ln {self.classes} = "
            f"{untouched:.4f}; lambda {raw:g}, {convention}, is {penalty:.3g} against the mean loss, too much for "
            f"these features{remedy}"
        )


def judged(source: PreparedRows, labels: np.ndarray, weights: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What weights (D, C) say of all rows of features, whose labels are (n,): the classes (n,) that score highest, the
    probabilities of these (n,) float32, and minus the logarithms of the labels' probabilities (n,) float32.

    Unlike `hits_of`, which ranks five classes, it gives the first of equal ones, as all are for a row of zeros.
    """
    parts, end = [], 0
    for features in source.pieces(np.arange(len(source))):
        start, end = end, end + len(features)
        logits = features @ weights.to(features.device, features.dtype)
        chosen, total = logits.argmax(dim=1, keepdim=True), logits.logsumexp(dim=1, keepdim=True)
        own = torch.from_numpy(labels[start:end]).to(logits.device)[:, None]
        sure, nll = (logits.gather(1, chosen) - total).exp().float(), (total - logits.gather(1, own)).float()
        parts.append((chosen.squeeze(1), sure.squeeze(1), nll.squeeze(1)))
    predicted, confidence, nll = (torch.cat(part).cpu().numpy() for part in zip(*parts, strict=True))
    return predicted, confidence, nll


def predictions(features: Tensor, weights: Tensor) -> np.ndarray:
    """Classes (N,) that score highest for features (N, D) under weights (D, C)."""
    weights = weights.to(features.device, features.dtype)
    return (features @ weights).argmax(dim=1).cpu().numpy()


Trial = TypeVar("Trial")
Result = TypeVar("Result")


class Unit(NamedTuple):
    """Work on one subset. part: its number."""

    part: int
    lambdas: Sequence[float]


def fits_of_subsets(
    fitter: Fitter, names: Sequence[str], rows: Sequence[np.ndarray], world: World
) -> list[list[Fitted]]:
    """For every subset, called by a name and given by its rows (n,): a fit for every lambda, or for the best one.

    All processes call it and get the same. ValueError for a fit that is not certified, as in Fitter.
    """
    return shared_fits(
        fitter,
        rows,
        world,
        lambda unit, team: fitter.try_out(names[unit.part], rows[unit.part], unit.lambdas, team),
        lambda tried: [fitter.choose(*subset) for subset in zip(names, rows, tried, strict=True)],
        lambda unit, tried, team: fitter.fit(names[unit.part], rows[unit.part], unit.lambdas, tried, team),
    )


def shared_fits(
    fitter: Fitter,
    rows: Sequence[np.ndarray],
    world: World,
    try_out: Callable[[Unit, World], list[Trial]],
    choose: Callable[[list[list[Trial]]], Sequence[float]],
    fit: Callable[[Unit, list[Trial], World], list[Result]],
) -> list[list[Result]]:
    """The fits of each subset of rows (n,), of every lambda or, with a holdout, of the one chosen; in every process.

    The processes share the work: large units are done by all together first, each of the others by one process. An
    error in one process is raised in all. try_out, fit: the work of a unit, done by the processes given, for each of
    its lambdas; `fit` is also given what was tried on its subset. choose: of what was tried on all -> a lambda each.
    """
    parts = range(len(rows))
    units = [Unit(part, chain) for part in parts for chain in fitter.chains()]
    total = len(units) + (len(rows) if fitter.settings.holdout else 0)
    with Progress("logistic regression", total, "fits", quiet=not world.is_rank0) as progress:

        def done(units: Sequence[Unit], work: Callable[[Unit, World], list[Any]]) -> list[list[Any]]:
            def run(unit: Unit, team: World) -> list[Any]:
                results_of_unit = work(unit, team)
                progress.advance(1)
                return results_of_unit

            results = {unit: run(unit, world) for unit in units if fitter.is_large(len(rows[unit.part]))}
            sizes = [(unit, len(rows[unit.part]) * len(unit.lambdas)) for unit in units if unit not in results]
            own = even_shares(sizes, world.size)[world.rank]
            for share in world.gather_results(lambda: {unit: run(unit, World()) for unit in own}):
                results |= share
            return [
                [each for unit in units if unit.part == part for each in results[unit]] for part in range(len(rows))
            ]

        tried: list[list[Trial]] = [[] for _ in rows]
        if fitter.settings.holdout:
            tried = done(units, try_out)
            best = world.on_rank0(lambda: choose(tried))
            units = [Unit(part, (raw,)) for part, raw in enumerate(best)]
        return done(units, lambda unit, team: fit(unit, tried[unit.part], team))


def even_shares(sizes: Sequence[tuple[Unit, int]], processes: int) -> list[list[Unit]]:
    """The units of each process: the largest first, each to the process that has least so far."""
    shares: list[list[Unit]] = [[] for _ in range(processes)]
    loads = [0] * processes
    for unit, size in sorted(sizes, key=lambda entry: -entry[1]):
        least = loads.index(min(loads))
        shares[least].append(unit)
        loads[least] += size
    return shares
