"""The leaderboard's files: always rebuilt from all result files, one row per checkpoint, one column per metric.

A column is `<data>/<protocol>:<metric>`, for example `digits/knn@dino:top1_k20`. Several seeds give their mean, with
`<column>:std` (population) and `<column>:n`.
"""

import csv
import io
from pathlib import Path

from bench.board import Board, read_board
from bench.results import result_files
from bench.tables import to_markdown
from engine.files import write_atomic

FACTS = ("name", "method", "architecture", "parameters", "digest")


def to_csv(board: Board) -> str:
    """UTF-8 text with a header, plain decimal numbers and nothing where there is no number."""
    columns = [(group, metric) for group, metrics in board.groups.items() for metric in metrics]
    several = {key for key in columns if any(row.cells[key].seeds > 1 for row in board.rows if key in row.cells)}
    header = [*FACTS]
    for group, metric in columns:
        name = f"{group}:{metric}"
        header += [name, f"{name}:std", f"{name}:n"] if (group, metric) in several else [name]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*header, "failed"])
    for row in board.rows:
        numbers: list[object] = []
        for key in columns:
            cell = row.cells.get(key)
            found = [cell.mean, cell.std, cell.seeds] if cell else ["", "", ""]
            numbers += found if key in several else found[:1]
        facts = [getattr(row.checkpoint, fact) for fact in FACTS]
        writer.writerow([*facts, *numbers, "; ".join(row.failed)])
    return buffer.getvalue()


def rewrite(out: Path) -> Board:
    """Rebuild leaderboard.csv and leaderboard.md.

    Two processes may do so at once. Each looks again after it has written: whoever writes last has seen every file.
    """
    while True:
        before = _state(out)
        board = read_board(out)
        write_atomic(out / "leaderboard.csv", to_csv(board))
        write_atomic(out / "leaderboard.md", to_markdown(board))
        if _state(out) == before:
            return board


def _state(out: Path) -> list[tuple[str, int]]:
    found = []
    for path in result_files(out):
        try:
            found.append((str(path), path.stat().st_mtime_ns))
        except FileNotFoundError:
            continue
    return found
