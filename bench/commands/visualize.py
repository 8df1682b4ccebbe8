"""Draw what checkpoints see, side by side: attention, PCA and norms of patches, neighbours, predictions."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bench.options import CommandOptions, Positional
from bench.reports.kinds import KINDS
from engine.extensions import one_line
from engine.settings import NonNegativeInt, PositiveInt, named_values

EPILOG = "\n".join(["kinds:", *(f"  {name:13}{one_line(path)}" for name, path in KINDS.items())])
EPILOG += """

examples:
  bench visualize attention --checkpoint runs/mae timm:vit_small_patch16_224.dino --images photos --out figures
  bench visualize pca --checkpoint A B --images cat.jpg dog.jpg --image-size 448 --set patches=foreground --out figures
  bench visualize attention --checkpoint A --images digits: --limit 2 --set heads=all layer=3 at=0.5,0.5 --out figures

docs/visualize.md shows each kind and lists its settings.
"""


@dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """Options of `bench visualize`."""

    kind: Positional[str]  # KIND: what to draw; see below
    checkpoint: tuple[str, ...] = ()  # X: as for bench run: export folder, file, folder of a pretraining, timm:NAME
    name: tuple[str, ...] = ()  # NAME: names of the checkpoints
    images: tuple[str, ...] = ()  # URL: image files, folders of images, or URLs such as digits: and imagenet:ROOT
    split: Literal["train", "val"] | None = None  # split of URLs (val, if there is one)
    limit: PositiveInt = 4  # N: images of each folder or URL, evenly spread (4)
    # PX: short side of the images for the networks (that of each checkpoint's published evaluation)
    image_size: PositiveInt | None = field(default=None, metadata={"flags": ("--image-size", "--size")})
    square: bool = False  # crop each image to the square in its middle
    set: tuple[str, ...] = ()  # NAME=VALUE: settings of the kind, such as layer=3 heads=all
    seed: NonNegativeInt = 0  # N: seed of everything random (0)
    device: str = "auto"  # auto, cpu, cuda or cuda:N (auto)
    precision: Literal["float32", "bfloat16"] = "float32"  # of the networks' forward passes (float32)
    out: Path  # FOLDER: where the pictures are written
    format: tuple[Literal["png", "svg"], ...] = ("png",)  # png or svg (png)


def run(options: Options) -> int:
    """0: all pictures are written; the same input gives the same bytes."""
    from bench.api import visualize

    shared = {
        name: getattr(options, name) for name in ("out", "split", "limit", "image_size", "square", "seed", "device")
    }
    visualize(
        options.kind,
        options.checkpoint,
        options.images,
        settings=named_values(options.set, "settings", "NAME=VALUE, for example layer=-2", ".*?"),
        names=options.name,
        precision=options.precision,
        formats=options.format,
        **shared,
    )
    return 0
