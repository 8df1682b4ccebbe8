"""Run as a program: linear probes on the digits, saved after every step, slowly enough to be killed on the way.

linear_program.py FOLDER PROTOCOLS        once, all together; prints name -> metrics and facts as JSON
linear_program.py FOLDER PROTOCOLS KILLS  start it KILLS times and kill each at a random moment after it saved
linear_program.py FOLDER PROTOCOLS stop   signal the first process at its third step; prints what it says

PROTOCOLS: one, or several with a comma between them.
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
from probes.linear.sweep import Sweep
from probes.tasks.linear import PROTOCOLS, Linear

EPOCHS = 20


def tasks_of(protocols: str) -> dict[str, Linear]:
    """Short trainings, of a sweep's small rates alone: large ones would enlarge roundings."""
    tasks = {name: PROTOCOLS[name].task for name in protocols.split(",")}
    return {
        name: replace(
            task, epochs=EPOCHS - task.epochs // 10, batch=88 + task.batch // 128, warmup_epochs=2, lrs=task.lrs[:30:4]
        )
        for name, task in tasks.items()
    }


def evaluated(folder: Path, protocols: str) -> dict[str, Outcome]:
    torch.set_num_threads(1)  # steps on more threads round otherwise
    tasks = tasks_of(protocols)
    with start_world("cpu") as world:
        space = workspace(folder, "digits:", limit=200, world=world)
        found = dict(Linear.together(list(tasks.values()), export_of_size(16), space))
    assert not any(isinstance(each, Exception) for each in found.values()), found
    return {name: found[place] for place, name in enumerate(tasks)}


def numbers(outcomes: dict[str, Outcome]) -> str:
    return json.dumps({name: {"metrics": each.numbers, "facts": each.facts} for name, each in outcomes.items()})


def saved_at(folder: Path) -> int:
    """How far the newest state is; 0 for none, and for those before the first step."""
    names = [path.name for path in (folder / "cache" / "linear").rglob("step-*.safetensors")]
    return max((int(name.split("-")[1]) for name in names), default=0)


def killed_once(folder: Path, protocols: str) -> None:
    before = saved_at(folder)
    child = os.fork()
    if not child:
        evaluate = Sweep.evaluate

        def slowly(self):
            time.sleep(0.02)
            return evaluate(self)

        Sweep.evaluate = slowly
        evaluated(folder, protocols)
        os._exit(0)
    while saved_at(folder) <= before:
        time.sleep(0.002)
    time.sleep(random.uniform(0, 0.08))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def stopped_once(folder: Path, protocols: str) -> str:
    """What a run says of which the first process is sent SIGUSR1 at its third step."""
    step, steps = Heads.step, []

    def signalled(self, *batch):
        steps.append(step(self, *batch))
        if len(steps) == 3 and os.environ.get("RANK", "0") == "0":
            os.kill(os.getpid(), signal.SIGUSR1)
        return steps[-1]

    Heads.step = signalled
    try:
        evaluated(folder, protocols)
    except Stopped as stopped:
        return str(stopped)
    finally:
        Heads.step = step
    return "nothing stopped it"


if __name__ == "__main__":
    sweep.SAVE_EVERY, interruptions.SAVE_SHARE = 0.0, 1.0
    place, named = Path(sys.argv[1]), sys.argv[2]
    if sys.argv[3:] == ["stop"]:
        said = stopped_once(place, named)
    elif len(sys.argv) > 3:
        for _ in range(int(sys.argv[3])):
            killed_once(place, named)
        said = ""
    else:
        said = numbers(evaluated(place, named))
    os.write(1, f"{said}\n".encode())  # whole, beside the other process's
