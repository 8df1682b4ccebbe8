"""The work of a task in units that a plan can time: `Work`, made of `Part`s of one kind each.

Counts do not depend on the machine. What one unit of a kind takes is measured there, or follows from its floating-point
operations (bench/run/calibration.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

Kind = Literal[
    "libraries",  # imported, once in a process
    "states",  # of a training, saved
    "start",  # models and libraries made ready: once for each training
    "features",  # images read, cropped at the centre and sent through the frozen network
    "crops",  # images read, cropped at random and sent through the frozen network
    "training",  # images read, augmented and sent through the network and back
    "updates",  # steps of the optimiser
    "evaluation",  # images read and sent through the network of a training
    "head steps",  # steps of all heads of a sweep, on a batch of features
    "head images",  # images that all heads of a sweep classify
    "comparisons",  # pairs of a query and an image of the gallery
    "fits",  # logistic regressions
    "fit rows",  # images of logistic regressions
    "closing",  # resamples of the validation images
]
# Units are images that go through a network; the others are none.
IMAGES: tuple[Kind, ...] = ("features", "crops", "training", "evaluation")


@dataclass(frozen=True, kw_only=True)
class Part:
    """Work of one kind: `count` units that take equally long."""

    kind: Kind
    count: float
    flops: float = 0.0  # floating-point operations of one unit, 2 for a multiply-add; 0: hardly any, or not counted
    of: str = ""  # which images: parts of a run that agree on what they read are done once


@dataclass(frozen=True, kw_only=True)
class Work:
    """All parts of a task."""

    parts: tuple[Part, ...] = ()  # none: the task does not count it
    memory: float = 0.0  # bytes of tensors and features at its peak, on the device
    disk: float = 0.0  # bytes that stay in the cache

    @property
    def images(self) -> float:
        """Images through a network, however often."""
        return sum(part.count for part in self.parts if part.kind in IMAGES)

    @property
    def flops(self) -> float:
        return sum(part.count * part.flops for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What the work of a task depends on beside its settings."""

    spec: Any  # the export's
    images: Mapping[str, int]  # split -> images; shares of these are approximate, as they are drawn class by class
    classes: int  # of the image set
    several_labels: bool = False  # whether an image of it may show several of them
    flops: Mapping[Kind, float] = field(default_factory=dict)  # of one unit, what `Task.model_flops` counts
    batch_size: int | None = None  # images in a forward pass, where the user asks for a number
    device: str = "cpu"  # cpu, cuda or cuda:N


Result = TypeVar("Result")


def count_flops(work: Callable[[], Result]) -> tuple[Result, int]:
    """What `work` returns, the same bits as uncounted, and its floating-point operations: those of matrix products,
    convolutions and attention, two for a multiply-add. Tensors may be on "meta"."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

    # The CPU's attention, which torch does not count. The backward pass computes the weights anew.
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
