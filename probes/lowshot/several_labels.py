"""How is logistic regression evaluated if images show several classes? One binary fit per class, mean average
precision.

A fit is multinomial with two classes, shown and not shown. By symmetry its two columns of weights are w / 2 and -w / 2,
so 0.5 ||W||^2 is 0.25 ||w||^2: a penalty of 2 lambda is the binary regression's lambda. Images on which a class is not
judged are left out of the fit and the evaluation of this class. One lambda is chosen for all classes, by mean average
precision on held-out images.

n training rows, V validation images, C classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from engine.distributed import World
from engine.errors import option
from probes.lowshot.blocks import PreparedRows
from probes.lowshot.fitting import FitJob, Fitter, run_fits
from probes.scores import average_precision


class ClassFit(NamedTuple):
    """The fit of one class with the chosen lambda."""

    scores: np.ndarray  # (V,) of the validation images
    record: dict[str, Any]  # JSON values about the fit


@dataclass(frozen=True, kw_only=True)
class ClassByClass:
    """The fits of all classes. A subset of `run_fits` is a class: the images on which it is judged."""

    fitter: Fitter  # its labels are not used
    classes: Sequence[str]
    labels: np.ndarray  # (n, C) 1: shown, 0: not shown, -1: not judged

    def fit(self, world: World) -> list[ClassFit]:
        """Fit all classes, shared by the processes; all get the results.

        Raises ValueError for a class that no training image shows, and for a fit whose gap is above the tolerance.
        """
        if len(absent := np.flatnonzero(~(self.labels == 1).any(axis=0))):
            raise ValueError(
                f"no training image shows {self.classes[absent[0]]!r}; add some, or raise {option('limit')}"
            )
        judged_rows = [np.flatnonzero(column >= 0) for column in self.labels.T]
        fits = run_fits(self.fitter, judged_rows, world, self.try_lambdas, self.choose_lambdas, self.fit_class)
        return [class_fit for (class_fit,) in fits]

    def try_lambdas(self, job: FitJob, team: World) -> list[float]:
        """Average precision of a class on held-out images for each lambda; NaN if none of them shows the class, -1 if
        the gap of the fit is above the tolerance."""
        labels, is_held_out = self.labels[:, job.subset], self.is_held_out()
        fitted_rows = np.flatnonzero((labels >= 0) & ~is_held_out)
        held_out_rows = np.flatnonzero((labels >= 0) & is_held_out)
        fitter, weights, precisions = self.class_fitter(job.subset), None, []
        for raw_lambda in job.lambdas:
            fit = fitter.minimise(fitted_rows, 2 * raw_lambda, weights, team)
            weights = fit.weights
            scores = scores_of(fitter.train, held_out_rows, weights)
            precision = float(average_precision(scores, labels[held_out_rows], np.ones((1, len(held_out_rows))))[0])
            precisions.append(precision if fit.gap <= fitter.settings.max_gap else -1.0)
        return precisions

    def choose_lambdas(self, trials: Sequence[Sequence[float]]) -> list[float]:
        """For all classes the same lambda: the best mean over classes, the first of equals, converged for all.

        trials: (C, lambdas) average precisions of `try_lambdas`.
        """
        precisions = np.array(trials)
        is_known = ~np.isnan(precisions)
        means = np.where(is_known, precisions, 0.0).sum(axis=0) / np.maximum(is_known.sum(axis=0), 1)
        means[(precisions == -1).any(axis=0)] = -1
        if means.max() < 0:
            raise ValueError(
                f"no lambda was certified for every class; raise {option('settings', {'lowshot.max_iterations': 'N'})}"
            )
        return [self.fitter.settings.lambdas[int(means.argmax())]] * len(precisions)

    def fit_class(self, job: FitJob, trials: Sequence[float], team: World) -> list[ClassFit]:
        """Fit one class to all images on which it is judged."""
        fitter, name = self.class_fitter(job.subset), self.classes[job.subset]
        rows, raw_lambda = np.flatnonzero(self.labels[:, job.subset] >= 0), job.lambdas[0]
        fit = fitter.minimise(rows, 2 * raw_lambda, None, team)
        fitter.check_gap(name, raw_lambda, len(rows), fit.gap, fit.iterations)
        record = {
            "class": name,
            "images": len(rows),
            "shown": int(fitter.labels[rows].sum()),
            "lambda": raw_lambda,
            "objective": fit.objective,
            "gap": fit.gap,
            "iterations": fit.iterations,
        }
        return [ClassFit(scores_of(fitter.val, np.arange(len(fitter.val)), fit.weights), record)]

    def is_held_out(self) -> np.ndarray:
        """(n,) bool, whether an image chooses the lambda: a share `holdout` of all, drawn with the seed."""
        order = np.random.RandomState(self.fitter.seed).permutation(len(self.labels))
        is_held_out = np.zeros(len(self.labels), bool)
        is_held_out[order[: round(self.fitter.settings.holdout * len(order))]] = True
        return is_held_out

    def class_fitter(self, index: int) -> Fitter:
        """The fitter with labels 1 for images that show the class, else 0."""
        return replace(self.fitter, labels=(self.labels[:, index] == 1).astype(np.int64))


def scores_of(source: PreparedRows, rows: np.ndarray, weights: Tensor) -> np.ndarray:
    """(n,) float64 scores of class 1 minus those of class 0, for rows (n,) and weights (D, 2)."""
    direction = (weights[:, 1] - weights[:, 0]).double().to(source.device)
    parts = [(features.double() @ direction).cpu().numpy() for features in source.pieces(rows)]
    return np.concatenate([np.empty(0), *parts])
