"""How good is this self-supervised Vision Transformer? The Python API: see docs/python.md; defined in bench/api.py."""

from bench.api import (
    Options,
    compare,
    evaluate,
    evaluate_suite,
    extract,
    leaderboard,
    load,
    load_head,
    method,
    predict,
    pretrain,
    report,
    reproduce,
    visualize,
)

__all__ = [
    "Options",
    "compare",
    "evaluate",
    "evaluate_suite",
    "extract",
    "leaderboard",
    "load",
    "load_head",
    "method",
    "predict",
    "pretrain",
    "report",
    "reproduce",
    "visualize",
]


def __getattr__(name: str) -> object:
    """Look up `bench.__version__` when it is first used."""
    if name == "__version__":
        from importlib.metadata import version

        return version("ssl-vit-bench")
    raise AttributeError(f"module 'bench' has no attribute {name!r}")
