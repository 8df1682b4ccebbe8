"""Run as a program: fine-tune a toy export on digits, and print the outcome.

finetune_program.py FOLDER           once
finetune_program.py FOLDER stop      uninterrupted, and stopped by a signal to one process and continued; prints JSON
finetune_program.py FOLDER STEP ...  start it and kill it soon after it has saved each STEP; prints the last saved step
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import timm.data  # noqa: F401 (before any fork: importing it takes longer than a run)
from toy_exports import export_of_size, workspace

from engine.distributed import start_world
from engine.tasks import Outcome
from engine.training import interruptions
from engine.training.interruptions import Stopped
from probes.finetune import trainer
from probes.tasks.finetune import Finetune

TASK = Finetune(
    lr=1e-3,
    lr_rule="absolute",
    batch=32,
    epochs=4,
    warmup_epochs=1,
    drop_path=0.2,
    average=0.9,
    mixed_together=16,
    select="holdout",
    holdout=0.2,
)
LIMIT = 160  # 4 steps an epoch


def finetune(folder: Path, **settings) -> Outcome:
    with start_world("cpu") as world:
        return TASK.run(export_of_size(16), workspace(folder, "digits:", limit=LIMIT, world=world, **settings))


def as_json(outcome: Outcome) -> dict:
    """An outcome after a round trip through JSON."""
    arrays = {name: metric.per_image for name, metric in outcome.metrics.items()}
    per_image = {name: np.nan_to_num(values, nan=-1).tolist() for name, values in arrays.items()}
    return json.loads(json.dumps({"metrics": outcome.numbers, "facts": outcome.facts, "per_image": per_image}))


def kill_one_run(folder: Path, step: int) -> None:
    """Start a run and kill it soon after it has saved `step`."""
    child = os.fork()
    if not child:
        finetune(folder)
        os._exit(0)
    while newest_saved_step(folder) < step:
        time.sleep(0.01)
    time.sleep(random.uniform(0.0, 0.05))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def newest_saved_step(folder: Path) -> int:
    """The step of the newest saved state; 0 without one."""
    return max((int(path.name.split("-")[1]) for path in folder.rglob("step-*.safetensors")), default=0)


def stop_and_continue(folder: Path) -> dict:
    """SIGUSR1 reaches the last process within its sixth update, before the ranks exchange their stop requests."""
    undisturbed, update = as_json(finetune(folder / "undisturbed")), trainer.Training.update

    def update_after_signal(self, batches):
        if self.step == 5 and self.world.rank == self.world.size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        update(self, batches)

    trainer.Training.update = update_after_signal
    try:
        finetune(folder)
        message = "nothing stopped it"
    except Stopped as stopped:
        message = str(stopped)
    trainer.Training.update = update
    return {"undisturbed": undisturbed, "stopped": message, "continued": as_json(finetune(folder))}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if sys.argv[2:] == ["stop"]:
        with start_world("cpu"):  # one connection for all runs
            sys.stdout.write(json.dumps(stop_and_continue(folder)) + "\n")
    elif len(sys.argv) > 2:
        trainer.SAVE_EVERY, interruptions.SAVE_SHARE = 0.0, 1.0
        for step in map(int, sys.argv[2:]):
            kill_one_run(folder, step)
        sys.stdout.write(f"{newest_saved_step(folder)}\n")
    else:
        sys.stdout.write(json.dumps(as_json(finetune(folder))) + "\n")
