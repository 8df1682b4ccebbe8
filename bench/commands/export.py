"""Write the encoders of a pretraining, finished or not, as exports."""

from dataclasses import dataclass
from pathlib import Path

from bench.options import CommandOptions, Positional
from engine.errors import option
from engine.printing import say

EPILOG = """examples:
  bench export runs/mae                    the newest state, to runs/mae/unfinished/export
  bench export runs/dino --out early       early/export (teacher) and early/export-student

The training may still be running, here or on another machine that shares the folder; it is not affected.
`bench run --checkpoint runs/mae` reads the newest state by itself.
"""
UNFINISHED = "unfinished"


@dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """Options of `bench export`."""

    run: Positional[Path]  # RUN: the folder of a pretraining, as given to `bench pretrain --out`
    # DIR: where export/ and export-BRANCH/ are written (RUN/unfinished, if RUN has not finished)
    out: Path | None = None


def run(options: Options) -> int:
    """0: the exports are written and, read back, reproduce their fingerprints."""
    from bench.checkpoints import epochs_of
    from bench.names import check_new_export
    from bench.pretraining.run import evaluation_command
    from checkpoints.export import ViTExport
    from checkpoints.runs import finished_export, is_run
    from pretrain.loop.exporting import exports_in

    folder = options.run
    if not is_run(folder):
        raise ValueError(f"{folder} is not the folder of a pretraining; give the {option('out')} of bench pretrain")
    finished = finished_export(folder)
    if finished and not options.out:
        say(f"{folder} has finished: its encoder is in {finished}; --out DIR copies it")
        return 0
    out = options.out or folder / UNFINISHED
    exports = list(exports_in(folder))
    say(f"{folder}: epoch {epochs_of(exports[0][1].facts)}")
    for name, export in exports:
        check_new_export(out / name)
        if problems := ViTExport.load(export.save(out / name)).verify():
            raise ValueError(f"{out / name}: differs when read back: {problems[0]}; is the disk faulty?")
        say(f"written and verified: {out / name} ({export.facts['branch']})")
    name, export = exports[0]
    say(evaluation_command(out / name, export.facts["data"]))
    return 0
