"""Options and types of command-line values that several commands share."""

import argparse
from dataclasses import fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from checkpoints.import_options import ImportOptions

REFERENCES = "export folder, checkpoint file, folder of a training, timm:NAME, hf-hub:ID, IMPORTER:PATH, pixels:SIDE"


def positive_integer(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, not {text!r}")
    return int(text)


def image_size(text: str) -> int | tuple[int, int]:
    """Pixels of a side, or height and width with an x between them."""
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) for side in sides):
        raise argparse.ArgumentTypeError(f"expected pixels, as 224 or 384x512 (height x width), not {text!r}")
    return int(text) if len(sides) == 1 else (int(sides[0]), int(sides[1]))


def whole_number(text: str) -> int:
    """A whole number from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 on, not {text!r}")
    return int(text)


def share(text: str) -> float:
    """A number above 0 and up to 1."""
    if (number := above_zero(text)) > 1:
        raise argparse.ArgumentTypeError(f"expected a share above 0 and up to 1, not {text!r}")
    return number


def above_zero(text: str) -> float:
    """A number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, not {text!r}")
    return number


def statistics(text: str) -> str:
    """Image statistics that there are, as typed."""
    from checkpoints.import_options import ImportOptions

    try:
        _ = ImportOptions(statistics=text).preparation
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--statistics ")) from error
    return text


def add_statistics(parser: argparse.ArgumentParser) -> None:
    """--statistics, of commands that import checkpoints."""
    parser.add_argument(
        "--statistics",
        type=statistics,
        metavar="S",
        help="imagenet, half, clip, or six numbers M,M,M,S,S,S: mean and std that the source trained with, of "
        "checkpoint files that do not name them",
    )


def add_import_options(parser: argparse.ArgumentParser) -> None:
    """What a user may say of a checkpoint that no tensor of its file shows."""
    add_statistics(parser)
    parser.add_argument("--branch", metavar="B", help="student, teacher, ...: whichever the format has")
    parser.add_argument(
        "--prefix",
        metavar="P",
        help="what the names of the network's tensors begin with, in a file of other training code",
    )
    parser.add_argument(
        "--heads", type=positive_integer, metavar="N", help="attention heads, where no tensor tells them"
    )
    parser.add_argument(
        "--image-size",
        type=image_size,
        metavar="N",
        help="resize the position tables to N pixels, or to HxW, height and width",
    )
    parser.add_argument("--architecture", metavar="NAME", help="timm's name of the model, for a file of its weights")


def import_options(arguments: argparse.Namespace) -> "ImportOptions":
    """The same as given."""
    from checkpoints.import_options import ImportOptions

    return ImportOptions(**{each.name: getattr(arguments, each.name) for each in fields(ImportOptions)})


def add_compile(parser: argparse.ArgumentParser) -> None:
    """--compile, of commands that run networks."""
    parser.add_argument(
        "--compile",
        action="store_true",
        help="transformer blocks by torch.compile, which needs a compiler and a minute or two, and rounds otherwise",
    )


def add_publication(parser: argparse.ArgumentParser) -> None:
    """--hub-dataset and --source, of commands that make what is published."""
    parser.add_argument(
        "--hub-dataset",
        nargs="+",
        default=[],
        metavar="NAME=ORG/NAME",
        help="an image set's id on the Hugging Face Hub, such as cifar10=uoft-cs/cifar10",
    )
    parser.add_argument("--source", default="", metavar="URL", help="where results, logs and commands are published")
