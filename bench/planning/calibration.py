"""Measure in about a minute what the units of work take here: on the given images, with the given export.

Measured are the pass for features and that for random crops, on a few images; FAISS on noise; and what each task
rehearses of its own (`Task.rehearse`). The result is kept in the cache of the run, by machine, device, precision,
architecture and image set.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from bench.planning.rates import Calibration
from bench.results.environment import hardware
from checkpoints.backbone import Backbone
from checkpoints.flops import forward_flops, training_flops
from checkpoints.frozen import FrozenExport
from engine.files import digest, write_atomic
from engine.printing import say
from engine.tasks import Task, Workspace
from engine.work import Kind
from imagesets.sets import ImageSet, open_set
from probes.features.extract import forward_batch, transform_of
from probes.features.extraction import Extractor, Reader, run_extraction
from probes.features.kinds import FeatureKind
from probes.knn.neighbours import search, unit_rows
from probes.linear.augmented import TrainTransform

SECONDS = 3.0  # of each measurement of images, about
READ = 16  # images of the first, untimed pass
MOST = 1024  # images of a timed pass
GALLERY, QUERIES = 20_000, 512  # rows that are compared
PRODUCT = 1024  # rows and columns of a matrix product


def calibration_path(space: Workspace, export: FrozenExport, fingerprints: Mapping[str, str]) -> Path:
    """Where the calibration of this machine, export and image set is kept."""
    key = [hardware(), space.device, space.precision, space.decode, space.batch_size, space.workers, space.world.size]
    named = digest([*key, asdict(export.spec), dict(fingerprints)])[:16]
    return space.cache / "calibration" / f"{named}.json"


def read_calibration(path: Path) -> Calibration | None:
    """One that was kept; None where there is none, or a damaged one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Calibration)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def calibrated(
    path: Path, export: FrozenExport, space: Workspace, tasks: Iterable[tuple[str, Task]], classes: int, fresh: bool
) -> Calibration:
    """What is measured for these tasks on the set `space.data`: kept where it was before, else measured now.

    tasks: protocol and task. classes: of that set. fresh: measure again.
    """
    kept = None if fresh else read_calibration(path)
    missing = [(name, task) for name, task in tasks if kept is None or name not in kept.of_task]
    if kept is not None and not missing:
        return kept
    started = time.perf_counter()
    with scratch(space) as inside:
        rehearsed = {name: rehearsal(name, task, export, inside) for name, task in missing}
        kept = kept or measured(export, inside, reads_scenes=any(task.LAYOUT for _, task in missing))
        models = {name: dict(task.model_flops(export.spec, classes)) for name, task in missing if rehearsed[name]}
    probes = [rehearsed[name] for name, task in missing if not task.LAYOUT]
    trained = [found["training"] for found in probes if "training" in found]
    flops = {**kept.flops, **({"training": training_flops(export.spec) / min(trained)} if trained else {})}
    result = replace(
        kept,
        of_task={**kept.of_task, **rehearsed},
        models={**kept.models, **models},
        flops=flops,
        took=round(kept.took + time.perf_counter() - started, 1),
    )
    write_atomic(path, json.dumps(asdict(result), indent=1) + "\n")
    return result


@contextmanager
def scratch(space: Workspace) -> Iterator[Workspace]:
    """A workspace of this process alone, in a folder that goes; sets that are open stay open."""
    with tempfile.TemporaryDirectory(prefix="bench-calibration-") as folder:
        yield replace(space, cache=Path(folder), wanted={}, limit=None)


def rehearsal(name: str, task: Task, export: FrozenExport, space: Workspace) -> dict[Kind, float]:
    """What a task rehearses; nothing where it cannot, which is said."""
    try:
        return dict(task.rehearse(export, space))
    except Exception as error:  # what keeps it from a rehearsal will keep it from running, and say more there
        say(
            f"{name} was not rehearsed: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            errors=True,
        )
        return {}


def measured(export: FrozenExport, space: Workspace, reads_scenes: bool) -> Calibration:
    """What all tasks share. Of scenes nothing is shared but the matrix products."""
    product = seconds_of(lambda: _product(space.device))
    flops = {"product": 2.0 * PRODUCT**3 / product}
    units: dict[Kind, float] = {}
    reading = 0.0
    if not reads_scenes:
        train = space.images("train", open_set)
        reading, features = passes(export, train, space, augmented=False)
        units = {"features": features, "crops": passes(export, train, space, augmented=True)[1]}
        units["comparisons"] = comparison_seconds(export.spec.width, space)
        computing = max(features - reading / torch.get_num_threads(), features / 10)
        flops["forward"] = forward_flops(export.spec) / computing
    else:
        flops["forward"] = bare_forward(export, space)
    flops["training"] = flops["forward"]
    return Calibration(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        took=0.0,
        machine=hardware(),
        device=space.device,
        precision=space.precision,
        architecture=export.spec.label,
        units=units,
        flops=flops,
        reading=reading,
        memory_free=free_memory(space.device),
    )


def bare_forward(export: FrozenExport, space: Workspace) -> float:
    """Operations a second of the network on images in memory."""
    backbone, count = Backbone(export, space.device, space.precision), 2
    images = backbone.prepare(torch.zeros(count, 3, *export.spec.size, dtype=torch.uint8, device=space.device))
    last = [(export.spec.depth - 1, False)]
    seconds = seconds_of(lambda: backbone.views(images, last)[last[0]].patches.sum().item())
    return count * forward_flops(export.spec) / seconds


def passes(export: FrozenExport, train: ImageSet, space: Workspace, augmented: bool) -> tuple[float, float]:
    """Seconds that one core takes to read an image, and that this machine takes for an image through the network."""
    transform: Any = transform_of(export, space)
    if augmented:
        names = np.arange(len(train))
        transform = TrainTransform(
            size=export.spec.size, interpolation="bilinear", rule="torchvision", seed=0, epoch=0, names=names
        )
    chunk = space.batch_size or forward_batch(space.device)
    kind = FeatureKind("cls" if export.spec.has_class_token else "avg")
    backbone = Backbone(export, space.device, space.precision)
    extractor = Extractor(backbone=backbone, kinds=[kind], image_set=train)
    spread = train.limited(min(len(train), MOST))

    def through(count: int) -> float:
        spans = {number: range(at, min(at + chunk, count)) for number, at in enumerate(range(0, count, chunk))}
        started = time.perf_counter()
        run_extraction(Reader(spread, transform, spans, skip_bad=True), extractor, lambda done: None, space.workers)
        return time.perf_counter() - started

    count = min(max(READ, chunk), len(spread))
    through(count)
    each = through(count) / count
    count = int(min(len(spread), max(count, SECONDS / each)))
    whole = through(count) / count
    started = time.perf_counter()
    for index in range(min(READ, len(spread))):
        transform(spread, index)
    return (time.perf_counter() - started) / min(READ, len(spread)), whole


def comparison_seconds(width: int, space: Workspace) -> float:
    """Seconds of one comparison of FAISS, or of torch where there is none."""
    generator = np.random.default_rng(0)
    rows = unit_rows(generator.standard_normal((GALLERY, width), np.float32))
    try:
        search(rows[:1000], rows[:8], 8)
    except ValueError:
        return seconds_of(lambda: search(rows, rows[:QUERIES], 200, "torch", space.device)) / (GALLERY * QUERIES)
    return seconds_of(lambda: search(rows, rows[:QUERIES], 200)) / (GALLERY * QUERIES)


def _product(device: str) -> float:
    matrix = torch.ones(PRODUCT, PRODUCT, device=device)
    return (matrix @ matrix)[0, 0].item()


def seconds_of(work: Callable[[], object]) -> float:
    """The least of three calls, after one that is slower."""
    found = []
    for _ in range(4):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return min(found[1:])


def free_memory(device: str) -> float:
    """Bytes that are free on the device."""
    if torch.device(device).type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else ():
        if line.startswith("MemAvailable:"):
            return 1024.0 * int(line.split()[1])
    return 0.0
