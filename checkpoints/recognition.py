"""Recognise a network by its tensors: the names of a ViT trunk, the kind of its position table, unsupported parts.

Shapes: P prefix tokens, L patches, D width.
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
# Patterns for importers: the tensors in blocks of a plain ViT, and those of a linear or batch-norm layer in a head.
BLOCK = r"blocks\.\d+\.(norm[12]|attn\.(qkv|proj)|mlp\.fc[12])\.(weight|bias)"
LAYER = r"(weight|bias|running_mean|running_var|num_batches_tracked)"
PLAIN = re.compile(rf"cls_token|pos_embed|patch_embed\.proj\.(weight|bias)|norm\.(weight|bias)|{BLOCK}")
SCALE = re.compile(r"blocks\.\d+\.ls[12]\.gamma")
# Prefixes of the trunk in a file that holds nothing else, and the same as a pattern.
TRUNK_PREFIXES = ("", "backbone.", "state_dict.", "state_dict.backbone.", "model.", "model.backbone.")
ANY_PREFIX = r"((state_dict|model)\.)?(backbone\.)?"
MASK_TOKEN = "masked_embed|mask_token"  # iBOT's and DINOv2's, which are part of their trunks
CLASSIFIER = r"head\.(weight|bias)"
MAX_TABLE_DRIFT = 1e-2  # of a fixed table through averaging of weights; in ExtreMA 2.2e-4 after 187 500 steps
MIN_TABLE_CORRELATION = (
    0.5  # with sines and cosines; about 1 for a fine-tuned table of these, about 0 for a learned one
)
# Pattern of a name in the trunk -> the part that it belongs to, which checkpoints/vit.py cannot compute.
UNSUPPORTED_PARTS = {
    r"layers\.\d+\.blocks\..*": "stages of blocks (Swin and the like)",
    r"rope\.freqs_\w+|rotary\w*\..*|freqs_c\w+|inv_freq|.*\.attn\.rope\..*": "rotary positions of another kind",
    r"blocks\.\d+\.attn\.rel_pos(_[hw]|\..*)": "relative positions of another kind than BEiT's",
    r"blocks\.\d+\.attn\.lambda_.*": "differential attention",
    r"blocks\.\d+\.attn\.proj_[lw]\..*": "talking-heads attention",
    r"blocks\.\d+\.(attns\.|in_proj\.).*": "blocks with parallel parts",
    r"patch_embed\.(backbone|conv\w*|proj\.\d)\..*": "a patch embedding of more than one convolution",
}
# The same -> a part with settings that no tensor shows, so that users have to give timm's name of the model.
PARTS_THAT_NEED_A_NAME = {
    "dist_token": "a distillation token",
    r"rope\w*(\..*)?": "rotary positions",
    r"blocks\.\d+\.attn\.[qkv]_proj\..*": "separate projections of queries, keys and values",
    r"blocks\.\d+\.(attn|mlp)\.norm\..*": "norms inside attention and MLP",
    r"blocks\.\d+\.mlp\.(fc1_[gx]|w[0-3])\..*": "a gated MLP",
    r"patch_embed\.norm\..*": "a norm after the patch embedding",
}
BY_NAME = "a file of one of timm's models is read as timm:FILE with bench import --architecture NAME"
# Pattern of a name -> the library that uses such names.
OTHER_LIBRARIES = {
    r"embeddings\.(patch_embedding|position_embedding)s?\b.*": "Hugging Face transformers",
    r"transformer\.resblocks\.\d+\..*": "OpenAI's CLIP",
    r"layers\.\d+\.ln1\..*": "mmpretrain",
    r"encoder\.layers\.encoder_layer_\d+\..*": "torchvision",
}


def trunk_of(file: ForeignFile, other_names: str) -> dict[str, Tensor]:
    """The tensors of the trunk under timm's names.

    other_names: pattern of the names that a file may have besides. {} if there is no trunk or a name does not match.
    """
    for prefix in TRUNK_PREFIXES:
        names = [name.removeprefix(prefix) for name in file.tensors if name.startswith(prefix)]
        trunk = [name for name in names if TRUNK.fullmatch(name)]
        if "patch_embed.proj.weight" in trunk and all(re.fullmatch(other_names, name) for name in {*names} - {*trunk}):
            return {name: file.tensors[prefix + name] for name in trunk}
    return {}


def is_plain(tensors: Mapping[str, Tensor], scaled: bool = False) -> bool:
    """Whether these are exactly the tensors of a plain ViT: class token, biases and, if `scaled`, layer scale."""
    depth = len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})
    scales = sum(bool(SCALE.fullmatch(name)) for name in tensors)
    plain = sum(bool(PLAIN.fullmatch(name)) for name in tensors)
    is_complete = plain == 6 + 12 * depth and scales == 2 * depth * scaled and plain + scales == len(tensors)
    return bool(depth) and is_complete and not has_class_tokens(tensors)


def has_class_tokens(tensors: Mapping[str, Tensor]) -> bool:
    """Whether a trunk has several class tokens (1, P, D)."""
    return "cls_token" in tensors and tensors["cls_token"].ndim == 3 and tensors["cls_token"].shape[1] > 1


def is_bare_vit(file: ForeignFile, kind: PositionTable = "learned", scaled: bool = False) -> bool:
    """Whether a file holds only a plain ViT, and perhaps a mask token, with a position table (1, 1+L, D) of a kind.

    scaled: as in `is_plain`.
    """
    tensors = trunk_of(file, MASK_TOKEN)
    if not is_plain(tensors, scaled) or tensors["pos_embed"].ndim != 3:
        return False
    patches = tensors["pos_embed"].shape[1] - 1
    # A learned table of a square number of rows may also be for patches alone, as with timm's no_embed_class.
    has_two_readings = kind == "learned" and isqrt(patches + 1) ** 2 == patches + 1
    return patches > 0 and not has_two_readings and position_kind(tensors) == kind


def position_kind(tensors: Mapping[str, Tensor]) -> PositionTable:
    """Kind of the position table of a trunk, with or without rows for a class token and registers."""
    table = tensors.get("pos_embed")
    if table is None or table.ndim != 3:
        return "none"
    rows = table.shape[1]
    for prefix in dict.fromkeys((rows - isqrt(rows) ** 2, 1, 0)):  # the patches may be a square, or all rows but one
        kind, _ = table_kind(table, rows - prefix, is_fine_tuned="fc_norm.weight" in tensors)
        if kind != "learned":
            return kind
    return "learned"


def table_kind(
    table: Tensor, patches: int, is_fine_tuned: bool = False
) -> tuple[PositionTable, tuple[int, int] | None]:
    """Kind of a position table (1, P+L, D), and its grid: one of the two sine-cosine orders, whose values show the
    grid; or learned, and None.

    patches: L. is_fine_tuned: accept values that were trained, starting from sines and cosines, as sines and cosines.
    """
    if patches < 1 or len(table) != 1 or table.shape[2] % 4:
        return "learned", None  # or broken
    table = table.double()  # torch does not mix float8 with other types
    prefix, width = table.shape[1] - patches, table.shape[2]
    corner = sincos_positions((1, 1), width, "row", dtype=torch.float64)  # the first patch of every grid
    if not is_fine_tuned and (table[:, prefix : prefix + 1] - corner).abs().max() >= MAX_TABLE_DRIFT:
        return "learned", None
    scores: dict[tuple[PositionTable, tuple[int, int]], float] = {}
    for grid in [(height, patches // height) for height in range(1, patches + 1) if patches % height == 0]:
        for first, kind in SINCOS_ORDERS:
            expected = sincos_positions(grid, width, first, prefix, torch.float64)
            is_equal = bool((table - expected).abs().max() < MAX_TABLE_DRIFT)
            correlates = is_fine_tuned and not is_equal
            scores[kind, grid] = _correlation(table[:, prefix:], expected[:, prefix:]) if correlates else is_equal
    best = max(scores, key=scores.__getitem__)
    return best if scores[best] > MIN_TABLE_CORRELATION else ("learned", None)


def _correlation(first: Tensor, second: Tensor) -> float:
    """Correlation of two tables (1, L, D) after subtracting each channel's mean over positions."""
    centred = [(table.double() - table.double().mean(dim=1)).flatten() for table in (first, second)]
    return float(torch.nn.functional.cosine_similarity(*centred, dim=0))


VIDEO = "it is a network for videos: its patches have frames and its rotary positions time, which no ViT here computes"


def video_reason(tensors: Mapping[str, Tensor]) -> str:
    """VIDEO for a network whose patch embedding (D, 3, T, p, p) reads several frames, as V-JEPA's; "" for others."""
    ends = ("patch_embed.proj.weight", "patch_embeddings.proj.weight")
    return VIDEO if any(name.endswith(ends) and tensor.ndim == 5 for name, tensor in tensors.items()) else ""


def unsupported_reason(names: Iterable[str], table: Tensor | None = None, is_known: bool = False) -> str:
    """Why no importer can read a network whose tensors have these names; "" if the names show no reason.

    Args:
        names: Names of tensors.
        table: The position table, if there is one: CAE's encoder has EVA's names, but fixed sines and cosines.
        is_known: The user named the timm model, or the importer recognised the file as its own.
    """
    names = list(names)
    for pattern, part in UNSUPPORTED_PARTS.items():
        if name := _first_match(pattern, names):
            return f"it has {part} ({name}), which no ViT here computes"
    for pattern, library in OTHER_LIBRARIES.items():
        if not is_known and (name := _first_match(pattern, names)):
            remedy = "take the official file or timm's of the same model"
            if library.startswith("Hugging Face"):
                remedy = f"give the folder that holds it and its config.json, or {remedy}"
            return f"its tensors are named by {library} ({name}); {remedy}"
    if is_known or not _first_match(r"blocks\.\d+\.norm1\.weight", names):
        return ""
    for pattern, part in PARTS_THAT_NEED_A_NAME.items():
        if name := _first_match(pattern, names):
            return f"it has {part} ({name}); {BY_NAME}"
    has_relative_table = bool(_first_match(r".*relative_position_bias_table", names))
    if not has_relative_table and not _first_match("(decoder_)?pos_embed", names):
        return f"it has no position table, so that nothing tells its positions (rotary ones, say); {BY_NAME}"
    is_sincos = table is not None and position_kind({"pos_embed": table}) == "sincos_row_first"
    eva_name = _first_match(r"blocks\.\d+\.(gamma_1|attn\.q_bias)", names)
    if eva_name and not has_relative_table and not is_sincos:
        return f"it is of EVA's kind ({eva_name} without relative positions); {BY_NAME}"
    return ""


def _first_match(pattern: str, names: Iterable[str]) -> str:
    """The first name that matches the pattern, from its start or behind a dot; "" if there is none."""
    return next((name for name in names if re.fullmatch(rf"(.*\.)?({pattern})", name)), "")
