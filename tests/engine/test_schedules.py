"""Schedules against tables recorded of the sources' own code, in float64."""

import json
import os
from pathlib import Path

import pytest

from engine.schedules import half_cosine, rate

FOLDER = Path(os.environ.get("GOLDEN_ROOT", Path(__file__).parents[1] / "golden")) / "lr_sched"
TABLES = json.loads((FOLDER / "lr_sched.json").read_text())


@pytest.mark.parametrize("table", TABLES["mae_adjust_learning_rate"], ids=lambda table: f"{table['epochs']} epochs")
def test_mae_at_fractional_epochs(table):
    iterations, total = table["iters_per_epoch"], table["n_total"]
    assert total == table["epochs"] * iterations
    steps = [*range(120), *range(total - 30, total)]  # "first 120 and last 30"
    ours = [
        half_cosine(table["lr"], step / iterations, table["epochs"], table["warmup_epochs"], table["min_lr"])
        for step in steps
    ]
    assert ours == pytest.approx([row[0] for row in table["values"]], rel=1e-12, abs=1e-18)


def test_mae_by_epoch_and_iteration():
    table = TABLES["mae_adjust_learning_rate"][0]
    assert table["min_lr"] == 0
    iterations = table["iters_per_epoch"]
    for step in range(120):
        ours = rate(
            table["lr"],
            *divmod(step, iterations),
            iterations,
            epochs=table["epochs"],
            warmup=table["warmup_epochs"],
        )
        assert ours == pytest.approx(table["values"][step][0], rel=1e-12)


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
