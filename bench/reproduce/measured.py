"""What was measured here of a published value: from the result files of a folder, or from the log of a training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.published.values import LOG, SETS, PublishedValue
from bench.reproduce.reach import Known, chosen
from bench.reproduce.steps import Setup, other_weights, run_name
from bench.results.board import board_of, group_of
from bench.results.record import Result
from bench.statistics.matching import Measured
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


def measurement(value: PublishedValue, results: Sequence[Measured], setup: Setup, there: Known) -> Measurement | None:
    """What was measured of `value`, the mean over seeds; None where nothing was."""
    if value.protocol == LOG:
        return measured_cost(setup.training(value), value.metric)
    found = [each.result for each in results if _is_of(each.result, value, there)]
    if not found:
        return None
    board = board_of(found)
    group = group_of(min(found, key=lambda result: _distance(result, value)))
    cell = next(row.cells[group, value.metric] for row in board.rows if (group, value.metric) in row.cells)
    of_group = [result for result in found if group_of(result) == group]
    return Measurement(number=cell.mean, interval=cell.interval, remarks=_remarks(of_group[0], value))


def _distance(result: Result, value: PublishedValue) -> tuple[bool, int, str]:
    """Orders results by how unlike the published measurement they are: other images, then variants such as a lower
    precision, then by name."""
    return not _on_published_images(result, value), len(result.variant), group_of(result)


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
