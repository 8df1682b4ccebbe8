"""Rotary positions: subsets of patches, other grids, attention maps, images that are not square, and refusals."""

from dataclasses import replace

import pytest
import torch
from random_networks import randomise

from bench.cli import parsed
from checkpoints.backbone import Backbone
from checkpoints.export import ViTExport
from checkpoints.resolve import load
from checkpoints.spec import Preparation, ViTSpec
from checkpoints.vit import ViT

PLAIN = ViTSpec(
    architecture="vit_base_patch16_224", image_size=32, patch_size=8, width=32, depth=2, heads=2, mlp_hidden=48
)
AXIAL = replace(PLAIN, architecture="eva02_base_patch14_224", rotary="axial", rotary_grid=3, key_bias=False)
SPECS = {
    "plain": PLAIN,
    "no key bias": replace(PLAIN, architecture="eva_giant_patch14_224", key_bias=False),
    "axial": AXIAL,
    "axial, all norms": replace(
        AXIAL, split_qkv=True, query_norm=True, attention_norm=True, mlp="gated", mlp_norm=True, first_norm=True
    ),
    "norms after": replace(AXIAL, mlp="gated_packed", norm_after=True),
    "centred": replace(
        AXIAL,
        rotary="centred",
        rotary_base=100.0,
        rotary_grid=0,
        rotary_pairs="halves",
        position="none",
        class_position=False,
        registers=2,
        rotary_rounding="bfloat16",
        layer_scale=True,
    ),
    "unit": replace(
        AXIAL,
        rotary="unit",
        rotary_grid=0,
        rotary_pairs="halves",
        key_bias=True,
        position="none",
        class_token=False,
        class_position=False,
        pool="avg",
        registers=4,
        rms_norm=True,
        proj_bias=False,
    ),
    "mixed": replace(AXIAL, rotary="mixed", rotary_base=10.0, rotary_grid=0, rotary_first="column", key_bias=True),
    "fewer heads of keys": replace(
        AXIAL, architecture="vit_base_patch16_sapiens2", depth=12, width=96, heads=12, key_bias=True, split_qkv=True
    ),
}


@pytest.mark.parametrize("key", SPECS)
def test_encoding_patches_in_another_order_only_reorders_features(key):
    vit, images = randomise(ViT(SPECS[key])), torch.randn(2, 3, 24, 40)
    patches, order = vit.add_positions(vit.project(images), (3, 5)), torch.stack([torch.randperm(15) for _ in range(2)])
    in_order, reordered = vit(images)[0], vit.encode(patches, keep=order, grid=(3, 5))[0]
    prefix = vit.spec.prefix
    index = order.unsqueeze(-1).expand(-1, -1, vit.spec.width)
    assert torch.allclose(reordered[:, prefix:], in_order[:, prefix:].gather(1, index), atol=1e-5)
    assert torch.allclose(reordered[:, :prefix], in_order[:, :prefix], atol=1e-5)


@pytest.mark.parametrize("key", SPECS)
def test_attention_maps_equal_those_of_the_blocks(key):
    vit, images, applied = randomise(ViT(SPECS[key])), torch.randn(2, 3, 24, 40), []
    attention = vit.trunk.blocks[1].attn
    attention.fused_attn = False
    attention.attn_drop.register_forward_hook(lambda module, inputs, output: applied.append(output))
    vit(images)
    assert torch.allclose(vit.attention(images, layer=1), applied[0], atol=1e-6)


@pytest.mark.parametrize("key", ["axial", "centred", "mixed", "unit"])
def test_features_depend_on_the_position(key):
    """Without a position table, a moved patch changes its features by the rotation alone."""
    spec = replace(SPECS[key], position="none", class_position=False)
    vit, image = randomise(ViT(spec)), torch.randn(1, 3, 32, 32)
    moved = image.roll(8, dims=-1)
    before, after = (vit(picture)[0][:, spec.prefix :].unflatten(1, (4, 4)) for picture in (image, moved))
    assert (before.roll(1, dims=2) - after).abs().max() > 1e-2


@pytest.mark.parametrize("key", SPECS)
def test_images_need_not_be_square(key, tmp_path):
    spec = replace(SPECS[key], image_size=(24, 40), position_resize="bicubic_antialias")
    export = ViTExport.from_vit(randomise(ViT(spec)), Preparation())
    export.save(tmp_path / "export")
    again = load(tmp_path / "export")
    assert (again.spec, again.digest, again.verify()) == (export.spec, export.digest, [])
    assert (again.spec.size, again.spec.grid) == ((24, 40), (3, 5))
    features = Backbone(again).views(torch.randn(1, 3, 24, 40), [(-1, True)])[-1, True]
    assert features.patches.shape[1:3] == (3, 5)
    tall = again.at_size((48, 24))
    assert tall.spec.grid == (6, 3) and tall.facts["resized_from"] == (24, 40)
    images = torch.randn(1, 3, 48, 24, dtype=torch.float64)
    difference = (tall.build().double()(images)[0] - again.build().double()(images)[0]).abs().max()
    assert difference < 1e-5


def test_the_command_line_takes_height_and_width():
    for text, size in (("224", 224), ("384x512", (384, 512))):
        assert parsed(["inspect", "x", "--image-size", text])[1].image_size == size
    for wrong in ("0", "384x", "x", "1x2x3", "4x0"):
        with pytest.raises(ValueError, match=f"--image-size: '{wrong}' must be .* such as 384x512"):
            parsed(["inspect", "x", "--image-size", wrong])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_base": 100.0}, "rotary_base=100.0: only for rotary positions or keys without a bias"),
        ({"mlp": "gated"}, "mlp='gated': only for"),
        ({"rotary": "axial", "heads": 16}, "heads=16: rotary positions need a multiple of 4 channels a head"),
        ({"rotary": "spiral"}, "rotary='spiral': choose one of none, axial, centred, mixed, unit"),
        ({"rotary": "unit"}, "rotary='unit' has no place for a class token; set class_token=False"),
        ({"image_size": (24, 41)}, r"image_size=\(24, 41\) is not a multiple of patch_size=8"),
        ({"image_size": (24, 40, 8)}, "must be .* or 2 values"),
    ],
)
def test_wrong_rotary_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(PLAIN, **changes)


def test_digests_of_plain_networks_do_not_change():
    """The digest is computed from the spec's JSON, which holds rotary fields only if they are used."""
    assert not {"rotary", "mlp", "key_bias"} & PLAIN.to_json().keys()
    assert ViTSpec(**AXIAL.to_json()) == AXIAL
    assert AXIAL.to_json()["rotary_grid"] == 3
