"""Training states on disk: saved atomically; loading finds the newest intact one.

A file is named step-NUMBER-DIGEST, with the first 16 digits of the SHA-256 of its bytes, so that a truncated or altered
file is recognised. The two newest are kept. Pretraining, fine-tuning and linear sweeps write safetensors; mmengine's
Runner writes its own format under the same rules. States hold no random generators: see engine/seeding.py.
"""

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer

from engine.files import sha256_of_file, sync_folder
from engine.printing import say

KEPT_STATES = 2  # number of newest states that are not deleted
SUFFIX = ".safetensors"
OPTIMIZER = "optimizer."  # prefix of an optimiser's tensors
DIGEST_DIGITS = 16  # of the digest in a file's name
WRITING = ".writing-"  # prefix of a file that is still being written
MIN_DENSE_STATES = 20  # states that a dense training saves
MAX_SAVE_INTERVAL = 1000  # optimiser steps between two states of a dense training


def save_interval(steps: int) -> int:
    """Optimiser steps between two states of a dense training of `steps`."""
    return max(1, min(MAX_SAVE_INTERVAL, steps // MIN_DENSE_STATES))


@dataclass(frozen=True, kw_only=True)
class State:
    """Contents of a state file."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)  # by name
    facts: Mapping[str, Any] = field(default_factory=dict)  # JSON values

    def under(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix`, by the rest of their names."""
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """An optimiser's state of each parameter (moments, counts): `optimizer.INDEX.NAME` -> tensor."""
    entries = optimizer.state_dict()["state"].items()
    return {f"{OPTIMIZER}{index}.{name}": tensor for index, entry in entries for name, tensor in entry.items()}


def load_optimizer(optimizer: Optimizer, state: State) -> None:
    """Load the tensors of `optimizer_tensors` into an optimiser of the same parameters; its groups' settings stay."""
    entries: dict[int, dict[str, Tensor]] = {}
    for name, tensor in state.under(OPTIMIZER).items():
        index, _, kind = name.partition(".")
        entries.setdefault(int(index), {})[kind] = tensor
    optimizer.load_state_dict(optimizer.state_dict() | {"state": entries})


def save_state(folder: Path, step: int, state: State, kept: int = KEPT_STATES) -> Path:
    """Write the state of `step` atomically, then delete all but the newest `kept`.

    Only one process at a time may write to `folder`. ValueError if the file cannot be written.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors.items()}
    metadata = {"facts": json.dumps(dict(state.facts))}
    return write_state(folder, step, lambda path: save_file(tensors, path, metadata=metadata), kept=kept)


def write_state(
    folder: Path, step: int, write: Callable[[str], None], suffix: str = SUFFIX, kept: int = KEPT_STATES
) -> Path:
    """Like `save_state`, for a file in another format, which `write(path)` writes."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(f"{WRITING}*"):  # of a killed process
        leftover.unlink()
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=WRITING)
    os.close(handle)
    try:
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        path = folder / f"step-{step:09d}-{sha256_of_file(temporary)[:DIGEST_DIGITS]}{suffix}"
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        sync_folder(folder)  # before an older state is deleted
    except SafetensorError as error:
        Path(temporary).unlink(missing_ok=True)
        raise ValueError(f"{folder}: the training state cannot be written ({error}); free some space") from error
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    other_states = [other for other in states(folder, suffix) if other != path]
    for old in other_states[kept - 1 :]:
        old.unlink(missing_ok=True)
    return path


def states(folder: Path, suffix: str = SUFFIX) -> list[Path]:
    """All state files of a folder, the newest step first."""
    return sorted(folder.glob(f"step-*{suffix}"), reverse=True)


def newest_intact(folder: Path, suffix: str = SUFFIX) -> Path | None:
    """The newest intact state, or None if there is no state. Deletes newer, broken ones with a warning.

    ValueError if all states are broken: starting again silently would lose the training. OSError if the disk fails to
    read one; nothing is deleted then.
    """
    newest_first = states(folder, suffix)
    intact = next((path for path in newest_first if is_intact(path)), None)
    if intact is None:
        if newest_first:
            count = len(newest_first)
            raise ValueError(f"{folder}: all {count} training states are broken; delete them to start again")
        return None
    for broken in newest_first[: newest_first.index(intact)]:
        say(f"warning: {broken} does not hold what was written to it; going on from {intact.name}", errors=True)
        broken.unlink()
    return intact


def is_intact(path: Path) -> bool:
    """Whether a state file holds what was written to it. OSError if the disk fails to read it."""
    return sha256_of_file(path)[:DIGEST_DIGITS] == path.stem.rpartition("-")[2]


def newest_state(folder: Path, prefix: str) -> State | None:
    """The newest intact state, only with tensors whose names begin with `prefix`, by the rest of their names; None if
    there is no state.

    Deletes nothing, because another process may be training here; whenever that one deletes a state, there is a newer
    one. ValueError if all states are broken.
    """
    while newest_first := states(folder):
        for path in newest_first:
            with suppress(FileNotFoundError):
                if is_intact(path):
                    state = load_state(path, prefix)
                    return State(tensors=state.under(prefix), facts=state.facts)
        if states(folder) == newest_first:
            raise ValueError(f"{folder}: all {len(newest_first)} training states are broken")
    return None


def load_state(path: Path, prefix: str = "") -> State:
    """Read an intact state file: tensors whose names begin with `prefix`, and facts. ValueError for any other file."""
    try:
        with safe_open(path, "pt") as file:
            facts = dict(json.loads(file.metadata()["facts"]))
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            return State(tensors={name: file.get_tensor(name) for name in names}, facts=facts)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a training state ({type(error).__name__})") from error
