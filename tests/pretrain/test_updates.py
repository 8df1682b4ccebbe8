"""One update: half precision, clipping, values that are not finite, rates of groups."""

import math

import pytest
import torch
from small_trainings import batches, plan, progress, same, small_recipe, updates

from pretrain.method import Group

HUGE = 2.0**120  # a scale under which every gradient of a float16 pass overflows


def update(training, step=0):
    return training.run(batches(training.method, plan(), step), progress(plan(), step))


def weights(training):
    return {name: tensor.clone() for name, tensor in training.method.state_dict().items()}


def test_float16_gradients_are_unscaled_before_clipping_and_the_log():
    plain, half = (updates("mae", small_recipe("mae"), precision=p) for p in ("float32", "float16"))
    logs = update(plain), update(half)
    assert half.scaler.get_scale() == 2.0**16  # torch's initial scale
    assert logs[1]["loss"] == pytest.approx(logs[0]["loss"], rel=0.02)
    assert logs[1]["grad_norm"] == pytest.approx(logs[0]["grad_norm"], rel=0.02)


def test_float16_skips_an_overflowing_update_and_halves_the_scale():
    training = updates("mae", small_recipe("mae"), precision="float16")
    training.scaler.load_state_dict(training.scaler.state_dict() | {"scale": HUGE})
    before = weights(training)
    logs = update(training)
    assert math.isfinite(logs["loss"]) and not math.isfinite(logs["grad_norm"])
    assert same(weights(training), before) and training.scaler.get_scale() == HUGE / 2
    restored = updates("mae", small_recipe("mae"), precision="float16")
    restored.scaler.load_state_dict(training.scaler.state_dict())
    assert restored.scaler.get_scale() == HUGE / 2
    training.scaler.load_state_dict(training.scaler.state_dict() | {"scale": 1024.0})
    update(training, 1)
    assert not same(weights(training), before)


def test_a_gradient_that_is_not_finite_changes_no_weight():
    training = updates("mae", small_recipe("mae"))
    update(training)
    before = weights(training)
    training.groups[0].parameters["autoencoder.pixels.bias"].register_hook(lambda gradient: gradient / 0.0)
    with pytest.raises(
        ValueError, match=r"the gradient norm is (inf|nan) in step 1 of 6 .*losses before: 1\."
    ) as error:
        update(training, 1)
    assert same(weights(training), before) and "\n" not in str(error.value)


@pytest.mark.parametrize("each", [False, True])
def test_gradients_are_clipped_together_or_each(each):
    """The joint gradient to the norm 0.1, or every parameter's."""
    training = updates("mae", small_recipe("mae", clip=0.1, clip_each=each))
    before = update(training)["grad_norm"]
    norms = torch.stack([p.grad.norm() for p in training.method.parameters() if p.requires_grad])
    assert before > 0.2
    assert (norms.max() if each else norms.norm()).item() == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("clipped", [True, False])
def test_clipping_of_parts_skips_frozen_and_unclipped_ones(clipped):
    """Encoder and other parameters are clipped separately; the frozen encoder has no gradient."""
    training = updates("mae", small_recipe("mae", clip=0.1))
    training.backward(next(iter(batches(training.method, plan(), 0))), progress(plan(), 0))
    parameters = {name: p for name, p in training.method.named_parameters() if p.requires_grad}
    rest = {name: p for name, p in parameters.items() if p not in training.encoder_parameters}
    encoder = {name: p for name, p in parameters.items() if p in training.encoder_parameters}
    training.groups = [
        Group(parameters=encoder, clipped_with="encoder"),
        Group(parameters=rest, clipped_with="rest", clipped=clipped),
    ]
    for parameter in encoder.values():
        parameter.grad = None
    norm = torch.stack([p.grad.norm() for p in rest.values()]).norm().item()
    assert norm > 0.2
    assert training.clip_gradients() == pytest.approx(norm)
    after = torch.stack([p.grad.norm() for p in rest.values()]).norm().item()
    assert after == pytest.approx(0.1 if clipped else norm, rel=1e-3)


@pytest.mark.parametrize(("step", "norm"), [(0, 0.1), (3, 0.06), (5, 0.06 - 0.04 * math.cos(math.pi / 6))])
def test_the_clipping_norm_follows_half_a_cosine(step, norm):
    """From 0.1 to 0.02 over 6 updates."""
    training = updates("mae", small_recipe("mae", clip=0.1, clip_end=0.02))
    assert update(training, step)["grad_norm"] > 0.2
    gradients = [p.grad.norm() for p in training.method.parameters() if p.requires_grad]
    assert torch.stack(gradients).norm().item() == pytest.approx(norm, rel=1e-3)


def test_weight_decay_of_a_group_overrides_the_recipes():
    training = updates("mae", small_recipe("mae"))
    training.set_rates(progress(plan(), 3))
    lr, decay = training.rates(progress(plan(), 3))
    assert [group["lr"] for group in training.optimizer.param_groups] == [lr, lr]
    assert [group["weight_decay"] for group in training.optimizer.param_groups] == [0.0, decay]


@pytest.mark.parametrize(
    ("name", "encoder", "token"),
    [
        ("mae", "autoencoder.vit.trunk.", ""),
        ("simmim", "predictor.vit.trunk.", "predictor.mask_token"),
        ("dinov2", "student.vit.trunk.", "mask_token"),
    ],
)
def test_layer_decay_lowers_the_rates_of_earlier_layers(name, encoder, token):
    """Rates after the encoder, including mask tokens of decoders, do not change."""
    plain, layered = (updates(name, small_recipe(name, layer_decay=decay)) for decay in (1.0, 0.5))
    scales = [
        {n: group.lr_scale for group in training.groups for n in group.parameters} for training in (plain, layered)
    ]
    assert scales[0].keys() == scales[1].keys()
    factors = {n: scales[1][n] / scale for n, scale in scales[0].items()}
    depth, encoder_names = plain.method.spec.depth, {n.removeprefix(encoder) for n in factors if n.startswith(encoder)}
    assert factors[f"{encoder}patch_embed.proj.weight"] == 0.5 ** (depth + 1)
    assert [factors[f"{encoder}blocks.{i}.mlp.fc1.weight"] for i in range(depth)] == [
        0.5 ** (depth - i) for i in range(depth)
    ]
    assert not encoder_names & {"norm.weight"} or factors[f"{encoder}norm.weight"] == 1.0
    assert not token or factors[token] == 0.5 ** (depth + 1)
    assert all(factor == 1.0 for n, factor in factors.items() if not n.startswith(encoder) and n != token)
    layered.set_rates(progress(plan(), 3))
    lr, _ = layered.rates(progress(plan(), 3))
    rates = [group["lr"] for group in layered.optimizer.param_groups]
    assert rates == [lr * group.lr_scale for group in layered.groups]


def test_a_method_that_trains_only_its_encoder_cannot_freeze_it():
    with pytest.raises(ValueError, match="freeze_first_epochs=1: "):
        updates("nepa", small_recipe("nepa"), frozen_epochs=1)
