"""Training states on disk: written whole or not at all, and the newest intact one found again.

A file is named step-NUMBER-DIGEST, with the first 16 digits of the SHA-256 of its bytes, so that a torn or altered file
is recognised. The two newest are kept. Pretraining, fine-tuning and linear sweeps write safetensors; mmengine's Runner
writes its own format under the same rules. States hold no random generators: see engine/seeding.py.
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

KEPT = 2
SUFFIX = ".safetensors"
OPTIMIZER = "optimizer."  # prefix of an optimiser's tensors
DIGITS = 16
WRITING = ".writing-"  # prefix of a file that is not whole yet
DENSE_STATES = 20  # states saved over a dense training, at least
MAX_INTERVAL = 1000  # optimiser steps between two of them, at most


def save_interval(steps: int) -> int:
    """Optimiser steps between two states of a dense training of so many."""
    return max(1, min(MAX_INTERVAL, steps // DENSE_STATES))


@dataclass(frozen=True, kw_only=True)
class State:
    """What a state file holds."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)  # by name
    facts: Mapping[str, Any] = field(default_factory=dict)  # JSON values

    def under(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix`, under the rest of their names."""
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """What an optimiser keeps of each parameter (moments, counts), as `optimizer.PLACE.NAME`."""
    entries = optimizer.state_dict()["state"].items()
    return {f"{OPTIMIZER}{place}.{name}": tensor for place, entry in entries for name, tensor in entry.items()}


def load_optimizer(optimizer: Optimizer, state: State) -> None:
    """Load what `optimizer_tensors` gave into an optimiser of the same parameters. Its groups' settings stay."""
    entries: dict[int, dict[str, Tensor]] = {}
    for name, tensor in state.under(OPTIMIZER).items():
        place, _, kind = name.partition(".")
        entries.setdefault(int(place), {})[kind] = tensor
    optimizer.load_state_dict(optimizer.state_dict() | {"state": entries})


def save_state(folder: Path, step: int, state: State, kept: int = KEPT) -> Path:
    """Write the state of `step` atomically, then delete all but the newest `kept`.

    One process at a time writes to `folder`. ValueError where the file cannot be written.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors.items()}
    metadata = {"facts": json.dumps(dict(state.facts))}
    return keep_state(folder, step, lambda path: save_file(tensors, path, metadata=metadata), kept=kept)


def keep_state(folder: Path, step: int, write: Callable[[str], None], suffix: str = SUFFIX, kept: int = KEPT) -> Path:
    """As `save_state`, for a file that `write(path)` writes."""
    folder.mkdir(parents=True, exist_ok=True)
    for torn in folder.glob(f"{WRITING}*"):  # by a kill
        torn.unlink()
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=WRITING)
    os.close(handle)
    try:
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        path = folder / f"step-{step:09d}-{sha256_of_file(temporary)[:DIGITS]}{suffix}"
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        sync_folder(folder)  # before an older state goes
    except SafetensorError as error:
        Path(temporary).unlink(missing_ok=True)
        raise ValueError(f"{folder}: the training state cannot be written ({error}); free some space") from error
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    for old in [other for other in states(folder, suffix) if other != path][kept - 1 :]:
        old.unlink(missing_ok=True)
    return path


def states(folder: Path, suffix: str = SUFFIX) -> list[Path]:
    """All state files, the newest step first."""
    return sorted(folder.glob(f"step-*{suffix}"), reverse=True)


def newest_whole(folder: Path, suffix: str = SUFFIX) -> Path | None:
    """The newest intact state, or None where there is no state. Deletes newer, broken ones with a warning.

    ValueError where all states are broken: starting again silently would lose the training. OSError where the disk
    fails to read one; nothing is deleted then.
    """
    newest_first = states(folder, suffix)
    whole = next((path for path in newest_first if is_whole(path)), None)
    if whole is None:
        if newest_first:
            count = len(newest_first)
            raise ValueError(f"{folder}: all {count} training states are broken; delete them to start again")
        return None
    for broken in newest_first[: newest_first.index(whole)]:
        say(f"warning: {broken} does not hold what was written to it; going on from {whole.name}", errors=True)
        broken.unlink()
    return whole


def is_whole(path: Path) -> bool:
    """Whether a state file holds what was written. OSError where the disk fails to read it."""
    return sha256_of_file(path)[:DIGITS] == path.stem.rpartition("-")[2]


def newest_state(folder: Path, prefix: str) -> State | None:
    """The part of the newest intact state whose names begin with `prefix`, without it; None where there is no state.

    Deletes nothing, because another process may be training here; when that one deletes a state, there is a newer one.
    ValueError where all are broken.
    """
    while newest_first := states(folder):
        for path in newest_first:
            with suppress(FileNotFoundError):
                if is_whole(path):
                    state = load_state(path, prefix)
                    return State(tensors=state.under(prefix), facts=state.facts)
        if states(folder) == newest_first:
            raise ValueError(f"{folder}: all {len(newest_first)} training states are broken")
    return None


def load_state(path: Path, prefix: str = "") -> State:
    """Read an intact state file; of its tensors, those whose names begin with `prefix`. ValueError for another file."""
    try:
        with safe_open(path, "pt") as file:
            facts = dict(json.loads(file.metadata()["facts"]))
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            return State(tensors={name: file.get_tensor(name) for name in names}, facts=facts)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no state of a training ({type(error).__name__})") from error
