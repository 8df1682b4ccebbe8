"""A second Vision Transformer in plain tensor operations, written from the papers, as an independent opinion.

It reads the official tensor names of a plain pre-norm ViT without timm and checkpoints/; class token, layer scale and
SwiGLU (DINOv2's names) are used where the tensors exist. AIMv2's encoder is a separate function.
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

    def mlp(tokens: Tensor, block: str) -> Tensor:
        if f"{prefix}{block}.mlp.w12.weight" in tensors:
            gate, hidden = affine(tokens, f"{block}.mlp.w12").chunk(2, dim=-1)
            return affine(gate * torch.sigmoid(gate) * hidden, f"{block}.mlp.w3")
        hidden = affine(tokens, f"{block}.mlp.fc1")
        return affine(hidden * (1 + torch.erf(hidden / 2**0.5)) / 2, f"{block}.mlp.fc2")

    def affine(tokens: Tensor, name: str) -> Tensor:
        return tokens @ get(f"{name}.weight").T + get(f"{name}.bias")

    def scale(block: str, part: int) -> Tensor | float:
        name = f"{block}.ls{part}.gamma"
        return get(name) if prefix + name in tensors else 1.0

    tokens = embed_patches(images, get("patch_embed.proj.weight")) + get("patch_embed.proj.bias")
    if f"{prefix}cls_token" in tensors:
        tokens = torch.cat([get("cls_token").expand(len(images), -1, -1), tokens], dim=1)
    tokens = tokens + get("pos_embed")
    depth = 1 + max(int(n[len(prefix) :].split(".")[1]) for n in tensors if n.startswith(f"{prefix}blocks."))
    for block in (f"blocks.{number}" for number in range(depth)):
        joint = affine(norm(tokens, f"{block}.norm1"), f"{block}.attn.qkv")
        tokens = tokens + scale(block, 1) * affine(mixed_values(joint, heads), f"{block}.attn.proj")
        tokens = tokens + scale(block, 2) * mlp(norm(tokens, f"{block}.norm2"), block)
    return norm(tokens, "norm")


def embed_patches(images: Tensor, kernel: Tensor) -> Tensor:
    """(B, 3, H, W) and the kernel (D, 3, p, p) of the patch embedding -> (B, L, D), without its bias."""
    patch = kernel.shape[-1]
    pieces = F.unfold(images.double(), patch, stride=patch).transpose(1, 2)  # channel, row, column within a patch
    return pieces @ kernel.flatten(1).T


def mixed_values(joint: Tensor, heads: int) -> Tensor:
    """Queries, keys and values side by side (B, N, 3D) -> attention's output before its projection (B, N, D)."""
    query, key, value = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in joint.chunk(3, dim=-1))
    weights = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(dim=-1)
    return (weights @ value).transpose(1, 2).flatten(2)


def aimv2_tokens(tensors: dict[str, Tensor], prefix: str, heads: int, images: Tensor, table: Tensor) -> Tensor:
    """(B, 3, H, W) and positions (1, L, D) -> (B, L, D) after the final norm, float64: RMSNorm, SwiGLU, no biases."""

    def get(name: str) -> Tensor:
        return tensors[prefix + name].double()

    def norm(tokens: Tensor, name: str) -> Tensor:
        return tokens / (tokens.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * get(f"{name}.weight")

    start = "preprocessor.patchifier."
    tokens = embed_patches(images, get(f"{start}proj.weight")) + get(f"{start}proj.bias")
    tokens = norm(tokens, f"{start}norm") + table.double()
    depth = len({name for name in tensors if name.startswith(prefix) and name.endswith(".norm_1.weight")})
    for block in (f"trunk.blocks.{number}" for number in range(depth)):
        joint = norm(tokens, f"{block}.norm_1") @ get(f"{block}.attn.qkv.weight").T
        tokens = tokens + mixed_values(joint, heads) @ get(f"{block}.attn.proj.weight").T
        normed = norm(tokens, f"{block}.norm_2")
        gate = normed @ get(f"{block}.mlp.fc1.weight").T
        hidden = gate * torch.sigmoid(gate) * (normed @ get(f"{block}.mlp.fc3.weight").T)
        tokens = tokens + hidden @ get(f"{block}.mlp.fc2.weight").T
    return norm(tokens, "trunk.post_trunk_norm")
