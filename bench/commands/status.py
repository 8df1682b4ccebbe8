"""Say how the jobs of --cluster are: what runs, waits, failed and finished, and what is left."""

import argparse
from pathlib import Path

EPILOG = """examples:
  bench status --out results
  bench status --out runs/mae --json

exit codes: 0 all jobs are finished, wait or run; 1 some failed or were stopped; 2 an error
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench status`."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder that --out of the jobs named")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(arguments: argparse.Namespace) -> int:
    """0: all jobs are finished, wait or run; 1: some failed or were stopped."""
    import json

    from bench.cluster.status import rows_of, status_json, status_lines
    from engine.printing import say

    out = arguments.out
    if not (rows := rows_of(out)):
        raise ValueError(f"{out}: nothing was submitted from there; `bench run ... --out {out} --cluster slurm` does")
    say(*(json.dumps(status_json(rows), indent=2).split("\n") if arguments.json else status_lines(rows)))
    return int(any(row.state in ("failed", "stopped") for row in rows))
