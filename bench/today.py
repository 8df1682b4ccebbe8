"""`bench reproduce --plan today`: a script that evaluates eight published networks, and the table of its results.

All networks are evaluated by the same protocols, and each by those of its published numbers. `bench reproduce today`
prints published next to measured numbers. The weights are timm's copies on the Hub, which anyone can download, except
for iBOT's file.
"""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from bench.checkpoints import LoadedCheckpoint, describe
from bench.names import absent_file
from bench.published.values import SETS, PublishedValue, published_values
from bench.reproduce import Measurement, Setup, measurement, protocol_of, run_command, unmeasured
from bench.results.record import DataUsed, MetricRecord, interval_decimals, suffix
from bench.results.store import StoredResult
from bench.run.calibration import Machine
from bench.run.forecast import Forecast, count_jobs, duration, size
from bench.run.prepare import open_data, plan_jobs
from bench.run.suites import ChosenProtocol, catalogue, choose_protocols
from checkpoints.export import ViTExport
from checkpoints.frozen import FrozenExport
from checkpoints.resolve import load
from checkpoints.spec import Preparation
from engine.errors import in_one_line
from engine.files import sha256_of_file
from engine.printing import in_markdown, markdown_table
from engine.tasks import Workspace

PLAN = "today"
SUITE = "knn@dino,linear@dinov2,attentive@ep,lowshot@msn,segmentation_linear@dinov3,depth_linear@dinov3"
IMAGES = ("imagenet", "ade20k", "nyu")
HEADS = ("weights", "protocol", "metric", "published", "measured", "difference", "in standard errors", "source")
Z95 = 1.959964  # half the width of a 95 % interval in standard errors, of a normal distribution


@dataclass(frozen=True, kw_only=True)
class Network:
    """Published weights."""

    reference: str  # for `bench run --checkpoint`
    sha256: str = ""  # of model.safetensors, from its page on the Hub; "": not found
    image_size: int | None = None  # at which its source evaluates on image sets, if timm's default differs
    timm: str = ""  # timm's name of the architecture, for a file that timm does not host
    page: str = ""  # web page that links to such a file


NETWORKS = {
    "dino-s16": Network(reference="timm:vit_small_patch16_224.dino"),
    "dino-b": Network(
        reference="timm:vit_base_patch16_224.dino",
        sha256="93181583427d6de3e18ab0e6ee4df35736cfc51a3c1bf9ae0e9b53b1316598dc",
    ),
    "ibot-b": Network(
        reference="ibot:/data/ibot/vitb_16/checkpoint_teacher.pth",
        timm="vit_base_patch16_224",
        page="https://github.com/bytedance/ibot, ViT-B/16, teacher",
    ),
    "mae-b": Network(reference="timm:vit_base_patch16_224.mae"),
    "dinov2-s": Network(reference="timm:vit_small_patch14_dinov2.lvd142m", image_size=224),
    "dinov2-b": Network(
        reference="timm:vit_base_patch14_dinov2.lvd142m",
        sha256="55cbb5d887b336d430e649c277b85a1429e724871f9d02ac16203235886d8c7b",
        image_size=224,
    ),
    "dinov3-s": Network(reference="timm:vit_small_patch16_dinov3.lvd1689m", image_size=224),
    "dinov3-b": Network(reference="timm:vit_base_patch16_dinov3.lvd1689m", image_size=224),
}


@cache
def protocols_of(suite: str) -> list[ChosenProtocol]:
    """The protocols of a suite."""
    return choose_protocols(suite, catalogue())


def published_of(name: str, suite: str) -> list[PublishedValue]:
    """The published values of a network that the protocols of a suite measure.

    For the plan's own suite also the values that other protocols of the same tasks measure.
    """
    protocols = protocols_of(suite)
    tasks, names = {protocol.key for protocol in protocols}, {protocol.name for protocol in protocols}
    values = []
    for value in published_values():
        if value.checkpoint != name or value.network or value.data not in IMAGES or unmeasured(value):
            continue
        if value.protocol in names or (suite == SUITE and protocol_of(value).key in tasks):
            values.append(value)
    return values


class Run(NamedTuple):
    """One `bench run` of a network."""

    protocols: Sequence[ChosenProtocol]  # of the suite or of published values; either all dense, or none
    settings: str  # changed settings, as in published.csv
    image_size: int | None  # to which position embeddings are resized; None for dense tasks, which keep the original


def runs_of(name: str, suite: str, setup: Setup) -> Iterator[Run]:
    """The runs that measure a network."""
    by_settings = {"": {protocol.name: protocol for protocol in protocols_of(suite)}}
    for value in published_of(name, suite):
        by_settings.setdefault(value.settings, {}).setdefault(value.protocol, protocol_of(value))
    image_size = None if name in setup.checkpoints else NETWORKS[name].image_size
    for settings, protocols in by_settings.items():
        for is_dense in (False, True):
            if selected := [protocol for protocol in protocols.values() if bool(protocol.layout) == is_dense]:
                yield Run(selected, settings, None if is_dense else image_size)


def reference_of(name: str, setup: Setup) -> str:
    """The reference that the user gave for a network, or the plan's own."""
    return setup.checkpoints.get(name) or NETWORKS[name].reference


def commands(name: str, suite: str, setup: Setup) -> Iterator[list[str]]:
    """All commands of a network as lists of words: the import at another image size, if necessary, and its runs."""
    reference, folder = reference_of(name, setup), str(setup.out / "imports" / name)
    runs = list(runs_of(name, suite, setup))
    for image_size in {run.image_size for run in runs if run.image_size}:
        yield ["bench", "import", reference, "--out", folder, "--image-size", str(image_size)]
    for run in runs:
        data = dict.fromkeys(protocol.layout or IMAGES[0] for protocol in run.protocols)
        protocols = [protocol.name for protocol in run.protocols]
        yield run_command(folder if run.image_size else reference, name, protocols, run.settings, data, setup)


def missing(setup: Setup) -> Iterator[str]:
    """Lines about image sets that cannot be opened or differ from the published ones, and about missing weights."""
    for data in IMAGES:
        url = setup.url(data)
        try:
            images = open_data(data, url, Workspace(cache=setup.out / "cache", data=url)).images
            if dict(images) != dict(SETS[data].images):
                yield f"note: {data} has {dict(images)} images, the published set {dict(SETS[data].images)}"
        except ValueError as error:
            yield f"missing: {data}: {in_one_line(error)}"
    for name, network in NETWORKS.items():
        if path := absent_file(reference_of(name, setup)):
            yield f"missing: {name}: {path} does not exist; give --checkpoints {name}=PATH ({network.page})"
        file = cached_file(network) if network.sha256 and name not in setup.checkpoints else None
        if file and sha256_of_file(file) != network.sha256:
            yield f"missing: {name}: {file} is not the published file, whose SHA-256 is {network.sha256}"


def cached_file(network: Network) -> Path | None:
    """The network's weights file in the Hub's cache; None if it has not been downloaded yet."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(f"timm/{network.reference.partition(':')[2]}", "model.safetensors")
    return Path(path) if isinstance(path, str) else None


@cache
def sized_export(reference: str, timm: str, image_size: int | None) -> FrozenExport:
    """A network for counting work: that of a reference or, if it is "", timm's architecture without weights."""
    if reference:
        return load(reference)
    import torch
    from timm import create_model

    from checkpoints.importers.timm import spec_of
    from checkpoints.vit import skip_init

    with torch.device("meta"), skip_init():
        spec = spec_of(create_model(timm, num_classes=0), timm)
    return ViTExport(
        spec=replace(spec, image_size=image_size or spec.image_size), preparation=Preparation(), tensors={}
    )


def forecasts(name: str, suite: str, setup: Setup, machine: Machine) -> Iterator[Forecast]:
    """Forecasts of a network's jobs on the published image sets."""
    reference = setup.checkpoints.get(name, "")
    architecture = NETWORKS[name].timm or NETWORKS[name].reference.partition(":")[2].partition(".")[0]
    space = Workspace(cache=setup.out / "cache", data="", device="cpu", precision="bfloat16")
    data = [DataUsed(name=images, url=SETS[images].url, images=SETS[images].images) for images in IMAGES]
    by_size: dict[int | None, list[ChosenProtocol]] = {}
    for run in runs_of(name, suite, setup):
        by_size.setdefault(run.image_size, []).extend(run.protocols)
    for image_size, protocols in by_size.items():
        export = sized_export("" if absent_file(reference) else reference, architecture, image_size)
        loaded = LoadedCheckpoint(used=describe(export, name, reference), spec=export.spec, reference=reference)
        _, [(_, jobs)], _ = plan_jobs(setup.out, space, [loaded], data, protocols)
        yield from (forecast.timed(machine) for forecast in count_jobs(jobs, export, space))


def total_cost(jobs: Iterable[Forecast]) -> str:
    """Total time and disk space of jobs: `about 3.1 h, 40 GB of disk`."""
    jobs = list(jobs)
    seconds, disk = sum(job.seconds or 0.0 for job in jobs), sum(job.work.disk for job in jobs)
    unknown = sum(job.seconds is None for job in jobs)
    excluded = f", not counting {unknown} jobs of unknown duration" if unknown else ""
    return f"about {duration(seconds)}, {size(disk)} of disk{excluded}"


def script(suite: str, setup: Setup, machine: Machine) -> Iterator[str]:
    """The lines of a shell script that measures all networks, with forecasts of time and disk space."""
    jobs_of = {name: list(forecasts(name, suite, setup, machine)) for name in NETWORKS}
    out, cache = str(setup.out), shlex.quote(str(setup.out / "cache"))
    check = ["bench", "reproduce", PLAN, "--check"]
    check += ["--data", *(f"{data}={setup.url(data)}" for data in IMAGES), "--out", out]
    if setup.checkpoints:
        check += ["--checkpoints", *(f"{name}={reference}" for name, reference in setup.checkpoints.items())]
    yield "#!/usr/bin/env bash"
    yield f"# Plan {PLAN}: {suite}"
    yield "# and the protocols of published numbers, on eight networks. Every command, and the script, can be repeated:"
    yield "# finished work is skipped, interrupted work is resumed."
    yield f"# In all {total_cost(job for jobs in jobs_of.values() for job in jobs)};"
    yield f"# features of a network can be removed when it is finished: rm -r {cache}"
    yield from (f"# {line}" for line in machine.lines())
    yield from ("set -euo pipefail", "", "# Lists what is missing, and stops if anything is.")
    yield shlex.join(check)
    for name, network in NETWORKS.items():
        checksum = f"model.safetensors has SHA-256 {network.sha256}" if network.sha256 else "SHA-256 not found"
        cost = total_cost(jobs_of[name])
        yield from ("", f"# {name}: {cost}" if name in setup.checkpoints else f"# {name}: {cost}; {checksum}")
        yield from (shlex.join(words) for words in commands(name, suite, setup))
    yield from ("", shlex.join(["bench", "record", out, "--to", f"{out}-record"]))
    yield shlex.join(["bench", "reproduce", PLAN, "--out", out]) + f" | tee {shlex.quote(out + '-published.md')}"


def table(setup: Setup, results: Sequence[StoredResult]) -> Iterator[str]:
    """A Markdown table of published and measured numbers, followed by measured numbers that no source published."""
    compared: set[tuple[str, str]] = set()  # (network, protocol) of published values
    rows: list[tuple[str, ...]] = []
    for name in NETWORKS:
        for value in published_of(name, SUITE):
            compared.add((name, value.protocol))
            protocol, number = f"{value.protocol} {value.settings}".strip(), f"{value.value:g}{suffix(value.unit)}"
            cells = differences(value, measurement(value, results, setup))
            rows.append((name, protocol, value.metric, number, *cells, value.source))
    for result in sorted(
        (stored.result for stored in results), key=lambda result: (result.checkpoint.name, result.group)
    ):
        name = result.checkpoint.name
        if name in NETWORKS and result.status == "ok" and (name, result.protocol.name) not in compared:
            metric, record = next(iter(result.metrics.items()))
            rows.append((name, result.protocol.name, metric, "", str(record), "", "", ""))
    yield from markdown_table([HEADS, *(map(in_markdown, row) for row in rows)])
    yield from ("", "In brackets: 95 % intervals over the validation images. Standard errors are of the same images;")
    yield "published numbers are taken as exact."


def differences(value: PublishedValue, measured: Measurement | None) -> tuple[str, str, str]:
    """The measured value with its interval and remarks, the difference, and the difference in standard errors."""
    if measured is None:
        return "not measured", "", ""
    number = MetricRecord(value=measured.number, unit=value.unit, interval=measured.interval)
    difference, digits = measured.number - value.value, interval_decimals(measured.number, value.unit) + 1
    low, high = measured.interval or (0.0, 0.0)
    errors = f"{difference * 2 * Z95 / (high - low):+.1f}" if high > low else ""
    return "; ".join([str(number), *measured.remarks]), f"{difference:+.{digits}f}", errors
