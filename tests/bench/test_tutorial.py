"""The commands of docs/tutorial.md work as they stand, in an empty folder."""

import re
import shlex
from pathlib import Path

import pytest

from bench.results.record import read_result, result_files

PAGE = Path(__file__).parents[2] / "docs/tutorial.md"
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_the_tutorial(bench, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = ""
    for language, text in BLOCKS:
        if language == "python":
            exec(compile(text, str(PAGE), "exec"), {})
            continue
        for line in text.splitlines():
            command, *words = shlex.split(line)
            code, out, err = bench(*words)
            assert (command, code) == ("bench", 0), f"{line}\n{out}{err}"
            said += out
    found = {
        result.checkpoint.name: result.numbers["top1_k20"] for result in map(read_result, result_files(Path("results")))
    }
    assert found.keys() == {"mae", "initial", "pixels", "mine"} and found["pixels"] > 90
    assert "knn@dino on digits: exists, skipped" in said and "on digits/knn@dino top1_k20" in said
    assert Path("results/report.html").exists() and Path("results/leaderboard.csv").exists()
