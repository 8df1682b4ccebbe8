"""Test whether one checkpoint is better than another, with paired tests on the same images."""

from dataclasses import dataclass
from pathlib import Path

from bench.options import CommandOptions, Positional

EPILOG = """With more than two checkpoints every pair is compared. The main metric of each protocol, the first of its
results, is tested; --metric M tests another one, --metric all tests all of them. p values are corrected (Holm) for all
comparisons of the call, so choose what to test before you look.

examples:
  bench compare mae dino --out results
  bench compare mae dino ibot --out results --data imagenet --protocol knn@dino --metric top1_k20 --csv pairs.csv
"""


@dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """Options of `bench compare`."""

    first: Positional[str]  # A: checkpoint: its name in the results, or 'name (digest8)'
    others: Positional[tuple[str, ...]]  # B: checkpoints to compare with A and with each other
    out: Path  # DIR: folder that `bench run` wrote to
    data: str | None = None  # NAME: only this image set
    protocol: str | None = None  # P: only this protocol (knn@dino) or task (knn)
    metric: str | None = None  # M: this metric instead of the main one of each protocol; all: every metric
    json: Path | None = None  # FILE: also write all numbers to FILE
    csv: Path | None = None  # FILE: also write the table to FILE


def run(options: Options) -> int:
    """0 whatever the outcome of the tests, even if nothing can be compared; the reasons are printed."""
    from bench.results.record import check_folder
    from bench.statistics.compare import compare, comparisons_csv, to_json, to_text
    from engine.files import write_atomic
    from engine.printing import say

    check_folder(options.out)
    names = [options.first, *options.others]
    comparisons = compare(options.out, names, options.data, options.protocol, options.metric)
    say(*to_text(comparisons).split("\n"))
    for path, text in ((options.json, to_json), (options.csv, comparisons_csv)):
        if path:
            write_atomic(path, text(comparisons))
    return 0
