"""`bench reproduce`: lists and counts of published values, comparison with measured ones, commands that run."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import timm
from made_results import made_metrics, made_result

from bench import reproduce
from bench.cli import parsed
from bench.published.values import SETS, TABLES, published_values, values_of
from bench.reproduce import Setup, commands_of, measurement, missing_for, script, statuses, unmeasured, untrained
from bench.results.record import CheckpointUsed, DataUsed, ProtocolUsed, Result
from bench.results.store import StoredResult
from bench.run.suites import catalogue, changed_protocols, choose_protocols
from checkpoints.export import ViTExport
from engine.extensions import source_files


def setup(tmp_path, **others) -> Setup:
    return Setup(**{"checkpoints": {}, "data": {}, "out": tmp_path, **others})


def value_of(table: str, checkpoint: str, metric: str):
    return next(value for value in values_of(table) if (value.checkpoint, value.metric) == (checkpoint, metric))


def test_every_table_is_listed_with_its_counts(bench):
    code, out, _ = bench("reproduce")
    lines = {line.split()[0]: line for line in out.splitlines() if line.split()[:1] and line.split()[0] in TABLES}
    assert code == 0 and list(lines) == list(TABLES)
    for table, line in lines.items():
        values, named, changed, none = (int(word) for word in line.split(";")[0].split() if word.isdecimal())
        assert values == named + changed + none == len(values_of(table)), line


def test_the_summary_counts_all_values(bench):
    code, out, _ = bench("reproduce", "--summary")
    assert code == 0
    rows = {line.split()[0]: [int(word) for word in line.split()[1:]] for line in out.splitlines()[1 : len(TABLES) + 2]}
    totals = rows.pop("all")
    assert list(rows) == list(TABLES) and totals == [sum(column) for column in zip(*rows.values(), strict=True)]
    value_statuses = [statuses(value) for value in published_values()]
    assert totals[0] == len(value_statuses)
    for number, status in enumerate(reproduce.STATUSES):
        assert totals[1 + number] == sum(evaluation == status for evaluation, _ in value_statuses)
        assert totals[4 + number] == sum(training == status for _, training in value_statuses)
    assert out.count("not measured here: ") == len({unmeasured(value) for value in published_values()} - {""})


def test_missing_protocols_methods_and_settings_are_named(tmp_path, monkeypatch):
    value = value_of("moca:table9", "moca-b", "top1_k20_bestT")
    with monkeypatch.context() as without_extensions:
        without_extensions.setattr(reproduce, "protocols", dict)
        without_extensions.setattr(reproduce, "source_files", lambda kind: {})
        assert statuses(value) == ("none", "none")
        reasons = [unmeasured(value), untrained(value)]
        assert reasons == ["there is no protocol knn@moca", "there is no method moca"]
        assert commands_of(value, setup(tmp_path)) == []
        assert missing_for(value, setup(tmp_path)) == reasons
    assert statuses(replace(value, settings="k=20", pretraining="moca vit_b_v0.9 new_words=8")) == ("set", "set")
    unknown_setting = replace(value, settings="kk=20", pretraining="moca vit_x")
    assert "no setting 'kk'" in unmeasured(unknown_setting) and untrained(unknown_setting) == "moca has no recipe vit_x"


def test_a_published_number_is_shown_beside_the_measured_one(bench, exports, tmp_path):
    """With the differences in images and weights; a result with changed settings does not count."""
    words = ("--checkpoint", exports[0], "--name", "moca-b", "--data", "imagenet=tiny:", "--out", tmp_path)
    assert bench("run", *words, "--suite", "knn@moca")[0] == 0
    options = ("--checkpoints", f"moca-b={exports[0]}", "--data", "imagenet=tiny:")
    code, out, _ = bench("reproduce", "moca:table9", *options, "--out", tmp_path)
    assert code == 0
    lines_by_metric = {line.strip().split(": ")[0]: line for line in out.splitlines() if ": published " in line}
    line = lines_by_metric["knn@moca top1_k20_bestT"]  # the last of three models
    assert "published 78.4; not measured here" in line
    (line,) = [line for line in out.splitlines() if "published 77.2; measured" in line]
    top1 = json.loads(next(tmp_path.rglob("knn@moca-seed0.json")).read_text())["metrics"]["top1_k20_bestT"]
    ends = ", ".join(f"{end - 77.2:+.1f}" for end in top1["interval"])
    assert f"measured {top1['value']:.2f}, difference {top1['value'] - 77.2:+.2f} [{ends}]; " in line
    assert "on other images: 64 train + 32 val, imagenet has 1281167 train + 50000 val" in line
    following = out.splitlines()[out.splitlines().index(line) + 1 :]
    differences = "of random, not moca, a ViT-12x2/16, not a ViT-B/16"
    assert f"; the weights are {differences}" in line
    assert following[0] == f"    missing: these weights, as {exports[0]} is {differences}"
    run = f"bench run --checkpoint {exports[0]} --name moca-b --suite knn@moca --data imagenet=tiny: --out {tmp_path}"
    assert following[1].strip() == run
    assert "missing: weights" in out  # of moca-l
    assert bench("run", *words, "--suite", "knn@moca", "--set", "knn.k=20", "--rerun")[0] == 0
    assert bench("reproduce", "moca:table9", "--out", tmp_path)[1].count("; measured ") == 1


@pytest.mark.parametrize(
    "others", [dict(name="imagenet", images={"train": 64, "val": 32}), dict(name="in1k", precision="bfloat16")]
)
def test_the_result_most_similar_to_the_published_one_is_used(tmp_path, others):
    """Whatever the names of image sets and the order of files."""
    value = value_of("moca:table9", "moca-b", "top1_k20_bestT")
    similar = result_of(value, 70.0, name="imagenet-of-2012")
    different = result_of(value, 60.0, **others)
    for results in ([similar, different], [different, similar]):
        stored = [StoredResult(path=tmp_path, result=result) for result in results]
        assert measurement(value, stored, setup(tmp_path)).number == 70.0


def result_of(value, number: float, *, name: str, images=SETS["imagenet"].images, precision="float32") -> Result:
    used = CheckpointUsed(name=value.checkpoint, digest="d" * 64, method="moca")
    data = DataUsed(name=name, url="imagenet:/data", images=images)
    protocol = ProtocolUsed(name=value.protocol, version=1)
    return made_result(used, made_metrics({value.metric: number}), protocol=protocol, data=data, precision=precision)


def test_training_costs_are_read_from_the_log(bench, tmp_path):
    """Updates of 1.5 s, 10 an epoch; the log holds 2 of 4 epochs."""
    run = tmp_path / "pretraining" / "moca-b-100"
    run.mkdir(parents=True)
    settings = {"batch": 30, "epochs": 4, "source": "", "spec": {}, "settings": {}}
    data = {"url": "digits:", "fingerprint": "", "images": 305}
    (run / "run.json").write_text(json.dumps({"method": "moca", "settings": settings, "data": data}))
    line = {"updates": 10, "images_per_second": 20.0, "gpu_memory_gib": 22.5, "devices": "8 x A100"}
    (run / "log.jsonl").write_text("".join(json.dumps(line | {"step": 10 * epoch}) + "\n" for epoch in (1, 2)))
    _, out, _ = bench("reproduce", "moca:table2d", "--out", tmp_path)
    (minutes,) = [line for line in out.splitlines() if "published 8.15 min" in line]
    assert "measured 0.25 min, difference -7.90; on 8 x A100" in minutes
    (memory,) = [line for line in out.splitlines() if "published 23 GB" in line]
    assert "measured 22.50 GB, difference -0.50" in memory
    hours = replace(value_of("moca:table5k", "moca-b", "hours"), checkpoint="moca-b-100")
    assert measurement(hours, [], setup(tmp_path)).number == pytest.approx(4 * 15 / 3600)
    assert measurement(replace(hours, checkpoint="moca-l"), [], setup(tmp_path)) is None


def test_all_commands_of_a_script_parse(tmp_path):
    """By the parser of bench, with spaces in paths."""
    for table in TABLES:
        check_commands(table, tmp_path)


def check_commands(table, tmp_path):
    out = tmp_path / "results of today"
    lines = list(script(table, setup(out)))
    commands = [line for line in lines if not line.startswith(("#", "set -")) and line]
    assert len(set(commands)) == len(commands)
    for line in commands:
        words = shlex.split(line)
        arguments = parsed(words[1:])[1]
        assert words[0] == "bench" and str(arguments.out).startswith(str(out)), line
    values = values_of(table)
    measurable = [value for value in values if not unmeasured(value)]
    assert sum(line.startswith("# not here") for line in lines) >= len(values) - len(measurable)


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
    (run,) = commands_of(value, setup(tmp_path, **locations))
    code, out, _ = bench(*run[1:], "--dry-run")
    assert code == 0 and "knn@moca on imagenet: 1297 train + 500 val images, to do" in out
    ablation = value_of("moca:table2c", "moca-b-100-lambda1", "top1_k20_bestT")
    pretrain, run = commands_of(ablation, setup(tmp_path, data={"imagenet": "digits:"}))
    assert run[3] == str(tmp_path / "pretraining" / "moca-b-100-lambda1" / "export")
    code, out, _ = bench(*pretrain[1:], "batch=64", "--dry-run")
    assert code == 0 and "image_weight = 1.0" in out and "epochs = 100" in out


def test_a_branch_other_than_the_first_is_imported(tmp_path, exports):
    value = value_of("extrema:table9", "extrema-b", "mIoU")
    file = tmp_path / "extrema.pth"
    file.touch()
    first, run = commands_of(value, setup(tmp_path, checkpoints={"extrema-b": str(file)}))
    folder = str(tmp_path / "imports" / "extrema-b-online")
    assert first == ["bench", "import", f"extrema:{file}", "--out", folder, "--branch", "online"]
    assert run[2:6] == ["--checkpoint", folder, "--name", "extrema-b-online"]
    (run,) = commands_of(value, setup(tmp_path, checkpoints={"extrema-b-online": str(exports[0])}))
    assert run[3] == str(exports[0])
    trained, run = commands_of(value, setup(tmp_path))
    assert trained[1] == "pretrain" and run[3].endswith("/export-online")


def test_weights_are_imported_at_the_size_of_the_published_images(tmp_path):
    value = value_of("dinov2:card", "dinov2-l", "top1_k20")
    folder, size = str(tmp_path / "imports" / "dinov2-l"), ["--image-size", "224"]
    for reference in ("timm:vit_large_patch14_dinov2.lvd142m", "dinov2:dinov2_vitl14_pretrain.pth"):
        first, run = commands_of(value, setup(tmp_path, checkpoints={"dinov2-l": reference}))
        assert first == ["bench", "import", reference, "--out", folder, *size] and run[3] == folder
    value = value_of("dinov2:card", "dinov2-l-518", "rmse")  # positions that were resized once are not resized again
    (run,) = commands_of(value, setup(tmp_path, checkpoints={"dinov2-l-518": reference}))
    assert run[3] == reference


def test_missing_weights_and_data_are_named(tmp_path):
    value = value_of("moca:table9", "moca-b", "top1")
    assert missing_for(value, setup(tmp_path)) == ["weights", "data"]
    file, images = tmp_path / "x.pth", tmp_path / "ILSVRC"
    locations = setup(tmp_path, data={"imagenet": f"imagenet:{images}"}, checkpoints={"moca-b": f"moca:{file}"})
    absent = [f"weights, as {file} does not exist", f"data, as {images} does not exist"]
    assert missing_for(value, locations) == absent
    file.touch(), images.mkdir()
    assert missing_for(value, locations) == []
    locations = setup(tmp_path, data={"imagenet": "tiny:"}, checkpoints={"moca-b": "timm:vit_base_patch16_224.mae"})
    assert missing_for(value, locations) == []


def test_weights_that_differ_from_the_published_are_named(tmp_path, exports):
    value = value_of("moca:table9", "moca-b", "top1")

    def missing_text(reference: str) -> str:
        locations = setup(tmp_path, data={"imagenet": "tiny:"}, checkpoints={"moca-b": reference})
        missing = missing_for(value, locations)
        notes = [line for line in script("moca:table9", locations) if line.startswith("# not here: these")]
        assert any(reference in line for line in notes) == bool(missing)
        return " ".join(missing)

    export = ViTExport.load(exports[0])
    mae = dict(export.facts) | {"method": "mae", "epochs": 1600}
    assert "is of mae, not moca" in missing_text(str(replace(export, facts=mae).save(tmp_path / "mae")))
    (tmp_path / "mae.pth").touch()
    assert "is of mae, not moca" in missing_text(f"mae:{tmp_path / 'mae.pth'}")
    assert missing_text(f"moca:{tmp_path / 'mae.pth'}") == missing_text("timm:vit_base_patch16_224.mae") == ""
    assert "its weights cannot be identified" in missing_text("module:torchvision.models:vit_b_16")


def test_example_paths_are_marked_in_a_script(tmp_path):
    (line,) = [line for line in script("moca:table9", setup(tmp_path)) if "is an example" in line]
    assert line == "# imagenet:/data/ILSVRC is an example: change it to where yours are, or give --data imagenet=URL"
    lines = list(script("extrema:table3", setup(tmp_path)))
    assert any(line.startswith("# images:/data/imagenet22k is an example") for line in lines)
    assert not any(
        "is an example" in line for line in script("moca:table9", setup(tmp_path, data={"imagenet": "tiny:"}))
    )


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["moca:table55"], "'moca:table55' | did you mean"),
        (["--plan", "moca:table55"], "'moca:table55'"),
        (["moca:table9", "--summary"], "give one of them"),
        (["moca:table9", "--checkpoints", "mocha=x"], "'mocha'"),
        (["moca:table9", "--checkpoints", "moca-b"], "NAME=PATH"),
        (["moca:table9", "--data", "in1k=imagenet:/data"], "in1k | ade20k"),
    ],
)
def test_a_wrong_request_is_refused_in_one_line(refused, words, named):
    refused("reproduce", *words, named=named)
