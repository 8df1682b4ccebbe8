"""Franca (Venkataramanan et al. 2025): the teacher's backbone of a release or a training; and its DINOv2 baselines.

DINOv2's network, with SwiGLU in every size. The RASA head, which takes positions out of the patch tokens of its dense
evaluations, is no part of the network. Files of the v1.0.0 release without one look like DINOv2's, and are the same.
"""

from checkpoints.importers import dinov2
from checkpoints.reading import ForeignFile

SOURCE = "valeoai/Franca 667ce0a, franca/models/vision_transformer.py, franca/hub/backbones.py, scripts/"
BRANCHES = {"teacher": ("teacher.", "teacher.backbone.")}
PLACE = r"teacher\.(backbone\.)?"
DROPPED = {
    rf"{PLACE}mask_token": "mask token",
    rf"{PLACE}rasa_head\.(pos_pred|pre_pos_layers\.\d+)\.weight": "head that takes positions out of patch tokens",
    r"teacher\.(dino_head|ibot_head)\..*": "projection heads",
}
convert = dinov2.convert


def recognise(file: ForeignFile) -> bool:
    return dinov2.is_of_franca(file)
