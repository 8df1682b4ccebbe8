"""What `bench reproduce` prints: the list of tables, one table value by value, and how much is within reach."""

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from bench.published.values import TABLES, PublishedValue, published_values, values_of
from bench.reproduce.measured import Measurement, measurement
from bench.reproduce.reach import WAYS, Known, Way, reach
from bench.reproduce.steps import Setup, commands_of, missing_for
from bench.results.units import interval_decimals, suffix
from bench.statistics.matching import Measured

# What groups of columns say, and the columns of each.
GROUPS = {
    "": ("values",),
    "------------ measured by": ("protocol", "--set", "nothing"),
    "----------- trained by": ("recipe", "--set", "nothing"),
}
COLUMN = 10  # characters
LEGEND = (
    "measured by: a named protocol (of a cost, the log of a training), or one with settings changed by --set.",
    "trained by: how the weights can be pretrained here, also those that are published.",
)


def listing(there: Known) -> Iterator[str]:
    """A line for each table: id, number of values, by what they can be measured, caption."""
    width = max(map(len, TABLES))
    for table, caption in TABLES.items():
        counts = count_of(table, there)
        yield f"{table:{width}}  {_said(counts)}  {caption}"
    yield ""
    yield "one of them, value by value, with the commands: bench reproduce TABLE"


def _said(counts: Sequence[int]) -> str:
    values, named, changed, none, *_ = counts
    return f"{values:3} values: {named:3} by a named protocol, {changed:2} by --set, {none:2} not at all;"


def summary(there: Known) -> Iterator[str]:
    """The counts of every table and of all, and why the others are out of reach."""
    counted = {table: count_of(table, there) for table in TABLES}
    counted["all"] = [sum(column) for column in zip(*counted.values(), strict=True)]
    width = max(map(len, counted))
    yield f"{'':{width}}{''.join(f'{group:>{COLUMN * len(names)}}' for group, names in GROUPS.items())}"
    heads = [name for names in GROUPS.values() for name in names]
    yield _columns("table", heads, width)
    for table, counts in counted.items():
        yield _columns(table, counts, width)
    yield from ("", *LEGEND)
    within = [(value.table, reach(value, there)) for value in published_values()]
    yield from reasons("not measured here", [(table, each.unmeasured) for table, each in within])
    yield from reasons("weights not trained here", [(table, each.untrained) for table, each in within])


def _columns(first: str, others: Sequence[str] | Sequence[int], width: int) -> str:
    return f"{first:{width}}{''.join(f'{each:>{COLUMN}}' for each in others)}"


def count_of(table: str, there: Known) -> list[int]:
    """Values, those by each way of evaluation, those by each way of training."""
    found = [reach(value, there) for value in values_of(table)]
    return [len(found), *_by_way([each.evaluation for each in found]), *_by_way([each.training for each in found])]


def _by_way(ways: Sequence[Way]) -> list[int]:
    counts = Counter(ways)
    return [counts[way] for way in WAYS]


def reasons(title: str, lacking: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Why values are out of reach, each reason with its number of values and the tables. lacking: of each value its
    table and the reason, "" for none."""
    found: dict[str, list[str]] = {}
    for table, reason in lacking:
        if reason:
            found.setdefault(reason, []).append(table)
    for reason, tables in found.items():
        yield f"{title}: {len(tables)}, {reason} ({', '.join(dict.fromkeys(tables))})"


def table_lines(table: str, setup: Setup, results: Sequence[Measured], there: Known) -> Iterator[str]:
    """A table value by value: published, measured, difference and interval, commands, and what is missing."""
    values = values_of(table)
    yield f"{table}: {TABLES[table]}; {values[0].source}"
    last = ""
    for value in values:
        if value.what != last:
            yield from ("", f"{value.what}; weights {value.checkpoint}")
            last = value.what
        found = measurement(value, results, setup, there)
        yield f"  {value.measured_by}: published {_published(value)}; {_measured(found, value)}"
        yield from (f"    note: {value.note}" for _ in filter(None, [value.note]))
        yield f"    missing: {', '.join(missing_for(value, setup, there)) or 'nothing'}"
        yield from (f"    {shlex.join(words)}" for words in commands_of(value, setup, there))


def _published(value: PublishedValue) -> str:
    spread = f" +- {value.std:g}" if value.std is not None else ""
    return f"{value.value:g}{suffix(value.unit)}{spread}"


def _measured(found: Measurement | None, value: PublishedValue) -> str:
    if found is None:
        return "not measured here"
    digits = interval_decimals(found.number, value.unit)
    ends = [f"{end - value.value:+.{digits}f}" for end in found.interval or ()]
    between = f" [{', '.join(ends)}]" if ends else ""
    text = f"measured {found.number:.2f}{suffix(value.unit)}, difference {found.difference(value):+.2f}{between}"
    return "; ".join([text, *found.remarks])
