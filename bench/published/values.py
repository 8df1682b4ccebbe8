"""Numbers printed in papers, model cards and READMEs, and the protocol that measures each of them here.

published.csv has one number per row. Columns before `checkpoint` are facts of the source, in our words. The columns
from `checkpoint` on map the number to this tool; a test checks that every name in them exists, or that the row states
what is missing. mieb.csv has the few-shot accuracies of MIEB: a row for each encoder, and a column for each image set
with `mean deviation` over five draws. sets.csv has the image sets.

`bench run` reports immediately whether results of published weights reproduce the published numbers. Weights are
recognised by their digest, so weights that merely share a name are never compared.
"""

import csv
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import sqrt
from pathlib import Path

from bench.results.record import DataUsed, Result, number_text
from engine.printing import did_you_mean
from engine.settings import setting_text

LOG = "training log"  # stands for a protocol where the cost of a pretraining is measured
# Units of metrics that are not percentages.
UNITS = {"hours": "h", "minutes_per_epoch": "min", "gpu_memory": "GB", "rmse": "m"}


@dataclass(frozen=True, kw_only=True)
class PublishedValue:
    """One row of published.csv."""

    table: str  # `moca:table5j`
    model: str  # what was evaluated, `MOCA`
    architecture: str  # `ViT-B/16`
    epochs: str  # of its pretraining; "" if it was not pretrained
    images: str  # pretraining images: `ImageNet-1k`
    setting: str  # distinguishes the row from others of its table: `mask ratio 75 %, 1 mask`
    value: float  # in `unit`; NaN in a plan: no source published it
    std: float | None  # standard deviation that the source prints with the value
    tolerance: float | None  # standard deviation over repeated runs, as the source states it; None if it does not
    source: str  # paper and table
    note: str  # details that the paper leaves open, and what was assumed
    checkpoint: str  # our name of the weights, for `--checkpoints NAME=PATH` and in results
    digest: str  # first digits of the SHA-256 of the published file, or of its export; "" if unknown
    network: str  # branch of the method that was evaluated; "" for its first, "start" for initial weights
    pretraining: str  # `METHOD RECIPE [FIELD=VALUE ...]`, the arguments of `bench pretrain`; "" if it cannot train this
    importer: str  # reads the published weights; "" if none are published
    protocol: str  # `knn@moca`; LOG; "" if nothing here measures it
    settings: str  # `FIELD=VALUE ...` that differ from the protocol's, for `bench run --set`
    data: str  # key of SETS
    metric: str  # name in the protocol's result

    @property
    def unit(self) -> str:
        return UNITS.get(self.metric, "%")

    @property
    def what(self) -> str:
        """`MOCA, ViT-B/16, 200 epochs of ImageNet-1k, 2 masking rounds`"""
        return ", ".join(filter(None, (self.model, self.architecture, self.trained, self.setting)))

    @property
    def trained(self) -> str:
        """`200 epochs of ImageNet-1k`, or the images alone."""
        return f"{self.epochs} epochs of {self.images}" if self.epochs else self.images

    @property
    def measured_by(self) -> str:
        """`knn@moca top1_k20_bestT`"""
        return " ".join(filter(None, (self.protocol or "no protocol", self.settings, self.metric)))


@dataclass(frozen=True, kw_only=True)
class PublishedSet:
    """An image set that sources evaluate on, recognised by its numbers of images and classes.

    url: an example. images: split -> count. classes: None for scenes.
    """

    url: str
    images: Mapping[str, int]
    classes: int | None = None


@cache
def _rows(name: str) -> list[dict[str, str]]:
    """The rows of a CSV file of this folder."""
    with open(Path(__file__).parent / name, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _set_of(row: Mapping[str, str]) -> PublishedSet:
    images = {split: int(row[split]) for split in ("train", "val") if row[split]}
    return PublishedSet(url=row["url"], images=images, classes=int(row["classes"]) if row["classes"] else None)


# A set without its number of training images: sources train on train or trainval, and test on the same images.
SETS = {row["name"]: _set_of(row) for row in _rows("sets.csv")}
# Set -> how MIEB's split differs from the official one, or from the one that it has here; "" if it does not.
MIEB_SETS = {row["name"]: row["mieb"] for row in _rows("sets.csv") if row["name"] in _rows("mieb.csv")[0]}
MIEB_DRAWS = 5  # of 16 images a class
# Name of pretraining images in the column `images` -> their name in --data, and an example URL.
PRETRAINED_ON = {
    "ImageNet-1k": ("imagenet", SETS["imagenet"].url),
    "ImageNet-22k": ("imagenet22k", "images:/data/imagenet22k"),
    "": ("", "digits:"),  # initial weights depend on no images
}

# Table of a source -> what it compares.
TABLES = {row["table"]: row["caption"] for row in _rows("tables.csv")} | {
    f"mieb:{name}": f"{len(_rows('mieb.csv'))} encoders: 16 images a class of {name}" for name in MIEB_SETS
}


@cache
def published_values() -> tuple[PublishedValue, ...]:
    """All rows of published.csv, in the order of the file, by paper and table; then those of mieb.csv, by image set."""
    values = tuple(_value(row) for row in _rows("published.csv"))
    encoders = _rows("mieb.csv")
    return values + tuple(_mieb_value(encoder, name) for name in MIEB_SETS for encoder in encoders)


@cache
def compares_methods(table: str) -> bool:
    """Whether a table has values of several methods, rather than ablations of one."""
    return len({value.model for value in published_values() if value.table == table}) > 1


def set_names(data: DataUsed) -> list[str]:
    """Keys of the entries of SETS that have these numbers of images and classes: several if they cannot be told apart.

    A scheme that names its set, as in `torchvision:CIFAR10:/data`, decides; results of older versions lack classes.
    """
    names = [
        name
        for name, published in SETS.items()
        if published.images.items() <= data.images.items()
        and (None in (published.classes, data.classes) or published.classes == data.classes)
    ]
    scheme = data.url.lower().split(":")[:-1]
    return [name for name in names if name in scheme] or names


def set_name(data: DataUsed) -> str:
    """The one entry of `set_names`; "" if there are none or several."""
    names = set_names(data)
    return names[0] if len(names) == 1 else ""


def values_of(table: str) -> Sequence[PublishedValue]:
    """The values of one table. ValueError that suggests a similar name if the table does not exist."""
    if table not in TABLES:
        raise ValueError(f"{table}: no such table{did_you_mean(table, list(TABLES), '`bench reproduce`')}")
    return [value for value in published_values() if value.table == table]


def _value(row: Mapping[str, str]) -> PublishedValue:
    numbers = {name: float(row[name]) if row[name] else None for name in ("std", "tolerance")}
    return PublishedValue(**{**row, **numbers, "value": float(row["value"])})  # type: ignore[arg-type]


def _mieb_value(encoder: Mapping[str, str], name: str) -> PublishedValue:
    """The accuracy of an encoder, a row of mieb.csv, on an image set."""
    mean, deviation = map(float, encoder[name].split())
    notes = [MIEB_SETS[name], encoder["note"], "at chance, as published" if deviation == 0 and mean < 1 else ""]
    facts = ("model", "architecture", "epochs", "images", "checkpoint", "pretraining", "importer")
    return PublishedValue(
        **{fact: encoder[fact] for fact in facts},
        table=f"mieb:{name}",
        setting="",
        value=mean,
        std=deviation,
        # Two means over five draws each differ by this deviation.
        tolerance=deviation * sqrt(2 / MIEB_DRAWS),
        source=f"MIEB {name}, {encoder['repository']} of embeddings-benchmark/results f4cc6c8",
        note="; ".join(filter(None, notes)),
        digest="",
        network="",
        protocol="lowshot@mieb",
        settings="",
        data=name,
        metric="top1_16shot",
    )


OURS = {"%": 0.5, "m": 0.01}  # tolerance by unit if the source states none
ROUNDING = 0.05  # error of a number rounded to one decimal
DEVIATIONS = 2  # standard deviations that cover 95 % of repeated runs


def tolerance_of(value: PublishedValue) -> tuple[float, str]:
    """Largest accepted difference from a published value, in its unit, and where this tolerance comes from."""
    if value.tolerance is None:
        return OURS[value.unit], "ours, the source states none"
    stated = DEVIATIONS * value.tolerance + ROUNDING
    return stated, f"twice the source's deviation of {value.tolerance:g}, and rounding"


def against_published(
    result: Result, digests: Sequence[str], branch: str = "", values: Iterable[PublishedValue] | None = None
) -> Iterator[str]:
    """Compare a result with every published value of the same weights, protocol and images; one line for each.

    digests: of the export, and of the file that it was imported from. branch: the one imported from that file; "" for
    the importer's first. values: published values to compare with; None for all of published.csv.
    """
    for value in published_values() if values is None else values:
        is_same_network = value.digest and value.network == branch
        if not (is_same_network and any(digest.startswith(value.digest) for digest in digests)):
            continue
        if not _is_same_measurement(result, value):
            continue
        difference = result.metrics[value.metric].value - value.value
        tolerance, reason = tolerance_of(value)
        verdict, where = ("as published", "within") if abs(difference) <= tolerance else ("NOT AS PUBLISHED", "beyond")
        yield (
            f"{verdict}: {value.metric} is {value.value:g} in {value.table}, difference {difference:+.2f}, "
            f"{where} the tolerance of {tolerance:g} ({reason})"
        )


def published_in(
    results: Iterable[Result],
) -> tuple[dict[str, dict[tuple[str, str], PublishedValue]], dict[str, str]]:
    """Name of each published checkpoint -> (group, metric) -> its number, by the protocols and image sets of results.

    Settings must be the same. Ablations of a single method are left out. Also returns a sentence for each group whose
    image set may be one of several.
    """
    groups: dict[tuple[str, str, str], set[str]] = defaultdict(set)  # (image set, protocol, changed settings)
    metrics: dict[str, set[str]] = defaultdict(set)
    sets_of_group: dict[str, list[str]] = {}
    for result in results:
        unchanged = replace(result, protocol=replace(result.protocol, changes={}))
        if result.status == "ok" and unchanged.variant in ((), (f"v{result.protocol.version}",)):
            sets_of_group[result.group] = set_names(result.data)
            metrics[result.group].update(result.metrics)
            for name in sets_of_group[result.group]:
                groups[name, result.protocol.name, changed_settings(result)].add(result.group)
    by_checkpoint: dict[str, dict[tuple[str, str], PublishedValue]] = defaultdict(dict)
    ambiguous = {}
    for value in sorted(published_values(), key=_is_of_others):  # a network's own paper is preferred
        is_ablation = len(value.pretraining.split()) > 2
        if is_ablation and not compares_methods(value.table):
            continue
        settings = " ".join(sorted(value.settings.split()))
        for group in groups.get((value.data, value.protocol, settings), ()):
            if len(names := sets_of_group[group]) > 1:
                ambiguous[group] = (
                    f"No published numbers are shown: by its numbers of images the set is {' or '.join(names)}. The "
                    "number of classes, which results of older versions lack, or a URL torchvision:NAME:PATH decides."
                )
            elif value.metric in metrics[group]:
                by_checkpoint[value.checkpoint].setdefault((group, value.metric), value)
    return by_checkpoint, ambiguous


def _is_of_others(value: PublishedValue) -> bool:
    """Whether a number is from another paper than that of its network: `moca:table10` of `mae-l`."""
    return value.table.partition(":")[0].replace("-", "") != value.checkpoint.partition("-")[0]


def published_lines(results: Iterable[Result], columns: Collection[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """(group, metric) -> a line of numbers, `dinov2-s 92.95 +- 0.66 (mieb:cifar10)`, of the results' architectures.

    columns: those that are wanted.
    """
    results = list(results)
    architectures = {result.checkpoint.architecture for result in results}
    numbers: dict[tuple[str, str], list[str]] = {}
    for name, values in sorted(published_in(results)[0].items()):
        for column, value in values.items():
            if column in columns and value.architecture in architectures:
                spread = "" if value.std is None else f" +- {value.std:g}"
                text = f"{name} {number_text(value.value, value.unit)}{spread} ({value.table})"
                numbers.setdefault(column, []).append(text)
    return {column: f"  published, of the same architecture: {', '.join(texts)}" for column, texts in numbers.items()}


def changed_settings(result: Result) -> str:
    """The changed settings of a result's protocol, sorted, in the format of the column `settings`."""
    return " ".join(sorted(f"{name}={setting_text(setting)}" for name, setting in result.protocol.changes.items()))


def _is_same_measurement(result: Result, value: PublishedValue) -> bool:
    """Whether a result has the protocol, settings, metric and images of a published value."""
    return (
        value.protocol == result.protocol.name
        and " ".join(sorted(value.settings.split())) == changed_settings(result)
        and value.metric in result.metrics
        and result.limit is None
        and not result.chosen_size
        and not result.skipped
        and set_name(result.data) == value.data
    )
