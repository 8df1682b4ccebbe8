"""Collect results, logs and commands of a board in a folder to publish, or check that such a folder still agrees."""

import argparse
import shlex
from pathlib import Path

from bench.cli.settings import add_publication

EPILOG = """A record holds what the numbers rest on, but weights and images: result files with their values for every
image, logs, what each checkpoint is, commands, tables, and model cards with the Hugging Face Hub's forms. Folders
of this machine are left out of every text. The same results give the same bytes.

examples:
  bench record results --to published
  bench record --check published            tables, cards and commands are made again and compared, byte by byte
  bench record results --check published    and the results are those of the folder `results`
  bench record results --to published --sign ~/.ssh/id_ed25519

exit codes of --check: 0 everything agrees; 1 it does not, with a line for each difference
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench record`."""
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT", help="folder that `bench run` wrote to")
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("--to", type=Path, metavar="DIR", help="write the record there; an older record is replaced")
    either.add_argument("--check", type=Path, metavar="DIR", help="check a record")
    parser.add_argument("--model-id", nargs="+", default=[], metavar="NAME=ORG/NAME", help="a checkpoint's on the Hub")
    parser.add_argument(
        "--licence",
        nargs="+",
        default=[],
        metavar="NAME=SPDX",
        help="of a checkpoint's weights, where their source names none, such as mae-s=apache-2.0",
    )
    parser.add_argument(
        "--verified-by",
        nargs="+",
        default=[],
        metavar="NAME=URL",
        help="where the authors of a checkpoint confirm its numbers, such as their comment, commit or DOI",
    )
    add_publication(parser)
    parser.add_argument(
        "--sign",
        type=Path,
        metavar="KEY",
        help="sign the record with a key of ssh, by ssh-keygen; --check says by which key it is signed",
    )
    parser.add_argument("--organization", default="", metavar="ORG", help="who evaluated")


def run(arguments: argparse.Namespace) -> int:
    """0: written, or everything agrees; 1: a check found a difference."""
    from bench.results.record import check_folder
    from bench.sharing.card import publication_from
    from bench.sharing.record import check_record, signer, write_record, written_by
    from engine.printing import say

    if arguments.out:
        check_folder(arguments.out)
    if arguments.check:
        differences = 0
        for line in check_record(arguments.check, arguments.out):
            say(line)
            differences += 1
        summary = f"{differences} difference{'s' if differences > 1 else ''}{written_by(arguments.check)}"
        signature = f"; signed with {key}" if (key := signer(arguments.check)[0]) else ""
        say(summary if differences else f"board and records agree{signature}")
        return int(differences > 0)
    if not arguments.out:
        raise ValueError(
            "record of what? give a folder of results, as `bench run` writes it: bench record OUT --to DIR"
        )
    publication = publication_from(
        arguments.model_id,
        arguments.hub_dataset,
        arguments.source,
        arguments.organization,
        arguments.licence,
        arguments.verified_by,
    )
    write_record(arguments.out, arguments.to, publication, arguments.sign)
    say(f"written: {arguments.to}; check it by: bench record --check {shlex.quote(str(arguments.to))}")
    return 0
