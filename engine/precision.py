"""Autocast, the fastest attention for a precision, and float32 where half precision is too coarse."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def autocast(device: str, precision: str) -> AbstractContextManager[Any]:
    """A context for forward passes on `device` in `precision`; it changes nothing for float32."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(torch.device(device).type, DTYPES[precision])


def keep_float32_exact() -> None:
    """Let GPUs compute what is in float32 in float32, for the whole process.

    torch rounds the inputs of convolutions to the 10 bits of TF32 unless told otherwise, those of matrix products not.
    """
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def fit_attention(network: nn.Module, device: str, precision: str) -> None:
    """Let timm's attention compute two matrix products around a softmax, on a CPU in half precision.

    The fused kernel that timm takes by default makes little use of a CPU's half-precision units: its two passes take
    twice as long at 197 tokens, 5 times at 65, 8 times at 17 (docs/log.md). The price is the memory of the weights,
    B x heads x tokens squared. Elsewhere the fused kernel stays.
    """
    if torch.device(device).type != "cpu" or precision not in DTYPES:
        return
    for module in network.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False


def to_float32(tensor: Tensor) -> Tensor:
    """In float32, or in a wider type that it has: half precision is too coarse for a loss."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def l2_normalize(vectors: Tensor) -> Tensor:
    """Vectors (..., d) of length one, in float32 at least."""
    return F.normalize(to_float32(vectors), dim=-1)
