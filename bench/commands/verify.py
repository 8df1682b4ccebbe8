"""Recompute the fingerprint of an export."""

import argparse
from pathlib import Path

EPILOG = """example:
  bench verify exports/dino

exit codes: 0 the network computes what it did when it was exported; 1 it does not; 2 an error
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench verify`."""
    parser.add_argument("folder", metavar="DIR", help="an export's folder")


def run(arguments: argparse.Namespace) -> int:
    """0: the activations are the recorded ones; 1: they differ, and the first place where is named."""
    from checkpoints.export import ViTExport, is_export
    from engine.printing import say
    from pretrain.loop.exporting import is_run

    if is_run(arguments.folder) and not is_export(arguments.folder):
        exports = [path for path in sorted(Path(arguments.folder).iterdir()) if is_export(path)]
        listed = ", ".join(str(path) for path in exports) or "none yet; `bench export` writes one"
        raise ValueError(f"{arguments.folder} is the folder of a training; verify one of its exports: {listed}")
    if not is_export(arguments.folder):
        raise ValueError(f"{arguments.folder} is not an export folder; make one with: bench import, or bench export")
    try:
        export = ViTExport.load(arguments.folder, unchanged=False)
        if problems := export.verify():
            say(f"{arguments.folder}: DIFFERS, first at {problems[0]} ({len(problems)} places in all)")
            return 1
        ViTExport.load(arguments.folder)
    except ValueError as error:
        say(f"{arguments.folder}: DIFFERS: {error}")
        return 1
    say(f"{arguments.folder}: proven, {len(export.fingerprint)} activations agree; digest {export.digest[:12]}")
    return 0
