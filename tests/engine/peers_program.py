"""Run as a program: fork connected processes, and print their exit codes as JSON once all have ended.

peers_program.py FOLDER COUNT SCENARIO VICTIM   pids and errors of the processes are in FOLDER, by rank

The victim is reaped last: until then the kernel keeps the signal that killed it.
"""

import ctypes
import io
import json
import os
import socket
import sys
import time
import traceback
from contextlib import redirect_stderr
from pathlib import Path

from engine import distributed
from engine.distributed import start_world


def work(folder: Path, scenario: str, victim: int) -> None:
    with start_world("cpu") as world:
        (folder / f"pid{world.rank}").write_text(str(os.getpid()))
        world.barrier()
        if scenario == "busy":  # in C with the GIL held, while the others wait in a collective
            if world.rank == victim:
                ctypes.PyDLL(None).sleep(3)
        elif scenario == "error":
            distributed.EXIT_TIMEOUT = 1.0  # which the other process waits in full
            if world.rank == victim:
                raise ValueError("error of one rank")
            time.sleep(60)
        elif world.rank == victim or scenario == "hang":
            with redirect_stderr(io.StringIO()):  # as a dense task silences its libraries
                time.sleep(60)  # as in a collective of NCCL whose other side has gone
        world.barrier()


def run_member(folder: Path, rank: int, scenario: str, victim: int) -> None:
    """Never returns."""
    os.environ["RANK"], code = str(rank), 1
    with open(folder / f"errors{rank}", "w") as errors:
        os.dup2(errors.fileno(), 2)
    try:
        work(folder, scenario, victim)
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    folder, count, scenario, victim = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    os.environ["WORLD_SIZE"] = str(count)
    pids = {}
    for rank in range(count):
        if not (pid := os.fork()):
            run_member(folder, rank, scenario, victim)
        pids[rank] = pid
    reaping_order = sorted(pids, key=lambda rank: rank == victim)
    codes = {rank: os.waitstatus_to_exitcode(os.waitpid(pids[rank], 0)[1]) for rank in reaping_order}
    sys.stdout.write(json.dumps([codes[rank] for rank in range(count)]))


if __name__ == "__main__":
    main()
