"""Collect results and logs of a board in a folder to publish, or check that such a record is consistent."""

from dataclasses import dataclass
from pathlib import Path

from bench.options import CommandOptions, Positional

EPILOG = """A record holds everything that the numbers are based on except weights and images: result files with their
values for every image, logs, descriptions of the checkpoints, tables and BibTeX. Paths of this machine are
removed from all texts. The same results give the same bytes. --check compares the sums, computes every metric and
interval from the values of the images again, and compares leaderboard.csv.

examples:
  bench record results --to published
  bench record --check published

exit codes of --check: 0 everything agrees; 1 it does not, with a line for each difference
"""


@dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """Options of `bench record`."""

    out: Positional[Path | None] = None  # OUT: folder that `bench run` wrote to
    to: Path | None = None  # DIR: write the record there; an older record is replaced
    check: Path | None = None  # DIR: check a record


def run(options: Options) -> int:
    """0: written, or everything agrees; 1: a check found a difference."""
    from bench.reports.record import check_record, write_record
    from bench.results.record import check_folder
    from engine.errors import UserError, command_line
    from engine.printing import counted, say

    if options.check and not (options.out or options.to):
        differences = list(check_record(options.check))
        say(*differences)
        agrees = "sums, numbers and leaderboard.csv agree with its arrays"
        say(f"{options.check}: {counted(len(differences), 'difference') if differences else agrees}")
        return int(bool(differences))
    if not options.out or not options.to:
        raise UserError("to", "give OUT --to DIR to write a record, or --check DIR alone to check one")
    check_folder(options.out)
    write_record(options.out, options.to)
    say(f"written: {options.to}; check it by: {command_line('record', check=options.to)}")
    return 0
