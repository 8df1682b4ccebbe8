"""A small encoder, pictures, their views and exports, for tests of methods."""

from collections.abc import Callable
from dataclasses import replace

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import default_collate

from checkpoints.export import ViTExport
from engine.seeding import AUGMENT, seeded
from pretrain.method import Encoder, Method, TrainProgress
from pretrain.recipe import VIT_SMOKE

SMALL = replace(VIT_SMOKE, width=32, depth=2, heads=2, mlp_hidden=64)  # 4 x 4 patches of 16 px


def picture(seed: int, width: int = 48, height: int = 48) -> Image.Image:
    """Coarse coloured squares."""
    coarse = torch.randint(40, 216, (6, 6, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(coarse.numpy()).resize((width, height), Image.Resampling.BICUBIC)


def views_of(
    method: Method, count: int = 6, dtype: torch.dtype = torch.float64, picture: Callable[[int], Image.Image] = picture
) -> dict[str, Tensor]:
    """A batch of views of `count` pictures."""
    make, views = method.views(), []
    for seed in range(count):
        with seeded(AUGMENT, seed):
            views.append({name: tensor.to(dtype) for name, tensor in make(picture(seed)).items()})
    return default_collate(views)


def progress(step: int = 0, part: int = 0, parts: int = 1) -> TrainProgress:
    return TrainProgress(step=step, steps_per_epoch=2, epochs=2, micro_batch=part, micro_batches=parts)


def exported(method: Method, encoder: Encoder) -> ViTExport:
    export = ViTExport.from_vit(encoder.vit, method.preparation)
    return ViTExport.make(export.spec, export.preparation, export.tensors, {**export.extra, **encoder.extra})
