"""Networks with rotary positions, DINOv3's and EVA-02's, from export to leaderboard: frozen probes and a dense task."""

import json
from pathlib import Path

import torch

from checkpoints.export import ViTExport
from checkpoints.spec import Preparation, ViTSpec
from checkpoints.vit import ViT

SIZES = dict(image_size=32, patch_size=8, width=32, depth=3, heads=2, mlp_hidden=48, key_bias=False, norm_eps=1e-5)
SPECS = {
    "dinov3": ViTSpec(
        architecture="vit_base_patch16_dinov3",
        position="none",
        class_position=False,
        registers=2,
        layer_scale=True,
        rotary="centred",
        rotary_base=100.0,
        rotary_pairs="halves",
        rotary_rounding="bfloat16",
        **SIZES,
    ),
    "eva02": ViTSpec(
        architecture="eva02_base_patch14_224", rotary="axial", rotary_grid=4, mlp="gated", mlp_norm=True, **SIZES
    ),
}


def test_they_are_evaluated_like_any_other(bench, tmp_path):
    """The dense task's crops are of another size than the networks' images."""
    folders = []
    for name, spec in SPECS.items():
        torch.manual_seed(0)
        folders.append(ViTExport.from_vit(ViT(spec), Preparation()).save(tmp_path / name))
    words = ("--checkpoint", *folders, "--suite", "knn@dino,ade_linear@smoke", "--limit", 12, "--out", tmp_path / "out")
    data = ("--data", "digits=digits:", "scenes=tiny-ade20k:")
    changes = (f"upernet_ade20k.{change}" for change in ("steps=2", "warmup=1", "batch=2"))
    code, out, err = bench("run", *words, *data, "--set", *changes)
    assert code == 0, out + err
    assert "4 done, 0 skipped, 0 failed" in out
    found = [json.loads(path.read_text()) for path in Path(tmp_path / "out").rglob("*.json")]
    done = [each for each in found if each.get("status") == "ok"]
    assert {each["checkpoint"]["architecture"] for each in done} == {spec.label for spec in SPECS.values()}
    assert sorted(each["task"] for each in done) == ["knn", "knn", "upernet_ade20k", "upernet_ade20k"]
