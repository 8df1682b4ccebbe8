"""Show how published numbers can be measured here, and how far the measured numbers are from them."""

from dataclasses import dataclass, field
from pathlib import Path

from bench.options import CommandOptions, Positional
from engine.errors import UserError
from engine.settings import PositiveInt

EPILOG = """A plan is a table of a source, such as extrema:table7; `today`: current networks by six protocols; or
`laptop`: four numbers of DINOv2's smallest ViT, three of them after some 35 minutes of two cores.

examples:
  bench reproduce                                   the tables, and how much of each is within reach
  bench reproduce --plan laptop --run               download, measure, and print published beside measured
  bench reproduce moca:table5j --out results        published beside measured, difference in standard errors
  bench reproduce --plan moca:table5j --out results > run.sh
  bench reproduce --plan today --gpus 8 --data imagenet=imagenet:/data/ILSVRC --suite knn@dino > run.sh
  bench reproduce today --check --data imagenet=imagenet:/data/ILSVRC ade20k=ade20k:/data/ADE nyu=nyu:/data/nyu
"""


@dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """Options of `bench reproduce`."""

    table: Positional[str | None] = None  # PLAN: print published beside measured numbers
    plan: str | None = None  # PLAN: print a shell script that measures it
    run: bool = False  # with --plan: write the script to OUT/PLAN.sh and run it; again, to continue it
    check: bool = False  # list what is missing to measure PLAN; exit code 1 if anything is
    # NAME=REFERENCE: weights that you have, by the names in the tables; references as for `bench run --checkpoint`
    checkpoints: tuple[str, ...] = ()
    # NAME=URL: imagenet, imagenet22k (to pretrain on), ade20k, cityscapes, coco, voc, nyu, davis, copydays, ...
    data: tuple[str, ...] = ()
    # DIR: folder of results and trainings, from which measurements are read and which the commands use (results)
    out: Path = Path("results")
    # N: processes of torchrun in the commands (1)
    processes: PositiveInt = field(default=1, metadata={"flags": ("--processes", "--gpus")})
    suite: str | None = None  # S: only the values of PLAN that these protocols measure


def run(options: Options) -> int:
    """0, whatever was measured; 1 if --check finds something missing."""
    from bench import api
    from bench.published.values import published_values
    from bench.reports import reproduce
    from engine.printing import say

    name, suite = options.table or options.plan, options.suite
    if options.table and options.plan:
        raise UserError("plan", "give it or PLAN alone, not both", options.plan)
    if (options.check and not options.table) or (suite and not name):
        raise UserError("suite" if suite else "check", "it is for a plan: bench reproduce today --check")
    if options.run and not options.plan:
        raise UserError("run", "it runs the script of a plan: give --plan PLAN")
    setup = reproduce.Setup(
        checkpoints=reproduce.named_checkpoints(options.checkpoints, published_values()),
        data=reproduce.named_data(options.data),
        out=options.out,
        processes=options.processes,
    )
    if not name:
        say(*reproduce.listing())
        return 0
    plan = reproduce.plan_of(name, suite)
    if options.run:
        reproduce.run_script(name, plan, setup, suite)
    if options.plan:
        say(*reproduce.script(name, plan, setup, suite))
        return 0
    if options.check:
        lines = list(reproduce.missing(plan, setup))
        is_missing = any(line.startswith("missing") for line in lines)
        say(*lines, *([] if is_missing else ["nothing is missing"]))
        return int(is_missing)
    pairs = api.reproduce(name, suite=suite, out=options.out)
    say(f"{name}: {reproduce.caption_of(name)}", "", *reproduce.table(pairs))
    return 0
