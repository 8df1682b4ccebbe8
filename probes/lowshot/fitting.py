"""Logistic regressions on prepared features: fit rows, select lambda, evaluate on the validation images.

The sources' lambda means different things: iBOT takes it as the coefficient of 0.5 ||W||^2 against the mean loss, MSN,
MOCA and (as 1 / C) DINOv2 divide it by n first. Undivided, 0.1 fits nothing, and accuracy alone does not show it; so
every fit records both numbers and its certified gap, and warns where nothing was fitted.

n training rows, D width, C classes, V validation images.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from imagesets.selection import quotas, stratified_sample
from probes.lowshot import cyanure_solver, logistic

Convention = Literal["divided by n", "as is"]
Preprocess = Literal["centre_and_normalise", "normalise", "none"]
Solver = Literal["lbfgs", "cyanure"]
# What minimises, to which certified relative gap, in how many iterations at most. MSN and MOCA give cyanure 1e-3 and
# 300 epochs (logistic_eval.py:175-187).
SOLVERS = {"lbfgs": (logistic.fit_lbfgs, 1e-6, 5000), "cyanure": (cyanure_solver.fit_cyanure, 1e-3, 300)}
UNFITTED = 0.9  # of ln C, the objective at W = 0


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """One fit and how it does. correct: (V,) bool. record: JSON values about it. warning: why to doubt it, or empty."""

    raw: float
    correct: np.ndarray
    record: Mapping[str, Any]
    warning: str


@dataclass(frozen=True, kw_only=True)
class Fitter:
    """Settings of the fits, and what they work on.

    train (n, D), val (V, D): float32 on the device. labels (n,), val_labels (V,): int64 in 0..C-1.
    tolerance, max_iterations: the solver's own when None. holdout: share of the rows that selects among `lambdas`.
    """

    train: Tensor
    labels: np.ndarray
    val: Tensor
    val_labels: np.ndarray
    classes: int
    lambdas: Sequence[float]
    lambda_convention: Convention
    holdout: float
    solver: Solver
    tolerance: float | None
    max_iterations: int | None
    seed: int

    def fit(self, name: str, rows: np.ndarray) -> list[Fitted]:
        """A fit of some rows for every lambda, or for the one that held-out rows select.

        Raises ValueError, beginning with `name`, where the certified gap is above tolerance.
        """
        lambdas, sweep = self.choose(name, rows) if self.holdout else (self.lambdas, [])
        found, weights = [], None
        for raw in lambdas:
            fit = self.minimised(rows, raw, weights)
            self.demand(name, raw, len(rows), fit)
            found.append(self.evaluated(rows, raw, fit, sweep))
            weights = fit.weights
        return found

    def choose(self, name: str, rows: np.ndarray) -> tuple[Sequence[float], list[dict[str, float]]]:
        """The lambda that does best on held-out rows (the first of equals), and how each one did.

        Fits whose gap is above tolerance are recorded and not chosen.
        """
        counts = np.bincount(self.labels[rows], minlength=self.classes)
        shares = quotas(counts, round(self.holdout * len(rows)))
        if not shares.any() or (shares >= counts).any():
            raise ValueError(
                f"{name}: holding out {self.holdout:g} of {len(rows)} images leaves a class none to train on, or "
                "nothing to choose by; set holdout=0, or use more images"
            )
        held = np.zeros(len(rows), bool)
        held[stratified_sample(self.labels[rows], shares, self.seed)] = True
        sweep, weights = [], None
        for raw in self.lambdas:
            fit = self.minimised(rows[~held], raw, weights)
            weights = fit.weights
            right = predictions(self.train[rows[held]], weights) == self.labels[rows[held]]
            sweep.append({"lambda": raw, "top1": 100.0 * float(right.mean()), "gap": fit.gap})
        certain = [entry for entry in sweep if entry["gap"] <= self.gap_allowed]
        if not certain:
            self.demand(name, raw, len(rows), fit)
        return (max(certain, key=lambda entry: entry["top1"])["lambda"],), sweep

    def minimised(self, rows: np.ndarray, raw: float, start: Tensor | None) -> logistic.Fit:
        """The fit of some rows, begun from `start` (D, C) by the solver that can; the caller checks its gap."""
        minimise, _, iterations = SOLVERS[self.solver]
        return minimise(
            self.train[rows],
            torch.from_numpy(self.labels[rows]).to(self.train.device),
            self.classes,
            self.effective(raw, len(rows)),
            tolerance=self.gap_allowed,
            max_iterations=self.max_iterations or iterations,
            **({"start": start} if self.solver == "lbfgs" else {}),
        )

    @property
    def gap_allowed(self) -> float:
        return SOLVERS[self.solver][1] if self.tolerance is None else self.tolerance

    def effective(self, raw: float, count: int) -> float:
        """Coefficient of 0.5 ||W||^2 against the mean loss of `count` images."""
        return raw / count if self.lambda_convention == "divided by n" else raw

    def demand(self, name: str, raw: float, count: int, fit: logistic.Fit) -> None:
        """ValueError for a fit that is not certified to be near the optimum: no number comes of it."""
        if not fit.gap <= self.gap_allowed:
            raise ValueError(
                f"{name}: the optimum for lambda {raw:g} ({self.effective(raw, count):.3g} against the mean loss) was "
                f"not reached: gap {fit.gap:.1e} after {fit.iterations} iterations of {self.solver}, "
                f"{self.gap_allowed:.0e} asked; raise max_iterations, or lambda"
            )

    def evaluated(self, rows: np.ndarray, raw: float, fit: logistic.Fit, sweep: list[dict[str, float]]) -> Fitted:
        """Accuracy of a fit, and what it rests on."""
        correct = predictions(self.val, fit.weights) == self.val_labels
        fitted = predictions(self.train[rows], fit.weights) == self.labels[rows]
        record = {
            "images": len(rows),
            "lambda": raw,
            "lambda_convention": self.lambda_convention,
            "lambda_effective": self.effective(raw, len(rows)),
            "objective": fit.objective,
            "gap": fit.gap,
            "iterations": fit.iterations,
            "train_top1": 100.0 * float(fitted.mean()),
            "top1": 100.0 * float(correct.mean()),
        }
        record |= {"holdout": sweep} if sweep else {}
        return Fitted(raw=raw, correct=correct, record=record, warning=self.doubt(raw, len(rows), fit.objective))

    def doubt(self, raw: float, count: int, objective: float) -> str:
        """Why this is not a fit, or nothing."""
        untouched = math.log(self.classes)
        if objective <= UNFITTED * untouched:
            return ""
        remedy = "; MSN and MOCA divide lambda by n" if self.lambda_convention == "as is" else ""
        return (
            f"nothing was fitted: the objective ends at {objective:.4f} and began at ln {self.classes} = "
            f"{untouched:.4f}; lambda {raw:g}, {self.lambda_convention}, is {self.effective(raw, count):.3g} against "
            f"the mean loss, too much for these features{remedy}"
        )


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


def predictions(features: Tensor, weights: Tensor) -> np.ndarray:
    """Classes (N,) that score highest for features (N, D) under weights (D, C)."""
    weights = weights.to(features.dtype)
    return torch.cat([(block @ weights).argmax(dim=1) for block in features.split(8192)]).cpu().numpy()
