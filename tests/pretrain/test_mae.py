"""MAE beyond its recorded steps: the ablations of table 1, initial weights."""

from dataclasses import replace

import pytest
import torch
from toys import SMALL, picture, views_of

from engine.seeding import AUGMENT, seeded
from pretrain.method import Method
from pretrain.methods.mae import METHOD, Settings
from pretrain.parts.masking import order_of, patchify
from pretrain.recipe import SINCOS

SPEC = replace(SMALL, **SINCOS)
SETTINGS = Settings(decoder_width=16, decoder_depth=1, decoder_heads=2)


def method_of(**changes) -> Method:
    torch.manual_seed(0)
    return METHOD(SPEC, replace(SETTINGS, **changes)).double()


@pytest.mark.parametrize("masked", [False, True])
def test_the_encoder_uses_visible_pixels_and_the_loss_hidden_ones(masked):
    method = method_of(encoder_mask_tokens=masked)
    network, views = method.autoencoder, views_of(method)
    ids = order_of(views["noise"])
    images = views["image"].requires_grad_()
    latent = network.encode(images, ids)
    assert latent.shape == (6, 1 + (16 if masked else 4), SPEC.width)
    (gradient,) = torch.autograd.grad(latent.square().sum(), images)
    visible = torch.zeros(6, 16, dtype=torch.bool).scatter_(1, ids[:, :4], True)
    assert torch.equal(patchify(gradient, 4).abs().sum(-1) > 0, visible)
    (gradient,) = torch.autograd.grad(network.loss(latent.detach(), images, ids), images)
    assert torch.equal(patchify(gradient, 4).abs().sum(-1) > 0, ~visible)


def test_mask_tokens_in_the_encoder_follow_their_definition():
    method = method_of(encoder_mask_tokens=True)
    network, views = method.autoencoder, views_of(method)
    ids, images = order_of(views["noise"]), views["image"]
    patches = network.vit.project(images)
    patches[torch.arange(6).unsqueeze(1), ids[:, 4:]] = network.mask_token[0]
    tokens = network.vit.encode(network.vit.add_positions(patches, SPEC.grid))[0]
    in_order = tokens[:, 1:].gather(1, ids.unsqueeze(-1).expand(-1, -1, SPEC.width))
    torch.testing.assert_close(network.encode(images, ids)[:, 1:], in_order)
    torch.testing.assert_close(network.context(network.encode(images, ids), ids), in_order[:, :4].mean(1))


def test_crops_of_the_ablation():
    """Table 1e: the centre crop draws nothing, crops of fixed size differ, and so do jittered colours."""
    images_by_crop = {}
    for name, changes in {
        "centre": {"crop": "centre"},
        "fixed": {"crop": "fixed"},
        "random": {},
        "jitter": {"crop": "centre", "colour_jitter": 1.0},
    }.items():
        view = method_of(**changes).views()
        images = []
        for seed in range(4):
            with seeded(AUGMENT, seed):
                images.append(view(picture(1))["image"])
        images_by_crop[name] = images
    assert all(image.shape == (3, 16, 16) for images in images_by_crop.values() for image in images)
    assert all(torch.equal(image, images_by_crop["centre"][0]) for image in images_by_crop["centre"])
    assert not torch.equal(images_by_crop["fixed"][0], images_by_crop["fixed"][1])
    assert not torch.equal(images_by_crop["random"][0], images_by_crop["random"][1])
    assert not torch.equal(images_by_crop["jitter"][0], images_by_crop["jitter"][1])


def test_initial_weights_follow_the_official_code():
    torch.manual_seed(0)
    trunk = METHOD(replace(SPEC, width=64), SETTINGS).autoencoder.vit.trunk
    weight = trunk.patch_embed.proj.weight
    assert weight.abs().max() <= (6 / (64 + 48)) ** 0.5 and weight.std().item() == pytest.approx(
        (2 / (64 + 48)) ** 0.5, rel=0.1
    )
    assert trunk.patch_embed.proj.bias.abs().max() > 0  # torch's default
    assert trunk.blocks[0].attn.qkv.bias.abs().max() == 0
    assert trunk.cls_token.std().item() == pytest.approx(0.02, rel=0.3)
