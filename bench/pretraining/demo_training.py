"""The tiny network of `bench demo`: as its method initialises it, and pretrained for seconds on digits in noise."""

from dataclasses import dataclass
from pathlib import Path

import torch

from bench.pretraining.recipes import choose_recipe
from bench.pretraining.run import prepared
from engine.distributed import World
from engine.files import digest
from imagesets.sets import open_set
from pretrain.loop.trainer import Run

IMAGES = "noisydigits:"


@dataclass(frozen=True, kw_only=True)
class DemoNetwork:
    """A method, one of its recipes and what is changed in it."""

    method: str
    recipe: str
    changes: tuple[str, ...]


# Of what was tried (docs/log.md) what beats initial weights and raw pixels under every protocol in half a minute of a
# core: masks as the only augmentation, small updates. MAE, LUT and MOCA take longer.
NETWORKS = (
    DemoNetwork(
        method="extrema",
        recipe="smoke",
        changes=(
            *("image_size=48", "patch_size=8", "epochs=12", "batch=32", "lr=1e-3", "lr_batch=0", "schedule.warmup=1"),
            *("loss=infonce", "crop=none", "colour=none", "masks=2", "mask_ratio=0.6", "teacher_momentum=0.97"),
            *("drop_path=0", "projector_hidden=256", "projector_width=64"),
        ),
    ),
)


def pretrain(out: Path, seed: int) -> dict[str, Path] | None:
    """Method -> folder of its network, all of NETWORKS. None where a signal stopped a training."""
    found = {}
    for network in NETWORKS:
        folder = pretrained(network, out, seed)
        if folder is None:
            return None
        found[network.method] = folder
    return found


def pretrained(network: DemoNetwork, out: Path, seed: int) -> Path | None:
    """Train in a folder below `out` that is named after what makes the network; use what the same made before.

    A training that was stopped goes on, as by `bench pretrain --resume`. Returns the folder: start/ and export/ in it
    are the network before and after. None where a signal stopped the training.
    """
    chosen = choose_recipe(network.method, network.recipe, network.changes)
    images = open_set(IMAGES, "train")
    made_of = digest({"settings": chosen.recipe.to_json(), "images": images.fingerprint})
    folder = out / f"{network.method}-seed{seed}-{made_of[:8]}"
    if (folder / "export" / "config.json").exists():
        return folder
    trainer = prepared(chosen, images, Run(out=folder, seed=seed, workers=1, resume=True), World())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a network waits for its threads more than it gains by them
    try:
        return folder if trainer.train() == "finished" else None
    finally:
        torch.set_num_threads(threads)
