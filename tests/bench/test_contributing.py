"""The files that docs/extending shows work as they stand: one of each kind, in a package of somebody else."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch

from bench.results.record import read_result, result_files
from checkpoints.export import ViTExport
from downstream.data.scenes import tiny_folder
from engine.extensions import FOLDERS

TEXT = "".join(page.read_text() for page in (Path(__file__).parents[2] / "docs/extending").glob("*.md"))
BLOCKS = {Path(name): code for name, code in re.findall(r"```python\n# (\S+\.py)\n(.*?)```", TEXT, re.DOTALL)}
FILES = {path: code for path, code in BLOCKS.items() if path.parts[0] != "tests"}
CONTRACTS = re.findall(r"^pytest (\S+) -k (\w+)$", TEXT, re.MULTILINE)
ROOT = Path(__file__).parents[2]
PARTS = ("bench", "engine", "imagesets", "checkpoints", "probes", "downstream", "pretrain", "tools", "tests", "docs")
# The dense task once more, for the layout.
DENSE = FILES[Path("downstream/tasks/patch_means_ade20k.py")]
PAIRS = {
    Path("downstream/tasks/patch_means_pairs.py"): DENSE.replace('"ade20k"', '"pairs"').replace("@smoke", "@pairs")
}
GROUPS = {package.replace(".", "/"): f"bench.{kind}" for kind, package in FOLDERS.items()}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A site folder with the files as the installed package `contributed`, and an entry point for each."""
    site = tmp_path_factory.mktemp("site")
    (site / "contributed").mkdir()
    (site / "contributed-1.0.dist-info").mkdir()
    points = ""
    for name, code in (FILES | PAIRS).items():
        (site / "contributed" / name.name).write_text(code)
        if group := GROUPS.get(str(name.parent)):
            points += f"[{group}]\n{name.stem} = contributed.{name.stem}\n"
    (site / "contributed-1.0.dist-info/entry_points.txt").write_text(points)
    (site / "contributed-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: contributed\nVersion: 1.0\n")
    return site


@pytest.fixture
def contributed(written, monkeypatch) -> Path:
    monkeypatch.syspath_prepend(str(written))
    yield written / "contributed"
    for name in [name for name in sys.modules if name.partition(".")[0] == "contributed"]:
        del sys.modules[name]


def test_there_is_a_file_of_each_kind():
    assert {str(path.parent) for path in FILES} == set(GROUPS)


@pytest.mark.slow
def test_as_files_of_the_folders_they_pass_the_contracts_that_the_pages_name(tmp_path):
    """A copy of the project with the files in their folders, and the pages' own commands."""
    for part in PARTS:
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns(".*"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for path, code in BLOCKS.items():
        with open(tmp_path / path, "a") as file:
            file.write(code)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    paths, names = (sorted(set(column)) for column in zip(*CONTRACTS, strict=True))
    assert {"centroid", "luminance", "patch_means", "denoise", "mylab"} == set(names)
    tests = ["-q", "-p", "no:cacheprovider", *paths, "-k", " or ".join(names), "-rA"]
    program = "import sys, pytest, tools.protocols as it; sys.exit(it.main() or pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, *tests]  # in one process, as importing takes as long as the tests
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(re.search(rf"PASSED \S*{name}", done.stdout) for name in names)


def test_a_probe_and_a_dense_task_are_run(contributed, bench, exports, tmp_path):
    out = tmp_path / "results"
    words = ("--suite", "centroid,luminance,patch_means_ade20k", "--data", "digits=digits:", "scenes=tiny-ade20k:")
    code, said, err = bench("run", "--checkpoint", exports[0], *words, "--out", out)
    assert code == 0, said + err
    found = {result.protocol.name: result for result in map(read_result, result_files(out))}
    assert found["centroid@avg"].metrics["top1"].value > 50 and found["centroid@avg"].metrics["top1"].interval
    luminance = found["luminance@ridge"].metrics
    assert 0.5 < luminance["r2"].value <= 1 and luminance["r2"].unit == "" and luminance["r2"].interval
    assert 0 < luminance["mae"].value < 0.1 and luminance["mae"].interval
    assert "r2" in (out / "leaderboard.md").read_text()
    assert found["patch_means@smoke"].metrics["mIoU"].value > 0 and found["patch_means@smoke"].metrics["mIoU"].interval


def test_a_method_is_trained_and_exported(contributed, bench, tmp_path):
    words = ("denoise", "--recipe", "smoke", "--images", "digits:", "--workers", "0", "--set", "depth=1", "epochs=1")
    code, said, err = bench("pretrain", *words, "--out", tmp_path / "run")
    assert code == 0, said + err
    assert ViTExport.load(tmp_path / "run/export").verify() == []


def test_an_importer_takes_a_file(contributed, bench, tmp_path):
    vit = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32, num_classes=0)
    head = {"weight": torch.zeros(10, 192), "bias": torch.zeros(10)}
    torch.save({"encoder": vit.state_dict(), "head": head}, tmp_path / "lab.pth")
    code, said, err = bench("import", f"mylab:{tmp_path / 'lab.pth'}", "--out", tmp_path / "export")
    assert code == 0, said + err
    images = torch.rand(2, 3, 32, 32)
    ours = ViTExport.load(tmp_path / "export").build()
    assert torch.allclose(ours(images)[0], vit.forward_features(images), atol=1e-5)


def save_arrays(folder: Path, split: str, count: int) -> None:
    """Images of four grey levels, a class each."""
    labels = np.arange(count) % 4
    images = np.broadcast_to(60 * labels[:, None, None, None], (count, 8, 8, 3)).astype(np.uint8)
    np.savez(folder / f"{split}.npz", images=images, labels=labels)


def test_an_image_set_is_checked_and_evaluated_on(contributed, bench, exports, tmp_path):
    url = f"arrays:{tmp_path}"
    save_arrays(tmp_path, "train", 16)
    code, said, _ = bench("data", "check", url)
    assert code == 1 and "there is no" in said and "val.npz" in said
    save_arrays(tmp_path, "val", 8)
    _, said, err = bench("data", "check", url)
    assert "train: 16 images" in said and "val: 8 images" in said, said + err
    words = ("--suite", "centroid", "--data", f"mine={url}", "--out", tmp_path / "out")
    code, said, err = bench("run", "--checkpoint", exports[0], *words)
    assert code == 0, said + err
    (result,) = map(read_result, result_files(tmp_path / "out"))
    assert (result.data.url, result.data.images) == (url, {"train": 16, "val": 8})


def test_a_layout_is_checked_and_evaluated_on(contributed, bench, exports, tmp_path):
    code, said, err = bench("data", "check", "tiny-pairs:")
    assert code == 0 and "val: 24 scenes, 5 classes" in said, said + err
    tiny_folder("pairs", tmp_path)
    (scenes,) = tmp_path.glob("tiny-pairs-*")
    words = ("--suite", "patch_means@pairs", "--data", f"mine=pairs:{scenes}", "--out", tmp_path / "out")
    code, said, err = bench("run", "--checkpoint", exports[0], *words)
    assert code == 0, said + err
    (result,) = map(read_result, result_files(tmp_path / "out"))
    assert result.metrics["mIoU"].value > 0 and result.data.images == {"train": 64, "val": 24}
    (scenes / "masks/val/7.png").unlink()
    code, said, err = bench("data", "check", f"pairs:{scenes}")
    assert code == 1 and not err and "train: 64 scenes" in said
    assert f"  FIX: pairs:{scenes}: 1 images of val have no mask, such as masks/val/7.png\n" in said


def test_both_are_listed_and_told_about(contributed, bench):
    found = bench("list", "imagesets")[1] + bench("list", "layouts")[1]
    assert found.count("[plugin: contributed 1.0]") == 2
    assert "arrays:PATH" in bench("list", "arrays")[1]
    assert "tasks     patch_means_pairs" in bench("list", "pairs")[1]
    assert "arrays:PATH" in bench("data", "check", "nothing:")[2]
