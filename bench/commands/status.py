"""Say how the jobs of --cluster are: what runs, waits, failed and finished, and what is left."""

from dataclasses import dataclass
from pathlib import Path

from bench.cli.options import CommandOptions

EPILOG = """examples:
  bench status --out results
  bench status --out runs/mae --json

exit codes: 0 all jobs are finished, wait or run; 1 some failed or were stopped; 2 an error
"""


@dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """Options of `bench status`."""

    out: Path  # DIR: folder that --out of the jobs named
    json: bool = False  # print one JSON object instead


def run(options: Options) -> int:
    """0: all jobs are finished, wait or run; 1: some failed or were stopped."""
    import json

    from bench.cluster.status import rows_of, status_json, status_lines
    from engine.printing import say

    out = options.out
    if not (rows := rows_of(out)):
        raise ValueError(f"{out}: nothing was submitted from there; `bench run ... --out {out} --cluster slurm` does")
    say(*(json.dumps(status_json(rows), indent=2).split("\n") if options.json else status_lines(rows)))
    return int(any(row.state in ("failed", "stopped") for row in rows))
