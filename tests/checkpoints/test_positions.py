"""Position tables equal the official recordings for every resize rule, within the rounding of float32."""

from math import isqrt

import pytest
import torch
from recordings import absent, matches, tensors

from checkpoints.positions import resize_positions, resize_relative, sincos_positions


def square(table: torch.Tensor, prefix: int = 1) -> tuple[int, int]:
    side = isqrt(table.shape[1] - prefix)
    return side, side


@pytest.mark.parametrize(
    ("rule", "source", "target"),
    [
        ("bicubic_offset", "dino/golden.safetensors:student0/backbone.pos_embed", "probe/student_posembed_local"),
        ("bicubic", "msn/golden.safetensors:encoder{steps}/pos_embed", r"probe/encoder(\d+)_posembed_focal"),
        (
            "bicubic",
            "moca/init_state.safetensors:encoder_teacher.pos_embed",
            "moca/eval.safetensors:pos_embed_interpolated",
        ),
        ("bicubic", "lut/lut_step.safetensors:student0.pos_embed", "lut/lut_finetune.safetensors:interp.pos_embed"),
    ],
)
def test_resized_absolute_tables_equal_the_recorded_ones(rule, source, target):
    """In names, {steps} is the number of steps after which MSN's table was recorded."""
    path, name = source.split(":")
    target_path, _, pattern = target.rpartition(":")
    target_path = target_path or path
    (match,) = matches(pattern, tensors(target_path)) or absent(f"{pattern} of {target_path}")
    table = tensors(path)[name.format(steps=match[1] if match.groups() else "")].double()
    expected = tensors(target_path)[match[0]]
    ours = resize_positions(table, square(table), square(expected), rule, prefix=1)
    assert (ours - expected).abs().max() < 1e-6


def test_a_resized_relative_table_equals_the_recorded_one():
    record = tensors("simmim/simmim_finetune.safetensors")
    table, expected = record["encoder_rpb_shared"].double(), record["larger.rpb_table_block0"]
    windows = [(isqrt(len(relative) - 3) + 1) // 2 for relative in (table, expected)]
    ours = resize_relative(table, (windows[0],) * 2, (windows[1],) * 2)
    assert (ours - expected).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("path", "pattern", "order", "limit"),
    [
        ("mae/mae_step.safetensors", r"sincos\.d(\d+)g(\d+)", "column", 0.0),
        ("mocov3/golden.safetensors", r"probe/sincos_dim(\d+)_grid(\d+)", "row", 1e-6),
    ],
)
def test_sine_cosine_tables_equal_the_recorded_ones(path, pattern, order, limit):
    recorded = matches(pattern, tensors(path))
    assert recorded
    for match in recorded:
        (width, side), table = map(int, match.groups()), tensors(path)[match[0]]
        ours = sincos_positions((side, side), width, order, prefix=1, dtype=table.dtype)[0]
        assert (ours - table).abs().max() <= limit


def test_maskfeats_rule_equals_trilinear_resizing_of_one_frame():
    """SlowFast video_model_builder.py:1118-1141, a table of 1 x h x w places."""
    table = torch.randn(1, 1 + 12, 4, dtype=torch.float64)
    body = table[:, 1:].reshape(1, 1, 3, 4, 4).permute(0, 4, 1, 2, 3)
    expected = torch.nn.functional.interpolate(body, size=(1, 5, 7), mode="trilinear").flatten(2).transpose(1, 2)
    ours = resize_positions(table, (3, 4), (5, 7), "bilinear", prefix=1)
    assert torch.equal(ours[:, :1], table[:, :1])
    torch.testing.assert_close(ours[:, 1:], expected)


@pytest.mark.parametrize("side", [61, 115, 122])  # 976, 1840 and 1952 px at patch 16
def test_a_resized_table_has_the_requested_grid(side):
    """Sizes for which DINOv2's scale factor alone gives a grid one short (facebookresearch/dinov2 pull request 378)."""
    table = torch.zeros(1, 196, 4)
    assert resize_positions(table, (14, 14), (side, side), "bicubic_offset").shape == (1, side * side, 4)


def test_a_fixed_table_cannot_be_resized():
    with pytest.raises(ValueError, match="its rule is 'fixed'"):
        resize_positions(torch.zeros(1, 4, 8), (2, 2), (3, 3), "fixed")
    with pytest.raises(ValueError, match="has 5 rows"):
        resize_positions(torch.zeros(1, 5, 8), (2, 2), (3, 3), "bicubic")


def test_resizing_is_differentiable():
    table = torch.randn(1, 9, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: resize_positions(t, (3, 3), (4, 5), "bicubic_offset"), table)
    relative = torch.randn(7 * 7 + 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: resize_relative(t, (4, 4), (5, 6)), relative)
