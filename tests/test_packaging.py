"""What users install: wheel and sdist are complete and start alone; optional packages are named where missing."""

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from engine.optional import OPTIONAL, require

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with a wheel and an sdist, built from the files that git knows or would take."""
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if not name.startswith("tests/") and (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(source)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": ""})
    return dist


@pytest.mark.slow
@pytest.mark.exhaustive
def test_wheel_and_sdist_are_complete_and_pass_twine(built):
    files = [*built.iterdir()]
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *map(str, files)], check=True)
    (wheel,), (sdist,) = ([path for path in files if path.suffix == suffix] for suffix in (".whl", ".gz"))
    product = {
        str(path.relative_to(ROOT))
        for package in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"][
            "include"
        ]
        for path in (ROOT / package.removesuffix("*")).rglob("*")
        if path.suffix in (".py", ".csv", ".html", ".css", ".js", ".typed", ".jinja", ".bib")
    }
    assert product <= set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(sdist) as archive:
        assert product <= {name.partition("/")[2] for name in archive.getnames()}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_installed_wheel_starts_without_the_checkout(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    subprocess.run([*command, str(tmp_path / "site"), str(wheel)], check=True)
    run = [sys.executable, str(tmp_path / "site" / "bin" / "bench"), "reproduce"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    ended = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert "moca" in ended.stdout


def test_a_missing_optional_package_is_named_with_its_extra(monkeypatch):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name, (package, extra, feature) in OPTIONAL.items():
        assert any(line.startswith(package) for line in extras[extra]), package
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ValueError, match=rf"^{package} .*\[{extra}\]'$") as error:
            require(name)
        assert feature in str(error.value)


def test_without_optional_packages_a_board_is_made(tmp_path):
    """What `pip install ssl-vit-bench` alone must run, in a process that cannot import any optional package."""
    code = f"""
import sys
sys.modules.update(dict.fromkeys({[*OPTIONAL, "faiss"]}))
from bench.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
    run = ["run", "--checkpoint", "pixels:8", "--data", "digits=digits:", "--out", str(tmp_path / "out")]
    tasks = ["--suite", "knn@dino,lowshot@bench,linear_sgd@ibot_base_cached", "--set", "knn.backend=torch"]
    tasks += ["linear.epochs=1", "linear.lrs=0.1", "lowshot.splits=1", "--limit", "50"]
    subprocess.run([sys.executable, "-c", code, *run, *tasks], check=True, cwd=ROOT, capture_output=True)
    assert (tmp_path / "out" / "leaderboard.csv").exists()
