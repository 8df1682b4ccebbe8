"""MoCo-v3 against recorded steps of its official code (facebookresearch/moco-v3 c349e6e), in float64.

Large tensors are recorded in float32. No scheduler ran: a step's rate and momentum are those of its fractional epoch.
"""

from dataclasses import replace

import pytest
import torch
from recorded import EXACT, close, close_norm, close_states, count, doubled, fill
from recordings import depth_of, facts, matches, steps_per_epoch, tensors, under

from engine.lars import Lars
from pretrain.loop.updates import Updates
from pretrain.method import TrainProgress
from pretrain.methods.mocov3 import METHOD, Settings
from pretrain.parts.sizes import SINCOS_ROWS, VIT_SMOKE
from pretrain.recipe import Recipe
from pretrain.schedules import WarmupCosine, cosine

DATA, CONFIG = doubled(tensors("mocov3/golden.safetensors")), facts("mocov3/config.json")
FLOAT64 = 1e-6
ROUNDING = 1e-12  # a smaller recorded gradient norm is zero in exact arithmetic: the official code ran in float64
STEPS = count(DATA, "step{}/loss")
EPOCHS_OF = [CONFIG["e0"] + 0.5 * step for step in range(STEPS)]  # README: step k is at e0 + 0.5 k
PER_EPOCH = steps_per_epoch([*EPOCHS_OF, *DATA["sched/epochs"].tolist()])
LARS = dict(lr=0.6, weight_decay=1e-2, momentum=0.9)  # README


class WithGradients(Updates):
    """Keeps the gradients of the last update."""

    def clipped(self) -> float:
        named = self.method.named_parameters()
        self.raw_gradients = {name: p.grad.clone() for name, p in named if p.requires_grad}
        return super().clipped()


def our_name(name: str) -> str:
    """Official parameter name -> ours."""
    name = name.replace("base_encoder.", "base.").replace("momentum_encoder.", "momentum.")
    for network in ("base", "momentum"):
        name = name.replace(f"{network}.head.", f"{network}.projector.")
        if name.startswith(f"{network}.") and not name.startswith(f"{network}.projector."):
            name = name.replace(f"{network}.", f"{network}.vit.trunk.", 1)
    return name


def at(epoch: float) -> TrainProgress:
    return TrainProgress(step=round(epoch * PER_EPOCH), steps_per_epoch=PER_EPOCH, epochs=CONFIG["epochs"])


def recorded_recipe() -> Recipe:
    start = under(DATA, "model0/base_encoder.")
    sizes = dict(image_size=CONFIG["img"], patch_size=CONFIG["patch"], width=CONFIG["dim"], heads=CONFIG["heads"])
    sizes |= dict(depth=depth_of(start), mlp_hidden=len(start["blocks.0.mlp.fc1.bias"]))
    settings = Settings(
        projector_hidden=len(start["head.0.weight"]),
        projector_width=CONFIG["out"],
        teacher_momentum=CONFIG["m"],
        freeze_patches=CONFIG["freeze_patch"],
        temperature=CONFIG["T"],
    )
    return Recipe(
        source="recorded",
        spec=replace(VIT_SMOKE, **sizes, **SINCOS_ROWS),
        settings=settings,
        epochs=CONFIG["epochs"],
        batch=CONFIG["gbatch"],
        lr=CONFIG["lr"],
        schedule=WarmupCosine(warmup=CONFIG["warm"]),
        weight_decay=CONFIG["wd"],
    )


@pytest.fixture
def updates() -> WithGradients:
    recipe = recorded_recipe()
    method = METHOD(recipe.spec, recipe.settings)
    fill(method, {our_name(name): tensor for name, tensor in under(DATA, "model0/").items()})
    return WithGradients(method.double(), recipe)


def views(step: int) -> dict[str, torch.Tensor]:
    return {name: DATA[f"step{step}/x{number}"] for number, name in enumerate(("first", "second"), start=1)}


def test_recorded_updates(updates):
    """Losses, every gradient, weights and batch norms' statistics after all steps."""
    for step, epoch in enumerate(EPOCHS_OF):
        progress = at(epoch)
        logs = updates.run([views(step)], progress)
        close(updates.optimizer.param_groups[0]["lr"], DATA[f"step{step}/lr"], EXACT, f"rate {step}")
        close(logs["loss"], DATA[f"step{step}/loss"], FLOAT64, f"loss {step}")
        norms = {our_name(name): norm for name, norm in under(DATA, f"step{step}/gradnorm/").items()}
        assert norms.keys() == updates.raw_gradients.keys()
        for name, norm in norms.items():
            close_norm(updates.raw_gradients[name], norm, FLOAT64, name, ROUNDING)
        for name, gradient in under(DATA, f"step{step}/grad/").items():
            if norms[our_name(name)] > ROUNDING:
                close(updates.raw_gradients[our_name(name)], gradient, FLOAT64, f"gradient of {name}")
    ours, ends = updates.method.state_dict(), under(DATA, f"model{STEPS}/")
    assert {our_name(name) for name in ends} == ours.keys()
    rounding = [name for name, end in ends.items() if end.is_floating_point() and 0 < end.norm() < ROUNDING]
    for name in rounding:  # means behind a batch norm and a layer without bias
        assert ours[our_name(name)].norm() < ROUNDING, name
    close_states(ours, {name: end for name, end in ends.items() if name not in rounding}, FLOAT64, our_name)


@pytest.mark.parametrize("step", range(STEPS))
def test_forward_passes(updates, step):
    """What predictor and moving average give, and both terms of the loss."""
    method = updates.method
    for earlier in range(step):
        updates.run([views(earlier)], at(EPOCHS_OF[earlier]))
    method.before_forward(at(EPOCHS_OF[step]))
    queries, keys = method.predictions(views(step)), method.targets(views(step))
    for number, (query, key, other) in enumerate(zip(queries, keys, reversed(keys), strict=True), start=1):
        close(query, DATA[f"step{step}/q{number}"], FLOAT64, f"q{number}")
        close(key, DATA[f"step{step}/k{number}"], FLOAT64, f"k{number}")
        close(method.contrast(query, other), DATA[f"step{step}/loss_term{number}"], FLOAT64, f"term {number}")


def test_initial_state_is_of_the_recorded_form(updates):
    """Positions are the official table, and what is frozen there has no gradient here."""
    recipe = recorded_recipe()
    fresh = METHOD(recipe.spec, recipe.settings)
    table = DATA["model0/base_encoder.pos_embed"]
    close(fresh.base.vit.trunk.pos_embed, table, FLOAT64, "positions")
    trained = {our_name(name) for name in under(DATA, "step0/gradnorm/")}
    assert {name for name, p in fresh.named_parameters() if p.requires_grad} == trained


def test_schedules():
    recipe = recorded_recipe()
    for number, epoch in enumerate(DATA["sched/epochs"].tolist()):
        progress = at(epoch)
        close(recipe.schedule.at(recipe.peak, progress), DATA["sched/lr"][number], EXACT, f"rate at {epoch}")
        momentum = cosine(CONFIG["m"], 1.0, progress.step / progress.steps)
        close(momentum, DATA["sched/momentum"][number], EXACT, f"momentum at {epoch}")
    for step, epoch in enumerate(EPOCHS_OF):
        momentum = cosine(CONFIG["m"], 1.0, at(epoch).step / at(epoch).steps)
        close(momentum, DATA[f"step{step}/momentum"], EXACT, f"momentum of step {step}")


def test_lars():
    names = [found[1] for found in matches(r"lars/(p\d+)_before", DATA)]
    assert names
    parameters = {name: torch.nn.Parameter(DATA[f"lars/{name}_before"].clone()) for name in names}
    optimizer = Lars(list(parameters.values()), **LARS)
    for step in range(count(DATA, f"lars/{names[0]}_after{{}}")):
        for name, parameter in parameters.items():
            parameter.grad = DATA[f"lars/grad{name[1:]}_step{step}"].clone()
        optimizer.step()
        for name, parameter in parameters.items():
            close(parameter, DATA[f"lars/{name}_after{step}"], FLOAT64, f"{name} after {step}")
