"""Write all results as one HTML page that opens from disk: tables with intervals and ranks, figures, provenance."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench report`."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder that `bench run` wrote to")
    parser.add_argument("--to", type=Path, metavar="FILE", help="where to write the page (DIR/report.html)")
    parser.add_argument(
        "--published", action="store_true", help="show papers' numbers of the same protocols and images, marked"
    )
    parser.add_argument("--no-pictures", action="store_true", help="without validation images and accuracy by class")


def run(arguments: argparse.Namespace) -> int:
    """0 also when some result file is damaged: the page names it."""
    from bench.results.record import check_folder

    check_folder(arguments.out)
    from bench.reporting.page import report_page
    from engine.files import write_atomic
    from engine.optional import require
    from engine.printing import say

    require("matplotlib")
    path = arguments.to or arguments.out / "report.html"
    write_atomic(path, report_page(arguments.out, arguments.published, not arguments.no_pictures))
    say(f"written: {path}")
    return 0
