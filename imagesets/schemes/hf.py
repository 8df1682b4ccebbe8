"""hf:PATH or hf:NAME, a map-style set of Hugging Face's datasets library, read from Arrow files.

PATH is a folder of `save_to_disk`, or of data files that `load_dataset` knows (Parquet, image folders). NAME is a set
of the Hub, which is downloaded unless HF_HUB_OFFLINE=1. Scripts of a set are never run. Images keep their encoded bytes
and are in the order of class folders, not in the library's. `?image=NAME&label=NAME` chooses columns; a label may be a
list.
"""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.files import refuse_irregular_files
from engine.optional import require
from imagesets.decoding import read_bytes
from imagesets.label_tables import choose_column, classes_and_labels
from imagesets.listing import HOLD_OUT, SPLIT_WORDS, short_list
from imagesets.names import PackedNames
from imagesets.schemes.parquet import IMAGE_COLUMNS, bytes_column, multi_hot, names_from_paths
from imagesets.sets import ImageSet, MissingSplit, Split
from imagesets.stored import StoredImages, changes_of_files, integer_labels, numbered_classes, stored_set
from imagesets.walk import EXTENSIONS

PLACE = "PATH_OR_NAME"
SPLITS = ("train", "val")
OPTIONS = ("image", "label")


@dataclass(eq=False)
class ArrowStore:
    """Reads images out of a set of the library. Argument of `read` is the row."""

    rows: Any  # datasets.Dataset with only the column of images, not decoded
    column: str

    def read(self, index: int) -> bytes:
        item = self.rows[index][self.column]
        if item["bytes"] is None and not item["path"]:
            raise ValueError("the set holds neither bytes nor a path for it")
        return item["bytes"] if item["bytes"] is not None else read_bytes(item["path"])


def open_split(place: str, split: Split, image: str = "", label: str = "") -> ImageSet:
    """Open one split of the set that `place` names.

    image, label: names of the columns; "": found by their types, else by their usual names. Raises ValueError if the
    library cannot load the set, for a missing split, for missing columns and for invalid labels.
    """
    url = f"hf:{place}"
    if not place:
        raise ValueError(f"{url}: no path or name after the colon; write hf:/data/set, or hf:user/name of the Hub")
    datasets_by_name = _load(url, place)
    by_lower = {name.lower(): name for name in datasets_by_name}
    split_names = {}
    for other_split, words in SPLIT_WORDS.items():
        split_names[other_split] = next((by_lower[word] for word in words if word in by_lower), None)
    name = split_names[split]
    if name is None:
        words_text = " or ".join(SPLIT_WORDS[split])
        hint = f"; rename it, {HOLD_OUT}" if split == "val" else ""
        raise MissingSplit(f"{url}: it has no split {words_text}, but {', '.join(datasets_by_name)}{hint}")
    dataset = datasets_by_name[name]
    columns = list(dataset.features)
    choices = short_list(columns, 8)
    image_column = choose_column(url, "image", image or _column_of_type(dataset, "Image"), IMAGE_COLUMNS, columns)
    if image_column is None:
        raise ValueError(f"{url}: which of its columns, {choices}, holds the images? say so with '?image=NAME'")
    label = label or _column_of_type(dataset, "ClassLabel")
    label_column = choose_column(url, "label", label, ("label", "labels"), columns)
    if split == "val" and label_column is None:
        raise ValueError(f"{url}: which of its columns, {choices}, holds the labels? say so with '?label=NAME'")
    notes = [f"split {name}, images in column {image_column}"]
    classes: tuple[str, ...] = ()
    labels = None
    if label_column:
        others = [datasets_by_name[other] for other in split_names.values() if other not in (None, name)]
        classes, labels = _classes_and_labels(url, label_column, dataset, others)
        notes.append(f"labels in column {label_column}")
    images = _stored_images(place, dataset, image_column)
    return stored_set(url=url, split=split, classes=classes, labels=labels, images=images, notes=notes)


def _classes_and_labels(url: str, column: str, dataset: Any, others: list[Any]) -> tuple[tuple[str, ...], np.ndarray]:
    """Class names (K) and labels (N,), or (N, K) if they are lists.

    others: the set's other splits. Classes without names are those of all splits, so that they have the same index in
    each. Raises ValueError for invalid labels.
    """
    feature = dataset.features[column]
    item_feature = getattr(feature, "feature", None)  # type of the items of a list
    names = tuple(getattr(item_feature or feature, "names", None) or ())
    values = dataset.select_columns([column]).with_format(None)[column][:]
    other_values = [
        value for other in others if column in other.features for value in other.select_columns([column])[column]
    ]
    where = f"{url}: column {column}"
    try:
        if names and item_feature is not None:
            flat = integer_labels([label for row in values for label in row or ()])
            return names, multi_hot(flat, np.array([len(row or ()) for row in values]), len(names))
        if names or not any(isinstance(value, str | list) for value in values):
            labels = integer_labels(values)
            return names or numbered_classes(np.concatenate([labels, integer_labels(other_values)])), labels
    except ValueError as error:
        raise ValueError(f"{where}: {error}; '?label=NAME' chooses another column") from error
    classes, labels = classes_and_labels(where, [*values, *other_values])
    return classes, labels[: len(values)]


def _load(url: str, place: str) -> dict[str, Any]:
    """Name of a split -> datasets.Dataset. Raises ValueError if the library cannot load it or is not installed."""
    require("datasets")
    import datasets

    datasets.disable_progress_bars()
    datasets.config.HF_DATASETS_TRUST_REMOTE_CODE = False  # versions before 4 ran scripts if the environment said so
    is_saved = os.path.isdir(place) and any(
        os.path.exists(os.path.join(place, name)) for name in ("dataset_dict.json", "state.json")
    )
    try:
        refuse_irregular_files(place, EXTENSIONS)  # images are read by this project
        loaded = datasets.load_from_disk(place) if is_saved else datasets.load_dataset(place)
    except Exception as error:  # of any type, from the library or from those that it reads with
        raise ValueError(f"{url}: datasets cannot load it: {' '.join(str(error).split())}") from error
    return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}


def _column_of_type(dataset: Any, feature_type: str) -> str:
    """The first column with a feature of this type, such as "Image"; "" if there is none."""
    return next((name for name, feature in dataset.features.items() if type(feature).__name__ == feature_type), "")


def _stored_images(place: str, dataset: Any, column: str) -> StoredImages:
    """The images (N) of a column, with names and sizes; those without bytes are files at their paths."""
    import datasets
    import pyarrow.compute as pc

    rows = dataset.select_columns([column]).cast_column(column, datasets.Image(decode=False))
    names: list[PackedNames] = []
    sizes = [np.empty(0, np.int64)]
    # The library does not say which Arrow file holds a row: all rows get the changes of the newest one.
    arrow_changes = changes_of_files([file["filename"] for file in dataset.cache_files], slice(None))
    changed = np.tile(arrow_changes.max(axis=0, initial=0), (len(dataset), 1))
    first = 0  # index of the chunk's first image
    for batch in rows.with_format("arrow").iter(10_000):
        for chunk in batch.column(column).chunks:  # combining chunks would copy them
            lengths = pc.fill_null(pc.binary_length(bytes_column(chunk)), -1).to_numpy().astype(np.int64)
            paths = chunk.field("path").to_pylist()
            for row in np.flatnonzero(lengths < 0):  # no bytes
                if paths[row] and os.path.exists(paths[row]):
                    lengths[row] = os.path.getsize(paths[row])
                    changed[first + row] = changes_of_files([paths[row]], [0])
                else:
                    lengths[row] = 0
            names.append(names_from_paths(paths, first))
            first += len(paths)
            sizes.append(lengths)
    return StoredImages(
        store=ArrowStore(rows, column),
        where=place,
        names=PackedNames.joined(names),
        sizes=np.concatenate(sizes),
        store_indices=np.arange(first),
        changed=changed,
    )
