"""Forecast what a run takes on this machine: time, images, FLOPs, disk and memory of each job."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from bench.options import EvaluationOptions, chosen_device
from bench.run.index import check_names
from engine.printing import say

EPILOG = """examples:
  bench plan --checkpoint a.pth --suite full --data cifar10=folder:/data/cifar10 --out results
  bench plan --checkpoint a.pth --suite full --data imagenet ade20k cityscapes coco --assume h100 --gpus 8 --out results

Counts are printed at once, times after a few rates of this machine are measured, which takes about 15 seconds: the
network forward and in training, heads, and reading images.
"""


@dataclass(frozen=True, kw_only=True)
class Options(EvaluationOptions):
    """Options of `bench plan`."""

    GROUP: ClassVar[str] = "of the plan"
    # MACHINE: h100 or a100, times --gpus and --nodes, instead of this machine: nothing is measured, and --data may be
    # just a name: imagenet, ade20k, cityscapes or coco
    assume: str | None = None


def run(options: Options) -> int:
    """0, or 1 if a job would fail."""
    # For an assumed machine, --data may be a name without a URL, such as `imagenet`.
    check_names(options.checkpoint, options.suite, [text for text in options.data if "=" in text])
    from bench.run.calibration import assumed_machine
    from bench.run.forecast import plan

    if options.assume:
        precision: Literal["float32", "bfloat16"] = "float32" if options.precision == "float32" else "bfloat16"
        gpus = (options.gpus or 1) * options.nodes
        assumed = assumed_machine(options.assume, gpus, options.workers, precision, options.decode)
        forecasts = plan(replace(options, device="cpu", precision=precision), assumed)
        say(f"assumed, not measured: {gpus} x {options.assume} in {precision}; docs/scale.md has the rates")
    else:
        forecasts = plan(replace(options, device=chosen_device(options.device)))
    return 1 if any(forecast.job.problem for forecast in forecasts) else 0
