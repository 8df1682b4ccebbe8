"""What a leaderboard holds: results grouped by checkpoint and protocol, with the mean over seeds.

A group is `<data>/<protocol>`, for example `digits/knn@dino`. Whatever makes a number incomparable stands in its name,
`digits/knn@dino[limit=100]`, so that it never meets the plain one.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from bench.results.record import CheckpointUsed, Result, number_text


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number of the board in its unit: the mean over seeds. `interval`: of the validation images, where every seed
    has one.

    seeds: 1 also where several gave the same number because nothing was drawn at random.
    """

    mean: float
    std: float
    seeds: int
    interval: tuple[float, float] | None = None
    unit: str = "%"
    higher_is_better: bool | None = True


@dataclass(frozen=True, kw_only=True)
class Row:
    """One checkpoint."""

    checkpoint: CheckpointUsed
    cells: Mapping[tuple[str, str], Cell]  # (group, metric), where group is `<data>/<protocol>[<variant>]`
    failed: Mapping[str, str]  # group (and seed) -> message
    published: bool = False  # its numbers are a paper's, not measured: it is shown, and competes with none


@dataclass(frozen=True, kw_only=True)
class Board:
    """All rows, the groups and their metrics in a stable order, and the files that could not be read."""

    rows: tuple[Row, ...]
    groups: Mapping[str, tuple[str, ...]]  # group -> metrics, in the task's own order
    caveats: Mapping[str, tuple[str, ...]]  # group -> why not to compare it with the plain protocol, or to doubt it
    problems: tuple[str, ...] = ()

    @cached_property
    def competing(self) -> Mapping[tuple[str, str], list[Cell]]:
        """(group, metric) -> the measured cells of the column."""
        found: dict[tuple[str, str], list[Cell]] = defaultdict(list)
        for row in self.rows:
            for column, cell in () if row.published else row.cells.items():
                found[column].append(cell)
        return dict(found)


def group_of(result: Result) -> str:
    """`digits/knn@dino`, or `digits/knn@dino[k=5+10 limit=100]` for a variant of it."""
    variant = f"[{' '.join(result.variant)}]" if result.variant else ""
    return f"{result.data.name}/{result.protocol.name}{variant}"


def caveats_of(result: Result) -> tuple[str, ...]:
    """Sentences for people on what `result.variant` says, and the task's own warnings."""
    found = []
    if result.limit is not None:
        found.append(f"At most {result.limit} images of each split: a check that it runs, not a result.")
    if result.protocol.changes:
        changes = ", ".join(f"{name} = {value}" for name, value in result.protocol.changes.items())
        found.append(f"Modified protocol: {changes}.")
    if result.precision != "float32":
        found.append(f"Computed in {result.precision}.")
    if result.decode != "exact":
        found.append(f"Images prepared by the {result.decode} decoder, which differs from PIL by a few grey levels.")
    if result.skipped:
        number = f"{result.skipped} unreadable image{'s' if result.skipped > 1 else ''}"
        found.append(f"{number} left out (--skip-bad): not comparable with numbers on all images.")
    if chosen := [name for name, metric in result.metrics.items() if metric.chosen_on_val]:
        found.append(f"Chosen on the validation images, so that number and interval are too good: {', '.join(chosen)}.")
    found += [f"{line[0].upper()}{line[1:]}." for line in result.facts.get("masks", {}).get("val", ())]
    found += floor_lines(result)
    found += [f"{warning}." for warning in result.data.warnings]
    found += [f"{result.checkpoint.name}: {warning}." for warning in result.facts.get("warnings", ())]
    return tuple(found)


def floor_lines(result: Result) -> list[str]:
    """What a constant prediction scores, and whether the result's main metric is more than that."""
    floor = result.facts.get("floor")
    if not floor or result.status != "ok":
        return []
    numbers = ", ".join(f"{name} {number_text(value, '%')}" for name, value in floor["metrics"].items())
    if not any(floor["metrics"].values()):
        numbers = "0 in all metrics"
    (name, metric), least = next(iter(result.metrics.items())), floor["metrics"]
    found = [f"Floor, predicting {floor['prediction']}: {numbers}."]
    if name in least and metric.value <= least[name]:
        found.append(
            f"{result.checkpoint.name}: {name} {metric} is not above the floor, {number_text(least[name], '%')}."
        )
    return found


def board_of(results: Iterable[Result], problems: Iterable[str] = ()) -> Board:
    """Group results by checkpoint, sorted by name and then digest. problems: of files that could not be read."""
    by_checkpoint: dict[tuple[str, str], list[Result]] = defaultdict(list)
    groups: dict[str, dict[str, None]] = defaultdict(dict)
    caveats: dict[str, dict[str, None]] = defaultdict(dict)
    for result in results:
        by_checkpoint[result.checkpoint.name, result.checkpoint.digest].append(result)
        if result.status == "ok":
            group = group_of(result)
            groups[group].update(dict.fromkeys(result.metrics))
            caveats[group] |= dict.fromkeys(caveats_of(result))
    rows = tuple(_row(by_checkpoint[key]) for key in sorted(by_checkpoint))
    ordered = {group: tuple(metrics) for group, metrics in sorted(groups.items())}
    notes = {group: tuple(caveats[group]) for group in ordered}
    return Board(rows=rows, groups=ordered, caveats=notes, problems=tuple(problems))


def _row(results: list[Result]) -> Row:
    found: dict[tuple[str, str], list[Result]] = defaultdict(list)
    named = [(group_of(result), result) for result in results]
    good = {(group, result.seed) for group, result in named if result.status == "ok"}
    failed = {}
    for group, result in named:
        if result.status == "failed":
            again = "; the number shown is of an earlier run" if (group, result.seed) in good else ""
            failed[f"{group} seed {result.seed}"] = result.message + again
        for metric in result.metrics if result.status == "ok" else ():
            found[group, metric].append(result)
    cells = {(group, metric): _cell(seeds, metric) for (group, metric), seeds in found.items()}
    return Row(checkpoint=results[-1].checkpoint, cells=cells, failed=failed)


def _cell(seeds: list[Result], metric: str) -> Cell:
    # The mean over seeds varies no more over images than one seed does, so the mean of the ends is wide enough.
    records = [result.metrics[metric] for result in seeds]
    values = [record.value for record in records]
    ends = [record.interval for record in records if record.interval]
    lows, highs = zip(*ends, strict=True) if len(ends) == len(seeds) else ((), ())
    interval = (statistics.fmean(lows), statistics.fmean(highs)) if lows else None
    drawn = any(result.random for result in seeds) or len(set(values)) > 1
    return Cell(
        mean=statistics.fmean(values) if drawn else values[0],
        std=statistics.pstdev(values) if len(values) > 1 else 0.0,  # exact arithmetic, slow for thousands of cells
        seeds=len(seeds) if drawn else 1,
        interval=interval,
        unit=records[-1].unit,
        higher_is_better=records[-1].higher_is_better,
    )


def best(board: Board, group: str, metric: str) -> float | None:
    """Best mean of a column; None where fewer than two checkpoints compete, where neither end is better, as of a
    deviation, and where the cells differ in unit or in what is better."""
    cells = board.competing.get((group, metric), [])
    meanings = {(cell.unit, cell.higher_is_better) for cell in cells}
    if len(cells) < 2 or len(meanings) > 1 or cells[0].higher_is_better is None:
        return None
    return (max if cells[0].higher_is_better else min)(cell.mean for cell in cells)
