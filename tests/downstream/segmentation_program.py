"""Run as a program, by torchrun: a linear layer on a frozen toy export; every process prints what it came to.

segmentation_program.py FOLDER [URL]
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from toy_scenes import export_of, workspace

from downstream.tasks.upernet_ade20k import PROTOCOLS
from engine.distributed import World, start_world

TASK = replace(
    PROTOCOLS["ade_linear@smoke"].task, steps=6, warmup=2, batch=4, crop=32, stride=32, judge_every=3, lr=2e-2
)


def metrics(folder: Path, url: str = "tiny-ade20k:", world: World | None = None) -> dict[str, float]:
    return TASK.run(export_of(), workspace(folder, url, world=world or World())).numbers


def said(folder: Path, *url: str) -> dict[str, object]:
    """Metrics, or the error and the process that it comes from."""
    try:
        with start_world("cpu") as world:
            return metrics(folder, *url, world=world)
    except ValueError as error:
        return {"error": str(error), "told_by": error.told_by}


if __name__ == "__main__":
    line = json.dumps(said(Path(sys.argv[1]), *sys.argv[2:])) + "\n"
    os.write(1, line.encode())  # whole, beside the other process's
