"""Fits in blocks: the optimum of the fit in memory, the same bits on any number of processes, errors in all of them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from meeting import together
from test_logistic import best_of_scipy, problem
from toy_exports import export_of_size, workspace

from engine.distributed import World
from probes.lowshot import blocks, fitting, logistic
from probes.lowshot.blocks import BlockedRows, ExactSum, PreparedRows, fit_in_blocks
from probes.lowshot.fitting import FitJob, even_shares
from probes.tasks.lowshot import PROTOCOLS, LowShot


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 64)
    monkeypatch.setitem(logistic.BLOCK_LOGITS, "cpu", 60)  # logits: 15 rows of 4 classes


def posed(rows=500, world=World(), **settings):  # noqa: B008
    """All rows but every third, of a file that has them all."""
    features, labels = problem(rows=rows, **settings)
    chosen = np.flatnonzero(np.arange(rows) % 3)
    source = PreparedRows(features=features.numpy(), preprocess="none")
    return features[chosen], BlockedRows(source=source, rows=chosen, labels=labels[chosen], world=world)


@pytest.mark.parametrize("penalty", [1.0, 1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("skew", [0.0, 1.5])
def test_the_optimum_is_that_of_memory_and_scipys(penalty, skew):
    features, rows = posed(skew=skew)
    best = best_of_scipy(features, rows.labels, 4, penalty)
    memory = logistic.fit_lbfgs(features, rows.labels, 4, penalty, tolerance=1e-8)
    for tolerance in (1e-2, 1e-6, 1e-10):
        fit = fit_in_blocks(rows, 4, penalty, tolerance=tolerance)
        assert fit.gap <= tolerance and -1e-9 < fit.objective / best - 1 <= fit.gap + 1e-9
        assert (fit.objective, fit.gap) == pytest.approx(
            logistic.certify(features, rows.labels, fit.weights, penalty), rel=1e-6, abs=1e-14
        )
    assert fit.objective == pytest.approx(memory.objective, rel=1e-8)
    torch.testing.assert_close(fit.weights, memory.weights, rtol=0, atol=2e-2 * float(memory.weights.abs().max()))


def test_a_start_and_few_iterations():
    _, rows = posed(skew=1.0)
    cold = fit_in_blocks(rows, 4, 1e-4)
    assert fit_in_blocks(rows, 4, 1e-4, start=cold.weights).iterations == 0
    short = fit_in_blocks(rows, 4, 1e-6, max_iterations=3)
    assert short.iterations == 3 and 1 - cold.objective / short.objective <= short.gap


def test_an_impossible_tolerance_ends_near_machine_precision():
    fit = fit_in_blocks(posed(skew=1.0)[1], 4, 1e-3, tolerance=0.0, max_iterations=100_000)
    assert fit.iterations < 1000 and 0 < fit.gap < 1e-14


@pytest.mark.parametrize("size", [2, 3, 7, 20])
def test_any_number_of_processes_finds_the_same_bits(size):
    alone = fit_in_blocks(posed(skew=1.0)[1], 4, 1e-4)
    for fit in together(size, lambda world: fit_in_blocks(posed(skew=1.0, world=world)[1], 4, 1e-4)):
        assert torch.equal(fit.weights, alone.weights)
        assert (fit.objective, fit.gap, fit.iterations) == (alone.objective, alone.gap, alone.iterations)


@pytest.mark.parametrize("broken", [0, 1])
def test_an_error_in_one_process_is_raised_in_all(broken):
    def work(world):
        _, rows = posed(world=world)
        if world.rank == broken:
            rows.source.features[:] = np.nan
        with pytest.raises(ValueError, match="are not finite") as caught:
            fit_in_blocks(rows, 4, 1e-2)
        return str(caught.value)

    assert len(set(together(2, work))) == 1


@pytest.mark.parametrize("broken", [0, 1])
def test_an_error_on_the_way_is_raised_in_all(broken, monkeypatch):
    """Rank 0 descends, the others serve; a disk fails when the third evaluation begins."""
    real, calls = blocks.BlockObjective.sums, [0, 0]

    def sums(task, weights):
        rank = task.features.world.rank
        calls[rank] += 1
        if calls[rank] == 3 and rank == broken:
            task = replace(task, features=replace(task.features, rows=task.features.rows + 10**6))
        return real(task, weights)

    monkeypatch.setattr(blocks.BlockObjective, "sums", sums)

    def work(world):
        with pytest.raises((IndexError, RuntimeError)) as caught:
            fit_in_blocks(posed(world=world)[1], 4, 1e-4)
        return caught.value.reported_by

    assert together(2, work) == [broken, broken]


def test_rank_0_tells_the_others_when_it_fails_by_itself(monkeypatch):
    monkeypatch.setattr(logistic, "lbfgs", lambda *arguments: 1 / 0)

    def work(world):
        with pytest.raises((ZeroDivisionError, RuntimeError), match="division by zero") as caught:
            fit_in_blocks(posed(world=world)[1], 4, 1e-2)
        return caught.value.reported_by

    assert together(3, work) == [0, 0, 0]


def test_sums_are_exact_and_the_same_in_any_order():
    random = np.random.default_rng(0)
    parts = [torch.from_numpy(random.standard_normal((3, 4)) * 10.0 ** random.integers(-6, 3)) for _ in range(60)]
    wholes = [ExactSum((3, 4), 1e5, torch.device("cpu")) for _ in range(2)]
    for whole, order in zip(wholes, (parts, parts[::-1]), strict=True):
        for part in order:
            whole.add(part)
    one, other = (whole.value(World()) for whole in wholes)
    assert torch.equal(one, other)
    torch.testing.assert_close(one, torch.stack(parts).sum(0), rtol=0, atol=60 * 1e5 * 2.0**-61)
    nothing = ExactSum((2, 2), 0.0, torch.device("cpu"))
    nothing.add(torch.zeros(2, 2))
    assert not nothing.value(World()).any()


def test_what_has_no_solution():
    _, rows = posed()
    with pytest.raises(ValueError, match="lambda=0"):
        fit_in_blocks(rows, 4, 0.0)
    rows.source.features[7, 2] = np.inf
    with pytest.raises(ValueError, match="features of row 4 are not finite"):  # 1, 2, 4, 5 and 7 are chosen
        fit_in_blocks(rows, 4, 0.1)


@pytest.mark.parametrize("protocol", ["logreg@ibot", "logreg@dinov2", "lowshot@msn"])
def test_a_task_in_blocks_has_the_numbers_of_memory(protocol, tmp_path, monkeypatch):
    task = PROTOCOLS[protocol].task
    task = replace(task, lambdas=task.lambdas[:14:7] if len(task.lambdas) > 3 else task.lambdas)
    space, export = workspace(tmp_path, "digits:", limit=200), export_of_size(16)
    monkeypatch.setitem(logistic.BLOCK_LOGITS, "cpu", 1 << 20)
    memory = task.run(export, space)
    monkeypatch.setattr(fitting, "MAX_IN_MEMORY", 0)
    apart = task.run(export, space)
    assert apart.numbers == pytest.approx(memory.numbers, abs=0.51)
    for one, other in zip(apart.facts["fits"], memory.facts["fits"], strict=True):
        assert one["gap"] <= 1e-6 and one["objective"] == pytest.approx(other["objective"], rel=2e-6)
        assert one["train_top1"] == pytest.approx(other["train_top1"], abs=0.51)


def test_processes_share_subsets_chains_and_rows(tmp_path, monkeypatch):
    """Seven small subsets and a large one, seven lambdas in two chains; the same whoever fits them."""
    monkeypatch.setattr(fitting, "MAX_IN_MEMORY", 100 * 32)
    monkeypatch.setitem(logistic.BLOCK_LOGITS, "cpu", 1 << 20)
    task = LowShot(shots=(1, 2), splits=3, fractions=(0.1, 1.0), lambdas=(9.0, 3.0, 1.0, 0.5, 0.3, 0.2, 0.1))
    space, export = workspace(tmp_path, "digits:", limit=150), export_of_size(16)
    alone = task.run(export, space)
    for size in (2, 3):
        found = together(size, lambda world: task.run(export, replace(space, world=world)))
        for outcome in found:
            assert outcome.metrics == alone.metrics and outcome.facts == alone.facts


def test_units_are_shared_evenly():
    sizes = [(FitJob(number, ()), size) for number, size in enumerate([13, 5, 5, 5, 2, 2, 2, 1, 1, 1])]
    found = even_shares(sizes, 3)
    assert sorted(job.subset for jobs in found for job in jobs) == list(range(10))
    assert [sum(sizes[job.subset][1] for job in jobs) for jobs in found] == [13, 12, 12]
