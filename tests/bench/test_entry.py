"""The ways in, from a folder whose files have the names of our packages: they are never imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.results.record import read_result, result_files

ROOT = Path(__file__).parents[2]
COMMAND = f"#!{sys.executable}\nimport sys\nfrom bench.__main__ import main\nsys.exit(main())\n"  # as pip writes it
# As setuptools' editable installs: our packages are found after sys.path, where a mere folder is one already.
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
def folder(tmp_path) -> Path:
    """A user's project, with modules that must not run."""
    place = tmp_path / "project"
    place.mkdir()
    for name in ("engine.py", "checkpoints.py"):
        (place / name).write_text("raise SystemExit('the user\\'s own module ran')\n")
    return place


def ended(folder: Path, *words: str, path: tuple[Path, ...] = (ROOT,)) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("own", ["engine.py", "checkpoints.py", "probes/__init__.py"])
def test_python_m_bench_names_what_hides_a_package(own, tmp_path):
    (tmp_path / own).parent.mkdir(exist_ok=True)
    (tmp_path / own).write_text("raise SystemExit('the user\\'s own module ran')\n")
    done = ended(tmp_path, sys.executable, "-m", "bench", "list")
    found = tmp_path / own.removesuffix("/__init__.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"bench: error: '{found}' hides the package {found.stem!r} of bench; "
        "run `bench` in place of `python -m bench`, and under torchrun `torchrun --no-python bench ...`\n"
    )


def test_a_mere_folder_hides_a_package_of_an_editable_install(tmp_path):
    site, project = tmp_path / "site", tmp_path / "project"
    (project / "checkpoints").mkdir(parents=True)
    site.mkdir()
    (site / "sitecustomize.py").write_text(EDITABLE)
    done = ended(project, sys.executable, "-m", "bench", "list", path=(site,))
    assert done.returncode == 2 and f"'{project / 'checkpoints'}' hides the package" in done.stderr
    (project / "checkpoints").rmdir()
    assert ended(project, sys.executable, "-m", "bench", "list", path=(site,)).stdout.startswith("tasks")


def test_on_pythonpath_the_advice_is_another(folder, tmp_path):
    (tmp_path / "bench").write_text(COMMAND)
    done = ended(tmp_path, sys.executable, str(tmp_path / "bench"), "list", path=(folder, ROOT))
    assert done.returncode == 2 and done.stderr.endswith(f"; rename it, or take '{folder}' off PYTHONPATH\n")


@pytest.mark.slow
def test_the_command_works_there_alone_and_under_torchrun(folder, toy_packages, exports, tmp_path):
    (tmp_path / "bench").write_text(COMMAND)
    (tmp_path / "bench").chmod(0o755)
    command = str(tmp_path / "bench")
    assert ended(folder, command, "list").stdout.startswith("tasks")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "--no-python")
    words = ("--checkpoint", str(exports[0]), "--suite", "toy@one", "--data", "tiny=tiny:", "--out", "results")
    done = ended(folder, *torchrun, command, "run", *words, path=(toy_packages, ROOT))
    assert done.returncode == 0, done.stderr
    assert [read_result(path).status for path in result_files(folder / "results")] == ["ok"]


def test_too_little_memory_for_the_libraries_is_said(tmp_path):
    """Not a library that nobody asked for."""
    run = f"ulimit -v 1500000 && exec {sys.executable} -m bench run --checkpoint pixels:32 --suite knn@dino "
    done = ended(tmp_path, "bash", "-c", f"{run} --data d=digits: --out {tmp_path}")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "not enough memory" in done.stderr and "1.5 GB (ulimit -v)" in done.stderr
