"""How fast a machine does the work of tasks: a few rates, measured on this machine or assumed for another one.

Assumed machines (`--assume`) allow plans without access to the machine. Peaks are from data sheets; the fraction of the
peak that programs reach, and everything else, are assumptions (docs/scale.md).
"""

import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch.nn import functional as F

from checkpoints.flops import forward_flops, training_flops
from checkpoints.frozen import FrozenExport
from checkpoints.spec import ViTSpec
from checkpoints.vit import ViT
from engine.errors import UserError
from engine.machine import own_cores, run_on_core_threads
from engine.precision import autocast
from engine.printing import did_you_mean
from engine.tasks import Workspace
from engine.work import IMAGES, Kind, Part, Work
from imagesets.decoding import UnreadableImage
from imagesets.selection import evenly_spaced
from probes.features.extract import MAX_LOADERS, forward_batch, transform_of

AUGMENTED = 300 / 190  # time to read an image and augment it as for fine-tuning, by that to crop it (docs/speed.md)
# Kind of work -> how a plan names its computation, without reading.
TERMS: Mapping[Kind, str] = {
    "features": "forward passes",
    "evaluation": "forward passes",
    "crops": "forward passes",
    "training": "training steps",
    "updates": "training steps",
    "heads": "heads",
    "start": "start",
}
# Kind of work -> the rates that it takes.
RATES: Mapping[Kind, tuple[str, ...]] = {
    "features": ("forward", "reading"),
    "evaluation": ("forward", "reading"),
    "crops": ("forward", "reading"),
    "training": ("training", "reading"),
    "heads": ("heads",),
    "updates": (),
    "start": (),
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates of a machine; None: not measured."""

    forward: float | None = None  # floating-point operations per second of the network in a forward pass
    training: float | None = None  # the same, forward and backward
    heads: float | None = None  # the same, in float32 products of heads, fits and searches
    reading: float | None = None  # seconds in which one process reads, decodes and crops an image
    step: float = 0.0005  # seconds that a step of a head takes besides its products, on a core of a Sapphire Rapids
    update: float = 0.01  # seconds of a step of the optimiser
    start: float = 2.0  # seconds until a training begins
    job: float = 0.2  # seconds of a job besides its counted work: opening features, metrics, writing the result
    loaders: int = 0  # processes per GPU that read while it computes; 0: the cores read and compute by turns
    gpus: int = 1  # in all nodes together, among which the work is divided evenly
    divided: float = 0.90  # fraction of its speed that each GPU keeps if there are several

    @classmethod
    def here(cls, space: Workspace, rates: Mapping[str, Any]) -> "Machine":
        """This machine, with the rates that are known."""
        on_gpu = torch.device(space.device).type == "cuda"
        return cls(**rates, loaders=(space.workers or min(MAX_LOADERS, own_cores())) if on_gpu else 0)

    def terms(self, part: Part) -> dict[str, float] | None:
        """What takes time in a part -> seconds; None if a rate is not known."""
        fixed = {"start": self.start, "updates": self.update}
        if part.kind in fixed or not part.count:
            return {TERMS[part.kind]: part.count * fixed.get(part.kind, 0.0)}
        rate, power = getattr(self, RATES[part.kind][0]), self.gpus * self.divided if self.gpus > 1 else 1.0
        if rate is None and part.flops:
            return None
        computing = part.count * part.flops / rate / power if rate else 0.0
        if part.kind not in IMAGES:
            return {TERMS[part.kind]: computing + part.count * self.step}
        if self.reading is None:
            return None
        reading = part.count * self.reading * (AUGMENTED if part.kind == "training" else 1.0)
        reading /= max(self.loaders, 1) * power
        if not self.loaders:
            return {TERMS[part.kind]: computing, "reading": reading}
        return {"reading": reading} if reading > computing else {TERMS[part.kind]: computing}


# Name of a rate, and the network or the images that it depends on.
Key = tuple[str, Hashable]


def measurements(work: Work, network: FrozenExport, space: Workspace) -> dict[Key, Callable[[float], float]]:
    """The rates that some work needs, and how each is measured in about so many seconds.

    network: at the image size of the evaluation. space: with the image set.
    """
    measures: dict[Key, Callable[[float], float]] = {
        ("forward", network.spec): lambda seconds: network_rate(network, space, seconds, training=False),
        ("heads", None): lambda seconds: head_rate(space.device, seconds),
        ("reading", space.data): lambda seconds: reading_seconds(network, space, seconds),
    }
    if isinstance(network.spec, ViTSpec) and network.spec.depth:
        measures["training", network.spec] = lambda seconds: network_rate(network, space, seconds, training=True)
    needed = {name for part in work.parts for name in RATES[part.kind]}
    return {key: measure for key, measure in measures.items() if key[0] in needed}


def fastest(work: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest of some calls within about `seconds`, the one that other programs disturbed least."""
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < 2 or (len(times) < 40 and time.perf_counter() - started < seconds):
        call_started = time.perf_counter()
        work()
        times.append(time.perf_counter() - call_started)
        if times[0] > seconds:
            break
    return min(times)


def network_rate(export: FrozenExport, space: Workspace, seconds: float, training: bool) -> float:
    """Floating-point operations per second of the network in a forward pass, or forward and backward.

    Two blocks of a ViT are as fast as all.
    """
    spec: Any = export.spec
    if isinstance(spec, ViTSpec):
        spec = replace(spec, depth=min(spec.depth, 2))
        network = ViT(spec).to(space.device).requires_grad_(training)
    else:
        network = export.build().to(space.device).eval()
    flops = (training_flops if training else forward_flops)(spec)

    def run(batch: int) -> Callable[[], object]:
        images = torch.randn(batch, 3, *spec.size, device=space.device)

        def call() -> float:
            with torch.set_grad_enabled(training), autocast(space.device, space.precision):
                total = network(images)[0].sum()
            if training:
                total.backward()
            return total.item()  # waits for a GPU

        return call

    run(1)()  # kernels are chosen and memory is taken by the first call
    alone = fastest(run(1), 0.0)
    batch = min(space.batch_size or forward_batch(space.device), max(1, int(seconds / 3 / alone)))
    call = run(batch)
    if training or torch.device(space.device).type == "cuda":
        return batch * flops / fastest(call, seconds)
    # As features are extracted: every core computes batches of its own. On a busy machine, the threads of one batch
    # would wait for the one that has no core.
    threads = torch.get_num_threads()
    on_cores = partial(run_on_core_threads, lambda _: call(), range(threads))
    return threads * batch * flops / fastest(on_cores, seconds)


def head_rate(device: str, seconds: float) -> float:
    """Floating-point operations per second of a step of a linear head."""
    batch, width, classes = 256, 384, 100
    features, labels = torch.randn(batch, width, device=device), torch.arange(batch, device=device) % classes
    head = torch.nn.Linear(width, classes).to(device)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)

    def step() -> float:
        loss = F.cross_entropy(head(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return 4.0 * batch * width * classes / fastest(step, seconds)


def reading_seconds(export: FrozenExport, space: Workspace, seconds: float) -> float:
    """Seconds in which a process reads a validation image and crops it."""
    from downstream.data.scenes import SceneSet, scene_image

    images: Any = space.opened.known(space.data, "val")
    indices = evenly_spaced(len(images), min(8, len(images))).tolist()
    transform = scene_image if isinstance(images, SceneSet) else transform_of(export, space)

    def read_few() -> None:
        for index in indices:
            with suppress(UnreadableImage):
                transform(images, index)

    threads = torch.get_num_threads() if torch.device(space.device).type == "cpu" else 1
    return fastest(read_few, seconds) / len(indices) / threads


# Machine -> precision -> peak of a GPU, dense (without sparsity), by NVIDIA's data sheets.
DATA_SHEETS: Mapping[str, Mapping[str, float]] = {
    # H100 Tensor Core GPU Datasheet, SXM5: 1,979 TFLOPS bf16 with sparsity, 67 TFLOPS fp32
    "h100": {"bfloat16": 989e12, "float32": 67e12},
    # A100 Tensor Core GPU Datasheet, SXM4 80 GB: 312 TFLOPS bf16, 19.5 TFLOPS fp32
    "a100": {"bfloat16": 312e12, "float32": 19.5e12},
}
# Fractions of the peak that are reached: networks forward, and forward and backward; products in float32.
FORWARD, TRAINING, PRODUCTS = 0.40, 0.35, 0.40
# Images of ImageNet's size that a core reads and crops a second; 300 as stated in probes/features/extract.py, with fast
# decoding by the ratio in docs/speed.md.
DECODED: Mapping[str, float] = {"exact": 300.0, "fast": 540.0}


def assumed_machine(
    name: str, gpus: int, loaders: int | None, precision: str, decode: Literal["exact", "fast"] = "exact"
) -> Machine:
    """The machine of that name with `gpus` GPUs. ValueError for an unknown name."""
    if name not in DATA_SHEETS:
        raise UserError("assume", f"no such machine is known{did_you_mean(name, list(DATA_SHEETS))}", name)
    peak = DATA_SHEETS[name]
    return Machine(
        forward=FORWARD * peak[precision],
        training=TRAINING * peak[precision],
        heads=PRODUCTS * peak["float32"],
        reading=1 / DECODED[decode],
        start=30.0,
        loaders=loaders or MAX_LOADERS,
        gpus=gpus,
    )
