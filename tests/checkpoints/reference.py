"""A second Vision Transformer in plain tensor operations, written from the papers, as an independent opinion.

It reads official tensor names of a plain pre-norm ViT with a class token: no timm, nothing of checkpoints/.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def plain_vit_tokens(tensors: dict[str, Tensor], prefix: str, heads: int, images: Tensor) -> Tensor:
    """(B, 3, H, W) -> (B, 1+L, D) after the final norm, float64."""

    def get(name: str) -> Tensor:
        return tensors[prefix + name].double()

    def norm(tokens: Tensor, name: str) -> Tensor:
        centred = tokens - tokens.mean(dim=-1, keepdim=True)
        scaled = centred / (centred.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()
        return scaled * get(f"{name}.weight") + get(f"{name}.bias")

    kernel = get("patch_embed.proj.weight")
    patch = kernel.shape[-1]
    pieces = F.unfold(images.double(), patch, stride=patch).transpose(1, 2)  # channel, row, column within a patch
    tokens = pieces @ kernel.flatten(1).T + get("patch_embed.proj.bias")
    tokens = torch.cat([get("cls_token").expand(len(images), -1, -1), tokens], dim=1) + get("pos_embed")
    depth = 1 + max(int(n[len(prefix) :].split(".")[1]) for n in tensors if n.startswith(f"{prefix}blocks."))
    for block in (f"blocks.{number}" for number in range(depth)):
        joint = norm(tokens, f"{block}.norm1") @ get(f"{block}.attn.qkv.weight").T + get(f"{block}.attn.qkv.bias")
        query, key, value = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in joint.chunk(3, dim=-1))
        weights = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(dim=-1)
        mixed = (weights @ value).transpose(1, 2).flatten(2)
        tokens = tokens + mixed @ get(f"{block}.attn.proj.weight").T + get(f"{block}.attn.proj.bias")
        hidden = norm(tokens, f"{block}.norm2") @ get(f"{block}.mlp.fc1.weight").T + get(f"{block}.mlp.fc1.bias")
        hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
        tokens = tokens + hidden @ get(f"{block}.mlp.fc2.weight").T + get(f"{block}.mlp.fc2.bias")
    return norm(tokens, "norm")
