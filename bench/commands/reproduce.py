"""Say how published numbers are measured here, and how far the measured ones are from them."""

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench.cli.settings import positive_integer

if TYPE_CHECKING:
    from bench.reproduce import Setup

EPILOG = """examples:
  bench reproduce                                   the tables, and how much of each is within reach
  bench reproduce --summary                         the same counted, and what is out of reach, and why
  bench reproduce moca:table5j --out results        value by value: published, measured, the commands
  bench reproduce moca:table5j --checkpoints moca-b=/data/moca.pth --data imagenet=imagenet:/data/ILSVRC --out results
  bench reproduce --plan moca:table5j --out results > script.sh
  bench reproduce --plan today --gpus 8 > run.sh    eight networks of today by six protocols, with hours and disk
  bench reproduce today --out results               published beside measured, difference in standard errors
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench reproduce`."""
    add_several = partial(parser.add_argument, nargs="+", action="extend", default=[])
    parser.add_argument("table", nargs="?", metavar="TABLE", help="such as extrema:table7")
    parser.add_argument("--plan", metavar="TABLE", help="print a shell script that measures a table")
    parser.add_argument("--summary", action="store_true", help="count what is within reach, table by table")
    add_several(
        "--checkpoints",
        metavar="NAME=PATH",
        help="weights that you have, by the names that a table shows; what `bench run --checkpoint` takes",
    )
    add_several(
        "--data",
        metavar="NAME=URL",
        help="imagenet, imagenet22k (to pretrain on), ade20k, cityscapes, coco, voc, nyu, davis, copydays, ...",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("results"),
        metavar="DIR",
        help="folder of results and trainings, read and named in the commands (results)",
    )
    parser.add_argument(
        "--processes", "--gpus", type=positive_integer, default=1, metavar="N", help="of torchrun in the commands (1)"
    )
    group = parser.add_argument_group("of the plan `today`, whose protocols are not those of the suite `today`")
    group.add_argument(
        "--check", action="store_true", help="with `today`: say what is missing; exit code 1 for anything"
    )
    group.add_argument("--suite", metavar="S", help="protocols in place of the plan's six")
    group.add_argument("--assume", default="h100", metavar="MACHINE", help="h100 or a100, to count hours for (h100)")


def run(arguments: argparse.Namespace) -> int:
    """0 whatever was measured; 1 where --check finds something missing."""
    from bench.published.values import published_values, values_of
    from bench.reproduce import Setup, listing, named_checkpoints, named_data, script, summary, table_lines
    from bench.results.store import comparable_results
    from engine.printing import say

    modes = [bool(arguments.table), bool(arguments.plan), arguments.summary]
    if sum(modes) > 1:
        raise ValueError("TABLE, --plan TABLE and --summary: give one of them")
    setup = Setup(
        checkpoints=named_checkpoints(arguments.checkpoints, published_values()),
        data=named_data(arguments.data),
        out=arguments.out,
        processes=arguments.processes,
    )
    if "today" in (arguments.table, arguments.plan):
        return today(arguments, setup)
    if arguments.check or arguments.suite:
        raise ValueError("--check and --suite are of the plan `today`: bench reproduce today --check")
    if arguments.plan:
        values_of(arguments.plan)  # a wrong name is said before anything is printed
        say(*"\n".join(script(arguments.plan, setup)).split("\n"))
    elif arguments.summary:
        say(*summary())
    elif arguments.table:
        values_of(arguments.table)
        results, problems = comparable_results(arguments.out)
        say(*table_lines(arguments.table, setup, results))
        say(*(f"left out: {problem}" for problem in problems), errors=True)
    else:
        say(*listing())
    return 0


def today(arguments: argparse.Namespace, setup: "Setup") -> int:
    """The script of the plan `today`, what it lacks, or its table."""
    from bench.results.store import comparable_results
    from bench.run.calibration import machine
    from bench.today import SUITE, missing, script, table
    from engine.printing import say

    if arguments.plan:
        assumed = machine(arguments.assume, setup.processes, None, "bfloat16")
        say(*script(arguments.suite or SUITE, setup, assumed))
        return 0
    if arguments.check:
        lines = list(missing(setup))
        is_missing = any(line.startswith("missing") for line in lines)
        say(*lines, *([] if is_missing else ["nothing is missing"]))
        return int(is_missing)
    results, problems = comparable_results(setup.out)
    say(*table(setup, results))
    say(*(f"left out: {problem}" for problem in problems), errors=True)
    return 0
