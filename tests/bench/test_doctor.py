"""`bench doctor`: says what is there and what to do, and survives whatever is broken."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torchvision

import bench.commands.doctor
from engine import blas_kernel
from engine.machine import git_commit, installed, versions


@pytest.fixture
def pretend(monkeypatch):
    """Pretend that these distributions have these versions (None: not installed)."""

    def call(**packages: str | None) -> None:
        known = {name.replace("_", "-"): version for name, version in packages.items()}
        monkeypatch.setattr(
            bench.commands.doctor, "installed", lambda name: known[name] if name in known else installed(name)
        )

    return call


def line_of(out: str, name: str) -> str:
    return next(line for line in out.splitlines() if line.split()[1:2] == [name])


def test_a_good_environment_is_usable(bench):
    code, out, _ = bench("doctor")
    assert code == 0
    assert "MISSING" not in out and "\n\nusable: nothing that bench run needs is missing" in out
    libraries = ("python", "torch", "operators", "timm", "faiss", "openblas", "cyanure", "mmcv")
    assert all(line_of(out, name) for name in (*libraries, "cpu", "memory", "disk", "allocator"))
    assert "a tested pair, torchvision.ops.nms runs" in out


def test_json_says_the_same(bench):
    code, out, _ = bench("doctor", "--json")
    report = json.loads(out)
    assert code == 0 and report["usable"] is True
    assert {"name", "mark", "text", "fix", "needed"} == set(report["checks"][0])


@pytest.mark.parametrize(
    ("packages", "gone", "name", "mark", "named"),
    [
        ({"wandb": None}, (), "wandb", "note", "pip install 'ssl-vit-bench[wandb]'"),
        ({"pyarrow": "20.0"}, (), "pyarrow", "ok", "20.0"),
        ({"faiss_cpu": None, "faiss_gpu": None}, ("faiss",), "faiss", "MISSING", "[cpu]' | [gpu]' | not usable"),
        ({"faiss_cpu": "1.15.1", "faiss_gpu": "1.15.1"}, (), "faiss", "MISSING", "uninstall -y faiss-cpu faiss-gpu"),
        ({}, ("faiss",), "faiss", "MISSING", "installed but cannot be imported"),
        ({}, ("torch", "torchvision", "timm"), "torch", "MISSING", "disk"),
    ],
)
def test_packages_and_what_to_do(packages, gone, name, mark, named, bench, pretend, monkeypatch):
    pretend(**packages)
    for module in gone:
        monkeypatch.setitem(sys.modules, module, None)
    code, out, err = bench("doctor")
    assert code == (mark == "MISSING") and err == "" and line_of(out, name).startswith(mark)
    assert not [part for part in named.split(" | ") if part not in out]


@pytest.mark.parametrize(
    ("kernel", "own", "setting", "mark", "text", "fix"),
    [
        ("Zen", "Zen", None, "ok", "its Zen kernel, its default; it fits", ""),
        ("SkylakeX", "Prescott", None, "ok", "in place of its default Prescott", ""),
        ("Prescott", "Prescott", "Prescott", "note", "with OPENBLAS_CORETYPE=Prescott; SkylakeX fits", "unset"),
        ("Prescott", "Prescott", None, "note", "SkylakeX fits this processor", "export OPENBLAS_CORETYPE=SkylakeX"),
        ("Prescott", None, None, "note", "SkylakeX fits this processor", "export OPENBLAS_CORETYPE=SkylakeX"),
        (None, None, None, "note", "does not report which kernel it uses", ""),
    ],
)
def test_the_kernel_that_faiss_multiplies_with(kernel, own, setting, mark, text, fix, bench, monkeypatch):
    monkeypatch.delenv(blas_kernel.VARIABLE, raising=False)
    if setting is not None:
        monkeypatch.setenv(blas_kernel.VARIABLE, setting)
    monkeypatch.setattr(blas_kernel, "in_use", lambda: kernel)
    monkeypatch.setattr(blas_kernel, "default_kernel", lambda: own)
    monkeypatch.setattr(blas_kernel, "best_kernel", lambda flags: "SkylakeX")
    code, out, _ = bench("doctor")
    line = line_of(out, "openblas")
    after = out.partition(line)[2].splitlines()[1]
    assert code == 0 and line.split()[0] == mark and text in line
    assert fix in after and ("fix:" in after) == bool(fix)


@pytest.mark.parametrize(
    "error", ["SystemError('numpy ABI')", "OSError('libx.so: no such file')", "ImportError('x\\ny')"]
)
def test_a_broken_optional_library_is_reported(error, bench, monkeypatch, tmp_path):
    (tmp_path / "cyanure.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "cyanure", raising=False)
    code, out, _ = bench("doctor")
    assert code == 0
    assert line_of(out, "cyanure").startswith("missing") and "cannot be imported: " in line_of(out, "cyanure")
    assert "fix: pip install 'cyanure>=1.2.2'" in out


def test_a_torchvision_of_another_torch(bench, monkeypatch):
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


def test_whose_operators_run_here(bench):
    """A compiled library lies beside mmcv's modules, or does not; mmcv calls what `mmcv._ext` then is."""
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
def test_where_mmcv_operators_come_from(source, expected, bench, pretend, monkeypatch, tmp_path):
    pretend(onedl_mmcv="2.3.6")
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


def test_without_mmcv_its_operators_are_not_looked_for(bench, pretend, monkeypatch):
    pretend(onedl_mmcv=None)
    monkeypatch.setitem(sys.modules, "downstream", None)  # importing it would raise
    _, out, _ = bench("doctor")
    assert "not installed; dense tasks need it" in line_of(out, "mmcv")


def test_a_check_that_fails_is_a_finding(bench, monkeypatch):
    def fails():
        raise RuntimeError("no such file /proc")

    monkeypatch.setattr("bench.commands.doctor.memory_bytes", fails)
    code, out, _ = bench("doctor")
    assert code == 0 and "cannot be examined: RuntimeError: no such file /proc" in out


def test_the_switch_for_memory_is_shown(bench, monkeypatch):
    monkeypatch.setenv("BENCH_KEEP_MEMORY", "0")
    _, out, _ = bench("doctor")
    assert "BENCH_KEEP_MEMORY=0" in line_of(out, "allocator")


def test_versions_name_what_numbers_depend_on():
    assert {"python", "torch", "torchvision", "timm", "numpy", "pillow", "scikit-learn", "ssl-vit-bench"} <= set(
        versions()
    )
    assert git_commit() is None or len(git_commit().partition("+")[0]) == 40
