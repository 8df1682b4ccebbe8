"""The two tiny networks of `bench demo`: one as initialised, one trained for seconds on scikit-learn's digits.

The objective is InfoNCE between two randomly moved copies of each image: no labels. B batch, S image side.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from checkpoints.export import ViTExport
from checkpoints.spec import Preparation, ViTSpec
from checkpoints.vit import ViT
from engine.contrastive import info_nce
from engine.progress import Progress
from imagesets.sets import open_set
from imagesets.transforms import EvalTransform, normalise

SPEC = ViTSpec(
    architecture="vit_tiny_patch16_224", image_size=16, patch_size=4, width=64, depth=4, heads=4, mlp_hidden=256
)
DIGITS = Preparation(mean=(0.305,) * 3, std=(0.376,) * 3, crop=1.0)  # statistics of the training digits
STEPS, BATCH, RATE, TEMPERATURE = 200, 128, 2e-3, 0.1


def random_export(seed: int) -> ViTExport:
    """The network as initialised."""
    torch.manual_seed(seed)
    return ViTExport.from_vit(
        ViT(SPEC), DIGITS, {"method": "random", "recipe": f"seed {seed}", "licence": "Apache-2.0"}
    )


def trained_export(seed: int) -> ViTExport:
    """The same initial network after STEPS steps on 1297 unlabelled digits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a network waits for its threads more than it gains by them
    try:
        return _train(seed)
    finally:
        torch.set_num_threads(threads)


def _train(seed: int) -> ViTExport:
    torch.manual_seed(seed)
    vit = ViT(SPEC)
    projector = nn.Sequential(nn.Linear(SPEC.width, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64))
    parameters = [*vit.parameters(), *projector.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=STEPS)
    images, generator = _digits(), torch.Generator().manual_seed(seed)
    with Progress("training on digits", STEPS * BATCH) as progress:
        for _ in range(STEPS):
            batch = images[torch.randint(len(images), (BATCH,), generator=generator)]
            views = torch.cat([_moved(batch, generator), _moved(batch, generator)])
            first, second = projector(vit(views)[0][:, 0]).chunk(2)
            loss = (info_nce(first, second, TEMPERATURE) + info_nce(second, first, TEMPERATURE)) / 2
            if not torch.isfinite(loss):
                raise RuntimeError(f"the demo's loss became {loss.item()}")
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            progress.advance(BATCH)
    facts = {"method": "contrastive demo", "recipe": f"{STEPS} steps, seed {seed}", "data": "digits:train"}
    return ViTExport.from_vit(vit, DIGITS, facts | {"licence": "Apache-2.0"})


def _digits() -> Tensor:
    """(1297, 3, S, S) normalised training digits."""
    digits, transform = open_set("digits:", "train"), EvalTransform(size=SPEC.image_size, crop=DIGITS.crop)
    batch = torch.stack([transform(digits, index) for index in range(len(digits))])
    return normalise(batch, DIGITS.mean, DIGITS.std)


def _moved(images: Tensor, generator: torch.Generator) -> Tensor:
    """(B, 3, S, S) -> the same, each turned by up to 20 degrees, scaled by up to 1.25, shifted and noisy."""
    turn, size, across, down = torch.rand(4, len(images), generator=generator) * 2 - 1
    turn, size = turn * torch.pi / 9, 1.25**size
    cos, sin = turn.cos() * size, turn.sin() * size
    grid = torch.stack([torch.stack([cos, -sin, across * 0.1], 1), torch.stack([sin, cos, down * 0.1], 1)], 1)
    moved = F.grid_sample(
        images, F.affine_grid(grid, list(images.shape), align_corners=False), padding_mode="border", align_corners=False
    )
    return moved + 0.1 * torch.randn(moved.shape, generator=generator)
