"""Measure how far a protocol's number depends on each of its settings, for the same weights."""

import argparse
from functools import partial
from pathlib import Path

from bench.cli.settings import REFERENCES, add_statistics, positive_integer, whole_number

EPILOG = """\
A variation is FIELD=VALUE, as --set takes it; or of precision, decode and seed; or of statistics, image_size
(pixels, or 1.5x of the network's own) and positions, the rule by which they are interpolated. Several in one text, with
a space between them, are changed together.

examples:
  bench sensitivity knn@dino --checkpoint a.pth b.pth --data cifar10=folder:/data/cifar10 --out sensitivity
  bench sensitivity linear_sgd@ibot_base_cached --checkpoint a.pth --data in1k=imagenet:/data --out sensitivity
  bench sensitivity knn@dino --checkpoint a.pth --data x=digits: --out s --vary pool=avg "k=20 crop=1.0"

Writes sensitivity-PROTOCOL.csv, .md and .png into the folder, beside the results, on which `bench explain` works.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench sensitivity`."""
    parser.add_argument("protocol", metavar="PROTOCOL", help="such as knn@dino")
    parser.add_argument("--vary", nargs="+", default=[], metavar="V", help="in place of the task's own variations")
    add_request(parser)
    parser.add_argument("--seed", type=whole_number, default=0, metavar="N", help="of everything random in a task (0)")
    parser.add_argument("--limit", type=positive_integer, metavar="N", help="at most N images of each split")
    add_several = partial(parser.add_argument, nargs="+", action="extend")
    add_several("--set", default=[], metavar="TASK.FIELD=VALUE", help="change a setting throughout")


def add_request(parser: argparse.ArgumentParser) -> None:
    """The options of `bench sensitivity` and `bench explain`; the rest of those of `bench run` keep their defaults."""
    add_several = partial(parser.add_argument, nargs="+", action="extend", default=[])
    add_several("--checkpoint", metavar="X", help=REFERENCES)
    add_several("--name", metavar="NAME", help="label in results, one per checkpoint")
    add_several("--data", metavar="NAME=URL", help="one image set")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of results")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (auto)")
    add_statistics(parser)
    parser.add_argument("--batch-size", type=positive_integer, metavar="N", help="images in a forward pass (by device)")
    parser.add_argument("--workers", type=whole_number, metavar="N", help="loader workers (by machine)")
    parser.set_defaults(
        suite="", set=[], select=None, seed=0, limit=None, precision="auto", decode="exact", compile=False
    )
    parser.set_defaults(skip_bad=False, rerun=False, dry_run=False)


def run(arguments: argparse.Namespace) -> int:
    """0: measured; what could not be is said."""
    from bench.cli.settings import check_names, chosen_device

    if not (arguments.checkpoint and arguments.out):
        raise ValueError("give --checkpoint X, --data NAME=URL and --out DIR")
    if len(arguments.data) != 1:
        raise ValueError(f"--data: give one image set, not {len(arguments.data)}")
    arguments.suite = arguments.protocol
    check_names(arguments.checkpoint, arguments.suite, arguments.data)
    from bench.cli.output import table
    from bench.commands.run import evaluation_request
    from bench.reporting import effects
    from bench.reporting.figures import encoded_figure
    from engine.files import write_atomic
    from engine.printing import say

    request = evaluation_request(arguments, chosen_device(arguments.device))
    title, found, left_out = effects.sensitivity(request, arguments.vary)
    path = arguments.out / f"sensitivity-{arguments.protocol}"
    write_atomic(Path(f"{path}.csv"), effects.to_csv(found))
    write_atomic(Path(f"{path}.md"), effects.to_markdown(title, found, left_out))
    write_atomic(Path(f"{path}.png"), encoded_figure(effects.figure(title, found), "png"))
    say("", title, "", *table(effects.table_rows(found)), "", *(f"left out: {line}" for line in left_out))
    say(f"written: {path}.csv, .md, .png")
    return 0
