"""`bench reproduce --plan today`: published networks of today by one set of protocols and by those of their published
numbers, as a script that can be begun again; `bench reproduce today`: published beside measured.

Weights are timm's copies on the Hub, which anyone can download, but for iBOT's file.
"""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench.cli.names import absent_file
from bench.cli.output import in_one_line
from bench.published.values import SETS, PublishedValue, published_values
from bench.reproduce import Measurement, Setup, chosen, launched, measurement, unmeasured
from bench.results.record import DataUsed, MetricRecord, interval_decimals, suffix
from bench.results.store import StoredResult
from bench.run.calibration import Machine
from bench.run.checkpoints import LoadedCheckpoint, describe
from bench.run.forecast import Forecast, count_jobs, duration, size
from bench.run.prepare import open_data, plan_jobs
from bench.run.suites import ChosenProtocol, catalogue, choose_protocols
from checkpoints.frozen import FrozenExport
from checkpoints.import_options import ImportOptions
from checkpoints.resolve import load, of_module
from engine.files import sha256_of_file
from engine.printing import in_markdown, markdown_table
from engine.tasks import Workspace

PLAN = "today"
SUITE = "knn@dino,linear@dinov2,attentive@ep,lowshot@msn,segmentation_linear@dinov3,depth_linear@dinov3"
IMAGES = ("imagenet", "ade20k", "nyu")
HEADS = ("weights", "protocol", "metric", "published", "measured", "difference", "in standard errors", "source")
Z95 = 1.959964  # half the width of a 95 % interval of a normal variable, in standard errors


@dataclass(frozen=True, kw_only=True)
class Network:
    """Published weights."""

    reference: str  # as `bench run --checkpoint` takes it
    sha256: str = ""  # of the Hub's model.safetensors, as its page there says; "": not found
    image_size: int | None = None  # that its source evaluates image sets in, where timm's is another
    timm: str = ""  # architecture of a file that timm does not hold
    page: str = ""  # that links to such a file


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


def published_of(name: str, suite: str) -> list[PublishedValue]:
    """Published values of a network that the suite measures or, where it is the plan's own, other protocols of its
    tasks."""
    protocols = choose_protocols(suite, catalogue())
    keys, names = {protocol.key for protocol in protocols}, {protocol.name for protocol in protocols}
    values = [v for v in published_values() if v.checkpoint == name and not v.network and v.data in IMAGES]
    within = [v for v in values if not unmeasured(v) and chosen(v).key in keys]
    return within if suite == SUITE else [v for v in within if v.protocol in names]


Call = tuple[Sequence[ChosenProtocol], str, int | None]


def calls(name: str, suite: str, setup: Setup) -> Iterator[Call]:
    """Each `bench run` of a network: protocols of the suite or of published values; changed settings, as published.csv
    has them; size of images that position tables are resized to, None for dense tasks, which begin with all of them."""
    by_settings = {"": {protocol.name: protocol for protocol in choose_protocols(suite, catalogue())}}
    for value in published_of(name, suite):
        by_settings.setdefault(value.settings, {}).setdefault(value.protocol, chosen(value))
    image_size = None if name in setup.checkpoints else NETWORKS[name].image_size
    for settings, protocols in by_settings.items():
        for on_scenes in (False, True):
            if own := [protocol for protocol in protocols.values() if bool(protocol.layout) == on_scenes]:
                yield own, settings, None if on_scenes else image_size


def reference_of(name: str, setup: Setup) -> str:
    """What the user gave for a network, or where the plan takes it from."""
    return setup.checkpoints.get(name) or NETWORKS[name].reference


def commands(name: str, suite: str, setup: Setup) -> Iterator[list[str]]:
    """The words of all commands of a network: an import in the size of its source, if need be, and its calls."""
    reference, folder = reference_of(name, setup), str(setup.out / "imports" / name)
    planned = list(calls(name, suite, setup))
    for resized in {image_size for _, _, image_size in planned if image_size}:
        yield ["bench", "import", reference, "--out", folder, "--image-size", str(resized)]
    for protocols, settings, image_size in planned:
        sets = dict.fromkeys(protocol.layout or IMAGES[0] for protocol in protocols)
        changes = [f"{protocol.name}.{change}" for protocol in protocols for change in settings.split()]
        words = ["bench", "run", "--checkpoint", folder if image_size else reference, "--name", name]
        words += ["--suite", ",".join(protocol.name for protocol in protocols)]
        words += ["--data", *(f"{data}={setup.url(data)}" for data in sets)]
        words += ["--set", *changes] if changes else []
        yield launched([*words, "--out", str(setup.out)], setup)


def missing(setup: Setup) -> Iterator[str]:
    """A line for each image set that cannot be opened or is not the published one, and each file of weights."""
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
    """The weights that the Hub's cache holds; None where they are still to be downloaded."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(f"timm/{network.reference.partition(':')[2]}", "model.safetensors")
    return Path(path) if isinstance(path, str) else None


@cache
def sized_export(reference: str, timm: str, image_size: int | None) -> FrozenExport:
    """What a plan counts with: the weights of a reference or, without one, any of timm's architecture."""
    if reference:
        return load(reference)
    from timm import create_model

    return of_module(create_model(timm, pretrained=False), ImportOptions(image_size=image_size), None)


def forecasts(name: str, suite: str, setup: Setup, machine: Machine) -> Iterator[Forecast]:
    """The jobs of a network on the published images."""
    given = setup.checkpoints.get(name, "")
    architecture = NETWORKS[name].timm or NETWORKS[name].reference.partition(":")[2].partition(".")[0]
    space = Workspace(cache=setup.out / "cache", data="", device="cpu", precision="bfloat16")
    data = [DataUsed(name=known, url=SETS[known].url, images=SETS[known].images) for known in IMAGES]
    by_size: dict[int | None, list[ChosenProtocol]] = {}
    for protocols, _, image_size in calls(name, suite, setup):
        by_size.setdefault(image_size, []).extend(protocols)
    for image_size, selected in by_size.items():
        export = sized_export("" if absent_file(given) else given, architecture, image_size)
        loaded = LoadedCheckpoint(used=describe(export, name, given), spec=export.spec, reference=given)
        _, [(_, jobs)], _ = plan_jobs(setup.out, space, [loaded], data, selected)
        yield from (forecast.timed(machine) for forecast in count_jobs(jobs, export, space))


def taken(jobs: Iterable[Forecast]) -> str:
    """`about 3.1 h, 40 GB of disk`"""
    jobs = list(jobs)
    seconds, disk = sum(job.seconds or 0.0 for job in jobs), sum(job.work.disk for job in jobs)
    unknown = sum(job.seconds is None for job in jobs)
    return f"about {duration(seconds)}, {size(disk)} of disk" + (f", without {unknown} jobs" if unknown else "")


def script(suite: str, setup: Setup, machine: Machine) -> Iterator[str]:
    """The lines of a shell script that measures all networks, and what that takes."""
    planned = {name: list(forecasts(name, suite, setup, machine)) for name in NETWORKS}
    out, cache = str(setup.out), shlex.quote(str(setup.out / "cache"))
    checked = ["--data", *(f"{data}={setup.url(data)}" for data in IMAGES), "--out", out]
    checked += ["--checkpoints", *(f"{n}={path}" for n, path in setup.checkpoints.items())] if setup.checkpoints else []
    yield "#!/usr/bin/env bash"
    yield f"# Plan {PLAN}: {suite}"
    yield "# and the protocols of published numbers, on eight networks. Every command, and the whole, can be repeated:"
    yield f"# what is done is skipped or goes on. In all {taken(job for jobs in planned.values() for job in jobs)};"
    yield f"# features of a network can be removed when it is done: rm -r {cache}"
    yield from (f"# {line}" for line in machine.lines())
    yield from ("set -euo pipefail", "", "# Says what is missing, and stops.")
    yield shlex.join(["bench", "reproduce", PLAN, "--check", *checked])
    for name, network in NETWORKS.items():
        known = f"model.safetensors has SHA-256 {network.sha256}" if network.sha256 else "SHA-256 not found"
        yield from ("", f"# {name}: {taken(planned[name])}" + ("" if name in setup.checkpoints else f"; {known}"))
        yield from (shlex.join(words) for words in commands(name, suite, setup))
    yield from ("", shlex.join(["bench", "record", out, "--to", f"{out}-record"]))
    yield shlex.join(["bench", "reproduce", PLAN, "--out", out]) + f" | tee {shlex.quote(out + '-published.md')}"


def table(setup: Setup, results: Sequence[StoredResult]) -> Iterator[str]:
    """Markdown: published numbers beside measured ones, and then what was measured without a published number."""
    compared: set[tuple[str, str]] = set()
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
            metric, measured = next(iter(result.metrics.items()))
            rows.append((name, result.protocol.name, metric, "", str(measured), "", "", ""))
    yield from markdown_table([HEADS, *(map(in_markdown, row) for row in rows)])
    yield from ("", "In brackets: 95 % intervals over the validation images. Standard errors are of these images too;")
    yield "published numbers count as exact."


def differences(value: PublishedValue, measured: Measurement | None) -> tuple[str, str, str]:
    """Measured with its interval and why it may be another quantity, difference, difference in standard errors."""
    if measured is None:
        return "not measured", "", ""
    number = MetricRecord(value=measured.number, unit=value.unit, interval=measured.interval)
    difference, digits = measured.number - value.value, interval_decimals(measured.number, value.unit) + 1
    low, high = measured.interval or (0.0, 0.0)
    errors = f"{difference * 2 * Z95 / (high - low):+.1f}" if high > low else ""
    return "; ".join([str(number), *measured.remarks]), f"{difference:+.{digits}f}", errors
