"""The files that CONTRIBUTING.md shows work as they stand: one of each kind, in a package of somebody else."""

import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from bench.results.record import read_result, result_files
from checkpoints.export import ViTExport
from engine.extensions import FOLDERS

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
FILES = {Path(name): code for name, code in re.findall(r"```python\n# (\S+\.py)\n(.*?)```", TEXT, re.DOTALL)}
GROUPS = {package.replace(".", "/"): f"bench.{kind}" for kind, package in FOLDERS.items()}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A site folder with the files as the installed package `contributed`, and an entry point for each."""
    site = tmp_path_factory.mktemp("site")
    (site / "contributed").mkdir()
    (site / "contributed-1.0.dist-info").mkdir()
    points = ""
    for name, code in FILES.items():
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


def opened(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_is_a_file_of_each_kind():
    assert {str(path.parent) for path in FILES} == {*GROUPS, "imagesets/schemes", "downstream/layouts"}


def test_a_probe_and_a_dense_task_are_run(contributed, bench, exports, tmp_path):
    out = tmp_path / "results"
    words = ("--suite", "centroid,patch_means_ade20k", "--data", "digits=digits:", "scenes=tiny-ade20k:")
    code, said, err = bench("run", "--checkpoint", exports[0], *words, "--out", out)
    assert code == 0, said + err
    found = {result.protocol.name: result for result in map(read_result, result_files(out))}
    assert found["centroid@avg"].metrics["top1"] > 50 and "top1" in found["centroid@avg"].intervals
    assert found["patch_means@smoke"].metrics["mIoU"] > 0 and "mIoU" in found["patch_means@smoke"].intervals


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


def test_a_scheme_opens_a_set(contributed, tmp_path):
    images, labels = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3), np.array([0, 1])
    np.savez(tmp_path / "train.npz", images=images, labels=labels)
    scheme = opened(contributed / "arrays.py")
    found = scheme.open_split(str(tmp_path), "train")
    assert np.array_equal(np.asarray(found.image(1)), images[1]) and found.classes == ("class 0", "class 1")
    with pytest.raises(ValueError, match=r"there is no .*val"):
        scheme.open_split(str(tmp_path), "val")


def test_a_layout_lists_scenes(contributed, tmp_path):
    for kind, suffix in (("images", "jpg"), ("masks", "png")):
        (tmp_path / kind / "train").mkdir(parents=True)
        Image.new("L", (4, 4)).save(tmp_path / kind / f"train/a.{suffix}")
    (tmp_path / "classes.txt").write_text("sky\nground\n")
    layout = opened(contributed / "pairs.py")
    found = layout.listed(layout.recognised(tmp_path), "train")
    assert (found.images, found.masks) == (("images/train/a.jpg",), ("masks/train/a.png",))
    assert found.classes == ("sky", "ground")
    (tmp_path / "masks/train/a.png").unlink()
    with pytest.raises(ValueError, match=r"1 images of train have no mask, such as masks/train/a\.png"):
        layout.listed(tmp_path, "train")
