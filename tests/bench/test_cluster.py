"""`--cluster`: its options, the jobs of a run, the script for SLURM, and the states that `bench status` shows."""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from test_results import RESULT

from bench.cli import parsed
from bench.commands.run import Options
from bench.options import argv_of, cluster_of, minutes_of
from bench.results.record import read_result, write_result
from bench.run import cluster
from bench.run.cluster import (
    SUBMISSION,
    BenchTask,
    Submission,
    Task,
    numbered,
    rows_of,
    submissions,
    words_of_run,
)
from bench.run.prepare import prepare


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A folder with fake SLURM programs: sbatch copies each script to `script`, squeue prints the file `queue`."""
    programs = tmp_path / "programs"
    programs.mkdir()
    commands = {
        "srun": "",
        "sbatch": f'cp "$1" {tmp_path}/script; echo "Submitted batch job 77"',
        "squeue": f"cat {tmp_path}/queue 2>/dev/null",
    }
    for name, command in commands.items():
        (programs / name).write_text(f"#!/bin/sh\n{command}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return tmp_path


def options(*words: str) -> Options:
    return parsed(["run", "--checkpoint", "x", "--suite", "knn", "--out", "o", *words])[1]


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90), ("1:30", 2), ("2:00:00", 120), ("1-0", 1440), ("2-12:30", 3630), ("0-1:00:30", 61)],
)
def test_times_have_the_formats_of_sbatch(text, minutes):
    assert minutes_of(text) == minutes


@pytest.mark.parametrize("text", ["", "0", "x", "1:2:3:4", "1h"])
def test_other_times_are_refused(text):
    with pytest.raises(ValueError, match="expected"):
        minutes_of(text)


def test_options_become_one_value_with_defaults():
    slurm = cluster_of(options("--cluster", "slurm", "--gpus", "8", "--jobs", "3", "--time", "2:00:00"))
    assert (slurm.cluster, slurm.gpus, slurm.processes, slurm.jobs, slurm.time) == ("slurm", 8, 8, 3, 120)
    assert cluster_of(options("--cluster", "slurm")).time == 24 * 60
    assert cluster_of(options()) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "2"], "gpus: .*--cluster slurm"),
        (["--cluster", "slurm", "--slurm", "no value here"], "slurm.*no value here.*KEY=VALUE"),
    ],
)
def test_options_that_do_not_fit_the_cluster_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        cluster_of(options(*words))


def test_options_survive_the_way_to_a_command_line_and_back():
    words = ["--data", "a=digits:", "b=x:y", "--limit", "3", "--skip-bad", "--cluster", "slurm"]
    arguments = replace(options(*words), checkpoint=("y",), suite="knn@dino")
    assert parsed(argv_of("run", arguments))[1] == replace(arguments, cluster=None)


@pytest.mark.parametrize(
    ("suite", "data", "change"),
    [
        # Of a task that probes/tasks/lowshot.py defines beside its own.
        ("logreg@dinov2", "digits=digits:", "logreg.holdout=0.2"),
        # Of a task whose key names another layout.
        ("segmentation_linear@smoke", "voc=tiny-voc:", "segmentation_linear.steps=30"),
    ],
)
def test_a_job_has_the_image_set_and_settings_of_its_protocols(exports, tmp_path, suite, data, change):
    words = ["run", "--checkpoint", str(exports[0]), "--out", str(tmp_path), "--suite", suite, "--data", data]
    arguments = parsed([*words, "--set", change, "knn.k=5", "--cluster", "slurm"])[1]
    (checkpoint, jobs), *_ = prepare(replace(arguments, set=(change,))).jobs
    job = parsed(words_of_run(arguments, checkpoint, jobs))[1]
    assert (job.suite, job.data, job.set, job.cluster) == (suite, (data,), (change,), None)
    one_seed = words_of_run(replace(arguments, seed=(2, 0, 1)), checkpoint, [replace(jobs[0], seed=s) for s in (1, 2)])
    assert parsed(one_seed)[1].seed == (2, 1)


def submit(call, toys, exports, out, *words):
    suite = ("--suite", "all_toys,dear@two", "--data", "tiny=tiny:", "--set", "toy.rate=0.25", "dear@two.k=3")
    return call("run", "--checkpoint", *exports, *suite, "--out", out, "--cluster", "slurm", *words)


def test_a_run_is_submitted_as_jobs_with_cheap_tasks_first(slurm, bench, toys, exports):
    out = slurm / "out"
    code, output, _ = submit(bench, toys, exports, out, "--partition", "p", "--gpus", "4", "--jobs", "2", "--mem", "9G")
    assert code == 0 and "8 jobs submitted; to follow: bench status" in output
    ((_, submission),) = submissions(out)
    titles = [
        f"{name}: {task}@{protocol}"
        for task in ("toy", "dear")
        for name in ("first", "second")
        for protocol in ("one", "two")
    ]
    assert [task.title for task in submission.tasks] == titles
    assert [task.job for task in submission.tasks] == [f"77_{number}" for number in range(8)]
    words = parsed(submission.tasks[1].words)[1]
    assert (words.suite, words.name, words.set, words.cluster) == ("toy@two", ("first",), ("toy.rate=0.25",), None)
    assert [task.words.count("dear@two.k=3") for task in submission.tasks] == [0, 0, 0, 0, 0, 1, 0, 1]
    script = (slurm / "script").read_text()
    expected = ("partition=p", "gpus-per-node=4", "ntasks-per-node=4", "array=0-7%2", "mem=9G", "requeue", "time=1440")
    assert all(f"#SBATCH --{option}\n" in script for option in expected), script
    assert not list((out / "results").rglob("*.json"))


def test_protocols_that_share_features_or_a_stream_of_images_are_one_job(slurm, bench, exports):
    suite = "knn@dino,lowshot@bench,linear_sgd@moca,linear@dino,finetune@smoke"
    words = ("--suite", suite, "--data", "digits=digits:", "--out", slurm / "out", "--cluster", "slurm")
    code, _, errors = bench("run", "--checkpoint", exports[0], *words)
    assert code == 0, errors
    ((_, submission),) = submissions(slurm / "out")
    assert sorted(sorted(parsed(task.words)[1].suite.split(",")) for task in submission.tasks) == [
        ["finetune@smoke"],
        ["knn@dino", "lowshot@bench"],
        ["linear@dino", "linear_sgd@moca"],
    ]


def test_jobs_that_wait_or_are_done_are_not_submitted_again(slurm, bench, toys, exports):
    out = slurm / "out"
    bench("run", "--checkpoint", exports[0], "--suite", "toy@one", "--data", "tiny=tiny:", "--out", out)
    submit(bench, toys, exports[:1], out)
    assert len(submissions(out)[0][1].tasks) == 4  # toy@one too: its result above has another toy.rate
    (slurm / "queue").write_text("".join(f"77_{number}|PENDING|0:00||Priority\n" for number in range(3)))
    code, output, _ = submit(bench, toys, exports[:1], out)
    assert code == 0 and "3 jobs are submitted already" in output
    assert [task.title for task in submissions(out)[1][1].tasks] == ["first: dear@two"]


def test_a_pretraining_is_one_job_that_resumes(slurm, bench, refused):
    out = slurm / "run"
    words = ("pretrain", "mae", "--recipe", "smoke", "--images", "digits:", "--out", out)
    code, output, _ = bench(*words, "--cluster", "slurm", "--nodes", "4", "--gpus", "8", "--slurm", "constraint=a100")
    assert code == 0 and "1 job submitted" in output
    ((_, submission),) = submissions(out)
    (job,) = submission.tasks
    assert parsed(job.words)[1] == replace(parsed([*map(str, words)])[1], resume=True)
    script = (slurm / "script").read_text()
    assert all(f"#SBATCH --{option}\n" in script for option in ("nodes=4", "ntasks-per-node=8", "constraint=a100"))
    (slurm / "queue").write_text("77|RUNNING|1:00|node7|None\n")
    refused(*words, "--cluster", "slurm", named="it is submitted already")


def test_a_pretraining_refuses_a_number_of_jobs(slurm, refused):
    words = ("pretrain", "mae", "--recipe", "smoke", "--images", "digits:", "--out", slurm / "run")
    refused(*words, "--cluster", "slurm", "--jobs", "4", named="--jobs 4 | --nodes")
    assert not submissions(slurm / "run")


def test_an_error_of_sbatch_is_one_line_and_leaves_nothing(slurm, refused, toys, exports):
    (slurm / "programs" / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: no such partition' >&2; exit 1\n")
    line = submit(refused, toys, exports, slurm / "out")
    assert line == "bench: error: --cluster slurm: no such partition"
    assert submissions(slurm / "out") == [] and not list((slurm / "out/cluster").glob("*/"))


def test_without_slurm_nothing_is_submitted(refused, toys, exports, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "sbatch" in submit(refused, toys, exports, tmp_path / "out")


def task(number: int) -> Task:
    results = (f"results/n/d/{number}.json",)
    return Task(number=number, title=f"net: toy@{number}", words=("run",), results=results, job=f"5_{number}")


def save_submission(out, count: int) -> Path:
    folder = out / "cluster" / str(max(numbered(out), default=0) + 1)
    folder.mkdir(parents=True)
    submission = Submission(date="2000-01-01T00:00:00+00:00", tasks=tuple(map(task, range(count))))
    (folder / SUBMISSION).write_bytes(msgspec.json.encode(submission))
    return folder


def test_status_combines_the_queue_with_results_and_logs(slurm, bench):
    out = slurm / "out"
    folder = save_submission(out, 7)
    failed = replace(RESULT, status="failed", message="ValueError: a task", metrics={})
    for number, result in ((0, replace(RESULT, date="2026-01-02T03:04:05+00:00")), (4, failed)):
        write_result(out / f"results/n/d/{number}.json", result, {})
    logs = folder / "logs"
    logs.mkdir()
    for number in (1, 3, 4, 5, 6):
        (logs / f"5_{number}_0_log.out").write_text("some text\nthe last line\n")
    (logs / "5_3_1_log.out").write_text("bench: error: no memory\nmore text\n")
    states = {1: "RUNNING|1:02|node7|None", 2: "PENDING|0:00||Resources", 6: "OUT_OF_MEMORY|1:00|node7|None"}
    (slurm / "queue").write_text("".join(f"5_{number}|{state}\n" for number, state in states.items()))
    rows = rows_of(out)
    assert [row.state for row in rows] == ["finished", "running", "waiting", *["failed"] * 4]
    assert [rows[number].reason for number in (1, 2)] == ["1:02 on node7, the last line", "Resources"]
    reasons = ("no memory", "ValueError: a task", "a signal stopped it", "more memory than --mem allows")
    assert all(reason in row.reason for reason, row in zip(reasons, rows[3:], strict=True))
    code, output, _ = bench("status", "--out", out)
    assert code == 1 and output.splitlines()[-1] == "1 finished, 1 running, 1 waiting, 4 failed"
    assert f"log: {logs}/5_3_0_log.out" in output and "job 5_1, 1:02 on node7" in output


def test_a_later_submission_replaces_jobs_of_the_same_results(tmp_path):
    save_submission(tmp_path, 3)
    save_submission(tmp_path, 2)
    assert [row.task.number for row in rows_of(tmp_path)] == [2, 0, 1]


def test_a_damaged_submission_is_named(tmp_path, refused):
    path = save_submission(tmp_path, 1) / SUBMISSION
    path.write_text("{")
    refused("status", "--out", tmp_path, named=f"{path} | move")


def test_status_of_a_folder_without_jobs_is_refused(tmp_path, refused):
    refused("status", "--out", tmp_path, named="no jobs | --out")


STOPPABLE = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
print("ready", flush=True)
time.sleep(60)
"""


class QueuedAgain(Exception):
    """Raised by the handler that stands for submitit's."""


@pytest.fixture
def job(monkeypatch):
    """`job(code, signal)` runs a Python program as a task on a cluster, as submitit would, and sends a signal.

    Returns how it ended: "queued again", or its exit code.
    """
    environment = SimpleNamespace(USR_SIG="USR2", global_rank=0, num_tasks=1, raw_job_id="5")

    def queue_again(number, frame):
        raise QueuedAgain

    def call(code: str, number: int = 0) -> str | int:
        monkeypatch.setattr("submitit.JobEnvironment", lambda: environment)
        monkeypatch.setattr(cluster, "COMMAND", (sys.executable, "-u", "-c", code))
        if number:
            threading.Timer(0.5, os.kill, (os.getpid(), number)).start()
        try:
            return BenchTask(())()
        except QueuedAgain:
            return "queued again"
        except SystemExit as ending:
            return ending.code

    previous = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)}
    signal.signal(signal.SIGUSR2, queue_again)
    yield call
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "state", "ending"),
    [
        (signal.SIGUSR2, "RUNNING", "queued again"),  # the end of its time
        (signal.SIGTERM, "RUNNING", "queued again"),  # a preemption
        (signal.SIGTERM, "CANCELLED", 75),
    ],
)
def test_a_job_that_a_signal_stops_is_queued_again_unless_it_was_cancelled(job, slurm, number, state, ending):
    (slurm / "programs" / "squeue").write_text(f"#!/bin/sh\necho {state}\n")
    assert job(STOPPABLE, number) == ending


def test_a_job_ends_as_its_command_does(job, capfd):
    assert job("") == 0 and job("raise SystemExit(2)") == 2
    assert job("import os; os.kill(os.getpid(), 9)") == -9
    assert "bench: error: the process was killed by signal 9" in capfd.readouterr().err


@pytest.mark.exhaustive  # tests/engine/test_peers.py tests by default that the other processes name a killed one
def test_a_job_runs_in_the_processes_that_submitit_starts(toy_packages, exports, tmp_path, monkeypatch):
    from submitit import LocalExecutor

    monkeypatch.setenv("PYTHONPATH", f"{toy_packages}{os.pathsep}{os.environ.get('PYTHONPATH', os.getcwd())}")
    out = tmp_path / "out"
    executor = LocalExecutor(tmp_path / "logs")
    executor.update_parameters(tasks_per_node=2, timeout_min=5, stderr_to_stdout=True)
    words = ("run", "--checkpoint", str(exports[0]), "--suite", "toy@one", "--data", "tiny=tiny:", "--out", str(out))
    executor.submit(BenchTask(words)).wait()
    assert [read_result(path).processes for path in (out / "results").rglob("*.json")] == [2]
    waiting = executor.submit(BenchTask((*words, "--rerun", "--set", "toy.mode=wait")))
    end = time.monotonic() + 120
    while not (out / "cache" / "waiting").exists() or not processes_with("RANK=1", str(out)):
        assert time.monotonic() < end
        time.sleep(0.1)
    (victim,) = processes_with("RANK=1", str(out))
    os.kill(victim, signal.SIGKILL)
    waiting.wait()
    log = waiting.paths.stdout.read_text()
    assert f"process 1 of 2 (pid {victim}, host " in log and "killed by signal 9" in log


def processes_with(variable: str, words: str) -> list[int]:
    """Pids of processes with a variable in their environment and words in their command."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            variables, command = (path / "environ").read_bytes(), (path / "cmdline").read_bytes()
            if variable.encode() in variables.split(b"\0") and words.encode() in command:
                pids.append(int(path.name))
    return pids
