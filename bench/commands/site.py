"""Write a page of each record for any web host: tables, figures and facts of the checkpoints."""

from dataclasses import dataclass
from pathlib import Path

from bench.options import CommandOptions, Positional

EPILOG = """examples:
  bench site records/mine --out public
  bench site records/*/ --out public                    a page each: two records never share a table

Each record is checked first (bench record --check). A page makes no network requests, and also opens from disk. The
text beside a record, RECORD.md, opens its page.
"""


@dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """Options of `bench site`."""

    records: Positional[tuple[Path, ...]]  # RECORD: folder that `bench record` wrote
    out: Path  # DIR: where index.html, or NAME.html for each of several records, is written; older ones are replaced
    title: str = ""  # title of the pages (that of RECORD.md, or the record's name)


def run(options: Options) -> int:
    """0: the pages are written."""
    from bench.reports.site import write_site
    from engine.optional import require
    from engine.printing import say

    require("matplotlib")
    say(*(f"written: {path}" for path in write_site(options.records, options.out, options.title)))
    return 0
