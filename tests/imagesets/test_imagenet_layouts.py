"""imagenet:ROOT in every layout that it recognises, from every possible root, and its refusals."""

import numpy as np
import pytest
from refusals import set_refusal
from scipy.io import savemat

from imagesets.schemes import imagenet
from imagesets.sets import open_set

WNIDS = ("n01440764", "n01443537", "n02123045")
TRAIN = tuple(f"train/{wnid}/{wnid}_{number}.JPEG" for wnid in WNIDS for number in (1, 2))
VAL = tuple(f"ILSVRC2012_val_{number:08d}" for number in range(1, 7))
VAL_CLASSES = (2, 0, 1, 1, 0, 2)
SOLUTION = "LOC_val_solution.csv"


def write_solution(path):
    """Kaggle's rows: in no order, one box per object."""
    rows = reversed(list(zip(VAL, VAL_CLASSES, strict=True)))
    lines = [f"{image},{WNIDS[label]} 1 2 30 40 {WNIDS[label]} 5 6 7 8 " for image, label in rows]
    path.write_text("\n".join(["ImageId,PredictionString", *lines]) + "\n")


def write_devkit(root):
    """meta.mat as ILSVRC's: the 1000 (here 3) leaves in an order of their own, then inner nodes of the tree."""
    data = root / "ILSVRC2012_devkit_t12/data"
    data.mkdir(parents=True)
    ids = {2: 1, 0: 2, 1: 3}  # our class -> ILSVRC2012_ID
    rows = [(ids[label], WNIDS[label], "a, b", 0) for label in (2, 0, 1)] + [(4, "n00001740", "entity", 3)]
    fields = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("num_children", "O")]
    savemat(data / "meta.mat", {"synsets": np.array(rows, dtype=fields).reshape(-1, 1)})
    truth = "".join(f"{ids[label]}\n" for label in VAL_CLASSES)
    (data / "ILSVRC2012_validation_ground_truth.txt").write_text(truth)


@pytest.fixture
def kaggle(tree, tmp_path):
    """Kaggle's unpacked archive: ILSVRC/ and the CSV beside it."""
    base = tmp_path / "kaggle/ILSVRC/Data/CLS-LOC"
    tree(base, *TRAIN, *(f"val/{name}.JPEG" for name in VAL), "test/ILSVRC2012_test_00000001.JPEG")
    write_solution(tmp_path / "kaggle" / SOLUTION)
    return tmp_path / "kaggle"


@pytest.fixture
def flat(tree, tmp_path):
    """train/<wnid>/ and a flat val/, no labels yet."""
    return tree(tmp_path / "flat", *TRAIN, *(f"val/{name}.JPEG" for name in VAL))


def val_of(root):
    image_set = open_set(f"imagenet:{root}", "val")
    return [image_set.path(index).split("/")[-1] for index in range(len(image_set))], image_set


def imagenet_refusal(root, split="val") -> str:
    return set_refusal(f"imagenet:{root}", split)


@pytest.mark.parametrize("below", ["", "ILSVRC", "ILSVRC/Data", "ILSVRC/Data/CLS-LOC"])
def test_kaggle_from_every_root(kaggle, below):
    train = open_set(f"imagenet:{kaggle / below}", "train")
    names, val = val_of(kaggle / below)
    assert train.classes == val.classes == WNIDS
    assert train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert names == [f"{name}.JPEG" for name in VAL] and val.labels.tolist() == list(VAL_CLASSES)
    assert val.image(0).size == (40, 30)
    assert any(SOLUTION in note for note in val.notes) and any("3 classes" in note for note in val.notes)


@pytest.mark.parametrize("place", [f"val/{SOLUTION}", SOLUTION, f"../{SOLUTION}"])
def test_flat_val_with_the_csv_near_it(flat, place):
    write_solution(flat / place)
    assert val_of(flat)[1].labels.tolist() == list(VAL_CLASSES)


@pytest.mark.parametrize("place", ["", ".."])
def test_flat_val_with_the_devkit(flat, place):
    write_devkit(flat / place)
    _, val = val_of(flat)
    assert val.labels.tolist() == list(VAL_CLASSES) and val.classes == WNIDS
    assert any("ground_truth" in note for note in val.notes)


def test_devkit_labels_go_by_the_number_in_the_file_name(flat):
    write_devkit(flat)
    (flat / f"val/{VAL[1]}.JPEG").unlink()
    _, val = val_of(flat)
    assert val.labels.tolist() == [2, 1, 1, 0, 2]
    assert any("1 of the 6 images" in note for note in val.notes)


def test_a_refusal_without_labels_names_the_files_to_add(flat):
    assert SOLUTION in imagenet_refusal(flat) and "ILSVRC2012_devkit_t12" in imagenet_refusal(flat)
    assert len(open_set(f"imagenet:{flat}", "train")) == 6


def test_an_image_without_a_label_is_named(flat, tree):
    write_solution(flat / SOLUTION)
    tree(flat, "val/cat.JPEG")
    assert "'cat.JPEG'" in imagenet_refusal(flat)


def test_a_class_missing_from_flat_val_is_named(flat):
    write_solution(flat / SOLUTION)
    for name, label in zip(VAL, VAL_CLASSES, strict=True):
        if label == 1:
            (flat / f"val/{name}.JPEG").unlink()
    assert f"'{WNIDS[1]}' only in train" in imagenet_refusal(flat)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"image,label\n", "does not start"),
        (b"ImageId,PredictionString\nx,\n", "line 2"),
        (b"PK\xff\xfe" * 20, "UTF-8"),
    ],
)
def test_a_damaged_csv_is_refused(flat, content, message):
    (flat / SOLUTION).write_bytes(content)
    assert message in imagenet_refusal(flat)


@pytest.mark.parametrize("damage", ["meta.mat", "truth", "no meta.mat"])
def test_a_damaged_devkit_is_refused(flat, damage):
    write_devkit(flat)
    data = flat / "ILSVRC2012_devkit_t12/data"
    if damage == "no meta.mat":
        (data / "meta.mat").unlink()
    elif damage == "meta.mat":
        (data / "meta.mat").write_bytes(b"MATLAB 5.0" * 40)
    else:
        (data / "ILSVRC2012_validation_ground_truth.txt").write_text("1\n99\n")
    message = imagenet_refusal(flat)
    assert "meta.mat" in message and "again" in message


def test_other_class_folders_are_refused_with_the_url_to_write(tree, tmp_path):
    assert "use folder:PATH" in imagenet_refusal(tree(tmp_path, "train/cat/1.jpg", "val/cat/1.jpg"))


def test_empty_folders_are_refused_with_the_archives_to_unpack(tmp_path):
    for split in ("train", "val"):
        assert f"no {split} folder" in imagenet_refusal(tmp_path, split)
        (tmp_path / split).mkdir()
    assert "ILSVRC2012_img_train.tar" in imagenet_refusal(tmp_path, "train")
    assert "ILSVRC2012_img_val.tar" in imagenet_refusal(tmp_path, "val")


def test_a_file_that_crashes_scipys_reader_is_refused(flat, monkeypatch):
    write_devkit(flat)
    monkeypatch.setattr(imagenet, "READ_SYNSETS", "import os; os.abort()")
    assert "meta.mat makes scipy's reader crash" in imagenet_refusal(flat)
