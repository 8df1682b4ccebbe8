"""Settings of both detection tasks, with the numbers of their sources and of their smoke protocols."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from engine.settings import (
    BelowOne,
    FactorRange,
    Fraction,
    NonEmpty,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ReadIf,
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
# Settings of both tasks' smoke protocols.
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
    """Settings of one training. CASCADE, a constant of each task: whether the detector is a Cascade R-CNN."""

    CASCADE: ClassVar[bool]

    lr: PositiveFloat = 1e-4  # peak learning rate, of the heads
    layer_decay: Fraction = 0.75  # factor on the rate for each block further from the heads
    weight_decay: NonNegativeFloat = 0.05  # weight decay of matrices; biases and norms have none
    epochs: PositiveInt = 12  # passes over the training images
    milestones: tuple[int, ...] = (8, 11)  # epochs at which the rate is divided by ten
    warmup: NonNegativeInt = 500  # steps over which the rate rises
    start: Fraction = 0.001  # factor on the rate at the first of these steps
    batch: PositiveInt = 16  # images in a step
    # How training images are resized. scales: to fit one of `short` by `long`. crops: half of them as in scales; the
    # others are first resized to fit one of `crop_short` by `long` and cropped to a window with sides from `crop`.
    # jitter: to fit a square of side `long` times a factor from `jitter`, then cropped to a square of side `long`.
    augment: Literal["scales", "crops", "jitter"] = "crops"
    # shorter sides in pixels, one of which is drawn
    short: Annotated[NonEmpty[PositiveInt], ReadIf("augment", "scales", "crops")] = tuple(range(480, 801, 32))
    long: PositiveInt = 1333  # largest longer side in pixels
    # shorter sides in pixels before a window is cropped
    crop_short: Annotated[NonEmpty[PositiveInt], ReadIf("augment", "crops")] = (400, 500, 600)
    # smallest and largest side of such a window in pixels
    crop: Annotated[tuple[PositiveInt, PositiveInt], ReadIf("augment", "crops")] = (384, 600)
    jitter: Annotated[FactorRange, ReadIf("augment", "jitter")] = (0.1, 2.0)  # range of the random factor
    flip: UnitInterval = 0.5  # probability of a horizontal flip
    # largest longer and shorter side of validation images, in pixels
    val: tuple[PositiveInt, PositiveInt] = (1333, 800)
    drop_path: BelowOne = 0.2  # drop path rate of the last block; it rises linearly from 0 at the first
    norm: bool = False  # apply the network's final norm to all four blocks
    train_positions: bool = True  # train the position table
    decay_tokens: bool = True  # weight decay on that table and the class token, as in the mm codebases
    channels: PositiveInt = 256  # channels of the pyramid and of the heads' convolutions
    hidden: PositiveInt = 1024  # width of the box head's linear layer
    anchor: PositiveInt = 8  # side of the anchors in strides
    rpn_convs: PositiveInt = 1  # convolutions of the proposal network
    box_convs: PositiveInt = 4  # convolutions of the box head
    mask_convs: PositiveInt = 4  # convolutions of the mask head
    proposals: tuple[PositiveInt, PositiveInt] = (1000, 1000)  # proposals per image, in training and in evaluation
    regions: PositiveInt = 512  # proposals per image that train a head
    box_loss: Literal["giou", "l1"] = "giou"  # generalised IoU of decoded boxes, or L1 distance of offsets
    least_score: BelowOne = 0.05  # lowest score of a reported detection
    detections: PositiveInt = 100  # largest number of reported detections per image
    judge_every: NonNegativeInt = 0  # epochs between evaluations; 0: only at the end
    recompute: bool = False  # recompute activations in the backward pass (gradient checkpointing), to save memory
    size: str = ""  # network size that the recipe is for (S, B, ...); results of other sizes carry a warning
    branch: str = ""  # branch of a checkpoint that the source evaluates; results of others carry a warning

    def __post_init__(self) -> None:
        super().__post_init__()
        if list(self.milestones) != sorted({m for m in self.milestones if 0 < m < self.epochs}):
            raise ValueError(f"milestones={self.milestones}: give rising epochs from 1 to below epochs={self.epochs}")
