"""`bench record --check` finds edited numbers and arrays of a record, even where all checksums fit."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_results import made_checkpoint, made_result, save_result

from bench.recomputed import differences
from bench.results.record import DataUsed, ProtocolUsed, Result
from bench.run.runner import arrays_of, metric_records
from downstream.metrics.scores import weighted_scores
from engine.tasks import Metric, Outcome, resampled

IMAGES = 12
Arrays = dict[str, np.ndarray]
Edit = Callable[[Result, Arrays], Result | None]


def classification() -> Outcome:
    """Correctness of each image, and a loss in nats."""
    random = np.random.default_rng(0)
    correct, losses = random.random(IMAGES) < 0.6, random.random(IMAGES)
    return Outcome(
        metrics={
            "top1": Metric(value=100 * float(correct.mean()), per_image=correct.astype(np.float32)),
            "loss": Metric(value=float(losses.mean()), unit="nat", higher_is_better=False, per_image=losses),
        }
    )


def segmentation() -> Outcome:
    """The mean of two trainings, and areas of four classes in each image."""
    random = np.random.default_rng(1)
    labelled = random.integers(50, 100, (IMAGES, 4))
    areas = []
    for _ in range(2):
        correct = (labelled * random.random((IMAGES, 4))).astype(int)
        areas.append(np.stack([correct, correct + random.integers(0, 40, (IMAGES, 4)), labelled], -1).astype(np.int32))
    whole = weighted_scores(areas, np.ones((1, IMAGES)))
    drawn = resampled(lambda weights: weighted_scores(areas, weights), IMAGES)
    metrics = {name: Metric(value=float(values[0]), resampled=drawn[name]) for name, values in whole.items()}
    return Outcome(metrics=metrics, arrays={f"areas_{number}": values for number, values in enumerate(areas)})


def lines_after(outcome: Outcome, edit: Edit, folder: Path, plugin: str = "") -> list[str]:
    """The differences that are found in a result after an edit of it or of its arrays."""
    records, method = metric_records(outcome, IMAGES)
    arrays = arrays_of(outcome)
    result = made_result(
        made_checkpoint(),
        records,
        protocol=ProtocolUsed(name="knn@dino", version=1, plugin=plugin),
        data=DataUsed(name="scenes", url="tiny-voc:", images={"val": IMAGES}),
        arrays=tuple(outcome.arrays),
        interval_method=method,
    )
    stored = save_result(folder, edit(result, arrays) or result, arrays)
    lines = list(differences(folder, [stored]))
    assert all(line.startswith("results/") for line in lines)
    return lines


def changed(name: str, **fields: object) -> Edit:
    """An edit of a metric's fields."""
    return lambda result, arrays: replace(
        result, metrics={**result.metrics, name: replace(result.metrics[name], **fields)}
    )


def array_edit(change: Callable[[Arrays], object]) -> Edit:
    def edit(result: Result, arrays: Arrays) -> None:
        change(arrays)

    return edit


@pytest.mark.parametrize("outcome", [classification(), segmentation()], ids=["classification", "segmentation"])
def test_results_as_they_are_written_agree(outcome, tmp_path):
    assert lines_after(outcome, lambda result, arrays: None, tmp_path) == []


@pytest.mark.parametrize(
    ("outcome", "edit", "named"),
    [
        (classification(), changed("top1", value=99.0), "top1 is not the mean"),
        (classification(), changed("loss", value=0.01), "loss is not the mean"),
        (classification(), changed("top1", unit="s"), "top1 is not the mean"),
        (classification(), changed("top1", interval=(98.0, 99.0)), "top1 has another interval"),
        (classification(), changed("loss", interval=None), "loss lacks the interval"),
        (classification(), changed("top1", array=None), "top1 has an interval"),
        (classification(), array_edit(lambda arrays: arrays.pop("loss")), "loss lacks its array"),
        (classification(), array_edit(lambda arrays: arrays["top1"].__imul__(0)), "top1 is not the mean"),
        (
            classification(),
            array_edit(lambda arrays: arrays.update(top1=arrays["top1"][:5])),
            "top1 has values for 5 images, expected 12",
        ),
        (classification(), array_edit(lambda arrays: arrays.update(top1=np.array("x"))), "top1 has an array that"),
        (segmentation(), changed("mIoU", value=80.0), "mIoU is not what the areas"),
        (segmentation(), changed("mIoU", interval=(1.0, 2.0)), "mIoU has another interval"),
        (
            segmentation(),
            array_edit(lambda arrays: arrays["mIoU_resampled"].__iadd__(5)),
            "mIoU_resampled is not what",
        ),
        (segmentation(), array_edit(lambda arrays: arrays["areas_0"].__imul__(-1)), "more pixels are correct"),
        (segmentation(), array_edit(lambda arrays: arrays.update(areas_0=arrays["areas_0"][:3])), "cover 3 images"),
        (segmentation(), array_edit(lambda arrays: arrays.update(areas_0=np.array("x"))), "do not fit together"),
    ],
)
def test_an_edit_is_found(outcome, edit, named, tmp_path):
    lines = lines_after(outcome, edit, tmp_path)
    assert any(named in line for line in lines), lines


def test_arrays_of_other_packages_are_compared_by_mean_and_interval_alone(tmp_path):
    assert lines_after(segmentation(), changed("mIoU", value=80.0), tmp_path, plugin="toys 1.0") == []
