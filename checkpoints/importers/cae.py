"""CAE (Chen et al. 2022): the encoder of a pretraining file, of both official repositories, or a fine-tuned file.

Its blocks are BEiT's: biases of queries and values, layer scale. A pretrained encoder has no relative positions, and
becomes a plain ViT whose keys have a bias of zero; fine-tuning adds a table of them to every block.
"""

import re

import torch
from torch import Tensor

from checkpoints.importing import BranchTensors, Conversion, plain_vit, relative_vit
from checkpoints.reading import ForeignFile
from checkpoints.recognition import CLASSIFIER, kind_in, trunk_of
from checkpoints.spec import PositionTable

SOURCE = (
    "lxtGH/CAE d725971, models/modeling_cae.py, models/modeling_finetune.py, furnace/utils.py:421-526; "
    "Atten4Vis/CAE a7fd162, models/modeling_cae.py"
)
BRANCHES = {"encoder": ("model.encoder.", "model.", "")}
POSITION: PositionTable = "sincos_row_first"
HEADS = {192: 12, 384: 12, 768: 12, 1024: 16}  # the S and Ti of its repositories have a B's
WEIGHTS = r"(weight|bias|q_bias|v_bias)"
PRETEXT = (
    r"(norm2?|head)\.(weight|bias)"
    r"|decoder_blocks\.\d+\.(gamma_[12]|(norm[12]|attn|attn\.qkv|attn\.proj|mlp\.fc[12])\." + WEIGHTS + ")"
    r"|regressor_blocks\.\d+\.(gamma_[12]_cross|(norm1_[qkv]|norm2_cross|mlp_cross\.fc[12])\.(weight|bias)"
    r"|cross_attn\.((q|k|v|proj)\.)?" + WEIGHTS + ")"
)
INDEX = r"blocks\.\d+\.attn\.relative_position_index"
DROPPED = {
    r"model\.mask_token": "mask token",
    rf"model\.(pretext_neck|regresser|decoder)\.({PRETEXT})": "regressor and decoder",
    r"model\.encoder_to_(decoder|regresser)(_norm)?\.(weight|bias)": "regressor and decoder",
    r"model\.rd_pos_embed": "regressor and decoder",
    r"model\.(alignment_encoder|teacher)\..*": "the encoder once more, as a target",
    rf"(model\.)?({CLASSIFIER})": "classifier",
    rf"(model\.)?{INDEX}": "made from the window size",
}


def recognise(file: ForeignFile) -> bool:
    if any(re.match(r"model\.(pretext_neck|regresser)\.", name) for name in file.tensors):
        return True
    tuned = trunk_of(file, f"{CLASSIFIER}|{INDEX}")
    return "blocks.0.attn.q_bias" in tuned and kind_in(tuned) == POSITION


def convert(branch: BranchTensors) -> Conversion:
    tensors = branch.take_trunk()
    epochs = branch.epochs(last=True)  # furnace/utils.py, save_model
    if any(name.endswith("relative_position_bias_table") for name in tensors):
        if (kind := kind_in(tensors)) != POSITION:
            raise ValueError(f"its position table is {kind}, that of cae is {POSITION}; it is a file of another method")
        spec = relative_vit(branch, tensors, position=POSITION)
        return Conversion(spec=spec, tensors=tensors, epochs=epochs)
    plain = with_joint_biases(tensors)
    scaled = "blocks.0.ls1.gamma" in plain
    spec = plain_vit(branch, plain, heads=HEADS, position=POSITION, layer_scale=scaled)
    return Conversion(spec=spec, tensors=plain, epochs=epochs)


def with_joint_biases(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """BEiT's names of a trunk -> a plain ViT's: one bias for queries, keys (0) and values, and `ls1`, `ls2`."""
    joint = {re.sub(r"\.gamma_([12])$", r".ls\1.gamma", name): tensor for name, tensor in tensors.items()}
    for name in [name for name in joint if name.endswith(".attn.q_bias")]:
        values = joint.pop(name.replace("q_bias", "v_bias"), None)
        queries = joint.pop(name)
        if values is None or values.shape != queries.shape:
            raise ValueError(f"{name} and its v_bias do not fit each other")
        joint[name.replace("q_bias", "qkv.bias")] = torch.cat([queries, torch.zeros_like(queries), values])
    return joint
