"""How does cyanure (Mairal 2019), the solver of MSN's and MOCA's numbers, fit a logistic regression?

With the objective of probes/lowshot/logistic.py, called as MSN's logistic_eval.py:175-187 calls release 0.22,
translated to the names of 1.2: stochastic MISO with an accelerator, which cyanure ("auto") chooses by n and lambda.
Slower than our solver (tests/benchmarks/lowshot.py).

n rows, D width, C classes.
"""

import ctypes
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from engine.optional import require
from probes.lowshot.logistic import Fit, certify, check_every_class, check_inputs

CHECK_EVERY = 10  # epochs between two computations of the gap: MSN's it0
# Added to cyanure's gap, which sums the dual objective in float32: up to 2e-7 too high on the recorded data.
ROUNDING = 1e-6


def fit_cyanure(
    features: Tensor,
    labels: Tensor,
    classes: int,
    penalty: float,
    *,
    tolerance: float = 1e-3,
    max_iterations: int = 300,
    algorithm: str = "auto",
) -> Fit:
    """Minimise f for features (n, D) and labels (n,) in 0..C-1, where each class occurs.

    In float32 as in the sources, and again in float64 if float32 stalls above the tolerance, as it may for a small
    lambda. `iterations` of the result are epochs. Its `gap` is the smaller of two upper bounds on the distance to the
    optimum: that of `certify`, and that of cyanure's dual variables, which may be tighter.

    Args:
        penalty: lambda.
        max_iterations: Epochs in each precision.
        algorithm: cyanure's `solver`.

    Raises:
        ValueError: As `logistic.fit_lbfgs`, and for a class without a row.
    """
    check_inputs(features, labels, classes, penalty)
    check_every_class(labels, classes, "cyanure")
    feature_array, label_array = features.cpu().numpy(), labels.cpu().numpy()
    total_epochs = 0
    for dtype in (np.float32, np.float64):
        rows = feature_array.astype(dtype, order="C")
        solution, dual, epochs = solve(rows, label_array, penalty, tolerance, max_iterations, algorithm)
        total_epochs += epochs
        weights = torch.from_numpy(solution.astype(np.float64)).to(features.device)
        objective, gap = certify(features, labels, weights, penalty)
        gap = min(gap, max(0.0, (objective - dual) / objective) + ROUNDING)
        if gap <= tolerance:
            break
    return Fit(weights=weights, objective=objective, gap=gap, iterations=total_epochs)


def solve(
    rows: np.ndarray, labels: np.ndarray, penalty: float, tolerance: float, max_iterations: int, algorithm: str
) -> tuple[np.ndarray, float, int]:
    """Weights (D, C), the best value of the dual objective, and the number of epochs, for rows (n, D) in their
    dtype."""
    require("cyanure")
    from cyanure.estimators import Classifier

    model = Classifier(
        loss="multiclass-logistic",
        penalty="l2",
        fit_intercept=False,
        lambda_1=penalty,
        tol=tolerance,
        solver=algorithm,
        random_state=0,
        max_iter=max_iterations,
        duality_gap_interval=min(CHECK_EVERY, max_iterations),
        n_threads=torch.get_num_threads(),
        verbose=False,
    )
    with silenced():
        model.fit(rows, labels)
    epochs, _, dual = np.asarray(model.optimization_info_)[0, :3, -1]
    return model.coef_, float(dual), int(epochs)


@contextmanager
def silenced() -> Iterator[None]:
    """Discard cyanure's log messages and warnings, and what its C++ code writes to standard output and error.

    Whether it converged is known from the gap. What other threads print in the meantime is lost, too.
    """
    logger = logging.getLogger("Cyanure")
    level = logger.level
    flush()
    copies = {stream: os.dup(stream) for stream in (1, 2)}
    with open(os.devnull, "w") as devnull, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        for stream in copies:
            os.dup2(devnull.fileno(), stream)
        try:
            yield
        finally:
            flush()
            for stream, copy in copies.items():
                os.dup2(copy, stream)
                os.close(copy)
            logger.setLevel(level)


def flush() -> None:
    """Flush the buffers of Python and of the C library."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
