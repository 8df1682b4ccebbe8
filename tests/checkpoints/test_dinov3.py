"""Specs read from DINOv3's files, and refusals; test_importers.py compares the features."""

import re
from dataclasses import replace

import pytest
import torch
from refusals import refusal
from rotary_examples import dinov3, dinov3_gated

from checkpoints.export import ViTExport
from checkpoints.import_options import ImportOptions
from checkpoints.importers import dinov3 as importer
from checkpoints.importing import import_file


def imported(example, name: str = "dinov3_vitb16.pth", options: ImportOptions | None = None, **changes) -> ViTExport:
    file = replace(example.file(**changes), path=example.file().path.with_name(name))
    return import_file(importer, file, options or ImportOptions())


def test_heads_rounding_and_registers_are_read_from_the_file():
    spec = imported(dinov3()).spec
    assert (spec.heads, spec.rotary_rounding, spec.registers, spec.key_bias) == (2, "bfloat16", 4, False)
    assert (spec.qkv_bias, spec.mlp, spec.mlp_hidden) == (True, "plain", 128)
    gated = imported(dinov3_gated()).spec
    assert (gated.qkv_bias, gated.mlp, gated.mlp_hidden) == (False, "gated", 64)


def test_exact_periods_are_kept():
    exact = 100 ** (torch.arange(4) / 4)
    rounded, other = imported(dinov3()), imported(dinov3(), **{importer.PERIODS: exact})
    assert other.spec.rotary_rounding == "none"
    images = torch.randn(1, 3, 224, 224)
    difference = (rounded.build()(images)[0] - other.build()(images)[0]).abs().max()
    assert 1e-4 < difference < 0.3, "bfloat16 has three digits"


def test_unmasked_key_biases_are_kept():
    unmasked = {f"blocks.{block}.attn.qkv.bias_mask": None for block in range(2)}
    export = imported(dinov3(), **unmasked)
    assert export.spec.key_bias and export.tensors["blocks.0.attn.qkv.bias"].shape == (96,)


@pytest.mark.parametrize(
    ("name", "statistics", "mean"),
    [
        ("dinov3_vitl16_pretrain_lvd1689m-8aa4cbdd.pth", None, 0.485),
        ("dinov3_vitl16_pretrain_sat493m-eadcf0ff.pth", None, 0.430),
        ("dinov3_vitl16_pretrain_sat493m-eadcf0ff.pth", "imagenet", 0.485),
    ],
)
def test_satellite_models_have_other_image_statistics(name, statistics, mean):
    assert imported(dinov3(), name, ImportOptions(statistics=statistics)).mean[0] == mean


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({importer.PERIODS: None}, {}, "no rope_embed.periods under ''; the file is not complete"),
        ({importer.PERIODS: torch.arange(1.0, 5.0)}, {}, "not those of DINOv3's models"),
        ({importer.PERIODS: torch.ones(3)}, {}, "3 rotary periods do not fit a width of 32"),
        ({}, {"heads": 4}, "its rotary periods are for 2 heads, not 4"),
        ({"blocks.0.attn.qkv.bias_mask": torch.full((96,), torch.nan)}, {}, "holds NaN"),
        ({"cls_norm.weight": torch.ones(32)}, {}, "neither used nor known to be dropped: cls_norm.weight"),
    ],
)
def test_files_that_do_not_fit_are_refused(changes, options, message):
    assert re.search(message, refusal(imported, dinov3(), options=ImportOptions(**options), **changes))
