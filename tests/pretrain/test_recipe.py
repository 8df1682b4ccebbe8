"""Recipes and their schedules: values that cannot be are refused in one line that names them."""

from dataclasses import replace

import pytest

from pretrain.methods import dino, mae, simmim
from pretrain.schedules import CosineTo, Multistep, WarmupCosine

INFINITE = [float("nan"), float("inf")]


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [("lr", value, "a finite number above 0") for value in (0.0, -1.0, *INFINITE)]
    + [(name, value, "0 or more") for name in ("clip", "weight_decay", "lr_batch") for value in (-1.0, *INFINITE)]
    + [(name, 0, "1 or more") for name in ("epochs", "batch")],
)
def test_numbers_that_cannot_be(name, value, rule):
    with pytest.raises(ValueError, match=f"^{name}={value}: must be {rule}$|^{name}={value}: must be .*, {rule}$"):
        replace(mae.RECIPES["vit_b"], **{name: value})


@pytest.mark.parametrize("method", [mae, dino, simmim], ids=["WarmupCosine", "TableCosine", "Multistep"])
@pytest.mark.parametrize("value", [-1.0, *INFINITE])
def test_warmups_that_cannot_be(method, value):
    schedule = next(iter(method.RECIPES.values())).schedule
    with pytest.raises(ValueError, match=f"^schedule.warmup={value}: must be a finite number, 0 or more$"):
        replace(schedule, warmup=value)


@pytest.mark.parametrize("method", [mae, dino, simmim], ids=["WarmupCosine", "TableCosine", "Multistep"])
def test_a_warmup_that_leaves_nothing_is_refused(method):
    recipe = next(iter(method.RECIPES.values()))
    warmup = recipe.schedule.warmup
    assert replace(recipe, epochs=warmup + 1).epochs == warmup + 1
    with pytest.raises(ValueError, match=f"^schedule.warmup={warmup} with epochs={warmup}: nothing is left .*epochs$"):
        replace(recipe, epochs=warmup)


@pytest.mark.parametrize("stretch", [0.5, -1.0, *INFINITE])
def test_a_cosine_that_would_rise_again_is_refused(stretch):
    with pytest.raises(ValueError, match=f"^schedule.stretch={stretch}: must be 1 or more"):
        WarmupCosine(warmup=1, stretch=stretch)


@pytest.mark.parametrize("value", [-0.1, *INFINITE])
def test_other_parts_of_schedules_that_cannot_be(value):
    with pytest.raises(ValueError, match=f"^weight_decay_schedule.end={value}: must be a finite number, 0 or more$"):
        CosineTo(end=value)
    with pytest.raises(ValueError, match=r"^schedule.milestones=.*: must be a finite number, 0 or more$"):
        Multistep(warmup=1, start=0.0, milestones=(3.0, value))


@pytest.mark.parametrize("changes", [{"betas": (0.9, 1.0)}, {"momentum": -0.1}, {"optimizer": "sgd"}])
def test_optimisers_that_cannot_be(changes):
    with pytest.raises(ValueError, match=f"^{next(iter(changes))}=[^\n]*$"):
        replace(mae.RECIPES["vit_b"], **changes)
