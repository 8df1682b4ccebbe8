"""`bench run` in processes of its own: killed, two runs on one folder, and one run of two ranks."""

import os
import signal
import time
from pathlib import Path

import pytest
from elsewhere import Program, program, ranks
from written import rows_of

from bench.results.record import read_result

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture
def start(toy_packages, exports, tmp_path):
    """Start `bench run` on the first export in a process of its own."""
    started = []
    environment = {"PYTHONPATH": os.pathsep.join([str(toy_packages), str(ROOT)])}

    def call(*words: str, count: int = 1) -> list[Program]:
        command = ("-m", "bench", "run", "--checkpoint", exports[0], "--out", tmp_path / "out", "--data", "tiny=tiny:")
        command = (*command, *words)
        options = dict(environment=environment, merged=True)
        started.extend(ranks(count, *command, **options) if count > 1 else [program(*command, **options)])
        return started[-count:]

    yield call
    for process in started:
        process.kill()
        process.communicate()


def wait_for(path: Path, process: Program) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None and time.monotonic() < end, process.communicate()[0]
        time.sleep(0.05)


def results(out: Path) -> dict:
    return {path.name: read_result(path) for path in (out / "results").rglob("*.json")}


def test_a_killed_run_keeps_finished_results_and_continues(start, bench, toys, exports, tmp_path):
    out = tmp_path / "out"
    words = ["--suite", "toy@one,dear@one", "--set", "dear.mode=wait"]
    (process,) = start(*words)
    wait_for(out / "cache" / "waiting", process)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    assert [result.protocol.name for result in results(out).values()] == ["toy@one"]
    code, output, _ = bench("run", "--checkpoint", exports[0], "--out", out, "--data", "tiny=tiny:", *words)
    assert code == 0 and "1 done, 1 skipped" in output
    assert {result.status for result in results(out).values()} == {"ok"}


def test_two_runs_at_once_share_a_folder(start, tmp_path):
    processes = [*start("--suite", "toy,dear", "--name", "a"), *start("--suite", "toy,dear", "--name", "b")]
    for process in processes:
        output = process.communicate(timeout=60)[0]
        assert process.returncode == 0, output
    assert len({(result.checkpoint.name, name) for name, result in results(tmp_path / "out").items()}) == 4
    rows = rows_of(tmp_path / "out")
    assert [row["name"] for row in rows] == ["a", "b"]
    assert all(row["tiny/toy@one:top1_k1"] and row["tiny/dear@one:top1_k1"] for row in rows)


def two_ranks(start, *words: str) -> tuple[list[int], list[str]]:
    """Exit codes and outputs of both processes of a run."""
    processes = start(*words, count=2)
    outputs = [process.communicate(timeout=90)[0] for process in processes]
    return [process.returncode for process in processes], outputs


def test_a_failure_of_one_rank_fails_the_job_and_the_first_rank_writes(start, tmp_path):
    cache = tmp_path / "out" / "cache"
    cache.mkdir(parents=True)
    (cache / "fail toy in process 1").touch()
    codes, outputs = two_ranks(start, "--suite", "toy@one,dear@one")
    assert codes == [1, 1], outputs
    by_name = results(tmp_path / "out")
    assert by_name["toy@one-seed0.json"].message == "RuntimeError: in another process: RuntimeError: one process alone"
    assert by_name["dear@one-seed0.json"].status == "ok"
    assert by_name["dear@one-seed0.json"].processes == 2
    assert "1 done, 0 skipped, 1 failed" in outputs[0] and "done" not in outputs[1]
    assert len((cache / "runs.txt").read_text().splitlines()) == 4


@pytest.mark.exhaustive  # by default the same of a pretraining
def test_a_wrong_request_is_refused_in_one_line_by_one_rank(start, tmp_path):
    (tmp_path / "out").write_text("a file where the folder should be")
    codes, outputs = two_ranks(start, "--suite", "toy@one")
    assert codes == [2, 2], outputs
    lines = [line for text in outputs for line in text.splitlines() if "warning" not in line]
    assert len(lines) == 1 and lines[0].startswith("bench: error: --")


@pytest.mark.exhaustive
def test_notes_on_a_checkpoint_are_printed_by_the_first_rank_alone(start):
    codes, outputs = two_ranks(start, "--checkpoint", "pixels:8", "--suite", "toy@one")
    assert codes == [0, 0] and "no class token" in outputs[0] and "no class token" not in outputs[1], outputs
