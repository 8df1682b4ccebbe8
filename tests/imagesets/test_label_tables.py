"""Images with a table of labels, sets without a val split, and columns that options name.

Such a set equals its class folders, or is refused with the option to write."""

import csv
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from refusals import set_refusal

from imagesets.check import check_image_set
from imagesets.sets import open_set, parse_url

CLASSES = ("ant", "bee", "cat")
SPLIT_FOLDERS = {"train": "train", "val": "val"}
NAMES = [
    f"{split}/{name}/{split}-{name}-{n}.jpg"
    for split, count in (("train", 5), ("val", 2))
    for name in CLASSES
    for n in range(count)
]


@pytest.fixture
def folder(tree, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    return tree(tmp_path / "classes", *NAMES)


def write_table(folder, root, places, table, rows, header=("file_name", "label")):
    """Copy the images of each split into its folder of `places`, and write a CSV table."""
    for name in NAMES:
        split, _, file = name.split("/")
        target = root / places[split] / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((folder / name).read_bytes())
    with open(root / table, "w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return root


def shuffled_labels(split=None):
    """File and class of each image, in random order."""
    images = [NAMES[index].split("/") for index in np.random.RandomState(1).permutation(len(NAMES))]
    return [(file, name) for folder, name, file in images if split in (None, folder)]


def assert_same_set(url, folder, splits=("train", "val")):
    for split in splits:
        image_set, expected = open_set(url, split), open_set(f"folder:{folder}", split)
        assert image_set.fingerprint == expected.fingerprint and image_set.classes == expected.classes == CLASSES
        for index in (0, len(expected) - 1):
            assert image_set.encoded(index) == expected.encoded(index)


def test_metadata_files_of_hugging_faces_imagefolder(folder, tmp_path):
    root = write_table(
        folder, tmp_path / "x", {"train": "train", "val": "Validation"}, "train/metadata.csv", shuffled_labels("train")
    )
    lines = [json.dumps({"file_name": file, "label": name, "caption": "a, b"}) for file, name in shuffled_labels("val")]
    (root / "Validation/metadata.jsonl").write_text("\n".join(lines))
    assert_same_set(f"folder:{root}", folder)


def test_one_table_whose_paths_name_the_split(folder, tmp_path):
    rows = [(f"{'train' if 'train' in file else 'valid'}/{file}", name) for file, name in shuffled_labels()]
    root = write_table(
        folder, tmp_path / "x", {"train": "train", "val": "valid"}, "labels.csv", rows, ("path", "class")
    )
    assert_same_set(f"folder:{root}", folder)


def test_tables_named_by_their_split_may_omit_endings_and_use_semicolons(folder, tmp_path):
    rows = [(file[:-4], name) for file, name in shuffled_labels("train")]
    root = write_table(folder, tmp_path / "x", {"train": "images", "val": "images"}, "train.csv", rows, ("id", "breed"))
    text = "\n".join(["id;breed", *(f"{file[:-4]};{name}" for file, name in shuffled_labels("val"))])
    (root / "val.csv").write_text("\ufeff" + text + "\n")
    (root / "test.csv").write_text("id\nnone\n")
    assert_same_set(f"folder:{root}", folder)
    notes = open_set(f"folder:{root}", "val").notes
    assert any("test.csv has no column of labels" in note for note in notes)


def test_files_of_the_same_name_in_two_splits_are_distinguished(tree, tmp_path):
    root = tree(tmp_path / "x", *(f"{split}/{n}.jpg" for split in ("train", "val") for n in range(4)))
    for split, column, shift in (("train", "image_id", 0), ("val", "image_id", 1)):
        rows = [f"{n},{'ab'[(n + shift) % 2]}" for n in range(4)]
        (root / f"{split}.csv").write_text("\n".join([f"{column},label", *rows]))
    for split, shift in (("train", 0), ("val", 1)):
        image_set = open_set(f"folder:{root}", split)
        assert all(image_set.path(index).startswith(f"{root}/{split}/") for index in range(4))
        assert [(int(image_set.path(index)[-5]) + shift) % 2 for index in range(4)] == image_set.labels.tolist()


def test_options_name_the_table_and_its_columns(folder, tmp_path):
    rows = [(file, name, "TRAIN" if "train" in file else "Test", "9") for file, name in shuffled_labels()]
    root = write_table(
        folder, tmp_path / "x", {"train": "images", "val": "images"}, "my list.csv", rows, ("F", "what", "split", "n")
    )
    (root / "other.csv").write_text("nothing\n")
    assert "?labels=NAME" in set_refusal(f"folder:{root}")
    assert "?image=NAME" in set_refusal(f"folder:{root}?labels=my list.csv")
    assert "did you mean 'what'" in set_refusal(f"folder:{root}?labels=my list.csv&image=F&label=wha")
    assert_same_set(f"folder:{root}?labels=my list.csv&image=F&label=what", folder)
    assert "test is used as val" in " ".join(
        open_set(f"folder:{root}?labels=my list.csv&image=F&label=what", "val").notes
    )


def test_numbers_are_classes_in_numeric_order_and_fractions_are_refused(folder, tmp_path):
    rows = [(file, {"ant": "2.0", "bee": "10", "cat": "-1"}[name]) for file, name in shuffled_labels()]
    root = write_table(folder, tmp_path / "x", {"train": ".", "val": "."}, "labels.csv", rows)
    assert open_set(f"folder:{root}", "train").classes == ("-1", "2", "10")
    for value, message in (("1.9", "1.9 is not a class label"), ("", "1 of 21 rows have no label")):
        write_table(folder, root, {"train": ".", "val": "."}, "labels.csv", [*rows[:-1], (rows[-1][0], value)])
        assert message in set_refusal(f"folder:{root}")


@pytest.mark.parametrize("header", [("file", "ant", "bee", "cat"), ("file", "label")])
def test_tables_may_give_several_labels_per_image(folder, tmp_path, header):
    classes_of = {file: {name, "cat"} for file, name in shuffled_labels()}
    one_column = len(header) == 2
    rows = [
        (file, "|".join(sorted(names))) if one_column else (file, *(int(name in names) for name in CLASSES))
        for file, names in classes_of.items()
    ]
    root = write_table(folder, tmp_path / "x", SPLIT_FOLDERS, "labels.csv", rows, header)
    for split, count in (("train", 15), ("val", 6)):
        image_set = open_set(f"folder:{root}" + "?separator=bar" * one_column, split)
        assert image_set.classes == CLASSES and len(image_set) == count and image_set.has_several_labels
        for index in range(count):
            file = image_set.path(index).rpartition("/")[2]
            assert {CLASSES[at] for at in np.flatnonzero(image_set.labels[index])} == classes_of[file]


def test_one_hot_columns_are_one_label(folder, tmp_path):
    rows = [(file, *(f"{float(name == column)}" for column in CLASSES), 40) for file, name in shuffled_labels()]
    header = ("image", *CLASSES, "age")
    root = write_table(folder, tmp_path / "x", SPLIT_FOLDERS, "GroundTruth.csv", rows, header)
    assert_same_set(f"folder:{root}", folder)


def test_rows_of_one_hot_columns_with_no_or_several_ones_are_noted(folder, tmp_path):
    """They turn a set of one label an image into one of several."""
    rows = [[file, *(int(name == column) for column in CLASSES)] for file, name in shuffled_labels()]
    rows[0][1:], rows[1][1:], rows[2][1:] = (0, 0, 0), (1, 1, 0), (1, 1, 1)
    root = write_table(folder, tmp_path / "x", SPLIT_FOLDERS, "labels.csv", rows, ("file", *CLASSES))
    image_set = open_set(f"folder:{root}", "train")
    assert image_set.has_several_labels
    assert "several labels per image: of 21 rows 2 have more than one, 1 none" in image_set.notes


@pytest.mark.parametrize("value", ["-1", "-1.0", "", "nan"])
def test_columns_of_classes_with_other_values_are_refused(folder, tmp_path, value):
    """They would be left out, and their class with them."""
    rows = [[file, *(int(name == column) for column in CLASSES)] for file, name in shuffled_labels()]
    rows[0][2] = value
    root = write_table(folder, tmp_path / "x", SPLIT_FOLDERS, "labels.csv", rows, ("file", *CLASSES))
    assert f"column {CLASSES[1]} holds" in set_refusal(f"folder:{root}")


def test_minus_one_is_a_class_only_without_zero(folder, tmp_path):
    for numbers in (("-1", "0", "1"), ("-1", "1", "2")):
        rows = [(file, numbers[CLASSES.index(name)]) for file, name in shuffled_labels()]
        root = write_table(folder, tmp_path / "".join(numbers), SPLIT_FOLDERS, "labels.csv", rows)
        if "0" in numbers:
            assert "labels of -1" in set_refusal(f"folder:{root}")
        else:
            image_set = open_set(f"folder:{root}", "train")
            assert image_set.classes == numbers and not any("alike" in note for note in image_set.notes)


def test_rows_without_images_are_refused_and_images_without_rows_are_noted(folder, tmp_path):
    root = write_table(folder, tmp_path / "x", SPLIT_FOLDERS, "labels.csv", shuffled_labels()[2:])
    assert "2 images have no label and are not read" in open_set(f"folder:{root}", "train").notes
    write_table(folder, root, SPLIT_FOLDERS, "labels.csv", [*shuffled_labels(), ("gone.jpg", "ant")])
    message = set_refusal(f"folder:{root}")
    assert "1 of 22 rows name no image" in message and "gone.jpg in row 22" in message
    write_table(folder, root, SPLIT_FOLDERS, "labels.csv", [*shuffled_labels(), shuffled_labels()[0]])
    assert "has two rows" in set_refusal(f"folder:{root}")
    (root / "val/train-ant-0.jpg").write_bytes(b"another")
    write_table(folder, root, SPLIT_FOLDERS, "labels.csv", shuffled_labels())
    message = set_refusal(f"folder:{root}")
    assert "train/train-ant-0.jpg" in message and "val/train-ant-0.jpg" in message


def test_absolute_and_windows_paths_are_read(folder, tmp_path):
    root = tmp_path / "x"
    rows = [(f"{root}/{'train' if 'train' in file else 'val'}/{file}", name) for file, name in shuffled_labels()]
    rows = [
        (path.replace(f"{root}/", "").replace("/", "\\"), name) if n % 2 else (path, name)
        for n, (path, name) in enumerate(rows)
    ]
    assert_same_set(f"folder:{write_table(folder, root, SPLIT_FOLDERS, 'labels.csv', rows)}", folder)


def test_unreadable_tables_are_refused(folder, tmp_path):
    root = write_table(folder, tmp_path / "x", SPLIT_FOLDERS, "labels.csv", shuffled_labels())
    url = f"folder:{root}?labels=labels.csv"
    for text, message in (
        ("", "has no rows"),
        ("file,label\n", "has no rows"),
        ("a.jpg,ant\nb.jpg,bee\n", "the first line must name the columns"),
        ("file,label\na,b,c\n", "line 2 has 3 values"),
        ("file,label\nx\udcff,b\n", "no table of labels"),
        ("file,label\n" + "\n".join(f"{file},{'|'.join(CLASSES)}" for file, _ in shuffled_labels()[:-1]), None),
    ):
        (root / "labels.csv").write_text(text, errors="surrogateescape")
        if message:
            assert message in set_refusal(url)
    assert any("separator=bar" in note for note in open_set(url, "train").notes)
    (root / "labels.csv").write_text("file,label\n" + "\n".join(f"{file}," for file, _ in shuffled_labels()))
    assert "21 of 21 rows have no label" in set_refusal(url) and "separator=bar" in set_refusal(url)
    (root / "labels.jsonl").write_text("[" * 100_000)
    assert "labels.jsonl: is no table of labels" in set_refusal(f"folder:{root}?labels=labels.jsonl")
    for label in ({"a": 1}, {}):
        (root / "labels.jsonl").write_text(json.dumps({"file": shuffled_labels()[0][0], "label": label}))
        assert "is no class" in set_refusal(f"folder:{root}?labels=labels.jsonl")


def test_hidden_tables_are_left_out(folder, tmp_path):
    rows = shuffled_labels("train")
    root = write_table(folder, tmp_path / "flat", {"train": ".", "val": "."}, "labels.csv", rows)
    before = open_set(f"folder:{root}", "train")
    (root / "._labels.csv").write_bytes(b"\0\5\x16\7")  # as macOS writes it onto foreign disks
    assert open_set(f"folder:{root}", "train").fingerprint == before.fingerprint


def test_class_folders_come_before_tables(folder):
    before = open_set(f"folder:{folder}", "train").fingerprint
    (folder / "train/metadata.csv").write_text("file_name,label\nant/train-ant-0.jpg,bee\n")
    (folder / "labels.csv").write_text("file_name,label\n")
    assert open_set(f"folder:{folder}", "train").fingerprint == before


@pytest.mark.parametrize("subfolder", ["", "train"])  # where the class folders are
def test_a_share_of_each_class_is_held_out_for_validation(folder, tmp_path, subfolder):
    root = tmp_path / "x"
    if subfolder:
        root.mkdir()
    (root / subfolder).symlink_to(folder / "train")
    url = f"folder:{root}?val=0.4&seed=3"
    complete, train, val = open_set(f"folder:{folder}", "train"), open_set(url, "train"), open_set(url, "val")
    assert "?val=0.2" in set_refusal(f"folder:{root}", "val")
    files, train_files, val_files = (
        {image_set.encoded(index) for index in range(len(image_set))} for image_set in (complete, train, val)
    )
    assert train_files | val_files == files and not train_files & val_files and train.url == val.url == url
    assert np.bincount(train.labels).tolist() == [3, 3, 3] and np.bincount(val.labels).tolist() == [2, 2, 2]
    assert open_set(f"folder:{folder}?val=0.4&seed=3", "val").fingerprint == val.fingerprint
    other = open_set(f"folder:{root}?val=0.4&seed=4", "val")
    assert other.fingerprint != val.fingerprint and len(other) == len(val)
    assert any("6 of the 15 training images" in note for note in val.notes)
    assert check_image_set(url).ok


def test_wrong_shares_and_options_are_refused(folder, tree, tmp_path):
    for share in ("0", "1", "20", "-0.1", "x", "1e-1"):
        assert "?val=0.2" in set_refusal(f"folder:{folder}?val={share}")
    assert "?val=0.2" in set_refusal(f"folder:{folder}?val=0.2&seed=-1") and "share" in set_refusal(
        f"folder:{folder}?seed=1"
    )
    assert "given twice" in set_refusal(f"folder:{folder}?val=0.2&val=0.1")
    assert "did you mean 'val'" in set_refusal(f"folder:{folder}?vale=0.2")
    assert "no labels" in set_refusal(f"images:{folder}?val=0.2")
    assert parse_url("parquet:/data/train-?.parquet")[1] == "/data/train-?.parquet"
    lonely = tree(tmp_path / "lonely", "ant/1.jpg", "bee/1.jpg", "bee/2.jpg")
    image_sets = {split: open_set(f"folder:{lonely}?val=0.5", split) for split in ("train", "val")}
    assert image_sets["train"].labels.tolist() == [0, 1] and image_sets["val"].labels.tolist() == [1]
    assert any("1 classes with one image, 'ant'" in note for note in image_sets["val"].notes)


def table_of(folder, split="train", **columns):
    paths = sorted((folder / split).glob("*/*.jpg"))
    images = [{"bytes": path.read_bytes(), "path": path.name} for path in paths]
    return pa.table({"photo": images, "kind": [path.parent.name for path in paths], **columns})


@pytest.mark.parametrize("form", ["parquet", "hf"])
def test_columns_of_a_table_are_chosen_by_options(folder, tmp_path, form):
    root = tmp_path / form
    table = table_of(folder, caption=[f"caption {n}" for n in range(15)], weight=np.linspace(0, 2, 15))
    if form == "parquet":
        root.mkdir()
        pq.write_table(table, root / "data.parquet")
    else:
        datasets = pytest.importorskip("datasets")
        datasets.disable_progress_bars()
        datasets.Dataset(table).cast_column("photo", datasets.Image()).save_to_disk(root)
    url = f"{form}:{root}?val=0.4&image=photo"
    for split in ("train", "val"):
        image_set, expected = open_set(f"{url}&label=kind", split), open_set(f"folder:{folder}?val=0.4", split)
        assert image_set.fingerprint == expected.fingerprint
    assert "there are: photo, kind, caption, weight" in set_refusal(f"{url}&label=x")
    assert "column weight: labels such as" in set_refusal(f"{url}&label=weight")


@pytest.mark.parametrize("form", ["parquet", "hf"])
@pytest.mark.parametrize("named", [True, False])
def test_a_column_of_lists_gives_several_labels_per_image(folder, tmp_path, form, named):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    labels = [[n % 3, 2] if n % 3 < 2 else [] for n in range(15)]
    table = table_of(folder)
    label_type = datasets.ClassLabel(names=list(CLASSES)) if named else datasets.Value("string")
    values = labels if named else [[CLASSES[label] for label in row] for row in labels]
    features = datasets.Features(
        {"photo": datasets.Image(), "kind": datasets.Value("string"), "labels": datasets.Sequence(label_type)}
    )
    dataset = datasets.Dataset.from_dict(table.to_pydict() | {"labels": values}, features=features)
    root = tmp_path / form
    if form == "hf":
        dataset.save_to_disk(root)
    else:
        root.mkdir()
        dataset.to_parquet(root / "train.parquet")
    image_set = open_set(f"{form}:{root}?image=photo&label=labels", "train")
    assert image_set.classes == CLASSES and image_set.labels.shape == (15, 3)
    row_of = {path.name: n for n, path in enumerate(sorted((folder / "train").glob("*/*.jpg")))}
    for index in range(15):
        row = row_of[image_set.path(index).rpartition(":")[2]]
        assert np.flatnonzero(image_set.labels[index]).tolist() == labels[row]


def test_a_parquet_table_of_paths_is_refused_with_the_url_to_write(folder, tmp_path):
    paths = sorted((folder / "train").glob("*/*.jpg"))
    files, kinds = [str(path.relative_to(folder)) for path in paths], [path.parent.name for path in paths]
    without_bytes = pa.array(
        [{"bytes": None, "path": file} for file in files], pa.struct({"bytes": pa.binary(), "path": pa.string()})
    )
    for name, images in (("a", without_bytes), ("b", files)):
        pq.write_table(pa.table({"image": images, "label": kinds}), tmp_path / f"{name}.parquet")
        message = set_refusal(f"parquet:{tmp_path}/{name}.parquet")
        assert "folder:FOLDER?labels=TABLE.parquet" in message and len(message) < 500
        image_set = open_set(f"folder:{folder}?labels={tmp_path}/{name}.parquet", "train")
        assert image_set.fingerprint == open_set(f"folder:{folder}", "train").fingerprint


def test_rows_of_no_split_are_refused_and_those_of_another_counted(folder):
    rows = [[name, name.split("/")[1], "train" if name.startswith("train") else "val"] for name in NAMES]
    header = ["file_name", "label", "split"]

    def write(rows):
        with open(folder / "own.csv", "w", newline="") as file:
            csv.writer(file).writerows([header, *rows])
        return f"folder:{folder}?labels=own.csv"

    val = open_set(write([*rows[:-2], *([name, label, "test"] for name, label, _ in rows[-2:])]), "val")
    assert len(val) == 4 and "2 rows of split test not read: val is split val" in val.notes
    refusal = set_refusal(write([[name, label, int(split == "train")] for name, label, split in rows]), "train")
    assert "column split holds '0', '1', which is no split; write train, val or test" in refusal
