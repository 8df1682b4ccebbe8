"""Time and memory measurements of the benchmarks."""

import time
from collections.abc import Callable
from pathlib import Path


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of all threads of this process, which other load on the machine changes little."""
    started = time.process_time()
    work()
    return time.process_time() - started


def resident() -> int:
    """Resident memory of this process in bytes."""
    return _status("VmRSS")


def peak() -> int:
    """Peak resident memory of this process in bytes. getrusage would include the parent's before exec."""
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))
