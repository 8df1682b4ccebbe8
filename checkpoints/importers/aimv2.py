"""AIMv2 (Fini et al. 2025): the vision encoder, alone or in a LiT file. RMSNorm, SwiGLU, no biases, no class token.

Image statistics are CLIP's, as in Apple's image processors on the hub and in timm. The `native` encoder computes
positions for the grid of each image: it is imported for one image size (--image-size, by default 224), which is then
fixed.
"""

from typing import Any

from torch import Tensor

from checkpoints.importing import BranchTensors, Conversion, absolute, read_grid, trunk_sizes
from checkpoints.positions import sincos_positions
from checkpoints.reading import ForeignFile
from checkpoints.recognition import table_kind
from checkpoints.spec import CLIP_MEAN, CLIP_STD, MAX_GRID, Preparation, ViTSpec

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
HEAD_CHANNELS = 128  # in all published models
IMAGE_SIZE = 224  # pixels; of the native encoder by default


def recognise(file: ForeignFile) -> bool:
    has_gate = any(name.endswith("trunk.blocks.0.mlp.fc3.weight") for name in file.tensors)  # not in AIMv1
    return has_gate and any(prefix + FIRST[0] in file.tensors for prefix in BRANCHES["encoder"])


def convert(branch: BranchTensors) -> Conversion:
    tensors = branch.take_trunk(RENAMES)
    sizes = trunk_sizes(branch, tensors)
    gate = tensors.get("blocks.0.mlp.fc1_g.weight")
    if gate is None or gate.ndim != 2:
        raise ValueError(f"no trunk.blocks.0.mlp.fc1.weight under {branch.prefix!r}; the file is not complete")
    tensors, position_fields = _with_positions(branch, tensors, sizes)
    spec = ViTSpec(
        architecture="aimv2_large_patch14_224",
        heads=branch.heads(sizes["width"], {sizes["width"]: max(1, sizes["width"] // HEAD_CHANNELS)}),
        mlp_hidden=gate.shape[0],
        class_token=False,
        class_position=False,
        qkv_bias=False,
        norm_eps=1e-5,  # AIMv2VisionEncoder
        pool="avg",
        **sizes,
        **position_fields,
    )
    preparation = branch.options.preparation
    if branch.options.statistics is None:
        preparation = Preparation(mean=CLIP_MEAN, std=CLIP_STD, crop=1.0)
        branch.assumed.add("the image statistics 'clip', as published models have (--statistics)")
    return Conversion(spec=spec, tensors=tensors, preparation=preparation)


def _with_positions(
    branch: BranchTensors, tensors: dict[str, Tensor], sizes: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors with a position table, which is added for the native encoder; and the spec's fields on positions."""
    patch_size = sizes["patch_size"]
    if "pos_embed" in tensors:
        rows = tensors["pos_embed"].shape[1] if tensors["pos_embed"].ndim == 3 else 0
        kind, grid = table_kind(tensors["pos_embed"], rows)
        height, width = grid or read_grid(branch, patch_size, absolute(rows), prefixes=(0,))[1:]
        size = (height * patch_size, width * patch_size)
        return tensors, dict(image_size=size, position=kind, position_resize="bicubic_antialias")
    image_size = branch.options.image_size or IMAGE_SIZE // patch_size * patch_size
    height, width = image_size if isinstance(image_size, tuple) else (image_size, image_size)
    if max(height, width) > MAX_GRID * patch_size:
        raise ValueError(f"image_size={image_size}: at most {MAX_GRID * patch_size} px a side can be computed")
    table = sincos_positions((height // patch_size, width // patch_size), sizes["width"], "column")
    fields = dict(image_size=image_size, position="sincos_column_first", position_resize="fixed")
    return tensors | {"pos_embed": table}, fields
