"""How good is this self-supervised Vision Transformer? The Python API; docs/python.md shows it, bench/api.py is it."""

from bench.api import (
    Leaderboard,
    compare,
    evaluate,
    evaluate_suite,
    extract,
    leaderboard,
    load,
    pretrain,
    report,
)
from bench.calls import Options

__all__ = [
    "Leaderboard",
    "Options",
    "compare",
    "evaluate",
    "evaluate_suite",
    "extract",
    "leaderboard",
    "load",
    "pretrain",
    "report",
]
