"""The reading order of cached features: every row once, all classes in every window, long reads; and its batches."""

import numpy as np
import pytest
import torch

from probes.features.kinds import FeatureKind
from probes.linear import batches
from probes.linear.batches import EpochPlan, Table, reading_order, window_size

KIND = FeatureKind("cls")


@pytest.mark.parametrize("rows", [65, 100, 128, 129, 1000, 4097])
def test_every_row_is_read_once_in_an_order_of_the_epoch(rows, monkeypatch):
    monkeypatch.setattr(batches, "MAX_WINDOW", 64)
    monkeypatch.setattr(batches, "RUN", 4)
    orders = [reading_order(rows, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for order in orders:
        np.testing.assert_array_equal(np.sort(order), np.arange(rows))
    assert len({order.tobytes() for order in orders}) == 3
    np.testing.assert_array_equal(orders[1], reading_order(rows, 0, 1))


def test_windows_of_imagenet_hold_all_classes_and_are_read_in_runs():
    rows, classes = 1_281_167, 1000
    labels = np.arange(rows) * classes // rows  # class by class, as folders are listed
    size, order = window_size(rows), reading_order(rows, 0, 0)
    assert size <= batches.MAX_WINDOW
    for start in range(0, rows, size):
        window = order[start : start + size]
        shares = np.bincount(labels[window], minlength=classes) / (len(window) / classes)
        assert shares.min() > 0.2 and shares.max() < 2 and shares.std() < 0.2
        runs = 1 + np.count_nonzero(np.diff(np.sort(window)) > 1)
        assert runs <= len(window) / batches.RUN + 2
        halves = np.bincount(labels[window[: len(window) // 2]], minlength=classes)
        assert np.corrcoef(halves, shares)[0, 1] < 0.9  # shuffled within the window: its halves differ
        assert abs(np.corrcoef(np.arange(len(window)), labels[window])[0, 1]) < 0.02


@pytest.mark.parametrize(("drop_last", "count"), [(False, 15), (True, 14)])
def test_batches_follow_the_order_and_are_read_ahead(drop_last, count, monkeypatch):
    monkeypatch.setattr(batches, "MAX_WINDOW", 64)
    monkeypatch.setattr(batches, "RUN", 4)
    rows = np.setdiff1d(np.arange(450), np.arange(0, 450, 3))[:290]
    table = Table(
        arrays={KIND: np.arange(900, dtype=np.float32).reshape(450, 2)},
        labels=np.arange(450),
        readouts={"cls1": (KIND,)},
        device="cpu",
    )
    announced, read = [], []
    monkeypatch.setattr(batches, "read_ahead", lambda values, rows: announced.append(rows.tolist()))
    monkeypatch.setattr(batches, "copy_rows", lambda values, rows: read.append(rows.tolist()) or values[rows])
    plan = EpochPlan(images=290, requested_batch=20, drop_last=drop_last, seed=5)
    order = rows[reading_order(290, 5, 2)][: 20 * count]
    sizes = [60, 60, 60, 60, len(order) - 240]  # rows of the batches that begin in each of five windows of 58 rows

    def batches_from(first):
        received = {}
        announced.clear()
        read.clear()
        for number, features, labels in table.batches(rows, plan, 2, first):
            assert np.isin(labels, read[-1]).all()
            assert torch.equal(features["cls1"][:, 0], 2.0 * labels)
            received[number] = labels.tolist()
        assert [*read[1:], []] == announced
        assert all(part == sorted(part) for part in read)
        skipped = first * 20 - sum(sizes[: first // 3])
        assert [len(part) for part in read] == [sizes[first // 3] - skipped, *sizes[first // 3 + 1 :]]
        return received

    epoch = batches_from(0)
    assert epoch == {number: order[number * 20 : number * 20 + 20].tolist() for number in range(count)}
    assert batches_from(7) == {number: epoch[number] for number in range(7, count)}
