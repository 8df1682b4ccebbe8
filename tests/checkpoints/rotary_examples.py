"""Tiny checkpoints of DINOv3, laid out as its code saves them; expected features are those of timm's conversion."""

import re

import timm
import torch
from random_networks import randomise
from recorded_example import Example, Pairs, encode
from timm.models.eva import checkpoint_filter_fn
from torch import Tensor

from checkpoints.export import ViTExport
from checkpoints.fingerprint import synthetic_image
from checkpoints.import_options import ImportOptions

TINY = dict(img_size=224, patch_size=16, embed_dim=32, depth=2, num_heads=2)
OFFICIAL = {  # timm's names -> the official ones
    r"^reg_token$": "storage_tokens",
    r"\.gamma_([12])$": r".ls\1.gamma",
    r"\.mlp\.fc1_g\.": ".mlp.w1.",
    r"\.mlp\.fc1_x\.": ".mlp.w2.",
}


def official_tree(architecture: str) -> dict[str, Tensor]:
    """A random model under official names, with masked key biases and periods in bfloat16."""
    model = randomise(timm.create_model(architecture, **TINY))
    tree = {"mask_token": torch.randn(1, 32), "rope_embed.periods": model.rope.periods.to(torch.bfloat16)}
    for name, tensor in model.state_dict().items():
        for pattern, replacement in OFFICIAL.items():
            name = re.sub(pattern, replacement, name)
        if ".w1." in "".join(tree):
            name = name.replace(".mlp.fc2.", ".mlp.w3.")
        tree[name] = tensor.detach()
    for block in range(2):
        start = f"blocks.{block}.attn."
        if f"{start}q_bias" in tree:
            query, value = tree.pop(f"{start}q_bias"), tree.pop(f"{start}v_bias")
            tree[f"{start}qkv.bias"] = torch.cat([query, torch.randn(32), value])
            tree[f"{start}qkv.bias_mask"] = torch.tensor([1.0, 0.0, 1.0]).repeat_interleave(32)
    return tree


def dinov3(architecture: str = "vit_base_patch16_dinov3_qkvb") -> Example:
    tree = official_tree(architecture)
    if "qkvb" not in architecture:  # the 7B model has a second norm
        tree |= {"local_cls_norm.weight": torch.ones(32), "local_cls_norm.bias": torch.zeros(32)}

    def recorded(export: ViTExport) -> Pairs:
        """timm's features with the file's periods, at two image sizes."""
        model = timm.create_model(architecture, **TINY).eval()
        model.load_state_dict(checkpoint_filter_fn(dict(tree), model), strict=True)
        model = model.double()
        model.rope.periods.copy_(tree["rope_embed.periods"])
        images = [synthetic_image(size) for size in ((224, 224), (64, 96))]
        with torch.no_grad():
            return [(encode(export, image), model.forward_features(image)) for image in images]

    return Example(importer="dinov3", options=ImportOptions(), tree=tree, recorded=recorded)


def dinov3_gated() -> Example:
    return dinov3("vit_7b_patch16_dinov3")
