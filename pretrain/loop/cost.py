"""What a pretraining costs, as papers report it: hours (ExtreMA table 8, MOCA tables 5k and 10), time and memory of an
epoch (MOCA tables 1, 2d, 2e), and the work of an image.

All but the work are read off the log, which has every update once however often the training was killed. Work are the
floating-point operations of all networks, forward and back, see engine/work.py.
"""

import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pretrain.loop.records import lines_in

GIB = 2**30
DIGITS = 4  # of a number that counts; timings are not sharper


def peak_memory(device: str) -> dict[str, float]:
    """GiB that this process, without its loaders, and its GPU's tensors have taken at most so far."""
    kilobyte = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes there, kilobytes on Linux
    memory = {"memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobyte / GIB}
    if torch.device(device).type == "cuda":
        memory["gpu_memory_gib"] = torch.cuda.max_memory_allocated(device) / GIB
    return memory


def devices_of(device: str, processes: int) -> str:
    """`8 x NVIDIA A100-SXM4-80GB`, `2 x CPU, 1 thread`"""
    on_cpu = torch.device(device).type == "cpu"
    threads = torch.get_num_threads()
    cpu = f"CPU, {threads} thread{'s' if threads > 1 else ''}"
    name = cpu if on_cpu else torch.cuda.get_device_name(device)
    return f"{processes} x {name}"


def is_counted(run: Path) -> bool:
    """Whether an update of the run in this folder was counted already."""
    return bool(_values(lines_in(run), "gflop_per_image"))


def cost_of(run: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """What the run in this folder, which `identity` (run.json) describes, has cost; empty before its log's first line.

    hours: of updates, waiting for images included, without exports, states and k-NN. seconds_per_epoch,
    images_per_second: their means. memory_gib, gpu_memory_gib: of the process that took most. gflop_per_image. devices:
    where the newest epoch was trained.
    """
    batch, images = identity["settings"]["batch"], identity["data"]["images"]
    lines = lines_in(run)
    updates = [line for line in lines if "updates" in line]
    if not updates:
        return {}
    done = sum(line["updates"] for line in updates)
    seconds = sum(line["updates"] * batch / line["images_per_second"] for line in updates)
    cost = {
        "hours": seconds / 3600,
        "seconds_per_epoch": seconds / done * (images // batch),
        "images_per_second": done * batch / seconds,
    }
    for name in ("memory_gib", "gpu_memory_gib", "gflop_per_image"):
        cost |= {name: max(values)} if (values := _values(lines, name)) else {}
    rounded = {name: float(f"{value:.{DIGITS}g}") for name, value in cost.items()}
    return rounded | ({"devices": values[-1]} if (values := _values(lines, "devices")) else {})


def _values(lines: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    return [line[name] for line in lines if name in line]
