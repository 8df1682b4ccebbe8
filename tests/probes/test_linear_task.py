"""Linear probes on image sets so small that the outcome is known."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from toy_exports import coloured_folder, workspace

from imagesets.sets import open_set
from probes.features.extract import extract
from probes.features.kinds import FeatureKind, Readout, joined, kinds_of
from probes.linear import sweep
from probes.linear.sweep import Sweep
from probes.splits import open_splits
from probes.tasks.linear import Linear

SMALL = Linear(lrs=(0.1, 1.0, 10.0), readouts=("avg", "cls1+avg"), epochs=20, batch=64, augment=False)


def test_a_separable_set_is_solved(export, tmp_path):
    outcome = SMALL.run(export, workspace(tmp_path, coloured_folder(tmp_path / "set")))
    assert outcome.numbers == {
        "nll": outcome.numbers["nll"],
        "top1": 100.0,
        "top5": 100.0,
        "top1_last": 100.0,
        "top5_last": 100.0,
    }
    assert outcome.metrics["top1"].per_image.tolist() == [1.0] * 24
    facts = outcome.facts
    assert (facts["training_images"], facts["selection_images"], facts["selection"]) == (33, 3, "holdout")
    assert (facts["batch"], facts["steps_per_epoch"]) == (33, 1)
    assert [(row["readout"], row["lr"]) for row in facts["grid"]] == [
        (readout, lr) for readout in SMALL.readouts for lr in SMALL.lrs
    ]
    assert facts["grid"][0]["lr_effective"] == pytest.approx(0.1 * 33 / 256)
    warning, few_steps = facts["warnings"]
    assert "20 optimiser steps" in few_steps and "logreg" in few_steps
    assert "33" in warning and "64" in warning


def test_a_learning_rate_at_the_edge_of_its_grid_is_a_warning(export, tmp_path):
    task = replace(SMALL, select="val", readouts=SMALL.readouts[:1], lrs=(1e-4, 1e-2, 1.0))
    outcome = task.run(export, workspace(tmp_path, "digits:", limit=300))
    assert any(line.startswith("lr=1 was chosen, the largest of 3") for line in outcome.facts["warnings"])


def test_the_chosen_head_is_reported(export, tmp_path):
    """With select=val it is the best of the grid on validation images, which with select=holdout decide nothing."""
    space = workspace(tmp_path, "digits:", limit=300)
    by_val = replace(SMALL, select="val").run(export, space)
    grid = by_val.facts["grid"]
    assert by_val.numbers["top1"] == pytest.approx(max(row["best"] for row in grid))
    assert by_val.numbers["top1_last"] == pytest.approx(max(row["last"] for row in grid))
    assert (by_val.facts["training_images"], by_val.facts["selection_images"]) == (300, 300)
    assert all(metric.chosen_on_val for metric in by_val.metrics.values()) and by_val.facts["warnings"] == []
    by_holdout = SMALL.run(export, space)
    assert (by_holdout.facts["training_images"], by_holdout.facts["selection_images"]) == (270, 30)
    assert by_holdout.facts["chosen"]["best"] == max(row["best"] for row in by_holdout.facts["grid"])
    assert (
        not any(metric.chosen_on_val for metric in by_holdout.metrics.values()) and by_holdout.facts["warnings"] == []
    )
    labels = open_set("digits:", "val").limited(300).labels
    for outcome in (by_val, by_holdout):
        assert outcome.facts["chosen"]["best"] == max(outcome.facts["chosen_history"])
        assert np.array_equal(outcome.arrays["predicted"] == labels, outcome.metrics["top1"].per_image == 1)
        assert 0.1 < outcome.arrays["confidence"].min() <= outcome.arrays["confidence"].max() <= 1
        for metric in outcome.metrics.values():
            assert (100 if metric.unit == "%" else 1) * metric.per_image.mean() == pytest.approx(metric.value)


def test_readouts_concatenate_their_features(export, tmp_path):
    space = workspace(tmp_path, "digits:", limit=20)
    kinds = kinds_of("cls2+avg", norm=True)
    assert kinds == (FeatureKind("cls", -2), FeatureKind("cls", -1), FeatureKind("avg", -1))
    features = extract(export, open_splits(space)[1], kinds, space)
    rows = joined(features.arrays, kinds, np.array([3, 1]))
    assert rows.shape == (2, 3 * export.spec.width)
    assert np.array_equal(rows[1, 32:64], features[kinds[1]][1])
    assert [kind.name for kind in kinds_of("cls2", norm=False)] == ["cls-layer-2-raw", "cls-layer-1-raw"]
    assert [kind.name for kind in kinds_of("avg@8", norm=False)] == ["avg-layer7-raw"]  # SimMIM's, counted from 1
    assert [kind.name for kind in kinds_of("cls@1", norm=True)] == ["cls-layer0-norm"]
    assert [kind.name for kind in kinds_of("cls+avg@3", norm=False)] == ["cls-layer2-raw", "avg-layer2-raw"]  # BEiT's
    assert str(Readout.parse("cls+avg@3")) == "cls+avg@3"


def test_a_diverged_head_is_recorded_and_not_chosen(export, tmp_path):
    space = workspace(tmp_path, coloured_folder(tmp_path / "set"))
    outcome = replace(SMALL, lrs=(1e38, 1.0), readouts=("avg",)).run(export, space)
    assert outcome.numbers["top1"] == 100.0 and outcome.facts["chosen"]["lr"] == 1.0
    assert outcome.facts["grid"][0]["diverged_at_step"] > 0 and "best" not in outcome.facts["grid"][0]
    with pytest.raises(ValueError, match=r"not finite from step \d+ on, with learning rate \S+ on avg"):
        replace(SMALL, lrs=(1e38,), readouts=("avg",)).run(export, space)


@pytest.mark.parametrize(
    ("counts", "is_warned"), [([[91, 80], [-1, 90], [-1, 85]], True), ([[91, 80], [-1, 90], [-1, 92]], False)]
)
def test_a_best_head_that_diverges_after_better_epochs_of_another_is_a_warning(counts, is_warned):
    """Head 1 is copied in epoch 3, when head 0 has diverged."""
    trained = SimpleNamespace(history=np.array(counts), diverged=np.array([7, -1]), best_index=1, best_epoch=2)
    warnings = Sweep.warnings(trained)
    assert bool(warnings) == is_warned and all("the best head before epoch 3 diverged" in line for line in warnings)


def test_a_second_run_of_one_training_waits_for_the_first(export, tmp_path, monkeypatch, capsys):
    """The second one waits, says so, and resumes from the last state of the first."""
    epochs, evaluate, started = [], Sweep.evaluate, threading.Event()

    def evaluate_slowly(self):
        epochs.append((threading.get_ident(), self.epoch))
        started.set()
        time.sleep(0.02)
        return evaluate(self)

    monkeypatch.setattr(Sweep, "evaluate", evaluate_slowly)
    monkeypatch.setattr(sweep, "SAVE_EVERY", 0.0)
    space = workspace(tmp_path, "digits:", limit=100)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(SMALL.run, export, space)
        assert started.wait(60)
        second = SMALL.run(export, space)
    assert second.metrics == first.result().metrics and second.facts == first.result().facts
    assert [epoch for _, epoch in epochs] == list(range(SMALL.epochs)) and len({ident for ident, _ in epochs}) == 1
    assert capsys.readouterr().err.count("waiting for another run: it trains the same heads") == 1


def test_the_only_image_of_a_class_is_not_held_out(export, tmp_path):
    space = workspace(tmp_path, coloured_folder(tmp_path / "set", train=(12, 1), classes=2))
    facts = SMALL.run(export, space).facts
    held_out = round(SMALL.holdout * 12)
    assert facts["training_images"] == 13 - held_out and any("'class1', have one" in line for line in facts["warnings"])
    assert replace(SMALL, select="val").run(export, space).facts["training_images"] == 13
    space = workspace(tmp_path, coloured_folder(tmp_path / "ones", train=1, classes=2))
    with pytest.raises(ValueError, match=r"every class has one training image.* select='val'"):
        SMALL.run(export, space)


def test_all_blocks_are_evaluated_from_one_pass(export, tmp_path):
    space, probe = workspace(tmp_path, "digits:", limit=200), replace(SMALL, readouts=("cls1+avg",))
    last = probe.run(export, space)
    first = replace(probe, readouts=("cls+avg@1",)).run(export, space)
    all_blocks = replace(probe, layers="all").run(export, replace(space, cache=tmp_path / "b"))
    assert all_blocks.cost["forwards"] == 400 and export.spec.depth == 2
    assert all_blocks.numbers == last.numbers | {"top1_block1": first.numbers["top1"]}
    assert last.numbers["top1"] != first.numbers["top1"]
    assert all_blocks.facts["grid"] == last.facts["grid"]
    with pytest.raises(ValueError, match=r"readouts=avg,cls1\+avg"):
        replace(SMALL, layers="all")
