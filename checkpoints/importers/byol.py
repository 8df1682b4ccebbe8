"""BYOL (Grill et al. 2020) on a ViT: the online encoder, from a file that names its spec (docs/export-format.md).

The official release has only ResNets in JAX, so no official ViT checkpoints exist, and `bench pretrain` writes exports.
This layout is for users who train BYOL with their own code.
"""

from checkpoints.importing import named_vit
from checkpoints.reading import ForeignFile

SOURCE = "a layout of this project's own; the method after deepmind-research d8df415, byol/"
BRANCHES = {"online": ("model.online.trunk.",), "target": ("model.target.trunk.",)}
DROPPED = {
    r"model\.(projector|target_projector|predictor)\..*": "projection and prediction heads",
}
VIT = named_vit
EPOCH = "finished"


def recognise(file: ForeignFile) -> bool:
    return file.facts.get("method") == "byol" and "model.online.trunk.cls_token" in file.tensors
