"""Published numbers as rows of a leaderboard, beside measured ones of the same protocol on the same images."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from bench.published.values import SETS, PublishedValue, published_values
from bench.results.board import Board, Cell, Row, group_of
from bench.results.record import CheckpointUsed, Result

Places = dict[tuple[str, str], PublishedValue]  # (group, metric) -> what a paper prints there


def with_published(board: Board, results: Iterable[Result]) -> Board:
    """The board of `results` with a row for all published weights that have a number in one of its columns.

    Same protocol, unchanged, on image sets of the published size. What an ablation alone has is left out.
    """
    places = _places(results)
    found: dict[str, Places] = {}
    for value in filter(_is_shown, published_values()):
        for group in places.get((value.data, value.protocol), ()):
            if value.metric in board.groups[group]:
                found.setdefault(value.checkpoint, {}).setdefault((group, value.metric), value)
    rows = [_row(name, values) for name, values in sorted(found.items())]
    caveats = {
        group: (*lines, *(note for _, values in sorted(found.items()) for note in _notes(group, values)))
        for group, lines in board.caveats.items()
    }
    return replace(board, rows=(*board.rows, *rows), caveats=caveats)


def _notes(group: str, values: Places) -> list[str]:
    """What the row of these values is, for one table of the board, where it has a number in it."""
    of_group = [value for (place, _), value in values.items() if place == group]
    tables = ", ".join(dict.fromkeys(value.table for value in of_group))
    return [f"Published, not measured here: {_said(of_group[0])} ({tables})."] if of_group else []


def _places(results: Iterable[Result]) -> dict[tuple[str, str], set[str]]:
    """(image set, protocol) as the table has them -> groups of the board that are the same."""
    found: dict[tuple[str, str], set[str]] = {}
    for result in results:
        version = f"v{result.protocol.version}"
        if result.status != "ok" or any(word != version for word in result.variant):
            continue
        for name, images in SETS.items():
            if dict(result.data.images) == dict(images.images):
                found.setdefault((name, result.protocol.name), set()).add(group_of(result))
    return found


def _is_shown(value: PublishedValue) -> bool:
    """Whether its table compares methods, or the weights are those of a recipe as it is."""
    return not value.settings and (_compares(value.table) or len(value.pretraining.split()) == 2)


@cache
def _compares(table: str) -> bool:
    return len({value.model for value in published_values() if value.table == table}) > 1


def _said(value: PublishedValue) -> str:
    trained = f"{value.epochs} epochs of {value.images}" if value.epochs else ""
    return f"{value.checkpoint} is {', '.join(filter(None, (value.model, value.architecture, trained)))}"


def _row(name: str, values: Places) -> Row:
    first = next(iter(values.values()))
    cells = {key: Cell(mean=value.value, std=0.0, seeds=1, unit=value.unit) for key, value in values.items()}
    used = CheckpointUsed(name=name, digest="", method=first.model, architecture=first.architecture)
    return Row(checkpoint=used, cells=cells, failed={}, published=True)
