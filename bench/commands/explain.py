"""Say which settings of two results differ, and how much of their difference each explains."""

from dataclasses import dataclass
from pathlib import Path

from bench.cli.options import EvaluationOptions, Positional, options_from
from bench.commands.sensitivity import MeasuringOptions

EPILOG = """\
A and B are result files; or, with --out DIR, names of results there: knn@dino, cifar10/knn@dino, what stands in
brackets behind it in the leaderboard (k=20), or the stem of a file. With --checkpoint and --data the differences are
measured: the protocol of A runs with every subset of them, up to four, else with one after the other in one order and
its reverse. What is measured goes to --to, and is not measured again.

examples:
  bench explain knn@dino knn@ibot --out results --name mae
  bench explain a.json b.json --checkpoint exports/mae --data cifar10=folder:/data/cifar10 --to explained
"""


@dataclass(frozen=True, kw_only=True)
class Options(MeasuringOptions):
    """Options of `bench explain`."""

    first: Positional[str]  # A: a result of one protocol, such as knn@dino, or a file
    second: Positional[str]  # B: another one of the same task
    to: Path = Path("explained")  # DIR: folder of runs (explained)


def run(options: Options) -> int:
    """0 whatever differs."""
    from bench.reporting import effects
    from engine.printing import say

    name = options.name[0] if options.name else None
    first, second = (effects.found_result(word, options.out, name) for word in (options.first, options.second))
    changed, others = effects.differences(first.result, second.result)
    say(*effects.difference_lines(first.result, second.result, changed, others))
    if not changed:
        return 0
    if not (options.checkpoint and options.data):
        say("", "to measure what each explains:", f"  {effects.command(first, second, changed)}")
        return 0
    evaluation = options_from(options, EvaluationOptions, suite="", out=options.to, checkpoint=options.checkpoint[:1])
    like_first = effects.options_like(first.result, evaluation)
    shares, whole = effects.explain(like_first, changed, options.checkpoint)
    say("", *effects.share_lines(first.result, second.result, shares, whole))
    return 0
