"""Raw pixels as an export: the floor under every leaderboard, evaluated by the same code as a network.

One patch is the whole image and its embedding its pixels; there is no weight. S side in pixels, D = 3 S S.
"""

from checkpoints.export import ViTExport
from checkpoints.spec import Preparation, ViTSpec

MAX_SIDE = 48  # 6912 values an image, nine times a ViT-B's: 35 GB for ImageNet


def pixels(side: int) -> ViTExport:
    """An export whose feature is the normalised image (3, S, S), resized to S and flattened, channel by channel.

    Raises ValueError for a side that is not 1 to MAX_SIDE.
    """
    if not 1 <= side <= MAX_SIDE:
        raise ValueError(f"pixels: give a side of 1 to {MAX_SIDE} pixels, as in pixels:32")
    spec = ViTSpec(
        architecture="pixels",
        image_size=side,
        patch_size=side,
        width=3 * side * side,
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
    facts = {"name": f"pixels-{side}", "method": "pixels", "recipe": f"{side} px", "licence": "Apache-2.0"}
    return ViTExport.make(spec, Preparation(crop=1.0), {}, facts=facts)
