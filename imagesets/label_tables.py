"""Labels in tables: which column holds what, and the classes that its values name. N rows, K classes.

A table is a CSV, TSV, JSON Lines or Parquet file with the names of images in one column and their labels in another.
"""

import csv
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

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
SEVERAL = "add it, or say '?separator=bar' where an image has several labels, or none, with | between"
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
    if odd := next((value for value in values if not isinstance(value, str | int | float)), None):
        raise ValueError(f"{where}: {str(odd)[:40]!r} is no class; labels are whole numbers or names")
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
    found = []
    for row in rows:
        if row and len(row) != len(names):
            raise ValueError(f"line {rows.line_num} has {len(row)} values, and the first line {len(names)} names")
        found += [row] if row else []
    return {name: [row[place] for row in found] for place, name in enumerate(names)}


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
    if found := [path for path in paths if os.path.isfile(path)]:
        return found
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


def labelled_files(
    url: str, place: str, split: Split, tables: Sequence[str], image: str = "", label: str = "", separator: str = ""
) -> ImageSet:
    """One split of the images below a folder that tables label; its classes are those of all rows.

    image, label: columns, those with usual names unless given. A row is of the split that its column `split` says, else
    of that in the name of its table, else of the folder that its image lies in, else of train.
    """
    files, _ = images_below(place, ["."])
    paths = list(files.names)
    rows: list[int] = []  # places in `paths`
    words: list[str] = []  # for the split
    values: list[Any] = []
    notes: list[str] = []
    for path in tables:
        where, columns = f"{url}: {path}", read_table(path)
        named = choose_column(where, "image", image, FILES, list(columns))
        others = {name: column for name, column in columns.items() if name != named}
        chosen = _label_columns(where, label, others)
        own = split_in(os.path.basename(path))
        if not chosen and own in SPLIT_WORDS["val"] and len(tables) > 1:
            notes.append(f"{path} has no column of labels, so it is not read")
            continue
        if not columns or not next(iter(columns.values())):
            raise ValueError(f"{where}: it has no rows; the first line must name the columns, the others hold labels")
        if not named or not chosen:
            if not others:
                raise ValueError(f"{where}: its one column is {named!r}; it needs one of labels, too")
            what, option = ("holds the labels", "label") if named else ("names the files", "image")
            raise ValueError(
                f"{where}: which of its columns {what}, {short_list(list(others), 8)}? say so with '?{option}=NAME'; "
                "the first line must name the columns"
            )
        homes = [
            os.path.dirname(path),
            *(split_folder(place, each) for each in SPLIT_WORDS if own in SPLIT_WORDS[each]),
        ]
        inside = [os.path.relpath(home, place) for home in homes if home]
        found = _places(where, inside, paths, [_relative(value, place) for value in columns[named]])
        said = columns.get("split", [""] * len(found))
        rows += found
        words += [
            split_in(str(word)) or own or split_in(paths[row].rpartition("/")[0]) or "train"
            for word, row in zip(said, found, strict=True)
        ]
        values += _shown(others, chosen) if len(chosen) > 1 else columns[chosen[0]]
        notes.append(f"{len(found)} labels of {path}: files in column {named}, labels in {', '.join(chosen)}")
    if all(isinstance(value, list) and len(value) == 1 for value in values):  # a column for each class, and one is 1
        values = [value[0] for value in values]
    classes, labels = classes_of(f"{url}: {', '.join(tables)}", values, separator)
    if len(set(rows)) < len(rows):
        twice = Counter(rows).most_common(1)[0][0]
        raise ValueError(f"{url}: {paths[twice]} has two rows in {', '.join(tables)}; leave one")
    if joined := [name for name in classes if "|" in name or ";" in name]:
        notes.append(f"classes such as {joined[0]!r}: if these are several labels of an image, say '?separator=bar'")
    if left := len(paths) - len(rows):
        notes.append(f"{left} images have no label and are not read")
    word = next((word for word in SPLIT_WORDS[split] if word in words), "")
    mine = np.flatnonzero(np.array(words) == word)
    if not word:
        other = f"; {HOLD_OUT.removeprefix('or ')}" if split == "val" else ""
        raise ValueError(f"{url}: {', '.join(tables)}: no row is of the {split} split{other}")
    notes += [f"there is no val split: {word} is used as val"] if word.startswith("test") else []
    names = [paths[rows[row]] for row in mine]
    bases = [os.path.basename(name) for name in names]
    called = PackedNames.pack(bases if len(set(bases)) == len(bases) else names)
    images = files.renamed(np.array(rows)[mine], called)
    return stored_set(
        url=url, split=split, classes=classes, labels=labels[mine], images=images, notes=notes, complete=False
    )


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
    found = [name for name, values in columns.items() if _is_indicator(values)]
    return found if len(found) > 1 else []


def _is_indicator(values: Sequence[Any]) -> bool:
    return len(values) > 0 and {str(value).removesuffix(".0") for value in values} <= {"0", "1", "True", "False"}


def _shown(columns: Columns, names: Sequence[str]) -> list[list[str]]:
    """The names of the columns that are 1 in each row."""
    yes = [[str(value).removesuffix(".0") in ("1", "True") for value in columns[name]] for name in names]
    return [[name for name, is_shown in zip(names, row, strict=True) if is_shown] for row in zip(*yes, strict=True)]


def _relative(value: Any, place: str) -> str:
    """The path that a table names, with its own slashes; one below the folder `place` relative to that."""
    name = os.path.normpath(str(value.get("path") if isinstance(value, dict) else value).replace("\\", "/"))
    return os.path.relpath(name, os.path.abspath(place)) if os.path.isabs(name) else name


def _places(where: str, homes: Sequence[str], paths: Sequence[str], names: Sequence[str]) -> list[int]:
    """Which of `paths` the rows of a table name: relative to one of the folders `homes`, else by the end of the
    path, also without .jpg. ValueError for a name of no file, or of two, unless one of them lies in these folders."""
    exact = {path: place for place, path in enumerate(paths)}
    by_stem: dict[str, list[int]] = {}
    for place, path in enumerate(paths):
        by_stem.setdefault(_stem(os.path.basename(path)), []).append(place)
    found, missing = [], []
    for row, name in enumerate(names, 1):
        inside = [os.path.normpath(os.path.join(home, name)) for home in homes]
        if at_once := [exact[path] for path in inside if path in exact]:
            found.append(at_once[0])
            continue
        known, end = name.lower().endswith(EXTENSIONS), f"/{name}"
        ends = [
            at
            for at in by_stem.get(_stem(os.path.basename(name)), ())
            if f"/{paths[at] if known else _stem(paths[at])}".endswith(end)
        ]
        if len(ends) > 1:
            ends = [at for at in ends if paths[at].startswith(tuple(f"{home}/" for home in homes))] or ends
        if len(ends) > 1:
            raise ValueError(f"{where}: row {row} names {name}, and there are {paths[ends[0]]} and {paths[ends[1]]}")
        missing += [] if ends else [(row, name)]
        found += ends
    if missing:
        row, name = missing[0]
        raise ValueError(
            f"{where}: {len(missing)} of {len(names)} rows name no image below the folder, {name} in row {row} first; "
            "add the files, or take out these rows"
        )
    return found


def _stem(path: str) -> str:
    """A path without the ending of an image."""
    stem, ending = os.path.splitext(path)
    return stem if ending.lower() in EXTENSIONS else path
