"""torchvision:NAME:ROOT: each set, in its official layout, is what folders of its classes would be."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from official_layouts import WRITERS, put, write
from refusals import refusal, set_refusal

from imagesets.check import check_image_set, render
from imagesets.schemes.torchvision import SETS
from imagesets.sets import ImageSet, open_set


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def both(name: str, root: Path) -> dict[str, ImageSet]:
    return {split: open_set(f"torchvision:{name}:{root}", split) for split in ("train", "val")}


def as_folder(images: dict[str, bytes], root: Path) -> Path:
    for name, content in images.items():
        put(root / name, content)
    return root


def test_every_set_is_tested():
    assert list(WRITERS) == list(SETS)


@pytest.mark.parametrize("name", [name for name in WRITERS if SETS[name].reports != "mAP"])
def test_a_set_is_the_folder_of_its_classes(name, tmp_path, monkeypatch):
    written = write(name, tmp_path / "set", monkeypatch)
    before = sorted(os.walk(tmp_path / "set"))
    opened = both(name, tmp_path / "set")
    assert sorted(os.walk(tmp_path / "set")) == before
    for split, found in opened.items():
        names = [found.images.names[row] for row in range(len(found))]
        if "all" in written:
            written[split] = {name: content for name, content in written["all"].items() if name in names}
        as_folder(written[split], tmp_path / "folder" / split)
    for split, found in opened.items():
        wanted = open_set(f"folder:{tmp_path}/folder", split)
        assert found.fingerprint == wanted.fingerprint and found.classes == wanted.classes
        assert np.array_equal(found.labels, wanted.labels) and len(found) == len(written[split])
        for row in (0, len(found) // 2, len(found) - 1):
            assert found.encoded(row) == wanted.encoded(row)
            assert np.array_equal(np.asarray(found.image(row)), np.asarray(wanted.image(row)))
        assert found.limited(3).fingerprint == wanted.limited(3).fingerprint
        assert pickle.loads(pickle.dumps(found)).fingerprint == found.fingerprint
        assert found.notes and found.reports == SETS[name].reports


def test_images_with_several_labels(tmp_path, monkeypatch):
    written = write("VOC2007", tmp_path, monkeypatch)
    for split, found in both("VOC2007", tmp_path).items():
        names = sorted(written[split])
        assert [os.path.basename(found.path(row)) for row in range(len(found))] == names
        said = [[{"1": 1, "-1": 0, "0": -1}[word] for word in written[split][name].decode().split()] for name in names]
        assert found.labels.tolist() == said and found.has_several_labels and found.reports == "mAP"
        assert found.classes == ("aeroplane", "bicycle", "bird") and found.image(0).mode == "RGB"
        half = found.limited(2)
        assert half.labels.shape == (2, 3) and half.fingerprint != found.fingerprint
    report = check_image_set(f"torchvision:VOC2007:{tmp_path}")
    assert report.ok and "smallest class aeroplane: 2;" in render(report)


def test_splits_that_are_drawn_are_whole_and_always_the_same(tmp_path, monkeypatch):
    everything = {name: set(write(name, tmp_path / name, monkeypatch)["all"]) for name in ("Caltech101", "EuroSAT")}
    shares = {"Caltech101": [30, 30, 30], "EuroSAT": [8, 8]}
    held = {"Caltech101": "accordion/image_0004.jpg", "EuroSAT": "River/River_5.jpg"}  # of the last class, for ever
    for name, wanted in shares.items():
        train, val = (
            [each.images.names[row] for row in range(len(each))] for each in both(name, tmp_path / name).values()
        )
        assert set(train) | set(val) == everything[name] and not set(train) & set(val)
        assert np.bincount(both(name, tmp_path / name)["train"].labels).tolist() == wanted
        assert val[-1] == held[name]


@pytest.mark.parametrize("name", ["SUN397", "Places365"])
def test_a_relative_folder(name, tmp_path, monkeypatch):
    write(name, tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert open_set(f"torchvision:{name}:.", "train").fingerprint == both(name, tmp_path)["train"].fingerprint


def test_what_is_missing_is_one_line(tmp_path, monkeypatch):
    assert "'cifar10'; did you mean 'CIFAR10'? there are: CIFAR10, CIFAR100," in set_refusal(
        "torchvision:cifar10:/data"
    )
    assert "no folder after the name; write torchvision:DTD:/path" in set_refusal("torchvision:DTD")
    assert "no folder /nowhere" in set_refusal("torchvision:DTD:/nowhere")
    said = set_refusal(f"torchvision:Food101:{tmp_path}")
    assert f"{tmp_path} lacks food-101/meta, food-101/images; bench data get Food101 --out DIR" in said
    assert not list(tmp_path.iterdir()), "nothing is written"
    assert "its official site is gone" in set_refusal(f"torchvision:StanfordCars:{tmp_path}")
    write("SUN397", tmp_path, monkeypatch)
    (tmp_path / "SUN397/Partitions/Testing_01.txt").unlink()
    said = set_refusal(f"torchvision:SUN397:{tmp_path}", "val")
    assert f"no {tmp_path}/SUN397/Partitions/Testing_01.txt; unpack there https://" in said and "Partitions.zip" in said


def test_missing_images_are_one_line(tmp_path, monkeypatch):
    written = write("OxfordIIITPet", tmp_path, monkeypatch)
    (tmp_path / "oxford-iiit-pet/images/Abyssinian_9train.jpg").unlink()
    assert "1 of its 4 images are missing" in (said := set_refusal(f"torchvision:OxfordIIITPet:{tmp_path}"))
    assert "Abyssinian_9train.jpg first" in said and len(written["train"]) == 4
    write("INaturalist2018", tmp_path, monkeypatch)
    (tmp_path / "2018/Aves/1/train0.jpg").unlink()
    assert "train2018.json: 1 of the 4 images that it names" in refusal(
        open_set, f"torchvision:INaturalist2018:{tmp_path}", "train"
    )
    write("VOC2007", tmp_path, monkeypatch)
    for path in (tmp_path / "VOCdevkit/VOC2007/ImageSets/Main").glob("*_test.txt"):
        path.unlink()
    assert "(no lists *_test.txt of classes in " in set_refusal(f"torchvision:VOC2007:{tmp_path}", "val")
    (tmp_path / "oxford-iiit-pet/annotations/test.txt").write_text("no list")
    assert "torchvision cannot read it (" in set_refusal(f"torchvision:OxfordIIITPet:{tmp_path}", "val")


class Harm:
    """Touches a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("batch", ["data_batch_3", "test_batch", "batches.meta"])
def test_pickles_other_than_the_official_ones_are_not_loaded(batch, tmp_path, monkeypatch):
    harm = tmp_path / "harm"
    write("CIFAR10", tmp_path, monkeypatch)
    (tmp_path / "cifar-10-batches-py" / batch).write_bytes(pickle.dumps(Harm(harm)))
    assert "torchvision cannot read it (Dataset" in set_refusal(f"torchvision:CIFAR10:{tmp_path}")
    assert not harm.exists()
