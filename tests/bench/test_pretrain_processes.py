"""`bench pretrain` as processes: stopped by signals and continued, and as two processes of one training."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from checkpoints.export import ViTExport
from pretrain.loop.exporting import exports_in

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SMALL = ("batch=16", "depth=1", "width=16", "heads=2", "mlp_hidden=32", "decoder_width=16")
EPOCHS = 60  # enough to be at work when a signal comes
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
STOPPED = 75


@pytest.fixture
def start(tmp_path):
    """Start `bench pretrain` in a session of its own, whose processes can be signalled together."""
    started = []

    def call(*words: str, out: str = "run", launcher: tuple[str, ...] = ()) -> subprocess.Popen:
        given = ["mae", "--recipe", "smoke", "--images", "tiny:", "--out", str(tmp_path / out), "--set", *SMALL, *words]
        process = subprocess.Popen(
            [sys.executable, *launcher, "-m", "bench", "pretrain", *given],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield call
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for(path: Path, process: subprocess.Popen) -> None:
    """Until the file has something in it."""
    end = time.monotonic() + 120
    while not (path.exists() and path.stat().st_size):
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.02)


def test_a_signal_to_all_of_a_job_stops_it_and_it_goes_on_as_if_nothing_had_been(start, tmp_path):
    """SIGUSR1, SIGTERM and Ctrl-C, each in the same training; loader processes hear them too."""
    epochs = f"epochs={EPOCHS}"
    for number, sent in enumerate((signal.SIGUSR1, signal.SIGTERM, signal.SIGINT), start=1):
        process = start("--resume", "--workers", "1", "--set", epochs)
        wait_for(tmp_path / "run/log.jsonl", process)
        lines = len((tmp_path / "run/log.jsonl").read_text().splitlines())
        while len((tmp_path / "run/log.jsonl").read_text().splitlines()) == lines and process.poll() is None:
            time.sleep(0.02)
        if number > 1:  # the state of the stop before, of a training that is running
            _, encoder = next(exports_in(tmp_path / "run"))
            assert 0 < encoder.facts["unfinished"]["step"] < 4 * EPOCHS and process.poll() is None
        os.killpg(process.pid, sent)
        _, err = process.communicate(timeout=120)
        assert process.returncode == STOPPED, err
        assert "stopped by a signal after update " in err and err.endswith("again with --resume\n"), number
        assert "Traceback" not in err and not (tmp_path / "run/export").exists()
    for out in ("run", "quiet"):
        process = start("--resume", "--workers", "0", "--set", epochs, out=out)
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    stopped, quiet = (ViTExport.load(tmp_path / out / "export") for out in ("run", "quiet"))
    assert stopped.digest == quiet.digest
    steps = [json.loads(line)["step"] for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps)) and steps[-1] == 4 * EPOCHS


def test_two_processes_of_torchrun_share_batches_and_online_knn(start, tmp_path):
    process = start("--knn-every", "1", "--set", "epochs=2", launcher=TORCHRUN)
    said, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert said.count("finished after 8 updates") == 1 and "1 x 2 of these (micro-batches x processes)" in said
    lines = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "knn_top1" in line] == [4, 8]
    assert not (tmp_path / "run/online-knn").exists()
    assert ViTExport.load(tmp_path / "run/export").verify() == []


def test_a_request_that_cannot_be_met_is_one_line_of_one_process(start, tmp_path):
    process = start("--set", "batch=15", launcher=TORCHRUN)
    _, err = process.communicate(timeout=240)
    assert process.returncode != 0
    ours = [line for line in err.splitlines() if "bench: error" in line]
    assert len(ours) == 1 and ours[0].endswith("batch=15 cannot be shared by 2 processes; set batch=14")
    assert not (tmp_path / "run").exists()
