"""Label images by tables: find the tables, choose their columns, turn values into classes, match rows with files.

A table is a CSV, TSV, JSON Lines or Parquet file with the file names of images in one column and their labels in
another. Shapes: N rows, K classes.
"""

import csv
import io
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from engine.files import read_text
from engine.optional import require
from engine.printing import counted, did_you_mean
from imagesets.listing import (
    HOLD_OUT,
    SPLIT_WORDS,
    check_minus_one,
    doubtful_classes,
    images_below,
    short_list,
    split_folder,
    subfolders,
)
from imagesets.names import PackedNames
from imagesets.sets import ImageSet, Split
from imagesets.stored import stored_set
from imagesets.walk import EXTENSIONS, is_hidden

TABLE_ENDINGS = (".csv", ".tsv", ".jsonl", ".parquet")
# Usual names of columns in lower case, the likeliest first.
FILE_COLUMNS = (
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
LABEL_COLUMNS = (
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
WHOLE_NUMBER = re.compile(r"-?\d+(?:\.0*)?")
FRACTION = re.compile(r"-?\d*\.\d+(?:[eE][-+]?\d+)?")

INDICATORS = ("0", "1", "True", "False")  # of a column that says which images show a class
UNSURE = ("-1", "", "None", "nan")  # what else stands there for images about which nothing is known

Columns = Mapping[str, Sequence[Any]]  # name of a column -> its N values


def choose_column(url: str, option: str, name: str, usual_names: Sequence[str], columns: Sequence[str]) -> str | None:
    """The column `name`, which the URL's `option` asks for; if name is "", the first with a usual name, or None.

    Raises ValueError if there is no column `name`.
    """
    if name and name not in columns:
        raise ValueError(f"{url}: {option}={name}: no such column{did_you_mean(name, list(columns))}")
    by_lower = {column.lower(): column for column in reversed(columns)}
    return name or next((by_lower[usual] for usual in usual_names if usual in by_lower), None)


def classes_and_labels(where: str, values: Sequence[Any], separator: str = "") -> tuple[tuple[str, ...], np.ndarray]:
    """Class names (K) and labels from the N values of a column.

    Args:
        where: Names the table and its column in messages.
        values: Class names or integers, one for each image, or lists of them.
        separator: Splits each value into several class names; a key of SEPARATORS or the character itself.

    Returns:
        Labels are (N,), or (N, K) if values are lists or split: 1 if the image shows the class, else 0.

    Raises:
        ValueError: A value is missing or a fraction, or every image has a class of its own.
    """
    values = [None if isinstance(value, float) and np.isnan(value) else value for value in values]
    if separator:
        mark = SEPARATORS.get(separator, separator)
        values = [value if value is None else [name.strip() for name in str(value).split(mark)] for value in values]
    if any(isinstance(value, list | tuple) for value in values):
        rows = [[] if value is None else [name for name in value if name not in (None, "")] for value in values]
        names, indices = _names_and_indices(where, [name for row in rows for name in row])
        labels = np.zeros((len(rows), len(names)), np.int64)
        labels[np.repeat(np.arange(len(rows)), [len(row) for row in rows]), indices] = 1
        return names, labels
    if unlabelled := [row for row, value in enumerate(values, 1) if value is None or value == ""]:
        raise ValueError(
            f"{where}: {len(unlabelled)} of {len(values)} rows have no label, row {unlabelled[0]} first; add the "
            "labels; if images have several labels or none, separated by |, add '?separator=bar' to the URL"
        )
    names, labels = _names_and_indices(where, values)
    if 2 < len(names) == len(values):
        raise ValueError(f"{where}: each of the {len(values)} images has a label of its own; choose another column")
    return names, labels


def _names_and_indices(where: str, values: Sequence[Any]) -> tuple[tuple[str, ...], np.ndarray]:
    """The K distinct values as class names, sorted, integers by size; and the index (N,) of each value's name."""
    if invalid := [value for value in values if not isinstance(value, str | int | float)]:
        raise ValueError(f"{where}: {str(invalid[0])[:40]!r} is no class; labels are whole numbers or names")
    texts = [str(int(value)) if isinstance(value, bool) else str(value).strip() for value in values]
    are_numbers = all(WHOLE_NUMBER.fullmatch(text) or FRACTION.fullmatch(text) for text in set(texts))
    if are_numbers and (fraction := next((text for text in texts if not WHOLE_NUMBER.fullmatch(text)), None)):
        raise ValueError(
            f"{where}: {fraction} is not a class label; labels are whole numbers or names: choose another column"
        )
    if are_numbers:
        texts = [text.partition(".")[0] for text in texts]
        names = sorted(set(texts), key=lambda text: (int(text), text))
        check_minus_one(where, names)
    else:
        names = sorted(set(texts))
    index_of = {name: index for index, name in enumerate(names)}
    return tuple(names), np.array([index_of[text] for text in texts], np.int64)


def read_table(path: str) -> Columns:
    """The columns of a table file. Raises ValueError with the file and its problem if it cannot be read."""
    if not os.path.isfile(path):
        raise ValueError(f"{path}: there is no such file; labels= gives the table's path in the folder of the set")
    if path.endswith(".parquet"):
        require("pyarrow")
    try:
        if path.endswith(".parquet"):
            from pyarrow.parquet import read_table as read_parquet

            table = read_parquet(path)
            return {name: table.column(name).to_pylist() for name in table.column_names}
        text = read_text(path)
        return _from_json_lines(text) if path.endswith(".jsonl") else _from_csv(io.StringIO(text, newline=""))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error}); correct its name") from error
    except (ValueError, csv.Error, RecursionError) as error:
        reason = " ".join(str(error).removeprefix(f"{path}: ").split())
        raise ValueError(f"{path}: is no table of labels ({reason}); correct or save it anew") from error


def _from_csv(file: Any) -> Columns:
    """The columns of a CSV file, whose separator is the most frequent of , ; and tab in its first line."""
    header = file.readline()
    separator = max(",;\t", key=header.count)
    file.seek(0)
    reader = csv.reader(file, delimiter=separator)
    names = [name.strip() for name in next(reader, [])]
    rows = []
    for row in reader:
        if not row:
            continue
        if len(row) != len(names):
            raise ValueError(f"line {reader.line_num} has {len(row)} values, and the first line {len(names)} names")
        rows.append(row)
    return {name: [row[column] for row in rows] for column, name in enumerate(names)}


def _from_json_lines(text: str) -> Columns:
    """The columns of JSON objects, one a line; a row has None in columns that its object lacks."""
    rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("each line must hold a JSON object")
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def find_tables(url: str, place: str, names: str) -> list[str]:
    """Paths of the tables that label the images below the folder `place`; none if it has class folders.

    If `names` are given, separated by commas, these are the tables. Otherwise metadata.csv (or another ending) in the
    folder and in its splits' folders; otherwise the tables in the folder with a split in their name; otherwise the only
    table in the folder. Raises ValueError if several tables are left.
    """
    if names:
        return [os.path.join(place, os.path.expanduser(name)) for name in names.split(",")]
    split_folders = [folder for split in SPLIT_WORDS if (folder := split_folder(place, split))]
    if any(len(subfolders(folder)) > 1 for folder in split_folders):
        return []
    paths = [
        os.path.join(folder, f"metadata{ending}") for folder in (place, *split_folders) for ending in TABLE_ENDINGS
    ]
    if metadata := [path for path in paths if os.path.isfile(path)]:
        return metadata
    if not split_folders and len(subfolders(place)) > 1:
        return []
    with os.scandir(place) as entries:
        files = [entry.name for entry in entries if not is_hidden(entry.name)]
    tables = sorted(os.path.join(place, file) for file in files if file.lower().endswith(TABLE_ENDINGS))
    if by_split := [path for path in tables if find_split_word(os.path.basename(path))]:
        return by_split
    if len(tables) > 1:
        choices = short_list([os.path.basename(path) for path in tables])
        raise ValueError(f"{url}: which of its tables has the labels, {choices}? say so with '?labels=NAME.csv'")
    return tables


def find_split_word(text: str) -> str:
    """The first of SPLIT_WORDS in a text, such as a file name; "" if there is none."""
    words = re.split(r"[^a-z]+", text.lower())
    return next((word for split_words in SPLIT_WORDS.values() for word in split_words if word in words), "")


class LabelledFile(NamedTuple):
    """A row of a table of labels."""

    file: int  # index among all images below the folder
    split_word: str  # train, validation, test, ...
    label: Any


def labelled_files(
    url: str, place: str, split: Split, tables: Sequence[str], image: str = "", label: str = "", separator: str = ""
) -> ImageSet:
    """One split of the images below the folder `place` that have a label in the tables.

    Its classes are those of the rows of all splits. The split of a row is that of its column `split`, else of the name
    of its table, else of the folder of its image, else train.

    Args:
        tables: Paths of the tables.
        image: Column of the file names; "": found by its usual names.
        label: Column of the labels, or several, separated by commas, that hold 1 for images that show a class; "":
            found by its usual names.
        separator: As in `classes_and_labels`.

    Raises:
        ValueError: Columns are missing, a row names no image, an image has two rows, or no row is of the split.
    """
    files, _ = images_below(place, ["."])
    paths = list(files.names)
    rows: list[LabelledFile] = []
    notes: list[str] = []
    for table in tables:
        table_rows, note = _read_rows(url, place, table, paths, image, label, is_only_table=len(tables) == 1)
        rows += table_rows
        notes.append(note)
    table_names = ", ".join(tables)
    values = [row.label for row in rows]
    if all(isinstance(value, list) and len(value) == 1 for value in values):  # one-hot columns: a single label
        values = [value[0] for value in values]
    elif counts := [len(value) for value in values if isinstance(value, list)]:
        several, none = sum(count > 1 for count in counts), counts.count(0)
        notes.append(
            f"several labels per image: of {counted(len(rows), 'row')} {several} have more than one, {none} none"
        )
    classes, labels = classes_and_labels(f"{url}: {table_names}", values, separator)
    if duplicates := [file for file, count in Counter(row.file for row in rows).items() if count > 1]:
        raise ValueError(f"{url}: {paths[duplicates[0]]} has two rows in {table_names}; remove all but one")
    if joined_names := [name for name in classes if "|" in name or ";" in name]:
        notes.append(
            f"classes such as {joined_names[0]!r}: if these are several labels of an image, add '?separator=bar' to "
            "the URL"
        )
    if unlabelled := len(paths) - len(rows):
        notes.append(f"{unlabelled} images have no label and are not read")
    notes += doubtful_classes(classes)
    split_words = np.array([row.split_word for row in rows])
    split_word = next((word for word in SPLIT_WORDS[split] if word in split_words), "")
    if not split_word:
        hint = f"; {HOLD_OUT.removeprefix('or ')}" if split == "val" else ""
        raise ValueError(f"{url}: {table_names}: no row is of the {split} split{hint}")
    if split_word.startswith("test"):
        notes.append(f"there is no val split: {split_word} is used as val")
    for word in SPLIT_WORDS[split]:
        if word != split_word and (count := int((split_words == word).sum())):
            notes.append(f"{counted(count, 'row')} of split {word} not read: {split} is split {split_word}")
    split_rows = np.flatnonzero(split_words == split_word)
    indices = np.array([row.file for row in rows])[split_rows]
    names = [paths[index] for index in indices]
    file_names = [os.path.basename(name) for name in names]
    has_unique_names = len(set(file_names)) == len(file_names)
    return stored_set(
        url=url,
        split=split,
        classes=classes,
        labels=labels[split_rows],
        images=files.take_renamed(indices, PackedNames.pack(file_names if has_unique_names else names)),
        notes=notes,
        complete=False,
    )


def _read_rows(
    url: str, place: str, table: str, paths: Sequence[str], image: str, label: str, is_only_table: bool
) -> tuple[list[LabelledFile], str]:
    """The rows of one table, and a note for users about its columns.

    paths: of all images below the folder `place`, relative to it. Raises ValueError as `labelled_files`.
    """
    where, columns = f"{url}: {table}", read_table(table)
    file_column = choose_column(where, "image", image, FILE_COLUMNS, list(columns))
    other_columns = {name: values for name, values in columns.items() if name != file_column}
    label_columns = _label_columns(where, label, other_columns)
    table_word = find_split_word(os.path.basename(table))
    if not label_columns and table_word in SPLIT_WORDS["val"] and not is_only_table:
        return [], f"{table} has no column of labels, so it is not read"
    if not columns or not next(iter(columns.values())):
        raise ValueError(f"{where}: it has no rows; the first line must name the columns, the others hold labels")
    if not file_column or not label_columns:
        if not other_columns:
            raise ValueError(f"{where}: its only column is {file_column!r}; it needs a column of labels, too")
        role, option = ("holds the labels", "label") if file_column else ("names the files", "image")
        raise ValueError(
            f"{where}: which of its columns {role}, {short_list(list(other_columns), 8)}? say so with '?{option}=NAME';"
            " the first line must name the columns"
        )
    folders = [os.path.dirname(table)]
    folders += [split_folder(place, split) for split, words in SPLIT_WORDS.items() if table_word in words]
    folders = [os.path.relpath(folder, place) for folder in folders if folder]
    names = [_path_in(value, place) for value in columns[file_column]]
    indices = _find_files(where, folders, paths, names)
    split_values = ["" if value is None else str(value).strip() for value in columns.get("split", [""] * len(indices))]
    if unknown := sorted({value for value in split_values if value and not find_split_word(value)}):
        raise ValueError(
            f"{where}: column split holds {short_list(unknown)}, which is no split; write train, val or test, or give "
            "the column another name"
        )
    split_words = [
        find_split_word(value) or table_word or find_split_word(os.path.dirname(paths[index])) or "train"
        for value, index in zip(split_values, indices, strict=True)
    ]
    labels: Sequence[Any] = columns[label_columns[0]]
    if len(label_columns) > 1:
        labels = _shown_classes(other_columns, label_columns)
    note = f"{len(indices)} labels of {table}: files in column {file_column}, labels in {', '.join(label_columns)}"
    return [LabelledFile(*row) for row in zip(indices, split_words, labels, strict=True)], note


def _label_columns(where: str, label: str, columns: Columns) -> list[str]:
    """The column of labels; or several columns, one for each class, with 1 for images that show it; or none.

    label: the name that the user gives, or several, separated by commas, or "". Raises ValueError if there is no such
    column, or if one of several holds other values than 0 and 1.
    """
    if "," in label and label not in columns:
        names = [name.strip() for name in label.split(",")]
        for name in names:
            choose_column(where, "label", name, (), list(columns))
        if others := [name for name in names if not _is_indicator(columns[name])]:
            raise ValueError(
                f"{where}: column {others[0]} holds other values than 0 and 1, which say what an image shows"
            )
        return names
    if column := choose_column(where, "label", label, LABEL_COLUMNS, list(columns)):
        return [column]
    indicators = [name for name, values in columns.items() if _is_indicator(values)]
    for name, values in columns.items():
        if indicators and name not in indicators and _is_indicator(values, *UNSURE) and _ones(values).any():
            raise ValueError(
                f"{where}: column {name} holds -1 or nothing beside 0 and 1; write 0 or 1 for each image, or say which "
                "columns are classes with '?label=A,B'"
            )
    return indicators if len(indicators) > 1 else []


def _is_indicator(values: Sequence[Any], *others: str) -> bool:
    """Whether a column has only the values 0 and 1, or False and True, as numbers or text, or the `others`."""
    return len(values) > 0 and {str(value).removesuffix(".0") for value in values} <= {*INDICATORS, *others}


def _shown_classes(columns: Columns, names: Sequence[str]) -> list[list[str]]:
    """For each row, the `names` of the columns with a 1."""
    has_one = np.array([_ones(columns[name]) for name in names])
    return [[name for name, is_one in zip(names, row, strict=True) if is_one] for row in has_one.T]


def _ones(values: Sequence[Any]) -> np.ndarray:
    """(N,) bool, which values of a column are 1 or True."""
    return np.array([str(value).removesuffix(".0") in ("1", "True") for value in values])


def _path_in(value: Any, place: str) -> str:
    """The file path in a table, normalised; an absolute path becomes relative to the folder `place`."""
    name = os.path.normpath(str(value.get("path") if isinstance(value, dict) else value).replace("\\", "/"))
    return os.path.relpath(name, os.path.abspath(place)) if os.path.isabs(name) else name


def _find_files(where: str, folders: Sequence[str], paths: Sequence[str], names: Sequence[str]) -> list[int]:
    """Indices into `paths` of the files that the rows of a table name.

    A name is a path in one of `folders`, or else the end of a path below them, possibly without .jpg. Raises ValueError
    for a name without a file, or with several of which not exactly one is in `folders`.
    """
    index_of = {path: index for index, path in enumerate(paths)}
    indices_by_stem: dict[str, list[int]] = {}
    for index, path in enumerate(paths):
        indices_by_stem.setdefault(_stem(os.path.basename(path)), []).append(index)
    folder_prefixes = tuple(f"{folder}/" for folder in folders)
    indices, missing = [], []
    for row, name in enumerate(names, 1):
        candidates = [os.path.normpath(os.path.join(folder, name)) for folder in folders]
        matches = [index_of[path] for path in candidates if path in index_of][:1]
        if not matches:
            has_ending = name.lower().endswith(EXTENSIONS)
            matches = [
                index
                for index in indices_by_stem.get(_stem(os.path.basename(name)), ())
                if f"/{paths[index] if has_ending else _stem(paths[index])}".endswith(f"/{name}")
            ]
        if len(matches) > 1:
            matches = [index for index in matches if paths[index].startswith(folder_prefixes)] or matches
        if len(matches) > 1:
            first, second = (paths[index] for index in matches[:2])
            raise ValueError(f"{where}: row {row} names {name}, but there are {first} and {second}; write its folder")
        if not matches:
            missing.append((row, name))
        indices += matches
    if missing:
        row, name = missing[0]
        raise ValueError(
            f"{where}: {len(missing)} of {len(names)} rows name no image below the folder, {name} in row {row} first; "
            "add the files, or take out these rows"
        )
    return indices


def _stem(path: str) -> str:
    """A path without the ending of an image file."""
    stem, ending = os.path.splitext(path)
    return stem if ending.lower() in EXTENSIONS else path
