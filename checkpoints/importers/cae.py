"""CAE (Chen et al. 2022): the encoder of a pretraining file of either official repository, or of a fine-tuned file.

Its blocks are BEiT's, with biases for queries and values, and layer scale. A pretrained encoder has no relative
positions, and becomes a plain ViT with zero biases for keys. Fine-tuning adds a relative position table to each block.
"""

import re

import torch
from torch import Tensor

from checkpoints.importing import BranchTensors, Conversion, plain_vit, relative_vit
from checkpoints.reading import ForeignFile
from checkpoints.recognition import CLASSIFIER, position_kind, trunk_of
from checkpoints.spec import PositionTable

SOURCE = (
    "lxtGH/CAE d725971, models/modeling_cae.py, models/modeling_finetune.py, furnace/utils.py:421-526; "
    "Atten4Vis/CAE a7fd162, models/modeling_cae.py"
)
BRANCHES = {"encoder": ("model.encoder.", "model.", "")}
POSITION: PositionTable = "sincos_row_first"
HEADS = {192: 12, 384: 12, 768: 12, 1024: 16}  # its ViT-Ti and ViT-S have as many heads as a ViT-B
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
    trunk = trunk_of(file, f"{CLASSIFIER}|{INDEX}")  # of a fine-tuned file
    return "blocks.0.attn.q_bias" in trunk and position_kind(trunk) == POSITION


def convert(branch: BranchTensors) -> Conversion:
    tensors = branch.take_trunk()
    epochs = branch.epochs(last=True)  # furnace/utils.py, save_model
    if any(name.endswith("relative_position_bias_table") for name in tensors):
        if (kind := position_kind(tensors)) != POSITION:
            raise ValueError(f"its position table is {kind}, that of cae is {POSITION}; it is a file of another method")
        spec = relative_vit(branch, tensors, position=POSITION)
        return Conversion(spec=spec, tensors=tensors, epochs=epochs)
    plain = beit_to_plain(tensors)
    has_layer_scale = "blocks.0.ls1.gamma" in plain
    spec = plain_vit(branch, plain, heads=HEADS, position=POSITION, layer_scale=has_layer_scale)
    return Conversion(spec=spec, tensors=plain, epochs=epochs)


def beit_to_plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a plain ViT from those of a BEiT: joint biases of queries, keys (zero) and values; `ls1` and `ls2`.

    Raises ValueError if query and value biases do not fit each other.
    """
    plain = {re.sub(r"\.gamma_([12])$", r".ls\1.gamma", name): tensor for name, tensor in tensors.items()}
    for name in [name for name in plain if name.endswith(".attn.q_bias")]:
        value_bias = plain.pop(name.replace("q_bias", "v_bias"), None)
        query_bias = plain.pop(name)
        if value_bias is None or value_bias.shape != query_bias.shape:
            raise ValueError(f"{name} and its v_bias do not fit each other")
        plain[name.replace("q_bias", "qkv.bias")] = torch.cat([query_bias, torch.zeros_like(query_bias), value_bias])
    return plain
