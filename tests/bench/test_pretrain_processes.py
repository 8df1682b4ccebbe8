"""`bench pretrain` in processes of its own: stopped by signals and resumed, and distributed over two processes."""

import os
import signal
import time
from pathlib import Path

import pytest
from elsewhere import Program, program, ranks
from written import lines_of

from bench.__main__ import main
from checkpoints.export import ViTExport
from pretrain.loop.exporting import exports_in

pytestmark = pytest.mark.slow

SMALL = "batch=16 depth=1 width=16 heads=2 mlp_hidden=32 decoder_width=16"
EPOCHS = 20  # for each signal: enough that the training still runs when it arrives
STOPPED = 75  # exit code of a training that a signal stopped


def words_of(out: Path) -> list[str]:
    return f"pretrain mae --recipe smoke --images tiny: --out {out} --set {SMALL}".split()


@pytest.fixture
def start(tmp_path):
    """Start `bench pretrain`, each process in its own session, so that it and its workers can be signalled together."""
    started = []

    def call(*words: str, out: str = "run", count: int = 1) -> list[Program]:
        command = ("-m", "bench", *words_of(tmp_path / out), *words)
        started.extend(ranks(count, *command) if count > 1 else [program(*command)])
        return started[-count:]

    yield call
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for(path: Path, process: Program) -> None:
    """Wait until the file is not empty."""
    end = time.monotonic() + 120
    while not (path.exists() and path.stat().st_size):
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.02)


@pytest.mark.parametrize(
    "signals",
    [
        (signal.SIGTERM,),
        pytest.param((signal.SIGUSR1, signal.SIGTERM, signal.SIGINT), marks=pytest.mark.exhaustive),
    ],
)
def test_a_training_stopped_by_signals_and_resumed_equals_an_uninterrupted_one(signals, start, tmp_path):
    """In turn, each sent to the training and its loader processes."""
    epochs = EPOCHS * len(signals)
    for number, signal_number in enumerate(signals, start=1):
        (process,) = start("--resume", "--workers", "1", "--set", f"epochs={epochs}")
        wait_for(tmp_path / "run/log.jsonl", process)
        lines = len((tmp_path / "run/log.jsonl").read_text().splitlines())
        while len((tmp_path / "run/log.jsonl").read_text().splitlines()) == lines and process.poll() is None:
            time.sleep(0.02)
        if number > 1:  # a running training can be exported from the state of the previous stop
            _, encoder = next(exports_in(tmp_path / "run"))
            assert 0 < encoder.facts["unfinished"]["step"] < 4 * epochs and process.poll() is None
        os.killpg(process.pid, signal_number)
        _, err = process.communicate(timeout=120)
        assert process.returncode == STOPPED, err
        assert "stopped by a signal after update " in err and err.endswith("again with --resume\n"), number
        assert "Traceback" not in err and not (tmp_path / "run/export").exists()
    logged = (tmp_path / "run/log.jsonl").read_text()
    for out in ("run", "uninterrupted"):
        assert main([*words_of(tmp_path / out), f"epochs={epochs}", "--resume", "--workers", "0"]) == 0
    stopped, uninterrupted = (ViTExport.load(tmp_path / out / "export") for out in ("run", "uninterrupted"))
    assert stopped.digest == uninterrupted.digest
    assert (tmp_path / "run/log.jsonl").read_text().startswith(logged), "it was trained again"
    steps = [line["step"] for line in lines_of(tmp_path / "run")]
    assert steps == sorted(set(steps)) and steps[-1] == 4 * epochs


def test_two_processes_share_batches_and_online_probes(start, tmp_path):
    processes = start("--knn-every", "1", "--health-every", "2", "--set", "epochs=2", count=2)
    outputs = [process.end() for process in processes]
    assert outputs[0].count("finished after 8 updates") == 1 and not outputs[1]
    assert "1 x 2 of these (micro-batches x processes)" in outputs[0]
    lines = lines_of(tmp_path / "run")
    assert [line["step"] for line in lines if "knn_top1" in line] == [4, 8]
    assert [line["step"] for line in lines if "health_rankme" in line] == [8]
    assert not (tmp_path / "run/online-features").exists()
    assert ViTExport.load(tmp_path / "run/export").verify() == []


def test_a_wrong_request_is_refused_in_one_line_by_one_process(start, tmp_path):
    processes = start("--set", "batch=15", count=2)
    errors = "".join(process.communicate()[1] for process in processes)
    assert [process.returncode for process in processes] == [2, 2]
    error_lines = [line for line in errors.splitlines() if "bench: error" in line]
    assert len(error_lines) == 1 and error_lines[0].endswith("batch=15 cannot be shared by 2 processes; set batch=14")
    assert not (tmp_path / "run").exists()
