"""Jobs that train on one stream of images run together: how they are grouped, how each ends, how time is divided."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.run.sharing import grouped, run_together
from engine.tasks import Metric, Outcome, Shared, Task, Workspace
from engine.training.interruptions import Stopped

EXPORT, SPACE = object(), Workspace(cache=Path("."), data="")
OUTCOME = Outcome(metrics={"top1": Metric(value=1.0)})
CLOCK = [0.0]  # seconds; the last is the current time


@dataclass(frozen=True, kw_only=True)
class Streamed(Task):
    """A toy that ends after some steps of 6 s; its stream is its first letter, its name says how it ends."""

    name: str = "a1"
    steps: int = 1

    def shares(self, export, space):
        return Shared(together=together, stream=self.name[0]) if self.name[0] != "-" else Shared()


class OtherStreamed(Streamed):
    """Another task, whose streams have the same names."""

    def shares(self, export, space):
        return Shared(together=other_together, stream=self.name[0])


def other_together(tasks, export, space):
    yield from together(tasks, export, space)


def together(tasks, export, space):
    for step in range(1, max(task.steps for task in tasks) + 1):
        CLOCK.append(CLOCK[-1] + 6.0)
        for index, task in enumerate(tasks):
            if task.name == "breaks" and step == 2:
                raise RuntimeError("all that are left")
            if task.steps == step and task.name.endswith("stops"):
                raise Stopped.after(1, 2, "toys", Path("."))
            if task.steps == step:
                outcomes = {"fails": ValueError("alone"), "empty": Outcome(metrics={})}
                yield index, outcomes.get(task.name.partition("-")[2], OUTCOME)


def job(name, steps=1, state="new", url="digits:", key="toy"):
    kind = Streamed if key == "toy" else OtherStreamed
    chosen = SimpleNamespace(task=kind(name=name, steps=steps), key=key)
    return SimpleNamespace(
        chosen=chosen,
        path=Path(f"{name}-{url}{key}"),
        state=state,
        seed=0,
        data=SimpleNamespace(url=url),
        workspace=lambda space: space,
        network=lambda export: export,
    )


def names(groups):
    return [[job.chosen.task.name for job in group] for group, _ in groups]


def test_jobs_of_one_stream_task_image_set_and_state_are_one_group():
    failed = [job(name, state="failed before") for name in ("a6", "b3", "a7")]
    jobs = [
        *(job("-1"), job("a1"), job("b1"), job("-2"), job("a2")),
        *(job("a4", url="tiny:"), job("a5", key="other"), *failed, job("b2")),
    ]
    assert names(grouped(jobs, EXPORT, SPACE)) == [
        *(["-1"], ["a1", "b1", "a2", "b2"], ["-2"]),
        *(["a4"], ["a5"], ["a6", "a7"], ["b3"]),
    ]


def test_each_job_ends_by_itself_and_the_time_is_divided_among_running_jobs(monkeypatch):
    monkeypatch.setattr("time.perf_counter", lambda: CLOCK[-1])
    jobs = [job("a1", 3), job("a-fails", 1), job("a3", 2)]
    ended = [(job.chosen.task.name, outcome, seconds) for job, outcome, seconds in run_together(jobs, EXPORT, SPACE)]
    assert [(name, seconds) for name, _, seconds in ended] == [("a-fails", 2.0), ("a3", 5.0), ("a1", 11.0)]
    assert str(ended[0][1]) == "alone" and ended[1][1] == ended[2][1] == OUTCOME


def test_an_error_of_the_group_ends_the_jobs_that_still_run():
    ended = list(run_together([job("b1", 1), job("breaks", 3), job("b3", 3)], EXPORT, SPACE))
    assert [job.chosen.task.name for job, _, _ in ended] == ["b1", "breaks", "b3"]
    assert ended[0][1] == OUTCOME and [str(error) for _, error, _ in ended[1:]] == ["all that are left"] * 2


def test_an_outcome_without_metrics_is_an_error_of_its_job_alone():
    jobs = [job("a1", 1), job("a-empty", 2), job("a3", 3)]
    outcomes = {job.chosen.task.name: outcome for job, outcome, _ in run_together(jobs, EXPORT, SPACE)}
    assert outcomes["a1"] == outcomes["a3"] == OUTCOME and "no metrics" in str(outcomes["a-empty"])


def test_a_stop_is_no_failure():
    ended = run_together([job("s1", 1), job("s-stops", 2)], EXPORT, SPACE)
    assert next(ended)[1] == OUTCOME
    with pytest.raises(Stopped):
        next(ended)
