"""Packages that tests install: one of toy tasks, or one of any files and entry points."""

from pathlib import Path

TOYS = '''"""Toy tasks: they log their runs, fail on demand, and need no features."""

import os
import time
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from engine.tasks import Metric, Outcome, Protocol, Task
from engine.training.interruptions import Stopped


@dataclass(frozen=True, kw_only=True)
class Toy(Task):
    COST: ClassVar[float] = {cost}

    k: tuple[int, ...] = (1, 2)
    rate: float = 0.5
    depth: int | None = None
    mode: Literal["plain", "nan", "none", "forgot", "odd facts", "odd metric", "wait", "interrupt", "stop"] = "plain"

    def run(self, export, space):
        space.cache.mkdir(parents=True, exist_ok=True)
        with open(space.cache / "runs.txt", "a") as file:
            file.write("{key} " + space.data + "\\n")
        if (space.cache / "fail {key}").exists():
            raise RuntimeError("the toy was told to fail\\nand says so in two lines")
        if (space.cache / f"fail {key} in process {{os.environ.get('RANK')}}").exists():
            raise RuntimeError("one process alone")
        if self.mode == "wait" and not (space.cache / "waiting").exists():
            (space.cache / "waiting").touch()
            time.sleep(60)
        if self.mode == "interrupt":
            raise KeyboardInterrupt
        if self.mode == "stop":
            raise Stopped.after(3, 8, "toy training", space.cache)
        value = float("nan") if self.mode == "nan" else 50.0 + space.seed + sum(export.digest.encode()) % 7
        metrics = {{}} if self.mode == "none" else {{f"top1_k{{k}}": Metric(value=value + k) for k in self.k}}
        if self.mode == "forgot":
            return None
        if self.mode == "odd metric":
            metrics = {{"errors": Metric(value=np.ones(4)), "error": Metric(value=1.0, resampled={{"error": [1.0]}})}}
        correct = np.arange(4) % 2 == 0
        facts = {{"process": os.getpid()}} if self.mode != "odd facts" else {{"file": object()}}
        return Outcome(metrics=metrics, arrays={{"correct": correct}}, facts=facts)


PROTOCOLS = {{
    "{key}@one": Protocol(task=Toy(), version=1, source="a paper, table 1"),
    "{key}@two": Protocol(task=Toy(k=(5,)), version=2, source="another paper"),
}}
SUITES = {{"smoke": ("{key}@one",), "toys": ("{key}@one",), "all_toys": ("{key}@one", "{key}@two")}}
'''


def install(root: Path, package: str, version: str, files: dict[str, str], points: dict[str, dict[str, str]]) -> None:
    """Install a package in `root`, with files (module -> code) and entry points (group -> key -> module)."""
    folder, info = root / package, root / f"{package}-{version}.dist-info"
    folder.mkdir()
    info.mkdir()
    for name, text in ({"__init__": ""} | files).items():
        (folder / f"{name}.py").write_text(text)
    groups = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in keys.items()) for group, keys in points.items()]
    (info / "entry_points.txt").write_text("\n".join(groups))
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
