"""`bench reproduce --plan today`: a script, safe to repeat, that evaluates eight published networks by the same
protocols and by those of their published numbers; `bench reproduce today`: the published next to the measured numbers.

The weights are timm's copies on the Hub, which anyone can download, except for iBOT's file.
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
Z95 = 1.959964  # half the width of a normal distribution's 95 % interval, in standard errors


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


def published_of(name: str, suite: str) -> list[PublishedValue]:
    """Published values of a network that protocols of the suite measure; for the plan's own suite, also those that
    other protocols of the same tasks measure."""
    protocols = choose_protocols(suite, catalogue())
    keys, names = {protocol.key for protocol in protocols}, {protocol.name for protocol in protocols}
    values = [v for v in published_values() if v.checkpoint == name and not v.network and v.data in IMAGES]
    within = [v for v in values if not unmeasured(v) and chosen(v).key in keys]
    return within if suite == SUITE else [v for v in within if v.protocol in names]


Call = tuple[Sequence[ChosenProtocol], str, int | None]  # protocols, changed settings, image size of one `bench run`


def calls(name: str, suite: str, setup: Setup) -> Iterator[Call]:
    """The arguments of each `bench run` of a network.

    Protocols of the suite or of published values; changed settings as in published.csv; the image size to which
    position embeddings are resized, None for dense tasks, which start from the original ones.
    """
    by_settings = {"": {protocol.name: protocol for protocol in choose_protocols(suite, catalogue())}}
    for value in published_of(name, suite):
        by_settings.setdefault(value.settings, {}).setdefault(value.protocol, chosen(value))
    image_size = None if name in setup.checkpoints else NETWORKS[name].image_size
    for settings, protocols in by_settings.items():
        for on_scenes in (False, True):
            if own := [protocol for protocol in protocols.values() if bool(protocol.layout) == on_scenes]:
                yield own, settings, None if on_scenes else image_size


def reference_of(name: str, setup: Setup) -> str:
    """The reference that the user gave for a network, or the plan's own."""
    return setup.checkpoints.get(name) or NETWORKS[name].reference


def commands(name: str, suite: str, setup: Setup) -> Iterator[list[str]]:
    """All commands of a network as lists of words: imports at other image sizes, if necessary, and its runs."""
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
    """A line for each image set that cannot be opened or is not the published one, and each missing weights file."""
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
    """A network for counting work: that of a reference or, without one, timm's architecture with random weights."""
    if reference:
        return load(reference)
    from timm import create_model

    return of_module(create_model(timm, pretrained=False), ImportOptions(image_size=image_size), None)


def forecasts(name: str, suite: str, setup: Setup, machine: Machine) -> Iterator[Forecast]:
    """Forecasts of a network's jobs on the published image sets."""
    reference = setup.checkpoints.get(name, "")
    architecture = NETWORKS[name].timm or NETWORKS[name].reference.partition(":")[2].partition(".")[0]
    space = Workspace(cache=setup.out / "cache", data="", device="cpu", precision="bfloat16")
    data = [DataUsed(name=images, url=SETS[images].url, images=SETS[images].images) for images in IMAGES]
    by_size: dict[int | None, list[ChosenProtocol]] = {}
    for protocols, _, image_size in calls(name, suite, setup):
        by_size.setdefault(image_size, []).extend(protocols)
    for image_size, selected in by_size.items():
        export = sized_export("" if absent_file(reference) else reference, architecture, image_size)
        loaded = LoadedCheckpoint(used=describe(export, name, reference), spec=export.spec, reference=reference)
        _, [(_, jobs)], _ = plan_jobs(setup.out, space, [loaded], data, selected)
        yield from (forecast.timed(machine) for forecast in count_jobs(jobs, export, space))


def total_cost(jobs: Iterable[Forecast]) -> str:
    """Time and disk space of some jobs together: `about 3.1 h, 40 GB of disk`."""
    jobs = list(jobs)
    seconds, disk = sum(job.seconds or 0.0 for job in jobs), sum(job.work.disk for job in jobs)
    unknown = sum(job.seconds is None for job in jobs)
    excluded = f", not counting {unknown} jobs of unknown duration" if unknown else ""
    return f"about {duration(seconds)}, {size(disk)} of disk{excluded}"


def script(suite: str, setup: Setup, machine: Machine) -> Iterator[str]:
    """The lines of a shell script that measures all networks, with forecasts of time and disk space."""
    planned = {name: list(forecasts(name, suite, setup, machine)) for name in NETWORKS}
    out, cache = str(setup.out), shlex.quote(str(setup.out / "cache"))
    checked = ["--data", *(f"{data}={setup.url(data)}" for data in IMAGES), "--out", out]
    checked += ["--checkpoints", *(f"{n}={path}" for n, path in setup.checkpoints.items())] if setup.checkpoints else []
    yield "#!/usr/bin/env bash"
    yield f"# Plan {PLAN}: {suite}"
    yield "# and the protocols of published numbers, on eight networks. Every command, and the script, can be repeated:"
    yield "# finished work is skipped, interrupted work is resumed."
    yield f"# In all {total_cost(job for jobs in planned.values() for job in jobs)};"
    yield f"# features of a network can be removed when it is finished: rm -r {cache}"
    yield from (f"# {line}" for line in machine.lines())
    yield from ("set -euo pipefail", "", "# Lists what is missing, and stops if anything is.")
    yield shlex.join(["bench", "reproduce", PLAN, "--check", *checked])
    for name, network in NETWORKS.items():
        checksum = f"model.safetensors has SHA-256 {network.sha256}" if network.sha256 else "SHA-256 not found"
        cost = total_cost(planned[name])
        yield from ("", f"# {name}: {cost}" if name in setup.checkpoints else f"# {name}: {cost}; {checksum}")
        yield from (shlex.join(words) for words in commands(name, suite, setup))
    yield from ("", shlex.join(["bench", "record", out, "--to", f"{out}-record"]))
    yield shlex.join(["bench", "reproduce", PLAN, "--out", out]) + f" | tee {shlex.quote(out + '-published.md')}"


def table(setup: Setup, results: Sequence[StoredResult]) -> Iterator[str]:
    """A Markdown table of published and measured numbers, followed by measured numbers that no source published."""
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
