"""Schedules and layer-wise parameter groups of dense training against recordings of the official codes."""

import pytest
import torch
from recordings import facts, matches
from torch import nn

from downstream.loop.training import optimizer_groups
from engine.training.schedules import MultipliedWarmup, Polynomial, StepDecay, TrainProgress

SCHEDULES, LAYERS = facts("lr_sched/lr_sched.json"), facts("layer_decay/layer_decay.json")


def assert_close(ours: float, recorded: float) -> None:
    assert ours == pytest.approx(recorded, rel=1e-9, abs=1e-18)


def only_match(names, pattern: str) -> str:
    """The only name that matches."""
    (match,) = matches(pattern, names)
    return match[0]


def test_polynomial_schedule_with_warmup_equals_mmcvs():
    recorded = SCHEDULES["mmcv1_poly_linear_warmup"]
    steps = recorded["max_iters"]
    schedule = MultipliedWarmup(
        schedule=Polynomial(power=recorded["power"], floor=recorded["min_lr"]),
        updates=recorded["warmup_iters"],
        start=recorded["warmup_ratio"],
    )
    first, last = (recorded[only_match(recorded, name)] for name in (r"lr_used_in_iter_0_to_\d+", r"last_\d+"))
    for step, values in [*enumerate(first), *enumerate(last, start=steps - len(last))]:
        for base, value in zip(recorded["base_lrs"], values, strict=True):
            assert_close(schedule.at(base, TrainProgress(step=step, steps_per_epoch=1, epochs=steps)), value)


@pytest.mark.parametrize("name", [match[0] for match in matches(r"mmcv1_step(_\d+)+", SCHEDULES)])
def test_step_schedule_equals_mmcvs(name):
    recorded, milestones = SCHEDULES[name], map(int, name.split("_")[2:])
    steps_per_epoch, values = recorded["iters_per_epoch"], recorded["lr_used_in_iter"]
    schedule = MultipliedWarmup(
        schedule=StepDecay(milestones=tuple(milestones)),
        updates=recorded["warmup_iters"],
        start=recorded["warmup_ratio"],
    )
    for step, value in enumerate(values):
        progress = TrainProgress(step=step, steps_per_epoch=steps_per_epoch, epochs=len(values) // steps_per_epoch)
        assert_close(schedule.at(recorded["base_lr"], progress), value)


def test_polynomial_schedule_equals_segmenters():
    recorded = SCHEDULES["segmenter_polynomial"]
    settings, values = recorded["args"], recorded["lr_used_in_iter"]
    schedule, steps = Polynomial(power=settings["power"], floor=settings["min_lr"]), settings["iter_max"]
    for step, row in enumerate(values[:steps]):
        for base, value in zip(recorded["base_lrs"], row, strict=True):
            assert_close(schedule.at(base, TrainProgress(step=step, steps_per_epoch=1, epochs=steps)), value)


class RecordedParameters(nn.Module):
    """A module with parameters of given names: vectors of size 2, and 2 x 2 matrices."""

    def __init__(self, names: list[str], vectors: set[str]) -> None:
        super().__init__()
        for name in names:
            module, (*parts, leaf) = self, name.split(".")
            for part in parts:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module._modules[part]
            module.register_parameter(leaf, nn.Parameter(torch.zeros(2 if name in vectors else (2, 2))))


def our_name(name: str) -> str:
    """Our name of an mmseg parameter."""
    ours = name.removeprefix("backbone.").replace("layers.", "blocks.")
    in_trunk = ours.startswith(("blocks.", "patch_embed.")) or ours in ("cls_token", "pos_embed", "mask_token")
    return f"backbone.vit.trunk.{ours}" if name.startswith("backbone.") and in_trunk else name


def test_parameter_groups_equal_mmsegs():
    """Learning rates and weight decay, which mmseg applies to tokens too."""
    recorded = LAYERS["mmseg_layer_decay"]
    theirs = {our_name(name): value for name, value in recorded["params"].items()}
    vectors = {name for name, value in theirs.items() if value["weight_decay"] == 0}
    model = RecordedParameters(list(theirs), vectors)
    weight_decay = max(value["weight_decay"] for value in theirs.values())
    groups = optimizer_groups(
        model, recorded["depth"], recorded["decay"], recorded["base_lr"], weight_decay=weight_decay, decay_tokens=True
    )
    assert sum(len(group["names"]) for group in groups) == len(theirs)
    for group in groups:
        for name in group["names"]:
            assert_close(group["lr"], theirs[name]["lr"])
            assert group["weight_decay"] == theirs[name]["weight_decay"], name


def test_layer_numbers_equal_ibots():
    recorded = LAYERS["mmcv1_ibot_layer_ids"]
    depth, decay = recorded["depth"], 0.65
    model = RecordedParameters([our_name(name) for name in recorded["ids"]], set())
    groups = optimizer_groups(model, depth, decay, 1.0, weight_decay=0.0, decay_tokens=False)
    rates = {name: group["lr"] for group in groups for name in group["names"]}
    for name, layer in recorded["ids"].items():
        assert_close(rates[our_name(name)], decay ** (depth + 1 - layer))


def test_tokens_are_not_decayed_and_frozen_parameters_have_no_group():
    names = ["backbone.vit.trunk.pos_embed", "backbone.vit.trunk.blocks.0.mlp.fc1.weight", "decode_head.conv.weight"]
    model = RecordedParameters(names, set())
    model.get_parameter(names[1]).requires_grad_(False)
    groups = optimizer_groups(model, 2, 0.5, 1.0, weight_decay=0.1, decay_tokens=False)
    assert [(group["names"], group["lr"], group["weight_decay"]) for group in groups] == [
        (names[:1], 0.125, 0.0),
        (names[2:], 1.0, 0.1),
    ]
