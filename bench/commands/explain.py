"""Say which settings of two results differ, and how much of their difference each explains."""

import argparse
from pathlib import Path

EPILOG = """\
A and B are result files; or, with --out DIR, names of results there: knn@dino, cifar10/knn@dino, what stands in
brackets behind it in the leaderboard (k=20), or the stem of a file. With --checkpoint and --data the differences are
measured: the protocol of A runs with every subset of them, up to four, else with one after the other in one order and
its reverse. What is measured goes to --to, and is not measured again.

examples:
  bench explain knn@dino knn@ibot --out results --name mae
  bench explain a.json b.json --checkpoint exports/mae --data cifar10=folder:/data/cifar10 --to explained
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench explain`."""
    from bench.commands.sensitivity import add_request

    parser.add_argument("first", metavar="A", help="a result of one protocol, such as knn@dino, or a file")
    parser.add_argument("second", metavar="B", help="another one of the same task")
    add_request(parser)
    parser.add_argument("--to", type=Path, default=Path("explained"), metavar="DIR", help="folder of runs (explained)")


def run(arguments: argparse.Namespace) -> int:
    """0 whatever differs."""
    from bench.cli.settings import chosen_device
    from bench.commands.run import evaluation_request
    from bench.reporting import effects
    from engine.printing import say

    name = arguments.name[0] if arguments.name else None
    first, second = (effects.found_result(word, arguments.out, name) for word in (arguments.first, arguments.second))
    changed, others = effects.differences(first.result, second.result)
    say(*effects.difference_lines(first.result, second.result, changed, others))
    if not changed:
        return 0
    if not (arguments.checkpoint and arguments.data):
        say("", "to measure what each explains:", f"  {effects.command(first, second, changed)}")
        return 0
    arguments.out = arguments.to
    request = evaluation_request(arguments, chosen_device(arguments.device))
    request = effects.request_of(first.result, effects.replace(request, checkpoints=tuple(arguments.checkpoint[:1])))
    shares, whole = effects.explain(request, changed, arguments.checkpoint)
    say("", *effects.share_lines(first.result, second.result, shares, whole))
    return 0
