"""mmseg's models around a ViT-export: UPerNet, a linear layer per patch, Segmenter's mask transformer.

Built from class objects; the registries' names are for mmseg's own inner parts. D width of the backbone, K classes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mmseg
import torch
from mmengine.config import Config as MMConfig
from mmengine.config import ConfigDict
from mmseg.evaluation import IoUMetric
from mmseg.models import EncoderDecoder, SegDataPreProcessor
from mmseg.models.decode_heads import FCNHead, SegmenterMaskTransformerHead
from mmseg.models.losses import CrossEntropyLoss
from torch import nn

from checkpoints.frozen import FrozenExport
from downstream.metrics.previews import preview_masks, thumbnail
from downstream.metrics.scores import scores
from downstream.models.backbone import DenseBackbone, Pyramid
from engine.seeding import START, seeded

BASES = Path(mmseg.__file__).parent / ".mim" / "configs" / "_base_" / "models"  # where its package has them
Config = Mapping[str, Any]


def segmentor(
    backbone: DenseBackbone,
    heads: Sequence[Config],
    export: FrozenExport,
    crop: int,
    stride: int,
    seed: int,
    pyramid: Config | None = None,
) -> EncoderDecoder:
    """The whole model, its new parts drawn by `seed`. heads: the deciding one, then possibly an auxiliary one. crop,
    stride: side of the evaluation windows, and between them; the last ones are flush with the border.

    Images are normalised by the export's own statistics. Smaller ones than a crop are padded, and the padding is cut
    off again.
    """
    size = (crop, crop)
    with seeded(START, seed):
        model = EncoderDecoder(
            backbone={"type": lambda: backbone},
            neck=pyramid,
            decode_head=dict(heads[0]),
            auxiliary_head=dict(heads[1]) if len(heads) > 1 else None,
            test_cfg=ConfigDict(mode="slide", crop_size=size, stride=(stride, stride)),
            data_preprocessor={
                "type": SegDataPreProcessor,
                "mean": [255 * value for value in export.mean],
                "std": [255 * value for value in export.std],
                "bgr_to_rgb": True,
                "size": size,
                "test_cfg": {"size": size},
            },
        )
        model.init_weights()
    return model


def pyramid(export: FrozenExport, synchronised: bool) -> Config:
    """Four scales of the four taps. synchronised: batch statistics over all processes."""
    batch_norm = nn.SyncBatchNorm if synchronised else nn.BatchNorm2d
    spec = export.spec
    return {"type": Pyramid, "width": spec.width, "patch_size": spec.patch_size, "batch_norm": batch_norm}


def upernet_heads(width: int, classes: int, channels: int, synchronised: bool) -> list[Config]:
    """UPerHead, and FCNHead on the third scale with weight 0.4, of mmseg's own upernet_mae.py, the same in BEiT, iBOT
    and CAE. As there, ignored pixels count in the denominator of the loss's mean."""
    config = MMConfig.fromfile(BASES / "upernet_mae.py").model
    decode, auxiliary = config.decode_head, config.auxiliary_head
    decode.update(in_channels=[width] * 4, channels=channels)
    auxiliary.update(in_channels=width, channels=min(256, channels))
    for head in (decode, auxiliary):
        head.update(num_classes=classes, norm_cfg={"type": "SyncBN" if synchronised else "BN", "requires_grad": True})
    return [decode, auxiliary]


def linear_head(width: int, classes: int, maps: int, over_valid: bool, std: float) -> list[Config]:
    """One linear layer on the channels of all `maps` side by side: no convolution, no norm, no dropout.

    over_valid: the loss's mean is over labelled pixels alone. std: of the initial weights.
    """
    head = {
        "type": FCNHead,
        "in_channels": [width] * maps,
        "in_index": list(range(maps)),
        "input_transform": "resize_concat",
        "channels": width * maps,
        "num_convs": 0,
        "concat_input": False,
        "dropout_ratio": 0,
        "num_classes": classes,
        "align_corners": False,
        "init_cfg": {"type": "TruncNormal", "std": std, "override": {"name": "conv_seg"}},
        "loss_decode": _loss(1.0, over_valid),
    }
    return [head]


class MaskHead(SegmenterMaskTransformerHead):
    """mmseg's mask transformer with the initial class tokens and projections of rstrudel/segmenter
    segm/model/decoder.py:60-79; mmseg leaves the tokens at std 1 and draws the projections at 0.02."""

    def init_weights(self) -> None:
        super().init_weights()
        nn.init.trunc_normal_(self.cls_emb, std=0.02)
        for projection in (self.patch_proj, self.classes_proj):
            nn.init.normal_(projection.weight, std=projection.in_features**-0.5)


def mask_head(width: int, classes: int, layers: int) -> list[Config]:
    """Segmenter's decoder of `layers` blocks: heads of 64 channels, dropout 0.1, no drop path (segm/config.yml,
    segm/model/factory.py:81-98)."""
    head = {
        "type": MaskHead,
        "in_channels": width,
        "channels": width,
        "embed_dims": width,
        "num_layers": layers,
        "num_heads": max(1, width // 64),
        "drop_rate": 0.1,
        "attn_drop_rate": 0.1,
        "drop_path_rate": 0.0,
        "dropout_ratio": 0.0,
        "num_classes": classes,
        "align_corners": False,
        "loss_decode": _loss(1.0, over_valid=True),
    }
    return [head]


class AreasMetric(IoUMetric):
    """mmseg's IoUMetric, with the areas of every image kept and percentages that are not rounded to two decimals.

    arrays["areas"]: (N, K, 3), see downstream/metrics/scores.py; and what `preview_masks` gives.
    """

    def __init__(self) -> None:
        super().__init__()
        self.arrays: dict[str, Any] = {}

    def process(self, data_batch: dict, data_samples: Sequence[dict]) -> None:
        before = len(self.results)
        super().process(data_batch, data_samples)
        masks = [thumbnail(sample["pred_sem_seg"]["data"].squeeze(0)) for sample in data_samples]
        self.results[before:] = [(*areas, mask) for areas, mask in zip(self.results[before:], masks, strict=True)]

    def compute_metrics(self, results: list) -> dict[str, float]:
        right, _, predicted, labelled, masks = zip(*results, strict=True)
        areas = torch.stack([torch.stack(column) for column in (right, predicted, labelled)], dim=-1)
        counts = areas.round().to(torch.int32).numpy()
        self.arrays = {"areas": counts} | preview_masks(masks)
        return scores(counts)


def _loss(weight: float, over_valid: bool) -> Config:
    return {"type": CrossEntropyLoss, "use_sigmoid": False, "loss_weight": weight, "avg_non_ignore": over_valid}
