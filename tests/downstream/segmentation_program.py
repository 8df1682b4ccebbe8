"""Train a linear layer on a frozen toy export under torchrun; every process prints its results.

segmentation_program.py FOLDER URL

Three runs: uninterrupted; stopped by a signal to one process, then resumed; and on the scenes of URL, one of which is
broken.
"""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from toy_scenes import export_of, workspace

from downstream.tasks.upernet_ade20k import PROTOCOLS
from engine.distributed import World, start_world
from engine.training.interruptions import Stopped

TASK = replace(
    PROTOCOLS["ade_linear@smoke"].task, steps=6, warmup=2, batch=4, crop=32, stride=32, judge_every=3, lr=2e-2
)


def train(folder: Path, url: str = "tiny-ade20k:", world: World | None = None) -> dict[str, float]:
    return TASK.run(export_of(), workspace(folder, url, world=world or World())).numbers


def train_on_broken_scenes(folder: Path, url: str, world: World) -> dict[str, object]:
    """The error message and the rank that reported it."""
    try:
        return {"metrics": train(folder, url, world)}
    except ValueError as error:
        return {"message": str(error), "reported_by": error.reported_by}


def all_runs(folder: Path, url: str) -> dict[str, object]:
    """Results of all runs. The stopped one: the last process receives SIGUSR1 within its third step."""
    from downstream.loop.running import IterationHook

    original = IterationHook.before_train_iter

    def send_signal(self, runner, batch_idx, data_batch=None):
        original(self, runner, batch_idx, data_batch)
        if batch_idx == 2 and runner.rank == runner.world_size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    with start_world("cpu") as world:  # one connection for all runs
        uninterrupted, stopped = train(folder / "uninterrupted", world=world), "not stopped"
        IterationHook.before_train_iter = send_signal
        try:
            train(folder, world=world)
        except Stopped as error:
            stopped = str(error)
        IterationHook.before_train_iter = original
        resumed = train(folder, world=world)
        error = train_on_broken_scenes(folder / "error", url, world)
    return {"uninterrupted": uninterrupted, "stopped": stopped, "resumed": resumed, "error": error}


if __name__ == "__main__":
    line = json.dumps(all_runs(Path(sys.argv[1]), sys.argv[2])) + "\n"
    os.write(1, line.encode())  # one write, so that lines of several processes do not mix
