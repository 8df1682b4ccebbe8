"""Write all results as one HTML page that opens from disk: tables with intervals and ranks, figures, provenance."""

from dataclasses import dataclass
from pathlib import Path

from bench.options import CommandOptions


@dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """Options of `bench report`."""

    out: Path  # DIR: folder that `bench run` wrote to
    to: Path | None = None  # FILE: where to write the page (DIR/report.html)
    published: bool = False  # show papers' numbers of the same protocols and images, marked
    no_pictures: bool = False  # omit validation images and accuracy by class


def run(options: Options) -> int:
    """0, even if a result file is damaged: the page names it."""
    from bench.results.record import check_folder

    check_folder(options.out)
    from bench.reports.page import report_page
    from engine.files import write_atomic
    from engine.optional import require
    from engine.printing import say

    require("matplotlib")
    path = options.to or options.out / "report.html"
    write_atomic(path, report_page(options.out, options.published, not options.no_pictures))
    say(f"written: {path}")
    return 0
