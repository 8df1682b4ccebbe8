"""COCO object detection and instance segmentation by Cascade Mask R-CNN, end to end: box and mask AP on val2017.

mmdet's Cascade Mask R-CNN, with three stages of box and mask heads, on the backbone of maskrcnn_coco.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from downstream.detection import Detection
from downstream.detection_settings import IBOT_SOURCE, OURS, SMOKE
from engine.tasks import Protocol, smoke_protocol


@dataclass(frozen=True, kw_only=True)
class Cascade(Detection):
    """Settings of one training, see downstream/detection_settings.py."""

    COST: ClassVar[float] = 1300.0  # as Mask R-CNN with three times the heads
    KEY: ClassVar[str] = "cascade_coco"
    CASCADE: ClassVar[bool] = True

    proposals: tuple[int, int] = (2000, 1000)


IBOT = Cascade(size="B")

PROTOCOLS = {
    "cascade@smoke": smoke_protocol(Cascade(**SMOKE), "seconds on tiny-coco:"),
    "cascade@moca": Protocol(
        task=replace(IBOT, lr=2e-4, branch="teacher"),
        version=1,
        source="MOCA section 4.4 and appendix C (Swin's code, iBOT's settings, lr 2e-4, 12 epochs, a tenth at 8 and "
        f"11, short sides 480-800, long up to 1333); open there and as in iBOT: {IBOT_SOURCE}{OURS}",
    ),
    "cascade@ibot": Protocol(task=IBOT, version=1, source=f"{IBOT_SOURCE}{OURS}"),
    "cascade@ibot_S": Protocol(
        task=replace(IBOT, layer_decay=0.8, batch=32, drop_path=0.1, size="S"),
        version=1,
        source="bytedance/ibot evaluation/object_detection/configs/cascade_rcnn/vit_small_giou_4conv1f_coco_3x.py with "
        f"its evaluation/README.md's 12 epochs, steps at 8 and 11, decay 0.8, 8 x 4 images{OURS}",
    ),
}

SUITES = {
    "smoke": ("cascade@smoke",),
    "full": ("cascade@moca",),
    "everything": ("cascade@moca",),
    "paper:moca": ("cascade@moca",),
}
