"""The machine and the library versions that a result was measured with."""

import os
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from engine.machine import cores

ROOT = Path(__file__).parents[2]
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
