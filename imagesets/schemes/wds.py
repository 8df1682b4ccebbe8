"""wds:PATH, webdataset shards: tar files in which KEY.jpg (or .png, ...) stands beside KEY.cls or KEY.json.

PATH is a folder of *.tar, or a pattern in quotes, such as "/data/in1k-*.tar". The shards of a split have its name in
theirs: train, and val, validation or test. KEY.cls holds the number of the class, KEY.json has it as "label". A file
classes.txt beside the shards names the classes, a line each; without it their numbers are their names.

Shards are read in place, by random access: their headers once, which is kept in the user's cache. Compressed archives
are refused.
"""

import io
import json
import os
import re
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from imagesets.decoding import MAX_BYTES
from imagesets.names import PackedNames
from imagesets.sets import ImageSet, Split
from imagesets.stored import StoredImages, cached_index, changes_of_files, numbered_classes, split_files, stored_set
from imagesets.walk import EXTENSIONS

PLACE = "PATH"
SPLITS = ("train", "val")
VERSION = 1  # of an index; raise it when the same shards would be read otherwise
MAX_LABEL = 4096  # bytes of a .cls or .json file
MAX_HEADER = 1 << 20  # bytes of a tar header, with names and attributes of any length
NUMBER = re.compile(rb"\s*\d{1,18}\s*")


@dataclass(frozen=True, eq=False)
class TarStore:
    """Bytes of shards. An image's place is its row in `shards` and `offsets` (N,), `sizes` (N,)."""

    files: tuple[str, ...]
    shards: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray

    def read(self, place: int) -> bytes:
        path, size = self.files[self.shards[place]], int(self.sizes[place])
        if size > MAX_BYTES:
            raise ValueError(f"{size:,} bytes, more than the limit of {MAX_BYTES:,}")
        with open(path, "rb", buffering=0) as file:  # anew: threads and processes share nothing
            file.seek(self.offsets[place])
            data = file.read(size)
        if len(data) < size:
            raise ValueError(f"{path} ends after {len(data)} of its {size} bytes; copy the shard again")
        return data

    def span(self, places: np.ndarray) -> tuple[str, int, int]:
        ends = self.offsets[places] + self.sizes[places]
        return self.files[self.shards[places[0]]], int(self.offsets[places].min()), int(ends.max())

    def keeping(self, shards: int) -> "TarStore":
        return self  # the system's cache does


class HeaderReader(io.BufferedReader):
    """A shard whose headers are read; data of images is not."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= MAX_HEADER:
            raise ValueError(f"a header of {size} bytes")
        return super().read(size)


def open_split(place: str, split: Split) -> ImageSet:
    """Open one split. ValueError for missing shards, images without a label, labels that are no class."""
    url = f"wds:{place}"
    files = split_files(url, place, split, ".tar")
    index = cached_index(files, VERSION, lambda: index_of(url, files))
    listed = Path(files[0]).parent / "classes.txt"
    labels = index["labels"]
    named = listed.is_file()
    try:
        classes = tuple(listed.read_text(encoding="utf-8").split("\n")) if named else numbered_classes(labels)
    except ValueError as error:
        raise ValueError(f"{url}: {error}") from error
    classes = tuple(name.strip() for name in classes if name.strip())
    images = StoredImages(
        store=TarStore(tuple(files), index["shards"], index["offsets"], index["sizes"]),
        where=place,
        names=PackedNames(blob=index["names"].tobytes(), ends=index["ends"]),
        sizes=index["sizes"],
        places=np.arange(len(labels)),
        changed=changes_of_files(files, index["shards"]),
    )
    notes = [f"{len(files)} shards", f"classes of {listed}" if named else "no classes.txt: classes are numbers"]
    return stored_set(url=url, split=split, classes=classes, labels=labels, images=images, notes=notes)


def index_of(url: str, files: list[str]) -> dict[str, np.ndarray]:
    """Names, labels and places of all images in shards, from their headers. ValueError names a shard that is none."""
    names_by_shard: list[PackedNames] = []
    numbers = [np.empty((0, 4), np.int64)]  # label, shard, offset, size
    for shard, path in enumerate(files):
        try:
            rows = _rows(shard, path)
        except (tarfile.TarError, OSError, ValueError) as error:
            why = " ".join(str(error).split())
            raise ValueError(f"{url}: {path}: {why}; is it an uncompressed tar file?") from error
        names_by_shard.append(PackedNames.pack(row[0] for row in rows))
        numbers.append(np.array([row[1:] for row in rows], np.int64).reshape(-1, 4))
    names = PackedNames.joined(names_by_shard)
    columns = np.concatenate(numbers)
    return {
        "names": np.frombuffer(names.blob, np.uint8),
        "ends": names.ends,
        "labels": columns[:, 0],
        "shards": columns[:, 1],
        "offsets": columns[:, 2],
        "sizes": columns[:, 3],
    }


def _rows(shard: int, path: str) -> list[tuple[str, int, int, int, int]]:
    pictures: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, int] = {}
    with HeaderReader(io.FileIO(path)) as file, tarfile.open(fileobj=file, mode="r:") as archive:
        for member in archive:
            if not member.isfile():
                continue
            if member.issparse():
                raise ValueError(f"{member.name} is stored with holes (a sparse file); pack the shard without --sparse")
            # webdataset's rule: a key ends at the first dot of the last part of its path.
            folder, name = os.path.split(member.name)
            key, _, ending = name.partition(".")
            key = os.path.join(folder, key)
            if f".{ending.lower()}" in EXTENSIONS:
                pictures[key] = (name, member.offset_data, member.size)
            elif ending in ("cls", "json") and member.size <= MAX_LABEL:
                labels[key] = _label(archive.extractfile(member).read(), ending, member.name)  # type: ignore[union-attr]
    if lacking := [key for key in pictures if key not in labels]:
        raise ValueError(f"{len(lacking)} of {len(pictures)} images have no label, such as {lacking[0]}.cls")
    return [(name, labels[key], shard, offset, size) for key, (name, offset, size) in pictures.items()]


def _label(data: bytes, ending: str, name: str) -> int:
    """The number of a class. ValueError for any other value: 1.9 is no class."""
    try:
        label = int(data) if ending == "cls" and NUMBER.fullmatch(data) else json.loads(data)["label"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{name} holds no number of a class") from error
    if type(label) is not int or not 0 <= label <= np.iinfo(np.int64).max:
        raise ValueError(f"{name} holds no number of a class, but {str(label)[:40]!a}")
    return label
