"""Images with several labels: average precision as in VOC 2007, and logistic regression class by class."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from meeting import run_in_threads
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import precision_recall_curve
from toy_exports import one_block_export

from bench.results.record import CheckpointUsed, DataUsed
from bench.run.checkpoints import LoadedCheckpoint
from bench.run.outcomes import checked, metric_records
from bench.run.prepare import plan_jobs, refused_sets
from bench.run.suites import catalogue, choose_protocols
from checkpoints.export import ViTExport
from engine import tasks
from engine.distributed import World
from engine.tasks import OpenedSets, Outcome, Task, Workspace
from imagesets.sets import ImageSet, open_set
from probes.lowshot.blocks import PreparedRows
from probes.lowshot.fitting import FitSettings, Fitter
from probes.lowshot.several_labels import ClassByClass, scores_of
from probes.scores import average_precision, mean_average_precision
from probes.tasks.finetune import PROTOCOLS as FINETUNE
from probes.tasks.knn import Knn
from probes.tasks.linear import Linear
from probes.tasks.lowshot import PROTOCOLS, LowShot

UNWEIGHTED = np.ones((1, 6))
TASK = LowShot(shots=(), fractions=(1.0,), lambdas=(100.0, 1.0, 0.01), holdout=0.2, preprocess="none", pool="avg")
NO_ROWS = PreparedRows(features=np.empty((0, 6), np.float32), preprocess="none")
FITTER = Fitter(
    settings=FitSettings(lambdas=(0.5, 0.1, 0.02), tolerance=1e-10),
    train=NO_ROWS,
    labels=np.empty((0, 1), np.int64),
    val=NO_ROWS,
    val_labels=np.empty((0, 1), np.int64),
    classes=2,
    seed=0,
)


@pytest.mark.parametrize(
    ("labels", "value"),
    [
        ([1, 1, 1, 0, 0, 0], 100.0),
        # precision is 1/2 up to recall 0.5, and 2/4 up to recall 1
        ([0, 1, 0, 1, 0, 0], 50.0),
        # 1 up to recall 1/2, then 2/6: 6 levels of 1, 5 of 1/3
        ([1, 0, 0, 0, 0, 1], 100 * (6 + 5 / 3) / 11),
        # the second image is not judged, so that the third has its rank
        ([1, -1, 1, 0, 0, 0], 100.0),
        ([0, 0, 0, 0, 0, 0], np.nan),
        # three positives: recall 1/3 is above 0.3, so that four levels are 1
        ([1, 0, 1, 0, 0, 1], 100 * (4 + 3 * 2 / 3 + 4 / 2) / 11),
    ],
)
def test_average_precision_by_hand(labels, value):
    precision = average_precision(np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.4]), np.array(labels), UNWEIGHTED)
    assert precision == pytest.approx([value], nan_ok=True)


def test_average_precision_on_resamples_equals_that_of_sklearns_curve_at_eleven_recalls():
    random = np.random.RandomState(0)
    scores, labels = random.permutation(200) / 200, (random.rand(200) < 0.3).astype(int)
    weights = random.multinomial(200, np.full(200, 1 / 200), size=5).astype(float)
    expected = []
    for row in weights.astype(int):
        precision, recall, _ = precision_recall_curve(np.repeat(labels, row), np.repeat(scores, row))
        precision, recall = precision[:-1], recall[:-1]  # scikit-learn adds the last point
        positives = np.rint(recall * np.repeat(labels, row).sum())
        levels = [precision[10 * positives >= level * positives.max()].max() for level in range(11)]
        expected.append(100 * np.mean(levels))
    assert np.allclose(average_precision(scores, labels, weights), expected, atol=1e-9)
    two_classes = np.stack([scores, -scores], axis=1), np.stack([labels, np.zeros_like(labels)], axis=1)
    means = mean_average_precision(*two_classes, weights)
    assert np.allclose(means, expected, atol=1e-9), "the class without images was not left out"


def several(split: str) -> ImageSet:
    """Digits labelled as even, above 4, and 7; a 1 is not judged on the last."""
    digits = open_set("digits:", split).limited(100)
    number = digits.labels
    labels = np.stack([number % 2 == 0, number > 4, number == 7], axis=1).astype(np.int64)
    labels[number == 1, 2] = -1
    return replace(digits, labels=labels, classes=("even", "large", "seven"), reports="mAP")


@pytest.fixture(autouse=True)
def fewer_resamples(monkeypatch):
    monkeypatch.setattr(tasks, "MAX_DRAWN_IMAGES", 100_000)


@pytest.fixture(scope="module")
def export() -> ViTExport:
    return one_block_export()


def run(task: Task, export: ViTExport, cache: Path, sets: Callable[[str], ImageSet] = several, **settings) -> Outcome:
    """The outcome on `sets(split)` in place of the digits."""
    opened = OpenedSets()
    for split in ("train", "val"):
        opened.get("digits:", split, lambda _, split: sets(split))
    return task.run(export, Workspace(cache=cache, data="digits:", opened=opened, **settings))


@pytest.mark.parametrize("intercept", [False, True])
def test_a_fit_equals_sklearns_binary_regression(intercept):
    random = np.random.RandomState(1)
    features = random.randn(80, 6).astype(np.float32)
    labels = (features[:, :2].sum(1) + random.randn(80) > 0).astype(np.int64)
    rows = PreparedRows(features=features, preprocess="none", intercept=intercept)
    fitter = replace(FITTER, settings=replace(FITTER.settings, intercept=intercept), train=rows, val=rows)
    (fit,) = ClassByClass(fitter=fitter, classes=("a",), labels=labels[:, None]).fit(World())
    # In float32 scikit-learn stops up to 5e-5 from the optimum, at a place that depends on the processor.
    features = features.astype(np.float64)
    theirs = LogisticRegression(C=2.0, fit_intercept=intercept, tol=1e-10, max_iter=1000).fit(features, labels)
    assert np.allclose(fit.scores, theirs.decision_function(features), atol=1e-5)
    assert fit.record["lambda"] == 0.5 and fit.record["gap"] <= 1e-10
    direction = np.append(theirs.coef_[0], theirs.intercept_) if intercept else theirs.coef_[0]
    weights = torch.from_numpy(np.stack([np.zeros(len(direction)), direction], axis=1))
    assert np.allclose(scores_of(rows, np.arange(80), weights), theirs.decision_function(features), atol=1e-6)


def test_a_set_with_several_labels_is_evaluated(export, tmp_path):
    outcome = run(TASK, export, tmp_path)
    labels = several("val").labels
    chance = [100 * (column == 1).sum() / (column >= 0).sum() for column in labels.T]
    assert list(outcome.metrics) == ["mAP"] and outcome.numbers["mAP"] > np.mean(chance) + 10
    scores = outcome.arrays["scores"]
    assert mean_average_precision(scores, labels, np.ones((1, 100)))[0] == pytest.approx(outcome.numbers["mAP"])
    assert [fit["images"] for fit in outcome.facts["fits"]] == [100, 100, 90]
    assert len({fit["lambda"] for fit in outcome.facts["fits"]}) == 1
    record = metric_records(checked(outcome), 100)[0]["mAP"]
    assert record.interval[0] < record.value < record.interval[1] and record.array_over == "resamples"
    assert run(TASK, export, tmp_path).metrics == outcome.metrics


def test_processes_share_the_classes(export, tmp_path):
    alone = run(TASK, export, tmp_path)
    for outcome in run_in_threads(2, lambda world: run(TASK, export, tmp_path, world=world)):
        assert outcome.metrics == alone.metrics and outcome.facts == alone.facts
        assert np.array_equal(outcome.arrays["scores"], alone.arrays["scores"])


def test_images_that_are_not_judged_do_not_change_the_fit(export, tmp_path):
    def judged_images(split: str) -> ImageSet:
        images = several(split)
        return images.subset(np.flatnonzero(images.labels[:, 2] >= 0), "judged")

    fixed = replace(TASK, lambdas=(1.0,), holdout=0.0)
    complete, judged = (run(fixed, export, tmp_path, sets) for sets in (several, judged_images))
    assert complete.facts["fits"][2] == judged.facts["fits"][2]


def test_the_lambda_is_chosen_on_held_out_images(export, tmp_path):
    chosen = run(TASK, export, tmp_path)
    best = chosen.facts["fits"][0]["lambda"]
    alone = run(replace(TASK, lambdas=(best,), holdout=0.0), export, tmp_path)
    assert alone.facts["fits"] == chosen.facts["fits"] and alone.metrics == chosen.metrics
    by_class = ClassByClass(fitter=FITTER, classes=("a", "b"), labels=np.eye(2))
    scores = np.array([[50.0, 60.0, 90.0], [np.nan, 70.0, -1.0]])  # means over classes: 50, 65, none
    assert by_class.choose_lambdas(scores) == [0.1, 0.1]


@pytest.mark.parametrize(
    "task",
    [Knn(k=(5,)), Linear(augment=False, epochs=1), LowShot(shots=(1,)), FINETUNE["finetune@smoke"].task],
    ids=lambda task: type(task).__name__,
)
def test_other_probes_refuse_several_labels(task, export, tmp_path):
    with pytest.raises(ValueError, match=r"several labels each, .* logreg@dinov2$"):
        run(task, export, tmp_path)
    assert PROTOCOLS["logreg@dinov2"].task.takes_several_labels


def test_a_plan_leaves_out_probes_of_single_labels(export, tmp_path):
    space = Workspace(cache=tmp_path, data="digits:")
    data = [DataUsed(name="voc", url="digits:"), DataUsed(name="tiny", url="tiny:")]
    space.opened.get("digits:", "val", lambda _, split: several(split))
    space.opened.get("tiny:", "val", open_set)
    transfer = choose_protocols("transfer", catalogue())
    assert refused_sets(data, transfer, space) == {"voc": ["knn@dino", "lowshot@transfer"]}
    used = CheckpointUsed(name="one", digest="0" * 64)
    loaded = LoadedCheckpoint(used=used, spec=export.spec, reference="one")
    _, ((_, jobs),), lines = plan_jobs(tmp_path, space, [loaded], data, transfer)
    assert [line.partition(" ")[0] for line in lines] == ["voc"]
    on_tiny = {f"{protocol.name} on tiny" for protocol in transfer}
    assert {job.title for job in jobs} == {"logreg@dinov2 on voc"} | on_tiny
    with pytest.raises(ValueError, match=r"voc=digits:': .*logreg@dinov2"):
        plan_jobs(tmp_path, space, [loaded], data, choose_protocols("knn@dino", catalogue()))


def test_a_class_without_a_training_image_is_refused(export, tmp_path):
    def without_sevens(split: str) -> ImageSet:
        images = several(split)
        return replace(images, labels=np.where([False, False, True], 0, images.labels))

    with pytest.raises(ValueError, match=r"'seven'.*limit"):
        run(TASK, export, tmp_path, without_sevens)
