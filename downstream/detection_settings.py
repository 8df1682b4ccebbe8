"""Settings of both detection tasks, with the numbers of their sources and of their smoke protocols."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from engine.settings import (
    BelowOne,
    FactorRange,
    Fraction,
    NonEmpty,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
)
from engine.tasks import Task

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
class DetectionSettings(Task):
    """Of one training; CASCADE is of its task."""

    CASCADE: ClassVar[bool]

    lr: PositiveFloat = 1e-4  # peak learning rate, of the heads
    layer_decay: Fraction = 0.75  # factor on the rate for every block further from the heads
    weight_decay: NonNegativeFloat = 0.05  # of matrices; biases and norms have none
    epochs: PositiveInt = 12  # passes over the training images
    milestones: tuple[int, ...] = (8, 11)  # epochs from which on the rate is a tenth of what it was
    warmup: NonNegativeInt = 500  # steps over which the rate rises
    start: Fraction = 0.001  # factor on the rate at the first of these steps
    batch: PositiveInt = 16  # images in a step
    # Of training images. scales: fitted into one of `short` by `long`. crops: half of them so; of the others, fitted
    # into one of `crop_short` by `long`, a window with sides from `crop` is fitted so. jitter: fitted into `long`
    # squared times a factor from `jitter`, and cut to `long` squared.
    augment: Literal["scales", "crops", "jitter"] = "crops"
    short: NonEmpty[PositiveInt] = tuple(range(480, 801, 32))  # shorter sides in pixels, one of which is drawn
    long: PositiveInt = 1333  # longest side in pixels
    crop_short: NonEmpty[PositiveInt] = (400, 500, 600)  # shorter sides in pixels before a window is cut
    crop: tuple[PositiveInt, PositiveInt] = (384, 600)  # least and largest side of such a window in pixels
    jitter: FactorRange = (0.1, 2.0)  # range of the random factor
    flip: UnitInterval = 0.5  # chance of a mirror image
    # longer and shorter side that validation images are fitted into, in pixels
    val: tuple[PositiveInt, PositiveInt] = (1333, 800)
    drop_path: BelowOne = 0.2  # chance of the last block to be skipped; it rises linearly from 0 at the first
    norm: bool = False  # read all four blocks behind the network's final norm
    train_positions: bool = True  # train the position table
    decay_tokens: bool = True  # weight decay on that table and the class token, as in the mm codebases
    channels: PositiveInt = 256  # of the pyramid and of the heads' convolutions
    hidden: PositiveInt = 1024  # of the box head's linear layer
    anchor: PositiveInt = 8  # side of the anchors in strides
    rpn_convs: PositiveInt = 1  # convolutions of the proposal network
    box_convs: PositiveInt = 4  # convolutions of the box head
    mask_convs: PositiveInt = 4  # convolutions of the mask head
    proposals: tuple[PositiveInt, PositiveInt] = (1000, 1000)  # of an image, in training and in evaluation
    regions: PositiveInt = 512  # proposals of an image that train a head
    box_loss: Literal["giou", "l1"] = "giou"  # generalised IoU of decoded boxes, or distance of offsets
    least_score: BelowOne = 0.05  # of a detection that is reported
    detections: PositiveInt = 100  # of an image that are reported, at most
    judge_every: NonNegativeInt = 0  # epochs between evaluations; 0: at the end alone
    recompute: bool = False  # compute activations again in the backward pass, which takes less memory
    size: str = ""  # of the network that the recipe is for (S, B, ...); a result of another one says so
    branch: str = ""  # of a checkpoint that the source evaluates; a result of another one says so

    def __post_init__(self) -> None:
        super().__post_init__()
        if list(self.milestones) != sorted({m for m in self.milestones if 0 < m < self.epochs}):
            raise ValueError(f"milestones={self.milestones}: give rising epochs from 1 to below epochs={self.epochs}")
