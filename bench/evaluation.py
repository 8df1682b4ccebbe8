"""Run jobs, and show what came out: the leaderboard, comparisons with published numbers, and how the jobs ended."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

from bench.options import EvaluationOptions
from bench.published.values import against_published
from bench.reports.leaderboard import to_terminal, write_leaderboard
from bench.run.runner import Tally, run_jobs
from engine.extensions import extensions, load_extension
from engine.printing import say


def evaluate(options: EvaluationOptions, show: bool = True) -> Tally:
    """Run all jobs, write the leaderboard of the folder and return how the jobs ended. ValueError for invalid options.

    The leaderboard is written after an error and a signal, too. show: print its tables that have results of these jobs.
    """
    tally = Tally()
    try:
        run_jobs(options, tally)
    finally:
        if tally.jobs and tally.is_rank0:
            say(*_published_lines(tally))
            _write_leaderboard(options.out, tally, show)
    if tally.is_rank0:
        _say_ending(options.out, tally)
    return tally


def _published_lines(tally: Tally) -> Iterator[str]:
    """A line for each number that is published for the same weights."""
    for result, facts in tally.results:
        digests = [result.checkpoint.digest, *filter(None, [facts.get("source_sha256")])]
        for line in against_published(result, digests, branch_of(facts)):
            yield f"{result.checkpoint.name}, {result.protocol.name} on {result.data.name}: {line}"


def branch_of(facts: Mapping[str, Any]) -> str:
    """The branch of its file that an export is, such as `student`; "" for its importer's default."""
    name, importer = str(facts.get("branch") or ""), str(facts.get("importer"))
    if not name or importer not in extensions("importers"):
        return ""
    return "" if name == next(iter(load_extension("importers", importer).BRANCHES)) else name


def _write_leaderboard(out: Path, tally: Tally, show: bool) -> None:
    leaderboard, paths = write_leaderboard(out), {job.path for job in tally.jobs}
    results = [stored.result for stored in leaderboard.results if stored.path in paths]
    groups = {result.group for result in results if result.status == "ok"}
    if show:
        say("", *to_terminal(leaderboard, get_terminal_size().columns, groups).split("\n"), "")


def _say_ending(out: Path, tally: Tally) -> None:
    """Print the failed jobs, the numbers of jobs and where the leaderboard is."""
    say(*(f"failed: {line}" for line in tally.failed))
    left_out = f"{tally.left_out} left out (above), " if tally.left_out else ""
    counts = f"{tally.done} done, {tally.skipped} skipped, {left_out}{len(tally.failed)} failed"
    say(f"{counts}; see {out / 'leaderboard.md'}")
    if tally.failed:
        say("tracebacks are in the .log files next to the failed results; run the same command again to retry them")
