"""Schedules and layer groups of dense training against what the sources' own code gave."""

import pytest
import torch
from recordings import facts, matches
from torch import nn

from downstream.loop.training import optimizer_groups
from engine.training.schedules import MultipliedWarmup, Polynomial, StepDecay, TrainProgress

SCHEDULES, LAYERS = facts("lr_sched/lr_sched.json"), facts("layer_decay/layer_decay.json")


def close(ours: float, recorded: float) -> None:
    assert ours == pytest.approx(recorded, rel=1e-9, abs=1e-18)


def one_of(names, pattern: str) -> str:
    """The name of this pattern."""
    (found,) = matches(pattern, names)
    return found[0]


def test_poly_with_warm_up_is_mmcvs():
    recorded = SCHEDULES["mmcv1_poly_linear_warmup"]
    steps = recorded["max_iters"]
    schedule = MultipliedWarmup(
        schedule=Polynomial(power=recorded["power"], floor=recorded["min_lr"]),
        updates=recorded["warmup_iters"],
        start=recorded["warmup_ratio"],
    )
    first, last = (recorded[one_of(recorded, name)] for name in (r"lr_used_in_iter_0_to_\d+", r"last_\d+"))
    for step, values in [*enumerate(first), *enumerate(last, start=steps - len(last))]:
        for base, value in zip(recorded["base_lrs"], values, strict=True):
            close(schedule.at(base, TrainProgress(step=step, steps_per_epoch=1, epochs=steps)), value)


@pytest.mark.parametrize("name", [found[0] for found in matches(r"mmcv1_step(_\d+)+", SCHEDULES)])
def test_steps_are_mmcvs(name):
    recorded, epochs = SCHEDULES[name], map(int, name.split("_")[2:])
    length, values = recorded["iters_per_epoch"], recorded["lr_used_in_iter"]
    schedule = MultipliedWarmup(
        schedule=StepDecay(milestones=tuple(epochs)), updates=recorded["warmup_iters"], start=recorded["warmup_ratio"]
    )
    for step, value in enumerate(values):
        now = TrainProgress(step=step, steps_per_epoch=length, epochs=len(values) // length)
        close(schedule.at(recorded["base_lr"], now), value)


def test_polynomial_is_segmenters():
    recorded = SCHEDULES["segmenter_polynomial"]
    settings, values = recorded["args"], recorded["lr_used_in_iter"]
    schedule, steps = Polynomial(power=settings["power"], floor=settings["min_lr"]), settings["iter_max"]
    for step, row in enumerate(values[:steps]):
        for base, value in zip(recorded["base_lrs"], row, strict=True):
            close(schedule.at(base, TrainProgress(step=step, steps_per_epoch=1, epochs=steps)), value)


class Recorded(nn.Module):
    """Parameters under the names that a dense model of ours has, with the ranks of the recorded ones."""

    def __init__(self, names: list[str], vectors: set[str]) -> None:
        super().__init__()
        for name in names:
            module, *_, leaf = self, name
            for part in name.split(".")[:-1]:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module._modules[part]
            leaf = name.split(".")[-1]
            module.register_parameter(leaf, nn.Parameter(torch.zeros(2 if name in vectors else (2, 2))))


def ours_of(name: str) -> str:
    """mmseg's name of a backbone's parameter -> ours."""
    own = name.removeprefix("backbone.").replace("layers.", "blocks.")
    trunk = own.startswith(("blocks.", "patch_embed.")) or own in ("cls_token", "pos_embed", "mask_token")
    return f"backbone.vit.trunk.{own}" if name.startswith("backbone.") and trunk else name


def test_groups_are_those_of_mmseg():
    """Rates, weight decay, and that tokens are decayed."""
    recorded = LAYERS["mmseg_layer_decay"]
    theirs = {ours_of(name): value for name, value in recorded["params"].items()}
    vectors = {name for name, value in theirs.items() if value["weight_decay"] == 0}
    model = Recorded(list(theirs), vectors)
    weight_decay = max(value["weight_decay"] for value in theirs.values())
    groups = optimizer_groups(
        model, recorded["depth"], recorded["decay"], recorded["base_lr"], weight_decay=weight_decay, decay_tokens=True
    )
    assert sum(len(group["names"]) for group in groups) == len(theirs)
    for group in groups:
        for name in group["names"]:
            close(group["lr"], theirs[name]["lr"])
            assert group["weight_decay"] == theirs[name]["weight_decay"], name


def test_layers_are_those_of_ibot():
    recorded = LAYERS["mmcv1_ibot_layer_ids"]
    depth, decay = recorded["depth"], 0.65
    model = Recorded([ours_of(name) for name in recorded["ids"]], set())
    groups = optimizer_groups(model, depth, decay, 1.0, weight_decay=0.0, decay_tokens=False)
    rates = {name: group["lr"] for group in groups for name in group["names"]}
    for name, layer in recorded["ids"].items():
        close(rates[ours_of(name)], decay ** (depth + 1 - layer))


def test_tokens_and_what_does_not_train():
    names = ["backbone.vit.trunk.pos_embed", "backbone.vit.trunk.blocks.0.mlp.fc1.weight", "decode_head.conv.weight"]
    model = Recorded(names, set())
    model.get_parameter(names[1]).requires_grad_(False)
    groups = optimizer_groups(model, 2, 0.5, 1.0, weight_decay=0.1, decay_tokens=False)
    assert [(group["names"], group["lr"], group["weight_decay"]) for group in groups] == [
        (names[:1], 0.125, 0.0),
        (names[2:], 1.0, 0.1),
    ]
