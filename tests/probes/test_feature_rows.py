"""Rows of a mapped file that are read on demand equal those of a copy."""

import numpy as np
import pytest

from engine import rows
from engine.rows import ChosenRows, are_equal, copy_rows, read_ahead, release_pages


@pytest.fixture
def mapped(tmp_path):
    np.random.default_rng(0).standard_normal((5000, 96), np.float32).tofile(tmp_path / "kind.f32")
    return np.memmap(tmp_path / "kind.f32", np.float32, mode="r", shape=(5000, 96))


def test_chosen_rows_equal_a_copy(mapped):
    chosen = np.setdiff1d(np.arange(5000), [3, 17, 4999])
    lazy, copy = ChosenRows(mapped, chosen), mapped[chosen]
    assert lazy.shape == copy.shape and len(lazy) == len(copy) and lazy.dtype == copy.dtype
    for key in (5, slice(10, 30), slice(None, None, 7), np.array([40, 2, 2]), np.arange(4997) % 3 == 0):
        np.testing.assert_array_equal(lazy[key], copy[key])
    np.testing.assert_array_equal(copy_rows(lazy, np.arange(0, 4997, 3)), copy[::3])
    np.testing.assert_array_equal(np.asarray(lazy), copy)
    np.testing.assert_array_equal(np.asarray(lazy, np.float64), copy.astype(np.float64))


def test_a_single_differing_row_is_detected(monkeypatch):
    monkeypatch.setattr(rows, "ROWS_AT_ONCE", 10)
    features = np.ones((35, 4), np.float32)
    assert are_equal(features) and are_equal(features[:1])
    features[34, 2] = 2
    assert not are_equal(features)
    assert are_equal(ChosenRows(features, np.arange(34))) and not are_equal(ChosenRows(features, np.array([0, 34])))


def test_advice_on_a_real_mapping_changes_nothing(mapped):
    before = np.array(mapped)
    read_ahead(mapped, np.arange(0, 5000, 50))
    release_pages(mapped)
    np.testing.assert_array_equal(mapped, before)
    release_pages(before)  # no mapping: nothing to do
    read_ahead(before, np.arange(3))
