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
    from bench.api import report
    from engine.printing import say

    path = report(options.out, to=options.to, published=options.published, pictures=not options.no_pictures)
    say(f"written: {path}")
    return 0
