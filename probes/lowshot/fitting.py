"""How are logistic regressions fitted to subsets of images, with which lambda, and how good are they?

The sources' lambda means different things. In iBOT it is the coefficient of 0.5 ||W||^2 against the mean loss; MSN,
MOCA and (as 1 / C) DINOv2 divide it by n first. Undivided, 0.1 fits nothing, which the accuracy alone does not show. So
each fit records both numbers and its gap, and warns if nothing was fitted.

The processes of a run share the fits in jobs: a subset with a chain of lambdas. All processes together do a large job,
of which each has some rows; one process does each of the others. The division changes no number.

N training images, n of them in a subset, D width, C classes, V validation images.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.distributed import World
from engine.errors import option
from engine.progress import Progress
from engine.settings import BelowOne, OneOrMoreDifferent, PositiveFloat, PositiveInt, Validated
from engine.tasks import ADDED
from imagesets.selection import quotas, stratified_sample
from probes.lowshot import cyanure_solver, logistic, mieb
from probes.lowshot.blocks import BlockedRows, PreparedRows, fit_in_blocks
from probes.scores import class_mean

Solver = Literal["lbfgs", "cyanure", "scikit-learn"]
# Solver -> its function, tolerance (largest gap) and most iterations. MSN and MOCA give cyanure 1e-3 and 300 epochs
# (logistic_eval.py:175-187). scikit-learn's ends by its own rule, wherever that is: MIEB's numbers are of such fits.
SOLVERS: Mapping[Solver, tuple[Callable[..., logistic.Fit], float, int]] = {
    "lbfgs": (logistic.fit_lbfgs, 1e-6, 5000),
    "cyanure": (cyanure_solver.fit_cyanure, 1e-3, 300),
    "scikit-learn": (mieb.fit_sklearn, math.inf, 100),
}
# Largest number of rows times classes, or rows times D, with which a fit keeps its rows and logits in memory: 0.5 GB
# with 16 bytes for each element of both. 1 % of ImageNet is below, 10 % above.
MAX_IN_MEMORY = 1 << 24
CHAIN = 5  # lambdas in a row that start from each other's weights; fixed, so that processes can share the chains
CONTINUATIONS = 4  # times that a fit to be evaluated goes on from where its iterations ended, if its gap is too large
UNFITTED = 0.9  # an objective above this part of ln C, which it is at W = 0, means that nothing was fitted


@dataclass(frozen=True, kw_only=True)
class FitSettings(Validated):
    """How every subset is fitted."""

    lambdas: OneOrMoreDifferent[PositiveFloat] = (0.1,)  # weights of the L2 penalty, as the source states them
    # How a lambda becomes the coefficient of 0.5 ||W||^2 against the mean loss: divided by the number n of training
    # images, or unchanged.
    lambda_convention: Literal["divided by n", "as is"] = "divided by n"
    # Fraction of the training images that is held out to choose a lambda, with which all images are then fitted; 0:
    # every lambda is reported.
    holdout: BelowOne = 0.0
    solver: Solver = "lbfgs"  # our L-BFGS, or the source's: cyanure, or scikit-learn as in MIEB
    intercept: bool = field(default=False, metadata=ADDED)  # add a constant to the scores of each class, not penalised
    tolerance: PositiveFloat | None = None  # relative gap at which a fit ends; none: the solver's own
    # iterations of a fit, after which one to be evaluated goes on up to four times; epochs for cyanure; none: the
    # solver's own
    max_iterations: PositiveInt | None = None

    @property
    def max_gap(self) -> float:
        return SOLVERS[self.solver][1] if self.tolerance is None else self.tolerance

    @property
    def most_iterations(self) -> int:
        return self.max_iterations or SOLVERS[self.solver][2]

    def effective_lambda(self, raw_lambda: float, images: int) -> float:
        """Coefficient of 0.5 ||W||^2 against the mean loss of `images`, for a lambda as the source writes it."""
        return raw_lambda / images if self.lambda_convention == "divided by n" else raw_lambda


@dataclass(frozen=True, kw_only=True)
class EvaluatedFit:
    """A fit on the validation images."""

    raw_lambda: float  # as the source writes it
    correct: np.ndarray  # (V,) bool
    predicted: np.ndarray  # (V,) int32, classes
    confidence: np.ndarray  # (V,) float32, probabilities of the predicted classes
    nll: np.ndarray  # (V,) float32, minus the log-probabilities of the true classes
    record: Mapping[str, Any]  # JSON values about the fit
    warning: str  # why to doubt it; "" if there is no reason
    weights: Tensor | None = None  # (D, C), if heads are kept


class HeldOutResult(NamedTuple):
    """A lambda fitted without the held-out images, and evaluated on them."""

    raw_lambda: float
    top1: float  # percent
    per_class: float  # mean of the accuracies in each class, percent
    gap: float
    iterations: int

    @property
    def record(self) -> dict[str, float]:
        return {"lambda": self.raw_lambda, "top1": self.top1, "per_class": self.per_class, "gap": self.gap}


@dataclass(frozen=True, kw_only=True)
class Fitter:
    """Fits subsets of the training images and evaluates them.

    Where `is_large` is true, the rows of a fit stay in their file (probes/lowshot/blocks.py), and the processes of
    `world` share them. One process does any other fit, with the rows in memory.
    """

    settings: FitSettings
    train: PreparedRows  # (N, D)
    labels: np.ndarray  # (N,) int64 in 0..C-1
    val: PreparedRows  # (V, D)
    val_labels: np.ndarray  # (V,) int64 in 0..C-1
    classes: int
    seed: int
    # Choose lambda by the mean of the accuracies in each class, not by top-1 accuracy (dinov2
    # eval/log_regression.py:328).
    per_class: bool = False
    keep_weights: bool = False  # for `EvaluatedFit.weights`

    def is_large(self, rows: int) -> bool:
        """Whether a fit of so many rows is done in blocks. It depends on sizes alone, so the machine changes no
        number."""
        return self.settings.solver == "lbfgs" and rows * max(self.classes, self.train.width) > MAX_IN_MEMORY

    def lambda_chains(self) -> list[Sequence[float]]:
        """The lambdas in chains, within which each fit starts from the weights of the one before."""
        lambdas = self.settings.lambdas
        return [lambdas[start : start + CHAIN] for start in range(0, len(lambdas), CHAIN)]

    def fit(
        self,
        name: str,
        rows: np.ndarray,
        lambdas: Sequence[float],
        held_out_results: Sequence[HeldOutResult],
        world: World,
    ) -> list[EvaluatedFit]:
        """Fit training rows (n,) with every lambda, and evaluate on the validation images.

        name: of the subset, for messages. held_out_results: what chose the lambda, for the record. Raises ValueError if
        a gap is above the tolerance.
        """
        fits, weights = [], None
        for raw_lambda in lambdas:
            fit = self.minimise(rows, raw_lambda, weights, world)
            for _ in range(CONTINUATIONS if self.settings.solver == "lbfgs" else 0):
                if fit.gap <= self.settings.max_gap:
                    break
                longer = self.minimise(rows, raw_lambda, fit.weights, world)
                fit = replace(longer, iterations=fit.iterations + longer.iterations)
            self.check_gap(name, raw_lambda, len(rows), fit.gap, fit.iterations)
            fits.append(self.evaluate(rows, raw_lambda, fit, held_out_results, world))
            weights = fit.weights
        return fits

    def try_lambdas(self, name: str, rows: np.ndarray, lambdas: Sequence[float], world: World) -> list[HeldOutResult]:
        """Fit rows (n,) without a held-out share of each class, and evaluate on that share. Any gap is accepted."""
        counts = np.bincount(self.labels[rows], minlength=self.classes)
        total = round(self.settings.holdout * len(rows))
        held_out_counts = quotas(counts, total)
        if (held_out_counts >= counts).any():
            # Leave one image of each class. Only here, because these bounds may change the counts of other classes.
            held_out_counts = quotas(counts - 1, total)
        if not held_out_counts.any():
            raise ValueError(
                f"{name}: holding out {self.settings.holdout:g} of {len(rows)} images leaves nothing to choose lambda "
                f"by; {option('settings', {'lowshot.holdout': 0})}, or use more images"
            )
        is_held_out = np.zeros(len(rows), bool)
        is_held_out[stratified_sample(self.labels[rows], held_out_counts, self.seed)] = True
        fitted_rows, held_out_rows = rows[~is_held_out], rows[is_held_out]
        results, weights = [], None
        for raw_lambda in lambdas:
            fit = self.minimise(fitted_rows, raw_lambda, weights, world)
            weights = fit.weights
            correct = self.correct_predictions(held_out_rows, weights, world)
            per_class = class_mean(correct, self.labels[held_out_rows])
            top1 = 100.0 * float(correct.mean())
            results.append(HeldOutResult(raw_lambda, top1, per_class, fit.gap, fit.iterations))
        return results

    def choose_lambda(self, name: str, rows: np.ndarray, results: Sequence[HeldOutResult]) -> float:
        """The best lambda on held-out images, the first of equals, among those with a gap within the tolerance.

        Raises ValueError if there is none.
        """
        converged = [result for result in results if result.gap <= self.settings.max_gap]
        if not converged:
            last = results[-1]
            self.check_gap(name, last.raw_lambda, len(rows), last.gap, last.iterations)
        best = max(converged, key=lambda result: result.per_class if self.per_class else result.top1)
        return best.raw_lambda

    def minimise(self, rows: np.ndarray, raw_lambda: float, start: Tensor | None, world: World) -> logistic.Fit:
        """Fit training rows (n,). The caller checks the gap.

        start: (D, C) initial weights, which cyanure ignores; zeros if None.
        """
        settings, labels = self.settings, torch.from_numpy(self.labels[rows]).to(self.train.device)
        penalty = settings.effective_lambda(raw_lambda, len(rows))
        limits: dict[str, Any] = {"max_iterations": settings.most_iterations}
        if settings.solver != "scikit-learn":
            limits["tolerance"] = settings.max_gap
        if self.is_large(len(rows)):
            blocked_rows = BlockedRows(source=self.train, rows=rows, labels=labels, world=world)
            return fit_in_blocks(blocked_rows, self.classes, penalty, start=start, **limits)
        if settings.solver == "lbfgs":
            limits["start"] = start
        if settings.solver != "cyanure":
            limits["intercept"] = settings.intercept
        solve, features = SOLVERS[settings.solver][0], self.train.read(rows)
        return solve(features, labels, self.classes, penalty, **limits)

    def correct_predictions(self, rows: np.ndarray, weights: Tensor, world: World) -> np.ndarray:
        """(n,) bool, which training rows (n,) weights (D, C) classify correctly. The processes share the rows."""
        bounds = [rank * len(rows) // world.size for rank in range(world.size + 1)]
        own = rows[bounds[world.rank] : bounds[world.rank + 1]]

        def work() -> np.ndarray:
            # map, because the variable of a loop would keep one piece in memory while the next one is read.
            classes = map(lambda features: predictions(features, weights), self.train.pieces(own))
            return np.concatenate([np.empty(0, np.int64), *classes]) == self.labels[own]

        return np.concatenate(world.gather_results(work))

    def check_gap(self, name: str, raw_lambda: float, images: int, gap: float, iterations: int) -> None:
        """ValueError for a fit whose gap is above the tolerance, so that it is not evaluated."""
        settings = self.settings
        if not gap <= settings.max_gap:
            raise ValueError(
                f"{name}: the optimum for lambda {raw_lambda:g} ({settings.effective_lambda(raw_lambda, images):.3g} "
                f"against the mean loss) was not reached: gap {gap:.1e} after {iterations} iterations of "
                f"{settings.solver}, {settings.max_gap:.0e} required; raise "
                f"{option('settings', {'lowshot.max_iterations': 'N'})}, or lambdas"
            )

    def evaluate(
        self,
        rows: np.ndarray,
        raw_lambda: float,
        fit: logistic.Fit,
        held_out_results: Sequence[HeldOutResult],
        world: World,
    ) -> EvaluatedFit:
        """Evaluate a fit of training rows (n,) on the validation images."""
        predicted, confidence, nll = predictions_and_losses(self.val, self.val_labels, fit.weights)
        correct = predicted == self.val_labels
        train_correct = self.correct_predictions(rows, fit.weights, world)
        record: dict[str, Any] = {
            "images": len(rows),
            "lambda": raw_lambda,
            "lambda_convention": self.settings.lambda_convention,
            "lambda_effective": self.settings.effective_lambda(raw_lambda, len(rows)),
            "objective": fit.objective,
            "gap": fit.gap,
            "iterations": fit.iterations,
            "train_top1": 100.0 * float(train_correct.mean()),
            "top1": 100.0 * float(correct.mean()),
        }
        if held_out_results:
            record["holdout"] = [result.record for result in held_out_results]
        return EvaluatedFit(
            raw_lambda=raw_lambda,
            correct=correct,
            predicted=predicted.astype(np.int32),
            confidence=confidence,
            nll=nll,
            record=record,
            warning=self.unfitted_warning(raw_lambda, len(rows), fit.objective),
            weights=fit.weights.cpu() if self.keep_weights else None,
        )

    def unfitted_warning(self, raw_lambda: float, images: int, objective: float) -> str:
        """A warning if the objective shows that nothing was fitted, else ""."""
        initial_objective = math.log(self.classes)
        if objective <= UNFITTED * initial_objective:
            return ""
        convention, penalty = self.settings.lambda_convention, self.settings.effective_lambda(raw_lambda, images)
        remedy = "; MSN and MOCA divide lambda by n" if convention == "as is" else ""
        return (
            f"nothing was fitted: the objective ends at {objective:.4f} and began at ln {self.classes} = "
            f"{initial_objective:.4f}; lambda {raw_lambda:g}, {convention}, is {penalty:.3g} against the mean loss, "
            f"too much for these features{remedy}"
        )


def predictions_and_losses(
    source: PreparedRows, labels: np.ndarray, weights: Tensor
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Predictions of weights (D, C) for all rows of `source`, with labels (n,).

    Returns (n,) classes with the highest scores, (n,) float32 their probabilities, and (n,) float32 minus the
    log-probabilities of the labels. Unlike `hits_of`, which ranks five classes, it predicts the first of classes with
    equal scores, as all are for a zero row.
    """
    parts, end = [], 0
    for features in source.pieces(np.arange(len(source))):
        start, end = end, end + len(features)
        logits = features @ weights.to(features.device, features.dtype)
        predicted, normalizer = logits.argmax(dim=1, keepdim=True), logits.logsumexp(dim=1, keepdim=True)
        true = torch.from_numpy(labels[start:end]).to(logits.device)[:, None]
        confidence = (logits.gather(1, predicted) - normalizer).exp().float()
        nll = (normalizer - logits.gather(1, true)).float()
        parts.append((predicted.squeeze(1), confidence.squeeze(1), nll.squeeze(1)))
    predicted_classes, confidences, nlls = (torch.cat(part).cpu().numpy() for part in zip(*parts, strict=True))
    return predicted_classes, confidences, nlls


def predictions(features: Tensor, weights: Tensor) -> np.ndarray:
    """(n,) classes with the highest scores of features (n, D) under weights (D, C)."""
    weights = weights.to(features.device, features.dtype)
    return (features @ weights).argmax(dim=1).cpu().numpy()


Trial = TypeVar("Trial")
Result = TypeVar("Result")


class FitJob(NamedTuple):
    """Fits of one subset that a process, or all together, do at a time."""

    subset: int  # its number
    lambdas: Sequence[float]


def fit_subsets(
    fitter: Fitter, names: Sequence[str], rows: Sequence[np.ndarray], world: World
) -> list[list[EvaluatedFit]]:
    """For each subset, an evaluated fit for every lambda, or, with a holdout, for the one that is chosen.

    All processes must call it; all get the results. names: of the subsets, for messages. rows: (n,) of each. Raises
    ValueError for a fit whose gap is above the tolerance.
    """
    return run_fits(
        fitter,
        rows,
        world,
        lambda job, team: fitter.try_lambdas(names[job.subset], rows[job.subset], job.lambdas, team),
        lambda trials: [fitter.choose_lambda(*subset) for subset in zip(names, rows, trials, strict=True)],
        lambda job, trials, team: fitter.fit(names[job.subset], rows[job.subset], job.lambdas, trials, team),
    )


def run_fits(
    fitter: Fitter,
    rows: Sequence[np.ndarray],
    world: World,
    try_lambdas: Callable[[FitJob, World], list[Trial]],
    choose_lambdas: Callable[[list[list[Trial]]], Sequence[float]],
    fit: Callable[[FitJob, list[Trial], World], list[Result]],
) -> list[list[Result]]:
    """Fit subsets with every lambda, or, with a holdout, with the lambda that is chosen for each; shared by the
    processes.

    All processes must call it; all get the results of each subset, and an error of one process is raised in all.

    Args:
        fitter: Its settings say which lambdas and whether there is a holdout.
        rows: (n,) of each subset.
        try_lambdas: (job, processes that do it) -> for each of its lambdas, a result on held-out images.
        choose_lambdas: Results on held-out images of each subset -> a lambda for each subset.
        fit: (job, results on held-out images of its subset, processes that do it) -> a result for each of its lambdas.
    """
    jobs = [FitJob(subset, chain) for subset in range(len(rows)) for chain in fitter.lambda_chains()]
    total = len(jobs) + (len(rows) if fitter.settings.holdout else 0)
    with Progress("logistic regression", total, "fits") as progress:

        def run_all(jobs: Sequence[FitJob], work: Callable[[FitJob, World], list[Any]]) -> list[list[Any]]:
            def run(job: FitJob, team: World) -> list[Any]:
                results = work(job, team)
                progress.advance(1)
                return results

            results = {job: run(job, world) for job in jobs if fitter.is_large(len(rows[job.subset]))}
            small_jobs = [(job, len(rows[job.subset]) * len(job.lambdas)) for job in jobs if job not in results]
            own_jobs = even_shares(small_jobs, world.size)[world.rank]
            for results_of_rank in world.gather_results(lambda: {job: run(job, World()) for job in own_jobs}):
                results |= results_of_rank
            by_subset: list[list[Any]] = [[] for _ in rows]
            for job in jobs:
                by_subset[job.subset] += results[job]
            return by_subset

        trials: list[list[Trial]] = [[] for _ in rows]
        if fitter.settings.holdout:
            trials = run_all(jobs, try_lambdas)
            lambdas = world.on_rank0(lambda: choose_lambdas(trials))
            jobs = [FitJob(subset, (raw_lambda,)) for subset, raw_lambda in enumerate(lambdas)]
        return run_all(jobs, lambda job, team: fit(job, trials[job.subset], team))


def even_shares(sizes: Sequence[tuple[FitJob, int]], processes: int) -> list[list[FitJob]]:
    """Divide jobs, given with their sizes, among processes: the largest first, each to the process with the least
    work."""
    shares: list[list[FitJob]] = [[] for _ in range(processes)]
    loads = [0] * processes
    for job, size in sorted(sizes, key=lambda pair: -pair[1]):
        least = loads.index(min(loads))
        shares[least].append(job)
        loads[least] += size
    return shares
