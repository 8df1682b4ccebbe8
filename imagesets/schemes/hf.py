"""hf:PATH or hf:NAME, a set of Hugging Face's datasets library, map-style: read from Arrow files, without its code.

PATH is a folder of `save_to_disk`, or of data files that `load_dataset` knows (Parquet, image folders); NAME a set of
the Hub, which is downloaded unless HF_HUB_OFFLINE=1. Scripts of a set are never run. Images keep their encoded bytes,
and the order is this tool's, not the library's.
"""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.optional import require
from imagesets.decoding import read_bytes
from imagesets.names import PackedNames
from imagesets.schemes.parquet import IMAGES, bytes_column
from imagesets.sets import ImageSet, Split
from imagesets.stored import SPLIT_WORDS, StoredImages, class_numbers, numbered_classes, stored_set

PLACE = "PATH_OR_NAME"
SPLITS = ("train", "val")


@dataclass(eq=False)
class ArrowStore:
    """Bytes of a set of the library. An image's place is its row."""

    rows: Any  # datasets.Dataset of the column of images alone, not decoded
    column: str

    def read(self, place: int) -> bytes:
        found = self.rows[place][self.column]
        if found["bytes"] is None and not found["path"]:
            raise ValueError("the set holds neither bytes nor a path for it")
        return found["bytes"] if found["bytes"] is not None else read_bytes(found["path"])


def open_split(place: str, split: Split) -> ImageSet:
    """Open one split. ValueError for what the library cannot load, a missing split, and a set without images."""
    url = f"hf:{place}"
    if not place:
        raise ValueError(f"{url}: no path or name after the colon; write hf:/data/set, or hf:user/name of the Hub")
    splits = _loaded(url, place)
    name = next((word for word in SPLIT_WORDS[split] if word in splits), None)
    if name is None:
        raise ValueError(f"{url}: it has no split {' or '.join(SPLIT_WORDS[split])}, but {', '.join(splits)}")
    data = splits[name]
    column = _column_of(data, "Image") or next((key for key in IMAGES if key in data.features), None)
    if column is None:
        raise ValueError(f"{url}: none of its columns holds images: {', '.join(data.features)}")
    label = _column_of(data, "ClassLabel") or next((key for key in ("label", "labels") if key in data.features), None)
    images = _images(place, data, column)
    named = tuple(getattr(data.features[label], "names", None) or ()) if label else ()
    try:
        labels = class_numbers(data.with_format("numpy")[label][:]) if label else None
        classes = named or (() if labels is None else numbered_classes(labels))
    except ValueError as error:
        raise ValueError(f"{url}: column {label}: {error}") from error
    notes = [f"split {name}, images in column {column}", *([f"labels in column {label}"] if label else [])]
    return stored_set(url=url, split=split, classes=classes, labels=labels, images=images, notes=notes)


def _loaded(url: str, place: str) -> dict[str, Any]:
    """Split -> set. The library's progress bars are off."""
    require("datasets")
    import datasets

    datasets.disable_progress_bars()
    folder = os.path.isdir(place)
    saved = folder and any(os.path.exists(os.path.join(place, name)) for name in ("dataset_dict.json", "state.json"))
    try:
        found = datasets.load_from_disk(place) if saved else datasets.load_dataset(place)
    except Exception as error:  # the library's own kinds, and those of what it reads with
        raise ValueError(f"{url}: datasets cannot load it: {' '.join(str(error).split())}") from error
    return dict(found) if isinstance(found, dict) else {"train": found}


def _column_of(data: Any, kind: str) -> str | None:
    return next((name for name, feature in data.features.items() if type(feature).__name__ == kind), None)


def _images(place: str, data: Any, column: str) -> StoredImages:
    import datasets
    import pyarrow.compute as pc

    rows = data.select_columns([column]).cast_column(column, datasets.Image(decode=False))
    names: list[PackedNames] = []
    sizes = [np.empty(0, np.int64)]
    first = 0
    batches = rows.with_format("arrow").iter(10_000)
    for array in (chunk for batch in batches for chunk in batch.column(column).chunks):  # joined, they would be copied
        lengths = pc.fill_null(pc.binary_length(bytes_column(array)), -1).to_numpy().astype(np.int64)
        paths = array.field("path").to_pylist()
        for row in np.flatnonzero(lengths < 0):
            lengths[row] = os.path.getsize(paths[row]) if paths[row] and os.path.exists(paths[row]) else 0
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
    )
