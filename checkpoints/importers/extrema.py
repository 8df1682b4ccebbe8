"""ExtreMA (Wu et al. 2022): a trunk for patches, then CaiT class-attention blocks for the class token.

The final norm is applied only to the class token (vits.py:309-312). Frozen evaluations use the momentum encoder,
fine-tuning the online one. The projector is kept for semi-supervised training that starts from its first layer.
"""

from checkpoints.importing import BranchTensors, Conversion, plain_vit
from checkpoints.reading import ForeignFile

SOURCE = "microsoft/ExtreMA bf30b64, main.py:263-269, vits.py, lib/builder.py:31-73"
BRANCHES = {"momentum": ("state_dict.momentum_encoder.",), "online": ("state_dict.base_encoder.",)}
DROPPED = {
    r"state_dict\.predictor\.[013]\.(weight|bias)": "prediction head",
}
CLASS_BLOCK = r"blocks_token\.(\d+\.(?:gamma_[12]|(?:norm[12]|attn\.(?:q|k|v|proj)|mlp\.fc[12])\.(?:weight|bias)))"


def recognise(file: ForeignFile) -> bool:
    return "state_dict.base_encoder.blocks_token.0.gamma_1" in file.tensors


def convert(branch: BranchTensors) -> Conversion:
    tensors = branch.take_trunk({r"^cls_token$": "class_query"})
    blocks = {int(name.split(".")[1]) for name in branch.names if name.startswith("blocks_token.")}
    spec = plain_vit(
        branch,
        tensors,
        class_token=False,
        class_position=False,
        class_attention=max(blocks, default=-1) + 1,
        position="sincos_column_first",
        final_norm="class",
    )
    extra = branch.take(r"cls_token", "class_query")
    extra |= branch.take(CLASS_BLOCK, r"class_attention.\1")
    extra |= branch.take(r"head\.([01346]\.(?:weight|bias))", r"projector.\1")
    return Conversion(spec=spec, tensors=tensors, extra=extra, epochs=branch.epochs())  # main.py:264 adds 1
