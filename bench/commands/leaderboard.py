"""Rebuild and print the leaderboard."""

import argparse
import shutil
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench leaderboard`."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder that `bench run` wrote to")
    parser.add_argument("--published", action="store_true",
        help="show papers' numbers of the same protocols and images, marked, in leaderboard.md and here")  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """0 also when some result file is damaged: it is reported, and the rest is the board."""
    from bench.leaderboard.files import rewrite
    from bench.leaderboard.tables import to_terminal
    from bench.results.record import check_folder
    from engine.printing import say

    check_folder(arguments.out)
    board, _ = rewrite(arguments.out, arguments.published)
    say(*to_terminal(board, width=shutil.get_terminal_size().columns).split("\n"))
    if arguments.published and not any(row.published for row in board.rows):
        say("", "no published number is of these protocols, unchanged, on images of the published size", errors=True)
    say("", f"written: {arguments.out / 'leaderboard.csv'}, {arguments.out / 'leaderboard.md'}", errors=True)
    return 0
