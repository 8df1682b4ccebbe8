"""Exports that evaluate a hundred images in a fraction of a second, folders of images, and workspaces."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from checkpoints.export import ViTExport
from checkpoints.spec import Preparation, ViTSpec
from checkpoints.vit import ViT
from engine.tasks import Workspace


def export_of_size(image_size: int, seed: int = 0) -> ViTExport:
    """A random two-block ViT of width 32 for images of `image_size` pixels (a multiple of 8)."""
    spec = ViTSpec(
        architecture="vit_tiny_patch16_224",
        image_size=image_size,
        patch_size=8,
        width=32,
        depth=2,
        heads=2,
        mlp_hidden=64,
    )
    torch.manual_seed(seed)
    return ViTExport.from_vit(ViT(spec), Preparation())


def one_block_export() -> ViTExport:
    """A random ViT of one block and width 16 for images of 8 px, which are not cropped."""
    spec = ViTSpec(
        architecture="vit_tiny_patch16_224", image_size=8, patch_size=4, width=16, depth=1, heads=2, mlp_hidden=32
    )
    torch.manual_seed(0)
    return ViTExport.from_vit(ViT(spec), Preparation(crop=1.0))


def varied_export(collapsed: bool = False) -> ViTExport:
    """A random two-block ViT for images of 16 px whose features differ much between images.

    Args:
        collapsed: the features are nearly the same for all images.
    """
    spec = export_of_size(16).spec
    torch.manual_seed(0)
    vit = ViT(spec)
    torch.nn.init.normal_(vit.trunk.patch_embed.proj.weight, std=0.2)
    if collapsed:  # the final norm adds one direction, and scales all others to almost nothing
        torch.nn.init.constant_(vit.trunk.norm.weight, 1e-6)
        torch.nn.init.normal_(vit.trunk.norm.bias)
    return ViTExport.from_vit(vit, Preparation(crop=1.0))


def workspace(folder, data: str, **settings) -> Workspace:
    """A workspace below `folder`, with batches so small that even tiny sets have several."""
    return Workspace(cache=folder / "cache", data=data, **{"batch_size": 7, **settings})


def coloured_folder(
    root: Path,
    train: int | Sequence[int] = 12,
    val: int = 8,
    classes: int = 3,
    name: str = "class{label}/{number:04d}.png",
    shuffled: bool = False,
    flat: bool = False,
) -> str:
    """The URL of a folder of noisy images whose colour is their class.

    Args:
        train, val: number of images of each class.
        shuffled: labels are random.
        flat: all images black.
    """
    random = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        colours = np.repeat(np.arange(classes), count)
        labels = random.permutation(colours) if shuffled else colours
        for number, (colour, label) in enumerate(zip(colours, labels, strict=True)):
            pixels = random.integers(0, 60, (16, 16, 3), dtype=np.uint8)
            pixels[..., colour % 3] += 150
            path = root / split / name.format(label=label, number=number)
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(0 * pixels if flat else pixels).save(path)
    return f"folder:{root}"
