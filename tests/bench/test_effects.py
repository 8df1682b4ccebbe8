"""`bench sensitivity` and `bench explain`: what single settings do, and shares that add up to the whole difference."""

import csv
from dataclasses import replace

import numpy as np
import pytest
from made_results import made_checkpoint, made_metrics, made_result

from bench.cli.options import EvaluationOptions
from bench.effects import explain, sensitivity, variations
from bench.results.record import MetricRecord, read_result, result_files, write_result
from bench.results.store import StoredResult
from bench.statistics.paired import compare_images

DATA = ("--data", "digits=digits:")


@pytest.fixture(scope="module")
def study(tmp_path_factory, exports):
    """The folder of a study of two networks, in which five settings are varied."""
    from bench.__main__ import main

    out = tmp_path_factory.mktemp("study")
    vary = ("pool=avg", "crop=1.0", "pool=cls", "statistics=half", "precision=bfloat16", "image_size=2x")
    words = ("sensitivity", "knn@dino", "--checkpoint", *exports, "--name", "one", "two", *DATA, "--limit", 150)
    assert main([str(word) for word in (*words, "--out", out, "--vary", *vary)]) == 0
    return out


def changes_of(study) -> list[dict[str, str]]:
    with open(study / "sensitivity-knn@dino.csv") as file:
        return list(csv.DictReader(file))


def stored_results(out, name: str) -> list[tuple]:
    """(result, path) of a checkpoint."""
    paths = list(result_files(out))
    return [(result, path) for path in paths if (result := read_result(path)).checkpoint.name == name]


def test_each_change_is_that_of_two_results(study):
    rows = {(row["setting"], row["checkpoint"]): row for row in changes_of(study)}
    settings = [setting for setting, name in rows if name == "one"]
    assert set(settings[:-1]) == {"pool=avg", "crop=1.0", "statistics=half", "precision=bfloat16", "image_size=2x"}
    for name in ("one", "two"):
        by_variant = {result.variant: result.metrics["top1_k10"].value for result, _ in stored_results(study, name)}
        unchanged = by_variant[("limit=150",)]
        for setting, variant in (
            ("pool=avg", ("pool=avg", "limit=150")),
            ("precision=bfloat16", ("limit=150", "bfloat16")),
        ):
            row = rows[setting, name]
            assert float(row["number"]) == pytest.approx(unchanged)
            assert float(row["change"]) == pytest.approx(by_variant[variant] - unchanged)
            assert float(row["low"]) <= float(row["change"]) <= float(row["high"])
        ((normalised, _),) = stored_results(study, f"{name}+statistics-half")
        assert float(rows["statistics=half", name]["varied"]) == pytest.approx(normalised.metrics["top1_k10"].value)


def test_the_two_largest_are_tried_together(study):
    sizes: dict[str, float] = {}
    for row in changes_of(study):
        sizes[row["setting"]] = sizes.get(row["setting"], 0) + abs(float(row["change"])) / 2
    *singles, combined = sizes
    assert singles == sorted(singles, key=lambda setting: -sizes[setting])
    assert combined == " ".join(singles[:2])
    markdown = (study / "sensitivity-knn@dino.md").read_text()
    assert f"| {combined} |" in markdown
    assert (study / "sensitivity-knn@dino.png").read_bytes().startswith(b"\x89PNG")


def test_features_of_one_transform_are_extracted_once(study):
    """The class token, the mean patch and the rest come off one pass."""
    forwards = [
        result.cost.get("forwards", 0) for result, _ in stored_results(study, "one") if result.precision == "float32"
    ]
    assert len(forwards) >= 3 and sorted(forwards) == [0] * (len(forwards) - 2) + [300, 300]  # crops of 0.875 and of 1


def save_result(folder, name: str, right: slice, images: int = 200, **fields) -> StoredResult:
    """A stored result of a network that classifies the images `right` correctly."""
    values = np.zeros(images, np.float32)
    values[right] = 1
    metrics = {"top1": MetricRecord(value=100 * float(values.mean()), array="top1")}
    path = folder / f"{name}.json"
    write_result(path, made_result(made_checkpoint(name), metrics, **fields), {"top1": values})
    return StoredResult(path=path, result=read_result(path))


def test_networks_that_change_places_are_counted(tmp_path):
    unchanged = {name: save_result(tmp_path, name, slice(count)) for name, count in (("a", 100), ("b", 60), ("c", 59))}
    varied = {
        name: save_result(tmp_path, f"{name}2", slice(count)) for name, count in (("a", 50), ("b", 90), ("c", 91))
    }
    effect = sensitivity.effect_of(("k=1",), "10", unchanged, varied)
    assert effect.pairs == 3 and (effect.swapped, effect.significant) == (
        3,
        2,
    )  # b and c differ by one image, which is no evidence
    assert effect.mean.difference == pytest.approx((-25 + 15 + 16) / 3)
    assert effect.size == pytest.approx((25 + 15 + 16) / 3)


def evaluate(bench, out, export, *words):
    assert (
        bench("run", "--suite", "knn@dino", "--checkpoint", export, *DATA, "--limit", 150, "--out", out, *words)[0] == 0
    )


def test_two_settings_that_were_changed_at_once_are_told_apart(bench, tmp_path, exports):
    """Another library that searches changes nothing, so that the mean patch explains the whole difference."""
    evaluate(bench, tmp_path, exports[0])
    evaluate(bench, tmp_path, exports[0], "--set", "knn.pool=avg", "knn.backend=torch")
    words = ("limit=150", "pool=avg backend=torch limit=150", "--out", tmp_path, "--to", tmp_path / "to")
    code, text, _ = bench("explain", *words)
    assert code == 0 and "differs: pool: cls -> avg" in text and "differs: backend: faiss -> torch" in text
    assert "--checkpoint" in text and not (tmp_path / "to").exists()
    code, text, _ = bench("explain", *words, "--checkpoint", exports[0], *DATA)
    assert code == 0 and "not explained: +0.00" in text
    lines = {line.split()[0]: line for line in text[text.index("explains") :].splitlines() if line.strip()}
    assert "+0.00 [" in lines["backend"]
    whole = lines["all"].split()[1]
    assert float(whole) != 0 and f" {whole} [" in lines["pool"]


CHANGED = {
    "pool": ("cls", "avg"),
    "k": ([10, 20, 100, 200], [3]),
    "crop": (0.875, 1.0),
    "norm": (True, False),
    "interpolation": ("bicubic", "bilinear"),
}
CHANGES_TO_B = {
    "pool": "pool=avg",
    "k": "k=3",
    "crop": "crop=1.0",
    "norm": "norm=False",
    "interpolation": "interpolation=bilinear",
}


def options_of(out, export) -> EvaluationOptions:
    arguments = {"checkpoint": (str(export),), "suite": "knn@dino", "data": ("digits=digits:",)}
    return EvaluationOptions(**arguments, out=out, limit=150, device="cpu")


@pytest.mark.parametrize("count", [2, 5])
def test_shares_add_up_to_the_whole_difference(tmp_path, exports, count):
    """Of all orders of two differences, and of one order of five with its reverse."""
    changed = dict(list(CHANGED.items())[:count])
    shares, whole = explain.explain(options_of(tmp_path, exports[0]), changed)
    assert {share.name: share.values for share in shares} == changed
    assert sum(share.share.difference for share in shares) == pytest.approx(whole.difference, abs=1e-4)
    assert all(share.share.low <= share.share.difference <= share.share.high for share in shares)
    texts = [tuple(sorted(CHANGES_TO_B[name] for name in names)) for names in ((), ("k",), ("k", "pool"), changed)]
    results, problems = variations.evaluate_variations(options_of(tmp_path, exports[0]), texts)
    none, k, both, all_changes = (variations.score_of(results[text]["first"]).value for text in texts)
    assert not problems and whole.difference == pytest.approx(all_changes - none, abs=1e-4)
    (share_of_k,) = [share for share in shares if share.name == "k"]
    assert share_of_k.alone == pytest.approx(k - none)
    if count == 2:  # of two, a Shapley value is the mean of alone and last
        pool = next(share for share in shares if share.name == "pool")
        assert pool.last == pytest.approx(both - k)
        assert pool.share.difference == pytest.approx((pool.alone + pool.last) / 2, abs=1e-4)


def test_what_cannot_be_measured_is_named():
    first = made_result(made_checkpoint(), made_metrics({"top1": 50}), settings={"k": [10]}, versions={"torch": "2.5"})
    second = replace(first, limit=100, settings={"k": [20], "layers": "all"}, versions={"torch": "2.6"})
    settings, facts = explain.differences(first, second)
    assert settings == {"k": ([10], [20]), "layers": ("last", "all")}  # a setting that came later had its default
    assert facts == {"limit": (None, 100), "version of torch": ("2.5", "2.6")}
    with pytest.raises(ValueError, match="linear"):
        explain.differences(first, replace(first, task="linear"))


@pytest.mark.parametrize(("vary", "names"), [("poool=avg", "poool"), ("k=0", "k=0"), ("decode=exat", "decode")])
def test_a_wrong_variation_is_refused(tmp_path, exports, vary, names):
    with pytest.raises(ValueError, match=names):
        sensitivity.sensitivity(options_of(tmp_path, exports[0]), [vary])


def test_every_checkpoint_needs_a_name(refused, tmp_path, exports):
    words = ("--checkpoint", exports[0], "--name", "a", "b", *DATA, "--out", tmp_path)
    refused("sensitivity", "knn@dino", *words, named="--name: 2 names for 1 checkpoints")


def test_a_setting_that_the_network_cannot_have_is_left_out_alone(bench, tmp_path):
    words = ("--checkpoint", "pixels:8", *DATA, "--limit", 60, "--out", tmp_path, "--vary", "layer=-2", "crop=1.0")
    code, out, _ = bench("sensitivity", "knn@dino", *words)
    assert code == 0 and "layer -2: the model has 1 blocks" in out
    assert [row["setting"] for row in changes_of(tmp_path)] == ["crop=1.0"]


def test_the_table_of_one_network_has_no_spread_and_no_order():
    numbers = np.random.default_rng(0).random((3, 50))
    tests = {name: compare_images(after, numbers[2]) for name, after in zip("ab", numbers, strict=False)}
    common = {"variation": ("k=20",), "original": "10", "mean": tests["a"], "swapped": 0, "significant": 0}
    alone = sensitivity.table_rows([sensitivity.Effect(tests={"a": tests["a"]}, pairs=0, **common)])
    two = sensitivity.table_rows([sensitivity.Effect(tests=tests, pairs=1, **common)])
    assert [len(row) for row in alone] == [3, 3] and [len(row) for row in two] == [7, 7]
    assert alone[1] == two[1][:3]


def test_a_checkpoint_in_place_of_a_result_is_told_so(study):
    with pytest.raises(ValueError, match="--name one"):
        explain.find_result("one", study)
    with pytest.raises(ValueError, match=r"did you mean 'digits/knn@dino\["):
        explain.find_result("digits/knn@din", study)
