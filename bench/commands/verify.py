"""Verify an export: recompute its activations and compare them with the recorded ones."""

from dataclasses import dataclass
from pathlib import Path

from bench.options import CommandOptions, Positional

EPILOG = """example:
  bench verify exports/dino

exit codes: 0 the network computes what it computed when it was exported; 1 it does not; 2 an error
"""


@dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """Options of `bench verify`."""

    folder: Positional[Path]  # DIR: an export's folder


def run(options: Options) -> int:
    """0: the activations agree with the recorded ones; 1: they differ, first at the place that is printed."""
    from checkpoints.export import ViTExport, is_export
    from checkpoints.runs import is_run
    from engine.printing import say

    if is_run(options.folder) and not is_export(options.folder):
        exports = [path for path in sorted(Path(options.folder).iterdir()) if is_export(path)]
        listed = ", ".join(str(path) for path in exports) or "none yet; `bench export` writes one"
        raise ValueError(f"{options.folder} is the folder of a pretraining; verify one of its exports: {listed}")
    if not is_export(options.folder):
        raise ValueError(f"{options.folder} is not an export folder; make one with: bench import, or bench export")
    try:
        export = ViTExport.load(options.folder, unchanged=False)
        if problems := export.verify():
            say(f"{options.folder}: DIFFERS, first at {problems[0]} ({len(problems)} places in all)")
            return 1
        ViTExport.load(options.folder)
    except ValueError as error:
        say(f"{options.folder}: DIFFERS: {error}")
        return 1
    say(f"{options.folder}: verified, {len(export.fingerprint)} activations agree; digest {export.digest[:12]}")
    return 0
