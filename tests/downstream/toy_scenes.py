"""Toy exports of every architecture that dense tasks read, and settings under which a training takes seconds."""

from dataclasses import replace

import torch
from refusals import refusal

from checkpoints.export import ViTExport
from checkpoints.spec import Preparation, ViTSpec
from checkpoints.vit import ViT
from engine.tasks import Workspace

PLAIN = ViTSpec(
    architecture="vit_tiny_patch16_224", image_size=32, patch_size=8, width=32, depth=3, heads=2, mlp_hidden=64
)
BEIT = replace(
    PLAIN,
    architecture="beit_base_patch16_224",
    position="none",
    class_position=False,
    relative_position="per_block",
    position_resize="relative_spline",
    layer_scale=True,
)
SPECS = {
    "plain": PLAIN,
    "registers": replace(PLAIN, registers=2, position_resize="bicubic_offset"),
    "relative": BEIT,
    "shared": replace(BEIT, relative_position="shared"),
    "class attention": replace(PLAIN, class_token=False, class_position=False, class_attention=2, final_norm="class"),
}
# EVA-02's and DINOv3's positions
ROTARY = {
    "eva02": replace(
        PLAIN, architecture="eva02_base_patch14_224", width=24, rotary="axial", rotary_grid=4, key_bias=False
    ),
    "dinov3": replace(
        PLAIN,
        architecture="vit_base_patch16_dinov3",
        position="none",
        class_position=False,
        registers=2,
        layer_scale=True,
        rotary="centred",
        rotary_base=100.0,
        rotary_pairs="halves",
        rotary_rounding="bfloat16",
        key_bias=False,
    ),
}


def export_of(spec: ViTSpec = PLAIN, seed: int = 0) -> ViTExport:
    """Random weights, position tables included."""
    torch.manual_seed(seed)
    vit = ViT(spec)
    for name, parameter in vit.named_parameters():
        if "relative_position_bias_table" in name or "pos_embed" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return ViTExport.from_vit(vit, Preparation())


def refused(task, data: str, folder, spec: ViTSpec = PLAIN, **settings) -> str:
    """The one line with which a task refuses its scenes, its network or its settings."""
    return refusal(task.run, export_of(spec), workspace(folder, data, **settings))


def workspace(folder, data: str, **settings) -> Workspace:
    """A workspace below `folder`, on eight scenes."""
    return Workspace(cache=folder / "cache", data=data, **{"limit": 8, **settings})
