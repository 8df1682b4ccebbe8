"""tests/benchmarks/gpu.py on a CPU at its smallest size: every part gives a row, with its FLOPs or its error."""

import json
from pathlib import Path

import pytest
from elsewhere import program

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "gpu.py"
# Stand-ins for the official code, with what the benchmark calls; the real clones are not in this repository.
MAE = """
from torch import nn
class MaskedAutoencoderViT(nn.Module):
    def __init__(self, img_size, patch_size, embed_dim, depth, num_heads, norm_pix_loss):
        super().__init__()
        self.layer = nn.Conv2d(3, embed_dim, patch_size, patch_size)
    def forward(self, images, mask_ratio):
        return self.layer(images).square().mean(), None, None
"""
VIT = """
from torch import nn
class VisionTransformer(nn.Module):
    def __init__(self, patch_size, embed_dim, depth, num_heads, mlp_ratio, qkv_bias, drop_path_rate):
        super().__init__()
        self.layer = nn.Conv2d(3, embed_dim, patch_size, patch_size)
    def forward(self, images):
        return self.layer(images).mean((2, 3))
class DINOHead(nn.Linear):
    pass
"""
UTILS = """
import torch
from torch import nn
class MultiCropWrapper(nn.Sequential):
    def forward(self, crops):
        return torch.cat([super(MultiCropWrapper, self).forward(each) for each in crops])
def get_params_groups(model):
    return list(model.parameters())
def clip_gradients(model, clip):
    nn.utils.clip_grad_norm_(model.parameters(), clip)
"""
LOSS = """
import torch
from torch import distributed, nn
class DINOLoss(nn.Module):
    def __init__(self, outputs, crops, first, last, warmup, epochs):
        super().__init__()
    def forward(self, student, teacher, epoch):
        distributed.all_reduce(teacher.detach().sum())
        return (student.mean(0) - teacher.detach().mean(0)).square().mean()
"""
CLONES = {
    "mae": {"models_mae.py": MAE, "main_pretrain.py": ""},
    "dino": {"vision_transformer.py": VIT, "utils.py": UTILS, "main_dino.py": LOSS},
}


def run_benchmark(tmp_path: Path, *options: str) -> list[dict]:
    out = tmp_path / "rows.jsonl"
    small = ("--device", "cpu", "--smoke", "--sizes", "S", "--steps", "2", "--precision", "float32", "--compile", "no")
    program(PROGRAM, *small, "--out", out, *options).end()
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_every_part_has_a_row_with_its_flops(tmp_path):
    for name, files in CLONES.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)
    rows = run_benchmark(tmp_path, "--methods", "mae", "supervised", "--official", str(tmp_path))
    assert [row["name"] for row in rows] == ["features", "mae", "supervised", "mae", "dino"]
    assert not any("error" in row for row in rows), rows
    assert all(row["images_per_second"] > 0 and row["operations"] > 0 and row["limit"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_part_that_fails_gives_a_row_with_the_error(tmp_path):
    rows = run_benchmark(tmp_path, "--parts", "official", "extraction", "--official", str(tmp_path))
    assert [("error" in row) for row in rows] == [False, True, True]
    assert "facebookresearch/mae" in rows[1]["error"]
