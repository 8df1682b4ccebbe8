"""Images with a table of labels, sets without a validation split, and names of folders and columns as people have them:
the same sets as their class folders, or one line that names the option."""

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


def flat(folder, root, places, table, rows, header=("file_name", "label")):
    """Copies of the images, at the place that `places` says for a split, and a CSV table."""
    for name in NAMES:
        split, _, file = name.split("/")
        target = root / places[split] / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((folder / name).read_bytes())
    with open(root / table, "w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return root


def labelled(split=None):
    """File and class of each image, shuffled."""
    found = [name.split("/") for name in NAMES]
    order = np.random.RandomState(1).permutation(len(found))
    return [(found[at][2], found[at][1]) for at in order if split in (None, found[at][0])]


def same(url, folder, splits=("train", "val")):
    for split in splits:
        found, wanted = open_set(url, split), open_set(f"folder:{folder}", split)
        assert found.fingerprint == wanted.fingerprint and found.classes == wanted.classes == CLASSES
        assert [found.encoded(index) for index in (0, -1 % len(found))] == [
            wanted.encoded(index) for index in (0, -1 % len(wanted))
        ]


def test_metadata_of_hugging_faces_imagefolder(folder, tmp_path):
    root = flat(
        folder, tmp_path / "x", {"train": "train", "val": "Validation"}, "train/metadata.csv", labelled("train")
    )
    lines = [json.dumps({"file_name": file, "label": name, "caption": "a, b"}) for file, name in labelled("val")]
    (root / "Validation/metadata.jsonl").write_text("\n".join(lines))
    same(f"folder:{root}", folder)


def test_one_table_whose_paths_say_the_split(folder, tmp_path):
    rows = [(f"{'train' if 'train' in file else 'valid'}/{file}", name) for file, name in labelled()]
    root = flat(folder, tmp_path / "x", {"train": "train", "val": "valid"}, "labels.csv", rows, ("path", "class"))
    same(f"folder:{root}", folder)


def test_tables_named_by_their_split_with_names_without_ending_and_semicolons(folder, tmp_path):
    rows = [(file[:-4], name) for file, name in labelled("train")]
    root = flat(folder, tmp_path / "x", {"train": "images", "val": "images"}, "train.csv", rows, ("id", "breed"))
    text = "\n".join(["id;breed", *(f"{file[:-4]};{name}" for file, name in labelled("val"))])
    (root / "val.csv").write_text("\ufeff" + text + "\n")
    (root / "test.csv").write_text("id\nnone\n")
    same(f"folder:{root}", folder)
    notes = open_set(f"folder:{root}", "val").notes
    assert any("test.csv has no column of labels" in note for note in notes)


def test_files_of_two_splits_with_the_same_names(tree, tmp_path):
    root = tree(tmp_path / "x", *(f"{split}/{n}.jpg" for split in ("train", "val") for n in range(4)))
    for split, column, shift in (("train", "image_id", 0), ("val", "image_id", 1)):
        rows = [f"{n},{'ab'[(n + shift) % 2]}" for n in range(4)]
        (root / f"{split}.csv").write_text("\n".join([f"{column},label", *rows]))
    for split, shift in (("train", 0), ("val", 1)):
        found = open_set(f"folder:{root}", split)
        assert all(found.path(index).startswith(f"{root}/{split}/") for index in range(4))
        assert [(int(found.path(index)[-5]) + shift) % 2 for index in range(4)] == found.labels.tolist()


def test_a_column_says_the_split_and_options_name_columns_and_table(folder, tmp_path):
    rows = [(file, name, "TRAIN" if "train" in file else "Test", "9") for file, name in labelled()]
    root = flat(
        folder, tmp_path / "x", {"train": "images", "val": "images"}, "my list.csv", rows, ("F", "what", "split", "n")
    )
    (root / "other.csv").write_text("nothing\n")
    assert "?labels=NAME" in set_refusal(f"folder:{root}")
    assert "?image=NAME" in set_refusal(f"folder:{root}?labels=my list.csv")
    assert "did you mean 'what'" in set_refusal(f"folder:{root}?labels=my list.csv&image=F&label=wha")
    same(f"folder:{root}?labels=my list.csv&image=F&label=what", folder)
    assert "test is used as val" in " ".join(
        open_set(f"folder:{root}?labels=my list.csv&image=F&label=what", "val").notes
    )


def test_numbers_are_classes_in_the_order_of_numbers_and_fractions_are_none(folder, tmp_path):
    rows = [(file, {"ant": "2.0", "bee": "10", "cat": "-1"}[name]) for file, name in labelled()]
    root = flat(folder, tmp_path / "x", {"train": ".", "val": "."}, "labels.csv", rows)
    assert open_set(f"folder:{root}", "train").classes == ("-1", "2", "10")
    for value, said in (("1.9", "1.9 is not a class label"), ("", "1 of 21 rows have no label")):
        flat(folder, root, {"train": ".", "val": "."}, "labels.csv", [*rows[:-1], (rows[-1][0], value)])
        assert said in set_refusal(f"folder:{root}")


@pytest.mark.parametrize("header", [("file", "ant", "bee", "cat"), ("file", "label")])
def test_several_labels_an_image(folder, tmp_path, header):
    shown = {file: {name, "cat"} for file, name in labelled()}
    one = len(header) == 2
    rows = [
        (file, "|".join(sorted(names))) if one else (file, *(int(name in names) for name in CLASSES))
        for file, names in shown.items()
    ]
    root = flat(folder, tmp_path / "x", {"train": "train", "val": "val"}, "labels.csv", rows, header)
    for split, count in (("train", 15), ("val", 6)):
        found = open_set(f"folder:{root}" + "?separator=bar" * one, split)
        assert found.classes == CLASSES and len(found) == count and found.has_several_labels
        for index in range(count):
            file = found.path(index).rpartition("/")[2]
            assert {CLASSES[at] for at in np.flatnonzero(found.labels[index])} == shown[file]


def test_columns_of_which_one_is_1_are_one_label(folder, tmp_path):
    rows = [(file, *(f"{float(name == each)}" for each in CLASSES), 40) for file, name in labelled()]
    header = ("image", *CLASSES, "age")
    root = flat(folder, tmp_path / "x", {"train": "train", "val": "val"}, "GroundTruth.csv", rows, header)
    same(f"folder:{root}", folder)


def test_rows_without_images_and_images_without_rows(folder, tmp_path):
    root = flat(folder, tmp_path / "x", {"train": "train", "val": "val"}, "labels.csv", labelled()[2:])
    assert "2 images have no label and are not read" in open_set(f"folder:{root}", "train").notes
    flat(folder, root, {"train": "train", "val": "val"}, "labels.csv", [*labelled(), ("gone.jpg", "ant")])
    assert "1 of 22 rows name no image" in (said := set_refusal(f"folder:{root}")) and "gone.jpg in row 22" in said
    flat(folder, root, {"train": "train", "val": "val"}, "labels.csv", [*labelled(), labelled()[0]])
    assert "has two rows" in set_refusal(f"folder:{root}")
    (root / "val/train-ant-0.jpg").write_bytes(b"another")
    flat(folder, root, {"train": "train", "val": "val"}, "labels.csv", labelled())
    assert "train/train-ant-0.jpg" in (said := set_refusal(f"folder:{root}")) and "val/train-ant-0.jpg" in said


def test_paths_that_begin_elsewhere_and_tables_that_are_none(folder, tmp_path):
    root = tmp_path / "x"
    rows = [(f"{root}/{'train' if 'train' in file else 'val'}/{file}", name) for file, name in labelled()]
    rows = [
        (path.replace(f"{root}/", "").replace("/", "\\"), name) if n % 2 else (path, name)
        for n, (path, name) in enumerate(rows)
    ]
    same(f"folder:{flat(folder, root, {'train': 'train', 'val': 'val'}, 'labels.csv', rows)}", folder)
    url = f"folder:{root}?labels=labels.csv"
    for text, said in (
        ("", "has no rows"),
        ("file,label\n", "has no rows"),
        ("a.jpg,ant\nb.jpg,bee\n", "the first line must name the columns"),
        ("file,label\na,b,c\n", "line 2 has 3 values"),
        ("file,label\nx\udcff,b\n", "no table of labels"),
        ("file,label\n" + "\n".join(f"{file},{'|'.join(CLASSES)}" for file, _ in labelled()[:-1]), None),
    ):
        (root / "labels.csv").write_text(text, errors="surrogateescape")
        if said:
            assert said in set_refusal(url)
    assert any("separator=bar" in note for note in open_set(url, "train").notes)
    (root / "labels.csv").write_text("file,label\n" + "\n".join(f"{file}," for file, _ in labelled()))
    assert "21 of 21 rows have no label" in set_refusal(url) and "separator=bar" in set_refusal(url)
    (root / "labels.jsonl").write_text("[" * 100_000)
    assert "labels.jsonl: is no table of labels" in set_refusal(f"folder:{root}?labels=labels.jsonl")
    for label in ({"a": 1}, {}):
        (root / "labels.jsonl").write_text(json.dumps({"file": labelled()[0][0], "label": label}))
        assert "is no class" in set_refusal(f"folder:{root}?labels=labels.jsonl")


def test_class_folders_come_before_tables(folder):
    before = open_set(f"folder:{folder}", "train").fingerprint
    (folder / "train/metadata.csv").write_text("file_name,label\nant/train-ant-0.jpg,bee\n")
    (folder / "labels.csv").write_text("file_name,label\n")
    assert open_set(f"folder:{folder}", "train").fingerprint == before


@pytest.mark.parametrize(("train", "val"), [("Train", "Validation"), ("training", "valid"), ("TRAIN", "Test")])
def test_folders_of_splits_as_people_call_them(folder, tmp_path, train, val):
    root = tmp_path / "x"
    root.mkdir()
    for name, split in ((train, "train"), (val, "val")):
        (root / name).symlink_to(folder / split)
    same(f"folder:{root}", folder)


@pytest.mark.parametrize("place", ["whole", "in train"])  # class folders alone, or in train/
def test_a_part_of_each_class_is_held_out_for_validation(folder, tmp_path, place):
    root = tmp_path / place.replace(" ", "-")
    if place == "in train":
        root.mkdir()
    (root / "train" if place == "in train" else root).symlink_to(folder / "train")
    url = f"folder:{root}?val=0.4&seed=3"
    whole, train, val = (open_set(*each) for each in ((f"folder:{folder}", "train"), (url, "train"), (url, "val")))
    assert "?val=0.2" in set_refusal(f"folder:{root}", "val")
    files = [{opened.encoded(index) for index in range(len(opened))} for opened in (whole, train, val)]
    assert files[1] | files[2] == files[0] and not files[1] & files[2] and train.url == val.url == url
    assert np.bincount(train.labels).tolist() == [3, 3, 3] and np.bincount(val.labels).tolist() == [2, 2, 2]
    assert open_set(f"folder:{folder}?val=0.4&seed=3", "val").fingerprint == val.fingerprint
    other = open_set(f"folder:{root}?val=0.4&seed=4", "val")
    assert other.fingerprint != val.fingerprint and len(other) == len(val)
    assert any("6 of the 15 training images" in note for note in val.notes)
    assert check_image_set(url).ok


def test_what_cannot_be_held_out_is_one_line(folder, tree, tmp_path):
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
    found = {split: open_set(f"folder:{lonely}?val=0.5", split) for split in ("train", "val")}
    assert found["train"].labels.tolist() == [0, 1] and found["val"].labels.tolist() == [1]
    assert any("1 classes with one image, 'ant'" in note for note in found["val"].notes)


def table_of(folder, split="train", **columns):
    paths = sorted((folder / split).glob("*/*.jpg"))
    images = [{"bytes": path.read_bytes(), "path": path.name} for path in paths]
    return pa.table({"photo": images, "kind": [path.parent.name for path in paths], **columns})


@pytest.mark.parametrize("form", ["parquet", "hf"])
def test_columns_are_chosen(folder, tmp_path, form):
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
        found, wanted = open_set(f"{url}&label=kind", split), open_set(f"folder:{folder}?val=0.4", split)
        assert found.fingerprint == wanted.fingerprint
    assert "there are: photo, kind, caption, weight" in set_refusal(f"{url}&label=x")
    assert "column weight: labels such as" in set_refusal(f"{url}&label=weight")


@pytest.mark.parametrize("form", ["parquet", "hf"])
@pytest.mark.parametrize("named", [True, False])
def test_lists_are_several_labels(folder, tmp_path, form, named):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    values = [[n % 3, 2] if n % 3 < 2 else [] for n in range(15)]
    table = table_of(folder)
    inner = datasets.ClassLabel(names=list(CLASSES)) if named else datasets.Value("string")
    values = values if named else [[CLASSES[label] for label in each] for each in values]
    features = datasets.Features(
        {"photo": datasets.Image(), "kind": datasets.Value("string"), "labels": datasets.Sequence(inner)}
    )
    made = datasets.Dataset.from_dict(table.to_pydict() | {"labels": values}, features=features)
    root = tmp_path / form
    if form == "hf":
        made.save_to_disk(root)
    else:
        root.mkdir()
        made.to_parquet(root / "train.parquet")
    found = open_set(f"{form}:{root}?image=photo&label=labels", "train")
    assert found.classes == CLASSES and found.labels.shape == (15, 3)
    order = {path.name: n for n, path in enumerate(sorted((folder / "train").glob("*/*.jpg")))}
    for index in range(15):
        n = order[found.path(index).rpartition(":")[2]]
        assert np.flatnonzero(found.labels[index]).tolist() == ([n % 3, 2] if n % 3 < 2 else [])


def test_a_parquet_table_of_paths_names_the_way_that_works(folder, tmp_path):
    paths = sorted((folder / "train").glob("*/*.jpg"))
    files, kinds = [str(path.relative_to(folder)) for path in paths], [path.parent.name for path in paths]
    nothing = pa.array(
        [{"bytes": None, "path": file} for file in files], pa.struct({"bytes": pa.binary(), "path": pa.string()})
    )
    for name, images in (("a", nothing), ("b", files)):
        pq.write_table(pa.table({"image": images, "label": kinds}), tmp_path / f"{name}.parquet")
        said = set_refusal(f"parquet:{tmp_path}/{name}.parquet")
        assert "folder:FOLDER?labels=TABLE.parquet" in said and len(said) < 500
        found = open_set(f"folder:{folder}?labels={tmp_path}/{name}.parquet", "train")
        assert found.fingerprint == open_set(f"folder:{folder}", "train").fingerprint


def test_a_check_lists_some_unreadable_images_and_counts_the_rest(folder):
    from imagesets.check import MAX_LISTED, render

    for number in range(MAX_LISTED + 7):
        (folder / f"train/ant/broken{number}.jpg").write_bytes(b"none")
    lines = render(check_image_set(f"folder:{folder}")).split("\n")
    assert sum("unreadable: " in line for line in lines) == MAX_LISTED and "    and 7 more" in lines
