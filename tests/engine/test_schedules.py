"""Schedules against recordings of the official codes, in float64; micro-batch sizes and losses that are not finite."""

import pytest
from recordings import facts, matches

from engine.training.schedules import (
    MultipliedWarmup,
    PacedCosine,
    Polynomial,
    StepDecay,
    TableCosine,
    TimmCosine,
    TrainProgress,
    WarmupCosine,
    check_finite,
    micro_batch_size,
    share_of,
)

TABLES = facts("lr_sched/lr_sched.json")


def progress(step: int, steps_per_epoch: int, epochs: int) -> TrainProgress:
    return TrainProgress(step=step, steps_per_epoch=steps_per_epoch, epochs=epochs)


def steps_of(table):
    """The steps whose rates a table of MAE's holds."""
    ((first, last),) = (map(int, match.groups()) for match in matches(r"first (\d+) and last (\d+)", [table["stored"]]))
    return [*range(first), *range(table["n_total"] - last, table["n_total"])]


@pytest.mark.parametrize("table", TABLES["mae_adjust_learning_rate"], ids=lambda table: f"{table['epochs']} epochs")
def test_mae_schedules_by_fractional_epochs(table):
    """Every column is a parameter group, whose rate layer decay scales."""
    iterations, schedule = table["iters_per_epoch"], WarmupCosine(warmup=table["warmup_epochs"], floor=table["min_lr"])
    assert table["n_total"] == table["epochs"] * iterations
    scales = [table.get(f"lr_scale_{column}", 1.0) for column in table["columns"]]
    for step, row in zip(steps_of(table), table["values"], strict=True):
        position = progress(step, iterations, table["epochs"])
        ours = [schedule.at(table["lr"], position, scale) for scale in scales]
        assert ours == pytest.approx(row, rel=1e-12, abs=1e-18)


def test_paced_cosine_equals_mae_without_a_floor():
    table = next(table for table in TABLES["mae_adjust_learning_rate"] if table["min_lr"] == 0)
    schedule = PacedCosine(warmup=table["warmup_epochs"])
    for step, row in zip(steps_of(table), table["values"], strict=True):
        ours = schedule.at(table["lr"], progress(step, table["iters_per_epoch"], table["epochs"]))
        assert ours == pytest.approx(row[0], rel=1e-12, abs=1e-18)


@pytest.mark.parametrize("name", ["beit_cosine_scheduler", "dino_cosine_scheduler"])
def test_beit_and_dino_schedule_by_tables(name):
    values, arguments = TABLES[name]["values"], TABLES[name]["args"]
    schedule = TableCosine(warmup=arguments["warmup_epochs"], floor=arguments["final_value"])
    positions = [progress(step, arguments["niter_per_ep"], arguments["epochs"]) for step in range(len(values))]
    ours = [schedule.at(arguments["base_value"], position) for position in positions]
    assert ours == pytest.approx(values, rel=1e-12, abs=1e-18)


def test_torch_cosine_changes_once_an_epoch():
    table = TABLES["cosine_annealing_per_epoch"]
    schedule, epochs = PacedCosine(pace="epoch"), table["epochs"]
    for iteration in (0, 6):
        ours = [schedule.at(table["lr"], progress(7 * epoch + iteration, 7, epochs)) for epoch in range(epochs)]
        assert ours == pytest.approx(table["lr_used_in_epoch"], rel=1e-9)  # torch computes it by recursion


def test_dinov2_changes_all_rates_every_iteration():
    table = TABLES["dinov2_per_iter_cosine"]
    for iteration, row in enumerate(table["values"]):
        factor = PacedCosine().at(1.0, progress(iteration, table["max_iter"], 1))
        ours = [lr * table["global_batch"] / 256 * factor for lr in table["base_lrs"]]
        assert ours == pytest.approx(row, rel=1e-9)


def test_msn_changes_the_rate_every_iteration():
    """MSN steps its schedule after the optimiser (linear_eval.py), so the first iteration has the full rate."""
    table = TABLES["msn_warmup_cosine"]
    arguments = table["args"]
    assert arguments["warmup_steps"] == 0
    expected = [table["lr_before_first_step_call"], *table["values_after_each_step"][:-1]]
    steps = arguments["T_max"]
    ours = [PacedCosine().at(arguments["ref_lr"], progress(step, steps, 1)) for step in range(steps)]
    assert ours == pytest.approx(expected, rel=1e-12)


VALID = {
    TimmCosine: dict(warmup=5, floor=1e-6, start=1e-6, told="epoch"),
    PacedCosine: {},
    Polynomial: {},
    StepDecay: dict(milestones=(8, 11)),
    MultipliedWarmup: dict(schedule=Polynomial(), updates=10),
}


def test_an_invalid_field_is_named_with_its_rule():
    for kind, field, value, rule in [
        (TimmCosine, "warmup", -1.0, "a number of at least 0"),
        (TimmCosine, "floor", float("nan"), "a number of at least 0"),
        (TimmCosine, "start", float("inf"), "a number of at least 0"),
        (TimmCosine, "told", "step", "choose one of update, epoch"),
        (PacedCosine, "warmup", -0.5, "a number of at least 0"),
        (PacedCosine, "pace", "day", "choose one of epoch, iteration"),
        (Polynomial, "power", 0.0, "a number above 0"),
        (Polynomial, "floor", -1e-6, "a number of at least 0"),
        (StepDecay, "milestones", (8, -1), "at least 0"),
        (StepDecay, "factor", -0.1, "a number of at least 0"),
        (MultipliedWarmup, "updates", -1, "at least 0"),
        (MultipliedWarmup, "start", 1.5, "a number from 0 to 1"),
    ]:
        kind(**VALID[kind])
        with pytest.raises(ValueError, match=rf"{field}=.*: .*{rule}$") as error:
            kind(**VALID[kind] | {field: value})
        assert "\n" not in str(error.value)


def test_processes_have_equal_shares_of_a_batch():
    assert share_of(16, 4) == 4
    with pytest.raises(ValueError, match=r"batch=15 .*set batch=14"):
        share_of(15, 2)
    with pytest.raises(ValueError, match="set batch=8"):
        share_of(3, 8)


@pytest.mark.parametrize(
    ("share", "largest", "even", "size"),
    [(12, 5, False, 4), (12, 100, False, 12), (7, 6, False, 1), (12, 5, True, 4), (6, 3, True, 2), (9, 9, True, 0)],
)
def test_micro_batches_are_the_largest_divisor(share, largest, even, size):
    assert micro_batch_size(share, largest, even) == size


def test_a_finite_loss_passes():
    check_finite(1.5, "loss", "step 3 of 9", [2.0], "lower lr")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_loss_that_is_not_finite_is_an_error_with_the_losses_before_it(value):
    with pytest.raises(ValueError) as error:
        check_finite(value, "loss", "step 9 of 9", [float(number) for number in range(9)], "lower lr")
    for text in (f"the loss is {value} in step 9 of 9", "losses before: 4, 5, 6, 7, 8;", "lower lr"):
        assert text in str(error.value)


def test_a_first_loss_that_is_not_finite_has_none_before_it():
    with pytest.raises(ValueError, match="losses before: none; lower lr"):
        check_finite(float("nan"), "loss", "step 0 of 9", [], "lower lr")
