"""Tasks to submitit's executors: one array of SLURM jobs, or processes of this machine, so many at once.

The jobs of a submission are the same command with fewer checkpoints and protocols, so that they share a folder of
results as runs of a user's own would.
"""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

from bench.cluster.options import ClusterOptions
from bench.cluster.records import (
    Going,
    Submission,
    TaskRecord,
    going_of,
    lock_of,
    new_folder,
    now,
    write_going,
    write_submission,
)
from bench.cluster.task import BenchTask
from engine.files import locked
from engine.optional import require
from engine.training.interruptions import STOPPED, listening

ATTEMPTS = 1000  # times that a job may be queued again; a pretraining of weeks needs many
NOTICE = 180  # seconds before the end of the time at which a job is asked to save its state
KEPT = ("SLURM_CONF", "SUBMITIT_PREEMPT_SIGNAL")  # of the cluster, not of a job
LOOK = 0.5  # seconds between two looks at the local jobs
Heard = Callable[[TaskRecord, Going], None]  # of a local job that began or ended


def submit_to_slurm(out: Path, tasks: Sequence[TaskRecord], options: ClusterOptions) -> Submission:
    """Submit one array of jobs, in the order of the tasks. ValueError, one line, where SLURM refuses."""
    if not shutil.which("sbatch"):
        raise ValueError("--cluster slurm: there is no sbatch here; run this on a login node, or --cluster local")
    require("submitit")
    with _folder_of(out) as folder:
        executor = slurm_executor(folder / "logs", options)
        try:
            with _no_job_of_ours(), redirect_stderr(StringIO()):  # submitit prints what it raises
                jobs = executor.submit_array([_task(folder, task) for task in tasks])
        except (RuntimeError, ValueError, OSError) as error:  # what sbatch said is its last line
            said = str(error).strip().splitlines() or [type(error).__name__]
            raise ValueError(f"--cluster slurm: {said[-1].removeprefix('sbatch: error: ')}") from error
        named = tuple(replace(task, job=job.job_id) for task, job in zip(tasks, jobs, strict=True))
        submission = Submission(cluster="slurm", date=now(), at_once=options.jobs, tasks=named)
        write_submission(folder, submission)
    return submission


@contextmanager
def _no_job_of_ours() -> Iterator[None]:
    """Without the variables of a job that this command runs in: the jobs that it submits have places of their own."""
    from submitit.helpers import clean_env

    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    with clean_env():
        os.environ.update(kept)
        yield


@contextmanager
def _folder_of(out: Path) -> Iterator[Path]:
    """A new submission's folder, which goes again where nothing was submitted."""
    folder = new_folder(out)
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _task(folder: Path, task: TaskRecord) -> BenchTask:
    return BenchTask(folder=str(folder.absolute()), number=task.number, words=task.words)


def slurm_executor(logs: Path, options: ClusterOptions) -> Any:
    """submitit's executor with the options as sbatch's own. A job that SLURM preempts or whose node dies comes back."""
    from submitit import SlurmExecutor

    further = {key: value or True for key, _, value in (text.partition("=") for text in options.slurm)}
    executor = SlurmExecutor(logs, max_num_timeout=ATTEMPTS)
    given = {
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "gpus_per_node": options.gpus or None,
        "cpus_per_task": options.cpus,
        "array_parallelism": options.jobs,
    }
    executor.update_parameters(
        job_name="bench",
        time=options.minutes,
        nodes=options.nodes,
        ntasks_per_node=options.processes,
        signal_delay_s=min(NOTICE, options.minutes * 60 // 4),
        stderr_to_stdout=True,
        additional_parameters={"requeue": True} | ({"mem": options.mem} if options.mem else {}) | further,
        **{name: value for name, value in given.items() if value is not None},
    )
    return executor


class LocalQueue:
    """Jobs of this machine, so many at once. heard: called when one begins and when it ends."""

    def __init__(self, folder: Path, tasks: Sequence[TaskRecord], options: ClusterOptions, heard: Heard) -> None:
        require("submitit")
        self.folder, self.options, self.heard = folder, options, heard
        self.waiting = list(tasks)
        self.places: dict[int, tuple[TaskRecord, Any]] = {}  # place -> the task in it, and submitit's job
        self.stopping = False

    def run(self) -> list[int]:
        """Run all to their end; their exit codes. A signal stops them, with their states saved."""
        codes = []
        with listening(self.stop):
            while (self.waiting and not self.stopping) or self.places:
                self.start_some()
                time.sleep(LOOK)
                codes += [self.ended(place) for place, (_, job) in [*self.places.items()] if job.done()]
        return codes + [STOPPED] * len(self.waiting)

    def start_some(self) -> None:
        """A job in every free place."""
        for place in range(self.options.jobs or 1):
            if place not in self.places and self.waiting and not self.stopping:
                task = self.waiting.pop(0)
                self.places[place] = task, self.start(task, place)
                self.heard(task, Going(stage="running"))

    def start(self, task: TaskRecord, place: int) -> Any:
        """submitit's job, on the GPUs of its place."""
        from submitit import LocalExecutor

        gpus = self.options.gpus
        executor = LocalExecutor(self.folder / "logs", max_num_timeout=ATTEMPTS)
        executor.update_parameters(
            timeout_min=self.options.minutes,
            signal_delay_s=min(NOTICE, self.options.minutes * 60 // 4),
            tasks_per_node=self.options.processes,
            gpus_per_node=gpus,
            visible_gpus=tuple(range(place * gpus, (place + 1) * gpus)),
            stderr_to_stdout=True,
        )
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the jobs hear of it by `stop`
        try:
            return executor.submit(_task(self.folder, task))
        finally:
            signal.signal(signal.SIGINT, before)

    def ended(self, place: int) -> int:
        """Free a place; the exit code of its task."""
        task, _ = self.places.pop(place)
        going = going_of(self.folder, task.number) or Going(stage="ended", code=1)
        if going.stage == "running":  # it was killed, and could not say so
            going = replace(going, stage="ended", code=-signal.SIGKILL, ended=now())
            write_going(self.folder, task.number, going)
        self.heard(task, going)
        return going.code if going.code is not None else 1

    def stop(self) -> None:
        """Ask all jobs to save and leave; no other one begins."""
        self.stopping = True
        for _, job in self.places.values():
            os.kill(int(job.job_id), signal.SIGTERM)


def run_locally(out: Path, tasks: Sequence[TaskRecord], options: ClusterOptions, heard: Heard) -> list[int]:
    """Run the tasks on this machine and return their exit codes."""
    with _folder_of(out) as folder:
        write_submission(folder, Submission(cluster="local", date=now(), at_once=options.jobs, tasks=tuple(tasks)))
    with locked(lock_of(folder), "it starts these jobs"):
        return LocalQueue(folder, tasks, options, heard).run()
