"""Random SIGKILLs, and the same command again: `python tests/kills.py` (100 kills, half an hour on two idle cores).

Each kill is a trial: a command starts in a new folder, one of its processes is killed at a random moment, the same
command runs to its end, and what it leaves is compared, bit for bit, with an undisturbed run. Of two processes under
torchrun one is killed: the other has to end within a minute, with one line that names the dead one.

    run          k-NN, low-shot, cached linear heads and fine-tuning on digits
    pretraining  mae, recipe smoke, on digits
    dense        segmentation of tiny scenes
"""

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from small_exports import make_export
from whole_results import numbers_of, tensors_of

ROOT = Path(__file__).parents[1]
LIMIT = 600  # seconds for any command
# "died" where torchrun has asked the kernel first: then only its own report has the signal.
NAMED = re.compile(r"^bench: error: process \d of \d \(pid \d+, host \S+\) (was killed by signal 9|died)", re.MULTILINE)
OVER = re.compile(r"^(\d+ done, |finished after )", re.MULTILINE)  # nothing is left to do but to exit
PLAIN = (sys.executable, "-m", "bench")
TWO = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "bench")
RUN = ("--suite", "knn@dino,lowshot@bench,linear_sgd@ibot_base_cached,finetune@smoke", "--limit", "200")
SHORT = ("--set", "linear_sgd@ibot_base_cached.epochs=10", "finetune.epochs=20")
PRETRAINING = ("--recipe", "smoke", "--images", "digits:", "--set", "epochs=4", "--save-minutes", "0.01", "--resume")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A command and what it leaves."""

    name: str
    words: tuple[str, ...]
    left: Callable[[Path], dict]
    processes: int

    def command(self, out: Path) -> list[str]:
        return [*(TWO if self.processes == 2 else PLAIN), *self.words, "--out", str(out)]


@dataclass(kw_only=True)
class Tally:
    """How the trials of one case ended."""

    equal: int = 0
    kills: int = 0
    named: int = 0  # kills of one of two processes that one line told
    untold: int = 0  # of the others, those of processes at work: they had printed something, and not their last line
    slowest: float = 0.0  # seconds until the other one had ended
    different: list[int] = field(default_factory=list)  # trials


def cases(export: Path, names: Sequence[str], processes: Sequence[int]) -> list[Case]:
    checkpoint = ("run", "--checkpoint", str(export))
    words = {
        "run": (*checkpoint, *RUN, *SHORT, "--data", "digits=digits:"),
        "pretraining": ("pretrain", "mae", *PRETRAINING, "--workers", "0"),
        "dense": (
            *checkpoint,
            "--suite",
            "segmenter_linear@smoke",
            "--data",
            "tiny=tiny-cityscapes:",
            "--workers",
            "0",
        ),
    }
    left = {"run": numbers_of, "pretraining": tensors_of, "dense": numbers_of}
    return [Case(name=name, words=words[name], left=left[name], processes=n) for name in names for n in processes]


def started(case: Case, out: Path, printed: Path) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(printed, "a") as file:
        return subprocess.Popen(case.command(out), env=environment, stdout=file, stderr=subprocess.STDOUT)


def finished(case: Case, out: Path, printed: Path) -> float:
    """Run a command to its end; the seconds that it took."""
    begun = time.monotonic()
    process = started(case, out, printed)
    code = process.wait(LIMIT)
    assert code == 0, f"{case.name} ended with {code}, see {printed}"
    return time.monotonic() - begun


def workers_of(process: subprocess.Popen) -> list[int]:
    """Processes of torchrun's that run the command, by rank; a plain command is one itself."""
    if "torch.distributed.run" not in process.args:
        return [process.pid]
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in children if is_worker(int(child))]


def is_worker(pid: int) -> bool:
    try:
        return b"\0LOCAL_RANK=" in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def killed(case: Case, out: Path, printed: Path, moment: float, draws: random.Random) -> tuple[bool, float] | None:
    """Kill one process of a command after so many seconds. None: it was over.

    Whether it was at work, connected to any others, and the seconds until all processes had ended.
    """
    process = started(case, out, printed)
    end = time.monotonic() + moment
    while time.monotonic() < end and process.poll() is None:
        time.sleep(0.005)
    before = printed.read_text()
    there = workers_of(process) if process.poll() is None else []
    if len(there) < case.processes:  # over, or not all begun
        process.send_signal(signal.SIGTERM)
        process.wait(LIMIT)
        return None
    os.kill(draws.choice(there), signal.SIGKILL)
    begun = time.monotonic()
    process.wait(LIMIT)
    return bool(before) and not OVER.search(before), time.monotonic() - begun


def trials(case: Case, count: int, folder: Path, draws: random.Random) -> Tally:
    """So many kills of a case, each in a folder of its own."""
    undisturbed = folder / f"{case.name}-{case.processes}"
    seconds = finished(case, undisturbed, folder / "undisturbed.log")
    expected, tally = case.left(undisturbed), Tally()
    assert expected
    while tally.kills < count:
        out, printed = folder / "trial", folder / f"{case.name}-{case.processes}-{tally.kills}.log"
        shutil.rmtree(out, ignore_errors=True)
        ended = killed(case, out, printed, draws.uniform(0.3, seconds), draws)
        if ended is None:
            continue
        begun, seconds_to_end = ended
        tally.kills += 1
        named = len(NAMED.findall(printed.read_text())) == 1
        tally.named += named
        tally.untold += begun and not named
        tally.slowest = max(tally.slowest, seconds_to_end)
        finished(case, out, printed)
        tally.equal += case.left(out) == expected
        tally.different += [tally.kills - 1] if case.left(out) != expected else []
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="in all cases together (100)")
    parser.add_argument("--cases", nargs="+", default=["run", "pretraining", "dense"])
    parser.add_argument("--processes", nargs="+", type=int, choices=(1, 2), default=[1, 2])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep all that is printed there")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    draws = random.Random(options.seed)
    chosen = cases(make_export(folder / "export", seed=0), options.cases, options.processes)
    print("| case | processes | kills | equal results | named in one line | at work, not named | slowest end, s |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    good = True
    for number, case in enumerate(chosen):
        count = options.kills // len(chosen) + (number < options.kills % len(chosen))
        tally = trials(case, count, folder, draws)
        told = [tally.named, tally.untold] if case.processes == 2 else ["", ""]
        cells = [case.name, case.processes, tally.kills, tally.equal, *told, f"{tally.slowest:.1f}"]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        if tally.different:
            print(f"different: {tally.different}, see {folder}")
        good &= tally.equal == tally.kills
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
