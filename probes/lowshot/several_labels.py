"""Logistic regression where images show several classes: one binary fit a class, scored by mean average precision.

A fit is the multinomial one to two classes, shown and not shown. By symmetry its two columns of weights are w / 2 and
-w / 2, so that 0.5 ||W||^2 is 0.25 ||w||^2: a penalty of 2 lambda is the binary regression's lambda. Images on which a
class is not judged are left out of its fit and of its evaluation. One lambda is chosen for all classes, by mean average
precision on held-out images. n training rows, V validation images, C classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from engine.distributed import World
from probes.lowshot.blocks import PreparedRows
from probes.lowshot.fitting import Fitter, Unit, shared_fits
from probes.scores import average_precision


class ClassFit(NamedTuple):
    """One class at the lambda chosen. scores: (V,) of the validation images. record: JSON values about the fit."""

    scores: np.ndarray
    record: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ClassByClass:
    """The fits of all classes. fitter: its settings and features; its own labels are not read."""

    fitter: Fitter
    classes: Sequence[str]
    labels: np.ndarray  # (n, C) 1, 0, or -1 where not judged

    def fit(self, world: World) -> list[ClassFit]:
        """All classes, in every process; the processes share them. ValueError for a class that no training image shows
        and for a fit that is not certified."""
        if len(lacking := np.flatnonzero(~(self.labels == 1).any(axis=0))):
            raise ValueError(f"no training image shows {self.classes[lacking[0]]!r}; add some, or raise --limit")
        judged = [np.flatnonzero(column >= 0) for column in self.labels.T]
        fits = shared_fits(self.fitter, judged, world, self.try_out, self.choose, self.fit_class)
        return [of_class for (of_class,) in fits]

    def held(self) -> np.ndarray:
        """(n,) whether an image chooses the lambda: as many as `holdout` says, drawn by the seed."""
        shuffled = np.random.RandomState(self.fitter.seed).permutation(len(self.labels))
        held = np.zeros(len(self.labels), bool)
        held[shuffled[: round(self.fitter.settings.holdout * len(held))]] = True
        return held

    def try_out(self, unit: Unit, team: World) -> list[float]:
        """Average precision of one class on held-out images for each lambda; NaN where none shows it, -1 where the fit
        is not certified."""
        labels, held, precisions = self.labels[:, unit.part], self.held(), []
        train_rows, held_rows = np.flatnonzero((labels >= 0) & ~held), np.flatnonzero((labels >= 0) & held)
        weights = None
        for raw in unit.lambdas:
            fit = self.of_class(unit.part).minimised(train_rows, 2 * raw, weights, team)
            weights = fit.weights
            scores = scores_of(self.fitter.train, held_rows, weights)
            value = float(average_precision(scores, labels[held_rows], np.ones((1, len(held_rows))))[0])
            precisions.append(value if fit.gap <= self.fitter.settings.gap_allowed else -1.0)
        return precisions

    def choose(self, tried: Sequence[Sequence[float]]) -> list[float]:
        """For all classes the lambda with the best mean over classes of `tried` (C, lambdas), the first of equals,
        certified for all."""
        precisions = np.array(tried)
        known = ~np.isnan(precisions)
        means = np.where(known, precisions, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
        means[(precisions == -1).any(axis=0)] = -1
        if means.max() < 0:
            raise ValueError("no lambda was certified for every class; raise --set lowshot.max_iterations=N")
        return [self.fitter.settings.lambdas[int(means.argmax())]] * len(precisions)

    def fit_class(self, unit: Unit, tried: Sequence[float], team: World) -> list[ClassFit]:
        """The fit of one class to all images on which it is judged."""
        fitter, name = self.of_class(unit.part), self.classes[unit.part]
        rows, raw = np.flatnonzero(self.labels[:, unit.part] >= 0), unit.lambdas[0]
        fit = fitter.minimised(rows, 2 * raw, None, team)
        fitter.demand(name, raw, len(rows), fit.gap, fit.iterations)
        positives = int(fitter.labels[rows].sum())
        record = {"class": name, "images": len(rows), "shown": positives, "lambda": raw, "objective": fit.objective}
        scores = scores_of(self.fitter.val, np.arange(len(self.fitter.val)), fit.weights)
        return [ClassFit(scores, record | {"gap": fit.gap, "iterations": fit.iterations})]

    def of_class(self, part: int) -> Fitter:
        return replace(self.fitter, labels=(self.labels[:, part] == 1).astype(np.int64))


def scores_of(source: PreparedRows, rows: np.ndarray, weights: Tensor) -> np.ndarray:
    """(n,) float64: how much more some rows look like class 1 than like class 0, under weights (D, 2)."""
    direction = (weights[:, 1] - weights[:, 0]).double().to(source.device)
    parts = [(features.double() @ direction).cpu().numpy() for features in source.pieces(rows)]
    return np.concatenate([np.empty(0), *parts])
