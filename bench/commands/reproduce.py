"""Show how published numbers can be measured here, and how far the measured numbers are from them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bench.options import CommandOptions, Positional
from engine.settings import PositiveInt

if TYPE_CHECKING:
    from bench.reproduce import Setup

EPILOG = """examples:
  bench reproduce                                   the tables, and how much of each is within reach
  bench reproduce --summary                         counts over all tables, and why the others are out of reach
  bench reproduce moca:table5j --out results        value by value: published, measured, the commands
  bench reproduce moca:table5j --checkpoints moca-b=/data/moca.pth --data imagenet=imagenet:/data/ILSVRC --out results
  bench reproduce --plan moca:table5j --out results > script.sh
  bench reproduce --plan today --gpus 8 > run.sh    eight networks of today by six protocols, with hours and disk
  bench reproduce today --out results               published beside measured, difference in standard errors
"""


@dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """Options of `bench reproduce`."""

    table: Positional[str | None] = None  # TABLE: such as extrema:table7
    plan: str | None = None  # TABLE: print a shell script that measures a table
    summary: bool = False  # count what is within reach, table by table
    # NAME=REFERENCE: weights that you have, by the names in the tables; references as for `bench run --checkpoint`
    checkpoints: tuple[str, ...] = ()
    # NAME=URL: imagenet, imagenet22k (to pretrain on), ade20k, cityscapes, coco, voc, nyu, davis, copydays, ...
    data: tuple[str, ...] = ()
    # DIR: folder of results and trainings, from which measurements are read and which the commands use (results)
    out: Path = Path("results")
    # N: processes of torchrun in the commands (1)
    processes: PositiveInt = field(default=1, metadata={"flags": ("--processes", "--gpus")})
    # with `today` (the plan, not the suite of that name): list what is missing; exit code 1 if anything is
    check: bool = False
    suite: str | None = None  # S: with `today`: protocols instead of the plan's six
    assume: str = "h100"  # MACHINE: with `today`: h100 or a100, for the forecast of hours (h100)


def run(options: Options) -> int:
    """0, whatever was measured; 1 if --check finds something missing."""
    from bench.published.values import published_values, values_of
    from bench.reproduce import Setup, listing, named_checkpoints, named_data, script, summary, table_lines
    from bench.results.store import comparable_results
    from engine.printing import say

    modes = [bool(options.table), bool(options.plan), options.summary]
    if sum(modes) > 1:
        raise ValueError("TABLE, --plan TABLE and --summary: give one of them")
    setup = Setup(
        checkpoints=named_checkpoints(options.checkpoints, published_values()),
        data=named_data(options.data),
        out=options.out,
        processes=options.processes,
    )
    if "today" in (options.table, options.plan):
        return today(options, setup)
    if options.check or options.suite:
        raise ValueError("--check and --suite are for the plan `today`: bench reproduce today --check")
    if options.plan:
        values_of(options.plan)  # raises the error for an unknown table before anything is printed
        say(*"\n".join(script(options.plan, setup)).split("\n"))
    elif options.summary:
        say(*summary())
    elif options.table:
        values_of(options.table)
        results, problems = comparable_results(options.out)
        say(*table_lines(options.table, setup, results))
        say(*(f"left out: {problem}" for problem in problems), errors=True)
    else:
        say(*listing())
    return 0


def today(options: Options, setup: "Setup") -> int:
    """Print the script of the plan `today` (--plan), what is missing for it (--check), or its table."""
    from bench.results.store import comparable_results
    from bench.run.calibration import machine
    from bench.today import SUITE, missing, script, table
    from engine.printing import say

    if options.plan:
        assumed = machine(options.assume, setup.processes, None, "bfloat16")
        say(*script(options.suite or SUITE, setup, assumed))
        return 0
    if options.check:
        lines = list(missing(setup))
        is_missing = any(line.startswith("missing") for line in lines)
        say(*lines, *([] if is_missing else ["nothing is missing"]))
        return int(is_missing)
    results, problems = comparable_results(setup.out)
    say(*table(setup, results))
    say(*(f"left out: {problem}" for problem in problems), errors=True)
    return 0
