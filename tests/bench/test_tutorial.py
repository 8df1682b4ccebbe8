"""The commands of docs/tutorial.md work as they stand, in an empty folder."""

import re
import shlex
from pathlib import Path

import pytest

from bench.results.record import read_result, result_files

PAGE = Path(__file__).parents[2] / "docs/tutorial.md"
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_commands_of_the_tutorial_run(bench, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = ""
    for language, text in BLOCKS:
        if language == "python":
            exec(compile(text, str(PAGE), "exec"), {})
            continue
        for line in text.splitlines():
            command, *words = shlex.split(line)
            code, out, err = bench(*words)
            assert (command, code) == ("bench", 0), f"{line}\n{out}{err}"
            output += out
    accuracies = {
        result.checkpoint.name: result.numbers["top1_k20"] for result in map(read_result, result_files(Path("results")))
    }
    assert accuracies.keys() == {"mae", "initial", "pixels", "mine"} and accuracies["pixels"] > 90
    assert "knn@dino on digits: exists, skipped" in output and "on digits/knn@dino top1_k20" in output
    assert Path("results/report.html").exists() and Path("results/leaderboard.csv").exists()
