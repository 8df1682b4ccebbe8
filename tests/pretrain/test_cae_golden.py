"""CAE against recorded steps of its official training loops (lxtGH/CAE d725971, Atten4Vis/CAE a7fd162), in float64."""

import random

import pytest
import torch
from recorded import EXACT, close, close_norm, progress
from recorded_cae import cases, first_state, is_newer, our_name, ours, views
from recordings import absent, matches, under

from checkpoints.positions import sincos_positions
from pretrain.method import TrainProgress
from pretrain.parts.mask_shapes import BlockMask
from pretrain.parts.masking import patchify

CASES = cases()
DATA, CONFIG, _ = CASES["step"]
LIMIT = 1e-6  # everything is recorded in float64
ZERO = 1e-12  # norm of a gradient that is zero in exact arithmetic, as that of a bias of all keys


def case(name: str):
    """Updates from the first state, data, configuration, recording. The newer repository has no lag."""
    start, config, recorded = CASES[name]
    changes = {"target": "current"} if is_newer(config) else {}
    return first_state(config, start, **changes), start, config, recorded


def hooked(modules) -> dict[str, torch.Tensor]:
    """Name -> what the module gives at its next call, filled as it is called."""
    found = {}
    for name, module in modules.items():
        module.register_forward_hook(lambda _, __, output, name=name: found.__setitem__(name, output.detach()))
    return found


def test_activations():
    """Of every block, in the first forward pass."""
    updates, start, _, recorded = case("step")
    method, trunk = updates.method, updates.method.vit.trunk
    named = {f"block{n}": block for n, block in enumerate(trunk.blocks)} | {"encoder": trunk.norm}
    named |= {f"regressor{n}": block for n, block in enumerate(method.regressor.blocks)}
    named |= {f"decoder{n}": block for n, block in enumerate(method.decoder.blocks)}
    found, image = hooked(named), start["in0.image"]
    visible, hidden = method.split(views(start, 0)["mask"])
    latent = method.regress(image, visible, hidden)
    logits = method.decoder(latent, method.places(hidden))
    found["patch_embed"] = method.vit.project(image)
    trunk.blocks[0].register_forward_pre_hook(lambda _, inputs: found.__setitem__("embed", inputs[0]))
    close(method.target(image, hidden), recorded["out0.latent_target"], LIMIT, "target")
    method.regress(image, visible, hidden)
    for name, tensor in under(recorded, "act0.").items():
        close(found.pop(name), tensor, LIMIT, name)
    assert not found
    close(latent, recorded["out0.latent"], LIMIT, "latent")
    close(logits.flatten(0, 1), recorded["out0.logits"], LIMIT, "logits")


def test_full_gradients():
    updates, start, _, recorded = case("step")
    updates.method(views(start, 0)).loss.backward()
    gradients = {name: parameter.grad for name, parameter in updates.method.named_parameters()}
    official = under(recorded, "grad0.") or absent("gradients")
    for name, gradient in official.items():
        close_or_tiny(ours(gradients, name), gradient, name)
    trained = {name for name, gradient in gradients.items() if gradient is not None}
    assert trained == {our_name(name) for name in official}


def close_or_tiny(gradient: torch.Tensor, recorded: torch.Tensor, name: str) -> None:
    """A gradient that is zero in exact arithmetic is rounding on both sides."""
    if recorded.norm() < ZERO:
        assert gradient.norm() < ZERO, name
    else:
        close(gradient, recorded, LIMIT, f"gradient of {name}")


@pytest.mark.parametrize("name", CASES)
def test_recorded_updates(name):
    updates, start, config, recorded = case(name)
    for step in range(config["steps"]):
        now = progress(step, config, config["steps"])
        rate = recorded.get(f"lr{step}", start[f"lr{step}"])
        close(updates.rates(now)[0], rate, EXACT, f"learning rate {step}")
        hidden = updates.method.split(views(start, step)["mask"])[1]
        target = updates.method.target(views(start, step)["image"], hidden)
        logs = updates.run([views(start, step)], now)
        for log in ("loss", "loss_main", "loss_align"):
            close(logs[log], recorded[f"{log}{step}"], LIMIT, f"{log} {step}")
        if f"out{step}.latent_target" in recorded:
            close(target, recorded[f"out{step}.latent_target"], LIMIT, f"target {step}")
        total = f"gradnorm{step}.total_before_clip"
        if total in recorded:
            close(logs["grad_norm"], recorded[total], LIMIT, f"gradient norm {step}")
        clipped = max(1.0, logs["grad_norm"] / config["clip"]) if config["clip"] else 1.0
        for official, each in under(recorded, f"gradnorm{step}.").items():
            if official != "total_before_clip":
                gradients = {our_name(official): updates.method.get_parameter(our_name(official)).grad * clipped}
                close_norm(ours(gradients, official), each, LIMIT, f"{official}, step {step}", ZERO)
    ends = under(recorded, "model_end.")
    assert ends or is_newer(config)
    for official, tensor in ends.items():
        close(ours(updates.method.state_dict(), official), tensor, LIMIT, official)


@pytest.mark.parametrize("name", [name for name, (_, config, _) in CASES.items() if "decay" in config])
def test_decayed_parameters(name):
    updates, _, config, _ = case(name)
    found = {key: group.weight_decay is None for group in updates.method.groups() for key in group.parameters}
    theirs = {our_name(key): True for key in config["decay"]} | {our_name(key): False for key in config["no_decay"]}
    assert found == theirs
    frozen = {key for key, parameter in updates.method.named_parameters() if not parameter.requires_grad}
    assert frozen == {our_name(key) for key in config["frozen"]}


def test_schedule():
    updates, _, config, recorded = case("step")
    per_epoch = len(recorded["sched.lr"]) // config["epochs"]
    for step, rate in enumerate(recorded["sched.lr"]):
        now = TrainProgress(step=step, steps_per_epoch=per_epoch, epochs=config["epochs"])
        close(updates.rates(now)[0], rate, EXACT, f"update {step}")


@pytest.mark.parametrize("found", matches(r"sincos\.d(\d+)g(\d+)", DATA), ids=lambda found: found[0])
def test_positions(found):
    """Their table is computed in float32."""
    width, side = int(found[1]), int(found[2])
    table = sincos_positions((side, side), width, "row", prefix=1, dtype=torch.float64)
    close(table.reshape(DATA[found[0]].shape), DATA[found[0]], LIMIT, "table")


def test_the_method_has_the_table():
    updates, start, config, _ = case("step")
    recorded = updates.method.positions.clone()
    fresh = type(updates.method)(updates.method.spec, updates.method.settings)
    close(fresh.positions, recorded, LIMIT, "of regressor and decoder")
    close(
        fresh.vit.trunk.pos_embed, start["model0.encoder.pos_embed"].reshape(1, -1, config["dim"]), LIMIT, "encoder's"
    )


@pytest.mark.parametrize("found", matches(r"maskgen\.(\d+)_(\d+)_(\d+)_(\d+|none)", DATA), ids=lambda found: found[0])
def test_masks_are_the_recorded_ones(found):
    side, hidden, least = (int(found[number]) for number in (1, 2, 3))
    draw = BlockMask((side, side), hidden, least, None if found[4] == "none" else int(found[4]), exact=True)
    random.seed(CONFIG["mask_seed"])
    for mask in DATA[found[0]]:
        drawn = draw()
        assert torch.equal(drawn, mask.flatten().bool()) and int(drawn.sum()) == hidden


def test_each_encoder_sees_its_own_patches_alone():
    updates, start, config, _ = case("step")
    mask = views(start, 0)["mask"]
    visible, hidden = updates.method.split(mask)
    for ids, seen in ((visible, ~mask), (hidden, mask)):
        image = start["in0.image"].clone().requires_grad_()
        updates.method.encode(updates.method.vit, image, ids).square().sum().backward()
        assert torch.equal(patchify(image.grad, config["patch"]).abs().sum(-1) > 0, seen)
