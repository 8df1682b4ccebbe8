"""What the segmentation tasks share: images and metric of a training, and the outcome of one or several."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from downstream.data.scenes import SceneSet
from downstream.loop.training import Place
from downstream.metrics.scores import weighted_scores
from downstream.models.libraries import libraries_used, quiet_libraries
from engine.resampling import resampled
from engine.tasks import Metric, Outcome

if TYPE_CHECKING:
    from downstream.data.segmentation_data import SegmentationSizes
    from downstream.loop.running import TrainedModel


def mmseg_objects(train: SceneSet, val: SceneSet, sizes: "SegmentationSizes") -> tuple[Any, Any, Any]:
    """Training images, validation images, metric, as mmseg's objects."""
    with quiet_libraries():
        from downstream.data.segmentation_data import segmentation_training_images, segmentation_validation_images
        from downstream.models.segmentors import AreasMetric

        metric = AreasMetric()
    return segmentation_training_images(train, sizes), segmentation_validation_images(val, sizes), metric


def segmentation_outcome(
    place: Place,
    trained: Sequence["TrainedModel"],
    train: Sequence[SceneSet],
    val: SceneSet,
    rest: dict,
    chosen_on_val: bool = False,
) -> Outcome:
    """Means over the trainings with their values on resampled images, the areas of every validation image, and the
    facts."""
    several = len(trained) > 1
    areas = {f"areas_{number}" if several else "areas": each.arrays["areas"] for number, each in enumerate(trained)}
    facts = {
        "train": [{"url": scenes.url, "images": len(scenes), "fingerprint": scenes.fingerprint} for scenes in train],
        "val": {"url": val.url, "images": len(val), "fingerprint": val.fingerprint},
        "notes": list(dict.fromkeys([*train[0].notes, *val.notes])),
        "evaluations": [each.history for each in trained],
        "reported_step": [each.step for each in trained],
        "libraries": libraries_used(),
        **place.facts,
        **rest,
    }
    drawn = resampled(lambda weights: weighted_scores(list(areas.values()), weights), len(val))
    metrics = {}
    for name in trained[0].metrics:
        mean = float(np.mean([each.metrics[name] for each in trained]))
        metrics[name] = Metric(value=mean, resampled=drawn[name], chosen_on_val=chosen_on_val)
    if several:
        spread = float(np.std([each.metrics["mIoU"] for each in trained], ddof=1))
        metrics["mIoU_std"] = Metric(value=spread, higher_is_better=None, deviation_of="mIoU")
    shown = {name: values for name, values in trained[0].arrays.items() if name.startswith("shown_")}
    return Outcome(metrics=metrics, arrays=areas | shown, facts=facts)
