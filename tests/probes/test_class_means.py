"""Mean per-class accuracy of all probes, on image sets whose papers report it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import balanced_accuracy_score
from toy_exports import one_block_export

from bench.run.outcomes import checked, metric_records
from checkpoints.export import ViTExport
from engine import tasks
from engine.tasks import OpenedSets, Workspace
from imagesets.sets import ImageSet, open_set
from probes.scores import class_mean, class_means
from probes.tasks.finetune import PROTOCOLS as FINETUNE
from probes.tasks.knn import Knn
from probes.tasks.linear import Linear
from probes.tasks.lowshot import LowShot

UNEVEN = (45, 30, 10)


def three_classes(split: str, reports: str = "mean per class", most: tuple[int, ...] = UNEVEN) -> ImageSet:
    """Three classes of digits with up to so many images each."""
    digits = open_set("digits:", split)
    rows = [np.flatnonzero(digits.labels == label)[:count] for label, count in zip((3, 5, 8), most, strict=True)]
    labels = np.repeat(np.arange(3), [len(indices) for indices in rows])
    return replace(
        digits, labels=labels, classes=("3", "5", "8"), images=digits.images.take(np.concatenate(rows)), reports=reports
    )


def workspace_of(cache: Path, reports: str, most: tuple[int, ...] = UNEVEN) -> Workspace:
    sets = OpenedSets()
    for split in ("train", "val"):
        sets.get("digits:", split, lambda _, split: three_classes(split, reports, most))
    return Workspace(cache=cache, data="digits:", opened=sets)


def test_mean_per_class_accuracy_equals_sklearns_balanced_accuracy():
    random = np.random.RandomState(0)
    labels, guesses = random.choice(5, 200, p=(0.5, 0.3, 0.1, 0.06, 0.04)), random.choice(5, 200)
    right = (labels == guesses).astype(float)
    assert class_mean(right, labels) == pytest.approx(100 * balanced_accuracy_score(labels, guesses), abs=1e-12)
    weights = random.multinomial(200, np.full(200, 1 / 200), size=7).astype(float)
    means = class_means({"a": right}, labels, weights)["a"]
    resamples = [np.repeat(np.arange(200), row.astype(int)) for row in weights]
    expected = [100 * balanced_accuracy_score(labels[rows], guesses[rows]) for rows in resamples]
    assert np.allclose(means, expected, atol=1e-12)


def test_skipped_images_and_absent_classes_do_not_count():
    labels = np.array([0, 0, 0, 2, 2, 3])
    right = np.array([1.0, 0.0, np.nan, 1.0, 1.0, np.nan])
    assert class_mean(right, labels) == 75.0  # classes 0 and 2; nothing of 3 was read, 1 has no image


@pytest.fixture(autouse=True)
def fewer_resamples(monkeypatch):
    monkeypatch.setattr(tasks, "MAX_DRAWN_IMAGES", 100_000)


@pytest.fixture(scope="module")
def export() -> ViTExport:
    return one_block_export()


TASKS = {
    "k1": Knn(k=(1, 5)),
    "linear": Linear(augment=False, epochs=2, batch=32, lrs=(0.1,), readouts=("avg",), select="val"),
    "finetune": replace(FINETUNE["finetune@smoke"].task, epochs=1, warmup_epochs=0, batch=32),
    "lowshot": LowShot(shots=(2,), splits=2, fractions=(), pool="avg"),
}


@pytest.mark.parametrize("name", TASKS)
def test_probes_report_it_first_on_sets_whose_papers_do(name, export, tmp_path):
    plain, per_class = (
        TASKS[name].run(export, workspace_of(tmp_path, reports)) for reports in ("top1", "mean per class")
    )
    added = [metric for metric in per_class.metrics if metric not in plain.metrics]
    assert list(per_class.metrics) == [*added, *plain.metrics] and added[0].startswith("per_class")
    assert {metric: per_class.metrics[metric] for metric in plain.metrics} == dict(plain.metrics)
    labels = three_classes("val").labels
    for name in added:
        metric, top1 = per_class.metrics[name], per_class.metrics[name.replace("per_class", "top1")]
        if top1.deviation_of:
            assert metric.deviation_of == name.removesuffix("_std") and metric.value > 0
            continue
        accuracies = [np.mean(top1.per_image[labels == label]) for label in range(3)]
        assert metric.value == pytest.approx(100 * np.mean(accuracies), abs=1e-4)
        assert metric.chosen_on_val == top1.chosen_on_val
    record = metric_records(checked(per_class), len(labels))[0][added[0]]
    low, high = record.interval
    assert low < record.value < high and record.array_over == "resamples"


def test_a_penalty_is_chosen_by_the_metric_of_the_set(export, tmp_path):
    """Mean per-class accuracy on held-out images if papers report it, else top-1 accuracy."""
    task = LowShot(
        shots=(), fractions=(1.0,), lambdas=(1.0, 0.1, 0.01), holdout=0.3, pool="avg", preprocess="none", norm=True
    )
    chosen = {}
    for reports, score in (("top1", "top1"), ("mean per class", "per_class")):
        (fit,) = task.run(export, workspace_of(tmp_path, reports)).facts["fits"]
        scores = {entry["lambda"]: entry[score] for entry in fit["holdout"]}
        chosen[reports] = fit["lambda"]
        assert fit["lambda"] == next(lam for lam, value in scores.items() if value == max(scores.values()))
    assert chosen["top1"] != chosen["mean per class"]


@pytest.mark.parametrize("draws", ["mieb", "nested"])
def test_means_of_classes_of_one_size_deviate_as_top1_does(draws, export, tmp_path):
    task = LowShot(shots=(2,), splits=3, fractions=(), pool="avg", draws=draws)
    numbers = task.run(export, workspace_of(tmp_path, "mean per class", (10, 10, 10))).numbers
    assert numbers["per_class_2shot_std"] == pytest.approx(numbers["top1_2shot_std"], abs=1e-9)
    assert numbers["top1_2shot_std"] > 0
