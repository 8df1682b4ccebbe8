"""Tests of recorded outputs do not pass where nothing is recorded."""

import os
import subprocess
import sys
from pathlib import Path

from recordings import ROOT, matches

TESTS = Path(__file__).parent
NO_CASES = """
import pytest

@pytest.mark.parametrize("case", [])
def test_recorded(case):
    pass

@pytest.mark.skip(reason="ours")
def test_skipped():
    pass
"""


def run(folder: Path, *options: str, **environment: str) -> tuple[int, str]:
    """pytest on `folder` with this project's conftest: exit code and output."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), *options]
    completed = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    return completed.returncode, completed.stdout + completed.stderr


def test_a_test_without_cases_fails(tmp_path):
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "test_none.py").write_text(NO_CASES)
    code, output = run(tmp_path, str(tmp_path), GOLDEN_ROOT="/nowhere")
    assert code == 1 and "there is no case to test; if its cases are recorded, look in /nowhere" in output
    assert "1 skipped, 1 error" in output


def test_recordings_that_a_file_cannot_express_skip_it_and_name_the_option(tmp_path):
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "test_one_golden.py").write_text(
        "raise ValueError('mask_shape=hexagon: choose one of block, random')\n"
    )
    code, output = run(tmp_path, str(tmp_path), "-rs", GOLDEN_ROOT="/elsewhere")
    assert code == 5 and "1 skipped" in output and "ValueError: mask_shape=hexagon" in output


def test_cases_are_found_by_their_whole_names():
    assert [match[1] for match in matches(r"case_(\w+)", ["case_a", "no_case_a", "case_b.c"])] == ["a"]
    assert ROOT.is_dir()
