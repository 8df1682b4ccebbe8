"""Object detection and instance segmentation on COCO's layout: training and outcome of both tasks."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from checkpoints.export import ViTExport
from checkpoints.frozen import FrozenSpec, vit_spec
from checkpoints.spec import ViTSpec
from downstream.data.scenes import SceneSet
from downstream.detection_settings import DetectionSettings
from downstream.loop.optimisation import optimizer_groups
from downstream.loop.training import Place, Plan, Source, chosen_elsewhere, open_both, warnings
from downstream.metrics.average_precision import weighted_ap
from downstream.models.libraries import libraries_used, quiet_libraries
from downstream.planning import (
    detection_operations,
    drawn_detections,
    loading_seconds,
    rehearsed_plan,
    untrained,
    work_of_training,
)
from engine.resampling import resampled
from engine.tasks import Metric, Outcome, Workspace
from engine.training.schedules import MultipliedWarmup, StepDecay
from engine.work import Kind, Scale, Work

if TYPE_CHECKING:
    from torch import nn

    from downstream.data.detection_data import DetectionSizes
    from downstream.loop.running import TrainedModel

COCO = Source(
    name="COCO",
    classes=80,
    images=117266,  # with objects, of 118 287
    settings=("epochs", "warmup", "batch", "short", "long", "val", "anchor", "proposals", "detections"),
)
MICRO_BATCH = 2  # images in a forward pass, as on each GPU of the sources, unless --batch-size is given


@dataclass(frozen=True, kw_only=True)
class Detection(DetectionSettings):
    """One training, and what it is worth on the validation images."""

    LAYOUT: ClassVar[str] = "coco"

    def check_network(self, spec: FrozenSpec) -> None:
        """ValueError for patches from which strides of 4, 8, 16 and 32 cannot be made, and for what is no ViT."""
        vit_spec(spec, "detectors are trained with four blocks of a ViT")
        if spec.patch_size not in (4, 8, 16, 32):
            raise ValueError(
                f"patches of {spec.patch_size} px: the pyramid of strides 4, 8, 16, 32 needs 4, 8, 16 or 32 px"
            )

    def sizes(self, spec: ViTSpec, images: Mapping[str, int]) -> dict[str, Any]:
        self.check_network(spec)
        return {
            "longest side": self.long,
            "epochs": self.epochs,
            "steps": f"up to {self.epochs * -(-images['train'] // self.batch)}",  # images without objects are left out
            "batch": self.batch,
            "evaluations": -(-self.epochs // (self.judge_every or self.epochs)),
        }

    def work(self, scale: Scale) -> Work:
        self.check_network(scale.spec)
        steps = self.epochs * -(-scale.images["train"] // self.batch)
        evaluations = -(-self.epochs // (self.judge_every or self.epochs))
        side = round((max(self.short) * self.long) ** 0.5) if self.augment != "jitter" else self.long
        at_once = min(scale.batch_size or MICRO_BATCH, self.batch)
        return work_of_training(
            scale,
            trainings=1,
            trained=steps * self.batch,
            updates=steps,
            evaluations=evaluations,
            side=side,
            at_once=at_once,
        )

    def model_flops(self, spec: ViTSpec, classes: int) -> dict[Kind, float]:
        self.check_network(spec)
        return detection_operations(partial(self.model, untrained(spec), classes, False, 0), self)

    def rehearse(self, export: ViTExport, space: Workspace) -> dict[Kind, float]:
        loading_seconds()
        train, val = open_both(space, self.LAYOUT)
        plan = self.plan(export, learnable(train, val), val, space.seed)

        def operations() -> float:
            return self.model_flops(export.spec, len(val.classes))["training"]

        score = partial(weighted_ap, drawn_detections(len(val), self.detections, len(val.classes)))
        return rehearsed_plan(plan, self.place(export, space), score, operations)

    def place(self, export: ViTExport, space: Workspace) -> Place:
        """Where the training runs."""
        return Place(export=export, space=space, task=self.KEY, largest=MICRO_BATCH)

    def run(self, export: ViTExport, space: Workspace) -> Outcome:
        self.check_network(export.spec)
        train, val = open_both(space, self.LAYOUT)
        train = learnable(train, val)
        place = self.place(export, space)
        trained = place.trained(self.plan(export, train, val, space.seed))
        departures = warnings(export, self.size, self.branch, 0, 0, place.facts["batch"])
        departures += chosen_elsewhere(self, COCO, train)
        return detection_outcome(place, trained, train, val, {"epochs": self.epochs, "warnings": departures})

    def plan(self, export: ViTExport, train: SceneSet, val: SceneSet, seed: int) -> Plan:
        """The one training, as `Place` runs it."""
        with quiet_libraries():
            from downstream.data.detection_data import DetectionSizes

        steps = -(-len(train) // self.batch)  # of an epoch
        sizes = DetectionSizes(**{name: getattr(self, name) for name in DetectionSizes.__dataclass_fields__})
        return Plan(
            settings=asdict(self),
            train=train,
            val=val,
            batch=self.batch,
            schedule=MultipliedWarmup(
                schedule=StepDecay(milestones=self.milestones), updates=self.warmup, start=self.start
            ),
            epochs=self.epochs,
            steps_per_epoch=steps,
            judge_every=self.judge_every * steps,
            best="",
            objects=lambda: mmdet_objects(train, val, sizes, self.detections),
            build=lambda synchronised: self.model(export, len(val.classes), synchronised, seed),
            optimise=lambda model: self.optimiser(model, export),
            label=f"{self.KEY} on {train.url}",
        )

    def model(self, export: ViTExport, classes: int, synchronised: bool, seed: int) -> "nn.Module":
        """mmdet's detector around the export, whose position table keeps its size and is resized for every image."""
        from downstream.models.backbone import DenseBackbone, dense_network, usual_taps
        from downstream.models.detectors import detector

        backbone = DenseBackbone(
            dense_network(export, export.spec.image_size, self.drop_path),
            usual_taps(export.spec.depth),
            norm=self.norm,
            train_positions=self.train_positions,
            recompute=self.recompute,
        )
        return detector(self, backbone, export, classes, synchronised, seed)

    def optimiser(self, model: "nn.Module", export: ViTExport) -> torch.optim.Optimizer:
        """AdamW over what trains."""
        groups = optimizer_groups(
            model, export.spec.depth, self.layer_decay, self.lr, self.weight_decay, self.decay_tokens
        )
        return torch.optim.AdamW([{k: v for k, v in group.items() if k != "names"} for group in groups])


def mmdet_objects(train: SceneSet, val: SceneSet, sizes: "DetectionSizes", most: int) -> tuple[Any, Any, Any]:
    """Training images, validation images, metric on at most `most` detections of an image, as mmdet's objects."""
    with quiet_libraries():
        from downstream.data.detection_data import detection_training_images, detection_validation_images
        from downstream.metrics.detection_metric import DetectionMetric

        metric = DetectionMetric(val.listing, most)
        return detection_training_images(train, sizes), detection_validation_images(val, sizes), metric


def learnable(train: SceneSet, val: SceneSet) -> SceneSet:
    """The training images that have objects. ValueError if there are none, on either side, or other classes."""
    if dict(train.listing.categories) != dict(val.listing.categories):
        raise ValueError(
            f"{train.url}: {train.listing.annotations} and {val.listing.annotations} name other categories"
        )
    for scenes, found in ((train, len(train.listing.learnable)), (val, any(val.listing.objects))):
        if not found:
            raise ValueError(f"{scenes.url}: no image of {scenes.split} has an object, by {scenes.listing.annotations}")
    return train.subset(train.listing.learnable, "with-objects")


def detection_outcome(place: Place, trained: "TrainedModel", train: SceneSet, val: SceneSet, rest: dict) -> Outcome:
    """Metrics with their values on resampled images, the detections of every validation image, and the facts."""
    from downstream.metrics.detection_metric import backend, name_and_version

    facts = {
        "train": {"url": train.url, "images": len(train), "fingerprint": train.fingerprint},
        "val": {"url": val.url, "images": len(val), "fingerprint": val.fingerprint},
        "notes": list(dict.fromkeys([*train.notes, *val.notes])),
        "evaluations": [trained.history],
        "reported_step": [trained.step],
        "detections": int((trained.arrays["classes"] >= 0).sum()),
        "evaluated_by": name_and_version(backend()),
        "libraries": libraries_used(),
        **place.facts,
        **rest,
    }
    drawn = resampled(lambda weights: weighted_ap(trained.arrays, weights), len(val))
    metrics = {name: Metric(value=value, resampled=drawn[name]) for name, value in trained.metrics.items()}
    return Outcome(metrics=metrics, arrays=dict(trained.arrays), facts=facts)
