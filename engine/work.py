"""The work of a task as `bench plan` counts it. Counts do not depend on the machine; bench/run/calibration.py has the
speeds that turn them into times.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

Kind = Literal[
    "features",  # images read and sent through the frozen network
    "crops",  # images read, cropped at random and sent through the frozen network
    "training",  # images read, augmented and sent through the network and back
    "evaluation",  # images read and sent through the network of a training, or by a task that stores no features
    "heads",  # steps of a head, fits and searches: products in float32
    "updates",  # steps of the optimiser
    "start",  # preparation of a training
]
# Kinds whose units are images that go through a network.
IMAGES: tuple[Kind, ...] = ("features", "crops", "training", "evaluation")


@dataclass(frozen=True, kw_only=True)
class Part:
    """Work of one kind: `count` units that take equally long."""

    kind: Kind
    count: float
    flops: float = 0.0  # floating-point operations of one unit, 2 for a multiply-add
    # What is read or trained: tasks with the same part do it once. Features and crops are shared by tasks that name the
    # same transform or stream in `Task.shares`, other work by all.
    of: str = ""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The whole work of a task."""

    parts: tuple[Part, ...] = ()  # empty: the task does not count its work
    iterations: float = 0.0  # optimiser steps of all trainings together
    memory: float = 0.0  # peak bytes of tensors and features on the device
    disk: float = 0.0  # bytes that stay in the cache

    @property
    def images(self) -> float:
        """Images sent through a network, each counted as often as it is sent."""
        return sum(part.count for part in self.parts if part.kind in IMAGES)

    @property
    def flops(self) -> float:
        """Floating-point operations of all parts."""
        return sum(part.count * part.flops for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What the work of a task depends on besides its settings: network, numbers of images and classes, device."""

    spec: Any  # of the export
    images: Mapping[str, int]  # split -> images; shares of these are approximate, as they are drawn class by class
    classes: int  # of the image set
    several_labels: bool = False  # whether images of the set may have several labels
    size: tuple[int, int] | None = None  # height and width of a validation image in pixels; None: not known
    batch_size: int | None = None  # images in a forward pass if the user has set it
    device: str = "cpu"  # cpu, cuda or cuda:N


Result = TypeVar("Result")


def count_flops(work: Callable[[], Result]) -> tuple[Result, int]:
    """Run `work`; returns its result and its floating-point operations in matrix products, convolutions and attention.

    A multiply-add counts as two. Counting does not change the result. Tensors may be on the device "meta".
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

    # The CPU's attention, which torch does not count. The backward pass computes the attention weights again.
    attention = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda query, key, value, *_, **__: sdpa_flop_count(
            query, key, value
        ),
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            lambda gradient, query, key, value, *_, **__: sdpa_backward_flop_count(gradient, query, key, value)
        ),
    }
    with FlopCounterMode(display=False, custom_mapping=attention) as counter:
        result = work()
    return result, counter.get_total_flops()
