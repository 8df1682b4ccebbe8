"""Run as a program, by torchrun: a linear layer on a frozen toy export; the first process prints the metrics.

segmentation_program.py FOLDER
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from toy_scenes import export_of, workspace

from downstream.tasks.upernet_ade20k import PROTOCOLS
from engine.distributed import start_world

TASK = replace(
    PROTOCOLS["ade_linear@smoke"].task, steps=6, warmup=2, batch=4, crop=32, stride=32, judge_every=3, lr=2e-2
)


def metrics(folder: Path) -> dict[str, float]:
    return dict(TASK.run(export_of(), workspace(folder, "tiny-ade20k:")).metrics)


if __name__ == "__main__":
    with start_world("cpu") as world:
        found = metrics(Path(sys.argv[1]))
        if world.is_first:
            sys.stdout.write(json.dumps(found) + "\n")
