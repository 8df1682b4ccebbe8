"""Commands resume exactly after SIGKILL: `python tests/kills.py` (100 kills, half an hour on two idle cores).

In each trial a command starts in a new folder, one of its processes is killed at a random moment, the same command
runs to its end, and its results are compared, bit for bit, with those of an undisturbed run. Where torchrun started two
processes and one of them is killed, the other has to end within a minute, with one line that names the dead one.

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
# "died": torchrun has collected the exit status first, so that only its own report has the signal.
NAMED = re.compile(r"^bench: error: process \d of \d \(pid \d+, host \S+\) (was killed by signal 9|died)", re.MULTILINE)
OVER = re.compile(r"^(\d+ done, |finished after )", re.MULTILINE)  # the last line before the exit
PLAIN = (sys.executable, "-m", "bench")
TWO = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "bench")
RUN = ("--suite", "knn@dino,lowshot@bench,linear_sgd@ibot_base_cached,finetune@smoke", "--limit", "200")
SHORT = ("--set", "linear_sgd@ibot_base_cached.epochs=10", "finetune.epochs=20")
DENSE = ("--suite", "segmenter_linear@smoke", "--data", "tiny=tiny-cityscapes:")
PRETRAINING = ("--recipe", "smoke", "--images", "digits:", "--set", "epochs=4", "--save-minutes", "0.01", "--resume")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A command, and what reads its results."""

    name: str
    words: tuple[str, ...]
    results: Callable[[Path], dict]
    processes: int

    def command(self, out: Path) -> list[str]:
        return [*(TWO if self.processes == 2 else PLAIN), *self.words, "--out", str(out)]


@dataclass(kw_only=True)
class Tally:
    """How the trials of one case ended."""

    equal: int = 0
    kills: int = 0
    named: int = 0  # kills of one of two processes that exactly one line names
    unnamed: int = 0  # other kills of processes at work, which had printed something but not their last line
    slowest: float = 0.0  # seconds until all processes had ended
    different: list[int] = field(default_factory=list)  # numbers of trials


def cases(export: Path, names: Sequence[str], processes: Sequence[int]) -> list[Case]:
    checkpoint = ("run", "--checkpoint", str(export))
    words = {
        "run": (*checkpoint, *RUN, *SHORT, "--data", "digits=digits:"),
        "pretraining": ("pretrain", "mae", *PRETRAINING, "--workers", "0"),
        "dense": (*checkpoint, *DENSE, "--workers", "0"),
    }
    results = {"run": numbers_of, "pretraining": tensors_of, "dense": numbers_of}
    return [Case(name=name, words=words[name], results=results[name], processes=n) for name in names for n in processes]


def start(case: Case, out: Path, printed: Path) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(printed, "a") as file:
        return subprocess.Popen(case.command(out), env=environment, stdout=file, stderr=subprocess.STDOUT)


def run_to_end(case: Case, out: Path, printed: Path) -> float:
    """Run a command to its end: the seconds that it took."""
    began = time.monotonic()
    process = start(case, out, printed)
    code = process.wait(LIMIT)
    assert code == 0, f"{case.name} ended with {code}, see {printed}"
    return time.monotonic() - began


def workers_of(process: subprocess.Popen) -> list[int]:
    """Pids of the processes that run the command: those that torchrun started, by rank, or the command itself."""
    if "torch.distributed.run" not in process.args:
        return [process.pid]
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in children if is_worker(int(child))]


def is_worker(pid: int) -> bool:
    try:
        return b"\0LOCAL_RANK=" in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def kill_once(case: Case, out: Path, printed: Path, moment: float, rng: random.Random) -> tuple[bool, float] | None:
    """Kill one process of a command after `moment` seconds. None if it had ended or not fully started.

    Otherwise whether it was at work and connected to any others, and the seconds until all processes had ended.
    """
    process = start(case, out, printed)
    end = time.monotonic() + moment
    while time.monotonic() < end and process.poll() is None:
        time.sleep(0.005)
    before = printed.read_text()
    workers = workers_of(process) if process.poll() is None else []
    if len(workers) < case.processes:
        process.send_signal(signal.SIGTERM)
        process.wait(LIMIT)
        return None
    os.kill(rng.choice(workers), signal.SIGKILL)
    began = time.monotonic()
    process.wait(LIMIT)
    return bool(before) and not OVER.search(before), time.monotonic() - began


def run_trials(case: Case, count: int, folder: Path, rng: random.Random) -> Tally:
    """Kill a case `count` times, each in a new folder."""
    undisturbed = folder / f"{case.name}-{case.processes}"
    seconds = run_to_end(case, undisturbed, folder / "undisturbed.log")
    expected, tally = case.results(undisturbed), Tally()
    assert expected
    while tally.kills < count:
        out, printed = folder / "trial", folder / f"{case.name}-{case.processes}-{tally.kills}.log"
        shutil.rmtree(out, ignore_errors=True)
        outcome = kill_once(case, out, printed, rng.uniform(0.3, seconds), rng)
        if outcome is None:
            continue
        at_work, seconds_to_end = outcome
        tally.kills += 1
        named = len(NAMED.findall(printed.read_text())) == 1
        tally.named += named
        tally.unnamed += at_work and not named
        tally.slowest = max(tally.slowest, seconds_to_end)
        run_to_end(case, out, printed)
        equal = case.results(out) == expected
        tally.equal += equal
        tally.different += [] if equal else [tally.kills - 1]
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
    rng = random.Random(options.seed)
    chosen = cases(make_export(folder / "export", seed=0), options.cases, options.processes)
    print("| case | processes | kills | equal results | named in one line | at work, not named | slowest end, s |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    all_equal = True
    for number, case in enumerate(chosen):
        count = options.kills // len(chosen) + (number < options.kills % len(chosen))
        tally = run_trials(case, count, folder, rng)
        named = [tally.named, tally.unnamed] if case.processes == 2 else ["", ""]
        cells = [case.name, case.processes, tally.kills, tally.equal, *named, f"{tally.slowest:.1f}"]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        if tally.different:
            print(f"different: {tally.different}, see {folder}")
        all_equal &= tally.equal == tally.kills
    return 0 if all_equal else 1


if __name__ == "__main__":
    sys.exit(main())
