"""What tests read of folders that the program has written, and archives that they write themselves."""

import csv
import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path


def lines_of(run: Path) -> list[dict]:
    """The lines of the log of a pretraining."""
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def rows_of(table: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, or of the leaderboard of a folder, by the names of its columns."""
    with open(table / "leaderboard.csv" if table.is_dir() else table, newline="") as file:
        return list(csv.DictReader(file))


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file below a folder, by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def write_tar(path: Path, files: Iterable[tuple[str, bytes]], mode: str = "w") -> None:
    """Write files, (name, content), to a tar archive; mode "a" adds them."""
    with tarfile.open(path, mode) as archive:
        for name, content in files:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
