"""COCO object detection and instance segmentation by Mask R-CNN, end to end: box and mask AP on val2017.

mmdet's Mask R-CNN on a feature pyramid from the patches of four blocks, resized to four scales; AdamW with layer-wise
learning rate decay. The pyramid needs patches of 4, 8, 16 or 32 px. Other sizes become the nearest of these, 14 px
become 16, by FlexiViT's resize of the patch embedding, as in EVA's detectors (baaivision/EVA,
interpolate_patch_14to16.py, by plain bicubic interpolation); the result says so.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from downstream.detection import Detection
from downstream.detection_settings import IBOT_SOURCE, OURS, SMOKE
from engine.tasks import Protocol, smoke_protocol


@dataclass(frozen=True, kw_only=True)
class MaskRcnn(Detection):
    """Settings of one training, see downstream/detection_settings.py."""

    COST: ClassVar[float] = 900.0  # 12 epochs, each image twenty times the pixels of 224 x 224, and quadratic in them
    KEY: ClassVar[str] = "maskrcnn_coco"
    CASCADE: ClassVar[bool] = False


IBOT = MaskRcnn(proposals=(2000, 1000), size="B")
EXTREMA = replace(IBOT, lr=3e-4, milestones=(9, 11), batch=32, train_positions=False, branch="online")
MAE = MaskRcnn(
    layer_decay=0.7,
    weight_decay=0.1,
    epochs=100,
    milestones=(89, 96),
    warmup=250,
    batch=64,
    augment="jitter",
    long=1024,
    val=(1024, 1024),
    drop_path=0.1,
    rpn_convs=2,
    box_loss="l1",
    size="B",
)

PROTOCOLS = {
    "maskrcnn@smoke": smoke_protocol(MaskRcnn(**SMOKE), "seconds on tiny-coco:"),
    "maskrcnn@extrema": Protocol(
        task=EXTREMA,
        version=2,
        source="ExtreMA section 4 (Mask R-CNN, ViT-B, 12 epochs) and its README (CAE's code without the class token); "
        "from CAE downstream_tasks/detection/evaluation/object_detection/configs, inferred: mask_rcnn/vit_base_giou_"
        "4conv1f_coco_maskrcnn_1x_cae_sincos_init0.1_lr00003.py (lr 3e-4, 16 x 2 images, decay 0.75, wd 0.05, steps at "
        "9 and 11, drop path 0.2, short sides 480-800 with crops, box head of 4 convolutions with GIoU x 10) over "
        "_base_/models/mask_rcnn_vit_fpn.py (2000 proposals in training, 1000 in testing), taps without norm, frozen "
        f"position table, warm-up 500 from 0.001 as in Swin's schedule{OURS}",
    ),
    "maskrcnn@cae": Protocol(
        task=replace(EXTREMA, branch=""),
        version=1,
        source="lxtGH/CAE downstream_tasks/detection/evaluation/object_detection/configs/mask_rcnn/vit_base_giou_"
        "4conv1f_coco_maskrcnn_1x_cae_sincos_init0.1_lr00003.py, README.md (16 x 2 images); the settings of "
        f"maskrcnn@extrema, which are inferred from it{OURS}",
    ),
    "maskrcnn@cae_L": Protocol(
        task=replace(EXTREMA, lr=2e-4, layer_decay=0.85, size="L", branch=""),
        version=1,
        source="lxtGH/CAE downstream_tasks/detection/evaluation/object_detection/configs/mask_rcnn/vit_large_giou_"
        f"4conv1f_coco_maskrcnn_1x_cae_sincos_init0.1_lr00002_lrdr0.85_dp0.2.py; else as maskrcnn@cae{OURS}",
    ),
    "maskrcnn@ibot": Protocol(
        task=IBOT,
        version=2,
        source=f"iBOT-style: {IBOT_SOURCE}, with Mask R-CNN's one stage; iBOT itself reports Cascade alone{OURS}",
    ),
    "maskrcnn@mae": Protocol(
        task=MAE,
        version=1,
        source="open-mmlab/mmdetection projects/ViTDet/configs/vitdet_mask-rcnn_vit-b-mae_lsj-100e.py and "
        "lsj-100e_coco-instance.py (lr 1e-4, wd 0.1, decay 0.7, batch 64, 100 epochs, warm-up 250, jitter 0.1-2 at "
        "1024, two RPN convolutions, L1 offsets; steps at 163 889 and 177 546 of 184 375); not taken over: windowed "
        "blocks, relative positions, the pyramid of the last block alone, layer norm in heads and masks (batch norm in "
        f"the box head here), padding to 1024 x 1024{OURS}",
    ),
}

SUITES = {
    "smoke": ("maskrcnn@smoke",),
    "full": ("maskrcnn@extrema",),
    "everything": ("maskrcnn@extrema", "maskrcnn@ibot"),
    "paper:extrema": ("maskrcnn@extrema",),
}
