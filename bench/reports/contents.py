"""The contents of a report: its tables and overview, with ranks, ties, intervals, caveats and provenance; and what it
says in sentences: which networks lead, on what evidence, and with which caveats.

They depend on result files alone, so that the same results give the same page.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path, PurePath
from typing import Any, Literal, get_args

from bench.reports.leaderboard import Cell, Leaderboard, cell_text, troubles, with_ties
from bench.reports.ranks import MeanRanks, mean_ranks
from bench.results.record import CheckpointUsed, Result, images_seen, interval_decimals, suffix, time_text
from bench.statistics.compare import interval_text
from bench.statistics.matching import match_results, paired_test
from bench.statistics.significance import Column, Key, PairedTestCache, paired_tests, tie_letters
from checkpoints.export import spec_in
from checkpoints.flops import forward_flops
from engine.extensions import opening_paragraphs, source_files
from engine.files import digest
from engine.printing import in_words

# measured: a trained network. floor: raw pixels. initial: weights before the first update of a pretraining. published:
# numbers from a paper. Only trained networks are ranked.
Kind = Literal["measured", "floor", "initial", "published"]
KINDS = get_args(Kind)
BLOCK = r"(\w+)_block(\d+)"  # pattern of the metrics of blocks before the last
SHADES = 10  # steps of lightness of one hue, which colour-blind readers can tell apart
MAX_NAMED = 3  # networks that a sentence names
MAX_LISTED = 8  # networks whose best block is listed, and notes that are listed


@dataclass(frozen=True, kw_only=True)
class TableNumber:
    """One number of a table."""

    text: str
    value: float | None = None  # None: the checkpoint has no number here
    is_best: bool = False  # the best network of its column, or tied with it
    is_tied: bool = False  # the best together with others
    results: tuple[int, ...] = ()  # the results behind the number, as indices into ReportContents.results
    shade: int | None = None  # from 0, the worst of its column, to SHADES, the best
    interval: tuple[float, float] | None = None
    letters: str = ""  # networks that share one are not significantly different in a paired test


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One checkpoint in a table."""

    name: str
    kind: Kind
    rank: str  # "1"; "1-3" if shared; "" for rows that are not ranked; in the overview the mean rank
    numbers: tuple[TableNumber, ...]


@dataclass(frozen=True, kw_only=True)
class ReportTable:
    """One group of the leaderboard: a protocol on an image set."""

    anchor: str
    group: str
    result: Result  # any result of the group, for its protocol, settings and image set
    about: str  # description of the task; "" if it is not installed
    metrics: tuple[str, ...]
    unit: str  # of the first metric
    higher_is_better: bool  # of the first metric
    axis: tuple[float, float] | None  # ends of the axis on which the first column and its intervals are drawn
    rows: tuple[TableRow, ...]
    caveats: tuple[str, ...]
    is_tested: bool  # whether paired tests compared the first column's best network with the others
    beats_pixels: bool | None  # whether a network is significantly better than raw pixels; None: not tested
    over_pixels: str = ""  # by how much the only network differs from raw pixels: `53.1 points [46.2, 60.0]`

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
    overall: str  # a sentence on the mean ranks; "" if there are none
    checkpoints: tuple[Mapping[str, Any], ...]
    results: tuple[Mapping[str, object], ...]  # the provenance of each result (`provenance`)
    troubles: tuple[str, ...]  # a line for each failed result and each file that cannot be read
    newest: str  # date of the newest result


def read_contents(leaderboard: Leaderboard, out: Path) -> ReportContents:
    """The contents of a report on the leaderboard of a folder; earlier paired tests are read from OUT/cache."""
    cache = paired_tests(out)
    networks = networks_of(leaderboard, cache)
    cache.save({stored.identity for stored in leaderboard.results})
    return contents(leaderboard, networks)


def contents(leaderboard: Leaderboard, networks: Leaderboard | None = None) -> ReportContents:
    """The contents of a report on a leaderboard and the results behind it.

    networks: its trained networks with ties among themselves (`networks_of`); None uses the leaderboard's own ties.
    """
    networks = networks or trained_networks(leaderboard)
    results = [stored.result for stored in leaderboard.results if stored.result.status == "ok"]
    indices: dict[tuple[str, Key], list[int]] = {}  # (group, checkpoint) -> indices of its results
    for index, result in enumerate(results):
        indices.setdefault((result.group, result.checkpoint.key), []).append(index)
    checks = {result.group for result in results if result.limit is not None or result.protocol.name.endswith("smoke")}
    groups = sorted(leaderboard.groups, key=checks.__contains__)  # checks that something runs come last
    tables = tuple(_table(leaderboard, networks, group, results, indices) for group in groups)
    ranked = mean_ranks(networks)
    return ReportContents(
        tables=tables,
        overview=_overview(leaderboard, tables, ranked),
        overall=ranked.sentence({used.key: name for used, name in leaderboard.names.items()}),
        checkpoints=tuple(_checkpoint_facts(leaderboard, checkpoint) for checkpoint in leaderboard.rows),
        results=tuple(provenance(result) for result in results),
        troubles=tuple(troubles(leaderboard)),
        newest=max((result.date for result in results), default=""),
    )


def trained_networks(leaderboard: Leaderboard) -> Leaderboard:
    """The leaderboard without raw pixels, initial weights and published numbers, which are not ranked."""
    rows = {used: cells for used, cells in leaderboard.rows.items() if row_kind(leaderboard, used) == "measured"}
    keys = {used.key for used in rows}
    ties = {column: tied & keys for column, tied in leaderboard.ties.items()}
    return replace(leaderboard, rows=rows, ties=ties)


def networks_of(leaderboard: Leaderboard, cache: PairedTestCache) -> Leaderboard:
    """`trained_networks` with their own paired tests, and with letters of ties in each main column.

    The tests of the leaderboard compare with its best row, which may be raw pixels; these compare networks only.
    """
    networks = with_ties(trained_networks(leaderboard), leaderboard.results, cache)
    columns = {}
    for group, (main, *_) in networks.groups.items():
        cells = {used.key: row[group, main] for used, row in networks.rows.items() if (group, main) in row}
        ordered = sorted(cells.items(), key=lambda item: _best_first(item[1]))
        columns[group, main] = {key: cell.mean for key, cell in ordered}
    return replace(networks, letters=tie_letters(columns, networks.ties, networks.results, cache))


def _overview(leaderboard: Leaderboard, tables: Sequence[ReportTable], ranked: MeanRanks) -> tuple[TableRow, ...]:
    """A row for each checkpoint, by mean rank and then by name; rows that are not ranked come last."""
    main_numbers = {(row.name, table.anchor): row.numbers[0] for table in tables for row in table.rows}

    def sort_key(checkpoint: CheckpointUsed) -> tuple[int, float, str]:
        rank = ranked.means.get(checkpoint.key, float("inf"))
        return KINDS.index(row_kind(leaderboard, checkpoint)), rank, leaderboard.names[checkpoint]

    rows = []
    for checkpoint in sorted(leaderboard.rows, key=sort_key):
        name = leaderboard.names[checkpoint]
        rows.append(
            TableRow(
                name=name,
                kind=row_kind(leaderboard, checkpoint),
                rank=ranked.text(checkpoint.key),
                numbers=tuple(main_numbers.get((name, table.anchor), TableNumber(text="")) for table in tables),
            )
        )
    return tuple(rows)


def _checkpoint_facts(leaderboard: Leaderboard, checkpoint: CheckpointUsed) -> dict[str, Any]:
    """Name, kind, anchor, origin and costs of a checkpoint as shown; `cost` holds the costs as numbers."""
    identity = {
        name: getattr(checkpoint, name)
        for name in ("method", "recipe", "branch", "architecture", "parameters", "digest", "source")
    }
    cost = asdict(checkpoint.training_cost)
    saved = (leaderboard.folder.parent / "exports").glob(f"*-{checkpoint.digest[:8]}")
    folders = [*map(str, saved), checkpoint.source]
    specs = (spec_in(folder, checkpoint.digest) for folder in folders if folder)
    if spec := next(filter(None, specs), None):
        evaluated = replace(spec, image_size=checkpoint.image_size or spec.image_size)
        cost["forward_gflop"] = forward_flops(evaluated) / 1e9  # of an image
    own = [stored.result for stored in leaderboard.results if stored.result.checkpoint.key == checkpoint.key]
    cost["evaluation_seconds"] = sum(result.seconds for result in own)
    cost["evaluation_images_per_second"] = max((result.images_per_second or 0.0 for result in own), default=0.0)
    cost = {name: value for name, value in cost.items() if value}
    texts = {
        "training time" if name == "hours" else name.replace("_", " "): (
            time_text(value) if name == "hours" else f"{value:.4g}" if isinstance(value, float) else value
        )
        for name, value in cost.items()
    }
    kind = row_kind(leaderboard, checkpoint)
    name = leaderboard.names[checkpoint]
    return {"name": name, "kind": kind, **identity, **texts, "cost": cost, "anchor": slug(*checkpoint.key)}


def slug(*words: str) -> str:
    """An anchor that depends on these words alone: `digits-knn@dino-3f2a91bc`."""
    readable = re.sub(r"[^A-Za-z0-9._@-]+", "-", words[0]).strip("-.")[:60]
    return f"{readable}-{digest(list(words))[:8]}"


def row_kind(leaderboard: Leaderboard, checkpoint: CheckpointUsed) -> Kind:
    """The kind of a row; initial weights are recognised by the folder `start` to which a pretraining writes them."""
    if checkpoint in leaderboard.published:
        return "published"
    if checkpoint.is_raw_pixels:
        return "floor"
    return "initial" if PurePath(checkpoint.source).name == "start" else "measured"


@cache
def about_task(task: str) -> str:
    """The first two paragraphs of the docstring of a task's file; "" if the task is not installed."""
    files = source_files("probes") | source_files("downstream")
    return opening_paragraphs(files[task]) if task in files else ""


def _table(
    leaderboard: Leaderboard,
    networks: Leaderboard,
    group: str,
    results: Sequence[Result],
    indices: Mapping[tuple[str, Key], list[int]],
) -> ReportTable:
    """The table of a group. indices: (group, checkpoint) -> indices of its results."""
    metrics = leaderboard.groups[group]
    main = group, metrics[0]  # column of the first metric
    cells = {checkpoint: leaderboard.rows[checkpoint] for checkpoint in leaderboard.checkpoints_in(group)}
    ranked = ranks(networks, main)
    result = next(result for result in results if result.group == group)
    has_ties = {
        metric: sum(networks.is_best(used, (group, metric)) for used in networks.checkpoints_in(group)) > 1
        for metric in metrics
    }
    main_cells = [row[main] for used, row in cells.items() if main in row and used in networks.rows]
    rows = []
    for checkpoint in sorted(cells, key=lambda checkpoint: _best_first(cells[checkpoint].get(main))):
        own_results = tuple(indices.get((group, checkpoint.key), ()))
        numbers = []
        for metric in metrics:
            cell = cells[checkpoint].get((group, metric))
            is_tested = checkpoint in networks.rows and (group, metric) in networks.ties
            is_best = is_tested and networks.is_best(checkpoint, (group, metric))
            is_tied = is_best and has_ties[metric]
            letters = networks.letters.get((group, metric), {}).get(checkpoint.key, "a" if is_tied else "")
            numbers.append(
                TableNumber(
                    text=cell_text(cell, with_interval=metric == metrics[0]),
                    value=cell.mean if cell else None,
                    is_best=is_best,
                    is_tied=is_tied,
                    letters=letters,
                    results=own_results,
                    interval=cell.interval if cell else None,
                )
            )
        if main_cell := cells[checkpoint].get(main):
            numbers[0] = replace(numbers[0], shade=_shade(main_cell, main_cells))
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
        anchor=slug(group),
        group=group,
        result=result,
        about=about_task(result.task),
        metrics=metrics,
        unit=unit,
        higher_is_better=all(row[main].higher_is_better is not False for row in cells.values() if main in row),
        axis=axis_of([row[main] for row in cells.values() if main in row]),
        rows=tuple(rows),
        caveats=merged_notes(leaderboard.caveats[group], [leaderboard.names[used] for used in cells]),
        is_tested=main in networks.ties,
        beats_pixels=_beats_pixels(leaderboard, networks, main),
        over_pixels=_over_pixels(leaderboard, networks, main),
    )


def _shade(cell: Cell, column: Sequence[Cell]) -> int | None:
    """Shade of a number by its distance from the best trained network; None for fewer than two networks.

    column: of the trained networks. The scale spans at least twice the widest interval, so that numbers whose
    differences are noise look alike.
    """
    if len(column) < 2:
        return None
    values = [other.mean for other in column]
    widest = max((other.interval[1] - other.interval[0] for other in column if other.interval), default=0.0)
    behind = cell.mean - min(values) if cell.higher_is_better is False else max(values) - cell.mean
    scale = max(max(values) - min(values), 2 * widest)
    return round(SHADES * (1 - min(max(behind / scale, 0.0), 1.0))) if scale else SHADES


def _beats_pixels(leaderboard: Leaderboard, networks: Leaderboard, column: Column) -> bool | None:
    """Whether a network is significantly better than raw pixels; None without a test, raw pixels or networks."""
    raw_pixels = {used.key for used, cells in leaderboard.rows.items() if used.is_raw_pixels and column in cells}
    if not raw_pixels or column not in leaderboard.ties or not any(column in cells for cells in networks.rows.values()):
        return None
    return not raw_pixels & leaderboard.ties[column]


def _over_pixels(leaderboard: Leaderboard, networks: Leaderboard, column: Column) -> str:
    """The difference between the only network of a column and raw pixels, with the interval of the paired test; "" for
    several networks, and without such a test. Positive: the network is better."""
    of_networks = [used for used, cells in networks.rows.items() if column in cells]
    of_pixels = [used for used, cells in leaderboard.rows.items() if used.is_raw_pixels and column in cells]
    compared = [*of_networks, *of_pixels]
    if not len(of_networks) == len(of_pixels) == 1 or column not in leaderboard.ties:
        return ""
    of_group = [stored for stored in leaderboard.results if stored.result.group == column[0]]
    sides = [[stored for stored in of_group if stored.result.checkpoint.key == used.key] for used in compared]
    matches, _ = match_results(sides[0], sides[1], (compared[0].name, compared[1].name))
    if not matches:
        return ""
    try:
        test = paired_test(matches[0], column[1])
    except ValueError:
        return ""
    cell = networks.rows[compared[0]][column]
    better = -1 if cell.higher_is_better is False else 1
    low, high = sorted((better * test.low, better * test.high))
    digits = interval_decimals(test.difference, cell.unit)
    unit = " points" if cell.unit == "%" else suffix(cell.unit)
    return f"{better * test.difference:.{digits}f}{unit} {interval_text(low, high, digits)}"


def merged_notes(notes: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Notes `CHECKPOINT: NOTE`, those that checkpoints share merged: `a and b: NOTE`, `all checkpoints: NOTE`.

    names: of the checkpoints; a name that ends with ` (floor)` begins notes without this ending.
    """
    checkpoints_by_note: dict[str, list[str]] = {}
    for note in notes:
        name = next((name for name in names if note.startswith(f"{name.removesuffix(' (floor)')}: ")), "")
        text = note[len(name.removesuffix(" (floor)")) + 2 :] if name else note
        checkpoints_by_note.setdefault(text, []).extend([name] if name else [])
    merged = []
    for text, checkpoints in checkpoints_by_note.items():
        is_of_all = len(checkpoints) == len(names) > 1
        owner = "all checkpoints" if is_of_all else in_words(checkpoints)
        merged.append(f"{owner}: {text}" if checkpoints else text)
    return tuple(merged)


def sweep_of(row: TableRow, table: ReportTable, pattern: str) -> list[tuple[float, TableNumber]]:
    """Points (x, number) of the first metric that is swept, such as `top1` over k in `top1_k10` and `top1_k20`.

    pattern: matches a metric's name; its groups are the name without x, and x. For BLOCK the main number is added as
    that of the last block.
    """
    matches = [
        (re.fullmatch(pattern, metric), number) for metric, number in zip(table.metrics, row.numbers, strict=True)
    ]
    first_metric = next((match[1] for match, _ in matches if match), "")
    numbers = {float(match[2]): number for match, number in matches if match and match[1] == first_metric}
    points = [(x, numbers[x]) for x in sorted(numbers) if numbers[x].value is not None]
    if pattern == BLOCK and points and row.numbers[0].value is not None:
        points.append((points[-1][0] + 1, row.numbers[0]))
    return points


def _best_first(cell: Cell | None) -> tuple[bool, float]:
    """Sort key: the best number first, whichever direction is better; rows without a number last."""
    if cell is None:
        return True, 0.0
    return False, cell.mean if cell.higher_is_better is False else -cell.mean


def axis_of(cells: Sequence[Cell]) -> tuple[float, float] | None:
    """Ends of an axis for all numbers and intervals of a column, with a margin; None without two different numbers."""
    ends = [end for cell in cells for end in (cell.interval or (cell.mean, cell.mean))]
    if not ends or min(ends) == max(ends):
        return None
    margin = (max(ends) - min(ends)) / 20
    low, high = min(ends) - margin, max(ends) + margin
    return (max(low, 0.0), min(high, 100.0)) if cells[0].unit == "%" else (low, high)


def ranks(leaderboard: Leaderboard, column: Column) -> dict[CheckpointUsed, str]:
    """Rank of each checkpoint in a column, as text; empty for a single checkpoint.

    Checkpoints tied with the best share the first ranks (`1-3`); the others follow by number.
    """
    ties = leaderboard.ties.get(column, frozenset())
    sort_keys = {
        checkpoint: _best_first(row[column])
        for checkpoint, row in leaderboard.rows.items()
        if column in row and checkpoint not in leaderboard.published
    }
    if len(sort_keys) < 2:
        return {}
    ordered = sorted(sort_keys.values())
    tied = sum(checkpoint.key in ties for checkpoint in sort_keys)
    if tied < 2:
        return {checkpoint: str(1 + bisect_left(ordered, key)) for checkpoint, key in sort_keys.items()}
    return {
        checkpoint: f"1-{tied}" if checkpoint.key in ties else str(1 + max(bisect_left(ordered, key), tied))
        for checkpoint, key in sort_keys.items()
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


def competing(table: ReportTable) -> list[TableRow]:
    """Rows of trained networks with a measured number, the best first."""
    return [row for row in table.rows if row.kind == "measured" and row.numbers[0].value is not None]


def headline(report: ReportContents) -> str:
    """A few sentences on what paired tests show over all tables."""
    contested = [table for table in report.tables if len(competing(table)) > 1 and table.is_tested]
    alone = [table for table in report.tables if table.beats_pixels and table.over_pixels]
    if not contested and alone:
        shown = [f"{table.over_pixels} in {table.group}" for table in alone[:MAX_NAMED]]
        more = f", and in {len(alone) - MAX_NAMED} more" if len(alone) > MAX_NAMED else ""
        return f"{leaders_of(alone[0])[0]} beats raw pixels by {', by '.join(shown)}{more}."
    if not contested:
        return "No protocol has measured and tested two trained networks yet, so there is nothing to rank."
    total = f"of {len(contested)} protocol{'s' if len(contested) > 1 else ''}"
    leaders = [leaders_of(table) for table in contested]
    names = dict.fromkeys(name for tied in leaders for name in tied)
    times_first = {name: sum(name in tied for tied in leaders) for name in names}
    times_alone = {name: sum(tied == [name] for tied in leaders) for name in names}
    if not any(times_alone.values()):
        sentences = [f"No network is significantly better than all others in any {total}."]
    else:
        winners = sorted((name for name in names if times_alone[name]), key=lambda name: -times_alone[name])
        parts = [f"{name} in {times_alone[name]}" for name in winners[:MAX_NAMED]]
        parts += ["others elsewhere"] if len(winners) > MAX_NAMED else []
        sentences = [f"Significantly better than every other network: {', '.join(parts)} {total}."]
    most = max(times_first.values())
    if most > max(times_alone.values()):
        best = sorted(name for name in names if times_first[name] == most)
        names_of_best = in_words(best) if len(best) <= MAX_NAMED else f"{len(best)} networks"
        sentences.append(f"Best or tied with the best most often: {names_of_best}, in {most}.")
    beaten = [table.beats_pixels for table in report.tables if table.beats_pixels is not None]
    if not all(beaten):
        unbeaten = f"{beaten.count(False)} of {len(beaten)} protocol{'s' if len(beaten) > 1 else ''}"
        sentences.append(f"No network is shown to be better than raw pixels in {unbeaten} that measured them.")
    return " ".join(sentences)


def leaders_of(table: ReportTable) -> list[str]:
    """Names of the best network of a table and of all networks tied with it."""
    rows = competing(table)
    return [row.name for row in rows if row.numbers[0].is_best] or [row.name for row in rows[:1]]


def evidence(report: ReportContents) -> list[str]:
    """Sentences on what the headline is based on, and on what it does not cover."""
    if not any(len(competing(table)) > 1 for table in report.tables):
        return []
    sentences = [
        "Tied means that a paired test on the same validation images finds no difference (5 %, Holm's correction)."
    ]
    chosen = sum(any(metric.chosen_on_val for metric in table.result.metrics.values()) for table in report.tables)
    if chosen:
        sentences.append(
            f"{chosen} of {len(report.tables)} tables report numbers that were chosen on the validation images and are "
            "therefore too good; these tables say so."
        )
    else:
        sentences.append("No number was chosen on the images that it is reported on.")
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
        for note, count in counts.most_common(MAX_LISTED)
        if count > 1
    ]


def verdict(table: ReportTable) -> str:
    """A sentence or two on which network leads a table, and on the evidence."""
    rows, leaders = competing(table), leaders_of(table)
    images = f"on {table.images} validation images" if table.images else "on the validation images"
    if not rows:
        return "No trained network was measured."
    if len(rows) == 1:
        sentence = f"{leaders[0]} is the only trained network measured {images}."
        if table.beats_pixels and table.over_pixels:
            sentence = f"{leaders[0]} beats raw pixels by {table.over_pixels} {images}."
    elif not table.is_tested:
        sentence = f"{leaders[0]} has the best number {images}; there is no paired test of this metric."
    elif len(leaders) == 1:
        sentence = (
            f"{leaders[0]} leads {images}: better than every other by a paired test on the same images (5 %, Holm)."
        )
    elif len(leaders) == len(rows):
        sentence = f"None of the differences between the {len(leaders)} networks is significant {images}."
    else:
        sentence = (
            f"{in_words(leaders)} lead {images}; a paired test on the same images does not tell them apart (5 %, Holm)."
        )
    pixels = "None is shown to be better than raw pixels." if table.beats_pixels is False else ""
    return " ".join(filter(None, (sentence, pixels, best_blocks(table))))


def best_blocks(table: ReportTable) -> str:
    """A sentence with the best block of each leading network; "" for a protocol that reads only the last block."""
    parts = []
    for row in competing(table)[:MAX_LISTED]:
        if points := sweep_of(row, table, BLOCK):
            values = {block: number.value or 0.0 for block, number in points}
            best = (max if table.higher_is_better else min)(values, key=values.__getitem__)
            last = points[-1][0]
            loss = "the last" if best == last else f"the last is {abs(values[best] - values[last]):.3g} worse"
            parts.append(f"{row.name} {best:.0f} of {last:.0f} ({loss})")
    return f"Best block, chosen on these images: {', '.join(parts)}." if parts else ""
