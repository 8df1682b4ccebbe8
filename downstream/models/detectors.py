"""mmdet's Mask R-CNN and Cascade Mask R-CNN around a ViT-export, with the numbers of mmdet's own base files.

Built from class objects; the registries' names are for mmdet's own inner parts. Numbers without a source on their line
are those of mmdet configs/_base_/models/mask-rcnn_r50_fpn.py and cascade-mask-rcnn_r50_fpn.py, which the forks of
Swin, iBOT and CAE start from.
"""

from collections.abc import Mapping
from math import lcm
from typing import Any

from mmdet.models import CascadeRCNN, DetDataPreprocessor, MaskRCNN
from mmdet.models.dense_heads import RPNHead
from mmdet.models.detectors import TwoStageDetector
from mmdet.models.losses import CrossEntropyLoss, GIoULoss, L1Loss, SmoothL1Loss
from mmdet.models.necks import FPN
from mmdet.models.roi_heads import CascadeRoIHead, StandardRoIHead
from mmdet.models.roi_heads.bbox_heads import ConvFCBBoxHead
from mmdet.models.roi_heads.mask_heads import FCNMaskHead
from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor
from mmdet.models.task_modules import AnchorGenerator, DeltaXYWHBBoxCoder, MaxIoUAssigner, RandomSampler
from mmengine.config import ConfigDict
from mmengine.model import Sequential
from torch import nn

from checkpoints.export import ViTExport
from downstream.detection_settings import DetectionSettings
from downstream.models.backbone import STRIDES, DenseBackbone, Pyramid
from engine.seeding import START, seeded

Config = dict[str, Any]
LEVELS = 5  # of the feature pyramid: the four scales, and every second pixel of the coarsest
BOX, MASK = 7, 14  # cells of a region's side, for the box and the mask head
# Of the stages of a cascade; the first is that of Mask R-CNN.
STDS = ((0.1, 0.1, 0.2, 0.2), (0.05, 0.05, 0.1, 0.1), (0.033, 0.033, 0.067, 0.067))
OVERLAPS = (0.5, 0.6, 0.7)
WEIGHTS = (1, 0.5, 0.25)


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
    spec, channels = export.spec, settings.channels
    norm = nn.SyncBatchNorm if synchronised else nn.BatchNorm2d
    with seeded(START, seed):
        scales = Pyramid(spec.width, spec.patch_size, norm)
        neck = Sequential(scales, FPN(in_channels=[spec.width] * 4, out_channels=channels, num_outs=LEVELS))
        model = (CascadeRCNN if settings.CASCADE else MaskRCNN)(
            backbone=ConfigDict(type=lambda: backbone),
            neck=ConfigDict(type=lambda: neck),
            rpn_head=ConfigDict(_rpn_head(settings)),
            roi_head=ConfigDict(_roi_head(settings, classes, synchronised, masks)),
            train_cfg=ConfigDict(_train_cfg(settings)),
            test_cfg=ConfigDict(_test_cfg(settings)),
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


def _coder(stds: tuple[float, ...]) -> Config:
    return {"type": DeltaXYWHBBoxCoder, "target_means": [0.0] * 4, "target_stds": list(stds)}


def _rpn_head(settings: DetectionSettings) -> Config:
    distance = {"type": SmoothL1Loss, "beta": 1 / 9} if settings.CASCADE else {"type": L1Loss}
    return {
        "type": RPNHead,
        "in_channels": settings.channels,
        "feat_channels": settings.channels,
        "num_convs": settings.rpn_convs,
        "anchor_generator": {
            "type": AnchorGenerator,
            "scales": [settings.anchor],
            "ratios": [0.5, 1.0, 2.0],
            "strides": [*STRIDES, 2 * STRIDES[-1]],
        },
        "bbox_coder": _coder((1.0,) * 4),
        "loss_cls": {"type": CrossEntropyLoss, "use_sigmoid": True, "loss_weight": 1.0},
        "loss_bbox": distance | {"loss_weight": 1.0},
    }


def _roi_head(settings: DetectionSettings, classes: int, synchronised: bool, masks: bool = True) -> Config:
    shared = {
        "bbox_roi_extractor": _roi_extractor(settings, BOX),
        "mask_roi_extractor": _roi_extractor(settings, MASK),
        "mask_head": {
            "type": FCNMaskHead,
            "num_convs": settings.mask_convs,
            "in_channels": settings.channels,
            "conv_out_channels": settings.channels,
            "num_classes": classes,
            "loss_mask": {"type": CrossEntropyLoss, "use_mask": True, "loss_weight": 1.0},
        },
    }
    if not masks:
        del shared["mask_roi_extractor"], shared["mask_head"]
    heads = [_box_head(settings, classes, stds, synchronised) for stds in STDS]
    if settings.CASCADE:
        return {
            "type": CascadeRoIHead,
            "num_stages": len(STDS),
            "stage_loss_weights": list(WEIGHTS),
            "bbox_head": heads,
            **shared,
        }
    return {"type": StandardRoIHead, "bbox_head": heads[0], **shared}


def _roi_extractor(settings: DetectionSettings, cells: int) -> Config:
    return {
        "type": SingleRoIExtractor,
        "roi_layer": {"type": "RoIAlign", "output_size": cells, "sampling_ratio": 0},
        "out_channels": settings.channels,
        "featmap_strides": list(STRIDES),
    }


def _box_head(settings: DetectionSettings, classes: int, stds: tuple[float, ...], synchronised: bool) -> Config:
    """Convolutions with batch norm and a linear layer; boxes of each class by GIoU x 10, or offsets by L1."""
    overlap = settings.box_loss == "giou"  # Swin, iBOT and CAE
    return {
        "type": ConvFCBBoxHead,
        "num_shared_convs": settings.box_convs,
        "num_shared_fcs": 1,
        "in_channels": settings.channels,
        "conv_out_channels": settings.channels,
        "fc_out_channels": settings.hidden,
        "roi_feat_size": BOX,
        "num_classes": classes,
        "bbox_coder": _coder(stds),
        "reg_class_agnostic": False,
        "reg_decoded_bbox": overlap,
        "norm_cfg": {"type": "SyncBN" if synchronised else "BN", "requires_grad": True},
        "loss_cls": {"type": CrossEntropyLoss, "use_sigmoid": False, "loss_weight": 1.0},
        "loss_bbox": {"type": GIoULoss, "loss_weight": 10.0} if overlap else {"type": L1Loss, "loss_weight": 1.0},
    }


def _assigner(positive: float, negative: float, low_quality: bool) -> Config:
    return {
        "type": MaxIoUAssigner,
        "pos_iou_thr": positive,
        "neg_iou_thr": negative,
        "min_pos_iou": negative,
        "match_low_quality": low_quality,
        "ignore_iof_thr": -1,
    }


def _sampler(count: int, share: float, with_objects: bool) -> Config:
    return {
        "type": RandomSampler,
        "num": count,
        "pos_fraction": share,
        "neg_pos_ub": -1,
        "add_gt_as_proposals": with_objects,
    }


def _proposals(before: int, after: int) -> Config:
    return {
        "nms_pre": before,
        "max_per_img": after,
        "nms": {"type": "nms", "iou_threshold": 0.7},
        "min_bbox_size": 0,
    }


def _train_cfg(settings: DetectionSettings) -> Mapping[str, Any]:
    stages = [
        {
            "assigner": _assigner(overlap, overlap, low_quality=not settings.CASCADE),
            "sampler": _sampler(settings.regions, 0.25, with_objects=True),
            "mask_size": 2 * MASK,
            "pos_weight": -1,
            "debug": False,
        }
        for overlap in OVERLAPS
    ]
    return {
        "rpn": {
            "assigner": _assigner(0.7, 0.3, low_quality=True),
            "sampler": _sampler(256, 0.5, with_objects=False),
            "allowed_border": 0 if settings.CASCADE else -1,
            "pos_weight": -1,
            "debug": False,
        },
        "rpn_proposal": _proposals(2 * settings.proposals[1], settings.proposals[0]),
        "rcnn": stages if settings.CASCADE else stages[0],
    }


def _test_cfg(settings: DetectionSettings) -> Mapping[str, Any]:
    return {
        "rpn": _proposals(settings.proposals[1], settings.proposals[1]),
        "rcnn": {
            "score_thr": settings.least_score,
            "nms": {"type": "nms", "iou_threshold": 0.5},
            "max_per_img": settings.detections,
            "mask_thr_binary": 0.5,
        },
    }
