"""Show the state of jobs submitted with --cluster: which run, wait, failed and finished, and what remains to do."""

from dataclasses import dataclass
from pathlib import Path

from bench.options import CommandOptions
from engine.errors import UserError

EPILOG = """examples:
  bench status --out results

exit codes: 0 all jobs finished, wait or run; 1 some failed; 2 an error
"""


@dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """Options of `bench status`."""

    out: Path  # DIR: the folder that was --out of the jobs


def run(options: Options) -> int:
    """0: all jobs finished, wait or run; 1: some failed or were stopped."""
    from bench.run.cluster import rows_of, status_lines
    from engine.printing import say

    out = options.out
    if not (rows := rows_of(out)):
        raise UserError("out", "no jobs were submitted with it; to submit them: bench run ... --cluster slurm", out)
    say(*status_lines(rows))
    return int(any(row.state == "failed" for row in rows))
