"""What a timm model is, as a ViTSpec: sizes and conventions read from its modules, not from its name.

Taken are timm's VisionTransformer, its distilled kind (DeiT), Beit and Eva, of parts that the one ViT computes.
"""

from collections.abc import Iterator
from typing import Any

import timm
from timm.layers import (
    AttentionRope,
    GluMlp,
    LayerNorm,
    Mlp,
    PatchEmbed,
    RmsNorm,
    RotaryEmbeddingCat,
    RotaryEmbeddingDinoV3,
    RotaryEmbeddingMixed,
    SwiGLU,
)
from timm.models import beit
from timm.models.beit import Beit
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva, EvaAttention, EvaBlock, EvaBlockPostNorm
from timm.models.vision_transformer import Attention, Block, ResPostBlock, VisionTransformer
from torch import nn
from torch.nn import Identity

from checkpoints.spec import ViTSpec

CLASSES = (VisionTransformer, VisionTransformerDistilled, Beit, Eva)
# timm's modules (module vision_transformer is models/vision_transformer.py) whose names are ViTs, one resolution each
FAMILY = (
    *("vision_transformer", "beit", "deit", "eva"),
    *("vision_transformer_hybrid", "vision_transformer_relpos", "vision_transformer_sam", "naflexvit"),
)
# What other parts of timm's ViTs do that the one ViT does not.
OTHERWISE = {
    "NaFlexVit": "packs patches of images of any shape and resizes positions by rules of its own",
    "VisionTransformerSAM": "attends within windows, by relative positions of rows and columns",
    "VisionTransformerRelPos": "has relative positions that an MLP makes, or tables without a class token",
    "HybridEmbed": "a convolutional network",
    "DiffAttention": "the difference of two softmax maps",
    "ParallelScalingBlock": "attention and MLP side by side",
    "DiffParallelScalingBlock": "attention and MLP side by side",
}
ROTARY = {RotaryEmbeddingCat: "axial", RotaryEmbeddingDinoV3: "centred", RotaryEmbeddingMixed: "mixed"}
# Sizes of a plain ViT -> timm's name of one; a distilled DeiT is such a ViT with a second token.
PLAIN = "vit_base_patch16_224"


def spec_of(model: nn.Module, reference: str) -> ViTSpec:
    """The spec of a timm model. ValueError names what of it no export can carry."""
    kind = type(model).__name__
    if type(model) not in CLASSES:
        why = f", which {OTHERWISE[kind]}" if kind in OTHERWISE else ""
        raise ValueError(f"{reference} is a {kind}{why}; timm's VisionTransformer, Beit and Eva can be imported")
    for place, part, kinds in _parts(model):
        if not isinstance(part, kinds):
            what = type(part).__name__
            why = f", {OTHERWISE[what]}" if what in OTHERWISE else ""
            raise ValueError(f"{reference} cannot be imported: its {place} is timm's {what}{why}")
    if getattr(model, "pool_include_prefix", False):
        raise ValueError(f"{reference} cannot be imported: it pools registers together with patches")
    patch, across = model.patch_embed.patch_size
    if patch != across:
        raise ValueError(f"{reference}: only square patches can be imported, not {patch} x {across} px")
    facts = _tokens(model) | _block(model) | (_eva(model) if type(model) is Eva else {})
    rows, columns = model.patch_embed.grid_size
    return ViTSpec(
        image_size=(rows * patch, columns * patch),  # what the convolution reads: 378 of 384 px in patches of 14
        patch_size=patch,
        width=model.embed_dim,
        depth=len(model.blocks),
        **facts,
    )


def _parts(model: nn.Module) -> Iterator[tuple[str, object, type | tuple[type, ...]]]:
    """What decides whether our network computes what the model does: place, module, the kinds that it can be."""
    block = model.blocks[0]
    attention, mlp = getattr(block, "attn", None), getattr(block, "mlp", None)
    yield "patch embedding", model.patch_embed, PatchEmbed
    yield "block", block, (Block, ResPostBlock, beit.Block, EvaBlock, EvaBlockPostNorm)
    yield "attention", attention, (Attention, beit.Attention, EvaAttention, AttentionRope)
    yield "gate of the attention", getattr(attention, "gate", None), type(None)
    yield "MLP", mlp, (Mlp, GluMlp, SwiGLU)
    yield "norm", block.norm1, (nn.LayerNorm, LayerNorm, RmsNorm)
    yield "rotary positions", getattr(model, "rope", None), (type(None), *ROTARY)


def _tokens(model: nn.Module) -> dict[str, Any]:
    """Facts of what stands before the first block and behind the last."""
    distilled, relates = isinstance(model, VisionTransformerDistilled), isinstance(model, Beit)
    class_token = model.cls_token is not None
    registers = getattr(model, "reg_token", None)
    rows = 0 if model.pos_embed is None else model.pos_embed.shape[1] - model.patch_embed.num_patches
    pooled = not isinstance(getattr(model, "fc_norm", Identity()), Identity)
    facts: dict[str, Any] = dict(
        architecture=PLAIN if distilled else model.pretrained_cfg["architecture"],
        class_token=class_token,
        registers=int(distilled) + (0 if registers is None else registers.shape[1]),
        position="none" if model.pos_embed is None else "learned",
        class_position=rows > 0,
        position_resize="relative_spline" if relates else "bicubic_antialias",
        final_norm="all" if not isinstance(model.norm, Identity) else "pooled" if pooled else "none",
        pool="cls" if class_token and model.global_pool in ("token", "", "map") else "avg",
    )
    if relates:
        facts["relative_position"] = "shared" if model.rel_pos_bias is not None else "per_block"
    return facts


def _block(model: nn.Module) -> dict[str, Any]:
    block = model.blocks[0]
    attention, mlp = block.attn, block.mlp
    biases = [attention.qkv if attention.qkv is not None else attention.q_proj, attention]
    # fc2 takes the hidden channels of an Eva, which is made by them; a plain ViT is made by what fc1 gives
    hidden = mlp.fc2.in_features if isinstance(model, Eva) else getattr(mlp, "fc1_g", None) or mlp.fc1
    return dict(
        heads=attention.num_heads,
        mlp_hidden=hidden if isinstance(hidden, int) else hidden.out_features,
        qkv_bias=any(getattr(part, name, None) is not None for part in biases for name in ("bias", "q_bias")),
        layer_scale=getattr(block, "gamma_1", None) is not None or hasattr(getattr(block, "ls1", None), "gamma"),
        norm_eps=block.norm1.eps,
    )


def _eva(model: Eva) -> dict[str, Any]:
    """Facts that only an Eva has a choice of."""
    block = model.blocks[0]
    attention, mlp = block.attn, block.mlp
    normed = {
        "query_norm": attention.q_norm,
        "attention_norm": attention.norm,
        "mlp_norm": mlp.norm,
        "first_norm": model.norm_pre,
    }
    return dict(
        key_bias=isinstance(attention, AttentionRope),
        split_qkv=attention.qkv is None,
        mlp="gated" if isinstance(mlp, SwiGLU) else "gated_packed" if isinstance(mlp, GluMlp) else "plain",
        norm_after=isinstance(block, EvaBlockPostNorm),
        **{name: not isinstance(norm, Identity) for name, norm in normed.items()},
        **_rotary(model.rope),
    )


def _rotary(rope: nn.Module | None) -> dict[str, Any]:
    if rope is None:
        return {}
    reference = getattr(rope, "ref_feat_shape", None) or (0, 0)
    if reference[0] != reference[1]:
        raise ValueError(f"its rotary positions refer to a grid of {reference[0]} x {reference[1]}, which is no square")
    return dict(
        rotary=ROTARY[type(rope)],
        rotary_base=float(rope.temperature),
        rotary_grid=reference[0],
        rotary_offset=float(getattr(rope, "grid_offset", 0.0)),
        rotary_first="row" if rope.grid_indexing == "ij" else "column",
        rotary_pairs="halves" if getattr(rope, "rotate_half", False) else "neighbours",
    )


def pretrained_names() -> dict[str, list[str]]:
    """timm's ViT-family architectures that have weights -> the tags of these weights."""
    found: dict[str, list[str]] = {}
    family = set(timm.list_models(module=FAMILY))
    for name in timm.list_pretrained():
        architecture, _, tag = name.partition(".")
        if architecture in family:
            found.setdefault(architecture, []).append(tag)
    return found
