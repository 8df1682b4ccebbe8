"""The two tiny networks of `bench demo`: one as a method initialises it, one pretrained for seconds on digits."""

from pathlib import Path

import torch

from bench.pretraining.recipes import choose_recipe
from bench.pretraining.run import prepared
from engine.distributed import World
from engine.files import digest
from imagesets.sets import open_set
from pretrain.loop.trainer import Run

METHOD, RECIPE = "extrema", "smoke"
# Of what was tried in 15 s (docs/log.md) the one that beats its own initial weights: masks as the only augmentation
# (a mirrored digit is none), InfoNCE, small updates.
CHANGES = (
    *("epochs=12", "batch=32", "lr=1e-3", "lr_batch=0", "schedule.warmup=0.5", "loss=infonce", "crop=none"),
    *("colour=none", "masks=2", "mask_ratio=0.6", "teacher_momentum=0.97", "drop_path=0"),
    *("projector_hidden=256", "projector_width=64"),
)


def pretrain(out: Path, seed: int) -> Path | None:
    """Train in a folder below `out` that is named after what makes the networks; use what the same made before.

    A training that was stopped goes on, as by `bench pretrain --resume`. Returns the folder: start/ and export/ in it
    are the networks. None where a signal stopped the training.
    """
    chosen, images = choose_recipe(METHOD, RECIPE, CHANGES), open_set("digits:", "train")
    made_of = digest({"settings": chosen.recipe.to_json(), "images": images.fingerprint})
    folder = out / f"seed{seed}-{made_of[:8]}"
    if (folder / "export" / "config.json").exists():
        return folder
    trainer = prepared(chosen, images, Run(out=folder, seed=seed, workers=1, resume=True), World())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a network waits for its threads more than it gains by them
    try:
        return folder if trainer.train() == "finished" else None
    finally:
        torch.set_num_threads(threads)
