"""mmdet's Mask R-CNN and Cascade Mask R-CNN with an export as the backbone.

All numbers are those of mmdet's configs/_base_/models/mask-rcnn_r50_fpn.py and cascade-mask-rcnn_r50_fpn.py, from which
the forks of Swin, iBOT and CAE start, except for the changes in `detector_config`.
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

BASES = Path(mmdet.__file__).parent / ".mim" / "configs" / "_base_" / "models"  # in the installed package
LEVELS = 5  # of the feature pyramid: the four scales, and the coarsest one subsampled by 2


def detector(
    settings: DetectionSettings,
    backbone: DenseBackbone,
    export: ViTExport,
    classes: int,
    synchronised: bool,
    seed: int,
    masks: bool = True,
) -> TwoStageDetector:
    """The detector, with its neck and heads initialised from `seed`.

    Images are normalised with the export's mean and deviation, and padded to multiples of 32 and of the patch size.

    Args:
        settings: settings of the task.
        backbone: the export's network.
        export: the export, for its width, patch size and normalisation.
        classes: number of classes.
        synchronised: batch norms over all processes.
        seed: seed of the initial weights.
        masks: with a mask head; otherwise it is a (Cascade) Faster R-CNN.
    """
    spec, config = export.spec, detector_config(settings, classes, synchronised, masks)
    batch_norm = nn.SyncBatchNorm if synchronised else nn.BatchNorm2d
    with seeded(START, seed):
        pyramid = Pyramid(spec.width, spec.patch_size, batch_norm)
        neck = Sequential(pyramid, FPN(in_channels=[spec.width] * 4, out_channels=settings.channels, num_outs=LEVELS))
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


def detector_config(settings: DetectionSettings, classes: int, synchronised: bool, masks: bool = True) -> ConfigDict:
    """mmdet's base configuration with the numbers of the settings and other box heads.

    A box head has convolutions with batch norm and a linear layer, and predicts boxes for each class, trained with 10 x
    GIoU as in Swin, iBOT and CAE, or offsets, trained with L1.
    """
    config = Config.fromfile(BASES / f"{'cascade-' if settings.CASCADE else ''}mask-rcnn_r50_fpn.py").model
    channels, heads, train, test = settings.channels, config.roi_head, config.train_cfg, config.test_cfg
    config.rpn_head.update(in_channels=channels, feat_channels=channels, num_convs=settings.rpn_convs)
    config.rpn_head.anchor_generator.scales = [settings.anchor]
    heads.bbox_roi_extractor.out_channels = heads.mask_roi_extractor.out_channels = channels
    heads.mask_head.update(
        num_convs=settings.mask_convs, in_channels=channels, conv_out_channels=channels, num_classes=classes
    )
    giou = settings.box_loss == "giou"
    box_head = {
        "type": ConvFCBBoxHead,
        "num_shared_convs": settings.box_convs,
        "num_shared_fcs": 1,
        "in_channels": channels,
        "conv_out_channels": channels,
        "fc_out_channels": settings.hidden,
        "num_classes": classes,
        "reg_class_agnostic": False,
        "reg_decoded_bbox": giou,
        "norm_cfg": {"type": "SyncBN" if synchronised else "BN", "requires_grad": True},
        "loss_bbox": {"type": GIoULoss, "loss_weight": 10.0} if giou else {"type": L1Loss, "loss_weight": 1.0},
    }
    # One stage, or three in a cascade, which keep their box coders and classification losses.
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
