"""Say whether one checkpoint is better than another, with paired tests on the same images."""

import argparse
from pathlib import Path

EPILOG = """With more than two checkpoints every pair is compared. Tested is the main metric of each protocol, the
first of its results; --metric M tests another one, --metric all every one. p values are corrected (Holm) for all
comparisons of the call, so choose before you look.

examples:
  bench compare mae dino --out results
  bench compare mae dino ibot --out results --data imagenet --protocol knn@dino --metric top1_k20 --csv pairs.csv
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench compare`."""
    parser.add_argument("first", metavar="A", help="checkpoint: its name in the results, or 'name (digest8)'")
    parser.add_argument("others", metavar="B", nargs="+", help="those to compare it and each other with")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder that `bench run` wrote to")
    parser.add_argument("--data", metavar="NAME", help="this image set alone")
    parser.add_argument("--protocol", metavar="P", help="this protocol (knn@dino) or task (knn) alone")
    parser.add_argument(
        "--metric", metavar="M", help="this metric in place of the main one of each protocol; all: every one"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there as well")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table there as well")


def run(arguments: argparse.Namespace) -> int:
    """0 whatever the tests say, and also when nothing can be compared: the reasons are printed."""
    from bench.results.record import check_folder
    from bench.statistics.compare import compare, comparisons_csv, to_json, to_text
    from engine.files import write_atomic
    from engine.printing import say

    check_folder(arguments.out)
    options = {name: getattr(arguments, name) for name in ("data", "protocol", "metric")}
    comparisons = compare(arguments.out, [arguments.first, *arguments.others], **options)
    say(*to_text(comparisons).split("\n"))
    for path, text in ((arguments.json, to_json), (arguments.csv, comparisons_csv)):
        if path:
            write_atomic(path, text(comparisons))
    return 0
