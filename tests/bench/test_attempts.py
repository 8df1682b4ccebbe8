"""Jobs of one stream run together: in which groups, how each ends, and whose time it was."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.run.runner import attempts, in_groups
from engine.tasks import Metric, Outcome, Task
from engine.training.interruptions import Stopped

EXPORT, SPACE = object(), None
CLOCK = [0.0]  # seconds, the last one the current


@dataclass(frozen=True, kw_only=True)
class Streamed(Task):
    """A toy that ends after some pauses; its stream is its first letter."""

    name: str = "a1"
    pauses: int = 1

    def stream(self, export, space):
        return self.name[0] if self.name[0] != "-" else ""

    @classmethod
    def together(cls, tasks, export, space):
        for pause in range(1, max(task.pauses for task in tasks) + 1):
            CLOCK.append(CLOCK[-1] + 6.0)
            for place, task in enumerate(tasks):
                if task.name == "breaks" and pause == 2:
                    raise RuntimeError("all that are left")
                if task.pauses == pause and task.name.endswith("stops"):
                    raise Stopped.after(1, 2, "toys", Path("."))
                if task.pauses == pause:
                    fails = task.name.endswith("fails")
                    yield place, ValueError("alone") if fails else Outcome(metrics={"top1": Metric(value=1.0)})


def job(name, pauses=1, state="new", url="digits:", key="toy"):
    chosen = SimpleNamespace(task=Streamed(name=name, pauses=pauses), key=key)
    return SimpleNamespace(chosen=chosen, path=Path(f"{name}-{url}{key}"), state=state, data=SimpleNamespace(url=url))


def names(jobs):
    return [[each.chosen.task.name for each in group] for group in jobs]


def test_jobs_of_one_stream_task_image_set_and_state_stand_together():
    jobs = [
        *(job("-1"), job("a1"), job("b1"), job("-2"), job("a2"), job("a3", state="done")),
        *(job("a4", url="tiny:"), job("a5", key="other"), job("a6", state="failed before"), job("b2")),
    ]
    assert names(in_groups(jobs, EXPORT, SPACE)) == [
        *(["-1"], ["a1", "a2"], ["b1", "b2"], ["-2"], ["a3"]),
        *(["a4"], ["a5"], ["a6"]),
    ]
    done = [job("a1", state="done"), job("a2", state="done")]
    assert names(in_groups(done, None, SPACE)) == [["a1"], ["a2"]]


def test_each_job_ends_by_itself_and_time_is_divided(monkeypatch):
    """The sum over jobs is what all took."""
    monkeypatch.setattr("time.perf_counter", lambda: CLOCK[-1])
    jobs = [job("a1", 3), job("a-fails", 1), job("a3", 2)]
    found = list(attempts(jobs, EXPORT, SPACE))
    assert [(each.chosen.task.name, str(attempt.error), attempt.seconds) for each, attempt in found] == [
        ("a-fails", "alone", 2.0),
        ("a3", "None", 2.0 + 3.0),
        ("a1", "None", 2.0 + 3.0 + 6.0),
    ]


def test_an_error_of_all_ends_those_that_are_left():
    found = list(attempts([job("b1", 1), job("breaks", 3), job("b3", 3)], EXPORT, SPACE))
    assert [(each.chosen.task.name, str(attempt.error)) for each, attempt in found] == [
        ("b1", "None"),
        ("breaks", "all that are left"),
        ("b3", "all that are left"),
    ]


def test_a_stop_is_no_failure():
    found = attempts([job("s1", 1), job("s-stops", 2)], EXPORT, SPACE)
    assert next(found)[1].error is None
    with pytest.raises(Stopped):
        next(found)
