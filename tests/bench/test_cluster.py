"""`--cluster`: options, the jobs that a run becomes, what SLURM is asked for, and what `bench status` says of them."""

import argparse
import fcntl
import json
import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from elsewhere import program

from bench.cli.main import parsed
from bench.cli.options import YEAR, cluster_of, minutes_of
from bench.cluster.status import KILLED, Durations, TaskRow, rows_of, total_remaining
from bench.cluster.submit import argv_of, words_of_run
from bench.cluster.task import (
    AttemptState,
    Submission,
    TaskRecord,
    lock_of,
    new_folder,
    now,
    submissions,
    write_attempt,
    write_submission,
)
from bench.commands.run import Options
from bench.results.record import read_result
from bench.run.prepare import prepare

QUEUE = "PENDING"  # what the fake squeue says of every job


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """SLURM's programs, which only note what they are given: sbatch takes every job, squeue says QUEUE of them."""
    programs = tmp_path / "programs"
    programs.mkdir()
    said = tmp_path / "said"
    texts = {
        "srun": "",
        "sbatch": f'cp "$1" {tmp_path}/script; echo "Submitted batch job 77"',
        "squeue": f"cat {said} 2>/dev/null",
    }
    for name, text in texts.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return tmp_path


def options(*words: str) -> Options:
    return parsed(["run", "--checkpoint", "x", "--suite", "knn", "--out", "o", *words])[1]


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90), ("1:30", 2), ("2:00:00", 120), ("1-0", 1440), ("2-12:30", 3630), ("0-1:00:30", 61)],
)
def test_times_are_those_of_sbatch(text, minutes):
    assert minutes_of(text) == minutes


@pytest.mark.parametrize("text", ["", "0", "x", "1:2:3:4", "1h"])
def test_other_times_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        minutes_of(text)


def test_options_are_one_value():
    found = cluster_of(options("--cluster", "slurm", "--gpus", "8", "--jobs", "3", "--time", "2:00:00"))
    assert (found.cluster, found.gpus, found.processes, found.jobs, found.minutes) == ("slurm", 8, 8, 3, 120)
    here = cluster_of(options("--cluster", "local", "--processes", "2"))
    assert (here.jobs, here.processes, here.gpus, here.minutes) == (1, 2, 0, YEAR)
    assert cluster_of(options()) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "2"], "--gpus without --cluster"),
        (["--cluster", "local", "--partition", "p"], "--partition is an option of --cluster slurm"),
        (["--cluster", "slurm", "--slurm", "no value here"], "--slurm no value here: write KEY=VALUE"),
    ],
)
def test_options_that_do_not_fit_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        cluster_of(options(*words))


def test_a_command_becomes_the_words_that_mean_the_same():
    words = ["--data", "a=digits:", "b=x:y", "--limit", "3", "--skip-bad", "--no-keep-memory", "--cluster", "slurm"]
    meant = replace(options(*words), checkpoint=("y",), suite="knn@dino")
    assert parsed(argv_of("run", meant))[1] == replace(meant, cluster=None)


@pytest.mark.parametrize(
    ("suite", "data", "change"),
    [
        ("logreg@dinov2", "digits=digits:", "logreg.holdout=0.2"),  # a family of lowshot's file
        (
            "segmentation_linear@smoke",
            "voc=tiny-voc:",
            "segmentation_linear.steps=3",
        ),  # serves another layout
    ],
)
def test_a_job_has_the_images_and_changes_of_its_protocols(exports, tmp_path, suite, data, change):
    words = ["run", "--checkpoint", str(exports[0]), "--out", str(tmp_path), "--suite", suite, "--data", data]
    arguments = parsed([*words, "--set", change, "knn.k=5", "--cluster", "local"])[1]
    (checkpoint, jobs), *_ = prepare(replace(arguments, set=(change,))).jobs
    found = parsed(words_of_run(arguments, checkpoint, jobs))[1]
    assert (found.suite, found.data, found.set, found.cluster) == (suite, (data,), (change,), None)


def submit(bench, toys, exports, out, *words):
    given = ("--suite", "all_toys,dear@two", "--data", "tiny=tiny:", "--set", "toy.rate=0.25", "dear@two.k=3")
    return bench("run", "--checkpoint", *exports, *given, "--out", out, "--cluster", "slurm", *words)


def test_a_run_becomes_jobs_cheap_ones_first(slurm, bench, toys, exports):
    out = slurm / "out"
    code, said, _ = submit(bench, toys, exports, out, "--partition", "p", "--gpus", "4", "--jobs", "2", "--mem", "9G")
    assert code == 0 and "8 jobs of 4 processes with 4 GPUs per node submitted, at most 2 at once" in said
    ((_, submission),) = submissions(out)
    titles = [
        f"{name}: {task}@{way}" for task in ("toy", "dear") for name in ("first", "second") for way in ("one", "two")
    ]
    assert [task.title for task in submission.tasks] == titles
    assert [task.job for task in submission.tasks] == [f"77_{number}" for number in range(8)]
    words = parsed(submission.tasks[1].words)[1]
    assert (words.suite, words.name, words.set, words.cluster) == ("toy@two", ("first",), ("toy.rate=0.25",), None)
    assert [task.words.count("dear@two.k=3") for task in submission.tasks] == [0, 0, 0, 0, 0, 1, 0, 1]
    script = (slurm / "script").read_text()
    wanted = ("partition=p", "gpus-per-node=4", "ntasks-per-node=4", "array=0-7%2", "mem=9G", "requeue", "time=1440")
    assert all(f"#SBATCH --{each}\n" in script for each in wanted), script
    assert not list((out / "results").rglob("*.json"))


def test_protocols_that_share_features_or_a_stream_are_one_job(slurm, bench, exports):
    """Two read one transform's features, two train on one stream, one does neither."""
    suite = "knn@dino,lowshot@bench,linear_sgd@moca,linear@dino,finetune@smoke"
    words = ("--suite", suite, "--data", "digits=digits:", "--out", slurm / "out", "--cluster", "slurm")
    code, _, said = bench("run", "--checkpoint", exports[0], *words)
    assert code == 0, said
    ((_, submission),) = submissions(slurm / "out")
    assert sorted(sorted(parsed(task.words)[1].suite.split(",")) for task in submission.tasks) == [
        ["finetune@smoke"],
        ["knn@dino", "lowshot@bench"],
        ["linear@dino", "linear_sgd@moca"],
    ]


def test_what_is_submitted_or_done_is_not_submitted_again(slurm, bench, toys, exports):
    out = slurm / "out"
    bench("run", "--checkpoint", exports[0], "--suite", "toy@one", "--data", "tiny=tiny:", "--out", out)
    submit(bench, toys, exports[:1], out)
    assert len(submissions(out)[0][1].tasks) == 4  # toy.rate is another one
    (slurm / "said").write_text("".join(f"77_{number}|PENDING|Priority\n" for number in range(3)))
    code, said, _ = submit(bench, toys, exports[:1], out)
    assert code == 0 and "3 jobs are submitted already" in said
    assert [task.title for task in submissions(out)[1][1].tasks] == ["first: dear@two"]


def test_a_pretraining_is_one_job_which_resumes(slurm, bench):
    out = slurm / "run"
    words = ("pretrain", "mae", "--recipe", "smoke", "--images", "digits:", "--out", out)
    code, said, _ = bench(*words, "--cluster", "slurm", "--nodes", "4", "--gpus", "8", "--slurm", "constraint=a100")
    assert code == 0 and "1 job of 32 processes on 4 nodes with 8 GPUs per node submitted" in said
    ((_, submission),) = submissions(out)
    (job,) = submission.tasks
    assert job.words == (*map(str, words[:2]), "--recipe=smoke", "--images=digits:", f"--out={out}", "--resume")
    script = (slurm / "script").read_text()
    assert all(f"#SBATCH --{each}\n" in script for each in ("nodes=4", "ntasks-per-node=8", "constraint=a100"))
    (slurm / "said").write_text("77|RUNNING|None\n")
    code, _, said = bench(*words, "--cluster", "slurm")
    assert code == 2 and "it is submitted already" in said


def test_a_pretraining_has_no_number_of_jobs(slurm, bench):
    words = ("pretrain", "mae", "--recipe", "smoke", "--images", "digits:", "--out", slurm / "run")
    code, _, said = bench(*words, "--cluster", "slurm", "--jobs", "4")
    assert code == 2 and "--jobs 4" in said and "--nodes" in said
    assert not submissions(slurm / "run")


def test_a_refusal_of_slurm_is_one_line_and_leaves_nothing(slurm, bench, toys, exports):
    (slurm / "programs" / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: no such partition' >&2; exit 1\n")
    code, _, said = submit(bench, toys, exports, slurm / "out")
    warning, *lines = said.splitlines()
    assert code == 2 and "'broken'" in warning and lines == ["bench: error: --cluster slurm: no such partition"]
    assert submissions(slurm / "out") == [] and not list((slurm / "out/cluster").glob("*/"))


def test_without_slurm_the_line_says_what_else(bench, toys, exports, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, said = submit(bench, toys, exports, tmp_path / "out")
    assert code == 2 and "sbatch is not installed here" in said and "--cluster local" in said


def task(number: int) -> TaskRecord:
    results = (f"results/n/d/{number}.json",)
    return TaskRecord(number=number, title=f"net: toy@{number}", words=("run",), results=results, job=f"5_{number}")


def record(out, cluster: str, count: int):
    folder = new_folder(out)
    tasks = tuple(map(task, range(count)))
    write_submission(folder, Submission(cluster=cluster, date=now(), at_once=1, tasks=tasks))
    return folder


def test_states_are_what_jobs_and_scheduler_say(slurm, bench):
    out = slurm / "out"
    folder = record(out, "slurm", 7)
    log = folder / "logs" / "5_3_0_log.out"
    log.parent.mkdir()
    log.write_text("some text\nbench: error: no memory\nmore text\n")
    (log.parent / "5_3_1_log.out").write_text("nothing\n")
    begun = AttemptState(stage="running", begun=now(), host="node7", log=str(log))
    for number, attempt in {
        0: replace(begun, stage="ended", code=0, ended=now()),
        1: begun,
        3: replace(begun, stage="ended", code=2, ended=now()),
        4: begun,
        5: replace(begun, stage="stopped", code=75, ended=now()),
        6: begun,
    }.items():
        write_attempt(folder, number, attempt)
    states = {1: "RUNNING|None", 2: "PENDING|Resources", 6: "OUT_OF_MEMORY|None"}
    (slurm / "said").write_text("".join(f"5_{number}|{state}\n" for number, state in states.items()))
    rows = rows_of(out)
    assert [row.state for row in rows] == ["finished", "running", "waiting", "failed", "failed", "stopped", "failed"]
    assert [rows[number].reason for number in (2, 3)] == ["Resources", "no memory"]
    assert KILLED in rows[4].reason and "more memory than --mem" in rows[6].reason
    code, said, _ = bench("status", "--out", out)
    assert code == 1 and said.splitlines()[-1] == "1 finished, 1 running, 1 waiting, 1 stopped, 3 failed"
    assert f"log: {log}" in said and "job 5_1" in said and "on node7" in said
    code, said, _ = bench("status", "--out", out, "--json")
    assert [each["state"] for each in json.loads(said)["tasks"]] == [row.state for row in rows]


def test_local_jobs_live_as_long_as_their_locks(tmp_path):
    folder = record(tmp_path, "local", 3)
    write_attempt(folder, 0, AttemptState(stage="running", begun=now()))
    with open(lock_of(folder), "w") as queue, open(lock_of(folder, 0), "w") as first:
        fcntl.flock(queue, fcntl.LOCK_EX)
        fcntl.flock(first, fcntl.LOCK_EX)
        assert [row.state for row in rows_of(tmp_path)] == ["running", "waiting", "waiting"]
    assert [row.state for row in rows_of(tmp_path)] == ["failed", "stopped", "stopped"]


def test_a_later_submission_takes_results_over(tmp_path):
    record(tmp_path, "local", 3)
    record(tmp_path, "local", 2)
    assert [(len(row.submission.tasks), row.task.number) for row in rows_of(tmp_path)] == [(3, 2), (2, 0), (2, 1)]


def test_jobs_with_the_same_number_in_two_submissions_both_count():
    submission = Submission(cluster="local", date=now(), at_once=1, tasks=())
    rows = [
        TaskRow(task=replace(task(0), expected=seconds), submission=submission, state="waiting", attempt=None)
        for seconds in ({}, {"results/n/d/0.json": 60.0})
    ]
    durations = Durations.of(rows)
    assert total_remaining(rows, durations) is None  # nothing is known of the first
    assert total_remaining(rows[1:], durations) == 60


def test_a_folder_without_jobs_is_one_line(tmp_path, bench):
    code, _, said = bench("status", "--out", tmp_path)
    assert code == 2 and "no jobs were submitted with this --out" in said


@pytest.mark.slow
def test_local_jobs_run_two_at_once_and_end_as_a_plain_run(bench, toys, toy_packages, exports, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{toy_packages}{os.pathsep}{os.environ.get('PYTHONPATH', os.getcwd())}")
    out = tmp_path / "out"
    (out / "cache").mkdir(parents=True)
    (out / "cache" / "fail dear").touch()
    words = ("run", "--checkpoint", exports[0], "--suite", "toy@one,dear@one", "--data", "tiny=tiny:", "--out", out)
    code, said, _ = bench(*words, "--cluster", "local", "--jobs", "2")
    assert code == 1 and "1 done, 0 stopped, 1 failed" in said, said
    assert "first: dear@one: failed: RuntimeError: the toy was told to fail" in said
    code, said, _ = bench("status", "--out", out)
    assert code == 1 and said.splitlines()[-1] == "1 finished, 1 failed"
    (out / "cache" / "fail dear").unlink()
    code, said, _ = bench(*words, "--cluster", "local", "--processes", "2")
    assert code == 0 and "1 jobs have a result, skipped" in said, said
    results = [read_result(path) for path in (out / "results").rglob("*.json")]
    assert {(each.status, each.processes) for each in results} == {("ok", 1), ("ok", 2)}
    assert [row.state for row in rows_of(out)] == ["finished", "finished"]
    assert [row.attempt.code for row in rows_of(out)] == [0, 0]


def processes_with(variable: str, words: str) -> list[int]:
    """Processes of this machine with a variable in their environment and words in their command."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            variables, command = (path / "environ").read_bytes(), (path / "cmdline").read_bytes()
            if variable.encode() in variables.split(b"\0") and words.encode() in command:
                found.append(int(path.name))
    return found


@pytest.mark.exhaustive  # that peers name it: tests/engine/test_peers.py
def test_a_killed_process_of_a_job_is_named(toy_packages, exports, tmp_path):
    out = tmp_path / "out"
    words = ["--suite", "toy@one", "--set", "toy.mode=wait", "--data", "tiny=tiny:", "--out", str(out)]
    path = os.pathsep.join([str(toy_packages), os.environ.get("PYTHONPATH", os.getcwd())])
    command = ("-m", "bench", "run", "--checkpoint", exports[0], *words, "--cluster", "local", "--processes", "2")
    process = program(*command, environment={"PYTHONPATH": path}, merged=True)
    end = time.monotonic() + 120
    while not (out / "cache" / "waiting").exists():
        assert time.monotonic() < end and process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    (victim,) = processes_with("RANK=1", f"--out={out}")
    os.kill(victim, signal.SIGKILL)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    assert f"first: toy@one: failed: process 1 of 2 (pid {victim}, host " in said and "killed by signal 9" in said
    assert "Traceback" not in said
    (row,) = rows_of(out)
    assert row.state == "failed" and row.reason.startswith("process 1 of 2")
