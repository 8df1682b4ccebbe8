"""`bench record`: a folder of everything that a leaderboard is based on, nothing private, and checks that it agrees."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_results import made_checkpoint, made_result, save_result
from written import contents

from bench.__main__ import main
from bench.reports.record import (
    LOG_LINES,
    SUMS,
    check_record,
    derived_files,
    json_of,
    number_differences,
    take_up_record,
    thinned_log,
    write_record,
)
from bench.reports.site import about
from bench.results.record import DataUsed, MetricRecord, ProtocolUsed, Result, read_arrays, read_result
from bench.run.checkpoints import describe
from bench.run.outcomes import arrays_of, metric_records
from bench.run.suites import catalogue
from checkpoints.export import ViTExport
from downstream.metrics.scores import weighted_scores
from engine.tasks import Metric, Outcome, resampled, settings_of

PRIVATE = "/home/alice/secret"
LIMITED = {"limit": 8, "decode": "fast", "precision": "bfloat16", "skip_bad": True}


def measured_on_images(number: int, seed: int, images: int = 40, **others):
    """Metrics, other fields and arrays of a result on `images` of 40 images."""
    correct = np.random.default_rng(number + seed).random(images) < 0.5 + number / 10
    outcome = Outcome(metrics={"top1": Metric(value=100 * float(correct.mean()), per_image=correct)})
    metrics, interval_method = metric_records(outcome, images)
    data = DataUsed(name="digits", url=f"folder:{PRIVATE}/digits", images={"val": 40}, fingerprints={"val": "f" * 64})
    facts, settings = {"read": f"{PRIVATE}/a.png"}, settings_of(catalogue().protocols["knn@dino"].task)
    fields = {"data": data, "seed": seed, "facts": facts, "settings": settings, "interval_method": interval_method}
    return metrics, fields | others, arrays_of(outcome)


@pytest.fixture(scope="module")
def folder(exports, tmp_path_factory) -> Path:
    """OUT with an export, another checkpoint, raw pixels, variants, and a failure with its log."""
    out = tmp_path_factory.mktemp("out")
    export = ViTExport.load(exports[0])
    first = describe(export, "first", "random.pth")
    export.save(out / "exports" / f"first-{export.digest[:8]}")
    second = made_checkpoint("second", 2, source=f"dino:{PRIVATE}/second.pth")
    training = tmp_path_factory.mktemp("runs") / "mae"
    other = ViTExport.load(exports[1])
    other = replace(other, facts=dict(other.facts) | {"method": "mae", "recipe": "32px", "source_file": ""})
    trained = other.save(training / "export")
    identity = {"data": f"images:{PRIVATE}/photos", "method": "mae", "recipe": "32px"}
    (training / "run.json").write_text(json.dumps(identity))
    log = [{"step": step, "updates": 1, "loss": 1.0} for step in range(1, 1051)]
    log[500:500] = [{"step": 500, "knn_top1": 40.0}]
    (training / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    third = describe(other, "third", str(trained))
    raw_pixels = made_checkpoint("pixels-32", 3, method="pixels", source="pixels:32")
    for number, checkpoint in enumerate((first, second, raw_pixels, third)):
        for seed in (0, 1):
            metrics, fields, arrays = measured_on_images(number, seed)
            save_result(out, made_result(checkpoint, metrics, **fields), arrays)
    changed = ProtocolUsed(name="knn@dino", version=1, modified=True, changes={"k": [5, 10]})
    metrics, fields, arrays = measured_on_images(1, 0, 8, protocol=changed, **LIMITED)
    fields["settings"] = fields["settings"] | changed.changes
    save_result(out, made_result(second, metrics, **fields), arrays)
    message = f"{PRIVATE}/x.png: unreadable"
    failed = made_result(second, {}, status="failed", message=message, protocol=ProtocolUsed(name="b@c", version=1))
    save_result(out, failed, log=f'Traceback\n  File "{PRIVATE}/code.py", line 3\nValueError: {message}\n')
    return out


@pytest.fixture(scope="module")
def written(folder, tmp_path_factory) -> Path:
    to = tmp_path_factory.mktemp("published") / "record"
    assert main(["record", str(folder), "--to", str(to)]) == 0
    return to


@pytest.fixture
def copy(written, tmp_path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "copy"))


def test_a_record_agrees_with_its_results_and_is_reproducible(bench, folder, written, tmp_path):
    code, output, err = bench("record", "--check", written)
    assert (code, output, err) == (0, f"{written}: sums, numbers and leaderboard.csv agree with its arrays\n", "")
    before = contents(written)
    assert bench("record", folder, "--to", tmp_path / "again")[0] == 0
    assert contents(tmp_path / "again") == before == contents(written), "a check leaves nothing behind"
    assert subprocess.run(["sha256sum", "-c", "--quiet", SUMS], cwd=written).returncode == 0


def test_a_record_is_taken_up_elsewhere_and_recorded_again(written, copy, tmp_path):
    out, again = tmp_path / "out", tmp_path / "again"
    take_up_record(written, out)
    write_record(out, again)
    assert contents(again) == contents(written)
    kept = next((out / "results").rglob("*.json"))
    kept.write_text("mine")
    take_up_record(written, out)
    assert kept.read_text() == "mine"
    (copy / "leaderboard.md").write_text("better numbers")
    with pytest.raises(ValueError, match=r"leaderboard\.md"):
        take_up_record(copy, tmp_path / "other")


def test_contents_of_a_record(folder, written):
    names = set(contents(written))
    digest, trained = next((folder / "exports").iterdir()).name, next(written.glob("checkpoints/third-*"))
    expected = {"README.md", "leaderboard.csv", "leaderboard.md", "leaderboard.tex"}
    expected |= {f"checkpoints/{digest}/config.json", "results/second-00000000/digits/b@c-seed0.log"}
    assert expected <= names
    assert {name for name in names if name.endswith(".npz")} == {
        str(path.relative_to(folder)) for path in folder.rglob("*.npz")
    }
    assert sorted(path.name for path in trained.iterdir()) == ["config.json", "log.jsonl", "run.json"]
    log = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log if "updates" in line] == list(range(24, 1051, 27))
    assert 1050 / 27 <= LOG_LINES < 1050 / 26
    assert {"step": 500, "knn_top1": 40.0} in log
    assert thinned_log('{"step": 1234567, "loss": 0.4118876755237579, "lr": 1.2345678e-05, "knn_top1": 39.75}\n') == (
        '{"step": 1234567, "loss": 0.4119, "lr": 1.235e-05, "knn_top1": 39.75}\n'
    )


def test_a_record_has_no_confidences_unless_a_metric_is_made_of_them(tmp_path):
    correct, confidence = np.array([1, 0, 1, 1], np.float32), np.array([0.5, 0.25, 1, 0.75], np.float16)
    checkpoint, others = made_checkpoint("first", 1), {"predicted": np.arange(4), "confidence": confidence}
    metrics = {"top1": MetricRecord(value=75.0, unit="%", array="top1")}
    usual = made_result(checkpoint, metrics, arrays=tuple(others))
    own_metric = {"confidence": MetricRecord(value=0.625, array="confidence")}
    unusual = made_result(checkpoint, own_metric, protocol=ProtocolUsed(name="sure@mine", version=1))
    written_arrays = ((usual, {"top1": correct, **others}), (unusual, {"confidence": confidence}))
    stored = [save_result(tmp_path, result, arrays) for result, arrays in written_arrays]
    write_record(tmp_path, tmp_path / "record")
    usual_copy, unusual_copy = (tmp_path / "record" / entry.path.relative_to(tmp_path) for entry in stored)
    assert read_result(usual_copy).arrays == ("predicted",)
    arrays = read_arrays(usual_copy)
    assert set(arrays) == {"predicted", "top1"} and arrays["top1"].tolist() == correct.tolist()
    assert read_arrays(unusual_copy)["confidence"].tolist() == confidence.tolist()
    of_equal_mean = ({"top1": correct[::-1], **others}, {"confidence": confidence[::-1]})
    for entry, (result, own), other in zip(stored, written_arrays, of_equal_mean, strict=True):
        before = entry.path.read_bytes()
        save_result(tmp_path, result, other)
        entry.path.write_bytes(before)
        with pytest.raises(ValueError, match="arrays of another result"):
            write_record(tmp_path, tmp_path / "record")
        save_result(tmp_path, result, own)


def test_json_of_a_record_keeps_every_value_and_has_a_line_for_each_inner_list():
    value = {"lrs": [0.1, 2], "rows": [{"a": "{", "b": ["]["]}, {}], "text": "[\n 1,\n 2\n]", "none": []}
    lines = [
        "{",
        ' "lrs": [0.1, 2],',
        ' "rows": [',
        "  {",
        '   "a": "{",',
        '   "b": [',
        '    "]["',
        "   ]",
        "  },",
        "  {}",
    ]
    lines += [" ],", ' "text": "[\\n 1,\\n 2\\n]",', ' "none": []', "}", ""]
    assert json_of(value).decode().split("\n") == lines and json.loads(json_of(value)) == value


def test_nothing_private_is_in_a_record(folder, written):
    assert any(PRIVATE.encode() in content for name, content in contents(folder).items() if name.endswith(".json"))
    for name, content in contents(written).items():
        for word in (PRIVATE, "alice", str(folder), "/pytest-"):
            assert word.encode() not in content, f"{name} holds {word}"
    result = read_result(next(written.glob("results/second-*/digits/knn@dino-seed0.json")))
    assert result.data.url.startswith("folder:path-") and result.data.url.endswith("/digits")


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def rebuild(folder: Path) -> None:
    """As a forger would: derive everything from the changed results again, the checksums too."""
    for name, text in derived_files(folder).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    write_sums(folder)


def write_sums(folder: Path) -> None:
    names = sorted(set(contents(folder)) - {SUMS})
    sums = subprocess.run(["sha256sum", *names], cwd=folder, capture_output=True, text=True, check=True)
    (folder / SUMS).write_text(sums.stdout)


def test_an_edited_table_is_detected(bench, copy):
    number = re.search(r"\d+\.\d\d", (copy / "leaderboard.csv").read_text())[0]
    edit(copy / "leaderboard.csv", number, "99.99")
    edit(copy / "leaderboard.md", "# Leaderboard", "# Our leaderboard")
    code, out, _ = bench("record", "--check", copy)
    assert code == 1 and out.splitlines() == [
        "leaderboard.csv: changed later (SHA256SUMS has another digest)",
        "leaderboard.md: changed later (SHA256SUMS has another digest)",
        "leaderboard.csv: not what the results give",
        f"{copy}: 3 differences",
    ]


def test_an_edited_number_is_detected_even_if_everything_is_rebuilt_from_it(copy):
    path = next(copy.glob("results/second-*/digits/knn@dino-seed0.json"))
    value = json.loads(path.read_text())["metrics"]["top1"]["value"]
    edit(path, f'"value": {value}', f'"value": {value + 10}')
    name = str(path.relative_to(copy))
    lines = list(check_record(copy))
    assert lines[0] == f"{name}: changed later (SHA256SUMS has another digest)"
    assert "leaderboard.csv: not what the results give" in lines
    rebuild(copy)
    assert list(check_record(copy)) == [f"{name}: top1 is not the mean of its values for 40 images"]


def test_lost_and_added_files_are_detected(copy):
    next(copy.glob("results/first-*/digits/knn@dino-seed0.npz")).unlink()
    (copy / "references.bib").unlink()
    (copy / "more.md").write_text("more")
    lines = list(check_record(copy))
    assert "more.md: added later (SHA256SUMS does not list it)" in lines and "references.bib: missing" in lines
    assert [line for line in lines if "knn@dino-seed0.json: its parts do not fit together" in line]


def test_an_unreadable_result_is_detected(copy):
    path = next(copy.glob("results/second-*/digits/knn@dino-seed0.json"))
    path.write_text("{")
    name = str(path.relative_to(copy))
    assert [line.split(": ")[:2] for line in check_record(copy)] == [
        [name, "changed later (SHA256SUMS has another digest)"],
        [name, "not a result file"],
    ]


def test_wrong_requests_are_refused_in_one_line(refused, folder, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    out = Path(shutil.copytree(folder, tmp_path / "out"))
    next(out.glob("results/*/*/*.json")).write_text("{")
    cases = [
        ((folder, "--to", tmp_path / "mine"), "not a record | --to"),
        (("--check", tmp_path / "mine"), "not a record | record.json"),
        (("--to", tmp_path / "new"), "--to: give OUT --to DIR"),
        ((folder, "--check", folder), "--check DIR alone"),
        ((out, "--to", tmp_path / "new"), "repair or delete it"),
        ((tmp_path, "--to", tmp_path / "new"), "holds no results"),
    ]
    for words, why in cases:
        refused("record", *words, named=why)
    assert not (tmp_path / "new").exists() and (tmp_path / "mine" / "file").read_text() == "mine"


@pytest.mark.parametrize("name", ["results/*/*/*.json", "results/*/*/*.npz", "checkpoints/*/config.json", SUMS])
def test_a_pipe_in_a_record_is_named_without_waiting(bench, copy, name):
    path = next(copy.glob(name))
    path.unlink()
    os.mkfifo(path)
    code, output, _ = bench("record", "--check", copy)
    assert code == 1 and f"{path.relative_to(copy)}: a pipe" in output


IMAGES = 12
Arrays = dict[str, np.ndarray]
Edit = Callable[[Result, Arrays], Result | None]


def classification() -> Outcome:
    """Correctness of each image, and a loss in nats."""
    random = np.random.default_rng(0)
    correct, losses = random.random(IMAGES) < 0.6, random.random(IMAGES)
    return Outcome(
        metrics={
            "top1": Metric(value=100 * float(correct.mean()), per_image=correct.astype(np.float32)),
            "loss": Metric(value=float(losses.mean()), unit="nat", higher_is_better=False, per_image=losses),
        }
    )


def segmentation() -> Outcome:
    """The mean of two trainings, and areas of four classes in each image."""
    random = np.random.default_rng(1)
    labelled = random.integers(50, 100, (IMAGES, 4))
    areas = []
    for _ in range(2):
        correct = (labelled * random.random((IMAGES, 4))).astype(int)
        areas.append(np.stack([correct, correct + random.integers(0, 40, (IMAGES, 4)), labelled], -1).astype(np.int32))
    whole = weighted_scores(areas, np.ones((1, IMAGES)))
    drawn = resampled(lambda weights: weighted_scores(areas, weights), IMAGES)
    metrics = {name: Metric(value=float(values[0]), resampled=drawn[name]) for name, values in whole.items()}
    return Outcome(metrics=metrics, arrays={f"areas_{number}": values for number, values in enumerate(areas)})


def lines_after(outcome: Outcome, edit: Edit, folder: Path, plugin: str = "") -> list[str]:
    """The differences that are found in a result after an edit of it or of its arrays."""
    records, method = metric_records(outcome, IMAGES)
    arrays = arrays_of(outcome)
    result = made_result(
        made_checkpoint(),
        records,
        protocol=ProtocolUsed(name="knn@dino", version=1, plugin=plugin),
        data=DataUsed(name="scenes", url="tiny-voc:", images={"val": IMAGES}),
        arrays=tuple(outcome.arrays),
        interval_method=method,
    )
    stored = save_result(folder, edit(result, arrays) or result, arrays)
    lines = list(number_differences(folder, [stored]))
    assert all(line.startswith("results/") for line in lines)
    return lines


def changed(name: str, **fields: object) -> Edit:
    """An edit of a metric's fields."""
    return lambda result, arrays: replace(
        result, metrics={**result.metrics, name: replace(result.metrics[name], **fields)}
    )


def array_edit(change: Callable[[Arrays], object]) -> Edit:
    def edit(result: Result, arrays: Arrays) -> None:
        change(arrays)

    return edit


@pytest.mark.parametrize("outcome", [classification(), segmentation()], ids=["classification", "segmentation"])
def test_results_as_they_are_written_agree(outcome, tmp_path):
    assert lines_after(outcome, lambda result, arrays: None, tmp_path) == []


@pytest.mark.parametrize(
    ("outcome", "edit", "named"),
    [
        (classification(), changed("top1", value=99.0), "top1 is not the mean"),
        (classification(), changed("loss", value=0.01), "loss is not the mean"),
        (classification(), changed("top1", interval=(98.0, 99.0)), "top1 has another interval"),
        (classification(), changed("loss", interval=None), "loss has another interval"),
        (classification(), changed("top1", array=None), "top1 has another interval"),
        (classification(), array_edit(lambda arrays: arrays.pop("loss")), "'loss'"),
        (
            classification(),
            array_edit(lambda arrays: arrays.update(top1=np.tile(arrays["top1"], 2))),
            "top1 is not the mean",
        ),
        (classification(), array_edit(lambda arrays: arrays.update(top1=np.array("x"))), "top1 is not the mean"),
        (segmentation(), changed("mIoU", value=80.0), "mIoU is not what the areas"),
        (segmentation(), changed("mIoU", interval=(1.0, 2.0)), "mIoU has another interval"),
        (segmentation(), array_edit(lambda arrays: arrays["mIoU_resampled"].__iadd__(5)), "mIoU is not what"),
        (segmentation(), array_edit(lambda arrays: arrays.update(areas_0=arrays["areas_0"][:3])), "do not fit"),
        (segmentation(), array_edit(lambda arrays: arrays.update(areas_0=np.array("x"))), "do not fit together"),
    ],
)
def test_an_edit_is_found(outcome, edit, named, tmp_path):
    lines = lines_after(outcome, edit, tmp_path)
    assert any(named in line for line in lines), lines


def test_arrays_of_other_packages_are_compared_by_mean_and_interval_alone(tmp_path):
    assert lines_after(segmentation(), changed("mIoU", value=80.0), tmp_path, plugin="toys 1.0") == []


def test_the_text_beside_a_record_may_be_a_title_alone(tmp_path):
    (tmp_path / "mine.md").write_text("# Ours\n")
    assert about(tmp_path / "mine") == ("Ours", "")
