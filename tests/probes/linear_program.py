"""Run as a program: linear probes on the digits, saved after every step, slowly enough to be killed on the way.

linear_program.py FOLDER PROTOCOLS        once, all together; prints metrics and facts by protocol as JSON
linear_program.py FOLDER PROTOCOLS KILLS  start it KILLS times and kill each run at a random moment after it has saved
linear_program.py FOLDER PROTOCOLS stop   signal rank 0 at its third step; prints the message of the stop

PROTOCOLS: one, or several separated by commas.
"""

import json
import os
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from toy_exports import export_of_size, workspace

from engine.distributed import start_world
from engine.tasks import Outcome
from engine.training import interruptions
from engine.training.interruptions import Stopped
from probes.linear import sweep
from probes.linear.heads import Heads
from probes.linear.probe import train_together
from probes.linear.sweep import Sweep
from probes.tasks.linear import PROTOCOLS, Linear

EPOCHS = 16


def tasks_of(protocols: str) -> dict[str, Linear]:
    """Short trainings at the small rates of each sweep: large ones would amplify rounding."""
    tasks = {name: PROTOCOLS[name].task for name in protocols.split(",")}
    return {
        name: replace(
            task, epochs=EPOCHS - task.epochs // 10, batch=88 + task.batch // 128, warmup_epochs=2, lrs=task.lrs[:30:4]
        )
        for name, task in tasks.items()
    }


def run_probes(folder: Path, protocols: str) -> dict[str, Outcome]:
    torch.set_num_threads(1)  # rounding depends on the number of threads
    tasks = tasks_of(protocols)
    with start_world("cpu") as world:
        space = workspace(folder, "digits:", limit=200, world=world)
        outcomes = dict(train_together(list(tasks.values()), export_of_size(16), space))
    assert not any(isinstance(outcome, Exception) for outcome in outcomes.values()), outcomes
    return {name: outcomes[index] for index, name in enumerate(tasks)}


def numbers_json(outcomes: dict[str, Outcome]) -> str:
    records = {name: {"metrics": outcome.numbers, "facts": outcome.facts} for name, outcome in outcomes.items()}
    return json.dumps(records)


def newest_saved_step(folder: Path) -> int:
    """The step of the newest state; 0 without one."""
    names = [path.name for path in (folder / "cache" / "linear").rglob("step-*.safetensors")]
    return max((int(name.split("-")[1]) for name in names), default=0)


def kill_one_run(folder: Path, protocols: str) -> None:
    before = newest_saved_step(folder)
    child = os.fork()
    if not child:
        evaluate = Sweep.evaluate

        def evaluate_slowly(self):
            time.sleep(0.02)
            return evaluate(self)

        Sweep.evaluate = evaluate_slowly
        run_probes(folder, protocols)
        os._exit(0)
    while newest_saved_step(folder) <= before:
        time.sleep(0.002)
    time.sleep(random.uniform(0, 0.08))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def stop_one_run(folder: Path, protocols: str) -> str:
    """The message of a run whose rank 0 is sent SIGUSR1 at its third step."""
    step, steps = Heads.step, []

    def step_then_signal(self, *batch):
        steps.append(step(self, *batch))
        if len(steps) == 3 and os.environ.get("RANK", "0") == "0":
            os.kill(os.getpid(), signal.SIGUSR1)
        return steps[-1]

    Heads.step = step_then_signal
    try:
        run_probes(folder, protocols)
    except Stopped as stopped:
        return str(stopped)
    finally:
        Heads.step = step
    return "nothing stopped it"


if __name__ == "__main__":
    sweep.SAVE_EVERY, interruptions.SAVE_SHARE = 0.0, 1.0
    folder, protocols = Path(sys.argv[1]), sys.argv[2]
    if sys.argv[3:] == ["stop"]:
        output = stop_one_run(folder, protocols)
    elif len(sys.argv) > 3:
        for _ in range(int(sys.argv[3])):
            kill_one_run(folder, protocols)
        output = ""
    else:
        output = numbers_json(run_probes(folder, protocols))
    sys.stdout.write(f"{output}\n")
