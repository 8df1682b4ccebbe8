"""Activation fingerprint: what a network computes on one fixed synthetic image, block by block.

Stored at import; `ViTExport.verify` recomputes it. It sees wrong weights, wrong head counts, a wrong LayerNorm eps,
wrong image statistics and a wrong position rule, because the image is normalised with the export's own statistics, runs
at two sizes, and every norm is also probed with a vector so small that eps decides the result. It is computed in
float64 and kept in float32 precision: that leaves no room for the rounding of another machine, and so allows a
tolerance that the smallest layer scale cannot hide under.
"""

from typing import Any

import torch
from torch import Tensor

from checkpoints.spec import Preparation, ViTSpec
from checkpoints.vit import ViT

PROBES = 16  # values kept per block
EPS_SCALE = 1e-3  # standard deviation of the norm probe: its variance equals the usual eps of 1e-6
TOLERANCE = 1e-6  # of a point's standard deviation; float32 keeps 6e-8
NORMS = {"norm1", "norm2", "norm", "fc_norm", "norm_pre"}
HEAD_NORMS = {"q_norm", "k_norm"}
Fingerprint = dict[str, dict[str, Any]]


def synthetic_image(size: tuple[int, int]) -> Tensor:
    """(1, 3, height, width) float64 image in [0, 1]: three chirps, one for each channel; no generator, no file."""
    y, x = torch.meshgrid(*(torch.linspace(0, 1, side, dtype=torch.float64) for side in size), indexing="ij")
    waves = [torch.sin((9 + 5 * c) * x**2 + (7 - 2 * c) * y + 3 * x * y + c) for c in range(3)]
    return torch.stack(waves)[None] / 2 + 0.5


@torch.inference_mode()
def fingerprint(vit: ViT, preparation: Preparation) -> Fingerprint:
    """Name -> mean, standard deviation and probe values of every block's normed output, of the output at another image
    size, and of every norm. Converts `vit` itself to float64."""
    vit = vit.eval().double()  # in place: callers pass a network that nobody else uses
    mean, std = (
        torch.tensor(values, dtype=torch.float64).view(1, 3, 1, 1) for values in (preparation.mean, preparation.std)
    )
    spec = vit.spec
    points: Fingerprint = {}
    image = (synthetic_image(spec.size) - mean) / std
    layers = vit(image, layers=range(spec.depth))
    points |= {f"block {number}": _summary(tokens) for number, tokens in enumerate(layers)}
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
    """Another image size, at which position embeddings are resized: half the native one, or two patches more for
    relative position tables."""
    if spec.relative_position != "none":
        return spec.size[0] + 2 * spec.patch_size, spec.size[1] + 2 * spec.patch_size
    return max(spec.grid[0] // 2, 1) * spec.patch_size, max(spec.grid[1] // 2, 1) * spec.patch_size


def fingerprint_differences(stored: Fingerprint, computed: Fingerprint) -> list[str]:
    """One line for each point that differs, in network order; empty if the two agree."""
    problems = [f"{name}: not in the stored fingerprint" for name in computed if name not in stored]
    for name, point in stored.items():
        if name not in computed:
            problems.append(f"{name}: missing now")
            continue
        allowed = TOLERANCE * max(point["std"], 1e-6)
        old, new = ([values["mean"], values["std"], *values["probes"]] for values in (point, computed[name]))
        worst = max(abs(before - now) for before, now in zip(old, new, strict=True))
        if not worst <= allowed:
            problems.append(f"{name}: differs by {worst:.3g}, allowed {allowed:.3g}")
    return problems


def _summary(tokens: Tensor) -> dict[str, Any]:
    flat = tokens.reshape(-1).float()
    places = torch.linspace(0, len(flat) - 1, PROBES, dtype=torch.float64).round().long()
    return {
        "mean": float(tokens.mean().float()),
        "std": float(tokens.std().float()),
        "probes": [float(value) for value in flat[places]],
    }
