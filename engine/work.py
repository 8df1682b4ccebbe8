"""The work of a task in units that `bench plan` can time: `Work` consists of `Part`s of one kind each.

Counts do not depend on the machine; seconds per unit are measured on it (bench/run/calibration.py).
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any, Literal, TypeVar

Kind = Literal[
    "libraries",  # imports, once per process
    "states",  # training states saved
    "start",  # preparation of models and libraries, once per training
    "features",  # images read, cropped at the centre and sent through the frozen network
    "crops",  # images read, cropped at random and sent through the frozen network
    "further crops",  # further crops of images that are already decoded for "crops", sent through the frozen network
    "training",  # images read, augmented and sent through the network and back
    "updates",  # steps of the optimiser
    "evaluation",  # images read and sent through the network of a training
    "head steps",  # steps of all heads of a sweep on a batch of features
    "head images",  # images that all heads of a sweep classify
    "comparisons",  # pairs of a query and an image of the gallery
    "fits",  # logistic regressions
    "fit rows",  # images of logistic regressions
    "closing",  # metrics on resamples of the validation images
]
# Kinds whose units are images that go through a network.
IMAGES: tuple[Kind, ...] = ("features", "crops", "further crops", "training", "evaluation")


@dataclass(frozen=True, kw_only=True)
class Part:
    """Work of one kind: `count` units that take equally long."""

    kind: Kind
    count: float
    flops: float = 0.0  # floating-point operations of one unit, 2 for a multiply-add; 0: negligible or not counted
    of: str = ""  # what is read: equal parts of a run are done once


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


NETWORK_SLOWDOWN = 3.0  # seconds of a floating-point operation of a network, divided by those of a matrix product


def seconds_of(work: Callable[[], object], seconds: float, calls: int = 20) -> float:
    """Median seconds of a call: of at most `calls` within about `seconds`, not counting a first one to warm up.

    On a GPU `work` must wait for its result.
    """
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < 2 or (len(times) <= calls and time.perf_counter() - started < seconds):
        call_started = time.perf_counter()
        work()
        times.append(time.perf_counter() - call_started)
    return median(times[1:])


@cache
def product_rate(device: str) -> float:
    """Floating-point operations per second of this machine in a float32 matrix product."""
    import torch

    matrix = torch.ones(1024, 1024, device=device)
    return 2.0 * 1024**3 / seconds_of(lambda: (matrix @ matrix)[0, 0].item(), 0.1)
