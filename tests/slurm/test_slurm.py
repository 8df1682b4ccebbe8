"""`--cluster slurm` on a real SLURM of one node: jobs that are preempted, queued again or cancelled, or lose
their node, end in the results of an undisturbed run. Skipped where SLURM cannot be started (one_node.py).
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from one_node import NoSlurm, OneNode
from small_exports import make_export
from whole_results import numbers_of, tensors_of

from bench.cluster.status import TaskRow, rows_of
from bench.cluster.task import AttemptState, read_attempt, submissions

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FINE_TUNING = ("--suite", "finetune@smoke", "--data", "digits=digits:", "--limit", "300", "--workers", "0")
LENGTH = ("--set", "finetune.epochs=240")  # 2160 steps, so that each attempt has some left
PRETRAINING = ("mae", "--recipe", "smoke", "--images", "digits:", "--workers", "0", "--save-minutes", "0.05")


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    started = OneNode(tmp_path_factory.mktemp("slurm"))
    try:
        started.start()
    except NoSlurm as reason:
        started.stop()
        pytest.skip(f"no SLURM: {reason}")
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("SLURM_CONF", str(started.conf))
        yield started
        started.stop()


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    return make_export(tmp_path_factory.mktemp("exports") / "small", seed=0)


def bench(*words: object) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bench", *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)


@pytest.fixture(scope="module")
def undisturbed(export, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed")
    done = bench("run", "--checkpoint", export, *FINE_TUNING, *LENGTH, "--out", out)
    assert done.returncode == 0, done.stderr
    return numbers_of(out)


class Job:
    """The one job of a folder."""

    def __init__(self, node: OneNode, out: Path) -> None:
        self.node, self.out = node, out

    @property
    def row(self) -> TaskRow:
        return rows_of(self.out)[-1]

    @property
    def name(self) -> str:
        return self.row.task.job

    @property
    def attempt(self) -> AttemptState | None:
        folder, _ = submissions(self.out)[-1]
        return read_attempt(folder, 0)

    def printed(self) -> str:
        path = self.row.log
        return path.read_text() if path and path.exists() else "nothing"

    def wait_for(self, what: str, happened) -> None:
        end = time.monotonic() + 120
        while not happened():
            assert time.monotonic() < end, f"no {what}: {self.row}\n{self.printed()}\n{self.node.said('squeue')}"
            time.sleep(0.2)

    def wait_for_steps(self, attempt: int, word: str) -> None:
        """Until the training of an attempt has begun: it has said so."""
        self.wait_for(
            f"step of attempt {attempt}",
            lambda: self.attempt and self.attempt.attempts == attempt and self.printed().count(word) >= attempt,
        )

    def wait_for_end(self) -> None:
        self.wait_for("end", lambda: self.row.state not in ("waiting", "running"))


def submitted(node: OneNode, out: Path, *words: object) -> Job:
    done = bench(*words, "--out", out, "--cluster", "slurm", "--partition", "low", "--time", "1:00:00")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "to follow them: bench status --out" in done.stdout
    return Job(node, out)


def processes_of(node: OneNode, job: Job) -> set[int]:
    """Those of the job on this node: SLURM's steps, submitit's process and the command."""
    marks = {f"SLURM_CONF={node.conf}".encode(), f"SLURM_JOB_ID={job.name.partition('_')[0]}".encode()}
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if marks <= set((path / "environ").read_bytes().split(b"\0")):
                found.add(int(path.name))
    parents = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1]) for pid in found}
    return found | {pid for pid in parents if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"slurmstepd")}


def lose_the_node(node: OneNode, job: Job) -> None:
    """Kill all of SLURM and of the job at once, as when the power goes, and start SLURM again."""
    for name in ("slurmctld", "slurmd"):
        node.kill(name)
    for pid in processes_of(node, job):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    node.start_slurm()
    job.wait_for("queued job", lambda: node.said("squeue", "--noheader", "--format=%T") == "PENDING")
    node.said("scontrol", "update", f"JobId={job.name}", "StartTime=now")  # it would wait two minutes


def test_a_job_that_is_disturbed_in_every_way_ends_in_the_same_results(node, export, tmp_path, undisturbed):
    """Queued again by hand, at the announced end of its time, by a job that preempts it, and when its node is lost."""
    job = submitted(node, tmp_path, "run", "--checkpoint", export, *FINE_TUNING, *LENGTH)
    disturbances = {
        "requeue": lambda: node.said("scontrol", "requeue", job.name),
        "time": lambda: node.said("scancel", "--signal=USR2", job.name),
        "preemption": lambda: node.said("sbatch", "--partition=high", "--exclusive", "--wrap=sleep 1"),
        "node": lambda: lose_the_node(node, job),
    }
    for attempt, (name, disturb) in enumerate(disturbances.items(), start=1):
        job.wait_for_steps(attempt, "steps/s")
        assert job.row.state == "running", name
        disturb()
    job.wait_for_end()
    assert (job.row.state, job.attempt.attempts) == ("finished", 5), job.printed()
    assert numbers_of(tmp_path) == undisturbed
    assert "1 finished" in bench("status", "--out", tmp_path).stdout


def test_a_cancelled_job_stays_so_until_the_same_command(node, export, tmp_path, undisturbed):
    words = ("run", "--checkpoint", export, *FINE_TUNING, *LENGTH)
    job = submitted(node, tmp_path, *words)
    job.wait_for_steps(1, "steps/s")
    again = bench(*words, "--out", tmp_path, "--cluster", "slurm", "--partition", "low")
    assert "1 jobs are submitted already, skipped" in again.stdout and "nothing is left" in again.stdout
    node.said("scancel", job.name)
    job.wait_for_end()
    job.wait_for("free node", lambda: not node.said("squeue", "--noheader"))
    status = json.loads(bench("status", "--json", "--out", tmp_path).stdout)
    assert [task["state"] for task in status["tasks"]] == ["stopped"]
    assert "its state is saved" in status["tasks"][0]["reason"], status
    job = submitted(node, tmp_path, *words)
    job.wait_for_end()
    assert numbers_of(tmp_path) == undisturbed


def test_a_pretraining_is_queued_again_and_ends_in_the_same_export(node, tmp_path):
    plain = tmp_path / "plain"
    words = ("pretrain", *PRETRAINING, "--set", "epochs=12")
    done = bench(*words, "--out", plain)
    assert done.returncode == 0, done.stderr
    job = submitted(node, tmp_path / "job", *words)
    for attempt, command in enumerate((("scontrol", "requeue"), ("scancel", "--signal=USR2")), start=1):
        job.wait_for("state", lambda: list((tmp_path / "job/states").glob("step-*")))
        job.wait_for_steps(attempt, "images/s")
        node.said(*command, job.name)
    job.wait_for_end()
    assert (job.row.state, job.attempt.attempts) == ("finished", 3), job.printed()
    assert tensors_of(plain) == tensors_of(tmp_path / "job")
