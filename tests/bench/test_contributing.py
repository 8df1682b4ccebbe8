"""The example files of docs/extending work unchanged, one of each kind, in a package of somebody else."""

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
from toy_packages import install

from bench.results.record import read_result, result_files
from checkpoints.export import ViTExport
from downstream.data.scenes import tiny_folder
from engine.extensions import FOLDERS

TEXT = "".join(page.read_text() for page in (Path(__file__).parents[2] / "docs/extending").glob("*.md"))
BLOCKS = {Path(name): code for name, code in re.findall(r"```python\n# (\S+\.py)\n(.*?)```", TEXT, re.DOTALL)}
FILES = {path: code for path, code in BLOCKS.items() if path.parts[0] != "tests"}
CONTRACTS = re.findall(r'^pytest (\S+)(?: -m "")? -k "?(\w+)(?: or every")?$', TEXT, re.MULTILINE)
ROOT = Path(__file__).parents[2]
PARTS = ("bench", "engine", "imagesets", "checkpoints", "probes", "downstream", "pretrain", "tools", "tests", "docs")
# The dense task again, on the example of a layout.
DENSE = FILES[Path("downstream/tasks/patch_means_ade20k.py")]
PAIRS = {
    Path("downstream/tasks/patch_means_pairs.py"): DENSE.replace('"ade20k"', '"pairs"').replace("@smoke", "@pairs")
}
GROUPS = {package.replace(".", "/"): f"bench.{kind}" for kind, package in FOLDERS.items()}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A site folder with the files as the installed package `contributed`, and an entry point for each."""
    folder = tmp_path_factory.mktemp("site")
    files = FILES | PAIRS
    entry_points: dict[str, dict[str, str]] = {}
    for path in files:
        if group := GROUPS.get(str(path.parent)):
            entry_points.setdefault(group, {})[path.stem] = f"contributed.{path.stem}"
    install(folder, "contributed", "1.0", {path.stem: code for path, code in files.items()}, entry_points)
    return folder


@pytest.fixture
def contributed(site, use_packages) -> Path:
    """The example files, installed for this test alone."""
    return use_packages(site)


def test_the_pages_show_a_file_of_each_kind():
    assert {str(path.parent) for path in FILES} == set(GROUPS)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_files_pass_the_contract_tests_that_the_pages_name(tmp_path):
    """In a copy of the project, with the files in their folders and the commands of the pages."""
    for part in PARTS:
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns(".*"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for path, code in BLOCKS.items():
        with open(tmp_path / path, "a") as file:
            file.write(code)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    paths, names = (sorted(set(column)) for column in zip(*CONTRACTS, strict=True))
    assert {"centroid", "luminance", "patch_means", "denoise", "mylab"} == set(names)
    tests = ["-q", "-p", "no:cacheprovider", *paths, "-m", "", "-k", " or ".join([*names, "every"]), "-rA"]
    program = "import sys, pytest, tools.protocols as it; sys.exit(it.main() or pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, *tests]  # one process: imports take as long as the tests
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    own = [name for name in names if name != "patch_means"]  # the contract of dense tasks is a loop over every task
    assert not [name for name in own if not re.search(rf"PASSED \S*{name}", done.stdout)]


@pytest.mark.exhaustive
def test_probes_and_a_dense_task_are_run(contributed, output_of, exports, tmp_path):
    out = tmp_path / "results"
    words = ("--suite", "centroid,luminance,patch_means_ade20k", "--data", "digits=digits:", "scenes=tiny-ade20k:")
    output_of("run", "--checkpoint", exports[0], *words, "--out", out)
    metrics = {result.protocol.name: result.metrics for result in map(read_result, result_files(out))}
    assert metrics["centroid@avg"]["top1"].value > 50 and metrics["centroid@avg"]["top1"].interval
    luminance = metrics["luminance@ridge"]
    assert 0.5 < luminance["r2"].value <= 1 and luminance["r2"].unit == "" and luminance["r2"].interval
    assert 0 < luminance["mae"].value < 0.1 and luminance["mae"].interval
    assert "r2" in (out / "leaderboard.md").read_text()
    assert metrics["patch_means@smoke"]["mIoU"].value > 0 and metrics["patch_means@smoke"]["mIoU"].interval


@pytest.mark.exhaustive
def test_a_method_is_trained_and_exported(contributed, output_of, tmp_path):
    words = ("denoise", "--recipe", "smoke", "--images", "digits:", "--workers", "0", "--set", "depth=1", "epochs=1")
    output_of("pretrain", *words, "--out", tmp_path / "run")
    assert ViTExport.load(tmp_path / "run/export").verify() == []


def test_an_importer_reads_its_file(contributed, output_of, tmp_path):
    vit = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32, num_classes=0)
    head = {"weight": torch.zeros(10, 192), "bias": torch.zeros(10)}
    torch.save({"encoder": vit.state_dict(), "head": head}, tmp_path / "lab.pth")
    output_of("import", f"mylab:{tmp_path / 'lab.pth'}", "--out", tmp_path / "export")
    images = torch.rand(2, 3, 32, 32)
    imported = ViTExport.load(tmp_path / "export").build()
    assert torch.allclose(imported(images)[0], vit.forward_features(images), atol=1e-5)


def save_arrays(folder: Path, split: str, count: int) -> None:
    """Save images of four grey levels, one class each."""
    labels = np.arange(count) % 4
    images = np.broadcast_to(60 * labels[:, None, None, None], (count, 8, 8, 3)).astype(np.uint8)
    np.savez(folder / f"{split}.npz", images=images, labels=labels)


def test_an_image_set_is_checked_and_evaluated(contributed, bench, output_of, exports, tmp_path):
    url = f"arrays:{tmp_path}"
    save_arrays(tmp_path, "train", 16)
    code, output, _ = bench("data", "check", url)
    assert code == 1 and "there is no" in output and "val.npz" in output
    save_arrays(tmp_path, "val", 8)
    _, output, err = bench("data", "check", url)  # exits with 1, since val has images of train
    assert "train: 16 images" in output and "val: 8 images" in output, output + err
    words = ("--suite", "centroid", "--data", f"mine={url}", "--out", tmp_path / "out")
    output_of("run", "--checkpoint", exports[0], *words)
    (result,) = map(read_result, result_files(tmp_path / "out"))
    assert (result.data.url, result.data.images) == (url, {"train": 16, "val": 8})


def test_a_layout_is_checked_and_evaluated(contributed, bench, output_of, exports, tmp_path):
    assert "val: 24 scenes, 5 classes" in output_of("data", "check", "tiny-pairs:")
    tiny_folder("pairs", tmp_path)
    (scenes,) = tmp_path.glob("tiny-pairs-*")
    words = ("--suite", "patch_means@pairs", "--data", f"mine=pairs:{scenes}", "--out", tmp_path / "out")
    output_of("run", "--checkpoint", exports[0], *words)
    (result,) = map(read_result, result_files(tmp_path / "out"))
    assert result.metrics["mIoU"].value > 0 and result.data.images == {"train": 64, "val": 24}
    (scenes / "masks/val/7.png").unlink()
    code, output, err = bench("data", "check", f"pairs:{scenes}")
    assert code == 1 and not err and "train: 64 scenes" in output
    assert f"  FIX: pairs:{scenes}: 1 images of val have no mask, such as masks/val/7.png\n" in output


def test_an_image_set_and_a_layout_are_listed_with_their_package(contributed, output_of, refused):
    output = output_of("list", "imagesets") + output_of("list", "layouts")
    assert output.count("[plugin: contributed 1.0]") == 2
    assert "arrays:PATH" in output_of("list", "arrays")
    assert "tasks     patch_means_pairs" in output_of("list", "pairs")
    refused("data", "check", "nothing:", named="arrays:PATH")
