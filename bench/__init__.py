"""How good is this self-supervised Vision Transformer? The Python API; docs/python.md shows it, bench/api.py is it."""

from bench.api import (
    Leaderboard,
    Options,
    compare,
    evaluate,
    evaluate_suite,
    extract,
    leaderboard,
    load,
    pretrain,
    report,
    visualize,
)

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
    "visualize",
]


def __getattr__(name: str) -> str:
    """`bench.__version__`, looked up when it is asked for."""
    if name == "__version__":
        from importlib.metadata import version

        return version("ssl-vit-bench")
    raise AttributeError(f"module 'bench' has no attribute {name!r}")
