"""How this process uses its machine (a thread on each core, freed memory kept for reuse), and a description of it.

Many independent items run on one thread per core, and each thread's tensor operators use that core alone. With many
items this is faster than running one item after the other on all cores: no operator ends in a barrier that waits for
the slowest core, and a core that reads or decodes does not block the others. It also makes results independent of the
number of cores, because every item is computed by one.

glibc is told to keep freed memory instead of returning it to the kernel after every large tensor. A forward pass
allocates and frees tensors of many megabytes. By default glibc maps each one freshly, and the kernel zeroes its pages
on first access: 3.6 million page faults in one ViT-S forward of 128 images. Keeping the memory reduced them to 45
thousand and gave 17.4 instead of 11.5 images/s (float32); training steps gain 6 to 22 %. That was measured on two cores
of an AMD EPYC with the environment variables MALLOC_MMAP_MAX_, MALLOC_TRIM_THRESHOLD_ and MALLOC_TOP_PAD_;
`keep_memory` causes as few faults, and `tests/benchmarks/extraction.py` shows its gain. The price: the process keeps
its peak memory.

Threads that share an operator sleep while they wait for each other, instead of spinning on a core that a loader process
or somebody else's program needs (`sleep_at_barriers`).

`hardware` and `versions` describe what a result was measured on.
"""

import ctypes
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

Item = TypeVar("Item")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def own_cores() -> int:
    """This process's share of the cores, which it divides with the others that torchrun started on the machine."""
    return max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def run_on_core_threads(work: Callable[[Item], object], items: Sequence[Item], threads: int | None = None) -> None:
    """Call `work` for every item, on several threads. After an error in one, all stop after their current item.

    threads: how many; by default as many as torch may use (OMP_NUM_THREADS, or the cores).
    """
    import torch

    threads_before = torch.get_num_threads()
    count = threads or threads_before
    queue = iter(items)  # shared: `next` on a sequence's iterator is atomic under the interpreter's lock
    stop = threading.Event()

    def process_queue() -> None:
        torch.set_num_threads(1)  # for this thread, and for threads that start later
        try:
            for item in queue:
                if stop.is_set():
                    return
                work(item)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(count, thread_name_prefix="core") as pool:
        try:
            for future in [pool.submit(process_queue) for _ in range(count)]:
                future.result()
        finally:
            stop.set()  # Ctrl-C interrupts only this thread
            torch.set_num_threads(threads_before)


# glibc's malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
KEEP_MEMORY_VARIABLE = "BENCH_KEEP_MEMORY"


def keep_memory() -> bool:
    """Make this process reuse freed memory. Call it before the first large allocation.

    Returns False and changes nothing if the C library is not glibc (musl, macOS) or BENCH_KEEP_MEMORY is 0.
    """
    if os.environ.get(KEEP_MEMORY_VARIABLE) == "0" or not _is_glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = (
        (M_MMAP_MAX, 0),  # large blocks come from the heap, which can be reused
        (M_TRIM_THRESHOLD, -1),  # never shrink the heap (mallopt(3): -1 disables trimming)
        (M_TOP_PAD, 256 << 20),  # grow it by 256 MiB at a time; untouched pages cost nothing
    )
    return all(mallopt(option, value) == 1 for option, value in settings)


def return_memory() -> None:
    """Return free memory to the kernel, after work that needed far more than the rest of the run."""
    if _is_glibc():
        ctypes.CDLL(None).malloc_trim(0)


def sleep_at_barriers() -> None:
    """Make OpenMP's threads sleep while they wait for the others. Call it before torch is imported.

    Spinning wins microseconds for an operator while every core is free; if one is not, all threads spin until the last
    of them gets a core. OMP_WAIT_POLICY, if the user sets it, stays. Results do not depend on it.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _is_glibc() -> bool:
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")


ROOT = Path(__file__).parents[1]
PACKAGES = (
    "torch",
    "torchvision",
    "timm",
    "faiss-cpu",
    "faiss-gpu",
    "numpy",
    "pillow",
    "scikit-learn",
    "cyanure",
    "ssl-vit-bench",
)


def installed(package: str) -> str | None:
    """Version of an installed distribution, which is not imported; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def versions() -> dict[str, str]:
    """Name -> version: Python, the libraries that results depend on, this package, and its git commit in a checkout."""
    packages = {package: number for package in PACKAGES if (number := installed(package))}
    commit = {"git": text} if (text := git_commit()) else {}
    return {"python": platform.python_version(), **packages, **commit}


def git_commit() -> str | None:
    """Commit of this package's checkout, with `+changes` if tracked files differ from it; None outside a checkout."""
    if not (ROOT / ".git").exists():
        return None
    try:
        commit = _git("rev-parse", "HEAD")
        return commit + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*words: str) -> str:
    # Without optional locks, because `git status` must not write into the checkout.
    command = ["git", "--no-optional-locks", "-C", str(ROOT), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()


@cache
def hardware() -> dict[str, object]:
    """Processor, usable cores, torch's threads, memory in GiB, the GPUs that torch sees, and the operating system."""
    import torch

    gpus = range(torch.cuda.device_count())
    return {
        "cpu": cpu_model(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(memory_bytes() / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(index) for index in gpus],
        "system": platform.platform(),
    }


def cpu_model() -> str:
    """Name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # no /proc outside Linux
    return platform.processor() or platform.machine()


def memory_bytes() -> int:
    """Memory of the machine, or the limit of the container if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no control group, or "max": no limit
        return total
