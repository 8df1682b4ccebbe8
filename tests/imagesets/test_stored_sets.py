"""Sets inside larger files: parquet:, wds: and hf: give the fingerprint, subsets, pixels and errors of a folder."""

import io
import json
import os
import pickle
import tarfile
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from refusals import set_refusal

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
    """Three classes, four and two images each."""
    names = [
        f"{split}/{name}/{name}-{n}.jpg" for split, count in SPLITS.items() for name in CLASSES for n in range(count)
    ]
    return tree(tmp_path / "folder", *names)


def rows(folder: Path, split: str) -> list[tuple[str, int, bytes]]:
    """Name, label and bytes of each image, shuffled."""
    paths = sorted((folder / split).glob("*/*.jpg"))
    order = np.random.RandomState(0).permutation(len(paths))
    return [(paths[at].name, CLASSES.index(paths[at].parent.name), paths[at].read_bytes()) for at in order]


def as_parquet(folder: Path, root: Path, names: bool = True, texts: bool = False, group: int = 3, **options) -> Path:
    root.mkdir()
    for split, word in (("train", "train"), ("val", "validation")):
        found = rows(folder, split)
        images = pa.array([{"bytes": data, "path": f"somewhere/{name}"} for name, _, data in found])
        labels = pa.array([CLASSES[label] if texts else label for _, label, _ in found])
        table = pa.table({"image": images, "label": labels})
        feature = {
            "info": {
                "features": {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": list(CLASSES)}}
            }
        }
        if names:
            table = table.replace_schema_metadata({b"huggingface": json.dumps(feature).encode()})
        half = len(found) // 2
        for number, part in enumerate((table[:half], table[half:])):
            pq.write_table(part, root / f"{word}-{number:05d}-of-00002.parquet", row_group_size=group, **options)
    return root


def as_shards(folder: Path, root: Path, names: bool = True, kind: str = "cls") -> Path:
    root.mkdir()
    for split in SPLITS:
        found = rows(folder, split)
        for number in range(2):
            with tarfile.open(root / f"set-{split}-{number:04d}.tar", "w") as archive:
                for name, label, data in found[number::2]:
                    key = name.removesuffix(".jpg")
                    text = str(label) if kind == "cls" else json.dumps({"label": label, "caption": "x"})
                    for part, content in ((f"{key}.{kind}", text.encode()), (name, data)):
                        entry = tarfile.TarInfo(f"deep/{part}")
                        entry.size = len(content)
                        archive.addfile(entry, io.BytesIO(content))
    if names:
        (root / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    return root


def as_arrow(folder: Path, root: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))})
    parts = {}
    for split, word in (("train", "train"), ("val", "validation")):
        found = rows(folder, split)
        columns = {
            "image": [{"bytes": data, "path": name} for name, _, data in found],
            "label": [row[1] for row in found],
        }
        parts[word] = datasets.Dataset.from_dict(columns, features=features)
    datasets.disable_progress_bars()
    datasets.DatasetDict(parts).save_to_disk(root)
    return root


FORMS = {"parquet": as_parquet, "wds": as_shards, "hf": as_arrow}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("form", FORMS)
def test_a_set_is_the_same_in_all_forms(form, split, folder, tmp_path):
    root = FORMS[form](folder, tmp_path / form)
    wanted, found = open_set(f"folder:{folder}", split), open_set(f"{form}:{root}", split)
    for _ in range(2):
        assert found.fingerprint == wanted.fingerprint and found.classes == wanted.classes == CLASSES
        assert np.array_equal(found.labels, wanted.labels) and len(found) == 3 * SPLITS[split]
        for index in (5, 0, 3):
            assert found.encoded(index) == wanted.encoded(index)
            assert np.array_equal(np.asarray(found.image(index)), np.asarray(wanted.image(index)))
            assert found.path(index).endswith(wanted.images.names[index])
        some = [each.limited(4) for each in (found, wanted)]
        assert some[0].fingerprint == some[1].fingerprint and some[0].encoded(3) == some[1].encoded(3)
        found = pickle.loads(pickle.dumps(open_set(f"{form}:{root}", split)))  # from the index, in a loader process


def test_as_many_row_groups_are_kept_as_memory_allows(folder, tmp_path, monkeypatch):
    url = f"parquet:{as_parquet(folder, tmp_path / 'tables')}"
    for allowed, groups in ((1 << 20, 4), (0, 1)):
        monkeypatch.setattr(parquet, "CACHED_BYTES", allowed)
        found = open_set(url, "train")
        wanted = [open_set(f"folder:{folder}", "train").encoded(index) for index in range(len(found))]
        assert [found.encoded(index) for index in range(len(found))] == wanted
        assert len(found.images.store.cache.groups) == groups


@pytest.mark.parametrize(("form", "shards", "size"), [("wds", 2, 6), ("parquet", 4, 3)])
def test_shards_are_stretches_of_files(form, shards, size, folder, tmp_path):
    """One file, or one row group, each: its images are in its stretch, and no two stretches overlap."""
    plain = {"compression": "none"} if form == "parquet" else {}
    found = open_set(f"{form}:{FORMS[form](folder, tmp_path / form, **plain)}", "train")
    images = found.images
    assert [len(shard) for shard in images.shards] == [size] * shards
    assert sorted(np.concatenate(images.shards)) == list(range(12))
    stretches = [images.store.span(images.store_indices[shard]) for shard in images.shards]
    assert all(first[0] != second[0] or first[2] <= second[1] for first, second in pairwise(stretches))
    for shard, (path, start, end) in zip(images.shards, stretches, strict=True):
        held = Path(path).read_bytes()[start:end]
        assert all(found.encoded(index) in held for index in shard) and end <= os.path.getsize(path)
    part = found.subset(np.array([7, 2, 11]), "part").images
    assert {len(shard) for shard in part.shards} <= {1, 2} and sorted(np.concatenate(part.shards)) == [0, 1, 2]


def test_row_groups_of_a_window_are_decompressed_once(folder, tmp_path, monkeypatch):
    """Images of three row groups in turn, where memory is for one group; after pickling for a loader process, too."""
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


def test_parquet_files_that_load_dataset_reads(folder, tmp_path):
    pytest.importorskip("datasets")
    root = as_parquet(folder, tmp_path / "tables")
    assert open_set(f"hf:{root}", "val").fingerprint == open_set(f"folder:{folder}", "val").fingerprint


def test_labels_as_texts_and_as_bare_numbers(folder, tmp_path):
    texts = open_set(f"parquet:{as_parquet(folder, tmp_path / 'texts', names=False, texts=True)}", "val")
    assert texts.fingerprint == open_set(f"folder:{folder}", "val").fingerprint
    bare = open_set(f"parquet:{as_parquet(folder, tmp_path / 'bare', names=False)}", "val")
    assert bare.classes == ("0", "1", "2") and np.array_equal(bare.labels, texts.labels)
    shards = open_set(f"wds:{as_shards(folder, tmp_path / 'json', names=False, kind='json')}", "train")
    assert shards.classes == ("0", "1", "2") and "classes are numbers" in shards.notes[1]


def test_images_without_labels_are_for_pretraining_alone(folder, tmp_path):
    root = tmp_path / "bare"
    root.mkdir()
    for split in SPLITS:
        pq.write_table(pa.table({"image": [data for _, _, data in rows(folder, split)]}), root / f"{split}.parquet")
    found = open_set(f"parquet:{root}", "train")
    assert found.classes == () and set(found.labels) == {-1} and found.image(3).mode == "RGB"
    assert "no labels" in set_refusal(f"parquet:{root}", "val")


def test_what_cannot_be_read_is_one_line(folder, tmp_path):
    root = as_shards(folder, tmp_path / "shards")
    assert "no file *.parquet there" in set_refusal(f"parquet:{root}")
    assert "no path after the colon" in set_refusal("wds:")
    (root / "set-train-0000.tar").write_bytes(b"\x1f\x8b no archive")
    assert "set-train-0000.tar:" in (said := set_refusal(f"wds:{root}")) and "uncompressed tar file" in said
    for path in root.glob("set-val-*"):
        path.rename(root / path.name.replace("val", "other"))
    assert "files *.tar has val or validation or valid or" in set_refusal(f"wds:{root}", "val")
    tables = as_parquet(folder, tmp_path / "tables")
    pq.write_table(pa.table({"picture": [b""], "label": [0]}), tables / "train-00000-of-00002.parquet")
    assert "'picture', 'label'" in (said := set_refusal(f"parquet:{tables}")) and "?image=NAME" in said
    (tables / "train-00000-of-00002.parquet").write_bytes(b"nothing")
    assert "train-00000-of-00002.parquet is no Parquet table" in set_refusal(f"parquet:{tables}")
    (tmp_path / "empty").mkdir()
    assert "datasets cannot load it" in set_refusal(f"hf:{tmp_path / 'empty'}")


def test_wrong_labels_are_one_line(folder, tmp_path):
    root = as_shards(folder, tmp_path / "shards")
    (root / "classes.txt").write_text("ant\nbee\n")
    assert "labels from 0 to 2, and 2 classes" in set_refusal(f"wds:{root}")
    (root / "classes.txt").write_text("ant\nbee\ncat\ndog\n")
    assert "no image of class 'dog' in train" in set_refusal(f"wds:{root}")
    with tarfile.open(root / "set-train-0001.tar", "a") as archive:
        entry = tarfile.TarInfo("deep/lonely.jpg")
        archive.addfile(entry, io.BytesIO())
    assert "1 of 7 images have no label, such as deep/lonely.cls" in set_refusal(f"wds:{root}")


@pytest.mark.parametrize(
    ("ending", "label"),
    [
        ("cls", b"400000000000"),  # as many names of classes would fill the memory
        ("cls", b"9" * 30),
        ("cls", b"1e400"),
        ("cls", b"1.9"),
        ("json", b'{"label": 1.9}'),
        ("json", b'{"label": 1.0}'),
        ("json", b'{"label": 1e400}'),
        ("json", b'{"label": true}'),
        ("json", b'{"label": ' + b"9" * 30 + b"}"),
        ("json", b"[" * 4000),
    ],
)
def test_a_label_that_is_no_class_is_one_line(ending, label, encode, tmp_path):
    with tarfile.open(tmp_path / "train.tar", "w") as archive:
        for name, content in ((f"x.{ending}", label), ("x.jpg", encode())):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    said = set_refusal(f"wds:{tmp_path}")
    assert f"x.{ending} holds no number of a class" in said or "label 400000000000 of only 1 images" in said


@pytest.mark.parametrize("label", [400000000000, 1e300, 1.9, 1.0])
@pytest.mark.parametrize("form", ["parquet", "hf"])
def test_a_label_in_a_table_that_is_no_class_is_one_line(form, label, encode, tmp_path):
    pq.write_table(
        pa.table({"image": [{"bytes": encode(), "path": "a.jpg"}], "label": [label]}), tmp_path / "train.parquet"
    )
    assert "column label: label" in set_refusal(f"{form}:{tmp_path}")


def test_tar_headers_and_images_beyond_the_limits_are_one_line(encode, tmp_path):
    def shard(name: str, kind: bytes, size: int) -> None:
        """A file of 4 TB, nearly all of it a hole."""
        entry, label = tarfile.TarInfo("x.png"), tarfile.TarInfo("x.cls")
        entry.type, entry.size, label.size = kind, size, 1
        (tmp_path / name).mkdir()
        with open(tmp_path / name / "train.tar", "wb") as file:
            file.write(label.tobuf() + b"0".ljust(512, b"\0") + entry.tobuf(tarfile.GNU_FORMAT))
            file.truncate(1 << 42)

    shard("header", tarfile.XHDTYPE, 10**11)
    assert "train.tar: a header of 100000000000 bytes" in set_refusal(f"wds:{tmp_path / 'header'}")
    shard("image", tarfile.REGTYPE, 10**12)
    with pytest.raises(UnreadableImage, match=r"x\.png: .*1,000,000,000,000 bytes, more than the limit"):
        open_set(f"wds:{tmp_path / 'image'}", "train").image(0)


def test_a_pipe_among_shards_is_named(folder, tmp_path):
    root = as_shards(folder, tmp_path / "shards")
    os.mkfifo(root / "set-train-0002.tar")
    assert "set-train-0002.tar is no regular file" in set_refusal(f"wds:{root}")


@pytest.mark.parametrize("form", ["parquet", "wds"])
def test_a_broken_image_names_itself(form, folder, tmp_path):
    broken = folder / "train" / "bee" / "bee-1.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    root = FORMS[form](folder, tmp_path / form)
    found = open_set(f"{form}:{root}", "train")
    at = found.images.names.take(np.arange(len(found)))
    index = list(at).index("bee/bee-1.jpg")
    with pytest.raises(UnreadableImage, match=r"bee/bee-1\.jpg: cannot be read as an image"):
        found.image(index)


def test_the_index_is_made_once_and_again_when_a_file_changes(folder, tmp_path, monkeypatch):
    root = as_shards(folder, tmp_path / "shards")
    opened, original = [], tarfile.open
    monkeypatch.setattr(tarfile, "open", lambda **options: (opened.append(options), original(**options))[1])
    first = open_set(f"wds:{root}", "train")
    assert len(opened) == 2 and open_set(f"wds:{root}", "train").fingerprint == first.fingerprint and len(opened) == 2
    path = root / "set-train-0000.tar"
    os.utime(path, ns=(1, 1))
    open_set(f"wds:{root}", "train")
    assert len(opened) == 4
    for kept in (tmp_path / "cache").rglob("*.npz"):
        kept.write_bytes(b"damaged")
    assert open_set(f"wds:{root}", "train").fingerprint == first.fingerprint and len(opened) == 6


def test_two_images_of_one_name_are_one_line(folder, tmp_path):
    root = as_parquet(folder, tmp_path / "tables")
    second = pq.read_table(root / "train-00001-of-00002.parquet")
    pq.write_table(pa.concat_tables([second, second]), root / "train-00001-of-00002.parquet")
    assert "two images of train are called 'ant/ant-" in (said := set_refusal(f"parquet:{root}")) and "rename" in said


def test_a_shard_cut_short_is_one_line(folder, tmp_path):
    root = as_shards(folder, tmp_path / "shards")
    found = open_set(f"wds:{root}", "val")
    for path in root.glob("set-val-*.tar"):
        with open(path, "r+b") as file:
            file.truncate(600)
    with pytest.raises(UnreadableImage, match="copy the shard again"):
        for index in range(len(found)):
            found.image(index)


@pytest.mark.parametrize("form", FORMS)
def test_threads_read_at_once(form, folder, tmp_path):
    found = open_set(f"{form}:{FORMS[form](folder, tmp_path / form)}", "train")
    wanted = [found.encoded(index) for index in range(len(found))]
    order = np.random.RandomState(1).randint(len(found), size=2000).tolist()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(found.encoded, order)) == [wanted[index] for index in order]
