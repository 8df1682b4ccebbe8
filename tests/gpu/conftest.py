"""The device of the tests in this folder: the GPU; without one, the emulated GPU of emulated.py.

BENCH_TEST_DEVICE=cuda, emulated or cpu chooses. Tests marked `gpu` need a real one and are skipped elsewhere; naming
another device runs those of them that can run there, to show that they are right.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from emulated import KIND, emulated_gpu

from engine.precision import keep_float32_exact

sys.path += [str(Path(__file__).parents[1] / name) for name in ("probes", "downstream")]  # their toys


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        elsewhere = "BENCH_TEST_DEVICE" in os.environ and "on_gpu" in item.fixturenames
        if item.get_closest_marker("gpu") and KIND != "cuda" and not elsewhere:
            item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture
def on_gpu():
    """A context in which "cuda" is the device, and its name: `with on_gpu() as device`."""

    @contextmanager
    def context() -> Iterator[str]:
        with emulated_gpu() if KIND == "emulated" else nullcontext():
            yield "cpu" if KIND == "cpu" else "cuda"

    if KIND == "cuda":
        keep_float32_exact()
    return context
