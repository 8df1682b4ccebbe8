"""Machines that are assumed, not measured: for plans before there is the machine. `bench plan` on it replaces them.

A peak is a data sheet's; the share of it that programs reach, and all else, are assumptions, each on its line.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine.printing import meant
from engine.work import IMAGES, Kind, Part


@dataclass(frozen=True, kw_only=True)
class Machine:
    """GPUs of one kind, whose work is divided evenly."""

    name: str
    peak: Mapping[str, float]  # precision -> floating-point operations a second of one GPU
    memory: float  # bytes of one GPU
    precision: str = "bfloat16"  # of the networks; heads, searches and fits are in float32
    gpus: int = 1  # in all nodes together
    loaders: int = 8  # processes that read images, for each GPU: what this tool starts; --workers asks for more
    # Shares of the peak that are reached: networks forward, and forward and back; products in float32.
    forward: float = 0.40
    training: float = 0.35
    product: float = 0.40
    divided: float = 0.90  # share of the speed that is left of each GPU of several
    # Images that a core reads a second: of ImageNet 300 are decoded and cropped (probes/features/extraction.py), 100
    # augmented by RandAugment (probes/finetune/training_groups.py).
    reads: float = 300.0
    augments: float = 100.0
    start: float = 30.0  # seconds until a training begins
    update: float = 0.01  # seconds of a step of the optimiser
    closing: float = 0.04  # seconds of one resample of a dense task: COCO's 4000 take 160 s (engine/resampling.py)
    libraries: float = 10.0  # seconds until they are imported
    states: float = 5.0  # seconds until one is saved

    def __post_init__(self) -> None:
        assert self.precision in self.peak and "float32" in self.peak

    def seconds(self, part: Part, protocol: str) -> float:
        """Of a part, by whichever limits it: reading, where there are images, or computing."""
        fixed = {name: getattr(self, name) for name in ("start", "closing", "libraries", "states")}
        if part.kind in fixed:
            return part.count * fixed[part.kind]
        if part.kind == "updates":
            return part.count * self.update
        computing = part.count * part.flops / self.rate(part.kind)
        if part.kind not in IMAGES:
            return computing / self.power
        speed = self.augments if part.kind == "training" else self.reads
        return max(computing, part.count / (self.loaders * speed)) / self.power

    def rate(self, kind: Kind) -> float:
        """Operations that one GPU does in a second of this kind of work."""
        if kind in IMAGES:
            return self.peak[self.precision] * (self.training if kind == "training" else self.forward)
        return self.peak["float32"] * self.product

    @property
    def power(self) -> float:
        """How many times one GPU's speed."""
        return self.gpus * self.divided if self.gpus > 1 else 1.0

    def lines(self) -> list[str]:
        """What is assumed, for people."""
        peaks = ", ".join(f"{precision} {peak / 1e12:g} TFLOP/s" for precision, peak in self.peak.items())
        return [
            f"assumed, not measured: {self.gpus} x {self.name}, peaks {peaks} (data sheet)",
            f"assumed: {self.forward:.0%} of the peak in {self.precision} forward, {self.training:.0%} in training, "
            f"{self.product:.0%} in float32 products; {self.divided:.0%} of each GPU of several",
            f"assumed: {self.loaders} loaders a GPU, each of which decodes {self.reads:g} images a second or augments "
            f"{self.augments:g}; `bench plan` on the machine itself measures all of this",
        ]


# NVIDIA's data sheets, dense (without sparsity).
MACHINES = {
    "h100": Machine(  # H100 Tensor Core GPU Datasheet, SXM5: 1,979 TFLOPS bf16 with sparsity, 67 TFLOPS fp32, 80 GB
        name="NVIDIA H100 SXM", peak={"bfloat16": 989e12, "float32": 67e12}, memory=80e9
    ),
    "a100": Machine(  # A100 Tensor Core GPU Datasheet, SXM4: 312 TFLOPS bf16, 19.5 TFLOPS fp32, 80 GB
        name="NVIDIA A100 80GB SXM", peak={"bfloat16": 312e12, "float32": 19.5e12}, memory=80e9
    ),
}


def machine(name: str, gpus: int, loaders: int | None, precision: str) -> Machine:
    """`gpus` of the machine of that name. ValueError for an unknown one."""
    if name not in MACHINES:
        raise ValueError(f"--assume {name}: no such machine is known{meant(name, list(MACHINES))}")
    found = MACHINES[name]
    return replace(found, gpus=gpus, loaders=loaders or found.loaders, precision=precision)
