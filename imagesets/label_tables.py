"""Labels in tables: which column holds what, and the classes that its values name. N rows, K classes.

A table is a CSV, TSV, JSON Lines or Parquet file with the names of images in one column and their labels in another.
"""

import csv
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from engine.optional import require
from engine.printing import did_you_mean
from imagesets.listing import HOLD_OUT, SPLIT_WORDS, images_below, short_list, split_folder
from imagesets.names import PackedNames
from imagesets.sets import ImageSet, Split
from imagesets.stored import stored_set
from imagesets.walk import EXTENSIONS

TABLES = (".csv", ".tsv", ".jsonl", ".parquet")
# Usual names of columns, in lower case, the likeliest first.
FILES = (
    "file_name",
    "filename",
    "image",
    "img",
    "file",
    "path",
    "filepath",
    "file_path",
    "image_path",
    "image_name",
    "image_id",
    "id",
    "name",
)
LABELS = (
    "label",
    "labels",
    "fine_label",
    "cls",
    "class",
    "class_name",
    "category",
    "target",
    "breed",
    "species",
    "tags",
    "diagnosis",
)
SEPARATORS = {"space": " ", "comma": ",", "semicolon": ";", "bar": "|"}
SEVERAL = "add the label; if images have several labels or none, separated by |, add '?separator=bar' to the URL"
WHOLE = re.compile(r"-?\d+(?:\.0*)?")
FRACTION = re.compile(r"-?\d*\.\d+(?:[eE][-+]?\d+)?")

Columns = Mapping[str, Sequence[Any]]


def choose_column(url: str, option: str, name: str, usual: Sequence[str], columns: Sequence[str]) -> str | None:
    """The column that an option of the URL names, else the first with a usual name, None where there is none.

    ValueError where the named one does not exist.
    """
    if name and name not in columns:
        raise ValueError(f"{url}: {option}={name}: no such column{did_you_mean(name, list(columns))}")
    by_lower = {column.lower(): column for column in reversed(columns)}
    return name or next((by_lower[word] for word in usual if word in by_lower), None)


def classes_of(where: str, values: Sequence[Any], separator: str = "") -> tuple[tuple[str, ...], np.ndarray]:
    """Names of the classes and labels: (N,) of values that are texts or whole numbers; (N, K), 1 or 0, of lists of
    these, or of texts with several names between separators.

    where: the table and its column, for messages. ValueError for missing values, fractions, and a class for each image.
    """
    values = [None if isinstance(value, float) and np.isnan(value) else value for value in values]
    if separator:
        mark = SEPARATORS.get(separator, separator)
        values = [value if value is None else [name.strip() for name in str(value).split(mark)] for value in values]
    if any(isinstance(value, list | tuple) for value in values):
        rows = [[] if value is None else [name for name in value if name not in (None, "")] for value in values]
        names, numbers = _numbered(where, [name for row in rows for name in row])
        labels = np.zeros((len(rows), len(names)), np.int64)
        labels[np.repeat(np.arange(len(rows)), [len(row) for row in rows]), numbers] = 1
        return names, labels
    if lacking := [row for row, value in enumerate(values, 1) if value is None or value == ""]:
        raise ValueError(
            f"{where}: {len(lacking)} of {len(values)} rows have no label, row {lacking[0]} first; {SEVERAL}"
        )
    names, labels = _numbered(where, values)
    if 2 < len(names) == len(values):
        raise ValueError(f"{where}: each of the {len(values)} images has a label of its own; choose another column")
    return names, labels


def _numbered(where: str, values: Sequence[Any]) -> tuple[tuple[str, ...], np.ndarray]:
    """Distinct values as texts, in order, whole numbers by size, and which of them each value is."""
    if odd := [value for value in values if not isinstance(value, str | int | float)]:
        raise ValueError(f"{where}: {str(odd[0])[:40]!r} is no class; labels are whole numbers or names")
    texts = [str(int(value)) if isinstance(value, bool) else str(value).strip() for value in values]
    numeric = all(WHOLE.fullmatch(text) or FRACTION.fullmatch(text) for text in set(texts))
    if numeric and (broken := next((text for text in texts if not WHOLE.fullmatch(text)), None)):
        raise ValueError(
            f"{where}: {broken} is not a class label; labels are whole numbers or names: choose another column"
        )
    texts = [text.partition(".")[0] for text in texts] if numeric else texts
    names = sorted(set(texts), key=(lambda text: (int(text), text)) if numeric else None)
    places = {name: place for place, name in enumerate(names)}
    return tuple(names), np.array([places[text] for text in texts], np.int64)


def read_table(path: str) -> Columns:
    """Column -> its values. ValueError names the file and what is wrong with it."""
    if not os.path.isfile(path):
        raise ValueError(f"{path}: there is no such file; correct the name of the table of labels")
    if path.endswith(".parquet"):
        require("pyarrow")
    try:
        if path.endswith(".parquet"):
            from pyarrow.parquet import read_table as read_parquet

            table = read_parquet(path)
            return {name: table.column(name).to_pylist() for name in table.column_names}
        with open(path, newline="", encoding="utf-8-sig") as file:
            return _from_json_lines(file.read()) if path.endswith(".jsonl") else _from_csv(file)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error}); correct its name") from error
    except (ValueError, csv.Error, RecursionError) as error:
        raise ValueError(
            f"{path}: is no table of labels ({' '.join(str(error).split())}); correct or save it anew"
        ) from error


def _from_csv(file: Any) -> Columns:
    header = file.readline()
    mark = max(",;\t", key=header.count)
    file.seek(0)
    rows = csv.reader(file, delimiter=mark)
    names = [name.strip() for name in next(rows, [])]
    lines = []
    for row in rows:
        if row and len(row) != len(names):
            raise ValueError(f"line {rows.line_num} has {len(row)} values, and the first line {len(names)} names")
        lines += [row] if row else []
    return {name: [row[place] for row in lines] for place, name in enumerate(names)}


def _from_json_lines(text: str) -> Columns:
    rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("each line must hold a JSON object")
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}


def find_tables(url: str, place: str, named: str) -> list[str]:
    """Paths of the tables that label the images below a folder: those `named`, with commas between; else metadata.csv
    and the like in it or in the folders of its splits; else the tables in it that are named by a split, or the only
    one. None where the images lie in folders of their classes. ValueError where it cannot be told."""
    if named:
        return [os.path.join(place, os.path.expanduser(name)) for name in named.split(",")]
    splits = [folder for split in SPLIT_WORDS if (folder := split_folder(place, split))]
    if any(len(_class_folders(folder)) > 1 for folder in splits):
        return []
    paths = [os.path.join(folder, f"metadata{ending}") for folder in (place, *splits) for ending in TABLES]
    if metadata := [path for path in paths if os.path.isfile(path)]:
        return metadata
    if not splits and len(_class_folders(place)) > 1:
        return []
    with os.scandir(place) as entries:
        tables = sorted(entry.path for entry in entries if entry.name.lower().endswith(TABLES))
    if by_split := [path for path in tables if split_in(os.path.basename(path))]:
        return by_split
    if len(tables) > 1:
        names = short_list([os.path.basename(path) for path in tables])
        raise ValueError(f"{url}: which of its tables has the labels, {names}? say so with '?labels=NAME.csv'")
    return tables


def _class_folders(folder: str) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]


def split_in(text: str) -> str:
    """The word in a text, such as a file's name, that means a split; "" where none does."""
    words = re.split(r"[^a-z]+", text.lower())
    return next((word for known in SPLIT_WORDS.values() for word in known if word in words), "")


class LabelledFile(NamedTuple):
    """A row of a table of labels."""

    file: int  # index among all images below the folder
    word: str  # for its split: train, validation, test, ...
    label: Any


def labelled_files(
    url: str, place: str, split: Split, tables: Sequence[str], image: str = "", label: str = "", separator: str = ""
) -> ImageSet:
    """One split of the images below a folder that tables label; its classes are those of all rows.

    image, label: columns, those with usual names unless given. A row is of the split that its column `split` says, else
    of that in the name of its table, else of the folder that its image lies in, else of train.
    """
    files, _ = images_below(place, ["."])
    paths = list(files.names)
    rows: list[LabelledFile] = []
    notes: list[str] = []
    for table in tables:
        labelled, note = _read_rows(url, place, table, paths, image, label, alone=len(tables) == 1)
        rows += labelled
        notes.append(note)
    names_of_tables = ", ".join(tables)
    labels_of_rows = [row.label for row in rows]
    if all(isinstance(value, list) and len(value) == 1 for value in labels_of_rows):  # a column a class, and one is 1
        labels_of_rows = [value[0] for value in labels_of_rows]
    classes, labels = classes_of(f"{url}: {names_of_tables}", labels_of_rows, separator)
    if twice := [file for file, count in Counter(row.file for row in rows).items() if count > 1]:
        raise ValueError(f"{url}: {paths[twice[0]]} has two rows in {names_of_tables}; remove all but one")
    if joined := [name for name in classes if "|" in name or ";" in name]:
        notes.append(
            f"classes such as {joined[0]!r}: if these are several labels of an image, add '?separator=bar' to the URL"
        )
    if unlabelled := len(paths) - len(rows):
        notes.append(f"{unlabelled} images have no label and are not read")
    words = np.array([row.word for row in rows])
    word = next((word for word in SPLIT_WORDS[split] if word in words), "")
    if not word:
        hint = f"; {HOLD_OUT.removeprefix('or ')}" if split == "val" else ""
        raise ValueError(f"{url}: {names_of_tables}: no row is of the {split} split{hint}")
    if word.startswith("test"):
        notes.append(f"there is no val split: {word} is used as val")
    of_split = np.flatnonzero(words == word)
    indices = np.array([row.file for row in rows])[of_split]
    names = [paths[index] for index in indices]
    bases = [os.path.basename(name) for name in names]
    called = PackedNames.pack(bases if len(set(bases)) == len(bases) else names)
    return stored_set(
        url=url,
        split=split,
        classes=classes,
        labels=labels[of_split],
        images=files.take_renamed(indices, called),
        notes=notes,
        complete=False,
    )


def _read_rows(
    url: str, place: str, table: str, paths: Sequence[str], image: str, label: str, alone: bool
) -> tuple[list[LabelledFile], str]:
    """The rows of one table, and a note that says what was read. ValueError where its columns cannot be told."""
    where, columns = f"{url}: {table}", read_table(table)
    file_column = choose_column(where, "image", image, FILES, list(columns))
    other_columns = {name: column for name, column in columns.items() if name != file_column}
    label_columns = _label_columns(where, label, other_columns)
    table_word = split_in(os.path.basename(table))
    if not label_columns and table_word in SPLIT_WORDS["val"] and not alone:
        return [], f"{table} has no column of labels, so it is not read"
    if not columns or not next(iter(columns.values())):
        raise ValueError(f"{where}: it has no rows; the first line must name the columns, the others hold labels")
    if not file_column or not label_columns:
        if not other_columns:
            raise ValueError(f"{where}: its one column is {file_column!r}; it needs one of labels, too")
        role, option = ("holds the labels", "label") if file_column else ("names the files", "image")
        raise ValueError(
            f"{where}: which of its columns {role}, {short_list(list(other_columns), 8)}? say so with '?{option}=NAME';"
            " the first line must name the columns"
        )
    folders = [os.path.dirname(table)]
    folders += [split_folder(place, split) for split, words in SPLIT_WORDS.items() if table_word in words]
    folders = [os.path.relpath(folder, place) for folder in folders if folder]
    indices = _find_files(where, folders, paths, [_relative(value, place) for value in columns[file_column]])
    splits = columns.get("split", [""] * len(indices))
    words = [
        split_in(str(word)) or table_word or split_in(os.path.dirname(paths[index])) or "train"
        for word, index in zip(splits, indices, strict=True)
    ]
    several = len(label_columns) > 1
    labels = _classes_shown(other_columns, label_columns) if several else columns[label_columns[0]]
    note = f"{len(indices)} labels of {table}: files in column {file_column}, labels in {', '.join(label_columns)}"
    return [LabelledFile(*row) for row in zip(indices, words, labels, strict=True)], note


def _label_columns(where: str, label: str, columns: Columns) -> list[str]:
    """The column of labels, or those of several classes, each 1 for an image that shows it; none where none is."""
    if "," in label and label not in columns:
        names = [name.strip() for name in label.split(",")]
        for name in names:
            choose_column(where, "label", name, (), list(columns))
        if odd := [name for name in names if not _is_indicator(columns[name])]:
            raise ValueError(f"{where}: column {odd[0]} holds other values than 0 and 1, which say what an image shows")
        return names
    if one := choose_column(where, "label", label, LABELS, list(columns)):
        return [one]
    indicators = [name for name, values in columns.items() if _is_indicator(values)]
    return indicators if len(indicators) > 1 else []


def _is_indicator(values: Sequence[Any]) -> bool:
    return len(values) > 0 and {str(value).removesuffix(".0") for value in values} <= {"0", "1", "True", "False"}


def _classes_shown(columns: Columns, names: Sequence[str]) -> list[list[str]]:
    """The names of the columns that are 1 in each row."""
    yes = [[str(value).removesuffix(".0") in ("1", "True") for value in columns[name]] for name in names]
    return [[name for name, is_shown in zip(names, row, strict=True) if is_shown] for row in zip(*yes, strict=True)]


def _relative(value: Any, place: str) -> str:
    """The path that a table names, with its own slashes; one below the folder `place` relative to that."""
    name = os.path.normpath(str(value.get("path") if isinstance(value, dict) else value).replace("\\", "/"))
    return os.path.relpath(name, os.path.abspath(place)) if os.path.isabs(name) else name


def _find_files(where: str, homes: Sequence[str], paths: Sequence[str], names: Sequence[str]) -> list[int]:
    """Indices into `paths` of the files that the rows of a table name: relative to one of the folders `homes`, else by
    the end of the path, also without .jpg. ValueError for a name of no file, or of two, unless one of them lies in
    these folders."""
    exact = {path: index for index, path in enumerate(paths)}
    by_stem: dict[str, list[int]] = {}
    for index, path in enumerate(paths):
        by_stem.setdefault(_stem(os.path.basename(path)), []).append(index)
    indices, missing = [], []
    for row, name in enumerate(names, 1):
        inside = [os.path.normpath(os.path.join(home, name)) for home in homes]
        matches = [exact[path] for path in inside if path in exact][:1]
        if not matches:
            has_ending, end = name.lower().endswith(EXTENSIONS), f"/{name}"
            matches = [
                index
                for index in by_stem.get(_stem(os.path.basename(name)), ())
                if f"/{paths[index] if has_ending else _stem(paths[index])}".endswith(end)
            ]
        if len(matches) > 1:
            prefixes = tuple(f"{home}/" for home in homes)
            matches = [index for index in matches if paths[index].startswith(prefixes)] or matches
        if len(matches) > 1:
            one, other = (paths[index] for index in matches[:2])
            raise ValueError(f"{where}: row {row} names {name}, and there are {one} and {other}")
        missing += [] if matches else [(row, name)]
        indices += matches
    if missing:
        row, name = missing[0]
        raise ValueError(
            f"{where}: {len(missing)} of {len(names)} rows name no image below the folder, {name} in row {row} first; "
            "add the files, or take out these rows"
        )
    return indices


def _stem(path: str) -> str:
    """A path without the ending of an image."""
    stem, ending = os.path.splitext(path)
    return stem if ending.lower() in EXTENSIONS else path
