"""A ViT export as a dense backbone: feature maps, scales, non-square grids, and trainable parameters."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from toy_scenes import PLAIN, ROTARY, SPECS, export_of

from checkpoints.resolve import load
from downstream.models.operators import quiet_libraries
from downstream.tasks.upernet_ade20k import PROTOCOLS as UPERNET
from probes.tasks.finetune import PROTOCOLS as FINETUNE

with quiet_libraries():
    from downstream.loop.training import optimizer_groups
    from downstream.models.backbone import DenseBackbone, Pyramid, default_taps, dense_network


ALL = SPECS | ROTARY


def images_of(height: int, width: int) -> torch.Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))


def backbone_of(name: str, image_size: int = 32, **settings) -> DenseBackbone:
    return DenseBackbone(dense_network(export_of(ALL[name]), image_size, 0.0), (0, 2), **settings).eval()


@pytest.mark.parametrize("name", ALL)
def test_feature_maps_are_the_patch_tokens(name):
    export = export_of(ALL[name])
    maps = DenseBackbone(dense_network(export, 32, 0.0), (0, 2)).eval()(images_of(32, 32))
    tokens = export.build()(images_of(32, 32), layers=(0, 2), norm=False)
    for feature_map, layer_tokens in zip(maps, tokens, strict=True):
        assert feature_map.is_contiguous()  # mmcv's compiled RoIAlign assumes contiguous memory
        expected = layer_tokens[:, -16:].transpose(1, 2).reshape(2, export.spec.width, 4, 4)
        assert torch.allclose(feature_map, expected, atol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_non_square_inputs_give_every_trainable_parameter_a_gradient(name):
    backbone = backbone_of(name, image_size=48)
    maps = backbone(images_of(24, 40))
    assert [feature_map.shape for feature_map in maps] == [(2, ALL[name].width, 3, 5)] * 2
    sum(feature_map.square().sum() for feature_map in maps).backward()
    without_gradient = [n for n, p in backbone.named_parameters() if p.requires_grad and p.grad is None]
    assert without_gradient == []


@pytest.mark.parametrize("name", ["plain", "relative", "shared"])
def test_position_tables_resized_at_run_time_equal_those_resized_beforehand(name):
    at_run_time = backbone_of(name, image_size=32)(images_of(56, 56))
    beforehand = backbone_of(name, image_size=56)(images_of(56, 56))
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(at_run_time, beforehand, strict=True))


@pytest.mark.parametrize(("name", "tables"), [("shared", "per_block"), ("plain", "fresh")])
@torch.no_grad()
def test_per_block_tables_compute_the_same_and_have_their_own_rates(name, tables):
    export = export_of(SPECS[name])
    before, after = (DenseBackbone(dense_network(export, 48, 0.0, kind), (0, 2)).eval() for kind in ("shared", tables))
    for size in ((48, 48), (24, 40)):
        for original, changed in zip(before(images_of(*size)), after(images_of(*size)), strict=True):
            assert torch.allclose(original, changed, atol=1e-5)
    groups = optimizer_groups(nn.ModuleDict({"backbone": after}), 3, 0.5, 1.0, weight_decay=0.1, decay_tokens=True)
    rates = {name: (group["lr"], group["weight_decay"]) for group in groups for name in group["names"]}
    table_rates = [rates[f"backbone.vit.trunk.blocks.{block}.attn.relative_position_bias_table"] for block in range(3)]
    assert table_rates == [(0.125, 0.1), (0.25, 0.1), (0.5, 0.1)] and not any("rel_pos_bias." in name for name in rates)


def test_networks_without_relative_position_tables_are_refused():
    with pytest.raises(ValueError, match="class token"):
        dense_network(export_of(SPECS["class attention"]), 32, 0.0, "fresh")
    for protocol in (UPERNET["upernet@cae"], FINETUNE["finetune@cae"]):
        protocol.task.check_network(SPECS["shared"])
        with pytest.raises(ValueError, match="use tables=per_block"):  # before a run starts
            protocol.task.check_network(SPECS["class attention"])
    quick = replace(PLAIN, architecture="vit_base_patch16_clip_quickgelu_224")
    with pytest.raises(ValueError, match="quickgelu"):
        export_of(quick).with_tables("fresh")


def test_raw_pixels_are_feature_maps_without_weights():
    backbone = DenseBackbone(dense_network(load("pixels:8"), 48, 0.1), default_taps(1))
    images = images_of(24, 40)
    maps = backbone(images)
    assert len(maps) == 4 and not list(backbone.parameters())
    assert torch.equal(maps[0][:, :, 1, 3], images[:, :, 8:16, 24:32].flatten(1))


def test_rows_and_columns_are_not_swapped():
    backbone = backbone_of("relative")
    tall = images_of(48, 24)
    with torch.no_grad():
        backbone.vit.trunk.blocks[0].attn.relative_position_bias_table[:-3].copy_(
            torch.arange(49.0)[:, None].expand(-1, 2) / 10
        )
        first = backbone(tall)[0]
        after_other_width = backbone(torch.cat([tall, tall], dim=-1)[..., :24])[0]
    assert torch.equal(first, after_other_width) and first.shape[-2:] == (6, 3)


def test_norm_is_a_layer_norm_on_each_map():
    plain, normed = backbone_of("plain"), backbone_of("plain", norm=True)
    expected = nn.functional.layer_norm(plain(images_of(32, 32))[1].movedim(1, -1), (32,), eps=1e-6).movedim(-1, 1)
    assert torch.allclose(normed(images_of(32, 32))[1], expected, atol=1e-5)


def test_recomputing_activations_keeps_the_gradients():
    gradients = []
    for recompute in (False, True):
        backbone = backbone_of("relative", recompute=recompute).train()
        backbone(images_of(24, 40))[1].square().sum().backward()
        gradients.append([p.grad for p in backbone.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 10
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients, strict=True))


def test_a_frozen_network_stays_in_evaluation_mode_without_gradients():
    backbone = DenseBackbone(dense_network(export_of(), 32, 0.5), (2,), frozen=True).train()
    assert not any(module.training for module in backbone.modules())
    assert not any(parameter.requires_grad for parameter in backbone.parameters())
    assert not backbone(images_of(32, 32))[0].requires_grad


@pytest.mark.parametrize(("patch", "side"), [(4, 16), (8, 8), (14, 8), (16, 8), (32, 4)])
def test_pyramid_has_strides_4_to_32_for_every_patch_size(patch, side):
    """Patches of 14 count as 16."""
    maps = [torch.randn(2, 8, side, side) for _ in range(4)]
    sizes = [scale.shape[-1] for scale in Pyramid(8, patch, nn.BatchNorm2d)(maps)]
    image = side * (16 if patch == 14 else patch)
    assert sizes == [image // stride for stride in (4, 8, 16, 32)]
