"""A tiny export for tests of the command line, and a tiny network in a checkpoint that is not an export."""

from pathlib import Path

import torch

from checkpoints.export import ViTExport
from checkpoints.spec import Preparation, ViTSpec
from checkpoints.vit import ViT


def make_export(folder: Path, seed: int) -> Path:
    """Save an export of a tiny ViT with random weights."""
    spec = ViTSpec(
        architecture="vit_tiny_patch16_224", image_size=32, patch_size=16, width=12, depth=2, heads=3, mlp_hidden=24
    )
    torch.manual_seed(seed)
    vit = ViT(spec)
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter.uniform_(-0.5, 0.5)
    facts = {"method": "random", "branch": "student", "source_file": "random.pth", "dropped": {"decoder": 7}}
    return ViTExport.from_vit(vit, Preparation(), facts).save(folder)


def make_foreign(path: Path, prefix: str, key: str = "") -> Path:
    """Save a checkpoint of a tiny ViT; the names of its tensors begin with `prefix`, all of them lie under `key`."""
    spec = ViTSpec(
        architecture="vit_tiny_patch16_224", image_size=16, patch_size=8, width=192, depth=1, heads=3, mlp_hidden=8
    )
    tensors = {f"{prefix}.{name}": tensor for name, tensor in ViT(spec).trunk.state_dict().items()}
    torch.save({key: tensors} if key else tensors, path)
    return path
