"""parquet:PATH, Parquet tables of encoded images and labels, as Hugging Face's datasets writes them.

PATH is a folder of *.parquet, or a pattern in quotes; the files of a split have its name in theirs: train, and val,
validation or test. An image is a column of bytes, or of {bytes, path}; its label a column of numbers, with the names of
the classes in the table's metadata, or of texts; of lists of these where an image has several labels. Without a column
of labels the images are for pretraining alone. `?image=NAME&label=NAME` chooses columns with other names.

Tables are read in place. A row group is decompressed for one image of it, and kept for the next: files of small row
groups (datasets writes 100 rows) serve training in random order, others an evaluation in order. Row groups are the
shards of `--shuffle-window`.
"""

import json
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from engine.optional import require
from imagesets.label_tables import choose_column
from imagesets.listing import short_list
from imagesets.names import PackedNames
from imagesets.sets import ImageSet, Split
from imagesets.stored import (
    StoredImages,
    cached_index,
    changes_of_files,
    integer_labels,
    numbered_classes,
    split_files,
    stored_set,
)

PLACE = "PATH"
SPLITS = ("train", "val")
OPTIONS = ("image", "label")
VERSION = 2  # of an index; raise it when the same tables would be read otherwise
KEPT = 64 << 20  # bytes of row groups that a thread keeps decompressed, 600 images of ImageNet; one group in any case
IMAGES = ("image", "img", "jpg", "png")  # names of the column, the usual one first
PATHS_ALONE = (
    "where a table holds paths alone, name the folder that holds the files: folder:FOLDER?labels=TABLE.parquet"
)
LABELS = ("label", "labels", "fine_label", "cls", "class", "target")


class OpenTables(threading.local):
    """What one thread has open, as readers of Parquet are not safe for several: tables and decompressed row groups."""

    def __init__(self) -> None:
        self.tables: dict[str, Any] = {}
        self.groups: OrderedDict[tuple[str, int], Any] = OrderedDict()


@dataclass(frozen=True, eq=False)
class ParquetStore:
    """Bytes of tables. An image's place is its row in `groups` (N, 3): file, row group, row in it."""

    files: tuple[str, ...]
    column: str
    groups: np.ndarray
    kept: int = 1  # row groups that a thread keeps in any case
    opened: OpenTables = field(default_factory=OpenTables)

    def read(self, place: int) -> bytes:
        file, group, row = (int(number) for number in self.groups[place])
        kept, key = self.opened.groups, (self.files[file], group)
        if key not in kept:
            kept[key] = self._decompressed(*key)
            while len(kept) > self.kept and sum(images.nbytes for images in kept.values()) > KEPT:
                kept.popitem(last=False)
        kept.move_to_end(key)
        data = kept[key][row].as_py()
        if data is None:
            raise ValueError("the table holds no bytes for it")
        return data

    def _decompressed(self, path: str, group: int) -> Any:
        table = self._table(path).read_row_group(group, columns=[self.column], use_threads=False)
        return bytes_column(table.column(0).combine_chunks())

    def _table(self, path: str) -> Any:
        from pyarrow.parquet import ParquetFile

        if path not in self.opened.tables:
            self.opened.tables[path] = ParquetFile(path, memory_map=True)
        return self.opened.tables[path]

    @cached_property
    def shards(self) -> np.ndarray:
        """(N,) number of the row group, from 0 over all files."""
        return np.cumsum(np.diff(self.groups[:, :2], axis=0, prepend=self.groups[:1, :2]).any(axis=1))

    def span(self, places: np.ndarray) -> tuple[str, int, int]:
        file, group, _ = (int(number) for number in self.groups[places[0]])
        row_group = self._table(self.files[file]).metadata.row_group(group)
        columns = [row_group.column(number) for number in range(row_group.num_columns)]
        columns = [column for column in columns if column.path_in_schema.partition(".")[0] == self.column]
        starts = [column.dictionary_page_offset or column.data_page_offset for column in columns]
        ends = [start + column.total_compressed_size for start, column in zip(starts, columns, strict=True)]
        return self.files[file], min(starts), max(ends)

    def keeping(self, shards: int) -> "ParquetStore":
        return replace(self, kept=shards, opened=OpenTables())

    def __reduce__(self) -> tuple:
        return ParquetStore, (self.files, self.column, self.groups, self.kept)


def open_split(place: str, split: Split, image: str = "", label: str = "") -> ImageSet:
    """Open one split. ValueError for missing files or columns, labels that are no class, a library that is missing."""
    url = f"parquet:{place}"
    files = split_files(url, place, split, ".parquet")
    schema = _schema(url, files[0])
    column = choose_column(url, "image", image, IMAGES, schema.names)
    if column is None:
        named = short_list(schema.names, 8)
        raise ValueError(f"{url}: which of its columns, {named}, holds the images? say so with '?image=NAME'")
    labelled = choose_column(url, "label", label, LABELS, schema.names)
    if split == "val" and not labelled:
        others = short_list([name for name in schema.names if name != column], 8)
        remedy = f"; if they are in one of {others}, say so with '?label=NAME'" if others else ""
        raise ValueError(
            f"{url}: these images have no labels, so they can be pretrained on but not evaluated on{remedy}"
        )
    index = cached_index(files, [VERSION, column, labelled], lambda: _index_of(url, files, column, labelled))
    names = PackedNames(blob=index["names"].tobytes(), ends=index["ends"])
    images = StoredImages(
        store=ParquetStore(tuple(files), column, index["groups"]),
        where=place,
        names=names,
        sizes=index["sizes"],
        places=np.arange(len(names)),
        changed=changes_of_files(files, index["groups"][:, 0]),
    )
    classes, labels = _classes(url, place, split, schema, labelled, index) if labelled else ((), None)
    if labels is not None and "counts" in index:  # of several labels an image
        try:
            labels = spread_labels(labels, index["counts"], len(classes))
        except ValueError as error:
            raise ValueError(f"{url}: column {labelled}: {error}") from error
    notes = [f"{len(files)} tables, images in column {column}"]
    notes += [f"labels in column {labelled}"] if labelled else []
    return stored_set(url=url, split=split, classes=classes, labels=labels, images=images, notes=notes)


def bytes_column(array: Any) -> Any:
    """An Arrow array of bytes, from one of bytes or of {bytes, path}."""
    import pyarrow as pa

    return array.field("bytes") if pa.types.is_struct(array.type) else array


def is_bytes(array: Any) -> bool:
    """Whether an Arrow array holds bytes, or {bytes, path}."""
    import pyarrow as pa

    if pa.types.is_struct(array.type):
        return array.type.get_field_index("bytes") >= 0
    return pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type)


def class_names(metadata: dict[bytes, bytes] | None, column: str) -> tuple[str, ...]:
    """Names of classes in the metadata that Hugging Face's datasets writes; none where there are none."""
    try:
        feature = json.loads((metadata or {})[b"huggingface"])["info"]["features"][column]
        names = feature.get("feature", feature)["names"]  # of a list of labels, those of its members
        return tuple(names) if all(isinstance(name, str) for name in names) else ()
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return ()


def spread_labels(labels: np.ndarray, counts: np.ndarray, classes: int) -> np.ndarray:
    """Labels of images one after another, so many (N,) of each -> (N, K), 1 for those that an image has."""
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        raise ValueError(f"labels from {labels.min()} to {labels.max()}, and {classes} classes; correct one of them")
    indicators = np.zeros((len(counts), classes), np.int64)
    indicators[np.repeat(np.arange(len(counts)), counts), labels] = 1
    return indicators


def _classes(
    url: str, place: str, split: Split, schema: Any, label: str, index: dict[str, np.ndarray]
) -> tuple[tuple[str, ...], np.ndarray]:
    """Names of the classes, and the labels (N,), those of several an image one after another."""
    if names := class_names(schema.metadata, label):
        return names, index["labels"]
    other: Split = "val" if split == "train" else "train"
    try:
        columns = [_labels(path, label) for path in split_files(url, place, other, ".parquet")]
    except ValueError:  # one split alone
        columns = []
    if "texts" not in index:
        try:
            return numbered_classes(np.concatenate([index["labels"], *map(integer_labels, columns)])), index["labels"]
        except ValueError as error:
            raise ValueError(f"{url}: column {label}: {error}") from error
    texts = PackedNames(blob=index["texts"].tobytes(), ends=index["text_ends"])
    own = list(texts)
    names = tuple(sorted({*own, *(str(text) for column in columns for text in column)}))
    numbers = {name: number for number, name in enumerate(names)}
    return names, np.array([numbers[own[number]] for number in index["labels"]], np.int64)


def _labels(path: str, label: str) -> np.ndarray:
    import pyarrow as pa
    from pyarrow.parquet import read_table

    column = read_table(path, columns=[label]).column(0)
    nested = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    return (column.combine_chunks().flatten() if nested else column).to_numpy(zero_copy_only=False)


def _schema(url: str, path: str) -> Any:
    require("pyarrow")
    from pyarrow.parquet import read_schema

    try:
        return read_schema(path)
    except Exception as error:  # pyarrow's own kinds
        raise ValueError(f"{url}: {path} is no Parquet table ({' '.join(str(error).split())})") from error


def _index_of(url: str, files: list[str], column: str, label: str | None) -> dict[str, np.ndarray]:
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow.parquet import ParquetFile

    names: list[PackedNames] = []
    sizes: list[np.ndarray] = [np.empty(0, np.int64)]
    labels: list[np.ndarray] = [np.empty(0, np.int64)]
    counts: list[int] = []  # labels of each image, where they are lists
    groups: list[np.ndarray] = [np.empty((0, 3), np.int64)]
    texts: dict[str, int] = {}
    first = 0
    for number, path in enumerate(files):
        with ParquetFile(path, memory_map=True) as file:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, columns=[column, *([label] if label else [])])
                images = table.column(column).combine_chunks()
                if not is_bytes(images):
                    raise ValueError(
                        f"{url}: {path}: column {column} holds {images.type}, not the bytes of images; {PATHS_ALONE}"
                    )
                lengths = pc.fill_null(pc.binary_length(bytes_column(images)), 0)
                paths = images.field("path").to_pylist() if pa.types.is_struct(images.type) else [None] * len(images)
                names.append(
                    PackedNames.pack(
                        os.path.basename(path) if path else f"{first + row:08d}" for row, path in enumerate(paths)
                    )
                )
                first += len(images)
                sizes.append(lengths.to_numpy().astype(np.int64))
                rows = np.arange(len(images))
                groups.append(np.stack([np.full_like(rows, number), np.full_like(rows, group), rows], axis=1))
                if label:
                    values = table.column(label).to_pylist()
                    if any(isinstance(value, list) for value in values):
                        counts += [len(value or ()) for value in values]
                        values = [one for value in values for one in value or ()]
                    if None in values:
                        raise ValueError(f"{url}: {path}: an image without a label in column {label}")
                    numbered = [texts.setdefault(v, len(texts)) if isinstance(v, str) else v for v in values]
                    try:
                        labels.append(integer_labels(numbered))
                    except ValueError as error:
                        raise ValueError(
                            f"{url}: {path}: column {label}: {error}; '?label=NAME' chooses another column"
                        ) from error
    packed = PackedNames.joined(names)
    if len(packed) and not np.concatenate(sizes).any():
        raise ValueError(
            f"{url}: none of the {len(packed)} images in column {column} has bytes, {packed[0]} first; {PATHS_ALONE}"
        )
    index = {
        "names": np.frombuffer(packed.blob, np.uint8),
        "ends": packed.ends,
        "sizes": np.concatenate(sizes),
        "groups": np.concatenate(groups),
        "labels": np.concatenate(labels),
    }
    if counts:
        index["counts"] = np.array(counts, np.int64)
    if texts:
        words = PackedNames.pack(texts)
        index |= {"texts": np.frombuffer(words.blob, np.uint8), "text_ends": words.ends}
    return index
