"""The methods of pretrainings with all that was trained, decoders too, read from the folders of runs."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from bench.pictures.shown import ShownCheckpoint
from checkpoints.export import is_export
from pretrain.loop.exporting import epochs_done, identity_in, is_run, progress_after, trained_method
from pretrain.method import Method


@dataclass(frozen=True, eq=False)
class ShownRun:
    """The folder of a pretraining that a checkpoint names."""

    checkpoint: ShownCheckpoint

    @cached_property
    def folder(self) -> Path:
        """ValueError, with what to name instead, for a checkpoint that is no folder of a pretraining."""
        reference = self.checkpoint.reference
        path = Path(reference).expanduser()
        if is_run(path):
            return path
        runs = [parent for parent in (path.absolute().parent, path.absolute().parent.parent) if is_run(parent)]
        where = f"name {runs[0]}" if runs else "name the folder of its training, --out of bench pretrain"
        what = "is an export, which" if is_export(path) else "is no folder of a pretraining; a checkpoint"
        raise ValueError(f"--checkpoint {reference}: this {what} holds the encoder alone: {where}")

    @cached_property
    def trained(self) -> tuple[Method, int]:
        """The method in evaluation mode, and the updates that it has done. ValueError where there is no state."""
        method, state = trained_method(self.folder)
        return method.eval().requires_grad_(False), state.facts["step"]

    @property
    def method(self) -> Method:
        return self.trained[0]

    @cached_property
    def name(self) -> str:
        """The given name, else recipe and epochs: `mae-32px, epoch 5`."""
        if self.checkpoint.given:
            return self.checkpoint.given
        identity = identity_in(self.folder)
        epoch = epochs_done(progress_after(identity, self.trained[1]))
        return f"{identity.get('name', identity['method'])}, epoch {epoch}"
