"""Attention maps of timm's attention modules, which themselves only return the mixed values.

Letters: B images, N tokens, D width, H heads, d channels of a head, P tokens in front of the patches.
"""

import torch
from timm.layers import apply_rot_embed_cat
from torch import Tensor, nn
from torch.nn.functional import linear


def attention_map(
    attention: nn.Module,
    tokens: Tensor,
    rows: slice,
    shared_rel_pos_bias: Tensor | None = None,
    rope: Tensor | None = None,
) -> Tensor:
    """`rows` of the softmax map (B, H, N, N) of `attention` on normed tokens (B, N, D).

    shared_rel_pos_bias: (1, H, N, N). rope: sines and cosines for the patches, see rotary.py.
    """
    query, key = _queries_and_keys(attention, tokens)
    if hasattr(attention, "q_norm"):
        query, key = attention.q_norm(query), attention.k_norm(key)
    if rope is not None:
        query, key = (_turned(values, rope, attention) for values in (query, key))
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)  # several heads of queries share one of keys
    logits = query[:, :, rows] * attention.scale @ key.transpose(-2, -1)
    if getattr(attention, "relative_position_bias_table", None) is not None:
        logits = logits + attention._get_rel_pos_bias()[..., rows, :]
    if shared_rel_pos_bias is not None:
        logits = logits + shared_rel_pos_bias[..., rows, :]
    return logits.softmax(dim=-1)


def class_attention_map(attention: nn.Module, tokens: Tensor) -> Tensor:
    """The softmax map (B, H, 1+L) of timm's ClassAttn on normed tokens (B, 1+L, D), of which the first one asks."""
    heads = (attention.num_heads, -1)
    query, key = attention.q(tokens[:, :1]).unflatten(-1, heads), attention.k(tokens).unflatten(-1, heads)
    return torch.einsum("bqhd,bnhd->bhn", query * attention.scale, key).softmax(dim=-1)


def _queries_and_keys(attention: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(B, H, N, d) of both, from one projection or from two."""
    batch, length, _ = tokens.shape
    if attention.qkv is None:
        both = (attention.q_proj(tokens), attention.k_proj(tokens))
        query, key = (values.reshape(batch, length, -1, attention.head_dim).transpose(1, 2) for values in both)
        return query, key
    bias = attention.qkv.bias
    if getattr(attention, "q_bias", None) is not None:
        bias = torch.cat([attention.q_bias, attention.k_bias, attention.v_bias])
    joint = linear(tokens, attention.qkv.weight, bias)
    query, key, _ = joint.reshape(batch, length, 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4)
    return query, key


def _turned(values: Tensor, rope: Tensor, attention: nn.Module) -> Tensor:
    """Queries or keys (B, H, N, d), those of the patches turned by their positions."""
    prefix = attention.num_prefix_tokens
    patches = apply_rot_embed_cat(values[:, :, prefix:], rope, half=attention.rotate_half)
    return torch.cat([values[:, :, :prefix], patches.type_as(values)], dim=2)
