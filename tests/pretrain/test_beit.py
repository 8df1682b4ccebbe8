"""BEiT beyond its recorded steps: accuracy of the tokens, initial weights, colours."""

from dataclasses import replace

import pytest
import torch
from PIL import Image
from small_trainings import forward_pass
from torchvision.transforms.functional import to_tensor
from toys import SMALL, progress, views_of

from pretrain.method import Method
from pretrain.methods.beit import METHOD, Settings
from pretrain.recipe import RELATIVE

SPEC = replace(SMALL, **RELATIVE)
SETTINGS = Settings(codes=16, num_mask_patches=6, min_mask_patches_per_block=2, drop_path=0.0)


def method_of(**changes) -> Method:
    torch.manual_seed(0)
    return METHOD(SPEC, replace(SETTINGS, **changes)).double()


def test_the_logged_accuracy_is_that_of_the_hidden_patches_tokens():
    method = method_of()
    views = views_of(method)
    mask, tokens = views["mask"].bool(), method.tokenizer(views["picture"])
    correct = method.predict(views["image"], mask).argmax(1) == tokens[mask]
    step = forward_pass(method, views, progress())
    assert step.logs["token_accuracy"].item() == pytest.approx(correct.double().mean().item())


def test_initial_weights_follow_the_official_code():
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
