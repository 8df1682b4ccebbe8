"""`bench doctor`: reports what is installed, missing or broken with the fix, and fails on none of it."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torchvision

import bench.commands.doctor
from engine.machine import git_commit, installed, versions
from engine.optional import require


@pytest.fixture
def fake_versions(monkeypatch):
    """Replace versions of distributions, None for one that is not installed: `fake_versions(pyarrow="20.0")`."""

    def call(**packages: str | None) -> None:
        versions = {name.replace("_", "-"): version for name, version in packages.items()}
        monkeypatch.setattr(
            bench.commands.doctor, "installed", lambda name: versions[name] if name in versions else installed(name)
        )

    return call


def line_of(out: str, name: str) -> str:
    return next(line for line in out.splitlines() if line.split()[1:2] == [name])


def test_a_good_environment_is_usable(bench):
    code, out, _ = bench("doctor")
    assert code == 0
    assert "MISSING" not in out and "\n\nusable: nothing that bench run needs is missing" in out
    libraries = ("python", "torch", "operators", "timm", "faiss", "openblas", "cyanure", "mmcv", "cpu")
    assert all(line_of(out, name) for name in libraries)
    assert "a tested pair, torchvision.ops.nms runs" in out


@pytest.mark.parametrize(
    ("packages", "broken", "name", "mark", "named"),
    [
        ({"wandb": None}, (), "wandb", "note", "pip install 'ssl-vit-bench[wandb]'"),
        ({"pyarrow": "20.0"}, (), "pyarrow", "ok", "20.0"),
        ({"faiss_cpu": None, "faiss_gpu": None}, ("faiss",), "faiss", "MISSING", "[cpu]' | [gpu] | not usable"),
        ({"faiss_cpu": "1.15.1", "faiss_gpu": "1.15.1"}, (), "faiss", "MISSING", "uninstall -y faiss-cpu faiss-gpu"),
        ({}, ("faiss",), "faiss", "MISSING", "is installed but cannot be imported"),
        ({}, ("torch", "torchvision", "timm"), "torch", "MISSING", "timm"),
    ],
)
def test_packages_are_reported_with_the_fix(packages, broken, name, mark, named, bench, fake_versions, monkeypatch):
    fake_versions(**packages)
    for module in broken:
        monkeypatch.setitem(sys.modules, module, None)
    code, out, err = bench("doctor")
    assert code == (mark == "MISSING") and err == "" and line_of(out, name).startswith(mark)
    assert not [part for part in named.split(" | ") if part not in out]


@pytest.mark.parametrize("error", ["SystemError('numpy ABI')", "ImportError('x\\ny')"])
def test_a_broken_library_is_reported(error, bench, monkeypatch, tmp_path):
    (tmp_path / "timm.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    code, out, _ = bench("doctor")
    assert code == 1
    assert line_of(out, "timm").startswith("MISSING") and "cannot be imported: " in line_of(out, "timm")
    assert "fix: pip install 'ssl-vit-bench[cpu]'" in out


def test_a_torchvision_built_for_another_torch_is_reported(bench, monkeypatch):
    def nms(*_):
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(torchvision.ops, "nms", nms)
    code, out, _ = bench("doctor")
    assert code == 1
    assert "do not work together: RuntimeError: operator torchvision::nms does not exist" in line_of(out, "operators")
    assert "fix: pip install 'torch==2.11.*' 'torchvision==0.26.*'" in out


def test_an_untested_pair_that_works_is_a_note(bench, monkeypatch):
    monkeypatch.setattr(torchvision, "__version__", "0.99")
    code, out, _ = bench("doctor")
    assert code == 0 and line_of(out, "operators").startswith("note") and "2.11 with 0.26" in out


def test_the_operators_of_mmcv_are_those_in_use(bench):
    """Those of its compiled library where mmcv has one, otherwise torchvision's in its place."""
    require("mmcv")
    package = Path(importlib.util.find_spec("mmcv").origin).parent
    compiled = any(package.glob("_ext*.so"))
    _, out, _ = bench("doctor")
    expected = "its compiled nms and roi_align run" if compiled else "without compiled operators; torchvision's nms"
    assert expected in line_of(out, "mmcv")
    operators, extension = (importlib.import_module(name) for name in ("downstream.models.operators", "mmcv._ext"))
    assert operators.operators_in_use() == ("compiled" if compiled else "torchvision")
    assert (extension.nms is operators.nms) == (not compiled)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"_ext.so": "no library"}, "compiled operators cannot be loaded (built for another torch?): ImportError"),
        ({"_ext.so": "x", "_ext.py": "nms = 1"}, "its compiled nms and roi_align run"),
        ({}, "without compiled operators; torchvision's"),
        ({"__init__.py": "import no_such_library"}, "cannot be loaded (built for another torch?): ModuleNotFoundError"),
    ],
)
def test_any_state_of_mmcvs_operators_is_reported(source, expected, bench, fake_versions, monkeypatch, tmp_path):
    fake_versions(onedl_mmcv="2.3.6")
    (tmp_path / "mmcv").mkdir()
    for name, text in {"__init__.py": "", **source}.items():
        (tmp_path / "mmcv" / name).write_text(text)
    if "_ext.py" in source:  # stands for a library that loads: a real one cannot be made here
        (tmp_path / "mmcv" / "_ext.so").rename(tmp_path / "mmcv" / "_ext.other.so")
    for name in [name for name in sys.modules if name.partition(".")[0] == "mmcv"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    _, out, _ = bench("doctor")
    for name in ("mmcv", "mmcv._ext"):
        sys.modules.pop(name, None)
    assert expected in line_of(out, "mmcv")


def test_without_mmcv_its_operators_are_not_examined(bench, fake_versions, monkeypatch):
    fake_versions(onedl_mmcv=None)
    monkeypatch.setitem(sys.modules, "downstream", None)  # importing it would raise
    _, out, _ = bench("doctor")
    assert "not installed; dense tasks need it" in line_of(out, "mmcv")


def test_a_check_that_fails_is_reported(bench, monkeypatch):
    def fails():
        raise RuntimeError("no such file /proc")

    monkeypatch.setattr("bench.commands.doctor.cpu_model", fails)
    code, out, _ = bench("doctor")
    assert code == 0 and "cannot be examined: RuntimeError: no such file /proc" in out


def test_versions_name_what_numbers_depend_on():
    libraries = {"python", "torch", "torchvision", "timm", "numpy", "pillow", "scikit-learn", "ssl-vit-bench"}
    assert libraries <= versions().keys()
    assert git_commit() is None or len(git_commit().partition("+")[0]) == 40
