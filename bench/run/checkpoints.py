"""The checkpoints of a run: loaded, verified, named, and saved as exports when they come in another format."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.options import checked_name
from bench.results.record import CheckpointUsed, TrainingCost, pixels_text
from checkpoints.export import EVALUATION_FACTS, MAX_CONFIG_BYTES, ViTExport, is_export
from checkpoints.frozen import SCHEME, FrozenExport, FrozenSpec
from checkpoints.import_options import ImportOptions
from checkpoints.resolve import load, load_frozen
from checkpoints.runs import finished_export, is_run
from engine.errors import UserError, in_one_line
from engine.files import read_json
from engine.printing import say
from engine.tasks import Task

SUFFIXES = (".safetensors", ".pth.tar", ".pth", ".pt", ".ckpt", ".bin", ".tar")


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """A checkpoint that has been loaded and verified."""

    used: CheckpointUsed  # as recorded in results
    spec: FrozenSpec
    evaluated: FrozenSpec | None = None  # at the image size of the evaluation; None: spec
    reference: str  # by which other processes load it without an import
    is_stored: bool = False  # it was an export on disk before the run

    def spec_of(self, task: Task) -> FrozenSpec:
        """The spec that a task evaluates: at the image size of the evaluation, unless the protocol has its own."""
        return self.spec if keeps_size(task) else self.evaluated or self.spec


def keeps_size(task: Task) -> bool:
    """Whether the size of the images is part of the protocol: of dense tasks, and of fine-tuning at a size."""
    return bool(task.LAYOUT or getattr(task, "image_size", None))


def load_checkpoint(
    reference: str,
    name: str | None,
    out: Path,
    save: bool,
    options: ImportOptions | None = None,
    image_size: int | tuple[int, int] | None = None,
) -> tuple[LoadedCheckpoint, FrozenExport]:
    """Load a checkpoint; import it if it is no export and, if `save`, save it in `out`/exports.

    A network of the user's own is never saved: every process calls its function. options: of the import. image_size: of
    the evaluation; None: that of the published one. ValueError if the checkpoint cannot be loaded, or not evaluated on
    images of this size.
    """
    export: FrozenExport
    try:
        if reference.startswith(f"{SCHEME}:"):
            export = load_frozen(reference, options)
        else:
            reference, export = load_export(reference, options)
    except (ValueError, OSError) as error:
        message = in_one_line(error).removeprefix(reference).removeprefix(":").strip()
        raise UserError("checkpoint", message, reference) from error
    used = describe(export, name or default_name(export, reference), reference)
    size = image_size if image_size and not used.is_raw_pixels else export.evaluation_size
    try:
        evaluated = export.evaluated_at(size).spec
    except ValueError as error:
        patch = max(export.spec.patch_size, 1)
        sides = [max(round(side / patch), 1) * patch for side in (size if isinstance(size, tuple) else (size, size))]
        text = f"{used.name}: {in_one_line(error)}; whole patches are {pixels_text((sides[0], sides[1]))}"
        raise UserError("image_size", text, pixels_text(size)) from error
    if isinstance(export, ViTExport):
        if not (is_stored := is_export(Path(reference).expanduser())):
            if save:
                reference = str(save_export(export, used.name, out))
            elif (folder := export_folder(out, used.name, export)).exists():
                reference = str(folder)
    else:
        is_stored = False
    loaded = LoadedCheckpoint(
        used=used, spec=export.spec, evaluated=evaluated, reference=reference, is_stored=is_stored
    )
    return loaded, export


def check_activations(checkpoint: LoadedCheckpoint, export: FrozenExport) -> None:
    """ValueError if the activations of an export from disk differ from the recorded ones.

    A fresh import needs no check: its fingerprint was just computed from its weights.
    """
    if checkpoint.is_stored and isinstance(export, ViTExport) and (problems := export.verify()):
        raise UserError(
            "checkpoint", f"differs from what was exported: {problems[0]}; import it again", checkpoint.reference
        )


def load_export(reference: str, options: ImportOptions | None = None) -> tuple[str, ViTExport]:
    """Load a checkpoint as an export, importing it if necessary; returns a reference that loads it again, and it.

    For the folder of a pretraining this is its export or, before its end, the encoder of its newest state, which is
    printed. options: of an import; of a training only the branch, such as `student`.
    """
    folder = Path(reference).expanduser()
    if not is_run(folder):
        return reference, load(reference, options)
    branch = options.branch if options else None
    if options and options != ImportOptions(branch=branch):
        raise ValueError(f"{reference} is a training by this tool, which needs no options of imports but --branch")
    finished = finished_export(folder)
    if finished and not branch:
        return str(finished), load(finished)
    from pretrain.loop.exporting import exports_in  # builds the method: only an unfinished training needs it

    exports = {str(export.facts["branch"]): (name, export) for name, export in exports_in(folder)}
    if branch and branch not in exports:
        raise UserError("branch", f"choose {' or '.join(exports)}", branch)
    name, export = exports[branch] if branch else next(iter(exports.values()))
    if finished:
        return str(folder / name), export
    say(f"{reference}: epoch {epochs_of(export.facts)}: using the encoder of its newest state")
    return reference, export


def export_folder(out: Path, name: str, export: ViTExport) -> Path:
    """The folder for an imported checkpoint in a folder of results: `OUT/exports/<name>-<digest8>`."""
    return out / "exports" / f"{name}-{export.digest[:8]}"


def save_export(export: ViTExport, name: str, out: Path) -> Path:
    """Save an export in its `export_folder`, unless it is there already; returns the folder."""
    folder = export_folder(out, name, export)
    try:
        if not folder.exists() or _lacks_facts(folder, export):
            export.save(folder)
    except OSError:
        if not is_export(folder):  # another run may have just saved the same export
            raise
    return folder


def _lacks_facts(folder: Path, export: ViTExport) -> bool:
    """Whether an export was saved by an earlier version, without size or crop of the published evaluation."""
    if not (facts := export.facts.keys() & {*EVALUATION_FACTS}):
        return False
    return not facts <= read_json(folder / "config.json", MAX_CONFIG_BYTES).get("vit_export", {}).keys()


def describe(export: FrozenExport, name: str, reference: str) -> CheckpointUsed:
    """The description of an export for results."""
    facts = export.facts
    return CheckpointUsed(
        name=checked_name(name, "name"),
        digest=export.digest,
        method=str(facts.get("method") or ""),
        recipe=str(facts.get("recipe") or ""),
        branch=str(facts.get("branch") or ""),
        architecture=export.spec.label,
        source=str(facts.get("source_file") or facts.get("source") or reference),
        parameters=export.parameters,
        plugin=str(facts.get("plugin") or ""),
        image_size=export.evaluation_size,
        table_size=export.spec.image_size if export.spec.image_size != export.evaluation_size else None,
        assumed="; ".join(facts.get("assumed") or ()),
        training_cost=TrainingCost.of(facts),
    )


def default_name(export: FrozenExport, reference: str) -> str:
    """The name in an export's facts, or one from its reference: `dino:/data/dino_small.pth` -> "dino_small".

    The digest that the folders of saved imports end with is removed.
    """
    if export.facts.get("name"):
        return str(export.facts["name"])
    text = Path(reference.rpartition(":")[2].rstrip("/")).name
    for suffix in SUFFIXES:
        text = text.removesuffix(suffix)
    text = re.sub(r"[^A-Za-z0-9_.@+-]", "-", text).lstrip(".@+-")
    return text.removesuffix(f"-{export.digest[:8]}") or "checkpoint"


def epochs_of(facts: Mapping[str, Any]) -> str:
    """The epochs of a checkpoint's training as text: `5.0`, how far an unfinished one is, or "" if unknown."""
    if unfinished := facts.get("unfinished"):
        done, total = f"{round(facts['epochs'], 2):.6g}", unfinished["epochs"]
        return f"{done} of {total}, not finished (update {unfinished['step']} of {unfinished['steps']})"
    return str(facts.get("epochs") or "")
