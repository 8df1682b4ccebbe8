"""The two tiny networks of `bench demo`: one as a method initialises it, one pretrained for seconds on digits."""

from pathlib import Path
from typing import Literal

import torch

from bench.pretraining import prepared
from bench.recipes import choose
from engine.distributed import World
from imagesets.sets import open_set
from pretrain.trainer import Run

METHOD, RECIPE = "extrema", "smoke"
# Of what was tried in 15 s (docs/log.md) the one that beats its own initial weights: masks as the only augmentation
# (a mirrored digit is none), InfoNCE, small updates.
CHANGES = (
    *("epochs=12", "batch=32", "lr=1e-3", "lr_batch=0", "schedule.warmup=0.5", "loss=infonce", "crop=none"),
    *("colour=none", "masks=2", "mask_ratio=0.6", "teacher_momentum=0.97", "drop_path=0"),
    *("projector_hidden=256", "projector_width=64"),
)


def pretrain(out: Path, seed: int) -> Literal["finished", "stopped"]:
    """Train in `out`, or go on there, as `bench pretrain --resume` would: out/start and out/export are the networks."""
    run = Run(out=out, seed=seed, workers=1, resume=True)
    trainer = prepared(choose(METHOD, RECIPE, CHANGES), open_set("digits:", "train"), run, World())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a network waits for its threads more than it gains by them
    try:
        return trainer.train()
    finally:
        torch.set_num_threads(threads)
