"""`bench compare` on mIoU and AP: differences are tested on the same bootstrap samples of images."""

from dataclasses import replace

import numpy as np
import pytest
from test_compare import KNN, left_out, save

from bench.reports.leaderboard import write_leaderboard
from bench.results.record import MetricRecord, read_arrays, read_result, result_files, write_result
from bench.statistics.compare import compare as compared
from engine.tasks import MAX_RESAMPLES

pytestmark = pytest.mark.slow

GENERATOR = np.random.default_rng(0)
SHARED = GENERATOR.normal(size=MAX_RESAMPLES)  # the influence of the resampled images, the same on every network


def save_dense(out, name, miou, resamples=MAX_RESAMPLES, units=None, **fields):
    """Save a result with this mIoU, and values near it on resamples of `units`."""
    metric = MetricRecord(value=miou, array="mIoU_resampled", array_over="resamples", resampled_units=units)
    path = save(out, name, 0, metrics={"top1": MetricRecord(value=0.0), "mIoU": metric}, **fields)
    values = miou + 3 * SHARED[:resamples] + 0.5 * GENERATOR.normal(size=resamples)
    write_result(path, read_result(path), {"mIoU_resampled": values})
    return path


def test_videos_are_the_units_of_their_resamples(compare, tmp_path):
    """The interval of 3 videos is wider than that of 400 images with the same values."""
    for name, miou in (("low", 40.0), ("high", 43.0)):
        save_dense(tmp_path, name, miou, units=3)
        save_dense(tmp_path, name, miou, protocol=replace(KNN, name="knn@moca"))
    few, many = (test.paired for test in compared(tmp_path, ["high", "low"], metric="mIoU").found)
    assert (few.images, many.images) == (3, 400) and few.high - few.low > 2 * (many.high - many.low)
    save_dense(tmp_path, "high", 43.0)
    (line,) = left_out(compare("low", "high", "--protocol", "knn@dino", "--metric", "mIoU"))
    assert "resamples of images" in line and "resamples of 3" in line


def save_three(out) -> None:
    """Save results of three networks, two of them level."""
    for name, miou in (("low", 40.0), ("high", 43.0), ("alike", 42.9)):
        save_dense(out, name, miou)


def test_differences_are_tested_by_a_bootstrap_over_images(compare, tmp_path):
    save_three(tmp_path)
    text = compare("low", "high", "alike", "--metric", "mIoU")
    assert "high is better than low on digits/knn@dino mIoU by 3.0 points [1." in text
    assert "high and alike cannot be told apart" in text and "after Holm over 3" in text
    assert "400 images; bootstrap over images; effect: Cohen's d_z" in text


def test_seeds_are_averaged_on_the_same_images(compare, tmp_path):
    for seed in (0, 1):
        save_dense(tmp_path, "low", 40.0 + seed, seed=seed)
        save_dense(tmp_path, "high", 42.0 + seed, seed=seed)
    text = compare("low", "high")
    assert "400 images, mean of 2 seeds; bootstrap over images" in text
    assert "high is better than low on digits/knn@dino mIoU by 2.0 points" in text


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"resamples": 100}, "mIoU: 20000 resamples against 100; use --rerun for both"),
        ({"limit": 1}, "limit none against 1"),
    ],
)
def test_other_resamples_are_not_compared(compare, tmp_path, fields, reason):
    save_dense(tmp_path, "a", 40.0)
    save_dense(tmp_path, "b", 50.0, **fields)
    text = compare("a", "b")
    assert any(reason in line for line in left_out(text)) and " better " not in text


def test_single_images_and_lost_arrays_are_named(compare, tmp_path):
    for name in "ab":
        save_dense(tmp_path, name, 40.0, limit=1)
        path = save_dense(tmp_path, name, 40.0)
    write_result(path, read_result(path), {"other": np.ones(3)})
    text = compare("a", "b")
    assert "mIoU: 1 of 1 images have a value" in text and "no array 'mIoU_resampled'" in text


def test_the_first_place_is_shared(tmp_path):
    save_three(tmp_path)
    write_leaderboard(tmp_path)
    text = (tmp_path / "leaderboard.md").read_text()
    assert "**43.00" in text and "**42.90" in text and "**40.00" not in text


@pytest.mark.exhaustive  # by default test_contributing.py runs a dense task, test_record.py checks intervals
@pytest.mark.parametrize(
    ("suite", "url", "changes", "metrics"),
    [
        ("segmenter_linear@smoke", "tiny-cityscapes:", ("epochs=1", "judge_every=1", "lr=0.1"), "mIoU aAcc mAcc"),
        ("maskrcnn@smoke", "tiny-coco:", ("milestones=1", "epochs=2"), "box_AP box_AP50 box_AP75 mask_AP"),
    ],
)
def test_every_dense_metric_of_a_run_has_an_interval_and_is_compared(
    suite, url, changes, metrics, bench, compare, tmp_path, exports
):
    task = {"segmenter_linear@smoke": "segmenter_cityscapes", "maskrcnn@smoke": "maskrcnn_coco"}[suite]
    words = ("--suite", suite, "--data", f"tiny={url}", "--set", *(f"{task}.{change}" for change in changes))
    code, _, error = bench("run", "--checkpoint", *exports, *words, "--limit", 24, "--out", tmp_path)
    assert code == 0, error
    for path in result_files(tmp_path):
        result, arrays = read_result(path), read_arrays(path)
        resampled = {name: metric for name, metric in result.metrics.items() if metric.interval}
        assert (
            set(metrics.split()) <= set(resampled) == {name for name, metric in result.metrics.items() if metric.array}
        )
        assert result.interval_method == "95 % over validation images: bootstrap, expanded percentiles"
        assert all(metric.array_over == "resamples" for metric in resampled.values())
        assert all(arrays[f"{name}_resampled"].shape == (MAX_RESAMPLES,) for name in resampled)
        assert set(arrays) == {f"{name}_resampled" for name in resampled} | set(result.arrays)
    text = compare("first", "second", "--metric", "all")
    assert text.count(f"after Holm over {len(resampled)}\n") == 1
    assert all(f"\n  {name} " in text for name in resampled)
    if "segmenter" in suite:
        assert "kept as numbers alone, not for each image: mIoU_std" in text
