"""CAPI (Darcet et al. 2025): the encoder of a release or of a file that its evaluations read; the predictor is dropped.

The encoder has rotary positions from 0 to 1 for patches and registers, no class token, RMSNorms, and only the patch
embedding has a bias. Its final norm has no gain; the export gets a gain of ones. Probes of the source may also read a
vector for the whole image, the mean of the predictor's first block; it is not available here.
"""

from typing import Any

import torch

from checkpoints.importing import BranchTensors, Conversion, trunk_sizes
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
FREQUENCIES = r"encoder\.blocks\.(\d+)\.residual1\.fn\.rope\.freqs"
IMAGE_SIZE = 224  # pixels; default_pretrain_config.yaml
# Fields of the spec besides the sizes, here and in pretraining.
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
    frequencies = branch.take(FREQUENCIES, r"rope.freqs.\1", biased=False)
    sizes = trunk_sizes(branch, tensors)
    first_frequencies, fc1 = frequencies.get("rope.freqs.0"), tensors.get("blocks.0.mlp.fc1.weight")
    if first_frequencies is None or not first_frequencies.numel() or fc1 is None:
        raise ValueError(f"no encoder.blocks.0 under {branch.prefix!r}; the file is not complete")
    heads = sizes["width"] // first_frequencies.shape[-1]
    if branch.options.heads not in (None, heads):
        raise ValueError(f"its rotary rates are for {heads} heads, not {branch.options.heads}")
    spec = ViTSpec(
        **ENCODER,
        image_size=IMAGE_SIZE // sizes["patch_size"] * sizes["patch_size"],
        heads=heads,
        mlp_hidden=len(fc1),
        registers=tensors["reg_token"].shape[1] if "reg_token" in tensors else 0,
        **sizes,
    )
    return Conversion(spec=spec, tensors=tensors | frequencies | {"norm.weight": torch.ones(sizes["width"])})
