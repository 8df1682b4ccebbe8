"""Recorded outputs of the official codes, and how a method of ours is put into the recorded state."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from pretrain.method import TrainProgress

ROOT = Path(os.environ.get("GOLDEN_ROOT", Path(__file__).parents[1] / "golden"))


def recording(path: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors, floating ones in float64, and the configuration of one file, "mae/mae_step.safetensors" say."""
    with safe_open(ROOT / path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        metadata = file.metadata() or {}
    found = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    return found, json.loads(metadata.get("config", "{}"))


def under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, under the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def fill(network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load `tensors`, which must be all of the network's and nothing else."""
    network.load_state_dict(dict(tensors), strict=True)


def progress(step: int, config: Mapping[str, Any], steps_per_epoch: int, parts: int = 1) -> TrainProgress:
    """The progress `step` updates after the beginning of the recorded epoch."""
    return TrainProgress(
        step=config.get("epoch", 0) * steps_per_epoch + step,
        steps_per_epoch=steps_per_epoch,
        epochs=config["epochs"],
        parts=parts,
    )


def close(ours: Tensor | float, theirs: Tensor | float, limit: float, what: str = "") -> None:
    """Assert a relative L2 difference of at most `limit`, with the figure in the message."""
    ours, theirs = (torch.as_tensor(value, dtype=torch.float64).detach() for value in (ours, theirs))
    assert ours.shape == theirs.shape, f"{what}: {tuple(ours.shape)}, recorded {tuple(theirs.shape)}"
    difference = ((ours - theirs).norm() / theirs.norm().clamp_min(1e-12)).item()
    assert difference <= limit, f"{what}: relative difference {difference:.2e} is above {limit:.0e}"
