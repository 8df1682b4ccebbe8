"""torchvision:NAME:ROOT: each set in its official layout equals folders of its classes."""

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


def open_splits(name: str, root: Path) -> dict[str, ImageSet]:
    return {split: open_set(f"torchvision:{name}:{root}", split) for split in ("train", "val")}


def as_folder(images: dict[str, bytes], root: Path) -> Path:
    for name, content in images.items():
        put(root / name, content)
    return root


def test_every_set_has_a_writer_of_its_layout():
    assert list(WRITERS) == list(SETS)


@pytest.mark.parametrize("name", [name for name in WRITERS if SETS[name].reports != "mAP"])
def test_a_set_equals_folders_of_its_classes(name, tmp_path, monkeypatch):
    written = write(name, tmp_path / "set", monkeypatch)
    before = sorted(os.walk(tmp_path / "set"))
    image_sets = open_splits(name, tmp_path / "set")
    assert sorted(os.walk(tmp_path / "set")) == before
    for split, image_set in image_sets.items():
        names = [image_set.images.names[row] for row in range(len(image_set))]
        if "all" in written:
            written[split] = {name: content for name, content in written["all"].items() if name in names}
        as_folder(written[split], tmp_path / "folder" / split)
    for split, image_set in image_sets.items():
        expected = open_set(f"folder:{tmp_path}/folder", split)
        assert image_set.fingerprint == expected.fingerprint and image_set.classes == expected.classes
        assert np.array_equal(image_set.labels, expected.labels) and len(image_set) == len(written[split])
        for row in (0, len(image_set) // 2, len(image_set) - 1):
            assert image_set.encoded(row) == expected.encoded(row)
            assert np.array_equal(np.asarray(image_set.image(row)), np.asarray(expected.image(row)))
        assert image_set.limited(3).fingerprint == expected.limited(3).fingerprint
        assert pickle.loads(pickle.dumps(image_set)).fingerprint == image_set.fingerprint
        assert image_set.notes and image_set.reports == SETS[name].reports


def test_voc2007_has_several_labels_per_image(tmp_path, monkeypatch):
    written = write("VOC2007", tmp_path, monkeypatch)
    for split, image_set in open_splits("VOC2007", tmp_path).items():
        names = sorted(written[split])
        assert [os.path.basename(image_set.path(row)) for row in range(len(image_set))] == names
        labels = [
            [{"1": 1, "-1": 0, "0": -1}[word] for word in written[split][name].decode().split()] for name in names
        ]
        assert image_set.labels.tolist() == labels and image_set.has_several_labels and image_set.reports == "mAP"
        assert image_set.classes == ("aeroplane", "bicycle", "bird") and image_set.image(0).mode == "RGB"
        limited = image_set.limited(2)
        assert limited.labels.shape == (2, 3) and limited.fingerprint != image_set.fingerprint
    report = check_image_set(f"torchvision:VOC2007:{tmp_path}")
    assert report.ok and "smallest class aeroplane: 2;" in render(report)


def test_drawn_splits_are_complete_disjoint_and_fixed(tmp_path, monkeypatch):
    everything = {name: set(write(name, tmp_path / name, monkeypatch)["all"]) for name in ("Caltech101", "EuroSAT")}
    shares = {"Caltech101": [30, 30, 30], "EuroSAT": [8, 8]}
    last_of_val = {"Caltech101": "accordion/image_0004.jpg", "EuroSAT": "River/River_5.jpg"}  # must never change
    for name, class_sizes in shares.items():
        image_sets = open_splits(name, tmp_path / name)
        train, val = (
            list(map(image_set.images.names.__getitem__, range(len(image_set)))) for image_set in image_sets.values()
        )
        assert set(train) | set(val) == everything[name] and not set(train) & set(val)
        assert np.bincount(image_sets["train"].labels).tolist() == class_sizes
        assert val[-1] == last_of_val[name]


def test_wrong_names_and_missing_files_are_refused(tmp_path, monkeypatch):
    assert "'cifar10'; did you mean 'CIFAR10'? there are: CIFAR10, CIFAR100," in set_refusal(
        "torchvision:cifar10:/data"
    )
    assert "no folder after the name; write torchvision:DTD:/path" in set_refusal("torchvision:DTD")
    assert "no folder /nowhere" in set_refusal("torchvision:DTD:/nowhere")
    message = set_refusal(f"torchvision:Food101:{tmp_path}")
    assert f"{tmp_path} lacks food-101/meta, food-101/images; bench data get Food101 --out DIR" in message
    assert not list(tmp_path.iterdir()), "nothing is written"
    assert "its official site is gone" in set_refusal(f"torchvision:StanfordCars:{tmp_path}")
    write("SUN397", tmp_path, monkeypatch)
    (tmp_path / "SUN397/Partitions/Testing_01.txt").unlink()
    message = set_refusal(f"torchvision:SUN397:{tmp_path}", "val")
    assert (
        f"no {tmp_path}/SUN397/Partitions/Testing_01.txt; unpack there https://" in message
        and "Partitions.zip" in message
    )


def test_missing_images_and_lists_are_refused(tmp_path, monkeypatch):
    written = write("OxfordIIITPet", tmp_path, monkeypatch)
    (tmp_path / "oxford-iiit-pet/images/Abyssinian_9train.jpg").unlink()
    message = set_refusal(f"torchvision:OxfordIIITPet:{tmp_path}")
    assert "1 of its 4 images are missing" in message and "Abyssinian_9train.jpg first" in message
    assert len(written["train"]) == 4
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


class TouchOnLoad:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("batch", ["data_batch_3", "test_batch", "batches.meta"])
def test_pickles_other_than_the_official_ones_are_not_loaded(batch, tmp_path, monkeypatch):
    witness = tmp_path / "harm"
    write("CIFAR10", tmp_path, monkeypatch)
    (tmp_path / "cifar-10-batches-py" / batch).write_bytes(pickle.dumps(TouchOnLoad(witness)))
    assert "torchvision cannot read it (Dataset" in set_refusal(f"torchvision:CIFAR10:{tmp_path}")
    assert not witness.exists()
