"""What this process makes of its machine: its cores, a thread on each, and memory that is freed and taken again.

Many independent items run on a thread for each core, whose tensor operators use that core alone. Where items are many,
this beats running one item after the other on all cores: no operator ends in a barrier that waits for the slowest core,
and a core that reads or decodes does not keep the others waiting. It also makes results independent of the number of
cores, since every item is computed by one.

glibc is told to keep freed memory instead of giving it back to the kernel after every large tensor. A forward pass
frees and takes tensors of many megabytes. By default glibc maps each one freshly, and the kernel zeroes its pages at
every first touch: 3.6 million page faults in one ViT-S forward of 128 images. Keeping the memory leaves 45 thousand and
gave 17.4 instead of 11.5 images/s (float32); training steps gain 6 to 22 %. That was measured on two cores of an AMD
EPYC with the environment variables MALLOC_MMAP_MAX_, MALLOC_TRIM_THRESHOLD_ and MALLOC_TOP_PAD_; this call leaves as
few faults, and `tests/benchmarks/extraction.py` shows its gain. The price: memory that was in use once stays with the
process.

`hardware` and `versions` say on what a result was measured.
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
    """The same, shared with the other processes that torchrun started on its machine."""
    return max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def run_on_core_threads(work: Callable[[Item], object], items: Sequence[Item], threads: int | None = None) -> None:
    """Call `work` for every item, from `threads` threads. An error in one stops all after their current item.

    threads: by default as many as torch may use (OMP_NUM_THREADS, or the cores).
    """
    import torch

    threads_before = torch.get_num_threads()
    count = threads or threads_before
    left = iter(items)  # shared: each `next` on a sequence's iterator is one step under the interpreter's lock
    stop = threading.Event()

    def work_off() -> None:
        torch.set_num_threads(1)  # of this thread, and of threads that are started later
        try:
            for item in left:
                if stop.is_set():
                    return
                work(item)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(count, thread_name_prefix="core") as pool:
        try:
            for ending in [pool.submit(work_off) for _ in range(count)]:
                ending.result()
        finally:
            stop.set()  # Ctrl-C reaches this thread alone
            torch.set_num_threads(threads_before)


# glibc's malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
SWITCH = "BENCH_KEEP_MEMORY"


def keep_memory() -> bool:
    """Make this process reuse freed memory. Call it before the first large allocation.

    Returns False and changes nothing where the C library is not glibc (musl, macOS) and when BENCH_KEEP_MEMORY is 0.
    """
    if os.environ.get(SWITCH) == "0" or not _is_glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = (
        (M_MMAP_MAX, 0),  # large blocks come from the heap, which can be reused
        (M_TRIM_THRESHOLD, -1),  # never shrink the heap (mallopt(3): -1 disables trimming)
        (M_TOP_PAD, 256 << 20),  # grow it by 256 MiB at a time; untouched pages cost nothing
    )
    return all(mallopt(option, value) == 1 for option, value in settings)


def return_memory() -> None:
    """Give what is free back to the kernel, after a use that was far above the usual."""
    if _is_glibc():
        ctypes.CDLL(None).malloc_trim(0)


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
    """Version of an installed distribution, without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def versions() -> dict[str, str]:
    """Python, the libraries that numbers depend on, ourselves, and our git commit when run from a checkout."""
    packages = {package: number for package in PACKAGES if (number := installed(package))}
    commit = {"git": text} if (text := git_commit()) else {}
    return {"python": platform.python_version(), **packages, **commit}


def git_commit() -> str | None:
    """Our commit, with `+changes` when tracked files differ from it; None outside a checkout."""
    if not (ROOT / ".git").exists():
        return None
    try:
        commit = _git("rev-parse", "HEAD")
        return commit + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*words: str) -> str:
    # Without optional locks: asking for the status must not write into the checkout.
    command = ["git", "--no-optional-locks", "-C", str(ROOT), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()


@cache
def hardware() -> dict[str, object]:
    """Processor, usable cores, memory in GiB, and the GPUs that torch sees."""
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
    """Memory of the machine, or of the container when that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such group, or "max": no limit
        return total
