"""Run as a program: fine-tune a toy export on digits, and print the outcome.

finetune_program.py FOLDER           once
finetune_program.py FOLDER stop      undisturbed, and stopped by a signal to one process and continued; JSON
finetune_program.py FOLDER STEP ...  start it and kill it at some moment after each STEP; prints the steps then saved
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


def outcome(folder: Path, **settings) -> Outcome:
    with start_world("cpu") as world:
        return TASK.run(export_of_size(16), workspace(folder, "digits:", limit=LIMIT, world=world, **settings))


def described(found: Outcome) -> dict:
    """All of an outcome as JSON gives it back."""
    right = {name: metric.per_image for name, metric in found.metrics.items()}
    per_image = {name: np.nan_to_num(values, nan=-1).tolist() for name, values in right.items()}
    return json.loads(json.dumps({"metrics": found.numbers, "facts": found.facts, "per_image": per_image}))


def killed_once(folder: Path, step: int) -> None:
    """Start a run and kill it at some moment after it has saved `step`."""
    child = os.fork()
    if not child:
        outcome(folder)
        os._exit(0)
    while steps_done(folder) < step:
        time.sleep(0.01)
    time.sleep(random.uniform(0.0, 0.05))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def steps_done(folder: Path) -> int:
    """Of the saved state; 0 without any."""
    return max((int(path.name.split("-")[1]) for path in folder.rglob("step-*.safetensors")), default=0)


def stopped_and_continued(folder: Path) -> dict:
    """The last process is sent SIGUSR1 within its sixth update, before it tells the others what it was asked."""
    undisturbed, update = described(outcome(folder / "undisturbed")), trainer.Training.update

    def signalled(self, batches):
        if self.step == 5 and self.world.rank == self.world.size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        update(self, batches)

    trainer.Training.update = signalled
    try:
        outcome(folder)
        said = "nothing stopped it"
    except Stopped as stopped:
        said = str(stopped)
    trainer.Training.update = update
    return {"undisturbed": undisturbed, "stopped": said, "continued": described(outcome(folder))}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if sys.argv[2:] == ["stop"]:
        with start_world("cpu"):  # one connection for all runs
            line = json.dumps(stopped_and_continued(folder)) + "\n"
        os.write(1, line.encode())  # whole, beside the other process's
    elif len(sys.argv) > 2:
        trainer.SAVE_EVERY, interruptions.SAVE_SHARE = 0.0, 1.0
        for step in map(int, sys.argv[2:]):
            killed_once(folder, step)
        sys.stdout.write(f"{steps_done(folder)}\n")
    else:
        sys.stdout.write(json.dumps(described(outcome(folder))) + "\n")
