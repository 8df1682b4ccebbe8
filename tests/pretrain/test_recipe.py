"""Recipes and their schedules: impossible values are refused by name."""

from dataclasses import replace

import pytest
from refusals import refusal

from engine.settings import PositiveInt, Validated
from pretrain.methods import capi, dino, dinov2, ibot, mae, simdinov2, simmim
from pretrain.schedules import CosineTo, CountedCosine, Multistep, WarmupCosine

INFINITE = [float("nan"), float("inf")]


MAE = mae.RECIPES["vit_b"]
COSINE = CosineTo(end=0.4)
# A recipe or a schedule, the field as the message names it, a value, and the rule in the message.
REFUSED = [
    *((MAE, "lr", value, "above 0") for value in (0.0, -1.0, *INFINITE)),
    *((MAE, name, value, "at least 0") for name in ("clip", "weight_decay", "lr_batch") for value in (-1.0, *INFINITE)),
    *((MAE, name, 0, "at least 1") for name in ("epochs", "batch")),
    *((MAE, name, value, "") for name, value in (("betas", (0.9, 1.0)), ("momentum", -0.1), ("optimizer", "sgd"))),
    *(
        (method.RECIPES["vit_b"].schedule, "schedule.warmup", value, "at least 0")
        for method in (mae, dino, simmim)
        for value in (-1.0, *INFINITE)
    ),
    *((WarmupCosine(warmup=1), "schedule.stretch", value, "at least 1") for value in (0.5, -1.0, *INFINITE)),
    (CountedCosine(warmup=1, start=0.2), "schedule.stretch", 0.5, "at least 1"),
    *((COSINE, "weight_decay_schedule.end", value, "at least 0") for value in (-0.1, *INFINITE)),
    (COSINE, "weight_decay_schedule.stretch", 0.5, ""),
    (COSINE, "first", 2, ""),
    *(
        (simmim.RECIPES["vit_b"].schedule, "schedule.milestones", (3.0, value), "at least 0")
        for value in (-1.0, *INFINITE)
    ),
]


def test_values_out_of_range_are_refused():
    for part, name, value, rule in REFUSED:
        message = refusal(replace, part, **{name.rpartition(".")[2]: value})
        assert f"{name}={value}" in message or f"{name}={value!r}" in message
        assert rule in message


@pytest.mark.parametrize("method", [mae, dino, simmim], ids=["WarmupCosine", "TableCosine", "Multistep"])
def test_a_warmup_as_long_as_the_training_is_refused(method):
    recipe = next(iter(method.RECIPES.values()))
    if isinstance(recipe.schedule, Multistep):  # whose milestones are late
        recipe = replace(recipe, schedule=replace(recipe.schedule, milestones=()))
    warmup = recipe.schedule.warmup
    assert replace(recipe, epochs=warmup + 1).epochs == warmup + 1
    with pytest.raises(ValueError, match=f"^schedule.warmup={warmup} with epochs={warmup}: nothing is left .*epochs$"):
        replace(recipe, epochs=warmup)


def test_milestones_after_the_end_of_the_training_are_refused():
    """SimMIM's rate would never drop in 100 of its 800 epochs."""
    recipe = simmim.RECIPES["vit_b"]
    assert replace(recipe, epochs=701).epochs == 701
    for epochs in (100, 700):
        message = rf"^schedule.milestones=\(700,\) with epochs={epochs}: nothing is left after 700; give "
        with pytest.raises(ValueError, match=message):
            replace(recipe, epochs=epochs)


def test_a_lowered_peak_or_weight_decay_does_not_rise_to_its_end_in_silence():
    recipe = replace(dino.RECIPES["vit_s"], lr_batch=0)
    floor = recipe.schedule.floor
    assert replace(recipe, lr=floor).peak == floor
    assert not [*recipe.notes()]
    (note,) = replace(recipe, lr=floor / 2).notes()
    assert f"schedule.floor={floor} is above the peak" in note
    assert "weight_decay_schedule.end=0.4" in refusal(replace, recipe, weight_decay=0.0)
    assert replace(recipe, weight_decay=0.0, weight_decay_schedule=CosineTo(end=0.0)).weight_decay == 0


@pytest.mark.parametrize(
    ("method", "name", "changes"),
    [
        (dino, "vit_b", {"freeze_prototypes": 3}),
        (ibot, "vit_s", {"mask_start": 5}),
        (capi, "vit_l14", {"momentum_warmup": 641}),
        (dinov2, "vit_l", {"gram_start": 3, "gram_weight": 1.0}),
    ],
)
def test_what_a_short_training_would_never_begin_is_refused(method, name, changes):
    """A run with --set epochs=2 keeps the settings of hundreds of epochs."""
    recipe = method.RECIPES[name]
    recipe = replace(recipe, schedule=replace(recipe.schedule, warmup=0), settings=replace(recipe.settings, **changes))
    setting, value = next(iter(changes.items()))
    assert replace(recipe, epochs=value + 1).epochs == value + 1
    assert f"{setting}={value} with epochs={value}: " in refusal(replace, recipe, epochs=value)


def test_all_settings_that_are_too_long_are_named_at_once():
    message = refusal(replace, dino.RECIPES["vit_b"], epochs=2)
    assert "schedule.warmup=10 with epochs=2" in message and "freeze_prototypes=3 with epochs=2" in message


def test_gram_anchoring_that_is_off_begins_at_any_time():
    recipe = dinov2.RECIPES["smoke"]
    assert replace(recipe, settings=replace(recipe.settings, gram_start=9)).settings.gram_start == 9


def test_a_rise_longer_than_the_training_is_noted():
    recipe = dino.RECIPES["vit_b"]
    assert not [*recipe.notes()]
    (note,) = replace(recipe, epochs=20).notes()
    assert "teacher_warmup=50" in note and "20 epochs" in note
    (note,) = replace(simdinov2.RECIPES["smoke"], settings=simdinov2.Settings(end_epoch=9)).notes()
    assert "end_epoch=9" in note


class Undecorated(Validated):
    steps: PositiveInt = 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Undecorated(), "Undecorated is not a dataclass, so steps is not a setting"),
        ({"steps": 3}, "settings=.*dataclass"),
    ],
)
def test_settings_that_are_no_dataclass_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        replace(MAE, settings=settings)
