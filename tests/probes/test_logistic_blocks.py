"""Logistic regression in blocks: the optimum of the fit in memory, the same bits on any number of processes, errors."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from meeting import run_in_threads
from test_logistic import problem, scipy_optimum, sklearn_with_intercept, uncentred_problem
from toy_exports import export_of_size, workspace

from engine.distributed import World
from probes.lowshot import blocks, fitting, logistic
from probes.lowshot.blocks import BlockedRows, ExactSum, PreparedRows, fit_in_blocks
from probes.tasks.lowshot import PROTOCOLS, LowShot


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 64)
    monkeypatch.setitem(logistic.BLOCK_LOGITS, "cpu", 60)  # 15 rows of 4 classes


def blocked_problem(rows=500, world=World(), **settings):  # noqa: B008
    """Two thirds of a problem's rows: in memory, and as blocks of a file that has all rows."""
    features, labels = problem(rows=rows, **settings)
    chosen = np.flatnonzero(np.arange(rows) % 3)
    source = PreparedRows(features=features.numpy(), preprocess="none")
    return features[chosen], BlockedRows(source=source, rows=chosen, labels=labels[chosen], world=world)


@pytest.mark.parametrize(("penalty", "skew"), [(1e-2, 0.0), (1e-4, 1.5)])
def test_the_optimum_equals_scipys_and_that_in_memory(penalty, skew):
    features, rows = blocked_problem(skew=skew)
    best = scipy_optimum(features, rows.labels, 4, penalty)
    memory = logistic.fit_lbfgs(features, rows.labels, 4, penalty, tolerance=1e-8)
    for tolerance in (1e-2, 1e-6, 1e-10):
        fit = fit_in_blocks(rows, 4, penalty, tolerance=tolerance)
        assert fit.gap <= tolerance and -1e-9 < fit.objective / best - 1 <= fit.gap + 1e-9
        assert (fit.objective, fit.gap) == pytest.approx(
            logistic.certify(features, rows.labels, fit.weights, penalty), rel=1e-6, abs=1e-14
        )
    assert fit.objective == pytest.approx(memory.objective, rel=1e-8)
    torch.testing.assert_close(fit.weights, memory.weights, rtol=0, atol=2e-2 * float(memory.weights.abs().max()))


@pytest.mark.parametrize("penalty", [10.0, 1e-2])
def test_intercepts_equal_scikit_learns(penalty):
    features, labels = uncentred_problem()
    expected, _ = sklearn_with_intercept(features, labels, penalty)
    source = PreparedRows(features=features, preprocess="none", intercept=True)
    rows = BlockedRows(source=source, rows=np.arange(len(labels)), labels=labels, world=World())
    fit = fit_in_blocks(rows, 3, penalty, tolerance=1e-10)
    assert np.allclose(fit.weights, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    assert fit_in_blocks(rows, 3, penalty, start=fit.weights).iterations <= logistic.MAX_IDLE_ITERATIONS
    classes = fitting.predictions_and_losses(source, labels.numpy(), fit.weights)[0]
    assert np.array_equal(classes, (np.pad(features, ((0, 0), (0, 1)), constant_values=1) @ expected).argmax(axis=1))


def test_warm_starts_and_too_few_iterations():
    _, rows = blocked_problem(skew=1.0)
    cold = fit_in_blocks(rows, 4, 1e-4)
    assert fit_in_blocks(rows, 4, 1e-4, start=cold.weights).iterations == 0
    short = fit_in_blocks(rows, 4, 1e-6, max_iterations=3)
    assert short.iterations == 3 and 1 - cold.objective / short.objective <= short.gap


def test_any_number_of_processes_gives_the_same_bits():
    def fit(world):
        return fit_in_blocks(blocked_problem(skew=1.0, world=world)[1], 4, 1e-4)

    alone = fit(World())
    for size in (2, 7):
        for shared in run_in_threads(size, fit):
            assert torch.equal(shared.weights, alone.weights), size
            assert (shared.objective, shared.gap, shared.iterations) == (alone.objective, alone.gap, alone.iterations)


@pytest.mark.parametrize("broken", [0, 1])
def test_an_error_during_the_descent_is_raised_in_all(broken, monkeypatch):
    """Rank 0 minimises, the others evaluate their blocks; reading fails as the third evaluation begins."""
    original, calls = blocks.BlockObjective.sums, [0, 0]

    def sums(task, weights):
        rank = task.features.world.rank
        calls[rank] += 1
        if calls[rank] == 3 and rank == broken:
            task = replace(task, features=replace(task.features, rows=task.features.rows + 10**6))
        return original(task, weights)

    monkeypatch.setattr(blocks.BlockObjective, "sums", sums)

    def work(world):
        with pytest.raises((IndexError, RuntimeError)) as error:
            fit_in_blocks(blocked_problem(world=world)[1], 4, 1e-4)
        return error.value.reported_by

    assert run_in_threads(2, work) == [broken, broken]


def test_exact_sums_do_not_depend_on_the_order():
    random = np.random.default_rng(0)
    parts = [torch.from_numpy(random.standard_normal((3, 4)) * 10.0 ** random.integers(-6, 3)) for _ in range(60)]
    sums = [ExactSum((3, 4), 1e5, torch.device("cpu")) for _ in range(2)]
    for exact_sum, ordered in zip(sums, (parts, parts[::-1]), strict=True):
        for part in ordered:
            exact_sum.add(part)
    forward, backward = (exact_sum.value(World()) for exact_sum in sums)
    assert torch.equal(forward, backward)
    torch.testing.assert_close(forward, torch.stack(parts).sum(0), rtol=0, atol=60 * 1e5 * 2.0**-61)
    zero = ExactSum((2, 2), 0.0, torch.device("cpu"))
    zero.add(torch.zeros(2, 2))
    assert not zero.value(World()).any()


def test_invalid_problems_are_refused():
    _, rows = blocked_problem()
    with pytest.raises(ValueError, match="lambda=0"):
        fit_in_blocks(rows, 4, 0.0)
    rows.source.features[7, 2] = np.inf
    with pytest.raises(ValueError, match="features of row 4 are not finite"):  # 1, 2, 4, 5 and 7 are chosen
        fit_in_blocks(rows, 4, 0.1)


@pytest.mark.parametrize("protocol", ["logreg@ibot", "logreg@dinov2", "lowshot@msn"])
def test_a_task_has_the_same_numbers_in_blocks_as_in_memory(protocol, tmp_path, monkeypatch):
    task = PROTOCOLS[protocol].task
    task = replace(task, lambdas=task.lambdas[:14:7] if len(task.lambdas) > 3 else task.lambdas)
    space, export = workspace(tmp_path, "digits:", limit=200), export_of_size(16)
    monkeypatch.setitem(logistic.BLOCK_LOGITS, "cpu", 1 << 20)
    in_memory = task.run(export, space)
    monkeypatch.setattr(fitting, "MAX_IN_MEMORY", 0)
    in_blocks = task.run(export, space)
    assert in_blocks.numbers == pytest.approx(in_memory.numbers, abs=0.51)
    for fit, expected in zip(in_blocks.facts["fits"], in_memory.facts["fits"], strict=True):
        assert fit["gap"] <= 1e-6 and fit["objective"] == pytest.approx(expected["objective"], rel=2e-6)
        assert fit["train_top1"] == pytest.approx(expected["train_top1"], abs=0.51)


def test_processes_share_subsets_chains_and_rows(tmp_path, monkeypatch):
    """Seven small subsets and a large one, and seven lambdas in two chains, shared by two and three processes."""
    monkeypatch.setattr(fitting, "MAX_IN_MEMORY", 100 * 32)
    monkeypatch.setitem(logistic.BLOCK_LOGITS, "cpu", 1 << 20)
    task = LowShot(shots=(1, 2), splits=3, fractions=(0.1, 1.0), lambdas=(9.0, 3.0, 1.0, 0.5, 0.3, 0.2, 0.1))
    space, export = workspace(tmp_path, "digits:", limit=150), export_of_size(16)
    alone = task.run(export, space)
    for size in (2, 3):
        for outcome in run_in_threads(size, lambda world: task.run(export, replace(space, world=world))):
            assert outcome.metrics == alone.metrics and outcome.facts == alone.facts
