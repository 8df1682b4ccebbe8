"""Base of the segmentation tasks: images, metric and FLOPs of a training; the outcome of one or several trainings."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from checkpoints.frozen import FrozenExport, FrozenSpec, vit_spec
from checkpoints.spec import ViTSpec
from downstream.data.scenes import SceneSet, open_both, warn_of_masks
from downstream.dense_task import FORWARD_BACKWARD, DenseTask, Flops, flops_on_meta, untrained_export
from downstream.metrics.scores import constant_scores, weighted_scores
from downstream.models.operators import libraries_used, quiet_libraries
from engine.tasks import Metric, Outcome, Workspace, resampled

if TYPE_CHECKING:
    from torch import nn

    from downstream.loop.running import TrainedModel


class Segmentation(DenseTask):
    """Base of the segmentation tasks. Annotations without values are settings that all subclasses define."""

    VIT_REASON: ClassVar[str]  # why training needs a ViT, for the message that refuses other networks
    RESIZE_VAL: ClassVar[bool] = True  # whether validation images are resized to fit `scale`, or keep their size

    crop: int
    stride: int
    scale: tuple[int, int]
    ratios: tuple[float, float]

    @property
    def val_size(self) -> tuple[int, int]:
        """Approximate longer and shorter side of a validation image in pixels."""
        raise NotImplementedError

    def model(self, export: FrozenExport, classes: int, synchronised: bool, seed: int) -> "nn.Module":
        """mmseg's EncoderDecoder with the export as its backbone.

        synchronised: batch norms over all processes. seed: seed of the initial weights of neck and heads.
        """
        raise NotImplementedError

    def check_network(self, spec: FrozenSpec) -> None:
        if not self.frozen:
            vit_spec(spec, self.VIT_REASON)
        if not (isinstance(spec, ViTSpec) or spec.has_patches):
            raise ValueError(
                f"{spec.reference} returns one vector per image, but segmentation reads patch tokens: let it return "
                "class token or None, patch tokens and their grid"
            )

    def side(self, spec: FrozenSpec) -> int:
        """Side of the crops in pixels: `crop`, rounded up to a multiple of the patch size."""
        return -(-self.crop // spec.patch_size) * spec.patch_size

    @cache  # noqa: B019 (settings and architectures are few)
    def model_flops(self, spec: FrozenSpec, classes: int) -> Flops:
        """FLOPs on a training crop, forward and backward, and on all windows of a validation image."""
        self.check_network(spec)
        side = self.side(spec)

        def run_segmentor(segmentor: Any, images: torch.Tensor) -> None:
            maps = segmentor.extract_feat(images)
            segmentor.decode_head(maps)
            if segmentor.with_auxiliary_head:
                segmentor.auxiliary_head(maps)

        with quiet_libraries():
            model = self.model(untrained_export(spec, side), classes, False, 0)
        backbone, heads = flops_on_meta(model, (side, side), run_segmentor)
        windows = window_count(*self.val_size, side, self.stride)
        training = backbone * (1.0 if self.frozen else FORWARD_BACKWARD) + heads * FORWARD_BACKWARD
        return {"training": training, "evaluation": windows * (backbone + heads)}

    def load_scenes(self, space: Workspace) -> tuple[SceneSet, SceneSet, dict[str, list[str]]]:
        """Training and validation scenes, and warnings on ignored pixels and absent classes of each split.

        The warnings are also printed.

        Raises:
            ValueError: the masks of a split contain only one class.
        """
        self.check_images(space)
        train, val = open_both(space)
        return train, val, warn_of_masks(space, train, val)

    def build_data(self, train: SceneSet, val: SceneSet, spec: FrozenSpec) -> tuple[Any, Any, Any]:
        """Training dataset, validation dataset and metric, objects of mmseg."""
        with quiet_libraries():
            from downstream.data.segmentation_data import segmentation_training_images, segmentation_validation_images
            from downstream.models.segmentors import AreasMetric

            images = segmentation_training_images(train, self.side(spec), self.scale, self.ratios)
            val_images = segmentation_validation_images(val, self.scale if self.RESIZE_VAL else None)
            return images, val_images, AreasMetric()

    def crop_warnings(self, spec: FrozenSpec) -> list[str]:
        side = self.side(spec)
        return [f"crops of {side} px, not {self.crop}: patches are {spec.patch_size} px"] if side != self.crop else []


def window_count(longer: int, shorter: int, crop: int, stride: int) -> int:
    """Number of evaluation windows of an image with these sides in pixels."""
    across, down = (max(0, -(-(side - crop) // stride)) + 1 for side in (longer, shorter))
    return across * down


def segmentation_outcome(
    results: Sequence["TrainedModel"],
    train: Sequence[SceneSet],
    val: SceneSet,
    mask_warnings: Mapping[str, Sequence[str]],
    further_facts: dict,
    chosen_on_val: bool = False,
) -> Outcome:
    """The outcome: mean metrics over the trainings, their values on resampled images, and areas of every image.

    Args:
        results: results of the trainings.
        train: training scenes of each training.
        val: validation scenes.
        mask_warnings: split -> warnings on its masks.
        further_facts: facts of the task.
        chosen_on_val: whether validation images chose the reported evaluation.
    """
    first, several = results[0], len(results) > 1
    floor_class, floor_scores = constant_scores(first.arrays["areas"])
    facts = {
        "train": [scenes.facts for scenes in train],
        "val": val.facts,
        "notes": list(dict.fromkeys([*train[0].notes, *val.notes])),
        "masks": {split: list(lines) for split, lines in mask_warnings.items()},
        "floor": {"prediction": f"{val.classes[floor_class]} everywhere", "metrics": floor_scores},
        "evaluations": [result.history for result in results],
        "reported_step": [result.step for result in results],
        "libraries": libraries_used(),
        "batch": dict(first.batch),
        **further_facts,
    }
    areas = {f"areas_{number}" if several else "areas": result.arrays["areas"] for number, result in enumerate(results)}
    on_resamples = resampled(lambda weights: weighted_scores(list(areas.values()), weights), len(val))
    metrics = {}
    for name in first.metrics:
        mean = float(np.mean([result.metrics[name] for result in results]))
        metrics[name] = Metric(value=mean, resampled=on_resamples[name], chosen_on_val=chosen_on_val)
    if several:
        deviation = float(np.std([result.metrics["mIoU"] for result in results], ddof=1))
        metrics["mIoU_std"] = Metric(value=deviation, higher_is_better=None, deviation_of="mIoU")
    previews = {name: array for name, array in first.arrays.items() if name.startswith("shown_")}
    return Outcome(metrics=metrics, arrays=areas | previews, facts=facts)
