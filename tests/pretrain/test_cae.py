"""CAE beyond its recorded steps: the target encoder, stochastic depth, initial weights."""

from dataclasses import replace

import pytest
import torch
from small_trainings import same
from timm.layers import DropPath
from toys import SMALL, progress, views_of

from pretrain.loop.updates import Updates
from pretrain.method import Method
from pretrain.methods.cae import METHOD, RECIPES, SCALED, Settings

SPEC = replace(SMALL, **SCALED)
SETTINGS = Settings(
    codes=16,
    num_mask_patches=8,
    min_mask_patches_per_block=2,
    decoder_width=16,
    decoder_heads=2,
    regressor_depth=2,
    decoder_depth=2,
    drop_path=0.0,
)


def method_of(spec=SPEC, **changes) -> Method:
    torch.manual_seed(0)
    return METHOD(spec, replace(SETTINGS, **changes)).double()


@pytest.mark.parametrize("target", ["previous", "current"])
@pytest.mark.parametrize("momentum", [0.0, 0.75])
def test_the_target_encoder_follows_the_previous_or_the_current_encoder(target, momentum):
    method = method_of(target=target, target_momentum=momentum)
    updates = Updates(method, replace(RECIPES["smoke"], spec=SPEC, settings=method.settings, batch=6, lr=0.01))
    cls_token, expected = method.vit.trunk.cls_token, None
    for step in range(3):
        before, target_before = cls_token.detach().clone(), method.teacher.trunk.cls_token.clone()
        updates.run([views_of(method)], progress(step + 1))
        source = before if target == "previous" else cls_token.detach()
        expected = momentum * target_before + (1 - momentum) * source
        torch.testing.assert_close(method.teacher.trunk.cls_token, expected)
    assert not torch.equal(cls_token, before)


def test_encoder_and_target_encoder_drop_different_paths():
    method = method_of(drop_path=0.5)
    for part in (method.vit, method.teacher, method.regressor, method.decoder):
        rates = [module.drop_prob for module in part.modules() if isinstance(module, DropPath)]
        assert rates and max(rates) == 0.5
    images, hidden = torch.randn(6, 3, 16, 16).double(), method.split(views_of(method)["mask"])[1]
    assert not torch.equal(method.target(images, hidden), method.target(images, hidden))


def test_initial_weights_follow_the_official_code():
    wide = replace(SPEC, width=64, mlp_hidden=256)
    method = method_of(wide, layer_scale_start=0.25, decoder_layer_scale_start=0.5)
    trunk, regressor, decoder = method.vit.trunk, method.regressor.blocks[1], method.decoder.blocks[1]
    for tensor in (trunk.patch_embed.proj.weight, trunk.cls_token, method.regressor.mask_token):
        assert 0.01 < tensor.abs().max() <= 0.02
    for block, width in ((trunk.blocks[1], 64), (decoder, 16)):
        bound = (6 / (4 * width)) ** 0.5
        assert 0.9 * bound < block.attn.qkv.weight.abs().max() <= bound
        assert (block.mlp.fc1.bias == 0).all()
    assert (trunk.blocks[0].ls1.gamma == 0.25).all() and (decoder.gamma_1 == 0.5).all()
    assert (regressor.gamma_2 == 0.5).all() and (trunk.patch_embed.proj.bias == 0).all()
    rescaled = method_of(wide, rescaled=True)
    for blocks in (rescaled.vit.trunk.blocks, rescaled.regressor.blocks, rescaled.decoder.blocks):
        for number, block in enumerate(blocks, start=1):
            for weight in (block.attn.proj.weight, block.mlp.fc2.weight):
                assert weight.abs().max().item() == pytest.approx(0.02 / (2 * number) ** 0.5, rel=0.02)
    assert 0.01 < rescaled.decoder.head.weight.abs().max() <= 0.02
    for initialised, bound in ((method, (6 / (64 + 16)) ** 0.5), (rescaled, 1 / 64**0.5)):  # Xavier's, torch's own
        assert 0.9 * bound < initialised.embed[0].weight.abs().max() <= bound
    assert same(method.vit.state_dict(), method.teacher.state_dict())
