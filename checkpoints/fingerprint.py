"""Activation fingerprint: statistics of a network's activations on a fixed synthetic image, block by block.

It is stored when a checkpoint is imported, and recomputed by `ViTExport.verify`. It detects wrong weights, a wrong
number of heads, LayerNorm eps, image statistics or position rule: the image is normalised with the statistics of the
export and evaluated at two sizes, and each norm is also evaluated on a vector so small that eps matters. It is computed
in float64 and stored in float32 precision, so that other machines round to the same values. This allows a tolerance
below the effect of the smallest layer scale.
"""

from typing import Any

import torch
from torch import Tensor

from checkpoints.spec import Preparation, ViTSpec
from checkpoints.vit import ViT

PROBES = 16  # values that a point stores
EPS_SCALE = 1e-3  # standard deviation of the input to norms: its variance equals the usual eps of 1e-6
TOLERANCE = 1e-6  # of a point's standard deviation; the resolution of float32 is 6e-8
NORMS = {"norm1", "norm2", "norm", "fc_norm", "norm_pre"}
HEAD_NORMS = {"q_norm", "k_norm"}
Fingerprint = dict[str, dict[str, Any]]  # name of a point -> mean, std, probes


def synthetic_image(size: tuple[int, int]) -> Tensor:
    """(1, 3, height, width) float64 image in [0, 1], a fixed chirp in each channel; size: height and width."""
    y, x = torch.meshgrid(*(torch.linspace(0, 1, side, dtype=torch.float64) for side in size), indexing="ij")
    waves = [torch.sin((9 + 5 * c) * x**2 + (7 - 2 * c) * y + 3 * x * y + c) for c in range(3)]
    return torch.stack(waves)[None] / 2 + 0.5


@torch.inference_mode()
def fingerprint(vit: ViT, preparation: Preparation) -> Fingerprint:
    """Mean, standard deviation and probes of each block's normed output, the output at another size, and each norm.

    Converts `vit` to float64 in place.
    """
    vit = vit.eval().double()  # callers pass a network that they do not use otherwise
    mean = torch.tensor(preparation.mean, dtype=torch.float64).view(1, 3, 1, 1)
    std = torch.tensor(preparation.std, dtype=torch.float64).view(1, 3, 1, 1)
    spec = vit.spec
    points: Fingerprint = {}
    image = (synthetic_image(spec.size) - mean) / std
    outputs = vit(image, layers=range(spec.depth))
    points |= {f"block {index}": _summary(tokens) for index, tokens in enumerate(outputs)}
    if spec.position_resize != "fixed" and spec.relative_position != "per_block":
        points["another size"] = _summary(vit((synthetic_image(_other_size(spec)) - mean) / std)[0])
    norms = NORMS | HEAD_NORMS if spec.family == "eva" else NORMS
    for name, module in vit.named_modules():
        if name.rsplit(".", 1)[-1] in norms and hasattr(module, "eps"):
            channels = module.weight.shape[0]
            ramp = torch.linspace(-1, 1, channels, dtype=torch.float64).view(1, 1, -1) * EPS_SCALE * 3**0.5
            points[f"norm {name}"] = _summary(module(ramp))
    return points


def _other_size(spec: ViTSpec) -> tuple[int, int]:
    """Height and width at which position embeddings are resized: half the native ones, or two patches more.

    The latter if there are relative position tables.
    """
    if spec.relative_position != "none":
        return spec.size[0] + 2 * spec.patch_size, spec.size[1] + 2 * spec.patch_size
    return max(spec.grid[0] // 2, 1) * spec.patch_size, max(spec.grid[1] // 2, 1) * spec.patch_size


def fingerprint_differences(stored: Fingerprint, computed: Fingerprint) -> list[str]:
    """One line for each point that differs, in the order of the network; [] if the fingerprints agree."""
    problems = [f"{name}: not in the stored fingerprint" for name in computed if name not in stored]
    for name, point in stored.items():
        if name not in computed:
            problems.append(f"{name}: missing now")
            continue
        allowed = TOLERANCE * max(point["std"], 1e-6)
        old, new = ([values["mean"], values["std"], *values["probes"]] for values in (point, computed[name]))
        difference = max(abs(before - after) for before, after in zip(old, new, strict=True))
        if not difference <= allowed:
            problems.append(f"{name}: differs by {difference:.3g}, allowed {allowed:.3g}")
    return problems


def _summary(tokens: Tensor) -> dict[str, Any]:
    """Mean, standard deviation and PROBES evenly spaced values of a tensor, rounded to float32."""
    flat = tokens.reshape(-1).float()
    indices = torch.linspace(0, len(flat) - 1, PROBES, dtype=torch.float64).round().long()
    return {
        "mean": float(tokens.mean().float()),
        "std": float(tokens.std().float()),
        "probes": [float(value) for value in flat[indices]],
    }
