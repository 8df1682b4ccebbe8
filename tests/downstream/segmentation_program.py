"""Run as a program, by torchrun: a linear layer on a frozen toy export; every process prints what it came to.

segmentation_program.py FOLDER URL     undisturbed; stopped by a signal to one process and continued; and the error on
                                       the scenes of URL, of which one cannot be used
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


def metrics(folder: Path, url: str = "tiny-ade20k:", world: World | None = None) -> dict[str, float]:
    return TASK.run(export_of(), workspace(folder, url, world=world or World())).numbers


def refused(folder: Path, url: str, world: World) -> dict[str, object]:
    """The error, and the process that it comes from."""
    try:
        return {"numbers": metrics(folder, url, world)}
    except ValueError as error:
        return {"said": str(error), "reported_by": error.reported_by}


def all_runs(folder: Path, url: str) -> dict[str, object]:
    """The last process is sent SIGUSR1 within its third step."""
    from downstream.loop.running import IterationHook

    original = IterationHook.before_train_iter

    def signalled(self, runner, batch_idx, data_batch=None):
        original(self, runner, batch_idx, data_batch)
        if batch_idx == 2 and runner.rank == runner.world_size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    with start_world("cpu") as world:  # one connection for all runs
        undisturbed, stopped = metrics(folder / "undisturbed", world=world), "nothing stopped it"
        IterationHook.before_train_iter = signalled
        try:
            metrics(folder, world=world)
        except Stopped as error:
            stopped = str(error)
        IterationHook.before_train_iter = original
        continued = metrics(folder, world=world)
        error = refused(folder / "error", url, world)
    return {"undisturbed": undisturbed, "stopped": stopped, "continued": continued, "error": error}


if __name__ == "__main__":
    line = json.dumps(all_runs(Path(sys.argv[1]), sys.argv[2])) + "\n"
    os.write(1, line.encode())  # whole, beside the other process's
