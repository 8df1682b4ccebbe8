"""Show the state of jobs submitted with --cluster: which run, wait, failed and finished, and what remains to do."""

import json
from dataclasses import dataclass
from pathlib import Path

from bench.options import CommandOptions
from engine.errors import UserError

EPILOG = """examples:
  bench status --out results
  bench status --out runs/mae --json

exit codes: 0 all jobs finished, wait or run; 1 some failed or were stopped; 2 an error
"""


@dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """Options of `bench status`."""

    out: Path  # DIR: the folder that was --out of the jobs
    json: bool = False  # print a JSON list instead


def run(options: Options) -> int:
    """0: all jobs finished, wait or run; 1: some failed or were stopped."""
    from bench.cluster import rows_of, status_json, status_lines
    from engine.printing import say

    out = options.out
    if not (rows := rows_of(out)):
        raise UserError("out", "no jobs were submitted with it; to submit them: bench run ... --cluster slurm", out)
    say(*(json.dumps(status_json(rows), indent=2).split("\n") if options.json else status_lines(rows)))
    return int(any(row.state in ("failed", "stopped") for row in rows))
