"""Run as a program: fine-tune a toy export on digits, slowly enough to be killed on the way, and print the outcome.

finetune_program.py FOLDER         once
finetune_program.py FOLDER KILLS   start it KILLS times and kill each run at a random moment; prints the steps done
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from safetensors import safe_open
from toy_exports import export_of_size, workspace

from engine.tasks import Outcome
from probes import tuning
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
    return TASK.run(export_of_size(16), workspace(folder, "digits:", limit=LIMIT, **settings))


def killed_once(folder: Path, seconds: float) -> None:
    child = os.fork()
    if not child:
        outcome(folder)
        os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def steps_done(folder: Path) -> int:
    """Of the saved state; 0 without any."""
    for path in folder.rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            return json.loads(file.metadata()["facts"])["step"]
    return 0


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if len(sys.argv) > 2:
        tuning.SAVE_EVERY, tuning.SAVE_SHARE = 0.0, 1.0
        update = tuning.Training.update

        def slow(training, batches):
            time.sleep(0.05)
            update(training, batches)

        tuning.Training.update = slow
        done = []
        for _ in range(int(sys.argv[2])):
            killed_once(folder, random.uniform(0.3, 0.6))
            done.append(steps_done(folder))
        print(json.dumps(done))
    else:
        found = outcome(folder)
        print(json.dumps({"metrics": dict(found.metrics), "facts": dict(found.facts)}))
