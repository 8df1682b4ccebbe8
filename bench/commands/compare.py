"""Test whether one checkpoint is better than another, with paired tests on the same images."""

from dataclasses import dataclass
from pathlib import Path

from bench.options import CommandOptions, Positional

EPILOG = """With more than two checkpoints every pair is compared. The main metric of each protocol, the first of its
results, is tested; --metric M tests another one, --metric all tests all of them. p values are corrected (Holm) for all
comparisons of the call, so choose what to test before you look.

examples:
  bench compare mae dino --out results
  bench compare mae dino ibot --out results --data imagenet --protocol knn@dino --metric top1_k20 --json p.json
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


def run(options: Options) -> int:
    """0 whatever the outcome of the tests, even if nothing can be compared; the reasons are printed."""
    from bench.api import compare
    from bench.statistics.compare import to_json
    from engine.files import write_atomic
    from engine.printing import say

    selected = {name: getattr(options, name) for name in ("data", "protocol", "metric", "out")}
    comparisons = compare(options.first, *options.others, **selected)
    say(*str(comparisons).split("\n"))
    if options.json:
        write_atomic(options.json, to_json(comparisons))
    return 0
