"""`bench record`: a folder of everything that a leaderboard is based on, nothing private, and checks that it agrees."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from made_results import any_board, harmless, made_checkpoint, made_result, save_result

from bench import record
from bench.__main__ import main
from bench.checkpoints import describe
from bench.cli import parsed
from bench.record import (
    SIGNATURE,
    SUMS,
    check_record,
    derived_files,
    rerun_script,
    stored_results,
)
from bench.reports.card import CardSubject, without_folders
from bench.results.record import DataUsed, ProtocolUsed, read_result
from bench.run.runner import arrays_of, metric_records
from bench.run.suites import catalogue
from checkpoints.export import ViTExport
from engine.printing import printable
from engine.tasks import Metric, Outcome, settings_of

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
    (training / "log.jsonl").write_text('{"loss": 1.0}\n')
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
    assert main(["record", str(folder), "--to", str(to), "--hub-dataset", "digits=me/digits"]) == 0
    return to


@pytest.fixture
def copy(written, tmp_path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "copy"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_record_agrees_with_its_results_and_is_reproducible(bench, folder, written, tmp_path):
    code, output, err = bench("record", "--check", written)
    assert (code, output.splitlines()[-1], err) == (0, "board and records agree", "") and "byte by byte" in output
    assert bench("record", folder, "--check", written)[0] == 0
    before = contents(written)
    assert bench("record", folder, "--to", tmp_path / "again", "--hub-dataset", "digits=me/digits")[0] == 0
    assert contents(tmp_path / "again") == before == contents(written), "a check leaves nothing behind"
    assert subprocess.run(["sha256sum", "-c", "--quiet", SUMS], cwd=written).returncode == 0


def test_contents_of_a_record(folder, written):
    names = set(contents(written))
    digest, trained = next((folder / "exports").iterdir()).name, next(written.glob("checkpoints/third-*"))
    expected = {"README.md", "commands.sh", "leaderboard.csv", "leaderboard.md", "leaderboard.tex", "leaderboard.html"}
    expected |= {f"cards/{digest}/README.md", f"cards/{digest}/.eval_results/me_digits.yaml"}
    expected |= {f"checkpoints/{digest}/config.json", "results/second-00000000/digits/b@c-seed0.log"}
    assert expected <= names
    assert {name for name in names if name.endswith(".npz")} == {
        str(path.relative_to(folder)) for path in folder.rglob("*.npz")
    }
    assert not [name for name in names if "pixels" in name and name.startswith("cards")]
    assert sorted(path.name for path in trained.iterdir()) == ["config.json", "log.jsonl", "run.json"]
    card = (written / "cards" / digest / "README.md").read_text()
    assert "| file | random.pth |" in card and "| image, patch | 32 px, patches of 16 px |" in card


def test_nothing_private_is_in_a_record(folder, written):
    assert any(PRIVATE.encode() in content for name, content in contents(folder).items() if name.endswith(".json"))
    for name, content in contents(written).items():
        for word in (PRIVATE, "alice", str(folder), "/pytest-"):
            assert word.encode() not in content, f"{name} holds {word}"
    result = read_result(next(written.glob("results/second-*/digits/knn@dino-seed0.json")))
    assert result.data.url.startswith("folder:path-") and result.data.url.endswith("/digits")


def bench_calls(script: str, **places: str) -> tuple[list[list[str]], str]:
    """The arguments of each `bench` call of a script, and its standard error."""
    stub = "bench() { printf '%s\\0' \"$@\"; printf '\\1'; }\n"
    done = subprocess.run(["bash"], input=stub + script, env=places, capture_output=True, text=True)
    return [call.split("\0")[:-1] for call in done.stdout.split("\1")[:-1]], done.stderr


def test_commands_of_a_record_repeat_its_runs(written):
    script = (written / "commands.sh").read_text()
    assert bench_calls(script) == ([], "commands.sh: say at its top where CHECKPOINT_1 is\n")
    variables = re.findall(r"^(CHECKPOINT_\d)=\$\{\1:-''\}$", script, re.MULTILINE)
    places = {name: f"dino:/it's {name} $HOME.pth" for name in variables}
    assert len(variables) == 3
    calls, errors = bench_calls(script, **places, IMAGES_1='folder:/my "digits"')
    parsed_calls = [parsed(words)[1] for words in calls]
    assert errors == "" and {arguments.checkpoint[0] for arguments in parsed_calls} == {*places.values(), "pixels:32"}
    assert {arguments.data[0] for arguments in parsed_calls} == {'digits=folder:/my "digits"', "digits=digits:"}
    assert f"# checkpoint second: digest {2:064x} (measured from dino:path-" in script
    assert [words[0] for words in calls] == ["run"] * 10
    assert {arguments.suite for arguments in parsed_calls} == {"knn@dino", "b@c"}
    assert ", trained by mae, recipe 32px (measured from " in script
    changed = next(arguments for arguments in parsed_calls if arguments.set)
    assert changed.set == ("knn@dino.k=5,10",) and changed.skip_bad
    assert (changed.limit, changed.decode, changed.precision) == (8, "fast", "bfloat16")


def test_names_in_results_are_quoted_in_the_commands():
    for seed in range(8):
        results = [stored.result for stored in any_board(Random(seed)).results]
        subjects = {result.checkpoint.key: CardSubject(used=result.checkpoint) for result in results}
        script = harmless(rerun_script(results, subjects))
        places = {word: "x" for word in re.findall(r"^(?:CHECKPOINT|IMAGES)_\d+", script, re.MULTILINE)}
        calls, errors = bench_calls(script, **places)
        assert errors == "" and len({tuple(words) for words in calls}) == len(calls)
        assert {words[4] for words in calls} == {
            printable(without_folders(result.checkpoint.name)) for result in results
        }


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def rebuild(folder: Path) -> None:
    """As a forger would: derive everything from the changed results again, the checksums too."""
    for name, text in derived_files(folder, stored_results(folder)).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    write_sums(folder)


def write_sums(folder: Path) -> None:
    names = sorted(set(contents(folder)) - {SUMS, SIGNATURE})
    sums = subprocess.run(["sha256sum", *names], cwd=folder, capture_output=True, text=True, check=True)
    (folder / SUMS).write_text(sums.stdout)


def test_an_edited_table_is_detected(bench, copy):
    edit(copy / "leaderboard.md", "# Leaderboard", "# Our leaderboard")
    code, out, _ = bench("record", "--check", copy)
    assert code == 1 and out.splitlines() == [
        "leaderboard.md: changed later (SHA256SUMS has another digest)",
        "leaderboard.md: not what the results give, first in line 1",
        "compared: results by their values; tables, cards and texts byte by byte",
        "2 differences",
    ]


def test_an_edited_number_is_detected_even_if_everything_is_rebuilt_from_it(copy):
    path = next(copy.glob("results/second-*/digits/knn@dino-seed0.json"))
    value = json.loads(path.read_text())["metrics"]["top1"]["value"]
    edit(path, f'"value": {value}', f'"value": {value + 10}')
    name = str(path.relative_to(copy))
    lines = list(check_record(copy))
    assert lines[0] == f"{name}: changed later (SHA256SUMS has another digest)"
    assert "leaderboard.csv: not what the results give, first in line 4" in lines
    rebuild(copy)
    assert list(check_record(copy)) == [f"{name}: top1 is not the mean of its values for the images"]


@pytest.mark.parametrize("version", ["9.9", "0.1.0"])
def test_a_record_of_another_version_is_compared_by_numbers_not_wording(bench, copy, monkeypatch, version):
    """Equal version numbers without a commit do not count as the same version."""
    monkeypatch.setattr(record, "tool_version", lambda: version)
    description = json.loads((copy / record.ABOUT).read_text())
    (copy / record.ABOUT).write_text(json.dumps(description | {"version": "0.1.0"}))
    edit(copy / "leaderboard.md", "# Leaderboard", "# Our leaderboard")
    card = next(copy.glob("cards/second-*/README.md"))
    edit(card, "It turns an image into features", "Of an image it makes features")
    write_sums(copy)
    code, out, _ = bench("record", "--check", copy)
    assert code == 0 and "not their wording" in out and f"this is {version}" in out
    number = re.search(r"\d+\.\d\d", (copy / "leaderboard.md").read_text().partition("digits/")[2])[0]
    edit(copy / "leaderboard.md", number, "99.99")
    edit(card, "value: ", "value: 1")
    lines = [line for line in check_record(copy) if "changed later" not in line]
    assert lines == [
        f"{name}: its numbers are not those of the results" for name in ("leaderboard.md", str(card.relative_to(copy)))
    ]


def test_lost_and_added_files_are_detected(copy):
    next(copy.glob("results/first-*/digits/knn@dino-seed0.npz")).unlink()
    (copy / "commands.sh").unlink()
    (copy / "cards" / "more.md").write_text("more")
    lines = list(check_record(copy))
    assert "cards/more.md: follows from no result" in lines and "commands.sh: missing" in lines
    assert [line for line in lines if line.endswith("knn@dino-seed0.json: top1 lacks its array top1")]


@pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="ssh-keygen is not installed")
def test_a_signature_is_checked_against_the_sums(bench, refused, folder, tmp_path):
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    assert bench("record", folder, "--to", tmp_path / "signed", "--sign", key)[0] == 0
    print_of_key = subprocess.run(["ssh-keygen", "-lf", key], capture_output=True, text=True, check=True).stdout
    code, output, _ = bench("record", "--check", tmp_path / "signed")
    assert code == 0 and output.strip().endswith(print_of_key.split()[1])
    (tmp_path / "signed" / "README.md").write_text("mine")
    rebuild(tmp_path / "signed")
    (tmp_path / "signed" / SUMS).write_text((tmp_path / "signed" / SUMS).read_text() + "\n")
    code, output, _ = bench("record", "--check", tmp_path / "signed")
    assert code == 1 and "SHA256SUMS.sig: not of SHA256SUMS" in output
    none = tmp_path / "none"
    refused("record", folder, "--to", tmp_path / "new", "--sign", none, named=f"--sign {none}")
    assert not (tmp_path / "new").exists()


def test_an_unreadable_result_is_detected(copy):
    path = next(copy.glob("results/second-*/digits/knn@dino-seed0.json"))
    path.write_text("{")
    name = str(path.relative_to(copy))
    assert [line.split(": ")[:2] for line in check_record(copy)] == [
        [name, "changed later (SHA256SUMS has another digest)"],
        [name, "not a result file"],
    ]


def test_a_record_is_compared_with_later_results(bench, folder, written, tmp_path):
    out = Path(shutil.copytree(folder, tmp_path / "out"))
    path = next(out.glob("results/second-*/digits/knn@dino-seed1.json"))
    edit(path, '"seconds": 0.0', '"seconds": 1.0')
    next(out.glob("results/second-*/digits/knn@dino-seed0.json")).unlink()
    metrics, fields, arrays = measured_on_images(1, 7)
    new = save_result(out, made_result(made_checkpoint("new", 9), metrics, **fields), arrays).path.relative_to(out)
    code, output, _ = bench("record", out, "--check", written)
    assert code == 1 and output.splitlines()[-1] == "5 differences"
    assert f"{path.relative_to(out)}: differs from that in {out}" in output
    assert f"{new}: not in the record, but in {out}" in output
    assert f"knn@dino-seed0.json: no longer in {out}" in output


def test_wrong_requests_are_refused_in_one_line(refused, folder, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    out = Path(shutil.copytree(folder, tmp_path / "out"))
    next(out.glob("results/*/*/*.json")).write_text("{")
    cases = [
        ((folder, "--to", tmp_path / "mine"), "not a record | --to"),
        (("--check", tmp_path / "mine"), "not a record | record.json"),
        (("--to", tmp_path / "new"), "which results?"),
        ((out, "--to", tmp_path / "new"), "--status unreadable moves unreadable files away"),
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
