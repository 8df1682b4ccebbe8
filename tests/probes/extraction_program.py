"""Run as a program: extract the digits' training features into a folder, slowly enough to be killed on the way.

extraction_program.py FOLDER         once; prints the number of forward passes
extraction_program.py FOLDER KILLS   start it KILLS times and kill each run at a random moment after its first batch
"""

import os
import random
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from toy_exports import export_of_size, workspace

from engine.distributed import start_world
from imagesets.sets import open_set
from imagesets.transforms import EvalTransform
from probes.features import store
from probes.features.extract import extract
from probes.features.kinds import FeatureKind

KINDS = (FeatureKind("cls"), FeatureKind("avg", layer=-2))
IMAGES = 600


@dataclass(frozen=True, kw_only=True)
class SlowTransform(EvalTransform):
    def __call__(self, image_set, index):
        time.sleep(0.002)
        return super().__call__(image_set, index)


def extraction_arguments(folder: Path) -> tuple:
    """The arguments of `extract`."""
    images = open_set("digits:", "train").limited(IMAGES)
    return export_of_size(16), images, KINDS, workspace(folder, "digits:"), SlowTransform(size=16)


def journal_size(folder: Path) -> int:
    """Size of all journals in bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*.journal"))


def kill_one_run(arguments: tuple, folder: Path) -> None:
    size_before, child = journal_size(folder), os.fork()
    if not child:
        extract(*arguments)
        os._exit(0)
    while journal_size(folder) == size_before:
        time.sleep(0.001)
    time.sleep(random.uniform(0.0, 0.1))  # a whole run takes more than half a second
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


if __name__ == "__main__":
    store.COMMIT_EVERY = 0.01
    arguments = extraction_arguments(Path(sys.argv[1]))
    if len(sys.argv) > 2:
        for _ in range(int(sys.argv[2])):
            kill_one_run(arguments, Path(sys.argv[1]))
    else:
        with start_world("cpu") as world:
            export, images, kinds, space, transform = arguments
            sys.stdout.write(f"{extract(export, images, kinds, replace(space, world=world), transform).forwards}\n")
