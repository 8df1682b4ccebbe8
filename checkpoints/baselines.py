"""Raw pixels as an export: the floor under every leaderboard, evaluated by the same code as a network.

One patch is the whole image, its embedding the identity, and the one block adds zero. S side in pixels, D = 3 S S.
"""

import torch

from checkpoints.export import ViTExport
from checkpoints.spec import Preparation, ViTSpec
from checkpoints.vit import ViT

LARGEST = 48  # the identity has D * D weights: 48 million at this side


def pixels(side: int) -> ViTExport:
    """An export whose feature is the normalised image (3, S, S), resized to S and flattened, channel by channel.

    Raises ValueError for a side that is not 1 to LARGEST.
    """
    if not 1 <= side <= LARGEST:
        raise ValueError(f"pixels: give a side of 1 to {LARGEST} pixels, as in pixels:32")
    width = 3 * side * side
    spec = ViTSpec(
        architecture="vit_base_patch16_224",
        image_size=side,
        patch_size=side,
        width=width,
        depth=1,
        heads=1,
        mlp_hidden=1,
        class_token=False,
        class_position=False,
        qkv_bias=False,
        position="none",
        position_resize="fixed",
        final_norm="none",
        pool="avg",
    )
    vit = ViT(spec)
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter.zero_()
        vit.trunk.patch_embed.proj.weight.copy_(torch.eye(width).view(width, 3, side, side))
    facts = {"name": f"pixels-{side}", "method": "pixels", "recipe": f"{side} px", "licence": "Apache-2.0"}
    return ViTExport.from_vit(vit, Preparation(crop=1.0), facts)
