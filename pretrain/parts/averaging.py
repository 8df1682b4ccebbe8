"""Teachers: networks whose weights are a moving average of a student's."""

import copy
from collections.abc import Iterable

import torch
from timm.layers import DropPath
from torch import Tensor, nn


def frozen_copy(network: nn.Module) -> nn.Module:
    """A copy of `network` that no optimiser moves and that drops no paths: no source's teacher does."""
    teacher = copy.deepcopy(network).requires_grad_(False)
    for module in teacher.modules():
        if isinstance(module, DropPath):
            module.drop_prob = 0.0
    return teacher


@torch.no_grad()
def move(teacher: nn.Module, student: nn.Module, momentum: float, buffers: bool = False) -> None:
    """teacher <- momentum * teacher + (1 - momentum) * student, over parameters by name.

    buffers: those of floating point too (LUT). Whole numbers are never averaged: data2vec's code truncates them.
    """
    pairs = list(zip(_values(teacher, buffers), _values(student, buffers), strict=True))
    torch._foreach_lerp_([old for old, _ in pairs], [new for _, new in pairs], 1.0 - momentum)


def _values(network: nn.Module, buffers: bool) -> Iterable[Tensor]:
    yield from network.parameters()
    if buffers:
        yield from (buffer for buffer in network.buffers() if buffer.is_floating_point())
