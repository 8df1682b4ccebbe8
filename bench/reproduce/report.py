"""What `bench reproduce` prints: the list of tables, one table value by value, and how much is within reach.

What was measured here of a published value comes from the results of a folder, or from the log of a training.
"""

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.leaderboards.tables import leaderboard_of
from bench.published.values import LOG, SETS, TABLES, PublishedValue, published_values, values_of
from bench.reproduce.steps import (
    STATUSES,
    Known,
    Setup,
    Status,
    availability,
    chosen,
    commands_of,
    missing_for,
    other_weights,
    run_name,
)
from bench.results.record import Result, interval_decimals, suffix
from bench.results.store import StoredResult
from pretrain.loop.cost import cost_of
from pretrain.loop.exporting import identity_in, is_run


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A number measured here, in the unit of the published one. remarks: why it may not be the same quantity."""

    number: float
    interval: tuple[float, float] | None = None
    remarks: tuple[str, ...] = ()

    def difference(self, value: PublishedValue) -> float:
        """Measured less published."""
        return self.number - value.value


def measurement(
    value: PublishedValue, results: Sequence[StoredResult], setup: Setup, there: Known
) -> Measurement | None:
    """What was measured of `value`, the mean over seeds; None where nothing was."""
    if value.protocol == LOG:
        return measured_cost(setup.training(value), value.metric)
    own = [stored.result for stored in results if _is_of(stored.result, value, there)]
    if not own:
        return None
    group = min(own, key=lambda result: _distance(result, value)).group
    column = group, value.metric
    cell = next(cells[column] for cells in leaderboard_of(own).rows.values() if column in cells)
    first = next(result for result in own if result.group == group)
    return Measurement(number=cell.mean, interval=cell.interval, remarks=_remarks(first, value))


def _distance(result: Result, value: PublishedValue) -> tuple[bool, int, str]:
    """Orders results by how unlike the published measurement they are: other images, then variants such as a lower
    precision, then by name."""
    return not _on_published_images(result, value), len(result.variant), result.group


def _on_published_images(result: Result, value: PublishedValue) -> bool:
    return dict(result.data.images) == dict(SETS[value.data].images)


def _is_of(result: Result, value: PublishedValue, there: Known) -> bool:
    if result.protocol.name != value.protocol or result.checkpoint.name != run_name(value):
        return False
    protocol = chosen(value, there)
    return (
        result.status == "ok"
        and result.limit is None
        and value.metric in result.metrics
        and result.protocol.version == protocol.protocol.version
        and dict(result.protocol.changes) == dict(protocol.changes)
        and (result.data.name == value.data or _on_published_images(result, value))
    )


def _remarks(result: Result, value: PublishedValue) -> tuple[str, ...]:
    found = [f"computed in {result.precision}"] if result.precision != "float32" else []
    other = other_weights(value, result.checkpoint.method, result.checkpoint.architecture)
    found += [f"the weights are {other}"] if other else []
    found += [f"images by the {result.decode} decoder"] if result.decode != "exact" else []
    found += [f"{result.skipped} images left out"] if result.skipped else []
    if not _on_published_images(result, value):
        there, wanted = (_counts(images) for images in (result.data.images, SETS[value.data].images))
        found.append(f"on other images: {there}, {value.data} has {wanted}")
    return tuple(found)


def _counts(images: Mapping[str, int]) -> str:
    return " + ".join(f"{count} {split}" for split, count in images.items())


def measured_cost(folder: Path, metric: str) -> Measurement | None:
    """Hours, minutes of an epoch, or GPU memory (GB) of the training in `folder`; None where nothing is known yet.

    Hours are those of all epochs at the speed so far.
    """
    if not is_run(folder):
        return None
    identity = identity_in(folder)
    spent, epochs = cost_of(folder, identity), identity["settings"]["epochs"]
    name, scale = {
        "hours": ("seconds_per_epoch", epochs / 3600),
        "minutes_per_epoch": ("seconds_per_epoch", 1 / 60),
        "gpu_memory": ("gpu_memory_gib", 1.0),  # papers write GB for what drivers show, which are GiB
    }[metric]
    remarks = (f"on {spent['devices']}",) if spent.get("devices") else ()
    return Measurement(number=spent[name] * scale, remarks=remarks) if name in spent else None


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
    within = [(value.table, availability(value, there)) for value in published_values()]
    yield from reasons("not measured here", [(table, each.unmeasured) for table, each in within])
    yield from reasons("weights not trained here", [(table, each.untrained) for table, each in within])


def _columns(first: str, others: Sequence[str] | Sequence[int], width: int) -> str:
    return f"{first:{width}}{''.join(f'{each:>{COLUMN}}' for each in others)}"


def count_of(table: str, there: Known) -> list[int]:
    """Values, those by each way of evaluation, those by each way of training."""
    found = [availability(value, there) for value in values_of(table)]
    return [
        len(found),
        *_by_status([each.evaluation for each in found]),
        *_by_status([each.training for each in found]),
    ]


def _by_status(statuses: Sequence[Status]) -> list[int]:
    counts = Counter(statuses)
    return [counts[status] for status in STATUSES]


def reasons(title: str, lacking: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Why values are out of reach, each reason with its number of values and the tables. lacking: of each value its
    table and the reason, "" for none."""
    found: dict[str, list[str]] = {}
    for table, reason in lacking:
        if reason:
            found.setdefault(reason, []).append(table)
    for reason, tables in found.items():
        yield f"{title}: {len(tables)}, {reason} ({', '.join(dict.fromkeys(tables))})"


def table_lines(table: str, setup: Setup, results: Sequence[StoredResult], there: Known) -> Iterator[str]:
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
