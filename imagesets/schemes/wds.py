"""wds:PATH, webdataset shards: tar files with KEY.jpg (or .png, ...) next to KEY.cls or KEY.json.

PATH is a folder of *.tar, or a pattern in quotes, such as "/data/in1k-*.tar". The shards of a split have its name in
theirs: train, or val, validation or test. KEY.cls holds the index of the class, KEY.json has it as "label". A file
classes.txt beside the shards names the classes, one a line; without it their indices are their names.

Shards are read in place, by random access. Their headers are read once and cached for the user. Compressed archives are
refused.
"""

import io
import json
import os
import re
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.files import open_regular, read_text
from imagesets.decoding import MAX_BYTES
from imagesets.names import PackedNames
from imagesets.sets import ImageSet, Split
from imagesets.stored import StoredImages, cached_index, changes_of_files, numbered_classes, split_files, stored_set
from imagesets.walk import EXTENSIONS, is_hidden

PLACE = "PATH"
SPLITS = ("train", "val")
VERSION = 3  # of an index; raise it if the same shards would be read differently
MAX_LABEL_BYTES = 4096  # of a .cls or .json file
MAX_HEADER_BYTES = 1 << 20  # of a tar header, with long names and attributes
DIGITS = re.compile(rb"\s*\d{1,18}\s*")


@dataclass(frozen=True, eq=False)
class TarStore:
    """Reads images out of tar files. Argument of `read` is an index of the arrays."""

    files: tuple[str, ...]
    shards: np.ndarray  # (N,) index of the file that holds each image
    offsets: np.ndarray  # (N,) first byte of each image in its file
    sizes: np.ndarray  # (N,) bytes

    def read(self, index: int) -> bytes:
        path, size = self.files[self.shards[index]], int(self.sizes[index])
        if size > MAX_BYTES:
            raise ValueError(f"{size:,} bytes, more than the limit of {MAX_BYTES:,}")
        with open_regular(path) as file:  # opened each time, so that threads and processes share nothing
            file.seek(self.offsets[index])
            data = file.read(size)
        if len(data) < size:
            raise ValueError(f"{path} ends after {len(data)} of its {size} bytes; copy the shard again")
        return data

    def span(self, indices: np.ndarray) -> tuple[str, int, int]:
        ends = self.offsets[indices] + self.sizes[indices]
        return self.files[self.shards[indices[0]]], int(self.offsets[indices].min()), int(ends.max())

    def keeping(self, shards: int) -> "TarStore":
        return self  # the system's page cache is enough


class HeaderReader(io.BufferedReader):
    """Reads the headers of a tar file. Raises ValueError for a header so large that it would fill the memory."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= MAX_HEADER_BYTES:
            raise ValueError(f"a header of {size} bytes")
        return super().read(size)


def open_split(place: str, split: Split) -> ImageSet:
    """Open one split of the shards at `place`. Raises ValueError for missing shards and missing or invalid labels."""
    url = f"wds:{place}"
    files = split_files(url, place, split, ".tar")
    index = cached_index(files, VERSION, lambda: read_index(url, files))
    labels = index["labels"]
    classes_file = Path(files[0]).parent / "classes.txt"
    has_names = classes_file.is_file()
    try:
        if has_names:
            lines = read_text(classes_file).split("\n")
            classes = tuple(name.strip() for name in lines if name.strip())
        else:
            classes = numbered_classes(labels)
    except ValueError as error:
        raise ValueError(f"{url}: {error}") from error
    images = StoredImages(
        store=TarStore(tuple(files), index["shards"], index["offsets"], index["sizes"]),
        where=place,
        names=PackedNames(blob=index["names"].tobytes(), ends=index["ends"]),
        sizes=index["sizes"],
        store_indices=np.arange(len(labels)),
        changed=changes_of_files(files, index["shards"]),
    )
    notes = [
        f"{len(files)} shards",
        f"classes of {classes_file}" if has_names else "no classes.txt: classes are numbers",
    ]
    if hidden := int(index["hidden"]):
        notes.append(f"{hidden} hidden files in the shards are left out")
    return stored_set(url=url, split=split, classes=classes, labels=labels, images=images, notes=notes)


def read_index(url: str, files: list[str]) -> dict[str, np.ndarray]:
    """Arrays that describe all N images of tar files, from their headers.

    names, ends: their PackedNames. labels, shards, offsets, sizes: (N,), see TarStore. hidden: number of files that are
    left out. Raises ValueError with the path
    of a file that is no tar file, or has images without labels.
    """
    names_by_shard: list[PackedNames] = []
    columns_by_shard = [np.empty((0, 4), np.int64)]  # label, shard, offset, size
    hidden = 0
    for shard, path in enumerate(files):
        try:
            rows, hidden_in_shard = _read_shard(shard, path)
        except (tarfile.TarError, OSError, ValueError) as error:
            hint = "" if isinstance(error, ValueError) else "; is it an uncompressed tar file?"
            raise ValueError(f"{url}: {path}: {' '.join(str(error).split())}{hint}") from error
        hidden += hidden_in_shard
        names_by_shard.append(PackedNames.pack(name for name, *_ in rows))
        columns_by_shard.append(np.array([numbers for _, *numbers in rows], np.int64).reshape(-1, 4))
    names = PackedNames.joined(names_by_shard)
    columns = np.concatenate(columns_by_shard)
    return {
        "names": np.frombuffer(names.blob, np.uint8),
        "ends": names.ends,
        "labels": columns[:, 0],
        "shards": columns[:, 1],
        "offsets": columns[:, 2],
        "sizes": columns[:, 3],
        "hidden": np.array(hidden),
    }


def _read_shard(shard: int, path: str) -> tuple[list[tuple[str, int, int, int, int]], int]:
    """File name, label, `shard`, offset and size of each image in a tar file, and the number of its hidden files.

    Raises ValueError for missing labels.
    """
    images: dict[str, tuple[str, int, int]] = {}  # key -> file name, offset, size
    labels: dict[str, int] = {}
    hidden = 0
    with HeaderReader(open_regular(path).detach()) as file, tarfile.open(fileobj=file, mode="r:") as archive:
        for member in archive:
            if not member.isfile():
                continue
            if any(map(is_hidden, os.path.normpath(member.name).split(os.sep))):
                hidden += 1
                continue
            if member.issparse():
                raise ValueError(f"{member.name} is stored with holes (a sparse file); pack the shard without --sparse")
            # webdataset's rule: a key ends at the first dot of the file name.
            folder, name = os.path.split(member.name)
            stem, _, ending = name.partition(".")
            key = os.path.join(folder, stem)
            if f".{ending.lower()}" in EXTENSIONS:
                if key in images:  # webdataset stops, too, or makes two samples of them
                    raise ValueError(f"{images[key][0]} and {name} are two images of the key {key}; rename one of them")
                images[key] = (name, member.offset_data, member.size)
            elif ending in ("cls", "json") and member.size <= MAX_LABEL_BYTES:
                data = archive.extractfile(member).read()  # type: ignore[union-attr]  # it is a regular file
                label = _parse_label(data, ending, member.name)
                if labels.setdefault(key, label) != label:
                    raise ValueError(f"{key} has the labels {labels[key]} and {label}; keep one of them")
    if unlabelled := [key for key in images if key not in labels]:
        raise ValueError(f"{len(unlabelled)} of {len(images)} images have no label, such as {unlabelled[0]}.cls")
    return [(name, labels[key], shard, offset, size) for key, (name, offset, size) in images.items()], hidden


def _parse_label(data: bytes, ending: str, name: str) -> int:
    """The class index in a file KEY.cls or KEY.json. Raises ValueError for anything but an integer of 0 or more."""
    try:
        label = int(data) if ending == "cls" and DIGITS.fullmatch(data) else json.loads(data)["label"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{name} holds no number of a class") from error
    if type(label) is not int or not 0 <= label <= np.iinfo(np.int64).max:
        raise ValueError(f"{name} holds no number of a class, but {str(label)[:40]!a}")
    return label
