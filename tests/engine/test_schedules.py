"""Schedules against tables recorded of the sources' own code, in float64."""

import pytest
from recordings import facts, matches

from engine.schedules import half_cosine, rate

TABLES = facts("lr_sched/lr_sched.json")


def steps_of(table):
    """The steps whose rates one of MAE's tables holds."""
    ((first, last),) = (map(int, found.groups()) for found in matches(r"first (\d+) and last (\d+)", [table["stored"]]))
    return [*range(first), *range(table["n_total"] - last, table["n_total"])]


@pytest.mark.parametrize("table", TABLES["mae_adjust_learning_rate"], ids=lambda table: f"{table['epochs']} epochs")
def test_mae_at_fractional_epochs(table):
    iterations = table["iters_per_epoch"]
    assert table["n_total"] == table["epochs"] * iterations
    ours = [
        half_cosine(table["lr"], step / iterations, table["epochs"], table["warmup_epochs"], table["min_lr"])
        for step in steps_of(table)
    ]
    assert ours == pytest.approx([row[0] for row in table["values"]], rel=1e-12, abs=1e-18)


def test_mae_by_epoch_and_iteration():
    table = next(table for table in TABLES["mae_adjust_learning_rate"] if table["min_lr"] == 0)
    iterations = table["iters_per_epoch"]
    for step, row in zip(steps_of(table), table["values"], strict=True):
        ours = rate(
            table["lr"],
            *divmod(step, iterations),
            iterations,
            epochs=table["epochs"],
            warmup=table["warmup_epochs"],
        )
        assert ours == pytest.approx(row[0], rel=1e-12, abs=1e-18)


def test_torch_cosine_once_an_epoch():
    table = TABLES["cosine_annealing_per_epoch"]
    for iteration in (0, 6):
        ours = [
            rate(table["lr"], epoch, iteration, 7, epochs=table["epochs"], pace="epoch")
            for epoch in range(table["epochs"])
        ]
        assert ours == pytest.approx(table["lr_used_in_epoch"], rel=1e-9)  # torch computes it by recursion


def test_dinov2_every_iteration_for_all_rates():
    table = TABLES["dinov2_per_iter_cosine"]
    for iteration, row in enumerate(table["values"]):
        factor = rate(1.0, 0, iteration, table["max_iter"], epochs=1)
        ours = [lr * table["global_batch"] / 256 * factor for lr in table["base_lrs"]]
        assert ours == pytest.approx(row, rel=1e-9)


def test_msn_every_iteration():
    """MSN steps its schedule after the optimiser (linear_eval.py), so the first iteration has the full rate."""
    table = TABLES["msn_warmup_cosine"]
    arguments = table["args"]
    assert arguments["warmup_steps"] == 0
    used = [table["lr_before_first_step_call"], *table["values_after_each_step"][:-1]]
    ours = [rate(arguments["ref_lr"], 0, i, arguments["T_max"], epochs=1) for i in range(arguments["T_max"])]
    assert ours == pytest.approx(used, rel=1e-12)
