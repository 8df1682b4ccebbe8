"""Object detection and instance segmentation on COCO's layout: settings, training and outcome of both tasks."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from checkpoints.export import ViTExport
from checkpoints.spec import ViTSpec
from downstream.data.scenes import SceneSet
from downstream.loop.optimisation import Rates, check_rates, layer_groups
from downstream.loop.training import Place, Plan, open_both, warnings
from downstream.metrics.average_precision import reweighted
from downstream.models.libraries import libraries_used, quiet_libraries
from engine.resampling import resampled
from engine.tasks import Metric, Outcome, Task, Workspace

if TYPE_CHECKING:
    from torch import nn

    from downstream.data.detection_data import Sizes
    from downstream.loop.running import TrainedModel

AT_ONCE = 2  # images of a pass unless --batch-size says otherwise, as on each GPU of the sources

IBOT_SOURCE = (
    "bytedance/ibot evaluation/object_detection/configs/cascade_rcnn/vit_base_giou_4conv1f_coco_3x.py (lr 1e-4, wd "
    "0.05, drop path 0.2, GIoU x 10, taps without norm) with its evaluation/README.md's 12 epochs, steps at 8 and 11, "
    "decay 0.75, 8 x 2 images"
)
OURS = (
    "; ours: batches not sorted by aspect ratio, the export's own position table resized for each image, bfloat16 in "
    "place of fp16 with --precision bfloat16"
)
# Of both tasks' smoke protocols.
SMOKE: dict[str, Any] = {
    "lr": 3e-3,
    "layer_decay": 0.9,
    "epochs": 4,
    "milestones": (3,),
    "warmup": 5,
    "batch": 2,
    "augment": "scales",
    "short": (64,),
    "long": 96,
    "flip": 0.0,
    "val": (96, 64),
    "drop_path": 0.0,
    "channels": 32,
    "hidden": 64,
    "anchor": 4,
    "box_convs": 1,
    "mask_convs": 1,
    "proposals": (64, 64),
    "regions": 32,
    "detections": 20,
}


@dataclass(frozen=True, kw_only=True)
class Detection(Task):
    """Settings of one training."""

    KEY: ClassVar[str]
    CASCADE: ClassVar[bool]
    LAYOUT: ClassVar[str] = "coco"

    lr: float = 1e-4  # peak learning rate, of the heads
    layer_decay: float = 0.75  # factor on the rate for every block further from the heads
    weight_decay: float = 0.05  # of matrices; biases and norms have none
    epochs: int = 12  # passes over the training images
    milestones: tuple[int, ...] = (8, 11)  # epochs from which on the rate is a tenth of what it was
    warmup: int = 500  # steps over which the rate rises
    start: float = 0.001  # factor on the rate at the first of these steps
    batch: int = 16  # images in a step
    # Of training images. scales: fitted into one of `short` by `long`. crops: half of them so; of the others, fitted
    # into one of `crop_short` by `long`, a window with sides from `crop` is fitted so. jitter: fitted into `long`
    # squared times a factor from `jitter`, and cut to `long` squared.
    augment: Literal["scales", "crops", "jitter"] = "crops"
    short: tuple[int, ...] = tuple(range(480, 801, 32))  # shorter sides in pixels, one of which is drawn
    long: int = 1333  # longest side in pixels
    crop_short: tuple[int, ...] = (400, 500, 600)  # shorter sides in pixels before a window is cut
    crop: tuple[int, int] = (384, 600)  # least and largest side of such a window in pixels
    jitter: tuple[float, float] = (0.1, 2.0)  # range of the random factor
    flip: float = 0.5  # chance of a mirror image
    val: tuple[int, int] = (1333, 800)  # longer and shorter side that validation images are fitted into, in pixels
    drop_path: float = 0.2  # chance of the last block to be skipped; it rises linearly from 0 at the first
    norm: bool = False  # read all four blocks behind the network's final norm
    train_positions: bool = True  # train the position table
    decay_tokens: bool = True  # weight decay on that table and the class token, as in the mm codebases
    channels: int = 256  # of the pyramid and of the heads' convolutions
    hidden: int = 1024  # of the box head's linear layer
    anchor: int = 8  # side of the anchors in strides
    rpn_convs: int = 1  # convolutions of the proposal network
    box_convs: int = 4  # convolutions of the box head
    mask_convs: int = 4  # convolutions of the mask head
    proposals: tuple[int, int] = (1000, 1000)  # of an image, in training and in evaluation
    regions: int = 512  # proposals of an image that train a head
    box_loss: Literal["giou", "l1"] = "giou"  # generalised IoU of decoded boxes, or distance of offsets
    least_score: float = 0.05  # of a detection that is reported
    detections: int = 100  # of an image that are reported, at most
    judge_every: int = 0  # epochs between evaluations; 0: at the end alone
    recompute: bool = False  # compute activations again in the backward pass, which takes less memory
    size: str = ""  # of the network that the recipe is for (S, B, ...); a result of another one says so
    branch: str = ""  # of a checkpoint that the source evaluates; a result of another one says so

    def __post_init__(self) -> None:
        check_rates(self.lr, self.layer_decay, self.weight_decay, self.drop_path)
        names = ("epochs", "batch", "short", "long", "crop_short", "crop", "val", "channels", "hidden", "anchor")
        names += ("rpn_convs", "box_convs", "mask_convs", "proposals", "regions", "detections")
        for name in names:
            value = getattr(self, name)
            if not value or min(value if isinstance(value, tuple) else (value,)) < 1:
                raise ValueError(f"{name}={value}: give whole numbers from 1 on")
        if list(self.milestones) != sorted(set(self.milestones)) or not all(
            0 < m < self.epochs for m in self.milestones
        ):
            raise ValueError(f"milestones={self.milestones}: give rising epochs from 1 to below epochs={self.epochs}")
        if min(self.warmup, self.judge_every) < 0 or not 0 < self.start <= 1:
            raise ValueError(
                f"warmup={self.warmup}, judge_every={self.judge_every}, start={self.start}: give whole numbers from 0 "
                "on, and a start above 0 and up to 1"
            )
        if not 0 < self.jitter[0] <= self.jitter[1] or not 0 <= self.flip <= 1 or not 0 <= self.least_score < 1:
            raise ValueError(
                f"jitter={self.jitter}, flip={self.flip}, least_score={self.least_score}: give a range above 0, a "
                "chance from 0 to 1, a score from 0 to below 1"
            )

    def sizes(self, spec: ViTSpec, images: Mapping[str, int]) -> dict[str, Any]:
        check_patches(spec)
        return {
            "longest side": self.long,
            "epochs": self.epochs,
            "steps": f"up to {self.epochs * -(-images['train'] // self.batch)}",  # images without objects are left out
            "batch": self.batch,
            "evaluations": -(-self.epochs // (self.judge_every or self.epochs)),
        }

    def run(self, export: ViTExport, space: Workspace) -> Outcome:
        check_patches(export.spec)
        train, val = open_both(space, self.LAYOUT)
        train = learnable(train, val)
        place = Place(export=export, space=space, task=self.KEY, most=AT_ONCE)
        trained = place.trained(self.plan(export, train, val, space.seed))
        departures = warnings(export, self.size, self.branch, 0, 0, place.facts["batch"])
        return outcome(place, trained, train, val, {"epochs": self.epochs, "warnings": departures})

    def plan(self, export: ViTExport, train: SceneSet, val: SceneSet, seed: int) -> Plan:
        """The one training, as `Place` runs it."""
        with quiet_libraries():
            from downstream.data.detection_data import Sizes

        steps = -(-len(train) // self.batch)  # of an epoch
        sizes = Sizes(**{name: getattr(self, name) for name in Sizes.__dataclass_fields__})
        return Plan(
            settings=asdict(self),
            train=train,
            val=val,
            batch=self.batch,
            rates=Rates(
                steps=self.epochs * steps,
                family="step",
                milestones=tuple(epoch * steps for epoch in self.milestones),
                warmup=self.warmup,
                start=self.start,
            ),
            judge_every=self.judge_every * steps,
            best="",
            parts=lambda: parts(train, val, sizes, self.detections),
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
        groups = layer_groups(model, export.spec.depth, self.layer_decay, self.lr, self.weight_decay, self.decay_tokens)
        return torch.optim.AdamW([{k: v for k, v in group.items() if k != "names"} for group in groups])


def parts(train: SceneSet, val: SceneSet, sizes: "Sizes", most: int) -> tuple[Any, Any, Any]:
    """Training images, validation images, metric on at most `most` detections of an image, as mmdet's objects."""
    with quiet_libraries():
        from downstream.data.detection_data import training_images, validation_images
        from downstream.metrics.detection_metric import DetectionMetric

        metric = DetectionMetric(val.listing, most)
        return training_images(train, sizes), validation_images(val, sizes), metric


def check_patches(spec: ViTSpec) -> None:
    """ValueError for patches from which strides of 4, 8, 16 and 32 cannot be made."""
    if spec.patch_size not in (4, 8, 16, 32):
        raise ValueError(
            f"patches of {spec.patch_size} px: the pyramid of strides 4, 8, 16, 32 needs 4, 8, 16 or 32 px"
        )


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


def outcome(place: Place, trained: "TrainedModel", train: SceneSet, val: SceneSet, rest: dict) -> Outcome:
    """Metrics with their values on resampled images, the detections of every validation image, and the facts."""
    from downstream.metrics.detection_metric import backend, described

    facts = {
        "train": {"url": train.url, "images": len(train), "fingerprint": train.fingerprint},
        "val": {"url": val.url, "images": len(val), "fingerprint": val.fingerprint},
        "notes": list(dict.fromkeys([*train.notes, *val.notes])),
        "evaluations": [trained.history],
        "reported_step": [trained.step],
        "detections": int((trained.arrays["classes"] >= 0).sum()),
        "evaluated_by": described(backend()),
        "libraries": libraries_used(),
        **place.facts,
        **rest,
    }
    drawn = resampled(lambda weights: reweighted(trained.arrays, weights), len(val))
    metrics = {name: Metric(value=value, resampled=drawn[name]) for name, value in trained.metrics.items()}
    return Outcome(metrics=metrics, arrays=dict(trained.arrays), facts=facts)
