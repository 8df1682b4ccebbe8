"""`bench run --dry-run`: what a run would do, in numbers, and with which settings. Nothing is run or written."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from shlex import quote
from textwrap import wrap
from typing import Any

from bench.cli.settings import setting_text
from bench.run.forecast import Forecast, text_of_forecast
from bench.run.plan import Job, problem_of
from bench.run.suites import ChosenProtocol
from checkpoints.frozen import FrozenSpec
from engine.printing import say
from engine.tasks import Workspace

STATES: Mapping[str, str] = {"new": "to do", "failed before": "failed before, to do again", "done": "exists"}
INDENT = " " * 6
MAX_SHOWN = 8  # protocols whose settings are shown


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A job and what it would do."""

    job: Job
    images: Mapping[str, int]  # split -> images that it would read
    sizes: Mapping[str, Any] = field(default_factory=dict)  # what it would do in numbers, by name
    problem: str = ""  # why it would fail
    forecast: Forecast | None = None  # what that takes

    def lines(self, width: int) -> Iterator[str]:
        """Three lines, the last where the task counts its work; more if one is longer than `width`."""
        counts = " + ".join(f"{count} {split}" for split, count in self.images.items())
        yield f"  {self.job.title}: {counts} images, {STATES[self.job.state]}"
        # A name and its value stay on one line.
        words = [f"{name} {value}".replace(" ", "\N{NO-BREAK SPACE}") for name, value in self.sizes.items()]
        yield from _wrapped(f"would fail: {self.problem}" if self.problem else ", ".join(words), width)
        if self.forecast and self.forecast.work.parts and not self.problem:
            yield from _wrapped(text_of_forecast(self.forecast), width)


def planned(job: Job, spec: FrozenSpec, space: Workspace, forecast: Forecast | None = None) -> Planned:
    """What a job would do with a network of this architecture."""
    images = job.images
    problem = problem_of(job, spec, space)
    if problem or job.state == "done":
        return Planned(job=job, images=images, problem=problem)
    return Planned(job=job, images=images, sizes=job.chosen.task.sizes(spec, images), forecast=forecast)


def show(
    plans: Mapping[str, Sequence[Planned]], unavailable: Sequence[str], selected: Sequence[ChosenProtocol], width: int
) -> int:
    """Print the plans, by title of the checkpoint. Returns 1 if a checkpoint or a task would fail."""
    say(*settings_lines(selected, width))
    for title, entries in plans.items():
        say(title, *(line for entry in entries for line in entry.lines(width)))
    for reason in unavailable:
        say(f"cannot be used: {reason}")
    everything = [entry for entries in plans.values() for entry in entries]
    if sum("forward passes" in entry.sizes for entry in everything) > 1:
        say("tasks that read the same features share their forward passes")
    failing = sum(bool(entry.problem) for entry in everything)
    would_fail = f", of which {failing} would fail" if failing else ""
    timed = [entry.forecast.seconds is not None for entry in everything if entry.forecast and entry.job.state != "done"]
    if not all(timed):
        unknown = f"of {timed.count(False)} of {len(timed)} jobs" if any(timed) else "of these jobs"
        say(f"the time {unknown} is not known: bench plan, with the same options, measures it")
    to_do = sum(entry.job.state != "done" for entry in everything)
    say(f"{to_do} to do{would_fail}; nothing was run or written (--dry-run)")
    return 1 if failing or unavailable else 0


def settings_lines(selected: Sequence[ChosenProtocol], width: int) -> Iterator[str]:
    """All settings of every protocol, as `--set` takes them; of many protocols, the command that lists them."""
    if len(selected) > MAX_SHOWN:
        yield f"settings of these {len(selected)} protocols: bench list PROTOCOL"
        return
    yield "settings; what they mean: bench list PROTOCOL"
    for chosen in selected:
        values = [f"{each.name}={quote(setting_text(getattr(chosen.task, each.name)))}" for each in fields(chosen.task)]
        yield f"  {chosen.name}, version {chosen.protocol.version}{' (modified)' if chosen.changes else ''}"
        yield from _wrapped(" ".join(values), width)


def _wrapped(text: str, width: int) -> list[str]:
    lines = wrap(
        text,
        max(width, 60),
        initial_indent=INDENT,
        subsequent_indent=INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]
