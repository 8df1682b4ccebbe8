"""Write static pages of records for any web host: an overview, a page for each checkpoint and each protocol."""

from dataclasses import dataclass
from pathlib import Path

from bench.options import CommandOptions, Positional

EPILOG = """examples:
  bench site records/mine --out public
  bench site records/*/ --title "Our ViTs" --out public

Each record is checked first (bench record --check). The pages make no network requests, and also open from disk.
"""


@dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """Options of `bench site`."""

    records: Positional[tuple[Path, ...]]  # RECORD: folder that `bench record` wrote
    out: Path  # DIR: the site; an older one is replaced
    title: str = "How good are these checkpoints?"  # title of the overview


def run(options: Options) -> int:
    """0: the site is written."""
    from bench.site import write_site
    from engine.optional import require
    from engine.printing import say

    require("matplotlib")
    pages = write_site(options.records, options.out, options.title)
    say(f"written: {pages} pages in {options.out}; open {options.out / 'index.html'}, or publish the folder")
    return 0
