"""The command and `python -m bench` never import a user's module that has the name of one of our packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.results.record import read_result, result_files

ROOT = Path(__file__).parents[2]
RAISES = "raise SystemExit('the module of the user ran')\n"
COMMAND = f"#!{sys.executable}\nimport sys\nfrom bench.__main__ import main\nsys.exit(main())\n"  # as pip writes it
# As setuptools' editable installs: our packages are found after sys.path, where any folder counts as a package.
EDITABLE = f"""import sys
from importlib.util import spec_from_file_location
from pathlib import Path

class Finder:
    def find_spec(name, path=None, target=None):
        folder = Path({str(ROOT)!r}, name)
        if folder.is_dir():
            return spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])

sys.meta_path.append(Finder)
"""


@pytest.fixture
def project(tmp_path) -> Path:
    """A user's folder, with modules that must not run."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name in ("engine.py", "checkpoints.py"):
        (folder / name).write_text(RAISES)
    return folder


def run_in(folder: Path, *words: str, path: tuple[Path, ...] = (ROOT,)) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("module", ["engine.py", "checkpoints.py", "probes/__init__.py"])
def test_python_m_bench_names_the_module_that_hides_a_package(module, tmp_path):
    (tmp_path / module).parent.mkdir(exist_ok=True)
    (tmp_path / module).write_text(RAISES)
    done = run_in(tmp_path, sys.executable, "-m", "bench", "list")
    path = tmp_path / module.removesuffix("/__init__.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"bench: error: '{path}' hides the package {path.stem!r}")
    assert "run `bench` in" in done.stderr and "torchrun --no-python bench" in done.stderr


def test_a_folder_without_files_hides_a_package_of_an_editable_install(tmp_path):
    site, project = tmp_path / "site", tmp_path / "project"
    (project / "checkpoints").mkdir(parents=True)
    site.mkdir()
    (site / "sitecustomize.py").write_text(EDITABLE)
    done = run_in(project, sys.executable, "-m", "bench", "list", path=(site,))
    assert done.returncode == 2 and f"'{project / 'checkpoints'}' hides the package" in done.stderr
    (project / "checkpoints").rmdir()
    assert run_in(project, sys.executable, "-m", "bench", "list", path=(site,)).stdout.startswith("tasks")


def test_a_module_on_pythonpath_gets_its_own_advice(project, tmp_path):
    (tmp_path / "bench").write_text(COMMAND)
    done = run_in(tmp_path, sys.executable, str(tmp_path / "bench"), "list", path=(project, ROOT))
    assert done.returncode == 2 and f"'{project}' off PYTHONPATH" in done.stderr


@pytest.mark.slow
def test_the_command_works_alone_and_under_torchrun(project, toy_packages, exports, tmp_path):
    (tmp_path / "bench").write_text(COMMAND)
    (tmp_path / "bench").chmod(0o755)
    command = str(tmp_path / "bench")
    assert run_in(project, command, "list").stdout.startswith("tasks")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "--no-python")
    words = ("--checkpoint", str(exports[0]), "--suite", "toy@one", "--data", "tiny=tiny:", "--out", "results")
    done = run_in(project, *torchrun, command, "run", *words, path=(toy_packages, ROOT))
    assert done.returncode == 0, done.stderr
    assert [read_result(path).status for path in result_files(project / "results")] == ["ok"]


def test_too_little_memory_for_the_libraries_is_one_line(tmp_path):
    run = f"ulimit -v 1500000 && exec {sys.executable} -m bench run --checkpoint pixels:32 --suite knn@dino "
    done = run_in(tmp_path, "bash", "-c", f"{run} --data d=digits: --out {tmp_path}")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "not enough memory" in done.stderr and "1.5 GB (ulimit -v)" in done.stderr
