"""The leaderboard: results grouped by checkpoint and protocol, averaged over seeds; its printed tables and its files.

A group is `<data>/<protocol>`, for example `digits/knn@dino`. Anything that makes a number incomparable is part of the
group's name, `digits/knn@dino[limit=100]`, so that the number never shares a column with those of the plain protocol.
Published numbers are separate rows, next to measured ones of the same protocol on the same images.

All files are rebuilt from all results of a folder. The Markdown page has a table with intervals for each group. LaTeX
has a booktabs table per group, for `\\input`, with mean and standard deviation over seeds; it compiles with pdfLaTeX,
XeLaTeX and LuaLaTeX, and names and messages are escaped, so that no character of them acts as a command. Parquet is the
table of all results (bench/results/table.py).
"""

import re
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from itertools import chain
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal

from bench.published.values import PublishedValue, published_in
from bench.results.record import (
    COST_UNITS,
    CheckpointUsed,
    Result,
    TrainingCost,
    decimals,
    labels_of,
    number_text,
    number_with_interval,
    pixels_text,
    short,
    sizes_note,
)
from bench.results.store import StoredResult, comparable_results, stamps
from bench.results.table import rows_of, to_pandas, to_parquet
from bench.statistics.matching import is_comparable
from bench.statistics.significance import Column, Key, PairedTestCache, Ties, paired_tests, ties_with_best
from engine.files import write_atomic
from engine.printing import counted, csv_text, in_csv, in_markdown, in_words, markdown_table, printable, table, text_of

if TYPE_CHECKING:
    from pandas import DataFrame

WIDTH = 120  # characters per line of a leaderboard that is printed in Python


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number in its unit: the mean over seeds.

    interval: over validation images, if every seed has one; None otherwise.
    seeds: 1 also if several seeds gave the same number because nothing was drawn at random.
    """

    mean: float
    std: float = 0.0
    seeds: int = 1
    interval: tuple[float, float] | None = None
    unit: str = "%"
    higher_is_better: bool | None = True
    is_doubtful: bool = False  # the task warns about this metric, for example because nothing was fitted


# measured: a trained network. floor: raw pixels. initial: weights before the first update of a pretraining. published:
# numbers from a paper. Only trained networks are compared with the best and ranked.
Kind = Literal["measured", "floor", "initial", "published"]


def order_of(cell: Cell | None) -> float:
    """Sort key of a number: the best first, whichever direction is better; no number last."""
    return float("inf") if cell is None else cell.mean if cell.higher_is_better is False else -cell.mean


@dataclass(frozen=True, kw_only=True)
class Leaderboard:
    """Numbers by checkpoint, group and metric. Prints as tables; a notebook shows an overview.

    Example:
        >>> import bench
        >>> leaderboard = bench.leaderboard("results")  # doctest: +SKIP
        >>> [(checkpoint.name, cells["digits/knn@dino", "top1_k20"].mean)
        ...     for checkpoint, cells in leaderboard.rows.items()]  # doctest: +SKIP
    """

    rows: Mapping[CheckpointUsed, Mapping[Column, Cell]]  # checkpoint -> (group, metric) -> number
    groups: Mapping[str, tuple[str, ...]]  # group -> metrics, in the task's own order
    caveats: Mapping[str, tuple[str, ...]]  # group -> reasons to doubt it or not to compare it with the plain protocol
    failed: Mapping[CheckpointUsed, Mapping[str, str]] = field(default_factory=dict)  # group and seed -> message
    problems: tuple[str, ...] = ()  # a line for each file that could not be read
    published: frozenset[CheckpointUsed] = frozenset()  # rows with a paper's numbers, excluded from best and ties
    ties: Mapping[Column, Ties] = field(default_factory=dict)  # of columns with paired tests
    results: Sequence[StoredResult] = ()  # behind the numbers
    folder: Path = Path()  # of the result files
    files: Mapping[str, Path] = field(default_factory=dict)  # format -> file that was written
    drawn_by: "Callable[[Leaderboard], str] | None" = None  # renders its HTML

    @property
    def notes(self) -> list[str]:
        """Each caveat once, after its groups: `digits/knn@dino, digits/knn@moca: ...`."""
        groups = defaultdict[str, list[str]](list)
        for group, caveats in self.caveats.items():
            for caveat in dict.fromkeys(caveats):
                groups[caveat].append(group)
        return [f"{', '.join(of)}: {caveat}" for caveat, of in groups.items()]

    @cached_property
    def kinds(self) -> dict[CheckpointUsed, Kind]:
        """The kind of each row; initial weights are recognised by the folder `start` that a pretraining writes."""
        return {
            used: "published"
            if used in self.published
            else "floor"
            if used.is_raw_pixels
            else "initial"
            if PurePath(used.source).name == "start"
            else "measured"
            for used in self.rows
        }

    @cached_property
    def candidates(self) -> dict[Column, dict[Key, Cell]]:
        """(group, metric) -> trained network -> its number, unless the task doubts it."""
        candidates: dict[Column, dict[Key, Cell]] = defaultdict(dict)
        for used, cells in self.rows.items():
            for column, cell in cells.items():
                if self.kinds[used] == "measured" and not cell.is_doubtful:
                    candidates[column][used.key] = cell
        return candidates

    @cached_property
    def best(self) -> dict[Column, float]:
        """Best number of each column with two or more trained networks.

        Columns for which neither direction is better (deviations) are left out, and so are columns whose cells differ
        in unit or direction.
        """
        best = {}
        for column, cells in self.candidates.items():
            numbers = [cell.mean for cell in cells.values()]
            meanings = {(cell.unit, cell.higher_is_better) for cell in cells.values()}
            ((_, is_higher_better), *others) = meanings
            if len(numbers) > 1 and not others and is_higher_better is not None:
                best[column] = max(numbers) if is_higher_better else min(numbers)
        return best

    def is_best(self, checkpoint: CheckpointUsed, column: Column) -> bool:
        """Whether a trained network has the best number of a column, or a paired test cannot tell it from the best.

        This is what is bold everywhere: raw pixels, initial weights, published numbers and numbers that the task
        doubts never are, and nothing is in a column without paired tests.
        """
        tied = self.ties[column].tied if column in self.ties else ()
        return checkpoint.key in tied and checkpoint.key in self.candidates.get(column, ())

    def ranks(self, column: Column) -> dict[Key, str]:
        """Rank of each trained network that was compared with the best of a column; those tied with it share the first
        ranks, `1-3`, and the others follow by number."""
        if column not in self.ties:
            return {}
        tied, tested = self.ties[column]
        cells = {key: cell for key, cell in self.candidates.get(column, {}).items() if key in tested}
        count = len(cells.keys() & tied)
        others = sorted(order_of(cell) for key, cell in cells.items() if key not in tied)
        return {
            key: str(1 + count + bisect_left(others, order_of(cell)))
            if key not in tied
            else "1" + f"-{count}" * (count > 1)
            for key, cell in cells.items()
        }

    @cached_property
    def names(self) -> dict[CheckpointUsed, str]:
        """Name of each checkpoint, with its digest if two share a name; the floor and published rows are marked."""
        labels = labels_of(checkpoint.key for checkpoint in self.rows if checkpoint not in self.published)
        return {
            checkpoint: f"{checkpoint.name} (published)"
            if checkpoint in self.published
            else labels[checkpoint.key] + " (floor)" * checkpoint.is_raw_pixels
            for checkpoint in self.rows
        }

    def checkpoints_in(self, group: str) -> list[CheckpointUsed]:
        """The checkpoints that have a number in a group."""
        return [checkpoint for checkpoint, cells in self.rows.items() if any(key[0] == group for key in cells)]

    @property
    def records(self) -> list[dict[str, Any]]:
        """The table of the results (bench/results/table.py): a dictionary for each metric of each result."""
        relative = ((stored.result, str(stored.path.relative_to(self.folder))) for stored in self.results)
        return [row for result, file in relative for row in rows_of(result, file)]

    def to_pandas(self) -> "DataFrame":
        """`records` as a pandas DataFrame. ValueError if pandas is not installed."""
        return to_pandas(self.records)

    def __str__(self) -> str:
        return to_terminal(self, WIDTH)

    @property
    def html(self) -> str:
        """The page with its tables."""
        return self.drawn_by(self) if self.drawn_by else ""

    def _repr_html_(self) -> str | None:
        """The page in an iframe, so that its style does not affect the notebook."""
        if not self.drawn_by:
            return None
        size = f'width="100%" height="{540 + 36 * len(self.rows)}"'
        return f'<iframe title="Leaderboard" {size} srcdoc="{escape(self.html)}"></iframe>'

    def _repr_markdown_(self) -> str:
        return to_markdown(self)


def read_leaderboard(out: Path, published: bool = False) -> Leaderboard:
    """The leaderboard of all results in a folder, with ties.

    Parsed files and paired tests of results that did not change come from OUT/cache.

    Args:
        out: the folder given to `bench run --out`.
        published: whether to add rows with published numbers of the same protocols.
    """
    results, problems = comparable_results(out)
    cache = paired_tests(out)
    leaderboard = leaderboard_with_ties(results, cache, problems, out / "results")
    cache.save({stored.identity for stored in results})
    return with_published(leaderboard) if published else leaderboard


def leaderboard_of(results: Iterable[Result], problems: Iterable[str] = ()) -> Leaderboard:
    """Group results by checkpoint, sorted by name and then digest. problems: a line per file that could not be read."""
    by_checkpoint: dict[Key, list[Result]] = defaultdict(list)
    by_group: dict[str, list[Result]] = defaultdict(list)
    results = list(results)
    for result in [*results, *floors_at_chosen_sizes(results)]:
        by_checkpoint[result.checkpoint.key].append(result)
        if result.status == "ok":
            by_group[result.group].append(result)
    labels = labels_of(by_checkpoint)
    ordered = [by_checkpoint[key] for key in sorted(by_checkpoint)]
    return Leaderboard(
        rows={own[-1].checkpoint: _cells(own) for own in ordered},
        groups={
            group: tuple(dict.fromkeys(chain(*(result.metrics for result in by_group[group]))))
            for group in sorted(by_group)
        },
        caveats={group: tuple(caveats_of(by_group[group], labels)) for group in sorted(by_group)},
        failed={own[-1].checkpoint: failed for own in ordered if (failed := _failures(own))},
        problems=tuple(problems),
    )


def floors_at_chosen_sizes(results: Sequence[Result]) -> list[Result]:
    """Results of raw pixels, which have one size, as they stand beside networks at chosen sizes (`--image-size`)."""
    good = [result for result in results if result.status == "ok"]
    networks = {result.group: result for result in good if result.chosen_size}
    return [
        replace(floor, image_size=network.image_size)
        for floor in good
        if floor.checkpoint.is_raw_pixels
        for network in networks.values()
        if is_comparable(floor, network)
    ]


def leaderboard_of_stored(
    results: Sequence[StoredResult], problems: Iterable[str] = (), folder: Path = Path()
) -> Leaderboard:
    """The leaderboard of these results, without tests; arguments as for `leaderboard_with_ties`."""
    board = leaderboard_of((stored.result for stored in results), problems)
    return replace(board, results=results, folder=folder)


def leaderboard_with_ties(
    results: Sequence[StoredResult], cache: PairedTestCache, problems: Iterable[str] = (), folder: Path = Path()
) -> Leaderboard:
    """The leaderboard of these results, with the networks that paired tests find tied for first in each column.

    problems: as for `leaderboard_of`. folder: of the result files.
    """
    leaderboard = leaderboard_of_stored(results, problems, folder)
    columns = {
        column: {key: cell.mean for key, cell in cells.items()} for column, cells in leaderboard.candidates.items()
    }
    ties = ties_with_best(columns, leaderboard.best, results, cache)
    return replace(leaderboard, ties=ties)


def _cells(results: Sequence[Result]) -> dict[Column, Cell]:
    """The numbers of one checkpoint."""
    by_column: dict[Column, list[Result]] = defaultdict(list)
    for result in results:
        if result.status == "ok":
            for metric in result.metrics:
                by_column[result.group, metric].append(result)
    return {column: _mean_over_seeds(own, column[1]) for column, own in by_column.items()}


def _failures(results: Sequence[Result]) -> dict[str, str]:
    """Group and seed -> message, for each failure of one checkpoint."""
    good = {(result.group, result.seed) for result in results if result.status == "ok"}
    failed = {}
    for result in results:
        if result.status == "failed":
            again = "; the number shown is of an earlier run" if (result.group, result.seed) in good else ""
            failed[f"{result.group} seed {result.seed}"] = result.message + again
    return failed


def _mean_over_seeds(results: Sequence[Result], metric: str) -> Cell:
    """The cell of a metric of results that differ in nothing but the seed."""
    # The mean over seeds varies no more over images than one seed does, so the mean of the ends is wide enough.
    records = [result.metrics[metric] for result in results]
    values = [record.value for record in records]
    ends = [record.interval for record in records if record.interval]
    lows, highs = zip(*ends, strict=True) if len(ends) == len(results) else ((), ())
    drawn = any(result.random for result in results) or len(set(values)) > 1
    return Cell(
        mean=statistics.fmean(values) if drawn else values[0],
        std=statistics.stdev(values) if len(values) > 1 else 0.0,  # exact arithmetic, slow for thousands of cells
        seeds=len(results) if drawn else 1,
        interval=(statistics.fmean(lows), statistics.fmean(highs)) if lows else None,
        unit=records[-1].unit,
        higher_is_better=records[-1].higher_is_better,
        is_doubtful=any(metric in result.doubted_metrics for result in results),
    )


def caveats_of(results: Sequence[Result], labels: Mapping[Key, str]) -> Iterator[str]:
    """Sentences that explain the variant of a group, and warnings with the labels of the checkpoints concerned."""
    yield from dict.fromkeys(chain.from_iterable(map(explanations_of, results)))
    count = len({result.checkpoint.key for result in results})
    warnings = ((result, warning) for result in results for warning in warnings_of(result))
    for warning, owners in owners_of(warnings, labels).items():
        yield f"{'all checkpoints' if len(owners) == count > 1 else in_words(owners)}: {warning}"
    if note := sizes_note({labels[result.checkpoint.key]: result for result in results}):
        yield note
    yield from notes_on_settings(results, labels)
    yield from notes_on_copies(results, labels)
    yield from notes_on_seeds(results, labels)


def owners_of(texts: Iterable[tuple[Result, str]], labels: Mapping[Key, str]) -> dict[str, list[str]]:
    """Each text -> the labels of the checkpoints whose results have it."""
    owners: dict[str, dict[str, None]] = defaultdict(dict)
    for result, text in texts:
        owners[text][labels[result.checkpoint.key]] = None
    return {text: list(own) for text, own in owners.items()}


def notes_on_settings(results: Sequence[Result], labels: Mapping[Key, str]) -> Iterator[str]:
    """A sentence for each setting that results of one version of the protocol do not share, as after an edit of it."""
    for name in dict.fromkeys(chain.from_iterable(result.settings for result in results)):
        of_setting = [result for result in results if name in result.settings]
        values = [result.settings[name] for result in of_setting]
        first = {values.index(value): short(value) for value in reversed(values)}  # 1 and 1.0 have one text
        if len(first) > 1:
            texts = ((result, first[values.index(result.settings[name])]) for result in of_setting)
            listed = "; ".join(f"{value} of {in_words(own)}" for value, own in owners_of(texts, labels).items())
            yield f"Not comparable, as the protocol was changed under the same version: {name} is {listed}."


def notes_on_copies(results: Iterable[Result], labels: Mapping[Key, str]) -> Iterator[str]:
    """A sentence for each network that has several names."""
    owners = owners_of(((result, result.checkpoint.digest) for result in results), labels)
    yield from (f"{in_words(names)} have the same weights." for names in owners.values() if len(names) > 1)


def notes_on_seeds(results: Iterable[Result], labels: Mapping[Key, str]) -> Iterator[str]:
    """A sentence if networks have results of different seeds."""
    seeds: dict[str, list[int]] = defaultdict(list)  # label -> seeds
    for result in results:
        if result.random:
            seeds[labels[result.checkpoint.key]].append(result.seed)
    owners: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for label, own in seeds.items():
        owners[tuple(sorted(own))].append(label)
    if len(owners) > 1:
        texts = [f"{in_words(own)}: {', '.join(map(str, numbers))}" for numbers, own in owners.items()]
        yield f"Networks were evaluated with different seeds ({'; '.join(texts)})."


def explanations_of(result: Result) -> Iterator[str]:
    """Sentences that explain `result.variant`, what a constant prediction scores, and the warnings of the data."""
    if result.limit is not None:
        cut = [(split, count) for split, count in result.data.images.items() if count > result.limit]
        seen = [f"{result.limit:,} of {count:,} {split}" for split, count in cut]
        yield f"{in_words(seen) or 'All'} images (--limit {result.limit})."
    if result.protocol.changes:
        changes = ", ".join(f"{name} = {value}" for name, value in result.protocol.changes.items())
        yield f"Modified protocol: {changes}."
    if result.chosen_size:
        yield f"Images of {result.chosen_size} px (--image-size) instead of the published evaluation's."
    if result.precision != "float32":
        yield f"Computed in {result.precision}."
    if result.decode != "exact":
        yield f"Images prepared by the {result.decode} decoder, which differs from PIL by a few grey levels."
    if result.skipped:
        images = counted(result.skipped, "unreadable image")
        yield f"{images} left out (--skip-bad): not comparable with numbers on all images."
    if chosen := [name for name, metric in result.metrics.items() if metric.chosen_on_val]:
        yield f"Chosen on the validation images, so that number and interval are too good: {', '.join(chosen)}."
    for line in result.facts.get("masks", {}).get("val", ()):
        yield f"{line[0].upper()}{line[1:]}."
    if constant := result.facts.get("floor"):
        scores = constant["metrics"]
        numbers = ", ".join(f"{name} {number_text(value, '%')}" for name, value in scores.items())
        yield f"Floor, predicting {constant['prediction']}: {numbers if any(scores.values()) else '0 in all metrics'}."
    for warning in result.data.warnings:
        yield f"{warning}."


def warnings_of(result: Result) -> Iterator[str]:
    """Warnings about the numbers of one checkpoint: its task's, and a main metric not above a constant prediction's."""
    name, metric = next(iter(result.metrics.items()))
    constant = result.facts.get("floor", {}).get("metrics", {})
    if name in constant and metric.value <= constant[name]:
        yield f"{name} {metric} is not above the floor, {number_text(constant[name], '%')}."
    for warning in result.facts.get("warnings", ()):
        yield f"{warning}."


def with_published(leaderboard: Leaderboard) -> Leaderboard:
    """The leaderboard with a row for each published checkpoint that has a number in one of its columns.

    The protocol, its settings and the sizes of the image set must be those of the publication. A deviation that was
    published with a number is in the column of the metric's deviation, if there is one.
    """
    by_checkpoint, ambiguous = published_in(stored.result for stored in leaderboard.results)
    measured = {column: cell for cells in leaderboard.rows.values() for column, cell in cells.items()}
    notes = defaultdict(list, {group: [sentence] for group, sentence in ambiguous.items()})
    rows = {}
    for name, values in sorted(by_checkpoint.items()):
        one = next(iter(values.values()))
        checkpoint = CheckpointUsed(name=name, digest="", method=one.model, architecture=one.architecture)
        rows[checkpoint] = {
            column: Cell(mean=value.value, unit=value.unit, higher_is_better=measured[column].higher_is_better)
            for column, value in values.items()
        }
        for (group, metric), value in values.items():
            if value.std is not None and (deviation := f"{metric}_std") in leaderboard.groups[group]:
                rows[checkpoint][group, deviation] = Cell(mean=value.std, higher_is_better=None)
        for group in dict.fromkeys(group for group, _ in values):
            own = [value for column, value in values.items() if column[0] == group]
            notes[group].append(_published_caveat(own))
    return replace(
        leaderboard,
        rows={**leaderboard.rows, **rows},
        published=frozenset(rows),
        caveats={group: (*lines, *notes[group]) for group, lines in leaderboard.caveats.items()},
    )


def _published_caveat(values: Sequence[PublishedValue]) -> str:
    """Where the values of one row were published, with notes on known differences of the protocol."""
    value, tables = values[0], ", ".join(dict.fromkeys(value.table for value in values))
    described = ", ".join(filter(None, (value.model, value.architecture, value.trained)))
    notes = "; ".join(["", *dict.fromkeys(value.note for value in values if value.note)])
    return f"Published, not measured here: {value.checkpoint} is {described} ({tables}{notes})."


def have_other_sizes(checkpoints: Iterable[CheckpointUsed]) -> bool:
    """Whether two networks are evaluated on images of different sizes by default."""
    return len({used.image_size for used in checkpoints if used.image_size and not used.is_raw_pixels}) > 1


def fact_rows(leaderboard: Leaderboard) -> list[tuple[str, ...]]:
    """A row of facts about each checkpoint, below a header; with image sizes if these differ."""
    rows: list[tuple[str, ...]] = [("checkpoint", "method", "architecture", "parameters", "digest")]
    rows += [
        (name, used.method, used.architecture, str(used.parameters), used.digest[:12])
        for used, name in leaderboard.names.items()
    ]
    if have_other_sizes(leaderboard.rows):
        sizes = ["image size", *(pixels_text(used.image_size) for used in leaderboard.rows)]
        return [(*row, size) for row, size in zip(rows, sizes, strict=True)]
    return rows


def cost_rows(leaderboard: Leaderboard) -> list[tuple[str, ...]]:
    """A row for each checkpoint whose pretraining cost is known, below a header.

    Without times, which depend on what else the machine did.
    """
    rows: list[tuple[str, ...]] = []
    for checkpoint, name in leaderboard.names.items():
        cost = checkpoint.training_cost
        if cost != TrainingCost():
            numbers = (cost.tflop, cost.images, cost.gflop_per_image, cost.memory_gib, cost.gpu_memory_gib)
            rows.append((name, *("" if number is None else quantity(number) for number in numbers), cost.devices))
    return [("checkpoint", "TFLOP", "images seen", "GFLOP an image", "GiB", "GiB of a GPU", "devices"), *rows]


def quantity(number: float) -> str:
    """A quantity in three digits: `4.99`, `99,200`."""
    return f"{number:.3g}" if number < 1000 else f"{float(f'{number:.3g}'):,.0f}"


def troubles(leaderboard: Leaderboard) -> list[str]:
    """One line for each failed result and each file that could not be read."""
    lines = [
        f"failed: {leaderboard.names[checkpoint]}: {what}: {why}"
        for checkpoint, failed in leaderboard.failed.items()
        for what, why in failed.items()
    ]
    return lines + [f"left out: {problem}" for problem in leaderboard.problems]


def cell_text(cell: Cell | None, with_interval: bool = True) -> str:
    """`97.20 [96.1, 98.0]`, over seeds `97.20 [96.1, 98.0] +- 0.14 (n=3)`, `0.731 s [0.702, 0.760]`, or nothing.

    ` ?` follows a number that the task doubts; a caveat of its group explains it.
    """
    if cell is None:
        return ""
    spread = f" +- {cell.std:.{decimals(cell.mean, cell.unit)}f} (n={cell.seeds})" if cell.seeds > 1 else ""
    number = number_with_interval(cell.mean, cell.unit, cell.interval if with_interval else None)
    return number + spread + " ?" * cell.is_doubtful


def to_terminal(leaderboard: Leaderboard, width: int, groups: Collection[str] | None = None) -> str:
    """Printable tables of at most `width` characters: as many metrics as fit, and a count of those left out.

    All metrics have their intervals if that fits, otherwise only the first one has. A caveat of several tables is
    printed below the first of them.

    groups: print only these, what is to be said of their image sets, and no failures, which may belong to other
    checkpoints and runs; None prints everything.
    """
    lines: list[str] = []
    caveats_above: set[str] = set()
    for group in leaderboard.groups:
        if groups is not None and group not in groups:
            continue
        rows = group_rows(leaderboard, group, str, lambda cell, _: cell_text(cell))
        if sum(size + 2 for size in _column_widths(rows)) > width:  # two spaces before every column
            plain = group_rows(leaderboard, group, str, lambda cell, _: cell_text(cell, with_interval=False))
            rows = [[*row[:2], *numbers[2:]] for row, numbers in zip(rows, plain, strict=True)]
        caveats = [caveat for caveat in leaderboard.caveats[group] if caveat not in caveats_above]
        caveats_above.update(caveats)
        lines += [group, *text_table(rows, width), *caveats, ""]
    if groups is None:
        lines += troubles(leaderboard)
        return text_of(lines).rstrip() or "no results yet"
    names = {group.partition("/")[0] for group in groups}
    lines += [line for line in leaderboard.problems if line.partition(": ")[0] in names]  # on their image sets
    if omitted := len(leaderboard.groups.keys() - set(groups)):
        lines += [f"{counted(omitted, 'more table')} in leaderboard.md", ""]
    return text_of(lines).rstrip() or "no results yet"


def text_table(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """A header and rows as a text table of at most `width` characters; the last line counts columns that do not fit."""
    widths = _column_widths(rows)
    fitting, used = 1, widths[0] + 2
    while fitting < len(widths) and (fitting == 1 or used + 2 + widths[fitting] <= width):
        used += 2 + widths[fitting]
        fitting += 1
    lines = table([cells[:fitting] for cells in rows], right=range(1, fitting), indent=2)
    if hidden := len(widths) - fitting:
        lines.append(f"  ... {counted(hidden, 'more column')} in leaderboard.csv")
    return lines


def _column_widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


CellWriter = Callable[[Cell, bool], str]  # a cell, and whether it is bold -> markup


def group_rows(
    leaderboard: Leaderboard, group: str, escaped: Callable[[object], str], cell_in: CellWriter
) -> list[list[str]]:
    """The table of a group in a markup language: a header, and a row for each checkpoint.

    escaped: escapes text for the markup. cell_in: writes a cell in the markup.
    """
    metrics = leaderboard.groups[group]
    rows = [[escaped(text) for text in ("checkpoint", *metrics)]]
    for checkpoint in leaderboard.checkpoints_in(group):
        row = [escaped(leaderboard.names[checkpoint])]
        for metric in metrics:
            cell = leaderboard.rows[checkpoint].get((group, metric))
            row.append(cell_in(cell, leaderboard.is_best(checkpoint, (group, metric))) if cell else "")
        rows.append(row)
    return rows


HEADER = r"""% Rebuilt by bench leaderboard --format latex. Needs \usepackage{booktabs}.
% Numbers are means over seeds with their sample standard deviation. Bold: the best network of a column and all
% that a paired test on the same images cannot tell from it (5 %, Holm over the column). ?: see the caption.
"""
# LaTeX's special characters; characters that its old encoding OT1 sets as others; and [ ] *, which LaTeX would read as
# an argument of the \\ before them at the start of a row.
ESCAPES = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"''",
    "`": r"\textasciigrave{}",
    "[": "{[}",
    "]": "{]}",
    "*": "{*}",
}
LETTERS = {chr(code) for code in range(0xC0, 0x100)} - set("\xd0\xd7\xde\xf0\xf7\xfe")  # accented, in every encoding


def to_latex(leaderboard: Leaderboard) -> str:
    """The leaderboard as LaTeX tables."""
    lines = [HEADER]
    for group, metrics in leaderboard.groups.items():
        header, *rows = [" & ".join(cells) + r" \\" for cells in group_rows(leaderboard, group, in_latex, _latex_cell)]
        caption = " ".join([f"{in_latex(group)}.", *map(in_latex, leaderboard.caveats[group])])
        lines += [
            r"\begin{table}[t]",
            r"\centering",
            rf"\caption{{{caption}}}",
            rf"\begin{{tabular}}{{l{'r' * len(metrics)}}}",
            r"\toprule",
            header,
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    return "\n".join(lines)


def in_latex(text: object) -> str:
    """Text escaped for a cell or a caption; `[U+4E2D]` for a character that pdfLaTeX lacks."""
    return re.sub("-(?=-)", "-{}", "".join(map(_escaped, printable(text))))  # two hyphens would become a dash


def _escaped(character: str) -> str:
    if character.isascii() or character in LETTERS:
        return ESCAPES.get(character, character)
    return f"{{[}}U+{ord(character):04X}{{]}}"


def _latex_cell(cell: Cell, bold: bool) -> str:
    text = re.sub("^-", "$-$", in_latex(number_text(cell.mean, cell.unit)))
    spread = rf" $\pm$ {cell.std:.{decimals(cell.mean, cell.unit)}f}" if cell.seeds > 1 else ""
    return (rf"\textbf{{{text}}}" if bold else text) + spread + " ?" * cell.is_doubtful


INTRODUCTION = """# Leaderboard

Rebuilt by `bench leaderboard`; every number is in leaderboard.csv. In brackets: 95 % interval over validation images.
Bold: the best trained network of a column and all that a paired test on the same images cannot tell from it (5 %, Holm
over the column; `bench compare` has the numbers); they share a rank. Without such a test a network has no rank. Floor:
raw pixels. ?: see the note of the table.
"""


def to_markdown(leaderboard: Leaderboard) -> str:
    """The leaderboard as Markdown."""
    lines = [
        *INTRODUCTION.split("\n"),
        *markdown_table([map(in_markdown, row) for row in fact_rows(leaderboard)], "---"),
    ]
    if (costs := cost_rows(leaderboard))[1:]:
        lines += ["", "## Cost of pretraining", "", *markdown_table([map(in_markdown, row) for row in costs], "---:")]
    for group in leaderboard.groups:
        lines += ["", f"## {in_markdown(group)}", ""]
        lines += [f"> {in_markdown(caveat)}\n" for caveat in leaderboard.caveats[group]]
        ranks = leaderboard.ranks((group, leaderboard.groups[group][0]))
        rows = group_rows(leaderboard, group, in_markdown, _markdown_cell)
        if ranks:
            column = ["rank", *(ranks.get(used.key, "") for used in leaderboard.checkpoints_in(group))]
            rows = [[name, rank, *row] for (name, *row), rank in zip(rows, column, strict=True)]
        lines += markdown_table(rows, "---:")
    if notes := troubles(leaderboard):
        lines += ["", "## Failed or unreadable", ""] + [f"- {in_markdown(note)}" for note in notes]
    return "\n".join(lines) + "\n"


def _markdown_cell(cell: Cell, bold: bool) -> str:
    text = in_markdown(cell_text(cell))
    return f"**{text}**" if bold else text


FACTS = ("name", "method", "architecture", "parameters", "digest")
COSTS = (*COST_UNITS, "devices")  # fields of checkpoint.training_cost; columns only if known for some checkpoint


def to_csv(leaderboard: Leaderboard) -> str:
    """All measured numbers as CSV with a header: plain decimal numbers, and empty cells for missing ones."""
    rows = {used: cells for used, cells in leaderboard.rows.items() if used not in leaderboard.published}
    columns = [column for group in leaderboard.groups for column in _csv_columns(leaderboard, group, rows)]
    names = [in_csv(f"{group}:{metric}{suffix}") for group, metric, suffix in columns]
    costs = [name for name in COSTS if any(getattr(used.training_cost, name) for used in rows)]
    sizes = ["image_size"] if have_other_sizes(rows) else []
    lines: list[list[object]] = [[*FACTS, *sizes, *costs, *names, "failed"]]
    for used, row in rows.items():
        facts = [in_csv(getattr(used, fact)) for fact in FACTS] + [pixels_text(used.image_size) for _ in sizes]
        spent = [in_csv(getattr(used.training_cost, name) or "") for name in costs]
        numbers = [_number(row.get((group, metric)), suffix) for group, metric, suffix in columns]
        lines.append([*facts, *spent, *numbers, in_csv("; ".join(leaderboard.failed.get(used, ())))])
    return csv_text(lines)


def _csv_columns(
    leaderboard: Leaderboard, group: str, checkpoints: Iterable[CheckpointUsed]
) -> Iterator[tuple[str, str, str]]:
    """Group, metric and suffix of each column of a group: the numbers, and intervals and spreads if a cell has one."""
    rows = [leaderboard.rows[checkpoint] for checkpoint in checkpoints]
    for metric in leaderboard.groups[group]:
        cells = [row[group, metric] for row in rows if (group, metric) in row]
        yield group, metric, ""
        if any(cell.interval for cell in cells):
            yield from ((group, metric, suffix) for suffix in (":low", ":high"))
        if any(cell.seeds > 1 for cell in cells):
            yield from ((group, metric, suffix) for suffix in (":std", ":n"))
        if any(cell.is_doubtful for cell in cells):
            yield group, metric, ":doubtful"


def _number(cell: Cell | None, suffix: str) -> float | int | str:
    """The part of a cell for the CSV column with this suffix; "" if there is none."""
    if cell is None:
        return ""
    low, high = cell.interval or ("", "")
    parts = {"": cell.mean, ":low": low, ":high": high, ":std": cell.std, ":n": cell.seeds}
    return {**parts, ":doubtful": int(cell.is_doubtful)}[suffix]


# Name of a format -> its file, and the function that writes it. The bytes of these depend on the results and this
# tool's version, not on a library's.
TEXT_FORMATS: dict[str, tuple[str, Callable[[Leaderboard], str]]] = {
    "csv": ("leaderboard.csv", to_csv),
    "markdown": ("leaderboard.md", to_markdown),
    "latex": ("leaderboard.tex", to_latex),
}
FORMATS: dict[str, tuple[str, Callable[[Leaderboard], str | bytes]]] = {
    **TEXT_FORMATS,
    "html": ("leaderboard.html", lambda leaderboard: leaderboard.html),
    "parquet": ("results.parquet", lambda leaderboard: to_parquet(leaderboard.records)),
}
ALWAYS = ("csv", "markdown")


def write_leaderboard(
    out: Path,
    published: bool = False,
    formats: Iterable[str] = (),
    drawn_by: Callable[[Leaderboard], str] | None = None,
) -> Leaderboard:
    """Rebuild leaderboard.csv, leaderboard.md and the files of other `formats`; return the leaderboard.

    Only result files that changed are read, and only pairs of changed results are tested again; the rest comes from
    OUT/cache. Two processes may run this at the same time: each checks after writing whether result files have changed
    since, and starts over if so, so that the last one to write has seen every file.

    Args:
        out: the folder given to `bench run --out`.
        published: whether leaderboard.md, .tex and .html get rows with published numbers of the same protocols;
            leaderboard.csv and results.parquet hold only measured numbers.
        formats: further keys of FORMATS to write.
        drawn_by: renders the HTML of a leaderboard, for its format and for notebooks.
    """
    while True:
        before = stamps(out)
        leaderboard = replace(read_leaderboard(out, published), drawn_by=drawn_by)
        files = {key: out / FORMATS[key][0] for key in (*ALWAYS, *formats)}
        for key, path in files.items():
            write_atomic(path, FORMATS[key][1](leaderboard))
        if stamps(out) == before:
            return replace(leaderboard, files=files)
