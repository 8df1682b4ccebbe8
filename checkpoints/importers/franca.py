"""Franca (Venkataramanan et al. 2025): the teacher's backbone of a release or a training; and its DINOv2 baselines.

The network is DINOv2's, with SwiGLU in every size. The RASA head, which removes positions from patch tokens for dense
evaluations, is not part of the network. Files of release v1.0.0 without this head are read as DINOv2's, with the same
result.
"""

from checkpoints.importers import dinov2
from checkpoints.reading import ForeignFile

SOURCE = "valeoai/Franca 667ce0a, franca/models/vision_transformer.py, franca/hub/backbones.py, scripts/"
BRANCHES = {"teacher": ("teacher.", "teacher.backbone.")}
PREFIX = r"teacher\.(backbone\.)?"
DROPPED = {
    rf"{PREFIX}mask_token": "mask token",
    rf"{PREFIX}rasa_head\.(pos_pred|pre_pos_layers\.\d+)\.weight": "head that takes positions out of patch tokens",
    r"teacher\.(dino_head|ibot_head)\..*": "projection heads",
}
convert = dinov2.convert


def recognise(file: ForeignFile) -> bool:
    return dinov2.is_franca(file)
