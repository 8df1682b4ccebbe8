"""`bench compare` and ties for the first place: which results are compared, and that sentences agree with the tests."""

import json
from dataclasses import replace

import numpy as np
import pytest
from made_results import made_result, save_result
from scipy.stats import ttest_1samp

from bench.reports.leaderboard import write_leaderboard
from bench.results.record import CheckpointUsed, DataUsed, MetricRecord, ProtocolUsed, read_result, write_result
from bench.results.store import read_results
from bench.statistics.compare import Comparison, Comparisons, to_text
from bench.statistics.compare import compare as compared
from bench.statistics.matching import Match, paired_test
from bench.statistics.paired import compare_images
from engine.files import digest

IMAGES = 400
KNN = ProtocolUsed(name="knn@dino", version=1)
DIGITS = DataUsed(name="digits", url="digits:", fingerprints={"train": "aa", "val": "bb"}, images={"val": IMAGES})


def first_correct(count: int) -> np.ndarray:
    """Correctness of a network that classifies the first `count` images correctly."""
    return (np.arange(IMAGES) < count).astype(np.float32)


def save(out, name, correct, **fields):
    """Save a result whose first `correct` images are right; `values`: other correctness, `metrics`: further metrics."""
    values = fields.pop("values", first_correct(correct))
    mean = float(100 * np.nanmean(values.astype(np.float64)))
    metrics = {"top1": MetricRecord(value=mean, array="top1")} | fields.pop("metrics", {})
    checkpoint = CheckpointUsed(name=name, digest=fields.pop("digest", digest(name)))
    defaults = dict(protocol=KNN, data=DIGITS, settings={"k": [20]})
    return save_result(out, made_result(checkpoint, metrics, **defaults | fields), {"top1": values}).path


def left_out(text: str) -> list[str]:
    """Why results were not compared."""
    return [line.removeprefix("not compared: ") for line in text.splitlines() if line.startswith("not compared: ")]


def test_one_sentence_has_the_difference_its_interval_and_p(compare, tmp_path):
    save(tmp_path, "low", 200)
    save(tmp_path, "high", 260)
    text = compare("low", "high")
    (sentence,) = [line for line in text.splitlines() if " is better than " in line]
    start, end = sentence.split("15.0 points [")
    assert start == "high is better than low on digits/knn@dino top1 by "
    low, high = map(float, end.split("]")[0].split(", "))
    assert 11 < low < 12.5 and 17.5 < high < 19
    assert end.endswith("p < 0.0001 after Holm over 1")
    assert "400 images; McNemar, exact; effect: Cohen's g" in text


def test_three_seeds_are_tested_over_seeds_as_well(compare, tmp_path):
    """Per image the networks differ in 8 to 12 of 400 images; Student's t over three seeds by SciPy."""
    gains = [8, 12, 10]
    for seed, gain in enumerate(gains):
        save(tmp_path, "low", 200, seed=seed)
        save(tmp_path, "high", 200 + gain, seed=seed)
    (comparison,) = compared(tmp_path, ["high", "low"]).found
    expected = ttest_1samp(np.array(gains) / 4, 0)
    assert comparison.over_seeds.p == pytest.approx(expected.pvalue)
    ends = expected.confidence_interval(0.95)
    assert (comparison.over_seeds.low, comparison.over_seeds.high) == pytest.approx((ends.low, ends.high))
    text = compare("high", "low")
    assert "over 3 training seeds in place of validation images" in text and "+2.50 [1.26, 3.74], p = 0.0131" in text
    assert compared(tmp_path, ["high", "low"], protocol="knn").found[0].paired.difference == pytest.approx(2.5)
    for path in tmp_path.rglob("*-seed2.json"):
        path.unlink()
    assert compared(tmp_path, ["high", "low"]).found[0].over_seeds is None


def test_seeds_that_differ_by_rounding_alone_are_not_tested_over_seeds(tmp_path):
    """A task that draws nothing: its sums may differ in the last digits."""
    for seed in range(3):
        save(tmp_path, "low", 200, seed=seed)
        save(tmp_path, "high", 240, seed=seed, metrics={"top1": MetricRecord(value=60 + 1e-6 * seed, array="top1")})
    (comparison,) = compared(tmp_path, ["high", "low"]).found
    assert comparison.over_seeds is None and comparison.paired.difference == pytest.approx(10)


def test_results_without_a_significant_difference_cannot_be_told_apart(compare, tmp_path):
    save(tmp_path, "a", 200)
    save(tmp_path, "b", 203)
    text = compare("a", "b")
    assert "a and b cannot be told apart on digits/knn@dino top1: -0.8 points [" in text
    assert "p = 0.2500 after Holm over 1" in text


def test_the_lower_error_is_the_better_one(compare, tmp_path):
    for name, wrong in (("a", 100), ("b", 200)):
        error = MetricRecord(value=wrong / 4, higher_is_better=False, array="wrong")
        path = save(tmp_path, name, wrong, metrics={"error": error, "top1": MetricRecord(value=wrong / 4)})
        write_result(path, read_result(path), {"wrong": first_correct(wrong)})
    assert "a is better than b on digits/knn@dino error by 25.0 points" in compare("a", "b")


def test_three_checkpoints_are_three_pairs_under_one_correction(compare, tmp_path):
    for name, correct in (("a", 200), ("b", 203), ("c", 211)):
        save(tmp_path, name, correct)
    json_file = tmp_path / "pairs.json"
    compare("a", "b", "c", "--json", json_file)
    content = json.loads(json_file.read_text())
    assert content["holm_over"] == 3 and content["not_compared"] == []
    pairs = {(pair["first"], pair["second"]): pair for pair in content["comparisons"]}
    assert list(pairs) == [("a", "b"), ("a", "c"), ("b", "c")]
    assert pairs["a", "c"]["p"] == pytest.approx(2**-10) and pairs["a", "c"]["p_holm"] == pytest.approx(3 * 2**-10)
    assert [pair["better"] for pair in pairs.values()] == ["", "second", "second"]
    assert pairs["a", "c"]["second_only"] == 11 and pairs["a", "c"]["accuracy_first"] == 50


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"limit": 100}, "knn@dino: | limit none against 100"),
        ({"decode": "fast"}, "knn@dino: | decode exact against fast"),
        ({"precision": "bfloat16"}, "knn@dino: | precision float32 against bfloat16"),
        ({"settings": {"k": [5]}}, "knn@dino: | knn.k 20 against 5"),
        ({"protocol": replace(KNN, version=2)}, "knn@dino: | version 1 against 2"),
        ({"seed": 3}, "knn@dino: | seed | 0 against 3"),
        ({"protocol": replace(KNN, name="knn@moca")}, "knn@moca: | no result of a"),
        ({"status": "failed", "metrics": {}}, "knn@dino: | no result of b"),
        ({"values": np.ones(7, np.float32)}, "top1: | 400 images against 7"),
        ({"metrics": {"top1": MetricRecord(value=62.5)}}, "not for each image: top1"),
        ({"metrics": {"top1": MetricRecord(value=12.0, array="top1")}}, "top1: | not the mean"),
        (
            {"metrics": {"top1": MetricRecord(value=0.625, unit="", higher_is_better=False, array="top1")}},
            "top1: | %, higher is better | no unit, lower is better",
        ),
    ],
)
def test_incomparable_results_are_not_compared(compare, tmp_path, fields, reason):
    save(tmp_path, "a", 200)
    save(tmp_path, "b", 250, **fields)
    text = compare("a", "b")
    assert " better than " not in text
    lines = [line for line in left_out(text) if line.startswith("a and b: digits/")]
    assert any(all(part in line for part in reason.split(" | ")) for line in lines), lines


def test_damaged_arrays_and_results_are_named(compare, tmp_path):
    save(tmp_path, "a", 200)
    arrays = save(tmp_path, "b", 250).with_suffix(".npz")
    arrays.write_bytes(b"PK")
    damaged = tmp_path / "results" / "damaged.json"
    damaged.write_text("{")
    reasons = left_out(compare("a", "b"))
    assert str(damaged) in reasons[0] and str(arrays) in reasons[1]


def test_seeds_that_both_have_are_averaged(compare, tmp_path):
    generator = np.random.default_rng(0)
    for seed in range(3):
        for name, rate in (("a", 0.6), ("b", 0.8)):
            save(tmp_path, name, 0, seed=seed, values=(generator.random(IMAGES) < rate).astype(np.float32))
    save(tmp_path, "a", 1, seed=7)
    text = compare("a", "b")
    assert "400 images, mean of 3 seeds; paired bootstrap only, because values are fractions" in text
    assert "b is better than a on digits/knn@dino top1 by " in text and "after Holm over 1" in text


def test_each_table_names_the_test_of_its_rows():
    test = compare_images(np.repeat([1.0, 0.0], [60, 40]), np.repeat([1.0, 0.0], [58, 42]))
    fractions = replace(test, test="paired bootstrap", effect_name="Cohen's d_z", first_only=None, second_only=None)
    pair = dict(first="a", second="b", group="digits/lowshot@msn", seeds=(0,), p_holm=1.0)
    rows = [Comparison(**pair, metric="few", paired=fractions), Comparison(**pair, metric="all", paired=test)]
    text = to_text(Comparisons(found=tuple(rows), left_out=()))
    first, second = text.split("\n\n")[:2]
    assert "paired bootstrap only" in first and "A only" not in first and "few" in first
    assert "McNemar, exact" in second and "A only" in second and "all" in second


def test_images_that_one_could_not_read_are_left_out_of_both(compare, tmp_path):
    values = first_correct(250)
    values[:10] = np.nan
    save(tmp_path, "a", 200)
    save(tmp_path, "b", 0, values=values)
    assert "390 images" in compare("a", "b")


def test_only_the_main_metric_is_tested_unless_metrics_are_named(compare, tmp_path):
    for name, correct in (("a", 200), ("b", 250)):
        metric = MetricRecord(value=correct / 4, array="top1")
        save(tmp_path, name, correct, metrics={"top1": metric, "top5": metric})
    main, every, named = (compare("a", "b", *option) for option in ([], ["--metric", "all"], ["--metric", "top5"]))
    assert "after Holm over 1\n" in main and "top5" not in main
    assert "after Holm over 2\n" in every and "top1 " in every and "top5 " in every
    assert "after Holm over 1\n" in named and "top1 " not in named


def test_data_and_protocol_choose_what_is_compared(compare, tmp_path):
    for name, correct in (("a", 200), ("b", 250)):
        for data in ("digits", "cars"):
            for protocol in ("knn@dino", "knn@moca"):
                save(tmp_path, name, correct, data=replace(DIGITS, name=data), protocol=replace(KNN, name=protocol))
    assert "Holm over 4" in compare("a", "b")
    assert "Holm over 4" in compare("a", "b", "--protocol", "knn")
    chosen = compare("a", "b", "--data", "cars", "--protocol", "knn@moca")
    assert "Holm over 1" in chosen and "cars/knn@moca" in chosen


def test_two_options_that_no_result_has_together_are_both_named(refused, tmp_path):
    for name in "ab":
        save(tmp_path, name, 200, protocol=KNN)
        save(tmp_path, name, 200, protocol=replace(KNN, name="linear@dino"), metrics={"other": MetricRecord(value=1.0)})
    words = ("a", "b", "--data", "digits", "--protocol", "knn@dino", "--metric", "other", "--out", tmp_path)
    refused("compare", *words, named="--metric other: | --protocol knn@dino; omit one")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["a", "x"], "'x' | a, twin (cccccccc), twin (dddddddd)"),
        (["a", "twin"], "'twin' is the name of 2 checkpoints"),
        (["a", "a"], "a is given twice"),
        (["a"], "required: B"),
        ([], "required: A, B"),
        (["a", "twin-cccccccc", "--data", "cars"], "--data cars: | no such result"),
        (["a", "twin-cccccccc", "--metric", "top5"], "did you mean 'top1'?"),
    ],
)
def test_wrong_names_and_options_are_one_line_with_the_choices(refused, tmp_path, words, named):
    save(tmp_path, "a", 200)
    for letter in "cd":
        save(tmp_path, "twin", 210, digest=letter * 64)
    refused("compare", *words, "--out", tmp_path, named=named)


def test_checkpoints_of_one_name_are_compared_by_digest(compare, tmp_path):
    for letter, correct in (("c", 210), ("d", 250)):
        save(tmp_path, "twin", correct, digest=letter * 64)
    text = compare("twin (cccccccc)", "twin-dddddddd")
    assert "twin (dddddddd) is better than twin (cccccccc)" in text


def test_checkpoints_that_cannot_be_told_apart_share_the_first_place(tmp_path):
    """b and c differ on one image, a and c on fifty."""
    for name, correct in (("a", 200), ("b", 249), ("c", 250)):
        save(tmp_path, name, correct)
    write_leaderboard(tmp_path)
    text = (tmp_path / "leaderboard.md").read_text()
    assert "| a | 3 | 50.00 |" in text and "| b | 1-2 | **62.25** |" in text and "| c | 1-2 | **62.50** |" in text


def test_ties_are_tested_on_all_seeds_that_the_numbers_are_means_of(tmp_path):
    """b is level with a in seed 0 alone."""
    for seed, correct in enumerate((200, 260, 270)):
        save(tmp_path, "a", correct, seed=seed)
    save(tmp_path, "b", 200)
    write_leaderboard(tmp_path)
    text = (tmp_path / "leaderboard.md").read_text()
    assert "| a | 1 | **60.83" in text and "| b | 2 | 50.00 |" in text


def test_a_checkpoint_is_not_tested_against_itself(tmp_path):
    save(tmp_path, "a", 200)
    (stored,), _ = read_results(tmp_path)
    with pytest.raises(ValueError, match="the same results on both sides"):
        paired_test(Match(group="digits/knn@dino", first=(stored,), second=(stored,)), "top1")


def test_nothing_is_marked_where_no_paired_test_is_possible(tmp_path):
    save(tmp_path, "a", 249)
    save(tmp_path, "b", 250, metrics={"top1": MetricRecord(value=62.5)})
    write_leaderboard(tmp_path)
    text = (tmp_path / "leaderboard.md").read_text()
    assert "| a | 62.25 |" in text and "| b | 62.50 |" in text
