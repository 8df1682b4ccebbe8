"""List the results of a folder, or remove some of them."""

from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Literal

from bench.options import CommandOptions, Positional
from engine.errors import UserError
from engine.printing import say

EPILOG = """ls: one line for each result, with its first number or why it failed.
rm: moves results, with their arrays and logs, to OUT/removed/<time>/ and rebuilds the leaderboard. Nothing is deleted;
delete that folder when you are sure, or copy it back. At least one option has to select the results.

examples:
  bench results ls --out results --status failed
  bench results rm --out results --status failed --checkpoint old --dry-run
  bench results rm --out results --checkpoint old --data digits --protocol knn@dino
"""


@dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """Options of `bench results`."""

    action: Positional[Literal["ls", "rm"]]  # list or remove
    out: Path  # DIR: folder that `bench run` wrote to
    checkpoint: str | None = None  # X: only results of this checkpoint: name, or name-digest8 as ls prints it
    data: str | None = None  # NAME: only results on this image set
    protocol: str | None = None  # P: only results of this protocol (knn@dino) or task (knn)
    status: Literal["ok", "failed", "unreadable"] | None = None  # only results with this status
    dry_run: bool = False  # rm: print what would be removed, and do nothing


def run(options: Options) -> int:
    """List or remove results. 0, even if no result matches."""
    from bench.results.record import check_folder
    from bench.results.store import find_results, listing, refuse_ambiguous

    check_folder(options.out)
    words = {name: getattr(options, name) for name in ("checkpoint", "data", "protocol", "status")}
    if options.action == "rm" and not any(words.values()):
        text = "rm needs it, or --data, --protocol or --status, to say which results; `bench results ls` shows them"
        raise UserError("checkpoint", text)
    contents = find_results(options.out, words)
    if options.action == "rm":
        refuse_ambiguous(options.out, contents, options.checkpoint)
    say(*listing(options.out, contents))
    if options.action == "rm":
        _remove(options.out, list(contents), options.dry_run)
    return 0


def _remove(out: Path, paths: list[Path], dry_run: bool) -> None:
    from bench.reports.leaderboard import write_leaderboard
    from bench.results.store import remove

    if dry_run:
        say("nothing was removed (--dry-run)")
    elif paths:
        folder = remove(out, paths)
        write_leaderboard(out)
        undo = f"cp -rn {quote(str(folder))}/. {quote(str(out / 'results'))}/"
        say(f"moved to {folder}, and the leaderboard rebuilt; to undo: {undo}")
