"""mmseg's models with an export as the backbone: UPerNet, a linear layer on patches, Segmenter's mask transformer.

Our configurations name classes by the class objects; names in registries are only used within mmseg's own parts.
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

BASES = Path(mmseg.__file__).parent / ".mim" / "configs" / "_base_" / "models"  # in the installed package
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
    """The model, with its neck and heads initialised from `seed`.

    Images are normalised with the export's mean and deviation. Images smaller than a crop are padded, and the padding
    is cut off from the prediction.

    Args:
        backbone: the export's network.
        heads: configurations of the head that predicts and, optionally, of an auxiliary head.
        export: the export, for its normalisation.
        crop: side of training crops and evaluation windows in pixels.
        stride: pixels from one window to the next; the last windows are aligned with the border.
        seed: seed of the initial weights.
        pyramid: configuration of the neck.
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
    """Configuration of a `Pyramid` on four feature maps. synchronised: batch norms over all processes."""
    batch_norm = nn.SyncBatchNorm if synchronised else nn.BatchNorm2d
    spec = export.spec
    return {"type": Pyramid, "width": spec.width, "patch_size": spec.patch_size, "batch_norm": batch_norm}


def upernet_heads(width: int, classes: int, channels: int, synchronised: bool) -> list[Config]:
    """UPerHead, and an auxiliary FCNHead on the third scale with weight 0.4, as in mmseg's upernet_mae.py.

    BEiT, iBOT and CAE use the same heads. As there, the loss is a mean over all pixels, including ignored ones.

    Args:
        width: channels of the four feature maps.
        classes: number of classes.
        channels: channels of UPerHead; the auxiliary head has at most 256.
        synchronised: batch norms over all processes.
    """
    config = MMConfig.fromfile(BASES / "upernet_mae.py").model
    decode, auxiliary = config.decode_head, config.auxiliary_head
    decode.update(in_channels=[width] * 4, channels=channels)
    auxiliary.update(in_channels=width, channels=min(256, channels))
    for head in (decode, auxiliary):
        head.update(num_classes=classes, norm_cfg={"type": "SyncBN" if synchronised else "BN", "requires_grad": True})
    return [decode, auxiliary]


def linear_head(width: int, classes: int, maps: int, over_valid: bool, std: float) -> list[Config]:
    """One linear layer on the concatenated channels of `maps` feature maps, without convolution, norm or dropout.

    over_valid: whether the loss is a mean over labelled pixels only. std: standard deviation of the initial weights.
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
        "loss_decode": _cross_entropy(over_valid),
    }
    return [head]


class MaskHead(SegmenterMaskTransformerHead):
    """mmseg's mask transformer with Segmenter's initial class tokens and projections.

    rstrudel/segmenter segm/model/decoder.py:60-79; mmseg has a std of 1 for the tokens and of 0.02 for the projections.
    """

    def init_weights(self) -> None:
        super().init_weights()
        nn.init.trunc_normal_(self.cls_emb, std=0.02)
        for projection in (self.patch_proj, self.classes_proj):
            nn.init.normal_(projection.weight, std=projection.in_features**-0.5)


def mask_head(width: int, classes: int, layers: int) -> list[Config]:
    """Segmenter's decoder with `layers` blocks: heads of 64 channels, dropout 0.1, no drop path.

    Source: rstrudel/segmenter segm/config.yml, segm/model/factory.py:81-98.
    """
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
        "loss_decode": _cross_entropy(over_valid=True),
    }
    return [head]


class AreasMetric(IoUMetric):
    """mmseg's IoUMetric with percentages that are not rounded to two decimals, and with the areas of each image.

    arrays: after an evaluation, "areas" (N, K, 3) of N images and K classes, see downstream/metrics/scores.py, and the
    arrays of `preview_masks`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.arrays: dict[str, Any] = {}

    def process(self, data_batch: dict, data_samples: Sequence[dict]) -> None:
        first = len(self.results)
        super().process(data_batch, data_samples)
        masks = [thumbnail(sample["pred_sem_seg"]["data"].squeeze(0)) for sample in data_samples]
        self.results[first:] = [(*areas, mask) for areas, mask in zip(self.results[first:], masks, strict=True)]

    def compute_metrics(self, results: list) -> dict[str, float]:
        intersection, _, predicted, labelled, masks = zip(*results, strict=True)
        pixels = torch.stack([torch.stack(column) for column in (intersection, predicted, labelled)], dim=-1)
        areas = pixels.round().to(torch.int32).numpy()
        self.arrays = {"areas": areas} | preview_masks(masks)
        return scores(areas)


def _cross_entropy(over_valid: bool) -> Config:
    return {"type": CrossEntropyLoss, "use_sigmoid": False, "loss_weight": 1.0, "avg_non_ignore": over_valid}
