"""A ViT-export as a backbone: maps, scales, grids that are not square, and what is trained."""

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
def test_maps_are_the_patches_of_the_network(name):
    export = export_of(ALL[name])
    maps = DenseBackbone(dense_network(export, 32, 0.0), (0, 2)).eval()(images_of(32, 32))
    tokens = export.build()(images_of(32, 32), layers=(0, 2), norm=False)
    for found, expected in zip(maps, tokens, strict=True):
        assert found.is_contiguous()  # mmcv's compiled RoIAlign reads memory as if everything were
        rows = expected[:, -16:].transpose(1, 2).reshape(2, export.spec.width, 4, 4)
        assert torch.allclose(found, rows, atol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_other_grids_and_gradients(name):
    """Inputs that are not square; everything that is to be trained gets a gradient, from whichever grid."""
    backbone = backbone_of(name, image_size=48)
    maps = backbone(images_of(24, 40))
    assert [found.shape for found in maps] == [(2, ALL[name].width, 3, 5)] * 2
    sum(found.square().sum() for found in maps).backward()
    lacking = [n for n, p in backbone.named_parameters() if p.requires_grad and p.grad is None]
    assert lacking == []


@pytest.mark.parametrize("name", ["plain", "relative", "shared"])
def test_an_unusual_grid_reads_a_resized_table(name):
    """A square grid reached at run time equals the same one made beforehand."""
    late = backbone_of(name, image_size=32)(images_of(56, 56))
    early = backbone_of(name, image_size=56)(images_of(56, 56))
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(late, early, strict=True))


@pytest.mark.parametrize(("name", "tables"), [("shared", "per_block"), ("plain", "fresh")])
@torch.no_grad()
def test_tables_of_every_block_compute_the_same_and_have_their_own_rates(name, tables):
    export = export_of(SPECS[name])
    before, after = (DenseBackbone(dense_network(export, 48, 0.0, kind), (0, 2)).eval() for kind in ("shared", tables))
    for size in ((48, 48), (24, 40)):
        for one, other in zip(before(images_of(*size)), after(images_of(*size)), strict=True):
            assert torch.allclose(one, other, atol=1e-5)
    groups = optimizer_groups(nn.ModuleDict({"backbone": after}), 3, 0.5, 1.0, weight_decay=0.1, decay_tokens=True)
    rates = {name: (group["lr"], group["weight_decay"]) for group in groups for name in group["names"]}
    found = [rates[f"backbone.vit.trunk.blocks.{block}.attn.relative_position_bias_table"] for block in range(3)]
    assert found == [(0.125, 0.1), (0.25, 0.1), (0.5, 0.1)] and not any("rel_pos_bias." in name for name in rates)


def test_networks_that_take_no_relative_tables_are_named():
    with pytest.raises(ValueError, match="relative position tables need a plain ViT with a class token"):
        dense_network(export_of(SPECS["class attention"]), 32, 0.0, "fresh")
    for protocol in (UPERNET["upernet@cae"], FINETUNE["finetune@cae"]):
        protocol.task.check_network(SPECS["shared"])
        with pytest.raises(ValueError, match="use tables=per_block"):  # before a run starts
            protocol.task.check_network(SPECS["class attention"])
    quick = replace(PLAIN, architecture="vit_base_patch16_clip_quickgelu_224")
    with pytest.raises(ValueError, match=r"quickgelu.*its blocks are not BEiT's"):
        export_of(replace(quick)).with_tables("fresh")


def test_raw_pixels_are_maps_without_weights():
    backbone = DenseBackbone(dense_network(load("pixels:8"), 48, 0.1), default_taps(1))
    images = images_of(24, 40)
    maps = backbone(images)
    assert len(maps) == 4 and not list(backbone.parameters())
    assert torch.equal(maps[0][:, :, 1, 3], images[:, :, 8:16, 24:32].flatten(1))


def test_rows_and_columns_are_not_exchanged():
    backbone = backbone_of("relative")
    tall = images_of(48, 24)
    with torch.no_grad():
        backbone.vit.trunk.blocks[0].attn.relative_position_bias_table[:-3].copy_(
            torch.arange(49.0)[:, None].expand(-1, 2) / 10
        )
        first = backbone(tall)[0]
        again = backbone(torch.cat([tall, tall], dim=-1)[..., :24])[0]
    assert torch.equal(first, again) and first.shape[-2:] == (6, 3)


def test_the_norm_on_maps():
    plain, normed = backbone_of("plain"), backbone_of("plain", norm=True)
    expected = nn.functional.layer_norm(plain(images_of(32, 32))[1].movedim(1, -1), (32,), eps=1e-6).movedim(-1, 1)
    assert torch.allclose(normed(images_of(32, 32))[1], expected, atol=1e-5)


def test_recomputing_changes_memory_only():
    results = []
    for recompute in (False, True):
        backbone = backbone_of("relative", recompute=recompute).train()
        backbone(images_of(24, 40))[1].square().sum().backward()
        results.append([p.grad for p in backbone.parameters() if p.grad is not None])
    assert len(results[0]) == len(results[1]) > 10
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*results, strict=True))


def test_a_frozen_network_stays_as_it_is():
    backbone = DenseBackbone(dense_network(export_of(), 32, 0.5), (2,), frozen=True).train()
    assert not any(module.training for module in backbone.modules())
    assert not any(parameter.requires_grad for parameter in backbone.parameters())
    assert not backbone(images_of(32, 32))[0].requires_grad


def test_initialising_a_model_keeps_pretrained_weights():
    backbone = backbone_of("plain")
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    backbone.init_weights()
    assert all(torch.equal(before[name], tensor) for name, tensor in backbone.state_dict().items())


@pytest.mark.parametrize(("patch", "side"), [(4, 16), (8, 8), (14, 8), (16, 8), (32, 4)])
def test_four_scales_whatever_the_patch(patch, side):
    """Strides 4 to 32 of the image; patches of 14 count as 16."""
    maps = [torch.randn(2, 8, side, side) for _ in range(4)]
    sizes = [found.shape[-1] for found in Pyramid(8, patch, nn.BatchNorm2d)(maps)]
    image = side * (16 if patch == 14 else patch)
    assert sizes == [image // stride for stride in (4, 8, 16, 32)]


def test_the_largest_scale_of_patches_of_16():
    """Deconvolution, batch norm, GELU, deconvolution."""
    kinds = [type(layer).__name__ for layer in Pyramid(8, 16, nn.BatchNorm2d).scales[0]]
    assert kinds == ["ConvTranspose2d", "BatchNorm2d", "GELU", "ConvTranspose2d"]


def test_default_taps():
    assert [default_taps(depth) for depth in (12, 24)] == [(3, 5, 7, 11), (7, 11, 15, 23)]
    assert default_taps(PLAIN.depth) == (0, 1, 1, 2)
