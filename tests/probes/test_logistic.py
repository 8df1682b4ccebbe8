"""Logistic regression: objective, gradient, certified gap and solvers against closed forms, autograd and SciPy."""

import math

import numpy as np
import pytest
import torch
from refusals import refusal
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression
from torch.nn import functional as F

from probes.lowshot import cyanure_solver, logistic


def problem(rows=60, width=8, classes=4, seed=0, skew=0.0):
    """Class centres plus noise, with variances that fall as index**(-2 skew)."""
    random = np.random.default_rng(seed)
    labels = np.arange(rows) % classes
    scales = np.arange(1, width + 1) ** -skew
    features = (random.standard_normal((classes, width))[labels] + random.standard_normal((rows, width))) * scales
    return torch.from_numpy(features.astype(np.float32)), torch.from_numpy(labels)


def objective(features, labels, weights, penalty):
    """The objective by definition, in float64."""
    loss = F.cross_entropy(features.double() @ weights, labels)
    return loss + penalty / 2 * weights.square().sum()


def scipy_optimum(features, labels, classes, penalty):
    """The minimum found by SciPy's solver with autograd's gradient."""

    def value_and_gradient(flat):
        weights = torch.from_numpy(flat).reshape(-1, classes).requires_grad_()
        value = objective(features, labels, weights, penalty)
        value.backward()
        return value.item(), weights.grad.numpy().ravel()

    start = np.zeros(features.shape[1] * classes)
    options = {"maxiter": 20000, "maxfun": 40000, "ftol": 0, "gtol": 1e-13, "maxcor": 30}
    return minimize(value_and_gradient, start, jac=True, method="L-BFGS-B", options=options).fun


def test_blocks_do_not_change_the_objective(monkeypatch):
    features, labels = problem()
    weights = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = logistic.MemoryObjective(features, labels, 0.1).at(weights)
    monkeypatch.setitem(logistic.BLOCK_LOGITS, "cpu", 28)  # 7 rows of 4 classes, which do not divide 60 rows
    blocks = logistic.MemoryObjective(features, labels, 0.1).at(weights)
    assert blocks.objective == pytest.approx(expected.objective, rel=1e-13)
    torch.testing.assert_close(blocks.gradient, expected.gradient)
    assert logistic.fit_lbfgs(features, labels, 4, 1e-3).gap <= 1e-6


@pytest.mark.parametrize("penalty", [1.0, 1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("skew", [0.0, 1.5])
def test_the_optimum_equals_scipys(penalty, skew):
    features, labels = problem(skew=skew)
    best = scipy_optimum(features, labels, 4, penalty)
    for tolerance in (1e-2, 1e-6, 1e-10):
        fit = logistic.fit_lbfgs(features, labels, 4, penalty, tolerance=tolerance)
        assert fit.gap <= tolerance
        assert -1e-9 < fit.objective / best - 1 <= fit.gap + 1e-9
        assert fit.objective == pytest.approx(objective(features, labels, fit.weights, penalty).item(), rel=1e-12)


def test_an_impossible_tolerance_ends_near_machine_precision():
    features, labels = problem(skew=1.0)
    fit = logistic.fit_lbfgs(features, labels, 4, 1e-4, tolerance=0.0, max_iterations=100_000)
    assert fit.iterations < 1000 and 0 < fit.gap < 1e-14


def test_too_few_iterations_show_in_the_gap():
    features, labels = problem()
    fit = logistic.fit_lbfgs(features, labels, 4, 1e-6, max_iterations=3)
    best = logistic.fit_lbfgs(features, labels, 4, 1e-6).objective
    assert fit.iterations == 3
    assert 1e-3 < 1 - best / fit.objective <= fit.gap


def test_a_warm_start_saves_iterations_and_changes_nothing_else():
    features, labels = problem(skew=1.0)
    cold = logistic.fit_lbfgs(features, labels, 4, 1e-3)
    near = logistic.fit_lbfgs(features, labels, 4, 2e-3).weights
    warm = logistic.fit_lbfgs(features, labels, 4, 1e-3, start=near)
    assert warm.iterations < cold.iterations
    assert warm.objective == pytest.approx(cold.objective, rel=2e-6)
    assert logistic.fit_lbfgs(features, labels, 4, 1e-3, start=cold.weights).iterations == 0


def test_fewer_rows_than_dimensions(monkeypatch):
    """The axes are computed in the span of the rows: eigenvectors of the full width took seconds for raw pixels."""
    eigh, sizes = torch.linalg.eigh, []
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: sizes.append(len(matrix)) or eigh(matrix))
    features, labels = problem(rows=6, width=40, classes=3)
    features[3] = features[2]  # so that their rank is below their number
    axes, spectrum = logistic.principal_axes(features)
    assert sizes == [6] and axes.shape == (40, 6) and spectrum.shape == (6, 1)
    torch.testing.assert_close(axes.T @ axes, torch.eye(6, dtype=axes.dtype))
    torch.testing.assert_close(features @ axes @ axes.T, features)
    fit = logistic.fit_lbfgs(features, labels, 3, 1e-2)
    assert fit.objective == pytest.approx(scipy_optimum(features, labels, 3, 1e-2), rel=1e-6)


def uncentred_problem(rows=300, width=6):
    """Features far from the origin, and twelve times as many images of the last class as of the first."""
    random = np.random.default_rng(3)
    labels = random.choice(3, rows, p=[0.05, 0.35, 0.6])
    features = random.standard_normal((3, width))[labels] + random.standard_normal((rows, width)) + 5
    return features.astype(np.float32), torch.from_numpy(labels)


def sklearn_with_intercept(features, labels, penalty):
    """Weights (D + 1, C) of scikit-learn's regression, the intercepts last, with a mean of 0, and its model."""
    model = LogisticRegression(C=1 / (len(labels) * penalty), tol=1e-12, max_iter=100_000)
    model.fit(features.astype(np.float64), labels.numpy())
    weights = np.vstack([model.coef_.T, model.intercept_ - model.intercept_.mean()])
    return weights, model


@pytest.mark.parametrize("penalty", [10.0, 1e-2, 1e-4])
@pytest.mark.parametrize("rows", [300, 5])
def test_intercepts_equal_scikit_learns(penalty, rows):
    """They are not penalised, with more rows than dimensions and with fewer."""
    features, labels = uncentred_problem()
    chosen = np.concatenate([np.flatnonzero(labels == label)[: rows if rows > 10 else 2] for label in range(3)])
    features, labels = features[chosen], labels[chosen]
    expected, theirs = sklearn_with_intercept(features, labels, penalty)
    augmented = torch.from_numpy(np.pad(features, ((0, 0), (0, 1)), constant_values=1))
    fit = logistic.fit_lbfgs(augmented, labels, 3, penalty, tolerance=1e-10, intercept=True)
    assert fit.gap <= 1e-10
    weights = fit.weights.numpy()
    assert np.allclose(weights, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    probabilities = torch.softmax(augmented.double() @ fit.weights, dim=1).numpy()
    assert np.allclose(probabilities, theirs.predict_proba(features.astype(np.float64)), rtol=0, atol=1e-5)
    if penalty == 10.0 and rows > 10:  # the classes' frequencies, not 1 / 3 each
        assert np.allclose(probabilities.mean(axis=0), np.bincount(labels) / len(labels), atol=1e-6)
    for tolerance in (1e-2, 1e-6):
        rough = logistic.fit_lbfgs(augmented, labels, 3, penalty, tolerance=tolerance, intercept=True)
        assert rough.gap <= tolerance and -1e-9 < rough.objective / fit.objective - 1 <= rough.gap + 1e-9
    warm = logistic.fit_lbfgs(augmented, labels, 3, penalty, intercept=True, start=fit.weights)
    assert warm.iterations <= logistic.MAX_IDLE_ITERATIONS  # in float32, whose gradient is not small enough


def test_constant_features_leave_the_weights_at_zero():
    fit = logistic.fit_lbfgs(torch.zeros(6, 5), torch.arange(6) % 3, 3, 0.1)
    assert fit.objective == pytest.approx(math.log(3)) and fit.gap == 0 and not fit.weights.any()


def test_small_losses_keep_full_precision():
    """At a margin of 60 the loss is exp(-60), which 1 - p or log(p) would round to zero."""
    margins = torch.tensor([[-torch.inf, -60.0, -70.0]], dtype=torch.float64)
    losses, others = logistic.probabilities(margins)
    assert losses.item() == pytest.approx(math.exp(-60) + math.exp(-70), rel=1e-12)
    assert others[0].tolist() == pytest.approx([0, math.exp(-60), math.exp(-70)], rel=1e-12)


def test_invalid_problems_are_refused():
    for change, message in [
        ({"labels": torch.tensor([0, 1, 3])}, "labels run from 0 to 3, expected 0 to 2"),
        ({"labels": torch.tensor([0, -1, 2])}, "labels run from -1 to 2"),
        ({"features": torch.tensor([[1.0], [math.nan], [2.0]])}, "features of row 1 are not finite"),
        ({"classes": 1, "labels": torch.zeros(3, dtype=torch.int64)}, "1 classes"),
        ({"penalty": 0.0}, "lambda=0"),
        ({"penalty": math.nan}, "lambda=nan"),
    ]:
        for solve in [logistic.fit_lbfgs, cyanure_solver.fit_cyanure]:
            arguments = {"features": torch.ones(3, 1), "labels": torch.arange(3), "classes": 3, "penalty": 0.1} | change
            assert message in refusal(solve, **arguments)


def test_cyanure_prints_nothing_and_agrees(capfd):
    features, labels = problem()
    fit = cyanure_solver.fit_cyanure(features, labels, 4, 1e-3)
    ours = logistic.fit_lbfgs(features, labels, 4, 1e-3)
    assert 1 - 1e-6 <= fit.objective / ours.objective <= 1 + 1e-3
    too_short = cyanure_solver.fit_cyanure(features, labels, 4, 1e-9, max_iterations=1)
    assert too_short.gap > 1e-3
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")
    print("restored")
    assert capfd.readouterr().out == "restored\n"


def test_cyanure_continues_in_float64_when_float32_stalls(capfd):
    """With nearly parallel rows and a small lambda, its float32 stops at a gap above 1e-3 before its 300 epochs."""
    random = np.random.default_rng(0)
    labels = np.arange(20) % 10
    rows = 100 * np.eye(16)[0] + random.standard_normal((10, 16))[labels] + 0.5 * random.standard_normal((20, 16))
    rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    arguments = (torch.from_numpy(rows), torch.from_numpy(labels), 10, 1e-6)
    best = logistic.fit_lbfgs(*arguments).objective
    _, dual, epochs = cyanure_solver.solve(rows, labels, 1e-6, 1e-3, 300, "auto")
    assert 1 - dual / best > 1e-3 and epochs < 300
    fit = cyanure_solver.fit_cyanure(*arguments)
    assert fit.gap <= 1e-3 and fit.objective == pytest.approx(best, rel=1e-3)
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")  # it warns of "numerical instability" here


def test_cyanure_cannot_fit_a_class_without_rows():
    features, labels = problem()
    with pytest.raises(ValueError, match="class 4 has no training row"):
        cyanure_solver.fit_cyanure(features, labels, 5, 1e-3)
    assert logistic.fit_lbfgs(features, labels, 5, 1e-3).gap <= 1e-6
