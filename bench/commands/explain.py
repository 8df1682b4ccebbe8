"""Show which settings of two results differ, and how much of their difference each explains."""

from dataclasses import dataclass
from pathlib import Path

from bench.cli.options import EvaluationOptions, Positional, options_from
from bench.commands.sensitivity import MeasuringOptions

EPILOG = """\
A and B are result files; or, with --out DIR, names of results there: knn@dino, cifar10/knn@dino, the variant that the
leaderboard shows in brackets (k=20), or the stem of a file name. With --checkpoint and --data the effects are measured:
the protocol of A runs with every subset of up to four differences; if there are more, they are added one after the
other, in one order and its reverse. These runs are kept in --to, and not repeated.

examples:
  bench explain knn@dino knn@ibot --out results --name mae
  bench explain a.json b.json --checkpoint exports/mae --data cifar10=folder:/data/cifar10 --to explained
"""


@dataclass(frozen=True, kw_only=True)
class Options(MeasuringOptions):
    """Options of `bench explain`."""

    first: Positional[str]  # A: a result of one protocol, such as knn@dino, or a file
    second: Positional[str]  # B: another result of the same task
    to: Path = Path("explained")  # DIR: folder for the runs that measure the effects (explained)


def run(options: Options) -> int:
    """0, whether or not the results differ."""
    from bench.effects import explain
    from engine.printing import say

    name = options.name[0] if options.name else None
    first, second = (explain.find_result(word, options.out, name) for word in (options.first, options.second))
    settings, facts = explain.differences(first.result, second.result)
    say(*explain.difference_lines(first.result, second.result, settings, facts))
    if not settings:
        return 0
    if not (options.checkpoint and options.data):
        say("", "to measure how much each explains:", f"  {explain.measuring_command(first, second, settings)}")
        return 0
    evaluation = options_from(options, EvaluationOptions, suite="", out=options.to, checkpoint=options.checkpoint[:1])
    shares, whole = explain.explain(explain.options_matching(first.result, evaluation), settings, options.checkpoint)
    say("", *explain.share_lines(first.result, second.result, shares, whole))
    return 0
