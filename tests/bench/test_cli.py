"""The command line: exit codes, one-line errors, and a start that imports nothing heavy."""

import os
import re
import shlex
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from bench.cli import COMMANDS, command_module, parsed, with_dashes
from engine.errors import in_one_line

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "timm", "faiss", "sklearn", "scipy", "numpy", "PIL", "torchvision", "matplotlib", "mmcv")


def run_python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)


def test_starting_imports_nothing_heavy():
    code = f"""
import sys
from bench.__main__ import main
for words in ("--help", "list", "list importers", "run --help", "pretrain --help", "--version"):
    assert main(words.split()) == 0 and not {set(HEAVY)} & sys.modules.keys(), words
"""
    run_python(code)


def test_help_names_every_command(bench):
    code, out, _ = bench("--help")
    assert code == 0
    assert all(f"\n  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help(name, bench):
    code, out, _ = bench(name, "--help")
    assert code == 0
    assert "--debug" in out


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_examples_of_a_command_can_be_parsed(name):
    for line in getattr(command_module(name), "EPILOG", "").splitlines():
        if example := re.match(r"  (?:torchrun .* --no-python )?bench (\S.*?)(?:  .*| > .*)?$", line):
            assert parsed(shlex.split(example[1]))[0] is command_module(name), line


WRONG = [
    ([], "COMMAND"),
    (["rnu"], "'rnu' | did you mean 'run'?"),
    (["run"], "--checkpoint, --suite, --out"),
    (["list", "models"], "'models' | bench list"),
    (["list", "knn@din"], "'knn@din' | did you mean 'knn@dino'?"),
    (["run", "--heads", "3"], "no option --heads | bench run --help"),
    (["run", "--chekpoint=x"], "--chekpoint; did you mean '--checkpoint'? | bench run --help"),
    (["inspect", "/nowhere"], "no checkpoint '/nowhere' | timm:NAME"),
    (["inspect", "pixls:32"], "did you mean 'pixels:32'?"),
    (["inspect", __file__.replace("test_cli", "test_clii")], f"did you mean {__file__}?"),
    (["leaderboard", "--out", "/nowhere"], "/nowhere does not exist"),
    (["data", "check", "digitz:"], "'digitz' | did you mean 'digits:'?"),
    (["import", "/nowhere", "--out", "x", "--heads", "many"], "--heads: 'many' | at least 1"),
]


@pytest.mark.parametrize(("words", "named"), WRONG, ids=lambda value: " ".join(value) if type(value) is list else "")
def test_wrong_usage_is_one_line_and_exit_code_2(words, named, refused):
    refused(*words, named=named)


def test_debug_shows_the_traceback(bench):
    code, _, err = bench("leaderboard", "--out", "/nowhere", "--debug")
    assert code == 2
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("bench: error: /nowhere")


def test_underscores_are_accepted_in_options_only():
    assert with_dashes(["--batch_size=8", "--skip_bad", "a_b", "--set=knn.top_k=a_b"]) == [
        *("--batch-size=8", "--skip-bad", "a_b", "--set=knn.top_k=a_b"),
    ]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(28, "No space left on device", "/out"), "No space left on device: /out; free some space"),
        (PermissionError(13, "Permission denied", "/root"), "Permission denied: /root; choose a path"),
        (FileNotFoundError(2, "No such file or directory", "x"), "No such file or directory: x; check the path"),
        (ValueError("two\n  lines"), "two lines"),
        (ValueError(), "ValueError"),
        (RuntimeError("CUDA out of memory"), "RuntimeError: CUDA out of memory"),
        (ImportError("No module named 'faiss'"), "No module named 'faiss'; `bench doctor` shows"),
    ],
)
def test_any_exception_becomes_one_line(error, line):
    assert in_one_line(error).startswith(line)
    assert "\n" not in in_one_line(error)


@pytest.fixture
def make_list_raise(monkeypatch):
    """Make `bench list` raise an error: `make_list_raise(error)`."""

    def call(error: BaseException) -> None:
        def run(arguments):
            raise error

        monkeypatch.setattr("bench.commands.list.run", run)

    return call


def test_an_interrupt_says_how_to_continue(bench, make_list_raise):
    make_list_raise(KeyboardInterrupt())
    code, _, err = bench("list")
    assert code == 130
    assert "\n" not in err.strip() and "run the same command again" in err


def test_a_failed_assertion_is_not_hidden(bench, make_list_raise):
    make_list_raise(AssertionError("ours"))
    with pytest.raises(AssertionError, match="ours"):
        bench("list")


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m bench list | head -c 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr == ""


def test_list_protocols_shows_version_source_and_suites(bench, toys):
    code, out, err = bench("list", "protocols")
    assert code == 0
    assert "toy@two " in out and "version 2  suites: all_toys" in out
    assert "another paper" in out
    assert "task 'broken' of benchtoys 1.0 is left out: cannot be imported: ModuleNotFoundError: No module" in err


def test_list_recipes_shows_cost_and_source(bench):
    code, out, err = bench("list", "recipes")
    assert (code, err) == (0, "")
    assert "mae  MAE (He et al. 2022): " in out
    assert "vit_b       ViT-B/16 at 224 px, 800 epochs, batch 4096, peak learning rate 0.0024; " in out
    assert "He et al. 2022, table 8; " in out


def test_freed_memory_is_kept(bench, monkeypatch):
    calls = []
    monkeypatch.setattr("bench.cli.keep_memory", lambda: calls.append(True))
    bench("list")
    assert calls == [True]


def test_the_installed_command_and_the_module_are_one():
    script = Path(sys.executable).parent / "bench"
    outputs = [
        subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"COLUMNS": "100"}).stdout
        for words in ([str(script), "--version"], [sys.executable, "-m", "bench", "--version"])
        if Path(words[0]).exists()
    ]
    assert len(set(outputs)) == 1
    assert outputs[0].startswith("ssl-vit-bench ")


def test_an_error_that_another_process_reports_is_not_reported_twice(bench, make_list_raise, monkeypatch):
    error = ValueError("all of us failed")
    error.reported_by = 1
    make_list_raise(error)
    monkeypatch.setattr("bench.cli.PATIENCE", 0)
    assert bench("list") == (2, "", "")
    monkeypatch.setenv("RANK", "1")
    assert bench("list")[2] == "bench: error: all of us failed\n"


def test_a_wrong_name_is_refused_without_importing_torch(tmp_path):
    correct = {"--checkpoint": "pixels:8", "--suite": "knn", "--data": "digits=digits:", "--out": str(tmp_path)}
    mistakes = [
        ("--checkpoint", "nowhere.pth", "nowhere.pth"),
        ("--suite", "knn@dnio", "'knn@dino'"),
        ("--data", "photos=foldr:/data", "'folder:/data'"),
        ("--data", "photos=folder:/nowhere", "/nowhere"),
        ("--data", "digits:", "digits=digits:"),
    ]
    commands = [["run", *chain(*(correct | {option: word}).items())] for option, word, _ in mistakes]
    code = f"""
import sys
from bench.cli import run_command
for words in {commands}:
    assert run_command(words) == 2 and "torch" not in sys.modules, words
"""
    lines = run_python(code).stderr.splitlines()
    assert len(lines) == len(mistakes)
    assert all(named in line for (*_, named), line in zip(mistakes, lines, strict=True)), lines


def test_a_finished_run_imports_no_library_that_it_does_not_need(bench, exports, tmp_path):
    words = ["run", "--checkpoint", str(exports[0]), "--suite", "knn@dino", "--data", "digits=digits:", "--limit", "30"]
    words += ["--out", str(tmp_path)]
    assert bench(*words)[0] == 0
    code = f"import sys; from bench.cli import main; main({words!r}); print(sorted(sys.modules))"
    *_, skipped, modules = run_python(code).stdout.splitlines()
    assert "1 skipped" in skipped
    assert not [name for name in {*HEAVY, "huggingface_hub"} - {"torch", "numpy", "PIL"} if f"'{name}'" in modules]
