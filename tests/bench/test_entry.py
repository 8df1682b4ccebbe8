"""The command `bench`, alone, under torchrun, and where memory is short."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.results.record import read_result, result_files

ROOT = Path(__file__).parents[2]
COMMAND = f"#!{sys.executable}\nimport sys\nfrom bench.__main__ import main\nsys.exit(main())\n"  # as pip writes it


def run_in(folder: Path, *words: str, path: tuple[Path, ...] = (ROOT,)) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_command_works_alone_and_under_torchrun(toy_packages, exports, tmp_path):
    (tmp_path / "bench").write_text(COMMAND)
    (tmp_path / "bench").chmod(0o755)
    command = str(tmp_path / "bench")
    assert run_in(tmp_path, command, "list").stdout.startswith("tasks")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "--no-python")
    words = ("--checkpoint", str(exports[0]), "--suite", "toy@one", "--data", "tiny=tiny:", "--out", "results")
    done = run_in(tmp_path, *torchrun, command, "run", *words, path=(toy_packages, ROOT))
    assert done.returncode == 0, done.stderr
    assert [read_result(path).status for path in result_files(tmp_path / "results")] == ["ok"]


def test_too_little_memory_for_the_libraries_is_one_line(tmp_path):
    run = f"ulimit -v 1500000 && exec {sys.executable} -m bench run --checkpoint pixels:32 --suite knn@dino "
    done = run_in(tmp_path, "bash", "-c", f"{run} --data d=digits: --out {tmp_path}")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "not enough memory" in done.stderr and "1.5 GB (ulimit -v)" in done.stderr
