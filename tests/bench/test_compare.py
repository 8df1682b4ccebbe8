"""`bench compare` and the shared first place: only like is compared with like, and the words say what the tests say."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
from made_results import made_result, save_result

from bench.leaderboards.files import write_leaderboard
from bench.results.record import CheckpointUsed, DataUsed, MetricRecord, ProtocolUsed
from bench.statistics.compare import Comparison, Comparisons, to_text
from bench.statistics.paired import compare_images
from engine.files import digest

IMAGES = 400
KNN = ProtocolUsed(name="knn@dino", version=1)
DIGITS = DataUsed(name="digits", url="digits:", fingerprints={"train": "aa", "val": "bb"}, images={"val": IMAGES})


def save(out, name, top1, **others):
    """A result whose first `top1` images are right; `values` gives other correctness, `metrics` more metrics."""
    values = others.pop("values", (np.arange(IMAGES) < top1).astype(np.float32))
    mean = float(100 * np.nanmean(values.astype(np.float64)))
    metrics = {"top1": MetricRecord(value=mean, array="top1")} | others.pop("metrics", {})
    used = CheckpointUsed(name=name, digest=others.pop("digest", digest(name)))
    fields = dict(protocol=KNN, data=DIGITS, settings={"k": [20]})
    return save_result(out, made_result(used, metrics, **fields | others), {"top1": values}).path


def left_out(text: str) -> list[str]:
    return [line.removeprefix("not compared: ") for line in text.splitlines() if line.startswith("not compared: ")]


def test_a_difference_is_said_in_one_sentence(bench, tmp_path):
    save(tmp_path, "low", 200)
    save(tmp_path, "high", 260)
    code, text, _ = bench("compare", "low", "high", "--out", tmp_path)
    assert code == 0
    (sentence,) = [line for line in text.splitlines() if " is better than " in line]
    start, end = sentence.split("15.0 points [")
    assert start == "high is better than low on digits/knn@dino top1 by "
    low, high = map(float, end.split("]")[0].split(", "))
    assert 11 < low < 12.5 and 17.5 < high < 19
    assert end.endswith("p < 0.0001 after Holm over 1")
    assert "400 images; McNemar, exact; effect: Cohen's g" in text


def test_no_difference_is_said_too(bench, tmp_path):
    save(tmp_path, "a", 200)
    save(tmp_path, "b", 203)
    text = bench("compare", "a", "b", "--out", tmp_path)[1]
    assert "a and b cannot be told apart on digits/knn@dino top1: -0.8 points [" in text
    assert "p = 0.2500 after Holm over 1" in text


def test_the_lower_error_is_the_better_one(bench, tmp_path):
    for name, right in (("a", 100), ("b", 200)):
        values = (np.arange(IMAGES) < right).astype(np.float32)
        error = MetricRecord(value=right / 4, higher_is_better=False, array="wrong")
        path = save(tmp_path, name, right, metrics={"error": error, "top1": MetricRecord(value=right / 4)})
        np.savez(path.with_suffix(".npz"), wrong=values)
    assert (
        "a is better than b on digits/knn@dino error by 25.0 points" in bench("compare", "a", "b", "--out", tmp_path)[1]
    )


def test_three_checkpoints_are_three_pairs_under_one_correction(bench, tmp_path):
    for name, right in (("a", 200), ("b", 203), ("c", 211)):
        save(tmp_path, name, right)
    json_file, csv_file = tmp_path / "pairs.json", tmp_path / "pairs.csv"
    assert bench("compare", "a", "b", "c", "--out", tmp_path, "--json", json_file, "--csv", csv_file)[0] == 0
    value = json.loads(json_file.read_text())
    assert value["holm_over"] == 3 and value["not_compared"] == []
    found = {(each["first"], each["second"]): each for each in value["comparisons"]}
    assert list(found) == [("a", "b"), ("a", "c"), ("b", "c")]
    assert found["a", "c"]["p"] == pytest.approx(2**-10) and found["a", "c"]["p_holm"] == pytest.approx(3 * 2**-10)
    assert [each["better"] for each in found.values()] == ["", "second", "second"]
    with open(csv_file, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["better"] for row in rows] == ["", "second", "second"]
    assert rows[1]["second_only"] == "11" and rows[1]["accuracy_first"] == "50.0"


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ({"limit": 100}, "knn@dino: | limit none against 100"),
        ({"decode": "fast"}, "knn@dino: | decode exact against fast"),
        ({"precision": "bfloat16"}, "knn@dino: | precision float32 against bfloat16"),
        ({"settings": {"k": [5]}}, "knn@dino: | knn.k 20 against 5"),
        ({"protocol": replace(KNN, version=2)}, "knn@dino: | version 1 against 2"),
        ({"seed": 3}, "knn@dino: | seed | 0 against 3"),
        ({"data": replace(DIGITS, fingerprints={"train": "aa", "val": "cc"})}, "knn@dino: | val images bb against cc"),
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
def test_what_is_not_alike_is_not_compared(bench, tmp_path, others, reason):
    save(tmp_path, "a", 200)
    save(tmp_path, "b", 250, **others)
    code, text, _ = bench("compare", "a", "b", "--out", tmp_path)
    assert code == 0 and " better than " not in text
    lines = [line for line in left_out(text) if line.startswith("a and b: digits/")]
    assert any(all(part in line for part in reason.split(" | ")) for line in lines), lines


def test_damaged_arrays_and_results_are_named(bench, tmp_path):
    save(tmp_path, "a", 200)
    arrays = save(tmp_path, "b", 250).with_suffix(".npz")
    arrays.write_bytes(b"PK")
    damaged = tmp_path / "results" / "damaged.json"
    damaged.write_text("{")
    reasons = left_out(bench("compare", "a", "b", "--out", tmp_path)[1])
    assert str(damaged) in reasons[0] and str(arrays) in reasons[1]


def test_seeds_that_both_have_are_averaged(bench, tmp_path):
    generator = np.random.default_rng(0)
    for seed in range(3):
        for name, rate in (("a", 0.6), ("b", 0.8)):
            save(tmp_path, name, 0, seed=seed, values=(generator.random(IMAGES) < rate).astype(np.float32))
    save(tmp_path, "a", 1, seed=7)
    text = bench("compare", "a", "b", "--out", tmp_path)[1]
    assert "400 images, mean of 3 seeds; paired bootstrap only, because values are fractions" in text
    assert "b is better than a on digits/knn@dino top1 by " in text and "after Holm over 1" in text


def test_tables_say_which_test_their_rows_rest_on():
    test = compare_images(np.repeat([1.0, 0.0], [60, 40]), np.repeat([1.0, 0.0], [58, 42]))
    fractions = replace(test, test="paired bootstrap", effect_name="Cohen's d_z", first_only=None, second_only=None)
    place = dict(first="a", second="b", group="digits/lowshot@msn", seeds=(0,), p_holm=1.0)
    rows = [Comparison(**place, metric=name, paired=each) for name, each in (("few", fractions), ("all", test))]
    text = to_text(Comparisons(found=tuple(rows), left_out=()))
    first, second = text.split("\n\n")[:2]
    assert "paired bootstrap only" in first and "A only" not in first and "few" in first
    assert "McNemar, exact" in second and "A only" in second and "all" in second


def test_images_that_one_could_not_read_are_left_out_of_both(bench, tmp_path):
    values = (np.arange(IMAGES) < 250).astype(np.float32)
    values[:10] = np.nan
    save(tmp_path, "a", 200)
    save(tmp_path, "b", 0, values=values)
    assert "390 images" in bench("compare", "a", "b", "--out", tmp_path)[1]


def test_the_main_metric_alone_is_tested_unless_all_are_asked_for(bench, tmp_path):
    for name, right in (("a", 200), ("b", 250)):
        top5 = MetricRecord(value=right / 4, array="top1")
        save(tmp_path, name, right, metrics={"top1": MetricRecord(value=right / 4, array="top1"), "top5": top5})
    compare = ("compare", "a", "b", "--out", tmp_path)
    main, every, named = (bench(*compare, *more)[1] for more in ([], ["--metric", "all"], ["--metric", "top5"]))
    assert "after Holm over 1\n" in main and "top5" not in main
    assert "after Holm over 2\n" in every and "top1 " in every and "top5 " in every
    assert "after Holm over 1\n" in named and "top1 " not in named


def test_options_choose(bench, tmp_path):
    for name, right in (("a", 200), ("b", 250)):
        for data in ("digits", "cars"):
            for protocol in ("knn@dino", "knn@moca"):
                used = dict(data=replace(DIGITS, name=data), protocol=replace(KNN, name=protocol))
                save(tmp_path, name, right, **used)
    assert "Holm over 4" in bench("compare", "a", "b", "--out", tmp_path)[1]
    assert "Holm over 4" in bench("compare", "a", "b", "--out", tmp_path, "--protocol", "knn")[1]
    chosen = bench("compare", "a", "b", "--out", tmp_path, "--data", "cars", "--protocol", "knn@moca")[1]
    assert "Holm over 1" in chosen and "cars/knn@moca" in chosen


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["a", "x"], "'x' | a, twin (cccccccc), twin (dddddddd)"),
        (["a", "twin"], "'twin' is the name of 2 checkpoints"),
        (["a", "a"], "a is given twice"),
        (["a"], "required: OTHERS"),
        (["a", "twin-cccccccc", "--data", "cars"], "--data cars: | no such result"),
        (["a", "twin-cccccccc", "--metric", "top5"], "did you mean 'top1'?"),
    ],
)
def test_wrong_words_are_one_line_with_the_choices(refused, tmp_path, words, named):
    save(tmp_path, "a", 200)
    for letter in "cd":
        save(tmp_path, "twin", 210, digest=letter * 64)
    refused("compare", *words, "--out", tmp_path, named=named)


def test_twins_are_compared_by_digest(bench, tmp_path):
    for letter, right in (("c", 210), ("d", 250)):
        save(tmp_path, "twin", right, digest=letter * 64)
    text = bench("compare", "twin (cccccccc)", "twin-dddddddd", "--out", tmp_path)[1]
    assert "twin (dddddddd) is better than twin (cccccccc)" in text


def test_the_first_place_is_shared_by_all_that_cannot_be_told_apart(tmp_path):
    """b and c differ on one image, a and c on fifty."""
    for name, right in (("a", 200), ("b", 249), ("c", 250)):
        save(tmp_path, name, right)
    write_leaderboard(tmp_path)
    text = (tmp_path / "leaderboard.md").read_text()
    assert "| a | 50.00 |" in text and "| b | **62.25** |" in text and "| c | **62.50** |" in text


def test_without_images_in_common_the_best_stands_alone(tmp_path):
    save(tmp_path, "a", 249)
    save(tmp_path, "b", 250, metrics={"top1": MetricRecord(value=62.5)})
    write_leaderboard(tmp_path)
    text = (tmp_path / "leaderboard.md").read_text()
    assert "| a | 62.25 |" in text and "| b | **62.50** |" in text
