"""The checkpoints of a run: loaded, verified, named, and saved as exports when they come in another format."""

import re
from dataclasses import dataclass
from pathlib import Path

from bench.cli.output import epochs_of, in_one_line
from bench.results.record import CheckpointUsed, TrainingCost
from checkpoints.export import ViTExport, is_export
from checkpoints.frozen import SCHEME, FrozenExport, FrozenSpec
from checkpoints.import_options import ImportOptions
from checkpoints.resolve import load, load_frozen
from engine.printing import say
from pretrain.loop.exporting import exports_in, finished_export, is_run

SUFFIXES = (".safetensors", ".pth.tar", ".pth", ".pt", ".ckpt", ".bin", ".tar")
SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*")


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """A checkpoint that has been loaded and verified."""

    used: CheckpointUsed  # what results say about it
    spec: FrozenSpec
    reference: str  # from which other processes load it without an import


def load_checkpoint(
    reference: str, name: str | None, out: Path, save: bool, options: ImportOptions | None = None
) -> tuple[LoadedCheckpoint, FrozenExport]:
    """Load `reference`, verify an export's fingerprint and, if `save`, save an import under `out`/exports.

    A network of the user's own is not saved: every process asks its function for it.

    options: of an import. It needs no verification: its fingerprint was just computed from its weights. ValueError
    where the checkpoint cannot be loaded or its activations differ from the recorded ones.
    """
    try:
        if reference.startswith(f"{SCHEME}:"):
            own = load_frozen(reference, options)
            used = describe(own, name or str(own.facts.get("name") or default_name(reference, own.digest)), reference)
            return LoadedCheckpoint(used=used, spec=own.spec, reference=reference), own
        reference, export = opened(reference, options)
    except (ValueError, OSError) as error:
        said = in_one_line(error).removeprefix(reference).removeprefix(":").strip()
        raise ValueError(f"--checkpoint {reference}: {said}") from error
    exported = is_export(Path(reference).expanduser())
    if exported and (problems := export.verify()):
        raise ValueError(f"--checkpoint {reference}: not what was exported: {problems[0]}; import it again")
    used = describe(export, name or str(export.facts.get("name") or default_name(reference, export.digest)), reference)
    if exported:
        return LoadedCheckpoint(used=used, spec=export.spec, reference=reference), export
    folder = kept_export(out, used.name, export)
    if save and not folder.exists():
        save_once(export, folder)
    saved = str(folder) if folder.exists() else reference
    return LoadedCheckpoint(used=used, spec=export.spec, reference=saved), export


def opened(reference: str, options: ImportOptions | None = None) -> tuple[str, ViTExport]:
    """The export that `reference` means, and a reference that loads it again. options: of an import.

    The folder of a pretraining means its export or, before the end, the encoder of its newest state; that is printed.
    """
    folder = Path(reference).expanduser()
    if not is_run(folder):
        return reference, load(reference, options)
    if (options or ImportOptions()) != ImportOptions():
        raise ValueError(f"{reference} is a training of ours, which says all that it is: leave the options of imports")
    if export_folder := finished_export(folder):
        return str(export_folder), load(export_folder)
    _, export = next(exports_in(folder))
    say(f"{reference}: epoch {epochs_of(export.facts)}: the encoder of its newest state is taken")
    return reference, export


def kept_export(out: Path, name: str, export: ViTExport) -> Path:
    """Where a folder of results keeps an export that came in another form: `OUT/exports/<name>-<digest8>`."""
    return out / "exports" / f"{name}-{export.digest[:8]}"


def save_once(export: ViTExport, folder: Path) -> None:
    """Save an export into a new folder, unless another run does so at this moment."""
    try:
        export.save(folder)
    except OSError:
        if not is_export(folder):  # another run may have just saved the same export
            raise


def describe(export: FrozenExport, name: str, reference: str) -> CheckpointUsed:
    """What results say about an export."""
    facts = export.facts
    return CheckpointUsed(
        name=checked_name(name, "--name"),
        digest=export.digest,
        method=str(facts.get("method") or ""),
        recipe=str(facts.get("recipe") or ""),
        branch=str(facts.get("branch") or ""),
        architecture=export.spec.label,
        source=str(facts.get("source_file") or facts.get("source") or reference),
        parameters=export.parameters,
        plugin=str(facts.get("plugin") or ""),
        assumed="; ".join(facts.get("assumed") or ()),
        training_cost=TrainingCost.of(facts),
    )


def default_name(reference: str, digest: str) -> str:
    """`dino:/data/dino_small.pth` -> "dino_small". The digest in the names of saved imports is removed."""
    text = Path(reference.rpartition(":")[2].rstrip("/")).name
    for suffix in SUFFIXES:
        text = text.removesuffix(suffix)
    text = re.sub(r"[^A-Za-z0-9_.@+-]", "-", text).lstrip(".@+-")
    return text.removesuffix(f"-{digest[:8]}") or "checkpoint"


def checked_name(name: str, option: str) -> str:
    """`name`, if it may be part of a file name on any system. ValueError names the `option`."""
    if not SAFE_NAME.fullmatch(name):
        raise ValueError(
            f"{option} {name!r}: use ASCII letters, digits and . _ @ + - only, not starting with . @ + or -"
        )
    return name
