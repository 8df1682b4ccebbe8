"""The kernel with which FAISS's OpenBLAS multiplies: chosen from the processor's flags where its own choice is too old.

faiss-cpu 1.15 brings OpenBLAS 0.3.15, which knows processors by family and model (driver/others/dynamic.c). On one that
it does not know, such as Intel's Sapphire Rapids, it takes Prescott, its kernel of 2004, and a search takes several
times as long (docs/speed.md). The environment variable OPENBLAS_CORETYPE names the kernel; OpenBLAS reads it once, when
it is loaded.

This file runs as a program too, in a process of its own that answers what OpenBLAS chooses by itself.
"""

import ctypes
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Set
from contextlib import contextmanager
from functools import cache
from pathlib import Path

VARIABLE = "OPENBLAS_CORETYPE"
# Best first. Names that every OpenBLAS since 0.3 knows, and the instructions that they use (Makefile.x86_64 there).
NEEDED = {
    "SkylakeX": {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma"},
    "Haswell": {"avx2", "fma"},
}
# All kernels for 64-bit processors without AVX. Others are left alone: on a Zen 4, for which OpenBLAS 0.3.15 chooses
# Zen (AVX2), SkylakeX (AVX512) gains nothing.
WITHOUT_AVX = {"Prescott", "Core2", "Penryn", "Dunnington", "Nehalem", "Atom", "Nano", "Opteron", "Opteron_SSE3"}
WITHOUT_AVX |= {"Barcelona", "Bobcat"}


@contextmanager
def fitting_kernel() -> Iterator[None]:
    """Import FAISS inside of this, and its OpenBLAS takes the kernel that fits; the environment is then as before.

    Nothing is done where the user has set OPENBLAS_CORETYPE, where OpenBLAS's own choice is good, and where that choice
    or the processor's flags cannot be known.
    """
    kernel = better_kernel()
    if kernel is None:
        yield
        return
    import numpy  # noqa: F401  (FAISS imports it; loaded by now, its own OpenBLAS does not read the variable)

    os.environ[VARIABLE] = kernel
    try:
        yield
    finally:
        del os.environ[VARIABLE]


def better_kernel() -> str | None:
    """The kernel to name to FAISS's OpenBLAS before it is loaded; None: leave it alone."""
    if VARIABLE in os.environ or "faiss" in sys.modules:
        return None
    kernel = fitting(processor_flags())
    return kernel if kernel and own_choice() in WITHOUT_AVX else None


def fitting(flags: Set[str]) -> str | None:
    """The best kernel for a processor with these flags; None where one without AVX is the best."""
    return next((kernel for kernel, needed in NEEDED.items() if needed <= flags), None)


def processor_flags(file: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """What an x86 processor can do, in Linux's names; empty where that cannot be read."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


@cache
def own_choice() -> str | None:
    """The kernel that FAISS's OpenBLAS takes by itself, or as OPENBLAS_CORETYPE says; None where it cannot be asked.

    Asked of another process (50 ms), because OpenBLAS chooses once, while it is loaded.
    """
    library = faiss_library()
    if library is None or not sys.executable:
        return None
    # -I -S: no site packages and no settings of the user; ctypes is all that is needed.
    command = [sys.executable, "-I", "-S", __file__, str(library)]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def in_use() -> str | None:
    """The kernel in this process, in which FAISS is imported; None where it has no OpenBLAS that chooses."""
    library = faiss_library()
    return kernel_of(library) if library else None


def faiss_library() -> Path | None:
    """FAISS's compiled module, which brings its BLAS; None where FAISS is not installed."""
    spec = importlib.util.find_spec("faiss")
    if spec is None or spec.origin is None:
        return None
    return min(Path(spec.origin).parent.glob("_swigfaiss*.so"), default=None)


def kernel_of(library: Path) -> str | None:
    """Name of the kernel of the OpenBLAS that this library is linked with; None where there is none."""
    try:
        corename = ctypes.CDLL(str(library)).openblas_get_corename
    except (OSError, AttributeError):  # does not load; another BLAS
        return None
    corename.restype = ctypes.c_char_p
    return corename().decode()


if __name__ == "__main__":
    sys.stdout.write(kernel_of(Path(sys.argv[1])) or "")
