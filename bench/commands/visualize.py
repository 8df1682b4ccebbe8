"""Draw what checkpoints see, side by side: attention, PCA of patches, masks; or curves and scatter of results."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.cli.settings import above_zero, positive_integer, whole_number
from engine.extensions import one_line

if TYPE_CHECKING:
    from bench.reporting.figures import FigureFormat

KINDS = sorted((Path(__file__).parents[1] / "reporting" / "kinds").glob("[!_]*.py"))
FIGURES = {  # of results and trainings; all others look at images
    "curves": "k-NN over k, low-shot over shots, accuracy over blocks, and pretrainings over epochs, images or hours",
    "scatter": "accuracy against parameters, GFLOP and time, shifted test sets against clean accuracy",
}
EXAMPLES = """examples:
  bench visualize attention --checkpoint runs/mae timm:vit_small_patch16_224.dino --images photos --out figures
  bench visualize pca --checkpoint A B --images cat.jpg dog.jpg --size 448 --set patches=foreground --out figures
  bench visualize attention --checkpoint A --images frames --format webp --fps 12 --set at=0.5,0.5 --out figures
  bench visualize curves --results results --format pdf --width 3.25 --out figures
  bench visualize curves --checkpoint runs/mae runs/dino --along hours --out figures
  bench visualize attention --checkpoint A --images digits: --limit 2 --set heads=all layer=3 at=0.5,0.5 --out figures

docs/visualize.md shows each kind and lists its settings.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench visualize`."""
    width = max(len(path.stem) for path in KINDS)
    kinds = "\n".join(f"  {path.stem.replace('_', '-'):{width}}  {one_line(path)}" for path in KINDS)
    kinds += "".join(f"\n  {name:{width}}  {text}" for name, text in FIGURES.items())
    parser.epilog = f"kinds:\n{kinds}\n\n{EXAMPLES}"
    parser.add_argument("kind", metavar="KIND", help="what to draw; see below")
    parser.add_argument(
        "--checkpoint",
        nargs="+",
        action="extend",
        default=[],
        metavar="X",
        help="what bench run takes: export folder, file, folder of a pretraining, timm:NAME, ...",
    )
    parser.add_argument("--name", nargs="+", action="extend", metavar="NAME", help="names of the checkpoints")
    parser.add_argument(
        "--images",
        nargs="+",
        action="extend",
        default=[],
        metavar="URL",
        help="image files, folders of images, or URLs such as digits: and imagenet:ROOT",
    )
    parser.add_argument("--split", choices=("train", "val"), help="of URLs (val, where there is one)")
    parser.add_argument(
        "--limit",
        type=positive_integer,
        metavar="N",
        help="images of each folder or URL, evenly spread (4; of an animated format all)",
    )
    parser.add_argument(
        "--size",
        type=positive_integer,
        metavar="PX",
        help="short side of the images for the networks (as each was trained)",
    )
    parser.add_argument("--square", action="store_true", help="the middle of each image, not all of it")
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="settings of the kind, such as layer=3 heads=all",
    )
    parser.add_argument("--seed", type=whole_number, default=0, metavar="N", help="of everything random (0)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (auto)")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the pictures are written")
    parser.add_argument(
        "--format",
        nargs="+",
        action="extend",
        choices=("png", "svg", "pdf", "apng", "gif", "webp"),
        metavar="F",
        help="png or svg (png); pdf of curves and scatter; apng, gif or webp: a film whose frames are the images",
    )
    parser.add_argument("--fps", type=above_zero, default=10.0, metavar="N", help="frames a second of a film (10)")
    parser.add_argument(
        "--results", type=Path, metavar="DIR", help="of curves and scatter: folder of `bench run --out`"
    )
    parser.add_argument("--along", default="epoch", metavar="X", help="of curves: epoch, images or hours (epoch)")
    parser.add_argument(
        "--width", type=float, default=6.75, metavar="INCHES", help="of curves and scatter (6.75; one column: 3.25)"
    )


def run(arguments: argparse.Namespace) -> int:
    """0: all pictures are written; the same input gives the same bytes."""
    from bench.cli.settings import check_writable, chosen_device
    from bench.reporting.visualize import PictureRequest, chosen_kind, draw_pictures
    from engine.optional import require
    from engine.printing import did_you_mean, say

    require("matplotlib")
    if arguments.kind not in (names := [*(path.stem.replace("_", "-") for path in KINDS), *FIGURES]):
        raise ValueError(f"no kind of picture is called {arguments.kind!r}{did_you_mean(arguments.kind, names)}")
    formats = tuple(dict.fromkeys(arguments.format or ["png"]))
    film = sorted({"apng", "gif", "webp"} & set(formats))
    if film and arguments.kind in FIGURES:
        raise ValueError(
            f"--format {film[0]}: {arguments.kind} is one figure, and a film needs images; choose png, svg or pdf"
        )
    if film and len(formats) > 1:
        raise ValueError(f"--format {film[0]}: a film goes with no other format; give it alone")
    if arguments.kind in FIGURES:
        check_writable(arguments.out)
        for path in _draw_figures(arguments, formats):
            say(f"written: {path}")
        return 0
    if not arguments.images:
        raise ValueError("--images is missing: name image files, folders of images, or URLs such as digits:")
    if "pdf" in formats:
        raise ValueError(f"--format pdf is for curves and scatter; write png or svg of {arguments.kind}")
    kind = chosen_kind(arguments.kind, arguments.set)
    request = PictureRequest(
        references=tuple(arguments.checkpoint),
        names=tuple(arguments.name) if arguments.name else None,
        sources=tuple(arguments.images),
        split=arguments.split,
        limit=arguments.limit or (None if film else 4),
        size=arguments.size,
        square=arguments.square,
        seed=arguments.seed,
        device=chosen_device(arguments.device),
    )
    check_writable(arguments.out)
    for path in draw_pictures(kind, request, arguments.out, formats, arguments.fps):
        say(f"written: {path}")
    return 0


def _draw_figures(arguments: argparse.Namespace, formats: Sequence["FigureFormat"]) -> Iterator[Path]:
    """Curves or scatter in every format; the paths of the files, as written."""
    from bench.reporting.figures import encoded_figure
    from bench.reporting.page import paper_figures
    from bench.results.record import check_folder
    from engine.files import write_atomic

    if arguments.results:
        check_folder(arguments.results)
    if not 2 <= arguments.width <= 20:
        raise ValueError(f"--width {arguments.width}: give inches from 2 to 20, such as 3.25 or 6.75")
    figures = paper_figures(arguments.kind, arguments.results, arguments.checkpoint, arguments.along, arguments.width)
    for name, figure in figures.items():
        for form in formats:
            path = arguments.out / f"{name.replace(' ', '-')}.{form}"
            write_atomic(path, encoded_figure(figure, form))
            yield path
