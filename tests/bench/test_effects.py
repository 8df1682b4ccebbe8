"""`bench sensitivity`: effects of single settings."""

import csv

import numpy as np
import pytest
from made_results import made_checkpoint, made_result, save_result

from bench import sensitivity
from bench.__main__ import main
from bench.options import EvaluationOptions
from bench.results.record import MetricRecord, read_result, result_files
from bench.results.store import StoredResult
from bench.statistics.paired import compare_images

DATA = ("--data", "digits=digits:")
VARIED = ("pool=avg", "crop=1.0", "pool=cls", "statistics=half", "precision=bfloat16", "image_size=2x", "k=5")


@pytest.fixture(scope="module")
def study(tmp_path_factory, exports):
    """The folder of a study of two networks, in which settings are varied."""
    out = tmp_path_factory.mktemp("study")
    words = ("sensitivity", "knn@dino", "--checkpoint", *exports, "--name", "one", "two", *DATA, "--limit", 60)
    assert main([str(word) for word in (*words, "--out", out, "--vary", *VARIED)]) == 0
    return out


def changes_of(study) -> list[dict[str, str]]:
    with open(study / "sensitivity-knn@dino.csv") as file:
        return list(csv.DictReader(file))


def stored_results(out, name: str) -> list[tuple]:
    """(result, path) of a checkpoint."""
    paths = list(result_files(out))
    return [(result, path) for path in paths if (result := read_result(path)).checkpoint.name == name]


def test_each_change_is_the_difference_of_two_results(study):
    rows = {(row["setting"], row["checkpoint"]): row for row in changes_of(study)}
    settings = [setting for setting, name in rows if name == "one"]
    assert set(settings[:-1]) == {
        "pool=avg",
        "crop=1.0",
        "statistics=half",
        "precision=bfloat16",
        "image_size=2x",
        "k=5",
    }
    for name in ("one", "two"):
        results = [result for result, _ in stored_results(study, name)]
        by_variant = {result.variant: next(iter(result.metrics.values())).value for result in results}
        unchanged = by_variant[("limit=60",)]
        for setting, variant in (
            ("pool=avg", ("pool=avg", "limit=60")),
            ("precision=bfloat16", ("limit=60", "bfloat16")),
            ("k=5", ("k=5", "limit=60")),  # whose metric has another name
        ):
            row = rows[setting, name]
            assert float(row["number"]) == pytest.approx(unchanged)
            assert float(row["change"]) == pytest.approx(by_variant[variant] - unchanged)
            assert float(row["low"]) <= float(row["change"]) <= float(row["high"])
        ((normalised, _),) = stored_results(study, f"{name}+statistics-half")
        assert float(rows["statistics=half", name]["varied"]) == pytest.approx(normalised.metrics["top1_k10"].value)


def test_the_two_settings_of_largest_effect_are_varied_together(study):
    sizes: dict[str, float] = {}
    for row in changes_of(study):
        sizes[row["setting"]] = sizes.get(row["setting"], 0) + abs(float(row["change"])) / 2
    *singles, combined = sizes
    assert singles == sorted(singles, key=lambda setting: -sizes[setting])
    assert combined == " ".join(singles[:2])


def test_features_of_one_transform_are_extracted_once(study):
    """Class token and mean patch come from one pass; crops of 0.875 and of 1 need one each."""
    results = [result for result, _ in stored_results(study, "one") if result.precision == "float32"]
    forwards = sorted(result.cost.get("forwards", 0) for result in results)
    assert len(forwards) >= 3 and forwards == [0] * (len(forwards) - 2) + [120, 120]


def save_correct(out, counts: dict[str, int]) -> dict[str, StoredResult]:
    """Results of networks that classify the first so many of 200 images correctly."""
    results = {}
    for name, count in counts.items():
        correct = np.arange(200) < count
        metrics = {"top1": MetricRecord(value=100 * float(correct.mean()), array="top1")}
        results[name] = save_result(out, made_result(made_checkpoint(name), metrics), {"top1": correct})
    return results


def test_networks_that_change_places_are_counted(tmp_path):
    unchanged = save_correct(tmp_path / "unchanged", {"a": 100, "b": 60, "c": 59})
    varied = save_correct(tmp_path / "varied", {"a": 50, "b": 90, "c": 91})
    effect = sensitivity.effect_of(("k=1",), "10", unchanged, varied)
    assert (effect.pairs, effect.swapped) == (3, 3)
    assert effect.significant == 2  # b and c differ by one image, which is no evidence
    assert effect.mean.difference == pytest.approx((-25 + 15 + 16) / 3)
    assert effect.size == pytest.approx((25 + 15 + 16) / 3)


def options_of(out, export) -> EvaluationOptions:
    arguments = {"checkpoint": (str(export),), "suite": "knn@dino", "data": ("digits=digits:",)}
    return EvaluationOptions(**arguments, out=out, limit=60, device="cpu")


@pytest.mark.parametrize(("vary", "names"), [("poool=avg", "poool"), ("k=0", "knn@dino.k"), ("decode=exat", "decode")])
def test_a_wrong_variation_is_refused(tmp_path, exports, vary, names):
    with pytest.raises(ValueError, match=names):
        sensitivity.sensitivity(options_of(tmp_path, exports[0]), [vary])


def test_every_checkpoint_needs_a_name(refused, tmp_path, exports):
    words = ("--checkpoint", exports[0], "--name", "a", "b", *DATA, "--out", tmp_path)
    refused("sensitivity", "knn@dino", *words, named="--name: 2 names for 1 checkpoints")


def test_only_the_setting_that_a_network_cannot_have_is_left_out(output_of, tmp_path):
    words = ("--checkpoint", "pixels:8", *DATA, "--limit", 60, "--out", tmp_path, "--vary", "layer=-2", "crop=1.0")
    assert "layer -2: the model has 1 blocks" in output_of("sensitivity", "knn@dino", *words)
    assert [row["setting"] for row in changes_of(tmp_path)] == ["crop=1.0"]


def test_the_table_of_one_network_has_no_spread_and_no_order():
    numbers = np.random.default_rng(0).random((3, 50))
    tests = {name: compare_images(after, numbers[2]) for name, after in zip("ab", numbers, strict=False)}
    common = {"variation": ("k=20",), "original": "10", "mean": tests["a"], "swapped": 0, "significant": 0}
    alone = sensitivity.table_rows([sensitivity.Effect(tests={"a": tests["a"]}, pairs=0, **common)])
    two = sensitivity.table_rows([sensitivity.Effect(tests=tests, pairs=1, **common)])
    assert [len(row) for row in alone] == [3, 3] and [len(row) for row in two] == [7, 7]
    assert alone[1] == two[1][:3]
