"""What the segmentation tasks share: images and metric of a training, and the outcome of one or several."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from downstream.data.scenes import SceneSet
from downstream.loop.training import Place
from downstream.metrics.scores import reweighted
from downstream.models.libraries import libraries_used, quiet_libraries
from engine.resampling import resampled
from engine.tasks import Outcome

if TYPE_CHECKING:
    from downstream.data.segmentation_data import Sizes
    from downstream.loop.running import TrainedModel


def parts(train: SceneSet, val: SceneSet, sizes: "Sizes") -> tuple[Any, Any, Any]:
    """Training images, validation images, metric, as mmseg's objects."""
    with quiet_libraries():
        from downstream.data.segmentation_data import training_images, validation_images
        from downstream.models.segmentors import AreasMetric

        metric = AreasMetric()
    return training_images(train, sizes), validation_images(val, sizes), metric


def outcome(
    place: Place, trained: Sequence["TrainedModel"], train: Sequence[SceneSet], val: SceneSet, rest: dict
) -> Outcome:
    """Means over the trainings, the areas of every validation image, scores of resampled images, and the facts."""
    several = len(trained) > 1
    areas = {f"areas_{number}" if several else "areas": each.arrays["areas"] for number, each in enumerate(trained)}
    names = list(trained[0].metrics)
    metrics = {name: float(np.mean([each.metrics[name] for each in trained])) for name in names}
    if several:
        metrics["mIoU_std"] = float(np.std([each.metrics["mIoU"] for each in trained], ddof=1))
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
    drawn = resampled(lambda weights: reweighted(list(areas.values()), weights), len(val))
    return Outcome(metrics=metrics, per_image=areas, resampled=drawn, facts=facts)
