"""What a pretraining writes down: log.jsonl, one JSON object for each stretch of updates, and the same to TensorBoard.

After a restart the lines of updates that are done again are dropped first, so that a curve has every update once.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.files import write_atomic


class Records:
    """Writer of one run. step: where the training goes on. Only the first process has one."""

    def __init__(self, folder: Path, step: int, wandb: str | None = None, run: Mapping[str, Any] | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.path = folder / "log.jsonl"
        lines = [line for line in _lines(self.path) if line["step"] <= step]
        write_atomic(self.path, "".join(json.dumps(line) + "\n" for line in lines))
        self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)
        self.wandb = _wandb(wandb, folder, run or {}) if wandb else None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append what is known after `step` updates."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **{name: _plain(value) for name, value in values.items()}}) + "\n")
        for name, value in values.items():
            self.board.add_scalar(name, value, step)
        if self.wandb is not None:
            self.wandb.log(dict(values), step=step)

    def close(self) -> None:
        self.board.close()
        if self.wandb is not None:
            self.wandb.finish()


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; one that a kill cut short is left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [line for line in found if isinstance(line, dict) and "step" in line]


def _wandb(project: str, folder: Path, run: Mapping[str, Any]) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ValueError("--wandb needs the package wandb: pip install 'ssl-vit-bench[wandb]'") from error
    return wandb.init(project=project, name=folder.name, dir=str(folder), config=dict(run), resume="allow")
