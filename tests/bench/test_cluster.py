"""`--cluster`: its options, the jobs of a run, the script for SLURM, and the states that `bench status` shows."""

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from bench import cluster
from bench.cli import parsed
from bench.cluster import (
    KILLED,
    SUBMISSION,
    Attempt,
    BenchTask,
    Submission,
    Task,
    now,
    numbered,
    read_attempt,
    rows_of,
    submissions,
    words_of_run,
    write_attempt,
)
from bench.commands.run import Options
from bench.options import argv_of, cluster_of, minutes_of
from bench.results.record import read_result
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
    (slurm / "queue").write_text("".join(f"77_{number}|PENDING|Priority\n" for number in range(3)))
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
    (slurm / "queue").write_text("77|RUNNING|None\n")
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
    submission = Submission(date=now().isoformat(), tasks=tuple(map(task, range(count))))
    (folder / SUBMISSION).write_bytes(msgspec.json.encode(submission))
    return folder


def test_status_combines_the_states_of_jobs_and_of_the_queue(slurm, bench):
    out = slurm / "out"
    folder = save_submission(out, 7)
    log = folder / "logs" / "5_3_0_log.out"
    log.parent.mkdir()
    log.write_text("some text\nbench: error: no memory\nmore text\n")
    (log.parent / "5_3_1_log.out").write_text("nothing\n")
    running = Attempt(stage="running", begun=now(), host="node7", log=str(log))
    for number, attempt in {
        0: replace(running, stage="ended", code=0, ended=now()),
        1: running,
        3: replace(running, stage="ended", code=2, ended=now()),
        4: running,
        5: replace(running, stage="stopped", code=75, ended=now()),
        6: running,
    }.items():
        write_attempt(folder, number, attempt)
    states = {1: "RUNNING|None", 2: "PENDING|Resources", 6: "OUT_OF_MEMORY|None"}
    (slurm / "queue").write_text("".join(f"5_{number}|{state}\n" for number, state in states.items()))
    rows = rows_of(out)
    assert [row.state for row in rows] == ["finished", "running", "waiting", "failed", "failed", "stopped", "failed"]
    assert [rows[number].reason for number in (2, 3)] == ["Resources", "no memory"]
    assert KILLED in rows[4].reason and "more memory than --mem" in rows[6].reason
    code, output, _ = bench("status", "--out", out)
    assert code == 1 and output.splitlines()[-1] == "1 finished, 1 running, 1 waiting, 1 stopped, 3 failed"
    assert f"log: {log}" in output and "job 5_1" in output and "on node7" in output
    code, output, _ = bench("status", "--out", out, "--json")
    assert [task["state"] for task in json.loads(output)] == [row.state for row in rows]


def test_a_later_submission_replaces_jobs_of_the_same_results(tmp_path):
    save_submission(tmp_path, 3)
    save_submission(tmp_path, 2)
    assert [row.task.number for row in rows_of(tmp_path)] == [2, 0, 1]


def test_a_clock_that_was_set_back_makes_no_negative_duration():
    ended = now() - timedelta(days=1)
    assert Attempt(stage="ended", code=0, begun=now(), ended=ended).seconds == 0


@pytest.mark.parametrize("begun", ["soon", "2020-01-01T00:00:00"])
def test_times_of_an_attempt_that_are_none_are_refused(tmp_path, refused, begun):
    path = save_submission(tmp_path, 1) / "task-0.json"
    path.write_text(json.dumps({"stage": "running", "begun": begun}))
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
def job(tmp_path, monkeypatch):
    """`job(code, name, signal)` runs a Python program as a task on a cluster, as submitit would, and sends a signal."""
    folder = save_submission(tmp_path, 1)
    environment = SimpleNamespace(
        USR_SIG="USR2",
        global_rank=0,
        num_tasks=1,
        hostname="node7",
        raw_job_id="5",
        paths=SimpleNamespace(stdout=folder / "5_0_log.out"),
    )

    def queue_again(number, frame):
        raise QueuedAgain

    def call(code: str, number: int = 0) -> Attempt:
        monkeypatch.setattr("submitit.JobEnvironment", lambda: environment)
        monkeypatch.setattr(cluster, "COMMAND", (sys.executable, "-u", "-c", code))
        bench_task = BenchTask(str(folder), 0, ())
        if number:
            threading.Timer(0.5, os.kill, (os.getpid(), number)).start()
        with suppress(QueuedAgain, SystemExit):
            bench_task()
        return read_attempt(folder, 0)

    previous = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)}
    signal.signal(signal.SIGUSR2, queue_again)
    yield call
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "state", "stage"),
    [
        (signal.SIGUSR2, "RUNNING", "queued again"),  # the end of its time
        (signal.SIGTERM, "RUNNING", "queued again"),  # a preemption
        (signal.SIGTERM, "CANCELLED", "stopped"),
    ],
)
def test_a_job_that_a_signal_stops_is_queued_again_unless_it_was_cancelled(job, slurm, number, state, stage):
    (slurm / "programs" / "squeue").write_text(f"#!/bin/sh\necho {state}\n")
    attempt = job(STOPPABLE, number)
    assert (attempt.stage, attempt.code, attempt.attempts) == (stage, 75, 1)


def test_an_attempt_records_how_its_command_ended(job, capfd):
    assert (job("").stage, job("").code, job("").attempts) == ("ended", 0, 3)
    assert job("raise SystemExit(2)").code == 2
    killed = job("import os; os.kill(os.getpid(), 9)")
    assert (killed.stage, killed.code, killed.host) == ("ended", -9, "node7")
    assert "bench: error: the process was killed by signal 9" in capfd.readouterr().err


@pytest.mark.exhaustive  # tests/engine/test_peers.py tests by default that the other processes name a killed one
def test_a_job_runs_in_the_processes_that_submitit_starts(toy_packages, exports, tmp_path, monkeypatch):
    from submitit import LocalExecutor

    monkeypatch.setenv("PYTHONPATH", f"{toy_packages}{os.pathsep}{os.environ.get('PYTHONPATH', os.getcwd())}")
    out = tmp_path / "out"
    folder = save_submission(out, 2)
    executor = LocalExecutor(folder / "logs")
    executor.update_parameters(tasks_per_node=2, timeout_min=5, stderr_to_stdout=True)
    words = ("run", "--checkpoint", str(exports[0]), "--suite", "toy@one", "--data", "tiny=tiny:", "--out", str(out))
    executor.submit(BenchTask(str(folder), 0, words)).wait()
    assert read_attempt(folder, 0).code == 0
    assert [read_result(path).processes for path in (out / "results").rglob("*.json")] == [2]
    waiting = executor.submit(BenchTask(str(folder), 1, (*words, "--rerun", "--set", "toy.mode=wait")))
    end = time.monotonic() + 120
    while not (out / "cache" / "waiting").exists() or not processes_with("RANK=1", str(out)):
        assert time.monotonic() < end
        time.sleep(0.1)
    (victim,) = processes_with("RANK=1", str(out))
    os.kill(victim, signal.SIGKILL)
    waiting.wait()
    log = Path(read_attempt(folder, 1).log).read_text()
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
