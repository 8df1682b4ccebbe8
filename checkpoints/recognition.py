"""Recognise a network by its tensors: a ViT trunk's names, the kind of its position table, and unsupported parts.

Shapes: P tokens in front of the patches, L patches, D width.
"""

import re
from collections.abc import Iterable, Mapping
from math import isqrt
from typing import Literal

import torch
from torch import Tensor

from checkpoints.positions import sincos_positions
from checkpoints.reading import ForeignFile
from checkpoints.spec import PositionTable

SINCOS_ORDERS: tuple[tuple[Literal["column", "row"], PositionTable], ...] = (
    ("column", "sincos_column_first"),
    ("row", "sincos_row_first"),
)
TRUNK = re.compile(
    r"cls_token|pos_embed|reg_token|patch_embed\.(proj|norm)\.(weight|bias)|(norm|fc_norm|norm_pre)\.(weight|bias)"
    r"|rel_pos_bias\.relative_position_bias_table|rope\.freqs"
    r"|blocks\.\d+\.(norm1|norm2|attn\.(qkv|[qkv]_proj|proj|q_norm|k_norm|norm))\.(weight|bias)"
    r"|blocks\.\d+\.mlp\.(fc1|fc1_g|fc1_x|fc2|norm)\.(weight|bias)"
    r"|blocks\.\d+\.(ls1\.gamma|ls2\.gamma|gamma_1|gamma_2|attn\.q_bias|attn\.v_bias|attn\.relative_position_bias_table)"
)
# For the importers' patterns: a block of a plain ViT, and the tensors of a linear or batch-norm layer in a head.
BLOCK = r"blocks\.\d+\.(norm[12]|attn\.(qkv|proj)|mlp\.fc[12])\.(weight|bias)"
LAYER = r"(weight|bias|running_mean|running_var|num_batches_tracked)"
PLAIN = re.compile(rf"cls_token|pos_embed|patch_embed\.proj\.(weight|bias)|norm\.(weight|bias)|{BLOCK}")
SCALE = re.compile(r"blocks\.\d+\.ls[12]\.gamma")
BARE = ("", "backbone.", "state_dict.", "state_dict.backbone.", "model.", "model.backbone.")  # where a trunk alone lies
WITHIN = r"((state_dict|model)\.)?(backbone\.)?"  # the same as a pattern
MASK_TOKEN = "masked_embed|mask_token"  # iBOT's and DINOv2's, which their trunks keep
CLASSIFIER = r"head\.(weight|bias)"
TABLE_DRIFT = 1e-2  # of a fixed table through years of averaging: 2.2e-4 of its values in 187 500 steps of ExtreMA
LIKENESS = 0.5  # correlation with a sine-cosine table; fine-tuning leaves a table near 1, a learned one is near 0
# Pattern of a name in the trunk -> the part that it belongs to, which no ViT here computes.
BEYOND = {
    r"layers\.\d+\.blocks\..*": "stages of blocks (Swin and the like)",
    r"rope\.freqs_\w+|rotary\w*\..*|freqs_c\w+|inv_freq|.*\.attn\.rope\..*": "rotary positions of another kind",
    r"blocks\.\d+\.attn\.rel_pos(_[hw]|\..*)": "relative positions of another kind than BEiT's",
    r"blocks\.\d+\.attn\.lambda_.*": "differential attention",
    r"blocks\.\d+\.attn\.proj_[lw]\..*": "talking-heads attention",
    r"blocks\.\d+\.(attns\.|in_proj\.).*": "blocks with parallel parts",
    r"patch_embed\.(backbone|conv\w*|proj\.\d)\..*": "a patch embedding of more than one convolution",
}
# The same -> a part whose remaining settings no tensor shows: such a file is imported by timm's name of its model.
NAMED = {
    "dist_token": "a distillation token",
    r"rope\w*(\..*)?": "rotary positions",
    r"blocks\.\d+\.attn\.[qkv]_proj\..*": "separate projections of queries, keys and values",
    r"blocks\.\d+\.(attn|mlp)\.norm\..*": "norms inside attention and MLP",
    r"blocks\.\d+\.mlp\.(fc1_[gx]|w[0-3])\..*": "a gated MLP",
    r"patch_embed\.norm\..*": "a norm after the patch embedding",
}
BY_NAME = "a file of one of timm's models is read as timm:FILE with bench import --architecture NAME"
# Pattern of a name -> the library that names its tensors so.
FOREIGN = {
    r"embeddings\.(patch_embedding|position_embedding)s?\b.*": "Hugging Face transformers",
    r"transformer\.resblocks\.\d+\..*": "OpenAI's CLIP",
    r"layers\.\d+\.ln1\..*": "mmpretrain",
    r"encoder\.layers\.encoder_layer_\d+\..*": "torchvision",
}


def trunk_of(file: ForeignFile, besides: str) -> dict[str, Tensor]:
    """The trunk's tensors by timm's names; {} if there is no trunk or other tensors do not match `besides`."""
    for prefix in BARE:
        names = [name.removeprefix(prefix) for name in file.tensors if name.startswith(prefix)]
        trunk = [name for name in names if TRUNK.fullmatch(name)]
        if "patch_embed.proj.weight" in trunk and all(re.fullmatch(besides, name) for name in {*names} - {*trunk}):
            return {name: file.tensors[prefix + name] for name in trunk}
    return {}


def is_plain(tensors: Mapping[str, Tensor], scaled: bool = False) -> bool:
    """Whether these are exactly the tensors of a plain ViT: class token, biases and, if `scaled`, layer scale."""
    depth = len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})
    scales = sum(bool(SCALE.fullmatch(name)) for name in tensors)
    plain = sum(bool(PLAIN.fullmatch(name)) for name in tensors)
    return bool(depth) and plain == 6 + 12 * depth and scales == 2 * depth * scaled and plain + scales == len(tensors)


def is_bare_vit(file: ForeignFile, kind: PositionTable = "learned", scaled: bool = False) -> bool:
    """Whether a file holds a plain ViT and at most a mask token, with a position table (1, 1+L, D) of this `kind`."""
    tensors = trunk_of(file, MASK_TOKEN)
    if not is_plain(tensors, scaled) or tensors["pos_embed"].ndim != 3:
        return False
    rows = tensors["pos_embed"].shape[1] - 1
    return rows > 0 and isqrt(rows) ** 2 == rows and kind_in(tensors) == kind


def kind_in(tensors: Mapping[str, Tensor]) -> PositionTable:
    """Kind of a trunk's position table, with or without rows for a class token and registers."""
    table = tensors.get("pos_embed")
    if table is None or table.ndim != 3:
        return "none"
    return table_kind(table, isqrt(table.shape[1]) ** 2, fine_tuned="fc_norm.weight" in tensors)


def table_kind(table: Tensor, rows: int, fine_tuned: bool = False) -> PositionTable:
    """What a table (1, P + rows, D) of a square grid holds: one of the two sine-cosine orders, or learned values.

    fine_tuned: a table that was trained on from sines and cosines counts as these.
    """
    if len(table) != 1:
        return "learned"  # or broken
    side, prefix = isqrt(rows), table.shape[1] - rows
    for first, kind in SINCOS_ORDERS if table.shape[2] % 4 == 0 and rows else ():
        expected = sincos_positions((side, side), table.shape[2], first, prefix, torch.float64)
        alike = fine_tuned and _correlation(table[:, prefix:], expected[:, prefix:]) > LIKENESS
        if alike or (table - expected).abs().max() < TABLE_DRIFT:
            return kind
    return "learned"


def _correlation(first: Tensor, second: Tensor) -> float:
    """Correlation of two tables (1, L, D) after subtracting each channel's mean over positions."""
    flat = [(table.double() - table.double().mean(dim=1)).flatten() for table in (first, second)]
    return float(torch.nn.functional.cosine_similarity(*flat, dim=0))


def beyond(names: Iterable[str], table: Tensor | None = None, named: bool = False) -> str:
    """Why no importer can read a network whose tensors have these names; empty if the names show no reason.

    table: its position table. CAE's encoder has EVA's names, but a fixed sine-cosine table.
    named: the user named the timm model, or the importer recognised the file as its own.
    """
    names = list(names)
    for pattern, what in BEYOND.items():
        if name := _first(pattern, names):
            return f"it has {what} ({name}), which no ViT here computes"
    for pattern, library in FOREIGN.items():
        if not named and (name := _first(pattern, names)):
            fix = "take the official file or timm's of the same model"
            if library.startswith("Hugging Face"):
                fix = f"give the folder that holds it and its config.json, or {fix}"
            return f"its tensors are named by {library} ({name}); {fix}"
    block, bias = _first(r"blocks\.\d+\.norm1\.weight", names), _first(r".*relative_position_bias_table", names)
    if named or not block:
        return ""
    for pattern, what in NAMED.items():
        if name := _first(pattern, names):
            return f"it has {what} ({name}); {BY_NAME}"
    if not bias and not _first("(decoder_)?pos_embed", names):
        return f"it has no position table, so that nothing tells its positions (rotary ones, say); {BY_NAME}"
    fixed = table is not None and kind_in({"pos_embed": table}) == "sincos_row_first"
    if not (bias or fixed) and (name := _first(r"blocks\.\d+\.(gamma_1|attn\.q_bias)", names)):
        return f"it is of EVA's kind ({name} without relative positions); {BY_NAME}"
    return ""


def _first(pattern: str, names: Iterable[str]) -> str:
    return next((name for name in names if re.fullmatch(rf"(.*\.)?({pattern})", name)), "")
