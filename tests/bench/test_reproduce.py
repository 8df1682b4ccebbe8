"""`bench reproduce`: lists and counts of published values, comparison with measured ones, commands that run."""

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from math import isnan, nan
from pathlib import Path

import pytest
import timm
from made_results import made_metrics, made_result

import bench as bench_api
from bench.cli import parsed
from bench.published.values import SETS, TABLES, published_values, values_of
from bench.reports import reproduce
from bench.reports.reproduce import (
    LAPTOP,
    SUITE,
    TODAY,
    WEIGHTS,
    Measurement,
    Setup,
    commands_of,
    differences,
    measurement,
    plan_of,
    script,
    unmeasured,
    untrained,
)
from bench.results.record import CheckpointUsed, DataUsed, ProtocolUsed, Result
from bench.results.store import StoredResult
from bench.run.suites import catalogue, changed_protocols, choose_protocols
from engine.extensions import source_files


def setup(tmp_path, **others) -> Setup:
    return Setup(**{"checkpoints": {}, "data": {}, "out": tmp_path, **others})


def value_of(table: str, checkpoint: str, metric: str):
    return next(value for value in values_of(table) if (value.checkpoint, value.metric) == (checkpoint, metric))


def test_the_listing_counts_all_values(bench):
    code, out, _ = bench("reproduce")
    assert code == 0
    lines = out.splitlines()[1 : len(TABLES) + 2]
    rows = {line.split()[0]: [int(word) for word in line.split()[1:4]] for line in lines}
    totals = rows.pop("all")
    assert list(rows) == list(TABLES) and totals == [sum(column) for column in zip(*rows.values(), strict=True)]
    assert all(rows[table][0] == len(values_of(table)) for table in TABLES)
    reasons = [unmeasured(value) for value in published_values()]
    assert totals[1] == reasons.count("")
    assert totals[2] == sum(not untrained(value) for value in published_values()) < totals[0]


def test_missing_protocols_methods_and_settings_are_named(tmp_path, monkeypatch):
    value = value_of("moca:table9", "moca-b", "top1_k20_bestT")
    with monkeypatch.context() as without_extensions:
        without_extensions.setattr(reproduce, "protocols", dict)
        without_extensions.setattr(reproduce, "source_files", lambda kind: {})
        reasons = [unmeasured(value), untrained(value)]
        assert reasons == ["there is no protocol knn@moca", "there is no method moca"]
        assert commands_of([value], setup(tmp_path)) == []
    changed = replace(value, settings="k=20", pretraining="moca vit_b_v0.9 new_words=8")
    assert unmeasured(changed) == untrained(changed) == ""
    unknown_setting = replace(value, settings="kk=20", pretraining="moca vit_x")
    assert "no setting 'kk'" in unmeasured(unknown_setting) and untrained(unknown_setting) == "moca has no recipe vit_x"


def rows_of(out: str) -> list[list[str]]:
    """The cells of the rows of a table: weights, what, measured by, published, measured, difference, errors, source."""
    rows = [[cell.strip() for cell in line[2:-2].split(" | ")] for line in out.splitlines() if line[:1] == "|"]
    return [row for row in rows if row[0] not in ("weights", "---")]


def test_a_published_number_is_shown_beside_the_measured_one(bench, exports, tmp_path):
    """With the differences in images and weights; a result with changed settings does not count."""
    words = ("--checkpoint", exports[0], "--name", "moca-b", "--data", "imagenet=tiny:", "--out", tmp_path)
    assert bench("run", *words, "--suite", "knn@moca")[0] == 0
    code, out, _ = bench("reproduce", "moca:table9", "--out", tmp_path)
    assert code == 0 and len(rows_of(out)) == len(values_of("moca:table9"))
    (row,) = [row for row in rows_of(out) if row[3] == "77.2" and row[4] != "not measured"]
    top1 = json.loads(next(tmp_path.rglob("knn@moca-seed0.json")).read_text())["metrics"]["top1_k20_bestT"]
    assert row[0] == "moca-b" and row[2] == "knn@moca top1_k20_bestT"
    assert row[4].startswith(f"{top1['value']:.2f} [{top1['interval'][0]:.1f}, {top1['interval'][1]:.1f}]; ")
    assert row[5] == f"{top1['value'] - 77.2:+.2f}" and float(row[6]) > 1
    assert "on other images: 64 train + 32 val, imagenet has 1281167 train + 50000 val" in row[4]
    assert "the weights are of random, not moca, a ViT-12x2/16, not a ViT-B/16" in row[4]
    assert bench("run", *words, "--suite", "knn@moca", "--set", "knn.k=20", "--rerun")[0] == 0
    rows = rows_of(bench("reproduce", "moca:table9", "--out", tmp_path)[1])
    assert sum(row[4] != "not measured" for row in rows) == 1


@pytest.mark.parametrize(
    "others",
    [
        dict(name="imagenet", images={"train": 64, "val": 32}),
        dict(name="in1k", precision="bfloat16"),
        dict(name="imagenet-of-2012", digest="c" * 64, method="mae"),
        dict(name="imagenet-of-2012", image_size=98),
    ],
)
def test_the_result_most_similar_to_the_published_one_is_used(tmp_path, others):
    """Whatever the names of image sets and the order of files."""
    value = value_of("moca:table9", "moca-b", "top1_k20_bestT")
    similar = result_of(value, 70.0, name="imagenet-of-2012")
    different = result_of(value, 60.0, **others)
    for results in ([similar, different], [different, similar]):
        stored = [StoredResult(path=tmp_path, result=result) for result in results]
        assert measurement(value, stored).number == 70.0
        alone = measurement(value, [StoredResult(path=tmp_path, result=different)])
        assert alone.number == 60.0 and alone.remarks


def result_of(
    value, number: float, *, name: str, images=SETS["imagenet"].images, digest="d" * 64, method="moca", **fields
) -> Result:
    used = CheckpointUsed(name=value.checkpoint, digest=digest, method=method, image_size=224)
    data = DataUsed(name=name, url="imagenet:/data", images=images)
    protocol = ProtocolUsed(name=value.protocol, version=1)
    return made_result(used, made_metrics({value.metric: number}), protocol=protocol, data=data, **fields)


def test_all_commands_of_a_script_parse(tmp_path):
    """By the parser of bench, with spaces in paths."""
    out = tmp_path / "results of today"
    for name in [*(name for name in TABLES if not name.startswith("mieb:")), "mieb:pets", TODAY, LAPTOP]:
        plan = plan_of(name)
        lines = list(script(name, plan, setup(out, processes=8)))
        commands = [line.partition(" | ")[0] for line in lines if not line.startswith(("#", "set -")) and line]
        runs = [line for line in commands if not line.startswith("bench reproduce")]
        assert len(set(runs)) == len(runs)
        for line in commands[:: 1 + len(commands) // 2]:  # parsing takes 20 ms
            words = shlex.split(line)
            words = words[4:] if words[0] == "torchrun" else words
            arguments = parsed(words[1:])[1]
            folder = arguments.to if words[1] == "record" else arguments.out
            assert words[0] == "bench" and str(folder).startswith(str(out)), line
        reasons = {unmeasured(value) for value in plan} - {""}
        assert {line for line in lines if line.startswith("# not")} == {f"# not here: {reason}" for reason in reasons}


def test_current_networks_are_measured_by_six_protocols_and_those_of_their_published_numbers(tmp_path):
    plan = plan_of(TODAY)
    for name, reference in WEIGHTS.items():
        scheme, _, model = reference.partition(":")
        assert timm.is_model_pretrained(model) if scheme else name == "ibot-b"
        by_protocol = {value.protocol: value for value in plan if value.checkpoint == name}
        assert set(SUITE.split(",")) <= by_protocol.keys()
        (run,) = commands_of([by_protocol["knn@dino"]], setup(tmp_path))
        size = by_protocol["knn@dino"].importer.partition(" --image-size ")[2]
        assert run[run.index("--image-size") + 1] == size if size else "--image-size" not in run
        (run,) = commands_of([by_protocol["segmentation_linear@dinov3"]], setup(tmp_path))
        assert "--image-size" not in run  # it is part of the protocol
        assert run[run.index("--data") + 1].startswith("ade20k=ade20k:")
    published = [value for value in plan if not isnan(value.value)]
    assert {value.data for value in plan} == {"imagenet", "ade20k", "nyu"} and len(published) > 20


@pytest.mark.slow
def test_a_script_can_be_repeated_and_ends_with_a_table_and_a_record(bench, exports, tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "SUITE", "knn@dino,dense_knn@smoke")
    monkeypatch.setattr(reproduce, "WEIGHTS", {"dino-b": "", "dinov2-s": ""})
    options = ["--checkpoints", f"dino-b={exports[0]}", f"dinov2-s={exports[1]}"]
    options += ["--data", "imagenet=tiny:", "ade20k=tiny-ade20k:", "--out", tmp_path / "out"]
    code, text, _ = bench("reproduce", "--plan", "today", "--suite", "knn@dino,dense_knn@smoke", *options)
    lines = [line for line in text.splitlines() if line.startswith("bench ")]
    assert code == 0 and "set -euo pipefail" in text and len(lines) == 1 + 2 * 2 + 2
    times, printed = [], ""
    for _ in range(2):
        for line in lines:
            words = shlex.split(line.partition(" | ")[0])
            code, out, err = bench(*words[1:])
            assert code == 0, (line, err)
            printed += out
        times.append([path.stat().st_mtime_ns for path in sorted((tmp_path / "out").rglob("*seed0.json"))])
    assert len(times[0]) == 4 and times[0] == times[1], "results are not measured again"
    assert bench("record", "--check", f"{tmp_path}/out-record")[0] == 0
    rows = rows_of(printed)
    assert {row[0] for row in rows if row[2] == "dense_knn@smoke" and row[4] and not row[3]} == {
        "dino-b",
        "dinov2-s",
    }
    assert any("knn@dino" in row[2] and row[5].startswith("-") and float(row[6]) < -1 for row in rows)


def test_the_plan_of_a_laptop_has_four_numbers_and_downloads_what_is_not_given(bench, tmp_path):
    plan = plan_of(LAPTOP)
    assert [(value.protocol, value.data, value.value) for value in plan] == [
        ("lowshot@mieb", "flowers102", 99.51),
        ("logreg@dinov2", "flowers102", 99.6),
        ("lowshot@mieb", "cifar10", 92.95),
        ("logreg@dinov2", "cifar10", 97.7),
    ]
    given = setup(tmp_path, data={"cifar10": "tiny:"})
    downloads = [line for line in script(LAPTOP, plan, given) if line.startswith("bench data get")]
    assert [line.split()[3] for line in downloads] == ["Flowers102"]
    assert bench("reproduce", "--run")[0] == 2


@pytest.mark.exhaustive
def test_the_plan_of_a_laptop_runs_from_start_to_end(exports, tmp_path):
    """On weights and images that are given: published, measured and difference, after each number."""
    words = ["--plan", LAPTOP, "--run", "--checkpoints", f"dinov2-s={exports[0]}", "--out", str(tmp_path / "out")]
    words += ["--data", "cifar10=tiny:", "flowers102=tiny:"]
    ended = subprocess.run(
        [sys.executable, "-m", "bench", "reproduce", *words], capture_output=True, text=True, check=True
    )
    rows = rows_of(ended.stdout)
    first, *_, last = [rows[start : start + 4] for start in range(0, len(rows), 4)]
    assert [row[4] != "not measured" and bool(row[5]) for row in first] == [True, False, False, False]
    assert [row[4] != "not measured" and bool(row[5]) for row in last] == [True, False, True, True]
    assert last[1][2].endswith("per_class_100percent")  # tiny reports top-1


def test_only_what_a_table_shows_is_explained(tmp_path):
    lines = list(reproduce.table(bench_api.reproduce("mieb:cifar10", out=tmp_path)))
    assert any("+- 0.66" in line for line in lines) and lines[-2:] == [
        "",
        "+-: the standard deviation that is published.",
    ]


def test_differences_are_given_in_points_and_standard_errors():
    value = replace(value_of("moca:table9", "moca-b", "top1"), value=75.0)
    interval = (76 - 1.959964 * 0.4, 76 + 1.959964 * 0.4)
    measured = Measurement(number=76.0, unit="%", interval=interval, remarks=("elsewhere",))
    assert differences(value, measured) == ("76.00 [75.2, 76.8]; elsewhere", "+1.00", "+2.5")
    assert differences(value, Measurement(number=76.0, unit="%"))[2] == ""
    assert differences(value, None)[0] == "not measured"
    assert differences(replace(value, value=nan), measured)[1:] == ("", "")


def test_all_commands_of_why_numbers_differ_parse():
    page = (Path(__file__).parents[2] / "docs/why-numbers-differ.md").read_text()
    runs = [shlex.split(line) for line in page.splitlines() if line.startswith("bench run ")]
    imports = [parsed(shlex.split(line)[1:])[1] for line in page.splitlines() if line.startswith("bench import ")]
    sources = {str(arguments.out): arguments.source for arguments in imports}
    for words in runs:
        arguments = parsed(words[1:])[1]
        chosen = choose_protocols(arguments.suite, catalogue())
        changed = changed_protocols(chosen, arguments.set)
        assert all(bool(protocol.changes) == bool(arguments.set) for protocol in changed), words
        (reference,) = arguments.checkpoint
        scheme, _, name = sources.get(reference, reference).partition(":")
        assert scheme in source_files("importers") and (scheme != "timm" or timm.is_model_pretrained(name)), reference
    assert len(runs) > 15


def test_commands_of_a_script_run(bench, exports, tmp_path):
    """With --dry-run: a pretraining, and an evaluation of given weights."""
    locations = {"checkpoints": {"moca-b-100": str(exports[0])}, "data": {"imagenet": "digits:"}}
    value = value_of("moca:table2c", "moca-b-100", "top1_k20_bestT")
    (run,) = commands_of([value], setup(tmp_path, **locations))
    code, out, _ = bench(*run[1:], "--dry-run")
    assert code == 0 and "knn@moca on imagenet: 1297 train + 500 val images; " in out
    ablation = value_of("moca:table2c", "moca-b-100-lambda1", "top1_k20_bestT")
    pretrain, run = commands_of([ablation], setup(tmp_path, data={"imagenet": "digits:"}))
    assert run[3] == str(tmp_path / "pretraining" / "moca-b-100-lambda1" / "export")
    code, out, _ = bench(*pretrain[1:], "batch=64", "--dry-run")
    assert code == 0 and "image_weight = 1.0" in out and "epochs = 100" in out


def test_a_branch_other_than_the_first_is_imported(tmp_path, exports):
    value = value_of("extrema:table9", "extrema-b", "mIoU")
    file = tmp_path / "extrema.pth"
    file.touch()
    first, run = commands_of([value], setup(tmp_path, checkpoints={"extrema-b": str(file)}))
    folder = str(tmp_path / "imports" / "extrema-b-online")
    assert first == ["bench", "import", f"extrema:{file}", "--out", folder, "--branch", "online"]
    assert run[2:6] == ["--checkpoint", folder, "--name", "extrema-b-online"]
    (run,) = commands_of([value], setup(tmp_path, checkpoints={"extrema-b-online": str(exports[0])}))
    assert run[3] == str(exports[0])
    trained, run = commands_of([value], setup(tmp_path))
    assert trained[1] == "pretrain" and run[3].endswith("/export-online")


def test_weights_are_evaluated_at_the_size_of_the_published_images(tmp_path):
    value = value_of("dinov2:card", "dinov2-l", "top1_k20")
    for reference in ("timm:vit_large_patch14_dinov2.lvd142m", "dinov2:dinov2_vitl14_pretrain.pth"):
        (run,) = commands_of([value], setup(tmp_path, checkpoints={"dinov2-l": reference}))
        assert run[3] == reference and run[run.index("--image-size") + 1] == "224"
    value = value_of("dinov2:card", "dinov2-l-518", "rmse")  # positions that were resized once are not resized again
    (run,) = commands_of([value], setup(tmp_path, checkpoints={"dinov2-l-518": reference}))
    assert run[3] == reference


def test_missing_weights_and_data_are_named(bench, tmp_path):
    file, images = tmp_path / "x.pth", tmp_path / "ILSVRC"
    words = ["reproduce", "moca:table9", "--check", "--out", tmp_path / "out", "--suite", "knn@moca"]
    words += ["--checkpoints", f"moca-b=moca:{file}", "moca-l=timm:vit_large_patch16_224"]
    code, out, _ = bench(*words, "--data", f"imagenet=imagenet:{images}")
    missing = [line for line in out.splitlines() if line.startswith("missing: ")]
    assert code == 1 and missing[0] == f"missing: {file} does not exist, for moca-b"
    assert f"imagenet=imagenet:{images}" in missing[-1]
    file.touch()
    code, out, _ = bench(*words, "--data", "imagenet=digits:")
    assert code == 0 and out.splitlines()[-1] == "nothing is missing"
    assert "note: imagenet has 1297 train + 500 val images" in out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["moca:table55"], "moca:table55: | did you mean"),
        (["moca:table9", "--checkpoints", "mocha=x"], "'mocha'"),
        (["moca:table9", "--checkpoints", "moca-b"], "NAME=PATH"),
        (["moca:table9", "--data", "in1k=imagenet:/data"], "in1k | ade20k"),
        (["moca:table9", "--suite", "upernet@mae"], "upernet@mae"),
        (["moca:table9", "--plan", "moca:table9"], "--plan moca:table9: "),
        (["--check"], "--check"),
    ],
)
def test_a_wrong_request_is_refused_in_one_line(refused, words, named):
    refused("reproduce", *words, named=named)
