"""CAPI (Darcet et al. 2025): the encoder of a release or of a file that its evaluations read; the predictor is dropped.

Rotary positions from 0 to 1 of patches and registers, no class token, RMSNorms, no bias but the patch embedding's. Its
last norm has no gain: here it has one of ones. The vector of an image that the source's probes may read, the mean of
the predictor's first block over all positions, is not part of the encoder.
"""

from typing import Any

import torch

from checkpoints.importing import BranchTensors, Conversion, shown_sizes
from checkpoints.reading import ForeignFile
from checkpoints.spec import ViTSpec

SOURCE = "facebookresearch/capi 98b4fa1, model.py, train_capi.py"
BRANCHES = {"encoder": ("backbone.", "")}
FIRST = ("patch_embed.weight",)
DROPPED = {
    r"(backbone\.)?decoder\.blocks\.\d+\.(residual[12]\.norm\.weight|residual1\.fn\.rope\.freqs)": "predictor",
    r"(backbone\.)?decoder\.blocks\.\d+\.residual[12]\.fn\.([qkv]_proj|proj|fc[12])\.weight": "predictor",
    r"(backbone\.)?mask_token": "mask token",
    r"head\.last_layer\.weight_[gv]": "prototypes",
}
RENAMES = {
    r"^registers$": "reg_token",
    r"^patch_embed\.": "patch_embed.proj.",
    r"^encoder\.blocks\.(\d+)\.residual([12])\.norm\.": r"blocks.\1.norm\2.",
    r"^encoder\.blocks\.(\d+)\.residual1\.fn\.": r"blocks.\1.attn.",
    r"^encoder\.blocks\.(\d+)\.residual2\.fn\.": r"blocks.\1.mlp.",
}
RATES = r"encoder\.blocks\.(\d+)\.residual1\.fn\.rope\.freqs"
IMAGE = 224  # default_pretrain_config.yaml
# What the encoder is beside its sizes, here and in pretraining.
ENCODER: dict[str, Any] = dict(
    architecture="eva02_base_patch14_224",
    class_token=False,
    class_position=False,
    position="none",
    qkv_bias=False,
    proj_bias=False,
    split_qkv=True,
    rms_norm=True,
    norm_eps=1e-5,
    rotary="unit",
    rotary_pairs="halves",
    pool="avg",
)


def recognise(file: ForeignFile) -> bool:
    return any(name.endswith("encoder.blocks.0.residual1.fn.rope.freqs") for name in file.tensors)


def convert(branch: BranchTensors) -> Conversion:
    tensors = branch.take_trunk(RENAMES)
    rates = branch.take(RATES, r"rope.freqs.\1", biased=False)
    sizes = shown_sizes(branch, tensors)
    first, hidden = rates.get("rope.freqs.0"), tensors.get("blocks.0.mlp.fc1.weight")
    if first is None or not first.numel() or hidden is None:
        raise ValueError(f"no encoder.blocks.0 under {branch.prefix!r}; the file is not complete")
    heads = sizes["width"] // first.shape[-1]
    if branch.options.heads not in (None, heads):
        raise ValueError(f"its rotary rates are for {heads} heads, not {branch.options.heads}")
    spec = ViTSpec(
        **ENCODER,
        image_size=IMAGE // sizes["patch_size"] * sizes["patch_size"],
        heads=heads,
        mlp_hidden=len(hidden),
        registers=tensors["reg_token"].shape[1] if "reg_token" in tensors else 0,
        **sizes,
    )
    return Conversion(spec=spec, tensors=tensors | rates | {"norm.weight": torch.ones(sizes["width"])})
