"""Say what is installed, what is missing and how to fix it."""

import argparse
import json
from dataclasses import asdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench doctor`."""
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of lines")


def run(arguments: argparse.Namespace) -> int:
    """0: `bench run` can work here; 1: it cannot."""
    from bench.cli.output import table
    from bench.doctor import can_run, examine
    from engine.printing import say

    checks = examine()
    good = can_run(checks)
    if arguments.json:
        say(*json.dumps({"usable": good, "checks": [asdict(check) for check in checks]}, indent=1).split("\n"))
        return 0 if good else 1
    rows = []
    for check in checks:
        mark = check.mark.upper() if check.mark == "missing" and check.needed else check.mark
        rows.append((mark, check.name, check.text))
        rows += [("", "", f"fix: {check.fix}")] if check.fix else []
    say(*table(rows))
    say("", "usable: nothing that bench run needs is missing" if good else "not usable until what is MISSING is fixed")
    return 0 if good else 1
