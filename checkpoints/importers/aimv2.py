"""AIMv2 (Fini et al. 2025): the vision encoder, alone or of a LiT file. RMSNorm, SwiGLU, no biases, no class token.

Image statistics are CLIP's, as Apple's image processors on the hub and timm have them. The `native` encoder computes
its positions for each image's own grid: it is imported for one image size (--image-size, else 224) and stays there.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from checkpoints.importing import BranchTensors, Conversion, shown_sizes, square
from checkpoints.positions import sincos_positions
from checkpoints.reading import ForeignFile
from checkpoints.recognition import kind_in
from checkpoints.spec import CLIP_MEAN, CLIP_STD, Preparation, ViTSpec

SOURCE = "apple/ml-aim 3762121, aim-v2/aim/v2/torch/, aim-v1/aim/v1/torch/"
BRANCHES = {"encoder": ("", "image_encoder.")}
FIRST = ("preprocessor.patchifier.proj.weight",)
DROPPED = {
    r"(image_encoder\.)?head\.(cls_token|(k|v|linear)\.(weight|bias))": "pooling head",
    r"text_encoder\.trunk\.blocks\.\d+\.(norm_[12]|attn\.(qkv|proj)|mlp\.fc[123])\.weight": "text tower",
    r"text_encoder\.trunk\.post_trunk_norm\.weight": "text tower",
    r"text_encoder\.preprocessor\.(text_embedding\.weight|positional_embedding)": "text tower",
    r"(image|text)_projector\.weight|log_logit_scale": "what joins the towers",
}
RENAMES = {
    r"^preprocessor\.patchifier\.": "patch_embed.",
    r"^preprocessor\.pos_embed$": "pos_embed",
    r"^trunk\.blocks\.(\d+)\.norm_([12])\.": r"blocks.\1.norm\2.",
    r"^trunk\.blocks\.(\d+)\.mlp\.fc1\.": r"blocks.\1.mlp.fc1_g.",
    r"^trunk\.blocks\.(\d+)\.mlp\.fc3\.": r"blocks.\1.mlp.fc1_x.",
    r"^trunk\.blocks\.": "blocks.",
    r"^trunk\.post_trunk_norm\.": "norm.",
}
CHANNELS = 128  # of a head, in all published models
IMAGE = 224  # of the native encoder, unless another size is asked for


def recognise(file: ForeignFile) -> bool:
    gated = any(name.endswith("trunk.blocks.0.mlp.fc3.weight") for name in file.tensors)  # AIM's first version is not
    return gated and any(prefix + FIRST[0] in file.tensors for prefix in BRANCHES["encoder"])


def convert(branch: BranchTensors) -> Conversion:
    tensors = branch.take_trunk(RENAMES)
    sizes = shown_sizes(branch, tensors)
    gate = tensors.get("blocks.0.mlp.fc1_g.weight")
    if gate is None or gate.ndim != 2:
        raise ValueError(f"no trunk.blocks.0.mlp.fc1.weight under {branch.prefix!r}; the file is not complete")
    tensors, positions = _positions(branch, tensors, sizes)
    spec = ViTSpec(
        architecture="aimv2_large_patch14_224",
        heads=branch.options.heads or max(1, sizes["width"] // CHANNELS),
        mlp_hidden=gate.shape[0],
        class_token=False,
        class_position=False,
        qkv_bias=False,
        norm_eps=1e-5,  # AIMv2VisionEncoder
        pool="avg",
        **sizes,
        **positions,
    )
    prepared = replace(Preparation(mean=CLIP_MEAN, std=CLIP_STD), crop=1.0)
    own = branch.options.statistics is None
    return Conversion(spec=spec, tensors=tensors, preparation=prepared if own else branch.options.preparation)


def _positions(
    branch: BranchTensors, tensors: dict[str, Tensor], sizes: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors with a position table, and what the spec says of it."""
    patch = sizes["patch_size"]
    if "pos_embed" in tensors:
        rows = tensors["pos_embed"].shape[1] if tensors["pos_embed"].ndim == 3 else 0
        side = square(branch, rows, f"the position table has {rows} rows")
        facts = dict(image_size=side * patch, position=kind_in(tensors), position_resize="bicubic_antialias")
        return tensors, facts
    asked = branch.options.image_size or IMAGE // patch * patch
    size = asked if isinstance(asked, tuple) else (asked, asked)
    table = sincos_positions((size[0] // patch, size[1] // patch), sizes["width"], "column")
    facts = dict(image_size=asked, position="sincos_column_first", position_resize="fixed")
    return tensors | {"pos_embed": table}, facts
