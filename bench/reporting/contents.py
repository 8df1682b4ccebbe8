"""The contents of a report: its tables, the leaders of each table and of the leaderboard, and caveats.

They depend on result files alone, so that the same results give the same page.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import PurePath
from typing import Any, Literal, get_args

from bench.leaderboards.ranks import MeanRanks, RankCorrelation, health_correlations, mean_ranks
from bench.leaderboards.tables import Cell, Leaderboard, cell_text, troubles, with_ties
from bench.results.record import CheckpointUsed, Result, images_seen, time_text
from bench.statistics.significance import Column, Key, PairedTestCache, tie_letters
from checkpoints.export import spec_in
from checkpoints.flops import forward_flops
from engine.extensions import opening, source_files
from engine.printing import in_words

# measured: a trained network. floor: raw pixels. initial: weights before the first update of a pretraining. published:
# numbers from a paper. Only measured ones are ranked.
Kind = Literal["measured", "floor", "initial", "published"]
KINDS = get_args(Kind)
BLOCK = r"(\w+)_block(\d+)"  # metrics of the blocks before the last
SHADES = 10  # steps of lightness of one hue in a column, which colour-blind readers can tell apart


@dataclass(frozen=True, kw_only=True)
class TableNumber:
    """One number of a table."""

    text: str
    value: float | None = None  # None: the checkpoint has no number here
    first: bool = False  # the best network of its column, or tied with it
    level: bool = False  # first, together with others
    results: tuple[int, ...] = ()  # the results behind the number, as indices into ReportContents.results
    shade: int | None = None  # from 0, the worst of its column, to SHADES, the best
    interval: tuple[float, float] | None = None
    letters: str = ""  # shared with networks that a paired test cannot tell from it


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One checkpoint in a table."""

    name: str
    kind: Kind
    rank: str  # "1", "2-3" for a shared one, "" for rows that are not ranked; a mean rank in an overview
    numbers: tuple[TableNumber, ...]


@dataclass(frozen=True, kw_only=True)
class ReportTable:
    """One group of the leaderboard: a protocol on an image set."""

    anchor: str
    group: str
    result: Result  # one of the group, for its protocol, settings and image set
    about: str  # description of the task; "" if it is not installed
    metrics: tuple[str, ...]
    unit: str  # of the first metric
    higher: bool  # whether higher is better for the first metric
    axis: tuple[float, float] | None  # range of the first column and its intervals
    rows: tuple[TableRow, ...]
    caveats: tuple[str, ...]
    tested: bool  # whether a paired test compared the first column's best with the others
    beats_pixels: bool | None  # whether a network is significantly better than raw pixels; None: not tested

    @property
    def images(self) -> int | None:
        """Number of validation images that were used; None if unknown."""
        data = self.result.data
        return images_seen(data, self.result.limit) if "val" in data.images else None


@dataclass(frozen=True, kw_only=True)
class ReportContents:
    """The contents of a whole page."""

    tables: tuple[ReportTable, ...]
    overview: tuple[TableRow, ...]  # a row for each checkpoint, with one number for each table
    overall: str  # a sentence on the mean ranks, "" if there are none
    correlations: tuple[RankCorrelation, ...]  # of health metrics with linear accuracy
    checkpoints: tuple[Mapping[str, Any], ...]
    results: tuple[Mapping[str, object], ...]  # the provenance of each result (`provenance`)
    troubles: tuple[str, ...]  # a line for each failed result and each file that cannot be read
    newest: str  # date of the newest result


def contents(leaderboard: Leaderboard, networks: Leaderboard | None = None) -> ReportContents:
    """The contents of a report on a leaderboard and the results behind it.

    networks: its trained networks with ties among themselves (`networks_of`); None uses the leaderboard's own ties.
    """
    networks = networks or trained_networks(leaderboard)
    good = [stored.result for stored in leaderboard.results if stored.result.status == "ok"]
    indices: dict[tuple[str, Key], list[int]] = {}  # (group, checkpoint) -> indices of its results in `good`
    for index, result in enumerate(good):
        indices.setdefault((result.group, result.checkpoint.key), []).append(index)
    tables = tuple(_table(leaderboard, networks, group, good, indices) for group in leaderboard.groups)
    ranked = mean_ranks(networks)
    return ReportContents(
        tables=tables,
        overview=_overview(leaderboard, tables, ranked),
        overall=ranked.sentence({used.key: name for used, name in leaderboard.names.items()}),
        correlations=tuple(health_correlations(networks)),
        checkpoints=tuple(_facts(leaderboard, checkpoint) for checkpoint in leaderboard.rows),
        results=tuple(provenance(result) for result in good),
        troubles=tuple(troubles(leaderboard)),
        newest=max((result.date for result in good), default=""),
    )


def trained_networks(leaderboard: Leaderboard) -> Leaderboard:
    """The leaderboard without raw pixels, initial weights and published numbers, which are not ranked."""
    rows = {used: cells for used, cells in leaderboard.rows.items() if row_kind(leaderboard, used) == "measured"}
    keys = {used.key for used in rows}
    ties = {column: tied & keys for column, tied in leaderboard.ties.items()}
    return replace(leaderboard, rows=rows, ties=ties)


def networks_of(leaderboard: Leaderboard, cache: PairedTestCache[float]) -> Leaderboard:
    """`trained_networks` with paired tests among these alone (raw pixels may lead the leaderboard), and with letters of
    ties in each main column."""
    networks = with_ties(trained_networks(leaderboard), leaderboard.results, cache)
    columns = {}
    for group, (main, *_) in networks.groups.items():
        cells = {used.key: row[group, main] for used, row in networks.rows.items() if (group, main) in row}
        ordered = sorted(cells.items(), key=lambda item: _order(item[1]))
        columns[group, main] = {key: cell.mean for key, cell in ordered}
    return replace(networks, letters=tie_letters(columns, networks.ties, networks.results, cache))


def _overview(leaderboard: Leaderboard, tables: Sequence[ReportTable], ranked: MeanRanks) -> tuple[TableRow, ...]:
    """A row for each checkpoint, by mean rank and then by name; rows that are not ranked come last."""
    numbers = {(row.name, table.anchor): row.numbers[0] for table in tables for row in table.rows}
    order = list(KINDS)

    def sort_key(checkpoint: CheckpointUsed) -> tuple[int, float, str]:
        rank = ranked.means.get(checkpoint.key, float("inf"))
        return order.index(row_kind(leaderboard, checkpoint)), rank, leaderboard.names[checkpoint]

    return tuple(
        TableRow(
            name=leaderboard.names[checkpoint],
            kind=row_kind(leaderboard, checkpoint),
            rank=ranked.text(checkpoint.key),
            numbers=tuple(
                numbers.get((leaderboard.names[checkpoint], table.anchor), TableNumber(text="")) for table in tables
            ),
        )
        for checkpoint in sorted(leaderboard.rows, key=sort_key)
    )


def _facts(leaderboard: Leaderboard, checkpoint: CheckpointUsed) -> dict[str, Any]:
    """Name, kind, origin and costs of a checkpoint; `cost` holds the costs as numbers, the rest is for people."""
    identity = {
        name: getattr(checkpoint, name)
        for name in ("method", "recipe", "branch", "architecture", "parameters", "digest", "source")
    }
    cost = {name: value for name, value in asdict(checkpoint.training_cost).items() if value}
    saved = leaderboard.folder.parent / "exports" / f"{checkpoint.name}-{checkpoint.digest[:8]}"
    specs = (spec_in(folder, checkpoint.digest) for folder in (saved, checkpoint.source) if folder)
    if spec := next(filter(None, specs), None):
        cost["forward_gflop"] = forward_flops(spec) / 1e9  # per image, at the network's own image size
    texts = {
        "training time" if name == "hours" else name.replace("_", " "): (
            time_text(value) if name == "hours" else f"{value:.4g}" if isinstance(value, float) else value
        )
        for name, value in cost.items()
    }
    kind = row_kind(leaderboard, checkpoint)
    return {"name": leaderboard.names[checkpoint], "kind": kind, **identity, **texts, "cost": cost}


def row_kind(leaderboard: Leaderboard, checkpoint: CheckpointUsed) -> Kind:
    """The kind of a row; initial weights are recognised by the folder `start` to which a pretraining writes them."""
    if checkpoint in leaderboard.published:
        return "published"
    if checkpoint.is_floor:
        return "floor"
    return "initial" if PurePath(checkpoint.source).name == "start" else "measured"


@cache
def about_task(task: str) -> str:
    """The first two paragraphs of the docstring of a task's file; "" if the task is not installed."""
    files = source_files("probes") | source_files("downstream")
    return opening(files[task]) if task in files else ""


def _table(
    leaderboard: Leaderboard,
    networks: Leaderboard,
    group: str,
    results: Sequence[Result],
    indices: Mapping[tuple[str, Key], list[int]],
) -> ReportTable:
    """The table of a group. indices: (group, checkpoint) -> indices of its results."""
    metrics = leaderboard.groups[group]
    main = group, metrics[0]
    cells = {checkpoint: leaderboard.rows[checkpoint] for checkpoint in leaderboard.checkpoints_in(group)}
    ranked = ranks(networks, main)
    result = next(result for result in results if result.group == group)
    level = {
        metric: sum(networks.is_best(used, (group, metric)) for used in networks.checkpoints_in(group)) > 1
        for metric in metrics
    }
    column = [row[main] for used, row in cells.items() if main in row and used in networks.rows]
    rows = []
    for checkpoint in sorted(cells, key=lambda checkpoint: _order(cells[checkpoint].get(main))):
        own_results = tuple(indices.get((group, checkpoint.key), ()))
        numbers = []
        for metric in metrics:
            cell = cells[checkpoint].get((group, metric))
            is_tested = checkpoint in networks.rows and (group, metric) in networks.ties
            first = is_tested and networks.is_best(checkpoint, (group, metric))
            is_level = first and level[metric]
            letters = networks.letters.get((group, metric), {}).get(checkpoint.key, "a" if is_level else "")
            numbers.append(
                TableNumber(
                    text=cell_text(cell, with_interval=metric == metrics[0]),
                    value=cell.mean if cell else None,
                    first=first,
                    level=is_level,
                    letters=letters,
                    results=own_results,
                    interval=cell.interval if cell else None,
                )
            )
        if main_cell := cells[checkpoint].get(main):
            numbers[0] = replace(numbers[0], shade=_shade(main_cell, column))
        rows.append(
            TableRow(
                name=leaderboard.names[checkpoint],
                kind=row_kind(leaderboard, checkpoint),
                rank=ranked.get(checkpoint, ""),
                numbers=tuple(numbers),
            )
        )
    unit = next((row[main].unit for row in cells.values() if main in row), "%")
    return ReportTable(
        anchor=f"table-{list(leaderboard.groups).index(group)}",
        group=group,
        result=result,
        about=about_task(result.task),
        metrics=metrics,
        unit=unit,
        higher=all(row[main].higher_is_better is not False for row in cells.values() if main in row),
        axis=axis_of([row.get(main) for row in cells.values()]),
        rows=tuple(rows),
        caveats=merged_notes(leaderboard.caveats[group], [leaderboard.names[used] for used in cells]),
        tested=main in networks.ties,
        beats_pixels=_beats_pixels(leaderboard, networks, main),
    )


def _shade(cell: Cell, column: Sequence[Cell]) -> int | None:
    """Shade of a number by its distance from the best trained network; None for fewer than two networks.

    The scale spans at least twice the widest interval, so that numbers whose differences are noise look alike.
    """
    if len(column) < 2:
        return None
    values = [other.mean for other in column]
    widest = max((other.interval[1] - other.interval[0] for other in column if other.interval), default=0.0)
    behind = cell.mean - min(values) if cell.higher_is_better is False else max(values) - cell.mean
    scale = max(max(values) - min(values), 2 * widest)
    return round(SHADES * (1 - min(max(behind / scale, 0.0), 1.0))) if scale else SHADES


def _beats_pixels(leaderboard: Leaderboard, networks: Leaderboard, column: Column) -> bool | None:
    """Whether raw pixels are not among the best of a column; None without a test, raw pixels or networks."""
    floors = {used.key for used, cells in leaderboard.rows.items() if used.is_floor and column in cells}
    if not floors or column not in leaderboard.ties or not any(column in cells for cells in networks.rows.values()):
        return None
    return not floors & leaderboard.ties[column]


def merged_notes(notes: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Notes, with those that several checkpoints share merged: `a and b: NOTE`, `all checkpoints: NOTE`."""
    shared: dict[str, list[str]] = {}
    for note in notes:
        owner = next((name for name in names if note.startswith(f"{name.removesuffix(' (floor)')}: ")), "")
        rest = note[len(owner.removesuffix(" (floor)")) + 2 :] if owner else note
        shared.setdefault(rest, []).extend([owner] if owner else [])
    return tuple(
        note if not owners else f"{'all checkpoints' if len(owners) == len(names) > 1 else in_words(owners)}: {note}"
        for note, owners in shared.items()
    )


def sweep_of(row: TableRow, table: ReportTable, pattern: str) -> list[tuple[float, TableNumber]]:
    """Points (x, number) of the first metric that is swept, such as `top1` over k in `top1_k10` and `top1_k20`.

    pattern: matches a metric's name; its groups are the name without x, and x. For BLOCK the main number is added as
    that of the last block.
    """
    matches = [(re.fullmatch(pattern, metric), row.numbers[index]) for index, metric in enumerate(table.metrics)]
    swept_metric = next((match[1] for match, _ in matches if match), "")
    numbers = {float(match[2]): number for match, number in matches if match and match[1] == swept_metric}
    points = [(x, numbers[x]) for x in sorted(numbers) if numbers[x].value is not None]
    if pattern == BLOCK and points and row.numbers[0].value is not None:
        points.append((points[-1][0] + 1, row.numbers[0]))
    return points


def best_blocks(table: ReportTable) -> str:
    """A sentence with the best block of each leading network; "" for a protocol that reads only the last block."""
    parts = []
    for row in competing(table)[:LISTED]:
        if points := sweep_of(row, table, BLOCK):
            values = {block: number.value or 0.0 for block, number in points}
            best, last = (max if table.higher else min)(values, key=values.__getitem__), points[-1][0]
            loss = "the last" if best == last else f"the last is {abs(values[best] - values[last]):.3g} worse"
            parts.append(f"{row.name} {best:.0f} of {last:.0f} ({loss})")
    return f"Best block, chosen on these images: {', '.join(parts)}." if parts else ""


def _order(cell: Cell | None) -> tuple[bool, float]:
    # Sorts the best number first, whichever direction is better, and rows without a number last.
    if cell is None:
        return True, 0.0
    return False, cell.mean if cell.higher_is_better is False else -cell.mean


def axis_of(cells: Iterable[Cell | None]) -> tuple[float, float] | None:
    """Ends of an axis for all numbers and intervals of a column, with a margin; None without two different numbers."""
    numbers = [cell for cell in cells if cell]
    ends = [end for cell in numbers for end in (cell.interval or (cell.mean, cell.mean))]
    if not ends or min(ends) == max(ends):
        return None
    margin = (max(ends) - min(ends)) / 20
    low, high = min(ends) - margin, max(ends) + margin
    unit = numbers[0].unit
    return (max(low, 0.0), min(high, 100.0)) if unit == "%" else (low, high)


def ranks(leaderboard: Leaderboard, column: Column) -> dict[CheckpointUsed, str]:
    """Rank of each checkpoint in a column: those tied with the best share the first rank, the others follow by number.
    Empty for a single checkpoint."""
    ties = leaderboard.ties.get(column, frozenset())
    orders = {
        checkpoint: _order(row[column])
        for checkpoint, row in leaderboard.rows.items()
        if column in row and checkpoint not in leaderboard.published
    }
    if len(orders) < 2:
        return {}
    ordered = sorted(orders.values())
    tied = sum(checkpoint.key in ties for checkpoint in orders)
    if tied < 2:
        return {checkpoint: str(1 + bisect_left(ordered, order)) for checkpoint, order in orders.items()}
    return {
        checkpoint: f"1-{tied}" if checkpoint.key in ties else str(1 + max(bisect_left(ordered, order), tied))
        for checkpoint, order in orders.items()
    }


def provenance(result: Result) -> dict[str, object]:
    """The provenance of a number, for people: what was evaluated, how, on which images and where."""
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


def verdict(table: ReportTable) -> str:
    """A sentence or two on which network leads a table, and on the evidence."""
    rows, leaders = competing(table), leaders_of(table)
    over = f"on {table.images} validation images" if table.images else "on the validation images"
    if not rows:
        return "No trained network was measured."
    if len(rows) == 1:
        sentence = f"Only {leaders[0]} was measured, {over}."
    elif not table.tested:
        sentence = f"{leaders[0]} has the best number {over}; there is no paired test of this metric."
    elif len(leaders) == 1:
        sentence = (
            f"{leaders[0]} leads {over}: better than every other by a paired test on the same images (5 %, Holm)."
        )
    elif len(leaders) == len(rows):
        sentence = f"None of the differences between the {len(leaders)} networks is significant {over}."
    else:
        sentence = (
            f"{in_words(leaders)} lead {over}; a paired test on the same images does not tell them apart (5 %, Holm)."
        )
    floors = "None is shown to be better than raw pixels." if table.beats_pixels is False else ""
    return " ".join(filter(None, (sentence, floors, best_blocks(table))))


def competing(table: ReportTable) -> list[TableRow]:
    """Rows of trained networks with a measured number, the best first."""
    return [row for row in table.rows if row.kind == "measured" and row.numbers[0].value is not None]


def leaders_of(table: ReportTable) -> list[str]:
    """Names of the best network of a table and of all networks tied with it."""
    rows = competing(table)
    return [row.name for row in rows if row.numbers[0].first] or [row.name for row in rows[:1]]


def headline(report: ReportContents) -> str:
    """A few sentences on what paired tests show over all tables."""
    contested = [table for table in report.tables if len(competing(table)) > 1 and table.tested]
    if not contested:
        return "No two networks were measured and tested under one protocol yet, so there is nothing to compare."
    total = f"of {len(contested)} protocol{'s' if len(contested) > 1 else ''}"
    leaders = [leaders_of(table) for table in contested]
    names = dict.fromkeys(name for tied in leaders for name in tied)
    first = {name: sum(name in tied for tied in leaders) for name in names}
    alone = {name: sum(tied == [name] for tied in leaders) for name in names}
    best = sorted(name for name in names if first[name] == max(first.values()))
    if not any(alone.values()):
        sentences = [f"No network is significantly better than all others in any {total}."]
    else:
        won = sorted((name for name in names if alone[name]), key=lambda name: -alone[name])
        parts = [f"{name} in {alone[name]}" for name in won[:NAMED]] + ["others elsewhere"] * (len(won) > NAMED)
        sentences = [f"Significantly better than every other network: {', '.join(parts)} {total}."]
    if max(first.values()) > max(alone.values()):
        names_of_best = in_words(best) if len(best) <= NAMED else f"{len(best)} networks"
        sentences.append(f"Best or tied with the best most often: {names_of_best}, in {max(first.values())}.")
    beaten = [table.beats_pixels for table in report.tables if table.beats_pixels is not None]
    if not all(beaten):
        unbeaten = f"{beaten.count(False)} of {len(beaten)} protocol{'s' if len(beaten) > 1 else ''}"
        sentences.append(f"No network is shown to be better than raw pixels in {unbeaten} that measured them.")
    return " ".join(sentences)


NAMED = 3  # networks that a sentence names, at most
LISTED = 8  # networks whose best block is listed, and notes that are listed, at most


def grounds(report: ReportContents) -> list[str]:
    """Sentences on what the headline is based on, and on what it does not cover."""
    if not any(len(competing(table)) > 1 for table in report.tables):
        return []
    sentences = [
        "Tied means that a paired test on the same validation images finds no difference (5 %, Holm's correction)."
    ]
    chosen = sum(any(m.chosen_on_val for m in table.result.metrics.values()) for table in report.tables)
    sentences.append(
        f"{chosen} of {len(report.tables)} tables report numbers that were chosen on the validation images and are "
        "therefore too good; these tables say so."
        if chosen
        else "No number was chosen on the images that it is reported on."
    )
    if any(len(row.numbers[0].results) == 1 for table in report.tables for row in competing(table)):
        sentences.append(
            "Intervals cover the choice of validation images, not that of the training seed: another training run may "
            "rank differently."
        )
    return sentences


def common_notes(tables: Sequence[ReportTable]) -> list[str]:
    """Notes that several tables share, with the number of these tables; the most frequent ones first."""
    counts = Counter(note for table in tables for note in table.caveats)
    return [
        f"{'All' if count == len(tables) else f'{count} of'} {len(tables)} tables: {note}"
        for note, count in counts.most_common(LISTED)
        if count > 1
    ]
