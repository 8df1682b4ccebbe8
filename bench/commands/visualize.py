"""Draw what checkpoints see, side by side: attention, PCA of patches, masks; or curves of results."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bench.options import CommandOptions, Positional
from bench.reports.kinds import KINDS
from engine.errors import UserError
from engine.extensions import one_line
from engine.printing import did_you_mean, say
from engine.settings import NonNegativeInt, PositiveInt, named_values

CURVES = "curves"  # shows results and trainings; all other kinds show images
DESCRIPTIONS = {name: one_line(path) for name, path in KINDS.items()}
DESCRIPTIONS[CURVES] = "k-NN over k, low-shot over shots, accuracy over blocks, and pretrainings over epochs or images"
EPILOG = "\n".join(["kinds:", *(f"  {name:17}{text}" for name, text in DESCRIPTIONS.items())])
EPILOG += """

examples:
  bench visualize attention --checkpoint runs/mae timm:vit_small_patch16_224.dino --images photos --out figures
  bench visualize pca --checkpoint A B --images cat.jpg dog.jpg --image-size 448 --set patches=foreground --out figures
  bench visualize curves --results results --format pdf --width 3.25 --out figures
  bench visualize curves --checkpoint runs/mae runs/dino --along hours --out figures
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
    format: tuple[Literal["png", "svg", "pdf"], ...] = ("png",)  # png or svg (png); for curves also pdf
    results: Path | None = None  # DIR: for curves: folder of `bench run --out`
    along: str = "epoch"  # X: for curves of pretrainings, the x axis: epoch, images or hours (epoch)
    width: float = 6.75  # INCHES: for curves: width of the figure (6.75; one column: 3.25)


def run(options: Options) -> int:
    """0: all pictures are written; the same input gives the same bytes."""
    if options.kind == CURVES:
        return _write_figures(options)
    if options.kind not in DESCRIPTIONS:
        hint = did_you_mean(options.kind, list(DESCRIPTIONS))
        raise ValueError(f"no kind of picture is called {options.kind!r}{hint}")
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
        formats=options.format,  # type: ignore[arg-type]  # pdf is refused
        **shared,
    )
    return 0


def _write_figures(options: Options) -> int:
    """Draw curves in every format."""
    from bench.options import check_writable
    from bench.reports.drawing import figure_bytes
    from bench.reports.figures import paper_figures
    from bench.results.record import check_folder
    from engine.files import write_atomic
    from engine.optional import require

    require("matplotlib")
    check_writable(options.out)
    if options.results:
        check_folder(options.results)
    if not 2 <= options.width <= 20:
        raise UserError("width", "give inches from 2 to 20, such as 3.25 or 6.75", options.width)
    figures = paper_figures(options.results, options.checkpoint, options.along, options.width)
    for name, figure in figures.items():
        for file_format in dict.fromkeys(options.format):
            path = options.out / f"{name.replace(',', '').replace(' ', '-')}.{file_format}"
            write_atomic(path, figure_bytes(figure, file_format, dpi=300))
            say(f"written: {path}")
    return 0
