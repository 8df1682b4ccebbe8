"""Say what a run takes on this machine before it runs: time, images, work, disk and memory of each job."""

import argparse
import json
from functools import partial

EPILOG = """examples:
  bench plan --checkpoint a.pth --suite full --data cifar10=folder:/data/cifar10 --out results
  bench plan --checkpoint a.pth --suite full --data imagenet ade20k cityscapes coco --assume h100 --gpus 8 --out results
  bench plan --checkpoint a.pth --suite frozen --data in1k=imagenet:/data --out results --json > jobs.json

Counts are printed at once, times as they are measured, within half a minute in all. What was measured is kept in
OUT/cache/calibration for the same architecture, settings, device, precision and images.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench run`, and those of the plan."""
    from bench.commands import run as evaluation

    evaluation.add_request(parser)
    parser.set_defaults(dry_run=False)
    group = parser.add_argument_group("of the plan")
    group.add_argument("--json", action="store_true", help="print a JSON list for schedulers, an entry for each job")
    group.add_argument(
        "--script", action="store_true", help="print a shell script, a command for each job, cheapest first"
    )
    group.add_argument(
        "--assume",
        metavar="MACHINE",
        help="h100 or a100, times --gpus and --nodes, in place of this machine: nothing is measured, and --data may be "
        "imagenet, ade20k, cityscapes or coco alone",
    )
    group.add_argument("--fresh", action="store_true", help="measure again what was kept")


def run(arguments: argparse.Namespace) -> int:
    """0, or 1 where a job would fail."""
    from bench.cli.settings import check_names

    # Sets of an assumed machine are named alone, as `imagenet`.
    check_names(arguments.checkpoint, arguments.suite, [text for text in arguments.data if "=" in text])
    from bench.cli.settings import chosen_device
    from bench.cluster.submit import words_of_run
    from bench.commands.run import evaluation_request
    from bench.run.calibration import free_memory, machine
    from bench.run.forecast import entries, plan, script_lines, totals
    from engine.printing import say

    if arguments.json and arguments.script:
        raise ValueError("--json and --script: give one of them, not both")
    device = "cpu" if arguments.assume else chosen_device(arguments.device)
    gpus = arguments.cluster_gpus or (1 if arguments.assume or device.startswith("cuda") else 0)
    gpus *= arguments.cluster_nodes or 1
    assumed = None
    if arguments.assume:
        precision = "bfloat16" if arguments.precision in ("auto", "float32") else arguments.precision
        assumed = machine(arguments.assume, gpus, arguments.workers, precision, arguments.decode)
    request = evaluation_request(arguments, device)
    silent = arguments.json or arguments.script  # their output comes at the end
    planned = plan(request, assumed, arguments.fresh, (lambda *lines: None) if silent else say)

    jobs = entries(planned, partial(words_of_run, arguments), gpus)
    if arguments.json:
        say(*json.dumps(jobs, indent=1).split("\n"))
    elif arguments.script:
        say(*script_lines(jobs))
    else:
        say(*totals(planned, assumed.memory if assumed else free_memory(device), gpus, arguments.decode))
        say(*(assumed.lines() if assumed else ()))
    return 1 if any(job["problem"] for job in jobs) else 0
