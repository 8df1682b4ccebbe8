"""Sets in larger files: parquet:, wds: and hf: give the fingerprint, subsets, pixels and errors of a folder."""

import json
import os
import pickle
import re
import shutil
import tarfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from refusals import set_refusal
from written import write_tar

from imagesets.decoding import UnreadableImage
from imagesets.schemes import parquet
from imagesets.schemes.parquet import ParquetStore
from imagesets.sets import open_set
from imagesets.stored import shards_of, with_shuffle_window

CLASSES = ("ant", "bee", "cat")
SPLITS = {"train": 4, "val": 2}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))


@pytest.fixture
def folder(tree, tmp_path) -> Path:
    """Three classes of four images in train and two in val."""
    names = [
        f"{split}/{name}/{name}-{n}.jpg" for split, count in SPLITS.items() for name in CLASSES for n in range(count)
    ]
    return tree(tmp_path / "folder", *names)


def shuffled_images(folder: Path, split: str) -> list[tuple[str, int, bytes]]:
    """Name, label and bytes of each image, in random order."""
    paths = sorted((folder / split).glob("*/*.jpg"))
    order = np.random.RandomState(0).permutation(len(paths))
    return [(paths[index].name, CLASSES.index(paths[index].parent.name), paths[index].read_bytes()) for index in order]


def as_parquet(folder: Path, root: Path, names: bool = True, texts: bool = False, group: int = 3, **options) -> Path:
    root.mkdir()
    for split, word in (("train", "train"), ("val", "validation")):
        images = shuffled_images(folder, split)
        files = [{"bytes": data, "path": f"somewhere/{name}"} for name, _, data in images]
        labels = [CLASSES[label] if texts else label for _, label, _ in images]
        table = pa.table({"image": files, "label": labels})
        feature = {
            "info": {
                "features": {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": list(CLASSES)}}
            }
        }
        if names:
            table = table.replace_schema_metadata({b"huggingface": json.dumps(feature).encode()})
        half = len(images) // 2
        for number, part in enumerate((table[:half], table[half:])):
            pq.write_table(part, root / f"{word}-{number:05d}-of-00002.parquet", row_group_size=group, **options)
    return root


def as_shards(folder: Path, root: Path, names: bool = True, kind: str = "cls") -> Path:
    root.mkdir()
    for split in SPLITS:
        images = shuffled_images(folder, split)
        for number in range(2):
            files = []
            for name, label, data in images[number::2]:
                text = str(label) if kind == "cls" else json.dumps({"label": label, "caption": "x"})
                files += [(f"deep/{name.removesuffix('.jpg')}.{kind}", text.encode()), (f"deep/{name}", data)]
            write_tar(root / f"set-{split}-{number:04d}.tar", files)
    if names:
        (root / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    return root


def as_arrow(folder: Path, root: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))})
    parts = {}
    for split, word in (("train", "train"), ("val", "validation")):
        images = shuffled_images(folder, split)
        columns = {
            "image": [{"bytes": data, "path": name} for name, _, data in images],
            "label": [label for _, label, _ in images],
        }
        parts[word] = datasets.Dataset.from_dict(columns, features=features)
    datasets.disable_progress_bars()
    datasets.DatasetDict(parts).save_to_disk(root)
    return root


FORMS = {"parquet": as_parquet, "wds": as_shards, "hf": as_arrow}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("form", FORMS)
def test_a_set_equals_its_folder_in_all_forms(form, split, folder, tmp_path):
    root = FORMS[form](folder, tmp_path / form)
    expected, image_set = open_set(f"folder:{folder}", split), open_set(f"{form}:{root}", split)
    for _ in range(2):
        assert image_set.fingerprint == expected.fingerprint and image_set.classes == expected.classes == CLASSES
        assert np.array_equal(image_set.labels, expected.labels) and len(image_set) == 3 * SPLITS[split]
        for index in (5, 0, 3):
            assert image_set.encoded(index) == expected.encoded(index)
            assert np.array_equal(np.asarray(image_set.image(index)), np.asarray(expected.image(index)))
            assert image_set.path(index).endswith(expected.images.names[index])
        limited, expected_limited = image_set.limited(4), expected.limited(4)
        assert limited.fingerprint == expected_limited.fingerprint and limited.encoded(3) == expected_limited.encoded(3)
        image_set = pickle.loads(pickle.dumps(open_set(f"{form}:{root}", split)))  # from the index, in a loader process


@pytest.mark.parametrize(("form", "shards", "size"), [("wds", 2, 6), ("parquet", 4, 3)])
def test_shards_are_byte_ranges_of_files(form, shards, size, folder, tmp_path):
    """A shard is one file or one row group: its images lie in its range, and no two ranges overlap."""
    options = {"compression": "none"} if form == "parquet" else {}
    image_set = open_set(f"{form}:{FORMS[form](folder, tmp_path / form, **options)}", "train")
    images = image_set.images
    assert [len(shard) for shard in images.shards] == [size] * shards
    assert sorted(np.concatenate(images.shards)) == list(range(12))
    ranges = [images.store.span(images.store_indices[shard]) for shard in images.shards]
    assert all(first[0] != second[0] or first[2] <= second[1] for first, second in pairwise(ranges))
    for shard, (path, start, end) in zip(images.shards, ranges, strict=True):
        content = Path(path).read_bytes()[start:end]
        assert all(image_set.encoded(index) in content for index in shard) and end <= os.path.getsize(path)
    part = image_set.subset(np.array([7, 2, 11]), "part").images
    assert {len(shard) for shard in part.shards} <= {1, 2} and sorted(np.concatenate(part.shards)) == [0, 1, 2]


def test_row_groups_of_a_shuffle_window_are_decompressed_once(folder, tmp_path, monkeypatch):
    """Images of three row groups in turn with room for one group, also after pickling for a loader process."""
    plain = open_set(f"parquet:{as_parquet(folder, tmp_path / 'tables')}", "train")
    windows = with_shuffle_window(plain, 3)
    decompressed, decompress = [], ParquetStore._decompress
    monkeypatch.setattr(parquet, "CACHED_BYTES", 0)
    monkeypatch.setattr(
        ParquetStore, "_decompress", lambda store, *key: decompressed.append(key) or decompress(store, *key)
    )
    for images, times in ((plain, 9), (pickle.loads(pickle.dumps(windows)), 3)):
        decompressed.clear()
        assert all(images.encoded(index) for index in np.stack(shards_of(plain)[:3], axis=1).ravel())
        assert len(decompressed) == times


def test_hf_reads_parquet_files_as_load_dataset_does(folder, tmp_path):
    pytest.importorskip("datasets")
    root = as_parquet(folder, tmp_path / "tables")
    assert open_set(f"hf:{root}", "val").fingerprint == open_set(f"folder:{folder}", "val").fingerprint


def test_labels_may_be_texts_or_numbers_without_names(folder, tmp_path):
    texts = open_set(f"parquet:{as_parquet(folder, tmp_path / 'texts', names=False, texts=True)}", "val")
    assert texts.fingerprint == open_set(f"folder:{folder}", "val").fingerprint
    bare = open_set(f"parquet:{as_parquet(folder, tmp_path / 'bare', names=False)}", "val")
    assert bare.classes == ("0", "1", "2") and np.array_equal(bare.labels, texts.labels)
    shards = open_set(f"wds:{as_shards(folder, tmp_path / 'json', names=False, kind='json')}", "train")
    assert shards.classes == ("0", "1", "2") and "classes are numbers" in shards.notes[1]


def test_names_in_the_metadata_of_a_table_are_for_its_own_numbers(folder, tmp_path):
    """Columns replaced by texts keep the metadata, and the tables of two sets may number their classes differently."""
    texts = open_set(f"parquet:{as_parquet(folder, tmp_path / 'texts', texts=True)}", "val")
    assert texts.fingerprint == open_set(f"folder:{folder}", "val").fingerprint
    root = as_parquet(folder, tmp_path / "two")
    path = root / "train-00001-of-00002.parquet"
    table = pq.read_table(path)
    (metadata,) = table.schema.metadata.values()
    changed = metadata.replace(CLASSES[0].encode(), b"another")
    pq.write_table(table.replace_schema_metadata({b"huggingface": changed}), path)
    assert f"{path} names other classes" in set_refusal(f"parquet:{root}")


def test_images_without_labels_are_for_pretraining_alone(folder, tmp_path):
    root = tmp_path / "bare"
    root.mkdir()
    for split in SPLITS:
        pq.write_table(
            pa.table({"image": [data for _, _, data in shuffled_images(folder, split)]}), root / f"{split}.parquet"
        )
    image_set = open_set(f"parquet:{root}", "train")
    assert image_set.classes == () and set(image_set.labels) == {-1} and image_set.image(3).mode == "RGB"
    assert "no labels" in set_refusal(f"parquet:{root}", "val")


def test_unreadable_shards_and_tables_are_refused(folder, tmp_path):
    root = as_shards(folder, tmp_path / "shards")
    assert "no file *.parquet there" in set_refusal(f"parquet:{root}")
    assert "no path after the colon" in set_refusal("wds:")
    (root / "set-train-0000.tar").write_bytes(b"\x1f\x8b no archive")
    message = set_refusal(f"wds:{root}")
    assert "set-train-0000.tar:" in message and "uncompressed tar file" in message
    for path in root.glob("set-val-*"):
        path.rename(root / path.name.replace("val", "other"))
    assert "files *.tar has val or validation or valid or" in set_refusal(f"wds:{root}", "val")
    tables = as_parquet(folder, tmp_path / "tables")
    pq.write_table(pa.table({"picture": [b""], "label": [0]}), tables / "train-00000-of-00002.parquet")
    message = set_refusal(f"parquet:{tables}")
    assert "'picture', 'label'" in message and "?image=NAME" in message
    (tables / "train-00000-of-00002.parquet").write_bytes(b"nothing")
    assert "train-00000-of-00002.parquet is no Parquet table" in set_refusal(f"parquet:{tables}")
    (tmp_path / "empty").mkdir()
    assert "datasets cannot load it" in set_refusal(f"hf:{tmp_path / 'empty'}")


def test_labels_that_do_not_fit_classes_txt_are_refused(folder, tmp_path):
    root = as_shards(folder, tmp_path / "shards")
    (root / "classes.txt").write_text("ant\nbee\n")
    assert "labels from 0 to 2, and 2 classes" in set_refusal(f"wds:{root}")
    (root / "classes.txt").write_text("ant\nbee\ncat\ndog\n")
    assert "no image of class 'dog' in train" in set_refusal(f"wds:{root}")
    write_tar(root / "set-train-0001.tar", [("deep/lonely.jpg", b"")], mode="a")
    assert "1 of 7 images have no label, such as deep/lonely.cls" in set_refusal(f"wds:{root}")


@pytest.mark.parametrize(
    ("ending", "label"),
    [
        ("cls", b"400000000000"),  # as many names of classes would fill the memory
        ("cls", b"1.9"),
        ("json", b'{"label": 1.9}'),
        ("json", b"[" * 4000),
    ],
)
def test_a_label_in_a_shard_that_is_no_class_is_refused(ending, label, encode, tmp_path):
    write_tar(tmp_path / "train.tar", [(f"x.{ending}", label), ("x.jpg", encode())])
    message = set_refusal(f"wds:{tmp_path}")
    assert f"x.{ending} holds no number of a class" in message or "label 400000000000 of only 1 images" in message


@pytest.mark.parametrize("label", [400000000000, 1e300, 1.9, 1.0])
@pytest.mark.parametrize("form", ["parquet", "hf"])
def test_a_label_in_a_table_that_is_no_class_is_refused(form, label, encode, tmp_path):
    pq.write_table(
        pa.table({"image": [{"bytes": encode(), "path": "a.jpg"}], "label": [label]}), tmp_path / "train.parquet"
    )
    assert "column label: label" in set_refusal(f"{form}:{tmp_path}")


def test_tar_headers_and_images_above_the_limits_are_refused(encode, tmp_path):
    def write_shard(name: str, kind: bytes, size: int) -> None:
        """A sparse file of 4 TB."""
        entry, label = tarfile.TarInfo("x.png"), tarfile.TarInfo("x.cls")
        entry.type, entry.size, label.size = kind, size, 1
        (tmp_path / name).mkdir()
        with open(tmp_path / name / "train.tar", "wb") as file:
            file.write(label.tobuf() + b"0".ljust(512, b"\0") + entry.tobuf(tarfile.GNU_FORMAT))
            file.truncate(1 << 42)

    write_shard("header", tarfile.XHDTYPE, 10**11)
    assert "train.tar: a header of 100000000000 bytes" in set_refusal(f"wds:{tmp_path / 'header'}")
    write_shard("image", tarfile.REGTYPE, 10**12)
    with pytest.raises(UnreadableImage, match=r"x\.png: .*1,000,000,000,000 bytes, more than the limit"):
        open_set(f"wds:{tmp_path / 'image'}", "train").image(0)


def test_a_pipe_among_shards_is_named(folder, tmp_path):
    root = as_shards(folder, tmp_path / "shards")
    os.mkfifo(root / "set-train-0002.tar")
    assert "set-train-0002.tar is no regular file" in set_refusal(f"wds:{root}")


@pytest.mark.parametrize("form", ["parquet", "wds"])
def test_a_broken_image_is_named(form, folder, tmp_path):
    broken = folder / "train" / "bee" / "bee-1.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    root = FORMS[form](folder, tmp_path / form)
    image_set = open_set(f"{form}:{root}", "train")
    index = list(image_set.images.names.take(np.arange(len(image_set)))).index("bee/bee-1.jpg")
    with pytest.raises(UnreadableImage, match=r"bee/bee-1\.jpg: cannot be read as an image"):
        image_set.image(index)


def test_shards_are_indexed_once_and_again_when_a_file_changes(folder, tmp_path, monkeypatch):
    root = as_shards(folder, tmp_path / "shards")
    opened, original = [], tarfile.open
    monkeypatch.setattr(tarfile, "open", lambda **options: (opened.append(options), original(**options))[1])
    first = open_set(f"wds:{root}", "train")
    assert len(opened) == 2 and open_set(f"wds:{root}", "train").fingerprint == first.fingerprint and len(opened) == 2
    changed = root / "set-train-0000.tar"
    os.utime(changed, ns=(1, 1))
    open_set(f"wds:{root}", "train")
    assert len(opened) == 4
    for index_file in (tmp_path / "cache").rglob("*.npz"):
        index_file.write_bytes(b"damaged")
    assert open_set(f"wds:{root}", "train").fingerprint == first.fingerprint and len(opened) == 6


def test_two_images_of_one_name_are_refused(folder, tmp_path):
    root = as_parquet(folder, tmp_path / "tables")
    second = pq.read_table(root / "train-00001-of-00002.parquet")
    pq.write_table(pa.concat_tables([second, second]), root / "train-00001-of-00002.parquet")
    message = set_refusal(f"parquet:{root}")
    assert "two images of train are called 'ant/ant-" in message and "rename" in message


def test_a_truncated_shard_is_reported(folder, tmp_path):
    root = as_shards(folder, tmp_path / "shards")
    image_set = open_set(f"wds:{root}", "val")
    for path in root.glob("set-val-*.tar"):
        with open(path, "r+b") as file:
            file.truncate(600)
    with pytest.raises(UnreadableImage, match="copy the shard again"):
        for index in range(len(image_set)):
            image_set.image(index)


@pytest.mark.parametrize(
    ("names", "named"),
    [
        (("a/x.jpg", "a/x.cls", "a/x.jpg"), "x.jpg and x.jpg .* a/x"),
        (("x.jpg", "x.cls", "y.jpg", "y.cls", "x.PNG"), "x.jpg and x.PNG"),
        (("x.jpg", "x.cls", "x.json"), "x has the labels 0 and 1"),
        (("x.jpg", "x.cls", "x.cls"), None),
    ],
)
def test_repeated_keys_of_a_shard_are_refused(names, named, encode, tmp_path):
    contents = {".cls": b"0", ".json": b'{"label": 1}'}
    write_tar(tmp_path / "train.tar", [(name, contents.get(Path(name).suffix) or encode()) for name in names])
    if named:
        assert re.search(named, set_refusal(f"wds:{tmp_path}"))
    else:
        assert len(open_set(f"wds:{tmp_path}", "train")) == 1


def test_hidden_shards_and_images_are_left_out(folder, tmp_path, encode):
    """As macOS's tar and zip add them."""
    root = as_shards(folder, tmp_path / "shards")
    before = open_set(f"wds:{root}", "train")
    hidden = [("deep/._train-ant-0.jpg", b""), ("__MACOSX/x.jpg", b"")]
    write_tar(root / "set-train-0000.tar", hidden, mode="a")
    (root / "__MACOSX").mkdir()
    shutil.copy(root / "set-train-0001.tar", root / "__MACOSX/set-train-0001.tar")
    after = open_set(f"wds:{root}", "train")
    assert after.fingerprint == before.fingerprint and "2 hidden files in the shards are left out" in after.notes
    for shard in root.glob("*.tar"):
        shard.unlink()
    assert "no file *.tar there" in set_refusal(f"wds:{root}")


@pytest.mark.parametrize("name", ["dataset_info.json", "train/state.json"])
def test_a_pipe_in_a_folder_that_datasets_reads_is_named(name, folder, tmp_path):
    root = FORMS["hf"](folder, tmp_path / "hf")
    (root / name).unlink(missing_ok=True)
    (root / name).parent.mkdir(exist_ok=True)
    os.mkfifo(root / name)
    assert f"{root / name}: a pipe" in set_refusal(f"hf:{root}")
