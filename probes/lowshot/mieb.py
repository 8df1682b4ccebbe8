"""How does MIEB (MTEB's image benchmark) draw its training images, and fit its logistic regression?

embeddings-benchmark/mteb 9b178e60a, the state of the published results: AbsTaskImageClassification.py and
ClassificationEvaluator.py. Release 2.20.0 computes the same for its seed, 42.
"""

import warnings
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from probes.lowshot.logistic import Fit, certify, check_every_class, check_inputs

SEED = 42  # of every experiment (AbsTask.py:70-77, Evaluator.py:18-23)
TOLERANCE = 1e-4  # of the largest gradient, with which scikit-learn's L-BFGS ends: its default


def draw(labels: np.ndarray, shots: int, generators: Iterable[np.random.RandomState]) -> list[np.ndarray]:
    """The images of each experiment, in the order in which they are fitted; of a smaller class all are taken.

    An experiment shuffles the order of the one before. As MIEB seeds its generator anew for each, this is the same
    permutation again and again: the experiments differ, but are not independent (mteb issue 3897).

    Args:
        labels: (N,) of the training images.
        shots: Images of each class.
        generators: One for each experiment.
    """
    order, experiments = np.arange(len(labels)), []
    for generator in generators:
        generator.shuffle(order)
        in_classes = np.argsort(labels[order], kind="stable")
        _, starts, counts = np.unique(labels[order][in_classes], return_index=True, return_counts=True)
        rank = np.empty(len(order), np.int64)  # of each image among those of its class
        rank[in_classes] = np.arange(len(order)) - np.repeat(starts, counts)
        experiments.append(order[rank < shots])
    return experiments


def fit_sklearn(
    features: Tensor,
    labels: Tensor,
    classes: int,
    penalty: float,
    *,
    max_iterations: int = 100,
    intercept: bool = False,
) -> Fit:
    """scikit-learn's LogisticRegression of features (n, D) in float64, and labels (n,) in 0..C-1.

    It ends after `max_iterations`, near the optimum or not; features of very different size need more than MIEB's 100.
    Two classes are a sigmoid of one column of weights, whose penalty is twice that of the same softmax. The gap, from
    `certify`, is that of the softmax.

    Args:
        penalty: lambda; scikit-learn's C is 1 / (lambda n).
        intercept: The last column of the features is 1, and its weights are not penalised.

    Raises:
        ValueError: As `logistic.fit_lbfgs`, and for a class without a row.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    check_inputs(features, labels, classes, penalty)
    check_every_class(labels, classes, "scikit-learn")
    rows = features.double().cpu().numpy()
    model = LogisticRegression(
        C=1 / (penalty * len(rows)), fit_intercept=intercept, tol=TOLERANCE, max_iter=max_iterations
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(rows[:, :-1] if intercept else rows, labels.cpu().numpy())
    weights = np.vstack([model.coef_.T, model.intercept_]) if intercept else model.coef_.T
    if classes == 2:
        weights = np.hstack([np.zeros_like(weights), weights])
    solution = torch.from_numpy(weights).to(features.device)
    objective, gap = certify(features, labels, solution, penalty, intercept)
    return Fit(weights=solution, objective=objective, gap=gap, iterations=int(model.n_iter_[0]))
