"""What a report says: its tables, who leads each of them and the whole leaderboard, and how far that can be trusted.

It depends on result files alone, so that the same results give the same page.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import PurePath
from typing import Literal

from bench.leaderboards.tables import Cell, Leaderboard, cell_text, troubles
from bench.results.record import CheckpointUsed, Result, number_text
from bench.statistics.significance import Column, Key
from engine.extensions import opening, source_files

# measured: competes. floor: raw pixels. initial: a pretraining's weights before its first update. published: a paper's.
Kind = Literal["measured", "floor", "initial", "published"]


@dataclass(frozen=True, kw_only=True)
class TableNumber:
    """One number of a table. place: where its interval and itself lie on its column's axis, from 0 to 1."""

    text: str
    value: float | None = None  # None: there is no number
    place: tuple[float, float, float] | None = None  # low end, value, high end
    first: bool = False  # the best of its column, or level with it
    results: tuple[int, ...] = ()  # the result files that it is made of, by their place in Report.results


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One checkpoint in a table."""

    name: str
    kind: Kind
    rank: str  # "1", "2-3" for several that share it, "" for rows that compete with none
    numbers: tuple[TableNumber, ...]


@dataclass(frozen=True, kw_only=True)
class ReportTable:
    """One group of the leaderboard: an image set under a protocol."""

    anchor: str
    group: str
    result: Result  # one of the group, with its protocol, settings and image set
    about: str  # what the task is, for people; "" where it is not installed
    metrics: tuple[str, ...]
    unit: str  # of the first metric
    axis: tuple[str, str] | None  # what the ends of the first column's axis mean
    rows: tuple[TableRow, ...]
    caveats: tuple[str, ...]
    tested: bool  # whether a paired test compared the first column's best with the others

    @property
    def images(self) -> int | None:
        """Validation images that the result saw; None where it does not say."""
        count, limit = self.result.data.images.get("val"), self.result.limit
        return count if count is None or limit is None else min(count, limit)


@dataclass(frozen=True, kw_only=True)
class ReportContents:
    """A whole page."""

    tables: tuple[ReportTable, ...]
    checkpoints: tuple[Mapping[str, object], ...]
    results: tuple[Mapping[str, object], ...]  # each as its file has it, without what only programs read
    troubles: tuple[str, ...]
    newest: str  # date of the newest result


def contents(leaderboard: Leaderboard) -> ReportContents:
    """What a leaderboard and the results behind it look like."""
    good = [stored.result for stored in leaderboard.results if stored.result.status == "ok"]
    places: dict[tuple[str, Key], list[int]] = {}
    for place, result in enumerate(good):
        places.setdefault((result.group, result.checkpoint.key), []).append(place)
    return ReportContents(
        tables=tuple(_table(leaderboard, group, good, places) for group in leaderboard.groups),
        checkpoints=tuple(_facts(leaderboard, checkpoint) for checkpoint in leaderboard.rows),
        results=tuple(provenance(result) for result in good),
        troubles=tuple(troubles(leaderboard)),
        newest=max((result.date for result in good), default=""),
    )


def _facts(leaderboard: Leaderboard, checkpoint: CheckpointUsed) -> dict[str, object]:
    named = {
        name: getattr(checkpoint, name)
        for name in ("method", "recipe", "branch", "architecture", "parameters", "digest", "source")
    }
    cost = {name: value for name, value in asdict(checkpoint.training_cost).items() if value}
    kind = row_kind(leaderboard, checkpoint)
    return {"name": leaderboard.names[checkpoint], "kind": kind, **named, "cost": cost}


def row_kind(leaderboard: Leaderboard, checkpoint: CheckpointUsed) -> Kind:
    """What a row is to the others; initial weights are known by the folder that a pretraining writes them to."""
    if checkpoint in leaderboard.published:
        return "published"
    if checkpoint.is_floor:
        return "floor"
    return "initial" if PurePath(checkpoint.source).name == "start" else "measured"


@cache
def about_task(task: str) -> str:
    """The first two paragraphs of a task's file."""
    files = source_files("probes") | source_files("downstream")
    return opening(files[task]) if task in files else ""


def _table(
    leaderboard: Leaderboard, group: str, results: Sequence[Result], places: Mapping[tuple[str, Key], list[int]]
) -> ReportTable:
    metrics = leaderboard.groups[group]
    main = group, metrics[0]
    cells = {checkpoint: leaderboard.rows[checkpoint] for checkpoint in leaderboard.checkpoints_in(group)}
    axis, ranked = axis_of([row.get(main) for row in cells.values()]), ranks(leaderboard, main)
    rows = []
    for checkpoint in sorted(cells, key=lambda checkpoint: _order(cells[checkpoint].get(main))):
        made_of = tuple(places.get((group, checkpoint.key), ()))
        numbers = [
            TableNumber(
                text=cell_text(cell, with_interval=metric == metrics[0]),
                value=cell.mean if cell else None,
                place=placed(cell, axis) if cell and metric == metrics[0] else None,
                first=leaderboard.is_best(checkpoint, (group, metric)),
                results=made_of,
            )
            for metric in metrics
            for cell in [cells[checkpoint].get((group, metric))]
        ]
        rows.append(
            TableRow(
                name=leaderboard.names[checkpoint],
                kind=row_kind(leaderboard, checkpoint),
                rank=ranked.get(checkpoint, ""),
                numbers=tuple(numbers),
            )
        )
    result = next(result for result in results if result.group == group)
    unit = next((row[main].unit for row in cells.values() if main in row), "%")
    return ReportTable(
        anchor=f"table-{list(leaderboard.groups).index(group)}",
        group=group,
        result=result,
        about=about_task(result.task),
        metrics=metrics,
        unit=unit,
        axis=tuple(number_text(end, unit) for end in axis) if axis else None,  # type: ignore[arg-type]
        rows=tuple(rows),
        caveats=leaderboard.caveats[group],
        tested=main in leaderboard.ties,
    )


def _order(cell: Cell | None) -> tuple[bool, float]:
    # The best first, whichever end that is; rows without a number last.
    if cell is None:
        return True, 0.0
    return False, cell.mean if cell.higher_is_better is False else -cell.mean


def axis_of(cells: Iterable[Cell | None]) -> tuple[float, float] | None:
    """The ends of an axis that holds all numbers and intervals of a column, with a little room; None for less than two
    different numbers."""
    numbers = [cell for cell in cells if cell]
    ends = [end for cell in numbers for end in (cell.interval or (cell.mean, cell.mean))]
    if not ends or min(ends) == max(ends):
        return None
    room = (max(ends) - min(ends)) / 20
    low, high = min(ends) - room, max(ends) + room
    unit = numbers[0].unit
    return (max(low, 0.0), min(high, 100.0)) if unit == "%" else (low, high)


def placed(cell: Cell, axis: tuple[float, float] | None) -> tuple[float, float, float] | None:
    """Low end, value and high end of a number on an axis, from 0 to 1."""
    if axis is None:
        return None
    low, high = cell.interval or (cell.mean, cell.mean)
    first, second, third = ((value - axis[0]) / (axis[1] - axis[0]) for value in (low, cell.mean, high))
    return first, second, third


def ranks(leaderboard: Leaderboard, column: Column) -> dict[CheckpointUsed, str]:
    """Rank of each checkpoint that competes in a column: those level with the best share the first, then by number.

    Floors compete too: a network that raw pixels beat should look so. Published numbers do not.
    """
    ties = leaderboard.ties.get(column, frozenset())
    orders = {
        checkpoint: _order(row[column])
        for checkpoint, row in leaderboard.rows.items()
        if column in row and checkpoint not in leaderboard.published
    }
    ordered = sorted(orders.values())
    tied = sum(checkpoint.key in ties for checkpoint in orders)
    if tied < 2:
        return {checkpoint: str(1 + bisect_left(ordered, order)) for checkpoint, order in orders.items()}
    return {
        checkpoint: f"1-{tied}" if checkpoint.key in ties else str(1 + max(bisect_left(ordered, order), tied))
        for checkpoint, order in orders.items()
    }


def provenance(result: Result) -> dict[str, object]:
    """What a number rests on, for people: a result without its metrics and without long lists."""
    used, data = result.checkpoint, result.data
    warnings = result.facts.get("warnings", ())
    return {
        "checkpoint": f"{used.name}, {used.architecture}, {used.parameters:,} parameters",
        "checkpoint digest": used.digest,
        "from": used.source,
        "trained by": " ".join(filter(None, (used.method, used.recipe, used.branch))),
        "protocol": f"{result.protocol.name}, version {result.protocol.version}",
        "source of the protocol": result.protocol.source,
        "changed settings": ", ".join(f"{key}={value}" for key, value in result.protocol.changes.items()) or "none",
        "images": f"{data.name}={data.url}",
        "number of images": ", ".join(f"{count} {split}" for split, count in data.images.items()),
        "fingerprints": ", ".join(f"{split} {digest[:16]}" for split, digest in data.fingerprints.items()),
        "limit": result.limit or "none",
        "intervals": result.interval_method or "none",
        "seed": result.seed,
        "precision, decoder": f"{result.precision}, {result.decode}",
        "measured": f"{result.date}, {result.seconds:.1f} s on {result.processes} x {result.device}",
        "machine": ", ".join(f"{key} {value}" for key, value in result.hardware.items() if value not in ([], "", None)),
        "versions": ", ".join(f"{name} {version}" for name, version in result.versions.items()),
        "warnings": "; ".join(map(str, warnings)) if isinstance(warnings, list | tuple) and warnings else "none",
    }


NOT_NETWORKS = {"floor": "raw pixels", "initial": "initial weights"}  # kinds that a trained network should beat


def verdict(table: ReportTable) -> str:
    """One sentence on who leads a table, and what that rests on."""
    rows, leaders = competing(table), leaders_of(table)
    over = f"on {table.images} validation images" if table.images else "on the validation images"
    if len(rows) == 1:
        return f"{leaders[0]} alone was measured, {over}."
    if not table.tested:
        return f"{leaders[0]} has the best number {over}; there is no paired test of this metric."
    if len(leaders) == 1:
        return f"{leaders[0]} leads {over}: better than every other by a paired test on the same images (5 %, Holm)."
    if len(leaders) == len(rows):
        return f"No difference between the {len(leaders)} is significant {over}."
    return f"{in_words(leaders)} lead {over}; a paired test on the same images does not tell them apart (5 %, Holm)."


def competing(table: ReportTable) -> list[TableRow]:
    """Rows with a measured number, the best first."""
    return [row for row in table.rows if row.kind != "published" and row.numbers[0].value is not None]


def leaders_of(table: ReportTable) -> list[str]:
    """Names of the best of a table and of all that are level with it."""
    rows = competing(table)
    return [row.name for row in rows if row.numbers[0].first] or [rows[0].name]


def best_checkpoints(report: ReportContents) -> tuple[list[str], int, int]:
    """Checkpoints that lead, or tie with the leader, in the most tables; in how many, of how many.

    Tables with a single checkpoint do not count, and raw pixels are no checkpoint.
    """
    contested = [table for table in report.tables if len(competing(table)) > 1]
    floors = {row.name for table in contested for row in table.rows if row.kind == "floor"}
    wins = Counter(name for table in contested for name in leaders_of(table) if name not in floors)
    most = max(wins.values(), default=0)
    return sorted(name for name, count in wins.items() if count == most), most, len(contested)


def unbeaten_floor(report: ReportContents) -> int:
    """In how many of these tables nothing is better than raw pixels, if in as many as the best checkpoints lead."""
    floors = sum("floor" in _kinds_of_leaders(table) for table in report.tables if len(competing(table)) > 1)
    return floors if floors >= best_checkpoints(report)[1] else 0


def headline(report: ReportContents) -> str:
    """One sentence or two on the whole board."""
    names, most, contested = best_checkpoints(report)
    if not contested:
        return "Nothing was measured under one protocol for two checkpoints yet, so there is nothing to compare."
    tables = f"of {contested} table{'s' if contested > 1 else ''}"
    floor = unbeaten_floor(report)
    sentences = [f"Nothing is better than raw pixels in {floor} {tables}."] if floor else []
    if len(names) == 1:
        sentences.append(f"{names[0]} is the best checkpoint: best, or level with the best, in {most} {tables}.")
    elif names:
        which = f"{in_words(names)} are the best checkpoints"
        sentences.append(f"{which}: each is best, or level with the best, in {most} {tables}.")
    return " ".join(sentences)


def grounds(report: ReportContents) -> list[str]:
    """Sentences on why the headline can be trusted, and on what it does not cover."""
    names, _, contested = best_checkpoints(report)
    if not contested:
        return []
    sentences = []
    if unbeaten_floor(report):
        sentences.append(
            "Where nothing is better than raw pixels, a table says nothing about what the networks have learned."
        )
    sentences += [beaten for kind in NOT_NETWORKS if (beaten := _beaten(report.tables, names, kind))]
    sentences.append(
        "Level means that a paired test on the same validation images finds no difference (5 %, Holm's correction)."
    )
    chosen = sum(any(m.chosen_on_val for m in table.result.metrics.values()) for table in report.tables)
    sentences.append(
        f"{chosen} of {len(report.tables)} tables report numbers that were chosen on the validation images, which are "
        "too good; they say so."
        if chosen
        else "No number was chosen on the images that it is reported on."
    )
    sentences.append(
        "Before each evaluation the weights were checked against activations that were recorded at import."
    )
    if any(seeds_of(row) == 1 for table in report.tables for row in competing(table)):
        sentences.append(
            "Intervals cover another draw of validation images, not another training run, which may rank differently."
        )
    return sentences


def _beaten(tables: Sequence[ReportTable], names: Sequence[str], kind: str) -> str:
    """In how many tables the named are better than the rows of a kind, by the paired test; "" where none has both."""
    both = []
    for table in tables:
        kinds = {row.name: row.kind for row in competing(table)}
        others = {other for name, other in kinds.items() if name not in names}
        both += [table] if table.tested and set(names) <= set(kinds) and kind in others else []
    if not both or not names:
        return ""
    won = sum(set(names) <= set(leaders_of(table)) and kind not in _kinds_of_leaders(table) for table in both)
    who = f"{in_words(names)} {'is' if len(names) == 1 else 'are'}"
    return f"{who} significantly better than {NOT_NETWORKS[kind]} in {won} of the {len(both)} tables with both."


def _kinds_of_leaders(table: ReportTable) -> set[str]:
    leaders = leaders_of(table)
    return {row.kind for row in table.rows if row.name in leaders}


def seeds_of(row: TableRow) -> int:
    """Results behind a row's first number."""
    return len(row.numbers[0].results)


def in_words(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`"""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
