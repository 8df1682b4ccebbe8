"""`bench run` as users call it: exports, real suites on digits, leaderboard and comparison."""

import json
from pathlib import Path

import pytest
import torch
from written import rows_of

from bench.__main__ import main
from checkpoints.export import ViTExport
from checkpoints.spec import Preparation
from checkpoints.vit import ViT
from pretrain.recipe import VIT_SMOKE

pytestmark = pytest.mark.slow

IMAGES = 600  # of both splits


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    export = ViTExport.from_vit(ViT(VIT_SMOKE), Preparation(crop=1.0), {"method": "random"})
    return export.save(tmp_path_factory.mktemp("exports") / "random")


def results(out: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(out.glob("results/**/*.json"))]


def test_the_frozen_suite_forwards_every_image_once(checkpoint, tmp_path, capsys):
    words = ["run", "--checkpoint", checkpoint, "--suite", "frozen", "--data", "digits=digits:", "--out", tmp_path]
    words += ["--limit", IMAGES // 2]
    assert main([str(word) for word in words]) == 0
    run_results = results(tmp_path)
    assert len(run_results) >= 2 and all(result["status"] == "ok" for result in run_results)
    assert sum(result["cost"]["forwards"] for result in run_results) == IMAGES
    assert not any("cost" in result["facts"] for result in run_results)
    rates = {bool(result["cost"]["forwards"]): result["images_per_second"] for result in run_results}
    assert rates[True] > 0 and rates[False] is None
    (row,) = rows_of(tmp_path)
    assert row["name"] == "random" and 20 < float(row["digits/knn@dino[limit=300]:top1_k20"]) < 80
    capsys.readouterr()
    assert main([str(word) for word in words]) == 0
    assert "0 done" in capsys.readouterr().out


@pytest.mark.exhaustive  # by default the contract of tasks evaluates raw pixels under every protocol
def test_raw_pixels_run_in_the_frozen_suite_and_are_compared_with_a_network(checkpoint, tmp_path, capsys):
    words = ["run", "--checkpoint", "pixels:8", checkpoint, "--suite", "frozen", "--data", "digits=digits:"]
    assert main([str(word) for word in [*words, "--limit", 200, "--out", tmp_path]]) == 0
    printed = capsys.readouterr().out
    assert "0 parameters" in printed and printed.count("it has no class token: protocols that read it read avg") == 1
    pixels, network = sorted(rows_of(tmp_path), key=lambda row: row["name"])
    assert (pixels["name"], pixels["parameters"], pixels["failed"], network["name"]) == ("pixels-8", "0", "", "random")
    assert all(value for column, value in pixels.items() if column != "failed")
    assert main(["compare", "pixels-8", "random", "--out", str(tmp_path)]) == 0
    comparison = capsys.readouterr().out
    for protocol in ("knn@dino", "knn@moca", "lowshot@bench", "linear_sgd@ibot_base_cached"):
        assert f"is better than random on digits/{protocol}[" in comparison
    assert " against " not in comparison and "no result of" not in comparison
