"""Results of schema 1 give the same leaderboard and comparisons as when they were written."""

import json
import shutil
from pathlib import Path

import pytest

from bench.results.record import SCHEMA, MetricRecord, read_result, result_files

STORED = Path(__file__).parents[1] / "golden" / "schema1"


@pytest.fixture
def out(tmp_path) -> Path:
    """A copy of the stored results."""
    shutil.copytree(STORED / "results", tmp_path / "results")
    return tmp_path


def metrics_of(out: Path, name: str) -> dict[str, MetricRecord]:
    (path,) = (path for path in result_files(out) if path.match(f"pixels-2-*/*/{name}*.json"))
    assert json.loads(path.read_text())["schema"] == 1 and read_result(path).schema == SCHEMA
    return dict(read_result(path).metrics)


def test_the_leaderboard_is_the_same(bench, out):
    assert bench("leaderboard", "--out", out)[0] == 0
    assert (out / "leaderboard.csv").read_bytes() == (STORED / "leaderboard.csv").read_bytes()
    stored_lines, lines = ((folder / "leaderboard.md").read_text().splitlines() for folder in (STORED, out))
    ((old_note, note),) = {pair for pair in zip(stored_lines, lines, strict=True) if pair[0] != pair[1]}
    assert old_note.startswith("> Metrics named *_bestT: chosen on the validation images")
    assert "hosen on the validation images" in note and "top1_k5_bestT, top5_k5_bestT" in note


def test_comparisons_are_the_same(bench, out):
    assert (
        bench("compare", "pixels-2", "pixels-8", "--metric", "all", "--out", out, "--json", out / "compare.json")[0]
        == 0
    )
    new, stored = (json.loads((folder / "compare.json").read_text()) for folder in (out, STORED))
    for after, before in zip(new["comparisons"], stored["comparisons"], strict=True):
        if after["test"] == "paired bootstrap":  # with another seed then
            for end in ("low", "high"):
                assert after.pop(end) == pytest.approx(before.pop(end), abs=0.001)
    assert new == stored


def test_facts_of_metrics_are_derived_from_their_names(out):
    assert metrics_of(out, "segmenter") == {
        "mIoU": MetricRecord(value=40.0, interval=(37.5, 42.25), array="mIoU_resampled", array_over="resamples"),
        "mIoU_std": MetricRecord(value=0.5, higher_is_better=None, deviation_of="mIoU"),
        "val_loss": MetricRecord(value=0.25, higher_is_better=False),
        "pixel_error": MetricRecord(value=62.5, higher_is_better=False, array="pixel_error"),
    }
    assert all(metric.chosen_on_val and metric.array for metric in metrics_of(out, "knn").values())
    (path,) = (path for path in result_files(out) if path.match("pixels-2-*/scenes/*.json"))
    assert read_result(path).arrays == ("areas",)


def test_results_of_both_schemas_are_skipped_and_compared_alike(bench, out):
    """A repeated run skips the old result, and a new one is compared with it."""
    words = ("--suite", "knn@dino", "--data", "digits=digits:", "--limit", 80, "--out", out)
    changes = ("--set", "knn.k=5", "knn.temperature=0.07,1.0")
    output = bench("run", "--checkpoint", "pixels:2", "pixels:4", *words, *changes)[1]
    assert "1 done, 1 skipped" in output
    text = bench("compare", "pixels-4", "pixels-8", "--out", out, "--metric", "top1_k5_bestT")[1]
    assert "80 images; McNemar, exact" in text and "top1_k5_bestT" in text
