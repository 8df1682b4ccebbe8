"""Write static pages of records for any web host: an overview, a page for each checkpoint and each protocol."""

import argparse
from pathlib import Path

EPILOG = """examples:
  bench site records/mine --out public
  bench site records/*/ --title "Our ViTs" --out public

Each record is checked first (bench record --check). The pages make no requests and open from disk too.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench site`."""
    parser.add_argument("records", type=Path, nargs="+", metavar="RECORD", help="folder that `bench record` wrote")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the site; an older one is replaced")
    parser.add_argument("--title", default="How good are these checkpoints?", help="of the overview")


def run(arguments: argparse.Namespace) -> int:
    """0: the site is written."""
    from bench.reporting.site import write_site
    from engine.optional import require
    from engine.printing import say

    require("matplotlib")
    pages = write_site(arguments.records, arguments.out, arguments.title)
    say(f"written: {pages} pages in {arguments.out}; open {arguments.out / 'index.html'}, or publish the folder")
    return 0
