"""List the results of a folder, or remove some of them."""

import argparse
from pathlib import Path
from shlex import quote

from engine.printing import say

EPILOG = """ls: one line for each result, with its first number or why it failed.
rm: moves results, with their arrays and logs, to OUT/removed/<time>/ and rebuilds the leaderboard. Nothing is deleted;
delete that folder when you are sure, or copy it back. At least one of the options says which results.

examples:
  bench results ls --out results --status failed
  bench results rm --out results --status failed --checkpoint old --dry-run
  bench results rm --out results --checkpoint old --data digits --protocol knn@dino
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench results`."""
    parser.add_argument("action", choices=("ls", "rm"), help="list or remove")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder that `bench run` wrote to")
    parser.add_argument("--checkpoint", metavar="X", help="of this checkpoint: name, or name-digest8 as ls prints it")
    parser.add_argument("--data", metavar="NAME", help="of this image set")
    parser.add_argument("--protocol", metavar="P", help="of this protocol (knn@dino) or task (knn)")
    parser.add_argument("--status", choices=("ok", "failed", "unreadable"), help="that ended so")
    parser.add_argument("--dry-run", action="store_true", help="rm: print what would be removed, and do nothing")


def run(arguments: argparse.Namespace) -> int:
    """List or remove results. The exit code is 0 also where no result matches."""
    from bench.results.record import check_folder
    from bench.results.store import find, lines_of, refuse_ambiguous

    check_folder(arguments.out)
    options = {name: getattr(arguments, name) for name in ("checkpoint", "data", "protocol", "status")}
    if arguments.action == "rm" and not any(options.values()):
        raise ValueError(
            "which results? give --checkpoint, --data, --protocol or --status, as `bench results ls` shows"
        )
    contents = find(arguments.out, options)
    if arguments.action == "rm":
        refuse_ambiguous(arguments.out, contents, arguments.checkpoint)
    say(*lines_of(arguments.out, contents))
    if arguments.action == "rm":
        _remove(arguments.out, list(contents), arguments.dry_run)
    return 0


def _remove(out: Path, paths: list[Path], dry_run: bool) -> None:
    from bench.leaderboards.files import write_leaderboard
    from bench.results.store import remove

    if dry_run:
        say("nothing was removed (--dry-run)")
    elif paths:
        place = remove(out, paths)
        write_leaderboard(out)
        undo = f"cp -rn {quote(str(place))}/. {quote(str(out / 'results'))}/"
        say(f"moved to {place}, and the leaderboard rebuilt; to undo: {undo}")
