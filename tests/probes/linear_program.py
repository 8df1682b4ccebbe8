"""Run as a program: a linear probe on the digits, saved after every epoch, slowly enough to be killed on the way.

linear_program.py FOLDER PROTOCOL         once; prints the metrics and the chosen head as JSON
linear_program.py FOLDER PROTOCOL KILLS   start it KILLS times and kill each at a random moment after it saved
linear_program.py FOLDER PROTOCOL stop    signal this process at the third step, print what it says, and go on
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
from probes.linear import company, sweep
from probes.linear.heads import Heads
from probes.tasks.linear import PROTOCOLS

EPOCHS = 24


def evaluated(folder: Path, protocol: str) -> Outcome:
    torch.set_num_threads(1)  # steps on more threads round otherwise
    task = replace(PROTOCOLS[protocol].task, epochs=EPOCHS, batch=128, warmup_epochs=2)
    with start_world("cpu") as world:
        return task.run(export_of_size(16), workspace(folder, "digits:", limit=200, world=world))


def numbers(outcome: Outcome) -> str:
    return json.dumps({"metrics": outcome.numbers, "facts": outcome.facts})


def saved_at(folder: Path) -> list[int]:
    return [path.stat().st_mtime_ns for path in (folder / "cache" / "linear").rglob("*.safetensors")]


def killed_once(folder: Path, protocol: str) -> None:
    before = saved_at(folder)
    child = os.fork()
    if not child:
        counted = sweep.Sweep.counted

        def slowly(self):
            time.sleep(0.02)
            return counted(self)

        sweep.Sweep.counted = slowly
        evaluated(folder, protocol)
        os._exit(0)
    while saved_at(folder) == before:
        time.sleep(0.002)
    time.sleep(random.uniform(0, 0.08))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def stopped_once(folder: Path, protocol: str) -> str:
    """What a run says whose processes are all sent SIGUSR1 when the first of them has made three steps."""
    step, steps = Heads.step, []

    def signalled(self, *batch):
        steps.append(step(self, *batch))
        if len(steps) == 3:
            for process in (os.getpid(), *waiting(folder)):
                os.kill(process, signal.SIGUSR1)
        return steps[-1]

    Heads.step = signalled
    (folder / f"{os.getpid()}.pid").touch()
    try:
        evaluated(folder, protocol)
    except Stopped as stopped:
        Heads.step = step
        return str(stopped)
    return "nothing stopped it"


def waiting(folder: Path) -> list[int]:
    """The other processes of this run."""
    return [int(path.stem) for path in folder.glob("*.pid") if int(path.stem) != os.getpid()]


if __name__ == "__main__":
    company.SAVE_EVERY, interruptions.SAVE_SHARE = 0.0, 1.0
    place, name = Path(sys.argv[1]), sys.argv[2]
    if sys.argv[3:] == ["stop"]:
        with start_world("cpu"):  # one connection for both runs
            lines = [stopped_once(place, name), numbers(evaluated(place, name))]
        os.write(1, "".join(f"{line}\n" for line in lines).encode())  # whole, beside the other process's
    elif len(sys.argv) > 3:
        for _ in range(int(sys.argv[3])):
            killed_once(place, name)
    else:
        sys.stdout.write(numbers(evaluated(place, name)) + "\n")
