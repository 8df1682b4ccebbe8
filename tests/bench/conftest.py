"""Tiny exports, an installed package of toy tasks, results to compare, and calls of the command line."""

import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from made_results import made_checkpoint, made_result, save_result
from small_exports import make_export
from toy_packages import TOYS, install

from bench.cli import command_module
from bench.results.record import DataUsed, ProtocolUsed
from bench.run.outcomes import arrays_of, metric_records
from engine.errors import OPTIONS, UserError, in_one_line
from engine.tasks import Metric, Outcome


@pytest.fixture
def use_packages(monkeypatch):
    """Put a folder of installed packages on the path, for this test alone: `use_packages(folder)`."""
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


@pytest.fixture
def output_of(bench):
    """Call a command that must succeed, for its standard output: `output_of("run", ...)`."""

    def call(*words: object) -> str:
        code, out, err = bench(*words)
        assert code == 0, out + err
        return out

    return call


@pytest.fixture
def refused(bench, monkeypatch):
    """Call a command that must be refused, in one line and with nothing on standard output: `refused("run", ...)`.

    A UserError must be about an option of this command, and about a value that was given. named: what the line must
    name, with ` | ` between values, options and advice.
    """
    errors = []
    monkeypatch.setattr("bench.cli.in_one_line", lambda error: errors.append(error) or in_one_line(error))

    def call(*words: object, named: str = "") -> str:
        code, out, err = bench(*words)
        if isinstance(error := errors.pop(), UserError):
            options = {field.name for field in fields(command_module(str(words[0])).Options)}
            assert OPTIONS.get(error.argument, error.argument) in options, error.argument
            assert error.value is None or str(error.value) in " ".join(map(str, words)), error.value
        lines = [line for line in err.splitlines() if not line.startswith("bench: warning: ")]
        assert (code, out, len(lines)) == (2, "", 1) and lines[0].startswith("bench: error: "), out + err
        missing = [part for part in named.split(" | ") if part not in lines[0]]
        assert not missing, (missing, lines[0])
        return lines[0]

    return call


@pytest.fixture
def compare(output_of, tmp_path):
    """The text that `bench compare NAMES OPTIONS` prints for the results of `tmp_path`."""
    return lambda *words: output_of("compare", *words, "--out", tmp_path)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Results of four networks and of raw pixels on the same images under two protocols: two networks are level."""
    out, random = tmp_path_factory.mktemp("compared"), np.random.RandomState(0)
    difficulty = random.rand(400)
    for number, skill in enumerate((0.8, 0.8, 0.5, 0.2, 0.95)):
        checkpoint = made_checkpoint(f"n{number}", number, method="pixels" if number == 4 else "mae")
        for protocol in ("near@x", "linear@x"):
            correct = difficulty + 0.2 * random.rand(400) < skill
            outcome = Outcome(metrics={"top1": Metric(value=100 * float(correct.mean()), per_image=correct)})
            metrics, method = metric_records(outcome, 400)
            data = DataUsed(name="digits", url="digits:", images={"val": 400}, fingerprints={"val": "f" * 64})
            fields = dict(protocol=ProtocolUsed(name=protocol, version=1, source=""), data=data, interval_method=method)
            save_result(out, made_result(checkpoint, metrics, task="other", **fields), arrays_of(outcome))
    return out
