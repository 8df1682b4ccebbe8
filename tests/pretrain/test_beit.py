"""BEiT beside its recordings: what the encoder sees, initial weights, the export, settings that cannot be."""

from dataclasses import replace

import pytest
import torch
from PIL import Image
from small_trainings import forward_pass
from torchvision.transforms.functional import to_tensor
from toys import SMALL, progress, views_of

from pretrain.method import Method
from pretrain.methods.beit import METHOD, Settings
from pretrain.parts.masking import patchify
from pretrain.recipe import RELATIVE

SPEC = replace(SMALL, **RELATIVE)
SETTINGS = Settings(codes=16, num_mask_patches=6, min_mask_patches_per_block=2, drop_path=0.0)


def method_of(**changes) -> Method:
    torch.manual_seed(0)
    return METHOD(SPEC, replace(SETTINGS, **changes)).double()


def test_the_encoder_sees_no_hidden_pixel():
    method = method_of()
    views = views_of(method)
    mask, images = views["mask"].bool(), views["image"].requires_grad_()
    (seen,) = torch.autograd.grad(method.predict(images, mask).square().sum(), images)
    assert torch.equal(patchify(seen, 4).abs().sum(-1) == 0, mask) and 0 < int(mask.sum()) <= 36


def test_the_loss_is_a_mean_over_all_hidden_patches():
    method = method_of()
    views = views_of(method)
    mask, tokens = views["mask"].bool(), method.tokenizer(views["picture"])
    chances = method.predict(views["image"], mask).softmax(1).gather(1, tokens[mask].unsqueeze(1))
    step = forward_pass(method, views, progress())
    torch.testing.assert_close(step.loss, -chances.log().mean())
    assert step.logs["token_accuracy"] * len(chances) == pytest.approx(
        float((method.predict(views["image"], mask).argmax(1) == tokens[mask]).sum())
    )


def test_initial_weights():
    torch.manual_seed(0)
    method = METHOD(replace(SPEC, width=64, mlp_hidden=256), replace(SETTINGS, layer_scale_start=0.3))
    for tensor in (method.lm_head.weight, method.mask_token):
        assert 0.01 < tensor.abs().max() <= 0.02
    assert (method.lm_head.bias == 0).all() and (method.vit.trunk.blocks[1].gamma_2 == 0.3).all()
    without = METHOD(replace(SPEC, layer_scale=False), SETTINGS)
    assert without.vit.trunk.blocks[0].gamma_1 is None


def test_colours_are_jittered_unless_the_strength_is_zero():
    """On an image of one colour, which no crop changes."""
    image = Image.new("RGB", (20, 20), (200, 100, 50))
    expected = to_tensor(image)
    for strength, is_kept in ((0.0, True), (0.4, False)):
        picture = method_of(colour_jitter=strength).views()(image)["picture"]
        colour = picture.mean(dim=(1, 2), keepdim=True)
        assert torch.allclose(picture, colour.expand_as(picture)), "one colour"
        assert torch.allclose(colour.flatten(), expected[:, 0, 0], atol=1e-3) is is_kept
