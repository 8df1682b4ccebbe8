"""The objective of probes/lowshot/logistic.py through cyanure (Mairal 2019), the solver behind MSN's and MOCA's
numbers.

Called as MSN's logistic_eval.py:175-187 calls release 0.22, translated to the names of 1.2: stochastic MISO under an
accelerator, its choice ("auto") depending on n and lambda. Slower than ours (tests/benchmarks/lowshot.py).

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
from probes.lowshot.logistic import Fit, certified, check_solvable

CHECK_EVERY = 10  # epochs between two looks at the gap, MSN's it0
ROUNDING = 1e-6  # cyanure sums its dual objective in float32: up to 2e-7 too high on the recorded data


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
    """Minimise f for features (n, D) and labels (n,) in 0..C-1, each class present. penalty: lambda.

    In float32 as its callers do, and again in float64 where that stalls above tolerance, as it can for small lambda.
    `iterations` of the result are epochs. Its gap is the smaller of cyanure's duality gap, which has seen better dual
    variables, and the bound of `certified`. ValueError as in probes.lowshot.logistic, and for a class without a row.
    """
    check_solvable(features, labels, classes, penalty)
    if len(absent := np.setdiff1d(np.arange(classes), labels.cpu().numpy())):
        raise ValueError(f"class {absent[0]} has no training row, which cyanure cannot fit; use solver lbfgs")
    rows, answers = features.cpu().numpy(), labels.cpu().numpy()
    spent = 0
    for dtype in (np.float32, np.float64):
        solution, dual, epochs = solved(
            rows.astype(dtype, order="C"), answers, penalty, tolerance, max_iterations, algorithm
        )
        spent += epochs
        weights = torch.from_numpy(solution.astype(np.float64)).to(features.device)
        objective, gap = certified(features, labels, weights, penalty)
        gap = min(gap, max(0.0, (objective - dual) / objective) + ROUNDING)
        if gap <= tolerance:
            break
    return Fit(weights=weights, objective=objective, gap=gap, iterations=spent)


def solved(
    rows: np.ndarray, labels: np.ndarray, penalty: float, tolerance: float, max_iterations: int, algorithm: str
) -> tuple[np.ndarray, float, int]:
    """Weights (D, C), the best value of the dual objective, and the epochs it took, for rows (n, D) in their dtype."""
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
    """Keep back cyanure's logging and warnings, and what its C++ part writes to standard output and error.

    The gap of a result says whether it converged. What other threads print meanwhile is lost as well.
    """
    logger = logging.getLogger("Cyanure")
    level = logger.level
    flush()
    kept = {stream: os.dup(stream) for stream in (1, 2)}
    with open(os.devnull, "w") as nowhere, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        for stream in kept:
            os.dup2(nowhere.fileno(), stream)
        try:
            yield
        finally:
            flush()
            for stream, copy in kept.items():
                os.dup2(copy, stream)
                os.close(copy)
            logger.setLevel(level)


def flush() -> None:
    """Write out what Python and the C library hold back, so that it goes where it was meant to."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
