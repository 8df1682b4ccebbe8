"""Floating-point operations as torch counts them, twice the multiply-adds: matrix products, convolutions, attention."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

Shape = tuple[int, ...]
Result = TypeVar("Result")


def attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Operations of fused attention."""
    return sdpa_flop_count(query, key, value)


def attention_backward(gradient: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Operations of its gradient, for which it computes the weights anew."""
    return sdpa_backward_flop_count(gradient, query, key, value)


# The CPU's kernel, which torch does not count.
CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
}


def counted(work: Callable[[], Result]) -> tuple[Result, int]:
    """What `work` returns, the same bits as uncounted, and its floating-point operations. Tensors may be on "meta"."""
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
        found = work()
    return found, counter.get_total_flops()
