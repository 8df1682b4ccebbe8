"""Probes on features in a file stay within the documented memory, which does not grow with the rows."""

import json
from pathlib import Path

import numpy as np
import pytest
from elsewhere import program
from memory_program import CLASSES, QUERIES, WIDTH, K

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("memory_program.py")
FEW, MANY = 60_000, 240_000  # 31 and 123 MB of features
BLOCK = 4 * WIDTH
PAGES = 64 << 17  # 128 KiB around each of the rows that are copied together
# Documented bounds in bytes (docs/speed.md); each row of the file may cost PER_ROW bytes more (labels and indices).
BOUNDS = {
    "knn": BLOCK * (8192 + 2 * 256) + 12 * QUERIES * K,
    "lowshot": 1000 * (20 * WIDTH + 40 * CLASSES) + PAGES,
    "logreg": 8 * WIDTH * CLASSES * 28 + 3 * BLOCK * 2048 + 24 * WIDTH**2 + 40 * 2048 * CLASSES + PAGES,
    "linear": BLOCK * (8192 + 512) + PAGES,
}
PER_ROW = {"knn": 0, "lowshot": 0, "logreg": 34, "linear": 50}
ALLOCATOR = 20 << 20  # buffers of the C library and of matrix products, and a varying number of mapped pages
SCATTER = 12 << 20  # difference between the peaks of two equal processes, which map and release pages at other times


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    path = tmp_path_factory.mktemp("features") / "kind.f32"
    rows = np.random.default_rng(0).standard_normal((MANY, WIDTH), np.float32)
    rows[:, :CLASSES] += 3 * np.eye(CLASSES, dtype=np.float32)[np.arange(MANY) % CLASSES]
    rows.tofile(path)
    return path


# By default one whose memory grows with the rows and one whose memory does not.
@pytest.mark.parametrize(
    "work",
    [pytest.param(work, marks=pytest.mark.exhaustive if work in ("lowshot", "linear") else ()) for work in BOUNDS],
)
def test_memory_is_within_its_bound_and_does_not_grow_with_the_rows(work, features):
    few, many = json.loads(program(PROGRAM, features, work, FEW, MANY).end())
    assert many <= BOUNDS[work] + PER_ROW[work] * MANY + ALLOCATOR
    assert many - few <= PER_ROW[work] * (MANY - FEW) + PAGES + SCATTER < 4 * WIDTH * (MANY - FEW) / 3
