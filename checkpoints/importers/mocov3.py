"""MoCo-v3 (Chen et al. 2021): the base encoder. Its ViT-S has 12 heads, twice those of every other ViT-S."""

from checkpoints.importing import BranchTensors, Conversion, plain_vit
from checkpoints.reading import ForeignFile
from checkpoints.recognition import BARE, LAYER, is_bare_vit

SOURCE = "facebookresearch/moco-v3 c349e6e, vits.py:53-69 and 115-120, convert_to_deit.py"
BRANCHES = {"base": ("state_dict.base_encoder.", *BARE), "momentum": ("state_dict.momentum_encoder.",)}
HEADS = {384: 12, 768: 12}  # vits.py:115-128
DROPPED = {
    rf"state_dict\.(base_encoder|momentum_encoder)\.head\.\d\.{LAYER}": "projection head",
    rf"state_dict\.predictor\.\d\.{LAYER}": "prediction head",
}


def recognise(file: ForeignFile) -> bool:
    names = file.tensors
    full = "state_dict.base_encoder.cls_token" in names and not any(".blocks_token." in name for name in names)
    return full or is_bare_vit(file, "sincos_row_first")  # convert_to_deit.py's; no other source has such a table


def convert(branch: BranchTensors) -> Conversion:
    tensors = branch.take_trunk()
    spec = plain_vit(branch, tensors, heads=HEADS, position="sincos_row_first")
    return Conversion(spec=spec, tensors=tensors, epochs=branch.epochs())  # main_moco.py adds 1
