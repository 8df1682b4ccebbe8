"""The device of the tests in this folder: the GPU, or without one the emulated GPU of emulated.py.

BENCH_TEST_DEVICE=cuda, emulated or cpu selects another. Tests marked `gpu` need a real GPU and are skipped without one;
with BENCH_TEST_DEVICE set, those of them that can run on that device do, which checks the tests themselves.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from emulated import KIND, emulated_gpu

from engine.precision import keep_float32_exact

sys.path += [str(Path(__file__).parents[1] / name) for name in ("probes", "downstream")]  # helpers of their tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        runs_anywhere = "BENCH_TEST_DEVICE" in os.environ and "on_gpu" in item.fixturenames
        if item.get_closest_marker("gpu") and KIND != "cuda" and not runs_anywhere:
            item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture
def on_gpu():
    """A function that returns a context with the test's device: `with on_gpu() as device`."""

    @contextmanager
    def context() -> Iterator[str]:
        with emulated_gpu() if KIND == "emulated" else nullcontext():
            yield "cpu" if KIND == "cpu" else "cuda"

    if KIND == "cuda":
        keep_float32_exact()
    return context
