"""`bench results` lists the results of a folder, and moves results away with all their files."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_results import RESULT

from bench.reports.leaderboard import write_leaderboard
from bench.results.record import ProtocolUsed, Result, failure_path, result_path, result_stem, write_result
from engine.tasks import Workspace

FAILED = replace(RESULT, status="failed", message="RuntimeError: no memory", metrics={})


def save(out: Path, name: str, protocol: str, result: Result, digest: str = "ab" * 32) -> Path:
    """Write a result of a checkpoint and protocol as a run does, a failure with its log."""
    checkpoint = replace(result.checkpoint, name=name, digest=digest)
    used = ProtocolUsed(name=protocol, version=1)
    stem = result_stem(used, {}, Workspace(cache=out, data="", seed=result.seed))
    path = result_path(out, checkpoint, "digits", stem)
    arrays = {"correct": np.arange(2)} if result.status == "ok" else {}
    log = "" if result.status == "ok" else "Traceback"
    task = protocol.partition("@")[0]
    write_result(path, replace(result, checkpoint=checkpoint, protocol=used, task=task), arrays, log)
    return path


@pytest.fixture
def out(tmp_path) -> Path:
    """`a`: a k-NN result whose rerun failed, and a failed probe; `b`: a k-NN result, and an unreadable file."""
    good = save(tmp_path, "a", "knn@dino", RESULT)
    write_result(failure_path(good), FAILED, {}, "Traceback")
    save(tmp_path, "a", "linear@dino", FAILED)
    save(tmp_path, "b", "knn@dino", RESULT, "cd" * 32)
    (tmp_path / "results" / "b-cdcdcdcd" / "digits" / "knn@moca-seed0.json").write_text("{")
    write_leaderboard(tmp_path)
    return tmp_path


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def test_every_result_is_listed(bench, out):
    code, output, _ = bench("results", "ls", "--out", out)
    assert code == 0
    assert [line.split()[:3] for line in output.splitlines()[:-1]] == [
        ["failed", "a-abababab", "digits/knn@dino"],
        ["ok", "a-abababab", "digits/knn@dino"],
        ["failed", "a-abababab", "digits/linear@dino"],
        ["ok", "b-cdcdcdcd", "digits/knn@dino"],
        ["unreadable", "b-cdcdcdcd", "digits/knn@moca-seed0"],
    ]
    assert "top1_k20 97.50" in output and "RuntimeError: no memory" in output and "not a result file" in output
    assert output.splitlines()[-1] == "2 ok, 2 failed, 1 unreadable"


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (("--checkpoint", "a"), 3),
        (("--checkpoint", "b (cdcdcdcd)"), 2),
        (("--checkpoint", "b-cdcdcdcd", "--status", "ok"), 1),
        (("--protocol", "knn"), 3),
        (("--status", "unreadable"), 1),
        (("--data", "digits", "--protocol", "linear@dino"), 1),
        (("--checkpoint", "b", "--status", "failed"), 0),
    ],
)
def test_options_select_results(words, count, bench, out):
    assert len(bench("results", "ls", "--out", out, *words)[1].splitlines()) == count + 1


def test_removed_results_take_their_files_along_and_can_be_restored(bench, out):
    before = files(out / "results")
    code, output, _ = bench("results", "rm", "--out", out, "--checkpoint", "a", "--protocol", "knn@dino")
    assert code == 0 and "to undo: cp -rn " in output
    (removed,) = (out / "removed").iterdir()
    assert files(removed / "a-abababab") == {
        *("knn@dino-seed3.json", "knn@dino-seed3.npz", "knn@dino-seed3.failed.json", "knn@dino-seed3.failed.log"),
    }
    assert files(out / "results" / "a-abababab") == {"linear@dino-seed3.json", "linear@dino-seed3.log"}
    assert "| a |  |" in (out / "leaderboard.md").read_text()  # its failed probe remains
    bench("results", "rm", "--out", out, "--checkpoint", "a")
    assert not files(out / "results" / "a-abababab") and "| a |  |" not in (out / "leaderboard.md").read_text()
    for removed in (out / "removed").iterdir():
        shutil.copytree(removed, out / "results", dirs_exist_ok=True)
    assert files(out / "results") == before


def test_a_failed_rerun_is_removed_without_the_good_result(bench, out):
    bench("results", "rm", "--out", out, "--status", "failed")
    assert files(out / "results") == {"knn@dino-seed3.json", "knn@dino-seed3.npz", "knn@moca-seed0.json"}


def test_a_dry_run_removes_nothing(bench, out):
    before = files(out)
    code, output, _ = bench("results", "rm", "--out", out, "--status", "failed", "--dry-run")
    assert code == 0 and "0 ok, 2 failed" in output and output.endswith("nothing was removed (--dry-run)\n")
    assert files(out) == before


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["rm"], "--checkpoint | --data, --protocol or --status"),
        (["rm", "--checkpoint", "c"], "--checkpoint c: "),
        (["ls", "--protocol", "knn@din"], "did you mean 'knn@dino'?"),
        (["rm", "--checkpoint", "a"], "--checkpoint a: | a-abababab or a-efefefef"),
    ],
)
def test_wrong_requests_are_refused_in_one_line_and_remove_nothing(words, named, refused, out):
    save(out, "a", "knn@dino", RESULT, "ef" * 32)
    before = files(out)
    refused("results", *words, "--out", out, named=named)
    assert files(out) == before
