"""mmdet's Mask R-CNN and Cascade Mask R-CNN around a ViT-export.

Numbers are those of mmdet's own configs/_base_/models/mask-rcnn_r50_fpn.py and cascade-mask-rcnn_r50_fpn.py, which the
forks of Swin, iBOT and CAE start from, but for what `configuration` changes.
"""

from math import lcm
from pathlib import Path

import mmdet
from mmdet.models import CascadeRCNN, DetDataPreprocessor, MaskRCNN
from mmdet.models.detectors import TwoStageDetector
from mmdet.models.losses import GIoULoss, L1Loss
from mmdet.models.necks import FPN
from mmdet.models.roi_heads.bbox_heads import ConvFCBBoxHead
from mmengine.config import Config, ConfigDict
from mmengine.model import Sequential
from torch import nn

from checkpoints.export import ViTExport
from downstream.detection_settings import DetectionSettings
from downstream.models.backbone import DenseBackbone, Pyramid
from engine.seeding import START, seeded

BASES = Path(mmdet.__file__).parent / ".mim" / "configs" / "_base_" / "models"  # where its package has them
LEVELS = 5  # of the feature pyramid: the four scales, and every second pixel of the coarsest


def detector(
    settings: DetectionSettings,
    backbone: DenseBackbone,
    export: ViTExport,
    classes: int,
    synchronised: bool,
    seed: int,
    masks: bool = True,
) -> TwoStageDetector:
    """The whole model, its new parts drawn by `seed`. masks: with a mask head, without which it is (Cascade) Faster
    R-CNN.

    Images are normalised by the export's own statistics, and padded to multiples of 32 and of the patch.
    """
    spec, config = export.spec, configuration(settings, classes, synchronised, masks)
    norm = nn.SyncBatchNorm if synchronised else nn.BatchNorm2d
    with seeded(START, seed):
        scales = Pyramid(spec.width, spec.patch_size, norm)
        neck = Sequential(scales, FPN(in_channels=[spec.width] * 4, out_channels=settings.channels, num_outs=LEVELS))
        model = (CascadeRCNN if settings.CASCADE else MaskRCNN)(
            backbone=ConfigDict(type=lambda: backbone),
            neck=ConfigDict(type=lambda: neck),
            rpn_head=config.rpn_head,
            roi_head=config.roi_head,
            train_cfg=config.train_cfg,
            test_cfg=config.test_cfg,
            data_preprocessor={
                "type": DetDataPreprocessor,
                "mean": [255 * value for value in export.mean],
                "std": [255 * value for value in export.std],
                "bgr_to_rgb": True,
                "pad_mask": masks,
                "pad_size_divisor": lcm(32, spec.patch_size),
            },
        )
        model.init_weights()
    return model


def configuration(settings: DetectionSettings, classes: int, synchronised: bool, masks: bool = True) -> ConfigDict:
    """mmdet's base file with the numbers of the settings and other box heads: convolutions with batch norm and a linear
    layer; boxes of each class by GIoU x 10, as in Swin, iBOT and CAE, or offsets by L1."""
    config = Config.fromfile(BASES / f"{'cascade-' if settings.CASCADE else ''}mask-rcnn_r50_fpn.py").model
    channels, heads, train, test = settings.channels, config.roi_head, config.train_cfg, config.test_cfg
    config.rpn_head.update(in_channels=channels, feat_channels=channels, num_convs=settings.rpn_convs)
    config.rpn_head.anchor_generator.scales = [settings.anchor]
    heads.bbox_roi_extractor.out_channels = heads.mask_roi_extractor.out_channels = channels
    heads.mask_head.update(
        num_convs=settings.mask_convs, in_channels=channels, conv_out_channels=channels, num_classes=classes
    )
    overlap = settings.box_loss == "giou"
    box_head = {
        "type": ConvFCBBoxHead,
        "num_shared_convs": settings.box_convs,
        "num_shared_fcs": 1,
        "in_channels": channels,
        "conv_out_channels": channels,
        "fc_out_channels": settings.hidden,
        "num_classes": classes,
        "reg_class_agnostic": False,
        "reg_decoded_bbox": overlap,
        "norm_cfg": {"type": "SyncBN" if synchronised else "BN", "requires_grad": True},
        "loss_bbox": {"type": GIoULoss, "loss_weight": 10.0} if overlap else {"type": L1Loss, "loss_weight": 1.0},
    }
    # One or, of a cascade, three stages; they keep their box coders and classification losses.
    for head in heads.bbox_head if settings.CASCADE else [heads.bbox_head]:
        del head["loss_bbox"]
        head.update(box_head)
    for stage in train.rcnn if settings.CASCADE else [train.rcnn]:
        stage.sampler.num = settings.regions
    train.rpn_proposal.update(nms_pre=2 * settings.proposals[1], max_per_img=settings.proposals[0])
    test.rpn.update(nms_pre=settings.proposals[1], max_per_img=settings.proposals[1])
    test.rcnn.update(score_thr=settings.least_score, max_per_img=settings.detections)
    if not masks:
        del heads["mask_roi_extractor"], heads["mask_head"]
    return config
