"""Progress on a terminal and in a log, with a clock that the test moves."""

import io
import re
import time

import pytest

from engine import printing
from engine import progress as progress_module
from engine.printing import say
from engine.progress import Progress, process_age, span


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> Clock:
    """The time, which passes only where a test moves it."""
    clock = Clock()
    monkeypatch.setattr(progress_module, "clock", clock)
    monkeypatch.setattr(progress_module, "LOOK_EVERY", 3600.0)
    return clock


class Terminal(io.StringIO):
    def isatty(self):
        return True


def printed(stream, steps, total=100, before=0):
    """The output of steps of (seconds, units) after `before` units of an earlier run."""
    clock = progress_module.clock
    with Progress("features", total, stream=stream) as progress:
        progress.resume(before)
        for seconds, count in steps:
            clock.now += seconds
            progress.advance(count)
    return stream.getvalue()


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_short_work_prints_nothing(stream):
    assert printed(stream(), [(0.5, 30)] * 3) == ""


def test_a_log_has_lines_after_two_seconds_and_then_every_eight():
    lines = printed(io.StringIO(), [(1, 1)] * 20).splitlines()
    assert lines == [
        "features: 2/100 images, 1.0 images/s, 1 min 38 s left",
        "features: 10/100 images, 1.0 images/s, 1 min 30 s left",
        "features: 18/100 images, 1.0 images/s, 1 min 22 s left",
        "features: 20 of 100 images in 20 s",
    ]


def test_parts_are_reported_as_units_and_a_fraction(clock):
    """As forward passes of an accumulated step that takes minutes."""
    stream = io.StringIO()
    with Progress("training", 24, "steps", parts=16, stream=stream) as progress:
        progress.resume(16)
        for _ in range(20):
            clock.now += 34
            progress.advance(1)
    first, second, *_ = lines = stream.getvalue().splitlines()
    assert first == "training: 1/24 steps and 1/16 of the next, 9 min 04 s each, unknown time left"
    assert second.endswith("1/24 steps and 2/16 of the next, 9 min 04 s each, 3 h 27 min left")
    assert lines[15].startswith("training: 2/24 steps, 9 min 04 s each")
    assert lines[-1] == "training: 2 of 24 steps, 1 of them now, in 11 min 20 s"


def lines_of(text):
    """The lines that were drawn, without control sequences of a terminal (ECMA-48)."""
    return [
        line.strip()
        for line in re.split(r"[\r\n]|\x1b\[2K", re.sub(r"\x1b\[(?!2K)[0-9;?]*[a-zA-Z]", "", text))
        if line.strip()
    ]


def test_a_terminal_shows_one_line_that_is_rewritten(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    text = printed(Terminal(), [(2.5, 50), (0.01, 1), (2.5, 49)])
    drawn = list(dict.fromkeys(lines_of(text)))
    assert len(drawn) == 3  # the second step came too soon after the first to be drawn
    assert drawn[0].startswith("features \u2501") and drawn[0].endswith(
        "50/100 images, 20.0 images/s, unknown time left"
    )
    assert "100/100 images" in drawn[1]
    assert text.endswith("features: 100 of 100 images in 5 s\n")


def test_a_line_fits_a_narrow_terminal(monkeypatch):
    """A longer one would be left behind, line by line, as only its last row is erased."""
    monkeypatch.setenv("COLUMNS", "50")
    drawn = lines_of(printed(Terminal(), [(2.5, 50), (2.5, 49)]))
    assert len(drawn) > 1 and all(len(line) <= 50 for line in drawn[:-1])


def test_resumed_work_counts_from_the_beginning():
    """Rate and remaining time are those of this run alone."""
    lines = printed(io.StringIO(), [(1, 1)] * 12, before=88).splitlines()
    assert lines == [
        "features: 90/100 images, 1.0 images/s, 10 s left",
        "features: 98/100 images, 1.0 images/s, 2 s left",
        "features: 100 of 100 images, 12 of them now, in 12 s",
    ]
    assert "65/100 images, 2.0 images/s" in printed(Terminal(), [(0.5, 1), (2, 4)], before=60)


def test_the_remaining_time_ignores_the_first_units():
    """They wait for the loaders, and by their rate a run of seconds would be announced as a quarter of an hour."""
    lines = printed(io.StringIO(), [(9, 1), (30, 60), (1, 39)], total=100).splitlines()
    assert lines[:2] == [
        "features: 1/100 images, 0.1 images/s, unknown time left",
        "features: 61/100 images, 1.6 images/s, 20 s left",
    ]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_message_is_printed_above_the_bar(rank, clock, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    stream = Terminal()
    with Progress("features", 10, stream=stream) as progress:
        clock.now += 3
        progress.advance(4)
        progress.say("warning: odd")
        clock.now += 3
        progress.advance(6)
    lines = [line for line in lines_of(stream.getvalue()) if "\u2501" not in line]
    assert lines == ([] if rank == "1" else ["warning: odd", "features: 10 of 10 images in 6 s"])


def test_finished_work_is_reported_before_later_output(clock):
    """A training in a generator has its results printed between its last unit and its end."""
    stream = io.StringIO()
    with Progress("heads", 10, "steps", parts=2, stream=stream) as progress:
        clock.now += 3
        progress.advance(10)
        progress.advance(10)
        stream.write("top1 20.00\n")
        clock.now += 60
        progress.advance(0)
    assert stream.getvalue().splitlines()[1:] == ["heads: 10 of 10 steps in 3 s", "top1 20.00"]
    stream = io.StringIO()
    assert printed(stream, [(5, 100)]) == "features: 100 of 100 images in 5 s\n"  # and no line before it


def test_nothing_is_silent_between_two_units_or_around_all_work(monkeypatch):
    """In real time, as the lines come from a thread: the work inside, then that around it unless something is said."""
    monkeypatch.setattr(progress_module, "clock", time.monotonic)
    for name, seconds in {"SILENT_FOR": 0.1, "HEARTBEAT": 0.3, "LOOK_EVERY": 0.02}.items():
        monkeypatch.setattr(progress_module, name, seconds)
    around, inside = io.StringIO(), io.StringIO()

    def wait_for(stream, lines):
        end = time.monotonic() + 30
        while len(stream.getvalue().splitlines()) < lines and time.monotonic() < end:
            time.sleep(0.01)
        return stream.getvalue().splitlines()[lines - 1]

    with Progress("bench run", None, stream=around):
        with Progress("fits", 2, "fits", stream=inside) as fits:
            fits.advance(1)
            assert wait_for(inside, 2).startswith("fits: 1/2 fits")
            assert not around.getvalue()
            fits.advance(1)
        said = time.monotonic()
        say("a line")
        assert re.fullmatch(r"bench run: \d+ s so far", wait_for(around, 1)) and time.monotonic() - said >= 0.3
    assert (
        inside.getvalue().splitlines()[-1].startswith("fits: 2 of 2 fits") and len(around.getvalue().splitlines()) == 1
    )


def test_the_imports_of_a_command_count(clock, monkeypatch):
    monkeypatch.setattr(printing, "last_line", 0.0)
    stream = io.StringIO()
    with Progress("bench run", None, spent=7.0, stream=stream) as progress:
        clock.now += 1.5
        progress.advance(0)
    assert stream.getvalue() == "bench run: 8 s so far\n" and 0 < process_age() < 1e6


@pytest.mark.parametrize(("parts", "advanced", "units"), [(1, 4, 4), (2, 12, 6)])
def test_an_error_is_raised_and_reported_as_a_stop(parts, advanced, units, clock):
    """Also where more parts are done than there are units."""
    stream = io.StringIO()
    with pytest.raises(KeyError), Progress("features", 10, parts=parts, stream=stream) as progress:
        clock.now += 3
        progress.advance(advanced)
        raise KeyError
    assert stream.getvalue().splitlines()[-1] == f"features: {units} of 10 images in 3 s, stopped"


@pytest.mark.parametrize(
    ("seconds", "text"), [(8.4, "8 s"), (59.6, "1 min 00 s"), (7500, "2 h 05 min"), (583 * 3600, "24 d 07 h")]
)
def test_durations_are_shown_in_two_units(seconds, text):
    assert span(seconds) == text
