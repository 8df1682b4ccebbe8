"""Draw what checkpoints see, several side by side: attention, PCA of patches, masks, reconstructions, locality."""

import argparse
from pathlib import Path

from bench.cli.settings import positive_integer, whole_number
from engine.extensions import one_line

KINDS = sorted((Path(__file__).parents[1] / "reporting" / "kinds").glob("[!_]*.py"))
EXAMPLES = """examples:
  bench visualize attention --checkpoint runs/mae timm:vit_small_patch16_224.dino --images photos --out figures
  bench visualize pca --checkpoint A B --images cat.jpg dog.jpg --size 448 --set patches=foreground --out figures
  bench visualize attention --checkpoint A --images digits: --limit 2 --set heads=all layer=3 at=0.5,0.5 --out figures

docs/visualize.md shows each kind and lists its settings.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench visualize`."""
    width = max(len(path.stem) for path in KINDS)
    kinds = "\n".join(f"  {path.stem.replace('_', '-'):{width}}  {one_line(path)}" for path in KINDS)
    parser.epilog, parser.formatter_class = f"kinds:\n{kinds}\n\n{EXAMPLES}", argparse.RawDescriptionHelpFormatter
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
        required=True,
        metavar="URL",
        help="image files, folders of images, or URLs such as digits: and imagenet:ROOT",
    )
    parser.add_argument("--split", choices=("train", "val"), help="of URLs (val, where there is one)")
    parser.add_argument(
        "--limit", type=positive_integer, default=4, metavar="N", help="images of each folder or URL, evenly spread (4)"
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
        "--format", nargs="+", action="extend", choices=("png", "svg"), metavar="F", help="png, svg or both (png)"
    )


def run(arguments: argparse.Namespace) -> int:
    """0: all pictures are written; the same input gives the same bytes."""
    from bench.cli.settings import check_writable, chosen_device
    from bench.reporting.visualize import PictureRequest, chosen_kind, draw_pictures
    from engine.optional import require
    from engine.printing import say

    require("matplotlib")
    kind = chosen_kind(arguments.kind, arguments.set)
    request = PictureRequest(
        references=tuple(arguments.checkpoint),
        names=tuple(arguments.name) if arguments.name else None,
        sources=tuple(arguments.images),
        split=arguments.split,
        limit=arguments.limit,
        size=arguments.size,
        square=arguments.square,
        seed=arguments.seed,
        device=chosen_device(arguments.device),
    )
    check_writable(arguments.out)
    for path in draw_pictures(kind, request, arguments.out, tuple(dict.fromkeys(arguments.format or ["png"]))):
        say(f"written: {path}")
    return 0
