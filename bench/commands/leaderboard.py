"""Rebuild and print the leaderboard."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench.options import CommandOptions

EPILOG = """formats:
  csv      leaderboard.csv: a row for each checkpoint; always written
  markdown leaderboard.md: tables with intervals; always written
  latex    leaderboard.tex: booktabs tables, mean and deviation over seeds, the best and its ties bold
  html     leaderboard.html: the page of bench report without figures and pictures
  parquet  results.parquet: every number with settings, data and versions, for DuckDB or pandas

examples:
  bench leaderboard --out results --published
  bench leaderboard --out results --format latex html
"""


@dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """Options of `bench leaderboard`."""

    out: Path  # DIR: folder that `bench run` wrote to
    published: bool = False  # show papers' numbers of the same protocols and images, marked, in all but csv and parquet
    # additional files to write: csv, markdown, latex, html, parquet
    format: tuple[Literal["csv", "markdown", "latex", "html", "parquet"], ...] = ()


def run(options: Options) -> int:
    """0, even if a result file is damaged: it is reported, and the board is made of the others."""
    from bench.api import leaderboard as rebuilt
    from bench.reports.leaderboard import read_leaderboard, to_terminal
    from engine.printing import say

    write_error: OSError | None = None
    try:
        leaderboard = rebuilt(options.out, published=options.published, formats=options.format)
    except OSError as error:  # a read-only folder or a full disk: the tables can still be printed
        leaderboard, write_error = read_leaderboard(options.out, options.published), error
    say(*to_terminal(leaderboard, width=shutil.get_terminal_size().columns).split("\n"))
    if options.published and not leaderboard.published:
        say("", "no published number was measured by these protocols, unchanged, on the same image sets", errors=True)
    if write_error:
        raise write_error
    say("", f"written: {', '.join(map(str, leaderboard.files.values()))}", errors=True)
    return 0
