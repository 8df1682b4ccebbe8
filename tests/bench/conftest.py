"""A tiny export, a third party's package of toy tasks, and a way to call the command line."""

import sys
from pathlib import Path

import pytest
from small_exports import make_export

TOYS = '''"""Toy tasks: they count what they were asked, fail on demand, and need no features."""

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
    mode: Literal["plain", "nan", "none", "odd facts", "wait", "interrupt", "stop"] = "plain"

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
    """An installed package in `root`: its files, and its entry points, group -> key -> module."""
    folder, info = root / package, root / f"{package}-{version}.dist-info"
    folder.mkdir()
    info.mkdir()
    for name, text in ({"__init__": ""} | files).items():
        (folder / f"{name}.py").write_text(text)
    groups = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in keys.items()) for group, keys in points.items()]
    (info / "entry_points.txt").write_text("\n".join(groups))
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


@pytest.fixture
def use_packages(monkeypatch):
    """Put a folder of installed packages on the path, for this test alone."""
    packages = []

    def call(root: Path) -> Path:
        monkeypatch.syspath_prepend(str(root))
        packages.extend(path.name for path in root.iterdir() if not path.suffix)
        return root

    yield call
    for name in [name for name in sys.modules if name.split(".")[0] in packages]:
        del sys.modules[name]


@pytest.fixture(scope="session")
def toy_packages(tmp_path_factory) -> Path:
    """A folder to put on the path: the installed package `benchtoys` with the tasks `toy`, `dear` and `broken`."""
    root = tmp_path_factory.mktemp("site")
    files = {key: TOYS.format(key=key, cost=cost) for key, cost in (("toy", 2), ("dear", 9))}
    files["broken"] = '"""A task whose library is not there."""\nimport no_such_library\n'
    install(root, "benchtoys", "1.0", files, {"bench.probes": {key: f"benchtoys.{key}" for key in files}})
    return root


@pytest.fixture
def toys(toy_packages, use_packages) -> Path:
    """The toy tasks, installed for this test alone."""
    return use_packages(toy_packages)


@pytest.fixture(scope="session")
def exports(tmp_path_factory) -> list[Path]:
    """Two export folders, `first` and `second`, of tiny networks with different weights."""
    return [
        make_export(tmp_path_factory.mktemp("exports") / name, seed) for seed, name in enumerate(("first", "second"))
    ]


@pytest.fixture
def bench(capsys):
    """Call the command line: `code, out, err = bench("run", ...)`."""
    from bench.__main__ import main

    def call(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(word) for word in words])
        return code, *capsys.readouterr()

    return call
