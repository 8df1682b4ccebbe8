"""parquet:PATH, Parquet tables of encoded images and labels, as Hugging Face's datasets writes them.

PATH is a folder of *.parquet, or a pattern in quotes. The files of a split have its name in theirs: train, or val,
validation or test. Images are in a column of bytes, or of structs {bytes, path}. Labels are in a column of integers,
with class names in the table's metadata, or of texts, or of lists of these if images have several labels. Without a
column of labels the images are only for pretraining. `?image=NAME&label=NAME` chooses columns with other names.

Tables are read in place. To read an image, its row group is decompressed and cached for the following ones. So training
in random order needs small row groups (datasets writes 100 rows); large ones are fine for evaluation in order. Row
groups are the shards of `--shuffle-window`.
"""

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
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
VERSION = 3  # of an index; raise it if the same tables would be read differently
CACHED_BYTES = 64 << 20  # of decompressed row groups in each thread: 600 images of ImageNet
IMAGE_COLUMNS = ("image", "img", "jpg", "png")  # usual names, the likeliest first
LABEL_COLUMNS = ("label", "labels", "fine_label", "cls", "class", "target")
PATHS_ADVICE = "if the table holds only paths, name the folder that holds the files: folder:FOLDER?labels=TABLE.parquet"


class ThreadCache(threading.local):
    """Open tables and decompressed row groups of one thread, because Parquet readers are not thread-safe."""

    def __init__(self) -> None:
        self.tables: dict[str, Any] = {}  # path -> ParquetFile
        self.groups: OrderedDict[tuple[str, int], Any] = OrderedDict()  # path, row group -> its column of bytes


@dataclass(frozen=True, eq=False)
class ParquetStore:
    """Reads images out of Parquet tables. Argument of `read` is the row of `groups`."""

    files: tuple[str, ...]
    column: str  # of the images
    groups: np.ndarray  # (N, 3) int64: index of the file, of the row group in it, of the row in that
    cached_groups: int = 1  # row groups that a thread caches even if they exceed CACHED_BYTES
    cache: ThreadCache = field(default_factory=ThreadCache)

    def read(self, index: int) -> bytes:
        file, group, row = (int(number) for number in self.groups[index])
        groups, key = self.cache.groups, (self.files[file], group)
        if key not in groups:
            groups[key] = self._decompress(*key)
            while len(groups) > self.cached_groups and sum(images.nbytes for images in groups.values()) > CACHED_BYTES:
                groups.popitem(last=False)
        groups.move_to_end(key)
        data = groups[key][row].as_py()
        if data is None:
            raise ValueError("the table holds no bytes for it")
        return data

    def _decompress(self, path: str, group: int) -> Any:
        """The column of bytes (an Arrow array) of a row group."""
        table = self._table(path).read_row_group(group, columns=[self.column], use_threads=False)
        return bytes_column(table.column(0).combine_chunks())

    def _table(self, path: str) -> Any:
        """The table at a path, opened once per thread."""
        from pyarrow.parquet import ParquetFile

        if path not in self.cache.tables:
            self.cache.tables[path] = ParquetFile(path, memory_map=True)
        return self.cache.tables[path]

    @cached_property
    def shards(self) -> np.ndarray:
        """(N,) index of the row group of each image, counted over all files."""
        return np.cumsum(np.diff(self.groups[:, :2], axis=0, prepend=self.groups[:1, :2]).any(axis=1))

    def span(self, indices: np.ndarray) -> tuple[str, int, int]:
        file, group, _ = (int(number) for number in self.groups[indices[0]])
        row_group = self._table(self.files[file]).metadata.row_group(group)
        columns = [row_group.column(index) for index in range(row_group.num_columns)]
        columns = [column for column in columns if column.path_in_schema.partition(".")[0] == self.column]
        starts = [column.dictionary_page_offset or column.data_page_offset for column in columns]
        ends = [start + column.total_compressed_size for start, column in zip(starts, columns, strict=True)]
        return self.files[file], min(starts), max(ends)

    def keeping(self, shards: int) -> "ParquetStore":
        return replace(self, cached_groups=shards, cache=ThreadCache())

    def __reduce__(self) -> tuple:
        return ParquetStore, (self.files, self.column, self.groups, self.cached_groups)


def open_split(place: str, split: Split, image: str = "", label: str = "") -> ImageSet:
    """Open one split of the tables at `place`.

    image, label: names of the columns; "": found by their usual names. Raises ValueError for missing files or columns,
    invalid labels, and if pyarrow is not installed.
    """
    url = f"parquet:{place}"
    files = split_files(url, place, split, ".parquet")
    schema = _read_schema(url, files[0])
    image_column = choose_column(url, "image", image, IMAGE_COLUMNS, schema.names)
    if image_column is None:
        choices = short_list(schema.names, 8)
        raise ValueError(f"{url}: which of its columns, {choices}, holds the images? say so with '?image=NAME'")
    label_column = choose_column(url, "label", label, LABEL_COLUMNS, schema.names)
    if split == "val" and not label_column:
        others = short_list([name for name in schema.names if name != image_column], 8)
        remedy = f"; if they are in one of {others}, say so with '?label=NAME'" if others else ""
        raise ValueError(
            f"{url}: these images have no labels, so they can be pretrained on but not evaluated on{remedy}"
        )
    index = cached_index(
        files, [VERSION, image_column, label_column], lambda: _read_index(url, files, image_column, label_column)
    )
    names = PackedNames(blob=index["names"].tobytes(), ends=index["ends"])
    images = StoredImages(
        store=ParquetStore(tuple(files), image_column, index["groups"]),
        where=place,
        names=names,
        sizes=index["sizes"],
        store_indices=np.arange(len(names)),
        changed=changes_of_files(files, index["groups"][:, 0]),
    )
    classes, labels = (
        _classes_and_labels(url, place, split, schema, label_column, index) if label_column else ((), None)
    )
    if labels is not None and "counts" in index:  # images with several labels
        try:
            labels = multi_hot(labels, index["counts"], len(classes))
        except ValueError as error:
            raise ValueError(f"{url}: column {label_column}: {error}") from error
    notes = [f"{len(files)} tables, images in column {image_column}"]
    notes += [f"labels in column {label_column}"] if label_column else []
    return stored_set(url=url, split=split, classes=classes, labels=labels, images=images, notes=notes)


def bytes_column(array: Any) -> Any:
    """The bytes in an Arrow array of bytes or of structs {bytes, path}."""
    import pyarrow as pa

    return array.field("bytes") if pa.types.is_struct(array.type) else array


def is_bytes(array: Any) -> bool:
    """Whether an Arrow array holds bytes, or structs {bytes, path}."""
    import pyarrow as pa

    if pa.types.is_struct(array.type):
        return array.type.get_field_index("bytes") >= 0
    return pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type)


def class_names(metadata: dict[bytes, bytes] | None, column: str) -> tuple[str, ...]:
    """Class names in the metadata that Hugging Face's datasets writes for a column; () if there are none."""
    try:
        feature = json.loads((metadata or {})[b"huggingface"])["info"]["features"][column]
        names = feature.get("feature", feature)["names"]  # "feature": type of the items of a list
        return tuple(names) if all(isinstance(name, str) for name in names) else ()
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return ()


def multi_hot(labels: np.ndarray, counts: np.ndarray, classes: int) -> np.ndarray:
    """Labels (N, K) int64, 1 for classes that an image has, from a flat list.

    labels: those of all images, one image after another. counts: (N,) how many each image has. Raises ValueError for
    labels that are not in 0..K-1.
    """
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        raise ValueError(f"labels from {labels.min()} to {labels.max()}, and {classes} classes; correct one of them")
    indicators = np.zeros((len(counts), classes), np.int64)
    indicators[np.repeat(np.arange(len(counts)), counts), labels] = 1
    return indicators


def _classes_and_labels(
    url: str, place: str, split: Split, schema: Any, label_column: str, index: dict[str, np.ndarray]
) -> tuple[tuple[str, ...], np.ndarray]:
    """Class names (K) and labels (N,); labels of images with several are flat, one image after another.

    Classes without names are those of both splits, so that a class has the same index in both.
    """
    if "texts" not in index and (names := class_names(schema.metadata, label_column)):
        return names, index["labels"]
    other: Split = "val" if split == "train" else "train"
    try:
        other_labels = [_read_labels(path, label_column) for path in split_files(url, place, other, ".parquet")]
    except ValueError:  # there is only one split
        other_labels = []
    if "texts" not in index:
        try:
            all_labels = np.concatenate([index["labels"], *map(integer_labels, other_labels)])
            return numbered_classes(all_labels), index["labels"]
        except ValueError as error:
            raise ValueError(f"{url}: column {label_column}: {error}") from error
    texts = list(PackedNames(blob=index["texts"].tobytes(), ends=index["text_ends"]))
    names = tuple(sorted({*texts, *(str(text) for labels in other_labels for text in labels)}))
    index_of = {name: class_index for class_index, name in enumerate(names)}
    return names, np.array([index_of[texts[code]] for code in index["labels"]], np.int64)


def _read_labels(path: str, label_column: str) -> np.ndarray:
    """All labels of a table; of lists their items, one list after another."""
    import pyarrow as pa
    from pyarrow.parquet import read_table

    column = read_table(path, columns=[label_column]).column(0)
    is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    return (column.combine_chunks().flatten() if is_list else column).to_numpy(zero_copy_only=False)


def _read_schema(url: str, path: str) -> Any:
    """The Arrow schema of a table. Raises ValueError if it cannot be read or pyarrow is not installed."""
    require("pyarrow")
    from pyarrow.parquet import read_schema

    try:
        return read_schema(path)
    except Exception as error:  # pyarrow has its own types
        raise ValueError(f"{url}: {path} is no Parquet table ({' '.join(str(error).split())})") from error


def _read_index(url: str, files: list[str], image_column: str, label_column: str | None) -> dict[str, np.ndarray]:
    """Arrays that describe all N images of the tables.

    names, ends: their PackedNames. sizes: (N,). groups: (N, 3), see ParquetStore. labels: integers, (N,), or flat if
    images have several; then counts: (N,) labels of each image. Text labels are indices into texts, text_ends: the
    PackedNames of the different ones. Raises ValueError for invalid labels and if there are no bytes of images.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow.parquet import ParquetFile

    names: list[PackedNames] = []
    sizes: list[np.ndarray] = [np.empty(0, np.int64)]
    labels: list[np.ndarray] = [np.empty(0, np.int64)]
    counts: list[int] = []
    groups: list[np.ndarray] = [np.empty((0, 3), np.int64)]
    code_of: dict[str, int] = {}  # text label -> integer
    columns = [image_column, label_column] if label_column else [image_column]
    first = 0  # index of the row group's first image
    names_of_first: tuple[str, ...] = ()  # of the classes
    for file_index, path in enumerate(files):
        with ParquetFile(path, memory_map=True) as file:
            if label_column:
                names_of_file = class_names(file.schema_arrow.metadata, label_column)
                names_of_first = names_of_first or names_of_file
                if names_of_file and names_of_file != names_of_first:
                    raise ValueError(
                        f"{url}: {path} names other classes than the tables before it ({short_list(names_of_file)}; "
                        f"{short_list(names_of_first)}), so that a number is another class in each; write all with the "
                        "same names"
                    )
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, columns=columns)
                images = table.column(image_column).combine_chunks()
                if not is_bytes(images):
                    raise ValueError(
                        f"{url}: {path}: column {image_column} holds {images.type}, not the bytes of images; "
                        f"{PATHS_ADVICE}"
                    )
                has_paths = pa.types.is_struct(images.type)
                image_paths = images.field("path").to_pylist() if has_paths else [None] * len(images)
                names.append(names_from_paths(image_paths, first))
                first += len(images)
                sizes.append(pc.fill_null(pc.binary_length(bytes_column(images)), 0).to_numpy().astype(np.int64))
                rows = np.arange(len(images))
                groups.append(np.stack([np.full_like(rows, file_index), np.full_like(rows, group), rows], axis=1))
                if label_column:
                    try:
                        group_labels, group_counts = _encode_labels(table.column(label_column).to_pylist(), code_of)
                    except ValueError as error:
                        raise ValueError(
                            f"{url}: {path}: column {label_column}: {error}; '?label=NAME' chooses another column"
                        ) from error
                    labels.append(group_labels)
                    counts += group_counts
    packed = PackedNames.joined(names)
    if len(packed) and not np.concatenate(sizes).any():
        raise ValueError(
            f"{url}: none of the {len(packed)} images in column {image_column} has bytes, {packed[0]} first; "
            f"{PATHS_ADVICE}"
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
    if code_of:
        texts = PackedNames.pack(code_of)
        index |= {"texts": np.frombuffer(texts.blob, np.uint8), "text_ends": texts.ends}
    return index


def names_from_paths(paths: Sequence[str | None], first: int) -> PackedNames:
    """File names of images from their paths; an image without a path is named by its index, counted from `first`."""
    return PackedNames.pack(os.path.basename(path) if path else f"{first + row:08d}" for row, path in enumerate(paths))


def _encode_labels(values: list[Any], code_of: dict[str, int]) -> tuple[np.ndarray, list[int]]:
    """Integer labels of one row group, flat if values are lists; then also how many each image has, else [].

    code_of: text label -> integer; new texts are added. Raises ValueError for a missing label and for other types.
    """
    counts: list[int] = []
    if any(isinstance(value, list) for value in values):
        counts = [len(value or ()) for value in values]
        values = [label for value in values for label in value or ()]
    if None in values:
        raise ValueError("an image has no label")
    codes = [code_of.setdefault(value, len(code_of)) if isinstance(value, str) else value for value in values]
    return integer_labels(codes), counts
