"""SimMIM beyond its recorded steps: masks, heads and losses of the ablations, initial weights."""

from dataclasses import replace

import pytest
import torch
from small_trainings import forward_pass
from torch.nn import functional as F
from toys import SMALL, progress, views_of

from pretrain.method import Method
from pretrain.methods.simmim import METHOD, Settings, blocks_of
from pretrain.parts.masking import mask_at, order_of, patchify
from pretrain.recipe import RELATIVE

SPEC = replace(SMALL, **RELATIVE)
SETTINGS = Settings(mask_patch=4, drop_path=0.0)


def method_of(**changes) -> Method:
    torch.manual_seed(0)
    return METHOD(SPEC, replace(SETTINGS, **changes)).double()


def test_blocks_are_squares_in_raster_order():
    assert blocks_of(SPEC, 8).tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    assert blocks_of(SPEC, 4).flatten().tolist() == list(range(16))


@pytest.mark.parametrize("area", ["masked", "all"])
@pytest.mark.parametrize(("loss", "error"), [("l1", F.l1_loss), ("l2", F.mse_loss), ("smooth_l1", F.smooth_l1_loss)])
def test_losses_follow_their_definition(loss, error, area):
    method = method_of(loss=loss, loss_area=area)
    network, views = method.predictor, views_of(method)
    order = order_of(views["noise"])
    prediction = network.pixels(network.encode(views["image"], order)[:, 1:])
    hidden = mask_at(network.hidden_ids(order), 16)
    compared = hidden if area == "masked" else torch.ones_like(hidden)
    expected = error(prediction[compared], patchify(views["image"], 4)[compared])
    torch.testing.assert_close(forward_pass(method, views, progress()).loss, expected, rtol=1e-7, atol=0)


def test_the_context_is_the_mean_of_visible_or_of_all_patches():
    method = method_of(mask_patch=8)
    network, views = method.predictor, views_of(method)
    order = order_of(views["noise"])
    latent = network.encode(views["image"], order)
    hidden = mask_at(network.hidden_ids(order), 16)
    torch.testing.assert_close(network.context(latent, order)[0], latent[0, 1:][~hidden[0]].mean(0))
    network.seen = "all"
    torch.testing.assert_close(network.context(latent, order), latent[:, 1:].mean(1))


@pytest.mark.parametrize(("sampling", "hidden"), [("random", 10), ("block", 10), ("square", 9)])
def test_samplings_hide_the_set_number_of_blocks(sampling, hidden):
    method = method_of(sampling=sampling, head_depth=2)
    assert len(method.predictor.blocks) - method.predictor.visible == hidden


def test_paths_are_dropped_as_set():
    method = method_of(drop_path=0.5)
    views = views_of(method)
    torch.manual_seed(0)
    assert len({forward_pass(method, views, progress()).loss.item() for _ in range(4)}) > 1
    method = method_of()
    assert len({forward_pass(method, views, progress()).loss.item() for _ in range(4)}) == 1


def test_initial_weights_follow_the_official_code():
    torch.manual_seed(0)
    network = METHOD(replace(SPEC, width=64, mlp_hidden=256), replace(SETTINGS, layer_scale_start=0.3)).predictor
    trunk = network.vit.trunk
    for tensor in (trunk.blocks[0].attn.qkv.weight, trunk.patch_embed.proj.weight, trunk.cls_token, network.mask_token):
        assert 0.015 < tensor.abs().max() <= 0.02  # cut off at one standard deviation
    for number, block in enumerate(trunk.blocks, start=1):
        for weight in (block.attn.proj.weight, block.mlp.fc2.weight):
            assert weight.abs().max().item() == pytest.approx(0.02 / (2 * number) ** 0.5, rel=0.02)
        assert (block.gamma_1 == 0.3).all() and (block.gamma_2 == 0.3).all()
        assert (block.attn.q_bias == 0).all() and (block.attn.v_bias == 0).all() and (block.mlp.fc1.bias == 0).all()
    assert (trunk.rel_pos_bias.relative_position_bias_table == 0).all() and (trunk.patch_embed.proj.bias == 0).all()
    assert network.pixels[0].bias.abs().max() > 0  # torch's default
