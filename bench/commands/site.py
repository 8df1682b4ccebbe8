"""Write the page of one or several records for any web host: tables, figures, checkpoints and their commands."""

from dataclasses import dataclass
from pathlib import Path

from bench.options import CommandOptions, Positional

EPILOG = """examples:
  bench site records/mine --out public
  bench site records/*/ --title "Our ViTs" --out public

Each record is checked first (bench record --check). The page makes no network requests, and also opens from disk.
"""


@dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """Options of `bench site`."""

    records: Positional[tuple[Path, ...]]  # RECORD: folder that `bench record` wrote
    out: Path  # DIR: where index.html is written; an older one is replaced
    title: str = "How good are these checkpoints?"  # title of the page


def run(options: Options) -> int:
    """0: the page is written."""
    from bench.site import write_site
    from engine.optional import require
    from engine.printing import say

    require("matplotlib")
    say(f"written: {write_site(options.records, options.out, options.title)}")
    return 0
