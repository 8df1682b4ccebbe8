"""Turn a published checkpoint, or a pretraining that has not finished, into an export."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bench.options import CommandOptions, Positional, options_from
from checkpoints.import_options import ImportOptions, check_reference
from engine.errors import UserError

if TYPE_CHECKING:
    from checkpoints.export import ViTExport

EPILOG = """examples:
  bench import dino:dino_deitsmall16_pretrain.pth --out exports/dino
  bench import timm:vit_small_patch16_224.dino --out exports/dino-timm --image-size 448
  bench import runs/dino --branch student --out early      of the newest state; the training may be running
  bench import vit.pth --architecture vit_base_patch16_224 --statistics half --out exports/mine
"""


@dataclass(frozen=True, kw_only=True)
class Options(ImportOptions, CommandOptions):
    """Options of `bench import`."""

    source: Positional[str]  # SOURCE: checkpoint file, folder of a pretraining, IMPORTER:PATH, timm:NAME, hf-hub:ID
    out: Path  # DIR: folder for the export, which is created
    name: str | None = None  # NAME: label of the export in results and leaderboard
    force: bool = False  # replace another export in DIR


def run(options: Options) -> int:
    """0: the export is written and, read back, reproduces its fingerprint."""
    check_reference(options.source)  # before torch is imported
    from bench.commands.inspect import export_lines
    from bench.options import check_new_export, checked_name
    from bench.run.checkpoints import load_export
    from checkpoints.export import ViTExport
    from engine.printing import say

    name = checked_name(options.name, "name") if options.name else None
    check_new_export(options.out)
    _, export = load_export(options.source, options_from(options, ImportOptions))
    say(f"{options.source}: recognised as {export.facts.get('importer') or 'an export'}")
    say(*export_lines(export))
    if name:
        export = replace(export, facts=dict(export.facts) | {"name": name})
    exists = not options.force and _holds(options.out, export)
    folder = options.out if exists else export.save(options.out)
    if problems := ViTExport.load(folder).verify():
        raise ValueError(f"{folder}: differs when read back: {problems[0]}; is the disk faulty?")
    say(f"{'the same export was there already, now' if exists else 'written and'} verified: {folder}")
    return 0


def _holds(out: Path, export: "ViTExport") -> bool:
    """Whether `out` holds this very export. ValueError, naming a difference, if it holds another one."""
    from checkpoints.export import ViTExport, is_export

    if not is_export(out):
        return False
    try:
        difference = ViTExport.load(out).difference(export)
    except ValueError as error:
        difference = str(error)
    if difference:
        raise UserError("out", f"it holds another export ({difference}): choose a new folder, or add --force", out)
    return True
