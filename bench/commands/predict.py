"""Predict classes, masks or depths of images by a head that bench run kept."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench.options import CommandOptions, options_from
from engine.settings import NonNegativeInt, PositiveInt

EPILOG = """A head is kept by bench run --keep-heads DIR, as a .safetensors and a .json file; --head takes either.
OUT/predictions.csv has a row for each image: its five most probable classes; or the files of its mask (PNG with a
palette; classes.csv names the numbers) and overlay, or of its depth (16-bit PNG in millimetres). The same command goes
on after a kill.

examples:
  bench predict --checkpoint X --head heads/X-1a2b3c4d/birds/linear@dinov2-v2-seed0.json --images photos --out labelled
  bench predict --checkpoint X --head HEAD.json --images imagenet:/data --split val --skip-bad --out labelled
"""


@dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """Options of `bench predict`."""

    checkpoint: str  # X: the checkpoint that the head was trained on, as for bench run
    head: Path  # FILE: a head that bench run kept
    images: str  # URL: a folder of images, or a URL such as imagenet:ROOT
    split: Literal["train", "val"] | None = None  # split of a URL (val, if there is one)
    out: Path  # DIR: where predictions are written
    statistics: str | None = None  # S: as for bench run, if it was given there
    device: str = "auto"  # auto, cpu, cuda or cuda:N (auto)
    skip_bad: bool = False  # note unreadable images in the table instead of stopping
    batch_size: PositiveInt | None = None  # N: at most N images in a forward pass (as in the evaluation)
    workers: NonNegativeInt | None = None  # N: processes that load images (by machine)


def run(options: Options) -> int:
    """0: all images are predicted."""
    from bench import api
    from engine.printing import say

    path = api.predict(
        options.checkpoint,
        options.head,
        options.images,
        options.out,
        split=options.split,
        statistics=options.statistics,
        options=options_from(options, api.Options),
    )
    say(f"written: {path}")
    return 0
