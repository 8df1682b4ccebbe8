"""Base of the detection tasks on COCO's layout, with boxes and masks: plan, FLOPs and outcome of a training."""

from dataclasses import dataclass
from functools import cache
from math import log2
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from checkpoints.export import ViTExport
from checkpoints.frozen import FrozenExport, FrozenSpec, vit_spec
from checkpoints.spec import ViTSpec
from downstream.data.scenes import SceneSet, open_both
from downstream.dense_task import (
    FORWARD_BACKWARD,
    DenseTask,
    Flops,
    Lengths,
    Source,
    flops_on_meta,
    untrained_export,
)
from downstream.detection_settings import DetectionSettings
from downstream.loop.training import Plan, adamw_by_layer
from downstream.metrics.scores import weighted_ap
from downstream.models.operators import libraries_used, quiet_libraries
from engine.tasks import Metric, Outcome, Workspace, resampled, settings_of
from engine.training.schedules import MultipliedWarmup, StepDecay

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Detection(DetectionSettings, DenseTask):
    """One training of a detector and its evaluation on the validation images."""

    LAYOUT: ClassVar[str] = "coco"
    MAX_MICRO_BATCH: ClassVar[int] = 2  # as on each GPU of the sources
    SOURCE: ClassVar[Source] = Source(
        name="COCO",
        classes=80,
        images=117266,  # the images with objects, of 118 287
        settings=("epochs", "warmup", "batch", "short", "long", "val", "anchor", "proposals", "detections"),
    )

    def check_network(self, spec: FrozenSpec) -> None:
        """Raise ValueError for a network that is not a ViT, or whose patch size is far from strides 4, 8, 16, 32."""
        vit_spec(spec, "detectors are trained with four blocks of a ViT")
        if stride_of(spec) not in (4, 8, 16, 32):
            raise ValueError(f"patches of {spec.patch_size} px: the pyramid of strides 4, 8, 16, 32 needs 3 to 45 px")

    def lengths(self, images: int) -> Lengths:
        steps = self.epochs * -(-images // self.batch)
        return Lengths(1, steps, steps * self.batch, -(-self.epochs // (self.judge_every or self.epochs)))

    def side(self, spec: FrozenSpec) -> int:
        return round((max(self.short) * self.long) ** 0.5) if self.augment != "jitter" else self.long

    @cache  # noqa: B019 (settings and architectures are few)
    def model_flops(self, spec: ViTSpec, classes: int) -> Flops:
        """FLOPs on images of 4 : 3, as most of COCO's are, at the median training size."""
        self.check_network(spec)
        export = untrained_export(spec.with_patch_size(stride_of(spec)))
        assert isinstance(export, ViTExport)
        with quiet_libraries():
            model = self.model(export, classes, False, 0)
        if self.augment == "jitter":
            train = (self.long, self.long)
        else:
            median = sorted(self.short)[len(self.short) // 2]
            train = (median, min(self.long, median * 4 // 3))
        val = (min(self.val), min(max(self.val), min(self.val) * 4 // 3))
        return {
            "training": FORWARD_BACKWARD * self.image_flops(model, train, self.regions, self.regions // 4),
            "evaluation": self.image_flops(model, val, self.proposals[1], self.detections),
        }

    def image_flops(self, model: Any, size: tuple[int, int], boxes: int, masks: int) -> float:
        """FLOPs of the detector on one image.

        Args:
            model: mmdet's detector, which is not usable afterwards.
            size: height and width in pixels, which are padded to multiples of 32.
            boxes: number of regions in each box head.
            masks: number of regions in each mask head.
        """

        def run_detector(detector: Any, images: torch.Tensor) -> None:
            detector.rpn_head(detector.extract_feat(images))
            heads = detector.roi_head
            for head in heads.bbox_head if self.CASCADE else [heads.bbox_head]:
                head(torch.zeros(boxes, self.channels, 7, 7))
            for head in heads.mask_head if self.CASCADE else [heads.mask_head]:
                head(torch.zeros(masks, self.channels, 14, 14))

        height, width = (-(-side // 32) * 32 for side in size)
        return sum(flops_on_meta(model, (height, width), run_detector))

    def run(self, export: ViTExport, space: Workspace) -> Outcome:
        self.check_network(export.spec)
        self.check_images(space)
        train, val = open_both(space)
        plan = self.plan(export, train, val, space.seed)
        steps = plan.epochs * plan.steps_per_epoch
        if self.warmup > steps and space.limit is None:  # with --limit, the number is no result anyway
            raise ValueError(f"warmup={self.warmup}: must be no more than {steps}, the steps on {plan.train.url}")
        train, val, result = plan.train, plan.val, self.run_training(plan, space)
        from downstream.metrics.detection_metric import evaluator_version

        warnings = self.recipe_warnings(export, train, result.batch)
        warnings += [f"patches are {text}" for text in resized_patches(export.spec).values()]
        if unlearnt := val.instances.used_categories - train.instances.used_categories:
            warnings.append(
                f"{len(unlearnt)} of {len(val.instances.used_categories)} classes with objects in val have none in "
                f"train, such as {val.instances.categories[min(unlearnt)]}: each counts as an AP of 0"
            )
        if not uses_masks(train, val):
            warnings.append("objects have only boxes: no mask head was trained")
        facts = {
            "train": train.facts,
            "val": val.facts,
            "notes": list(dict.fromkeys([*train.notes, *val.notes])),
            "floor": {"prediction": "nothing", "metrics": dict.fromkeys(result.metrics, 0.0)},
            "evaluations": [result.history],
            "reported_step": [result.step],
            "detections": int((result.arrays["classes"] >= 0).sum()),
            "evaluated_by": evaluator_version(),
            "libraries": libraries_used(),
            "batch": dict(result.batch),
            "epochs": self.epochs,
            "warnings": warnings,
            **resized_patches(export.spec),
        }
        on_resamples = resampled(lambda weights: weighted_ap(result.arrays, weights), len(val))
        metrics = {name: Metric(value=value, resampled=on_resamples[name]) for name, value in result.metrics.items()}
        return Outcome(metrics=metrics, arrays=dict(result.arrays), facts=facts)

    def plan(self, export: FrozenExport, train: SceneSet, val: SceneSet, seed: int) -> Plan:
        """The plan of the training, on the training images that have objects."""
        self.check_network(export.spec)
        assert isinstance(export, ViTExport)
        train = trainable_scenes(train, val)
        steps_per_epoch = -(-len(train) // self.batch)
        return Plan(
            task=self.KEY,
            export=export,
            settings=settings_of(self),
            train=train,
            val=val,
            batch=self.batch,
            max_micro_batch=self.MAX_MICRO_BATCH,
            schedule=MultipliedWarmup(
                schedule=StepDecay(milestones=self.milestones), updates=self.warmup, start=self.start
            ),
            epochs=self.epochs,
            steps_per_epoch=steps_per_epoch,
            judge_every=self.judge_every * steps_per_epoch,
            build_data=lambda: self.build_data(train, val),
            build_model=lambda synchronised: self.model(
                export, len(val.classes), synchronised, seed, uses_masks(train, val)
            ),
            build_optimizer=lambda model: adamw_by_layer(model, export.spec.depth, self),
            label=f"{self.KEY} on {train.url}",
        )

    def build_data(self, train: SceneSet, val: SceneSet) -> tuple[Any, Any, Any]:
        """Training dataset, validation dataset and metric, objects of mmdet."""
        with quiet_libraries():
            from downstream.data.detection_data import detection_training_images, detection_validation_images
            from downstream.metrics.detection_metric import DetectionMetric

            metric = DetectionMetric(val.instances, self.detections)
            images = detection_training_images(train, self, uses_masks(train, val))
            return images, detection_validation_images(val, self), metric

    def model(self, export: ViTExport, classes: int, synchronised: bool, seed: int, masks: bool = True) -> "nn.Module":
        """mmdet's detector with the export as its backbone.

        The position table is trained at its size in the export, and interpolated for every image. Patches of other
        sizes than the pyramid's strides are resized first.

        Args:
            export: the export.
            classes: number of classes.
            synchronised: batch norms over all processes.
            seed: seed of the initial weights of neck and heads.
            masks: with a mask head.
        """
        from downstream.models.backbone import DenseBackbone, default_taps, dense_network
        from downstream.models.detectors import detector

        if stride_of(export.spec) != export.spec.patch_size:
            export = export.with_patch_size(stride_of(export.spec))
        backbone = DenseBackbone(
            dense_network(export, export.spec.stored.image_size, self.drop_path),
            default_taps(export.spec.depth),
            norm=self.norm,
            train_positions=self.train_positions,
            recompute=self.recompute,
        )
        return detector(self, backbone, export, classes, synchronised, seed, masks)


def stride_of(spec: FrozenSpec) -> int:
    """The power of two that is nearest to the patch size, in octaves: 16 for patches of 14 px."""
    return int(2 ** round(log2(spec.patch_size)))


def resized_patches(spec: FrozenSpec) -> dict[str, str]:
    """A fact for results if the patch embedding is resized to a stride; empty otherwise."""
    stride = stride_of(spec)
    return {"patches": f"resized from {spec.patch_size} to {stride} px"} if stride != spec.patch_size else {}


def trainable_scenes(train: SceneSet, val: SceneSet) -> SceneSet:
    """The training images that have objects.

    Raises:
        ValueError: no image of a split has an object, or the splits have different categories.
    """
    try:
        train.instances.check_with(val.instances)
    except ValueError as error:
        raise ValueError(f"{train.url}: {error}") from error
    return train.subset(train.instances.trainable, "with-objects")


def uses_masks(train: SceneSet, val: SceneSet) -> bool:
    """Whether masks are trained and scored in addition to boxes: if objects of both splits have outlines."""
    return train.instances.has_outlines and val.instances.has_outlines
