"""A real export, small enough that a pass over a hundred images takes a fraction of a second; and a workspace."""

import torch

from checkpoints.export import ViTExport
from checkpoints.spec import Preparation, ViTSpec
from checkpoints.vit import ViT
from engine.tasks import Workspace


def export_of_size(image_size: int, seed: int = 0) -> ViTExport:
    """A random two-block ViT of width 32 for images of `image_size` pixels (a multiple of 8)."""
    spec = ViTSpec(
        architecture="vit_tiny_patch16_224",
        image_size=image_size,
        patch_size=8,
        width=32,
        depth=2,
        heads=2,
        mlp_hidden=64,
    )
    torch.manual_seed(seed)
    return ViTExport.from_vit(ViT(spec), Preparation())


def one_block_export() -> ViTExport:
    """A random ViT of one block and width 16 for images of 8 pixels, of which it sees all."""
    spec = ViTSpec(
        architecture="vit_tiny_patch16_224", image_size=8, patch_size=4, width=16, depth=1, heads=2, mlp_hidden=32
    )
    torch.manual_seed(0)
    return ViTExport.from_vit(ViT(spec), Preparation(crop=1.0))


def workspace(folder, data: str, **settings) -> Workspace:
    """A workspace below `folder`, in small batches so that even tiny sets make several."""
    return Workspace(cache=folder / "cache", data=data, **{"batch_size": 7, **settings})
