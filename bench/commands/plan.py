"""Forecast what a run takes on this machine: time, images, FLOPs, disk and memory of each job."""

import json
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

from bench.names import check_names, chosen_device
from bench.options import EvaluationOptions, options_from
from engine.printing import say

EPILOG = """examples:
  bench plan --checkpoint a.pth --suite full --data cifar10=folder:/data/cifar10 --out results
  bench plan --checkpoint a.pth --suite full --data imagenet ade20k cityscapes coco --assume h100 --gpus 8 --out results
  bench plan --checkpoint a.pth --suite frozen --data in1k=imagenet:/data --out results --json > jobs.json

Counts are printed at once, times after a few rates of this machine are measured, which takes about 15 seconds: the
network forward and in training, heads, and reading images. A job that another checkpoint of the same architecture has
run in OUT takes as long as that one.
"""


@dataclass(frozen=True, kw_only=True)
class Options(EvaluationOptions):
    """Options of `bench plan`."""

    GROUP: ClassVar[str] = "of the plan"
    json: bool = False  # print a JSON list for schedulers, one entry per job, cheapest first
    # MACHINE: h100 or a100, times --gpus and --nodes, instead of this machine: nothing is measured, and --data may be
    # just a name: imagenet, ade20k, cityscapes or coco
    assume: str | None = None


def run(options: Options) -> int:
    """0, or 1 if a job would fail."""
    # For an assumed machine, --data may be a name without a URL, such as `imagenet`.
    check_names(options.checkpoint, options.suite, [text for text in options.data if "=" in text])
    from bench.cluster import words_of_run
    from bench.run.calibration import machine
    from bench.run.forecast import entries, plan, totals

    device = "cpu" if options.assume else chosen_device(options.device)
    assumed = None
    if options.assume:
        precision: Literal["float32", "bfloat16"] = "float32" if options.precision == "float32" else "bfloat16"
        gpus = (options.gpus or 1) * options.nodes
        assumed = machine(options.assume, gpus, options.workers, precision, options.decode)
        options = replace(options, precision=precision)  # also that of the printed commands
    forecasts = plan(replace(options, device=device), assumed, (lambda *lines: None) if options.json else say)

    jobs = entries(forecasts, partial(words_of_run, options_from(options, EvaluationOptions)))
    if options.json:
        say(*json.dumps(jobs, indent=1).split("\n"))
    else:
        say(*totals(forecasts))
        say(*(assumed.assumptions if assumed else ()))
    return 1 if any(job["problem"] for job in jobs) else 0
