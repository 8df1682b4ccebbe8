"""Rows that are read when they are asked for: those of the array, from as few pages as they lie on."""

import mmap

import numpy as np
import pytest

from engine import rows
from engine.rows import ChosenRows, are_equal, copy_rows, read_ahead, release_pages


@pytest.fixture
def mapped(tmp_path):
    np.random.default_rng(0).standard_normal((5000, 96), np.float32).tofile(tmp_path / "kind.f32")
    return np.memmap(tmp_path / "kind.f32", np.float32, mode="r", shape=(5000, 96))


def test_chosen_rows_are_those_of_a_copy(mapped):
    chosen = np.setdiff1d(np.arange(5000), [3, 17, 4999])
    found, copy = ChosenRows(mapped, chosen), mapped[chosen]
    assert found.shape == copy.shape and len(found) == len(copy) and found.dtype == copy.dtype
    for some in (5, slice(10, 30), slice(None, None, 7), np.array([40, 2, 2]), np.arange(4997) % 3 == 0):
        np.testing.assert_array_equal(found[some], copy[some])
    np.testing.assert_array_equal(copy_rows(found, np.arange(0, 4997, 3)), copy[::3])
    np.testing.assert_array_equal(np.asarray(found), copy)
    np.testing.assert_array_equal(np.asarray(found, np.float64), copy.astype(np.float64))


def test_equal_rows_are_found_in_any_place(monkeypatch):
    monkeypatch.setattr(rows, "READ", 10)
    same = np.ones((35, 4), np.float32)
    assert are_equal(same) and are_equal(same[:1])
    same[34, 2] = 2
    assert not are_equal(same)
    assert are_equal(ChosenRows(same, np.arange(34))) and not are_equal(ChosenRows(same, np.array([0, 34])))


class Asked:
    """Stands in for a mapping and notes what it is advised."""

    def __init__(self, mapped):
        self.length, self.advice = len(mapped._mmap), []

    def __len__(self):
        return self.length

    def madvise(self, option, start=0, length=0):
        self.advice.append((option, start, length))


@pytest.mark.parametrize("chosen", [None, np.arange(1, 5000)])
def test_reading_ahead_asks_for_the_pages_of_the_rows_alone(mapped, chosen, monkeypatch):
    asked = Asked(mapped)
    monkeypatch.setattr(rows, "_mapped", lambda features: asked)
    features = mapped if chosen is None else ChosenRows(mapped, chosen)
    wanted = np.array([0, 1, 2, 100, 101, 4000, 4998])
    read_ahead(features, wanted)
    pages = set()
    for option, start, length in asked.advice:
        assert option == mmap.MADV_WILLNEED and start % mmap.PAGESIZE == 0 and start + length <= asked.length
        pages |= set(range(start // mmap.PAGESIZE, -(-(start + length) // mmap.PAGESIZE)))
    places = wanted if chosen is None else chosen[wanted]
    needed = {at // mmap.PAGESIZE for place in places for at in (place * 384, place * 384 + 383)}
    assert pages == needed and len(asked.advice) == 4


def test_advice_on_a_real_mapping_changes_nothing(mapped):
    before = np.array(mapped)
    read_ahead(mapped, np.arange(0, 5000, 50))
    release_pages(mapped)
    np.testing.assert_array_equal(mapped, before)
    release_pages(before)  # no mapping: nothing to do
    read_ahead(before, np.arange(3))
