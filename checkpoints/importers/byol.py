"""BYOL (Grill et al. 2020) on a ViT: the online encoder, from this project's training file.

The official release is JAX and ResNet only, so there is no official ViT checkpoint to read.
"""

from checkpoints.importing import Branch, Conversion, own_vit
from checkpoints.reading import ForeignFile

SOURCE = "this project's layout; the method after deepmind-research d8df415, byol/"
BRANCHES = {"online": ("model.online.trunk.",), "target": ("model.target.trunk.",)}
DROPPED = {
    r"model\.(projector|target_projector|predictor)\..*": "projection and prediction heads",
}


def recognise(file: ForeignFile) -> bool:
    return file.facts.get("method") == "byol" and "model.online.trunk.cls_token" in file.tensors


def convert(branch: Branch) -> Conversion:
    return Conversion(spec=own_vit(branch), tensors=branch.take_trunk())
