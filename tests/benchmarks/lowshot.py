"""Low-shot regression: ours against cyanure and scikit-learn's lbfgs, `python tests/benchmarks/lowshot.py` (a minute).

Classes x 13 images x width, class centres plus noise, rows centred and normalised as MSN does, lambda = lambd / n.
Rounds of the solvers alternate in one process; ratios are of processor seconds, which suffer less from other load.
Gap: objective in float64 over the optimum, found by ours to 1e-9, less one. scikit-learn runs at the largest of its
tolerances that reaches our gap, or 1e-6, since at its default it stops far away.
Routine size: 100 classes, 384 wide, lambd of MSN and MOCA. --full: 1000 classes, 768 wide, lambd 7.5e-4, one round;
cyanure takes many minutes there: --recorded-cyanure SECONDS leaves it out and uses what was measured before: 416 on
one core of an AMD EPYC, cyanure_solver.fit on the same data under OMP_NUM_THREADS=1, 180 epochs, gap 1e-8.
"""

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression

from engine.machine import keep_memory
from probes.lowshot import cyanure_solver, logistic
from probes.lowshot.blocks import prepare_rows
from probes.lowshot.fitting import predictions

SHOTS, TESTS = 13, 5_000
TOLERANCES = (1e-5, 1e-6, 1e-7, 1e-8, 1e-9)  # scikit-learn's, tried in this order; at full size 1e-8 is right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--recorded-cyanure", type=float, metavar="SECONDS")
    arguments = parser.parse_args()
    keep_memory()
    print(f"load average before: {os.getloadavg()[0]:.2f}, {torch.get_num_threads()} threads")
    classes, width, lambdas = (1000, 768, (7.5e-4,)) if arguments.full else (100, 384, (2.5e-4, 2.5e-3, 0.1))
    tolerances = (1e-8,) if arguments.full else TOLERANCES
    rounds = 1 if arguments.full else arguments.rounds
    features, labels, queries, answers = data(classes, width)
    for lambd in lambdas:
        penalty = lambd / len(labels)
        best = logistic.fit_lbfgs(features, labels, classes, penalty, tolerance=1e-9)
        print(f"\n{classes} classes, width {width}, lambd {lambd:g}, optimum {best.objective:.6f}")
        solvers = solvers_of(features, labels, classes, penalty, best.objective, tolerances)
        if arguments.recorded_cyanure:
            del solvers["cyanure"]
        weights_of_solvers, wall, spent = timed(solvers, rounds)
        chosen = predictions(queries, best.weights)
        print(f"{'solver':<20}{'wall s':>9}{'CPU s':>9}{'ratio':>8}{'gap':>10}{'top-1':>8}{'as optimum':>12}")
        for name, weights in weights_of_solvers.items():
            gap = logistic.certify(features, labels, weights, penalty)[0] / best.objective - 1
            guesses = predictions(queries, weights)
            print(
                f"{name:<20}{wall[name]:9.3f}{spent[name]:9.3f}{spent[name] / spent['ours']:8.2f}{gap:10.1e}"
                f"{100 * np.mean(guesses == answers):8.2f}{100 * np.mean(guesses == chosen):11.2f}%"
            )
        if arguments.recorded_cyanure:
            recorded = arguments.recorded_cyanure
            print(f"{'cyanure, recorded':<20}{'':9}{recorded:9.1f}{recorded / spent['ours']:8.2f}")


def data(classes: int, width: int, noise: float = 5.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, np.ndarray]:
    """Features and labels to train on, features and labels to test on; unit rows without mean."""
    random = np.random.default_rng(0)
    centres = random.standard_normal((classes, width), dtype=np.float32)
    splits = []
    for labels in (np.arange(classes * SHOTS) % classes, random.integers(0, classes, TESTS)):
        rows = centres[labels] + noise * random.standard_normal((len(labels), width), dtype=np.float32)
        splits += [torch.from_numpy(prepare_rows(rows, "centre_and_normalise")[0]), labels]
    features, labels, queries, answers = splits
    return features, torch.from_numpy(labels), queries, answers


def solvers_of(
    features: torch.Tensor, labels: torch.Tensor, classes: int, penalty: float, optimum: float, tolerances: tuple
) -> dict[str, Callable[[], torch.Tensor]]:
    """Functions that return weights (D, C), by name of the solver."""
    problem = (features, labels, classes, penalty)
    reached = max(1e-6, logistic.fit_lbfgs(*problem).objective / optimum - 1)
    for tolerance in tolerances:
        if tolerance == tolerances[-1]:
            break
        weights = sklearn_weights(features, labels, penalty, tolerance)
        if logistic.certify(features, labels, weights, penalty)[0] / optimum - 1 <= reached:
            break
    return {
        "ours": lambda: logistic.fit_lbfgs(*problem).weights,
        f"scikit-learn {tolerance:.0e}": partial(sklearn_weights, features, labels, penalty, tolerance),
        "cyanure": lambda: cyanure_solver.fit_cyanure(*problem).weights,
    }


def timed(solvers: dict[str, Callable[[], torch.Tensor]], rounds: int) -> tuple[dict, dict, dict]:
    """Weights, and medians of wall and processor seconds, by solver."""
    weights, wall, spent = {}, {name: [] for name in solvers}, {name: [] for name in solvers}
    for _ in range(rounds):
        for name, solve in solvers.items():
            before = time.perf_counter(), time.process_time()
            weights[name] = solve()
            wall[name].append(time.perf_counter() - before[0])
            spent[name].append(time.process_time() - before[1])
    medians = [{name: statistics.median(values) for name, values in times.items()} for times in (wall, spent)]
    return weights, *medians


def sklearn_weights(features, labels, penalty, tolerance) -> torch.Tensor:
    """(D, C) by scikit-learn's lbfgs on the same objective: its C is 1 / (n lambda)."""
    model = LogisticRegression(C=1 / (penalty * len(labels)), fit_intercept=False, tol=tolerance, max_iter=10_000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(features.numpy(), labels.numpy())
    return torch.from_numpy(model.coef_.T.astype(np.float64))


if __name__ == "__main__":
    main()
