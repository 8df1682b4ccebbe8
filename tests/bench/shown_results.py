"""Results for tests of reports and pages."""

import html.parser
from dataclasses import replace

from made_results import made_leaderboard, made_result

from bench.reports.contents import contents
from bench.results.record import CheckpointUsed, MetricRecord, Result
from bench.statistics.significance import Ties


def result(checkpoint: CheckpointUsed, top1: float, **fields) -> Result:
    """A result with an accuracy, its interval and its array, and a time."""
    metrics = {
        "top1": MetricRecord(value=top1, interval=(top1 - 2, top1 + 2), array="top1"),
        "seconds": MetricRecord(value=100 - top1, unit="s", higher_is_better=False),
    }
    return made_result(checkpoint, fields.pop("metrics", metrics), **fields)


def report_of(results, ties=None):
    """ties: column -> those that share its first place, of all that were tested."""
    board = made_leaderboard(results)
    everyone = frozenset(used.key for used in board.rows)
    return contents(replace(board, ties={column: Ties(level, everyone) for column, level in (ties or {}).items()}))


def shown(table) -> list[tuple[str, str, str, bool]]:
    """Name, kind, rank and whether it is bold, of each row of a table of a report."""
    board = table.board
    return [
        (board.names[used], board.kinds[used], table.ranks.get(used.key, ""), board.is_best(used, table.main))
        for used in table.checkpoints
    ]


class Elements(html.parser.HTMLParser):
    """The names and the attributes of all elements of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.attributes += attrs
