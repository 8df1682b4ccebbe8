"""`--cluster slurm` on a real SLURM of one node: jobs that are preempted, requeued or cancelled, or lose their node,
end in the results of an undisturbed run. Skipped where SLURM cannot be started (one_node.py).
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from one_node import NoSlurm, OneNode
from small_exports import make_export
from whole_results import numbers_of, tensors_of

from bench.run.cluster import Row, rows_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FINE_TUNING = ("--suite", "finetune@smoke", "--data", "digits=digits:", "--limit", "300", "--workers", "0")
LENGTH = ("--set", "finetune.epochs=240")  # 2160 steps, so that each attempt has some left
PRETRAINING = ("mae", "--recipe", "smoke", "--images", "digits:", "--workers", "0", "--save-minutes", "0.05")


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    slurm = OneNode(tmp_path_factory.mktemp("slurm"))
    try:
        slurm.start()
    except NoSlurm as reason:
        slurm.stop()
        pytest.skip(f"no SLURM: {reason}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(slurm.conf))
        yield slurm
        slurm.stop()


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    return make_export(tmp_path_factory.mktemp("exports") / "small", seed=0)


def bench(*words: object) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bench", *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)


@pytest.fixture(scope="module")
def undisturbed(export, tmp_path_factory):
    """The results of the same fine-tuning without SLURM."""
    out = tmp_path_factory.mktemp("undisturbed")
    process = bench("run", "--checkpoint", export, *FINE_TUNING, *LENGTH, "--out", out)
    assert process.returncode == 0, process.stderr
    return numbers_of(out)


class Job:
    """The only job of an output folder."""

    def __init__(self, node: OneNode, out: Path) -> None:
        self.node, self.out = node, out

    @property
    def row(self) -> Row:
        return rows_of(self.out)[-1]

    @property
    def name(self) -> str:
        return self.row.task.job

    @property
    def attempts(self) -> int:
        return self.output().count("Starting with JobEnvironment")  # submitit's line

    def output(self) -> str:
        return self.row.log.read_text() if self.row.log else ""

    def wait_for(self, event: str, happened: Callable[[], object]) -> None:
        deadline = time.monotonic() + 120
        while not happened():
            assert time.monotonic() < deadline, f"no {event}: {self.row}\n{self.output()}\n{self.node.client('squeue')}"
            time.sleep(0.2)

    def wait_for_steps(self, attempt: int, word: str) -> None:
        """Wait until an attempt prints `word`, as every training does once it makes steps."""
        self.wait_for(
            f"step of attempt {attempt}",
            lambda: self.attempts == attempt and self.output().count(word) >= attempt,
        )

    def wait_for_end(self) -> None:
        self.wait_for("end", lambda: self.row.state not in ("waiting", "running"))


def submit(node: OneNode, out: Path, *words: object) -> Job:
    process = bench(*words, "--out", out, "--cluster", "slurm", "--partition", "low", "--time", "1:00:00")
    assert process.returncode == 0, process.stderr + process.stdout
    assert "to follow: bench status --out" in process.stdout
    return Job(node, out)


def processes_of(node: OneNode, job: Job) -> set[int]:
    """The pids of the job on this node: SLURM's steps, submitit's process and the command."""
    variables = {f"SLURM_CONF={node.conf}".encode(), f"SLURM_JOB_ID={job.name.partition('_')[0]}".encode()}
    pids = set()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if variables <= set((path / "environ").read_bytes().split(b"\0")):
                pids.add(int(path.name))
    parents = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1]) for pid in pids}
    return pids | {pid for pid in parents if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"slurmstepd")}


def lose_the_node(node: OneNode, job: Job) -> None:
    """Kill all of SLURM and of the job at once, as in a power cut, and start SLURM again."""
    for name in ("slurmctld", "slurmd"):
        node.kill(name)
    for pid in processes_of(node, job):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    node.start_slurm()
    job.wait_for("pending job", lambda: node.client("squeue", "--noheader", "--format=%T") == "PENDING")
    node.client("scontrol", "update", f"JobId={job.name}", "StartTime=now")  # it would wait two minutes


def test_a_job_interrupted_in_every_way_ends_in_the_same_results(node, export, tmp_path, undisturbed):
    """Requeued by hand, at the announced end of its time, by preemption, and after its node was lost."""
    job = submit(node, tmp_path, "run", "--checkpoint", export, *FINE_TUNING, *LENGTH)
    interruptions = {
        "requeue": lambda: node.client("scontrol", "requeue", job.name),
        "time": lambda: node.client("scancel", "--signal=USR2", job.name),
        "preemption": lambda: node.client("sbatch", "--partition=high", "--exclusive", "--wrap=sleep 1"),
        "node": lambda: lose_the_node(node, job),
    }
    for attempt, (name, interrupt) in enumerate(interruptions.items(), start=1):
        job.wait_for_steps(attempt, "steps/s")
        assert job.row.state == "running", name
        interrupt()
    job.wait_for_end()
    assert (job.row.state, job.attempts) == ("finished", 5), job.output()
    assert numbers_of(tmp_path) == undisturbed
    assert "1 finished" in bench("status", "--out", tmp_path).stdout


def test_a_cancelled_job_stays_cancelled_until_it_is_submitted_again(node, export, tmp_path, undisturbed):
    words = ("run", "--checkpoint", export, *FINE_TUNING, *LENGTH)
    job = submit(node, tmp_path, *words)
    job.wait_for_steps(1, "steps/s")
    resubmission = bench(*words, "--out", tmp_path, "--cluster", "slurm", "--partition", "low")
    assert "1 jobs are submitted already, skipped" in resubmission.stdout and "nothing is left" in resubmission.stdout
    node.client("scancel", job.name)
    job.wait_for_end()
    job.wait_for("free node", lambda: not node.client("squeue", "--noheader"))
    assert job.row.state == "failed" and "run the same command again" in job.row.reason, job.row
    job = submit(node, tmp_path, *words)
    job.wait_for_end()
    assert numbers_of(tmp_path) == undisturbed


def test_a_requeued_pretraining_ends_in_the_same_export(node, tmp_path):
    plain = tmp_path / "plain"
    words = ("pretrain", *PRETRAINING, "--set", "epochs=12")
    process = bench(*words, "--out", plain)
    assert process.returncode == 0, process.stderr
    job = submit(node, tmp_path / "job", *words)
    for attempt, command in enumerate((("scontrol", "requeue"), ("scancel", "--signal=USR2")), start=1):
        job.wait_for("state", lambda: list((tmp_path / "job/states").glob("step-*")))
        job.wait_for_steps(attempt, "images/s")
        node.client(*command, job.name)
    job.wait_for_end()
    assert (job.row.state, job.attempts) == ("finished", 3), job.output()
    assert tensors_of(plain) == tensors_of(tmp_path / "job")
