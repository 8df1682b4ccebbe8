"""hf:PATH or hf:NAME, a set of Hugging Face's datasets library, map-style: read from Arrow files, without its code.

PATH is a folder of `save_to_disk`, or of data files that `load_dataset` knows (Parquet, image folders); NAME a set of
the Hub, which is downloaded unless HF_HUB_OFFLINE=1. Scripts of a set are never run. Images keep their encoded bytes,
and the order is this tool's, not the library's. `?image=NAME&label=NAME` chooses columns; a label may be a list.
"""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.optional import require
from imagesets.decoding import read_bytes
from imagesets.label_tables import choose_column, classes_and_labels
from imagesets.listing import HOLD_OUT, SPLIT_WORDS, short_list
from imagesets.names import PackedNames
from imagesets.schemes.parquet import IMAGES, bytes_column, spread_labels
from imagesets.sets import ImageSet, Split
from imagesets.stored import StoredImages, changes_of_files, integer_labels, numbered_classes, stored_set

PLACE = "PATH_OR_NAME"
SPLITS = ("train", "val")
OPTIONS = ("image", "label")


@dataclass(eq=False)
class ArrowStore:
    """Bytes of a set of the library. An image's place is its row."""

    rows: Any  # datasets.Dataset of the column of images alone, not decoded
    column: str

    def read(self, place: int) -> bytes:
        item = self.rows[place][self.column]
        if item["bytes"] is None and not item["path"]:
            raise ValueError("the set holds neither bytes nor a path for it")
        return item["bytes"] if item["bytes"] is not None else read_bytes(item["path"])


def open_split(place: str, split: Split, image: str = "", label: str = "") -> ImageSet:
    """Open one split. ValueError for what the library cannot load, a missing split, and a set without images."""
    url = f"hf:{place}"
    if not place:
        raise ValueError(f"{url}: no path or name after the colon; write hf:/data/set, or hf:user/name of the Hub")
    splits = _loaded(url, place)
    by_lower = {name.lower(): name for name in splits}
    names = {
        other: next((by_lower[word] for word in words if word in by_lower), None)
        for other, words in SPLIT_WORDS.items()
    }
    name = names[split]
    if name is None:
        words = " or ".join(SPLIT_WORDS[split])
        raise ValueError(
            f"{url}: it has no split {words}, but {', '.join(splits)}" + (f"; rename it, {HOLD_OUT}" * (split == "val"))
        )
    data = splits[name]
    columns = list(data.features)
    listed = short_list(columns, 8)
    column = choose_column(url, "image", image or _column_of(data, "Image"), IMAGES, columns)
    if column is None:
        raise ValueError(f"{url}: which of its columns, {listed}, holds the images? say so with '?image=NAME'")
    labelled = choose_column(url, "label", label or _column_of(data, "ClassLabel"), ("label", "labels"), columns)
    if split == "val" and labelled is None:
        raise ValueError(f"{url}: which of its columns, {listed}, holds the labels? say so with '?label=NAME'")
    others = [splits[other] for other in names.values() if other not in (None, name)]
    classes, labels = _labels(url, labelled, data, others) if labelled else ((), None)
    images = _images(place, data, column)
    notes = [f"split {name}, images in column {column}", *([f"labels in column {labelled}"] if labelled else [])]
    return stored_set(url=url, split=split, classes=classes, labels=labels, images=images, notes=notes)


def _labels(url: str, column: str, data: Any, others: list[Any]) -> tuple[tuple[str, ...], np.ndarray]:
    """Classes and labels (N,), or (N, K) of lists. Classes without names are those of all splits."""
    feature = data.features[column]
    member = getattr(feature, "feature", None)  # of a list
    values = data.select_columns([column]).with_format(None)[column][:]
    where, names = f"{url}: column {column}", tuple(getattr(member or feature, "names", None) or ())
    rest = [value for other in others if column in other.features for value in other.select_columns([column])[column]]
    try:
        if names and member is not None:
            flat = integer_labels([label for row in values for label in row or ()])
            return names, spread_labels(flat, np.array([len(row or ()) for row in values]), len(names))
        if names or not any(isinstance(value, str | list) for value in values):
            labels = integer_labels(values)
            return names or numbered_classes(np.concatenate([labels, integer_labels(rest)])), labels
    except ValueError as error:
        raise ValueError(f"{where}: {error}; '?label=NAME' chooses another column") from error
    classes, labels = classes_and_labels(where, [*values, *rest])
    return classes, labels[: len(values)]


def _loaded(url: str, place: str) -> dict[str, Any]:
    """Split -> set. The library's progress bars are off."""
    require("datasets")
    import datasets

    datasets.disable_progress_bars()
    datasets.config.HF_DATASETS_TRUST_REMOTE_CODE = False  # versions before 4 ran scripts if the environment said so
    folder = os.path.isdir(place)
    saved = folder and any(os.path.exists(os.path.join(place, name)) for name in ("dataset_dict.json", "state.json"))
    try:
        loaded = datasets.load_from_disk(place) if saved else datasets.load_dataset(place)
    except Exception as error:  # the library's own kinds, and those of what it reads with
        raise ValueError(f"{url}: datasets cannot load it: {' '.join(str(error).split())}") from error
    return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}


def _column_of(data: Any, kind: str) -> str:
    """The first column of a kind; "" where there is none."""
    return next((name for name, feature in data.features.items() if type(feature).__name__ == kind), "")


def _images(place: str, data: Any, column: str) -> StoredImages:
    import datasets
    import pyarrow.compute as pc

    rows = data.select_columns([column]).cast_column(column, datasets.Image(decode=False))
    names: list[PackedNames] = []
    sizes = [np.empty(0, np.int64)]
    # Of the newest Arrow file: which one a row is in is the library's affair.
    arrow = changes_of_files([file["filename"] for file in data.cache_files], slice(None))
    changed = np.tile(arrow.max(axis=0, initial=0), (len(data), 1))
    first = 0
    batches = rows.with_format("arrow").iter(10_000)
    for array in (chunk for batch in batches for chunk in batch.column(column).chunks):  # joined, they would be copied
        lengths = pc.fill_null(pc.binary_length(bytes_column(array)), -1).to_numpy().astype(np.int64)
        paths = array.field("path").to_pylist()
        for row in np.flatnonzero(lengths < 0):
            if paths[row] and os.path.exists(paths[row]):
                lengths[row], changed[first + row] = os.path.getsize(paths[row]), changes_of_files([paths[row]], [0])
            else:
                lengths[row] = 0
        named = (os.path.basename(path) if path else f"{first + row:08d}" for row, path in enumerate(paths))
        names.append(PackedNames.pack(named))
        first += len(paths)
        sizes.append(lengths)
    return StoredImages(
        store=ArrowStore(rows, column),
        where=place,
        names=PackedNames.joined(names),
        sizes=np.concatenate(sizes),
        places=np.arange(first),
        changed=changed,
    )
