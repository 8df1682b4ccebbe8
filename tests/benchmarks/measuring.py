"""Time and memory of what the programs beside it measure."""

import time
from collections.abc import Callable
from pathlib import Path


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def cpu_seconds(work: Callable[[], object]) -> float:
    """Of all threads of this process: other work on the machine changes it little."""
    started = time.process_time()
    work()
    return time.process_time() - started


def resident() -> int:
    """Bytes of memory this process holds now."""
    return _status("VmRSS")


def peak() -> int:
    """Bytes of memory this process has held at most; getrusage's would count its parent's before exec."""
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))
