"""The OpenBLAS kernel that FAISS uses, chosen from the processor's flags if OpenBLAS itself picks one that is too old.

faiss-cpu 1.15 brings OpenBLAS 0.3.15, which knows processors by family and model (driver/others/dynamic.c). On one that
it does not know, such as Intel's Sapphire Rapids, it falls back to Prescott, its kernel of 2004, and a search takes
several times as long (docs/speed.md). The environment variable OPENBLAS_CORETYPE names the kernel; OpenBLAS reads it
once, when it is loaded.

This file is also a program: run in another process, it prints the kernel that OpenBLAS chooses by default.
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
# Best first. Names that every OpenBLAS since 0.3 knows, and the instruction sets that each kernel uses (its
# Makefile.x86_64).
NEEDED = {
    "SkylakeX": {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma"},
    "Haswell": {"avx2", "fma"},
}
# All kernels for 64-bit processors without AVX. Only these are replaced: on a Zen 4, for which OpenBLAS 0.3.15 chooses
# Zen (AVX2), SkylakeX (AVX512) gains nothing.
WITHOUT_AVX = {"Prescott", "Core2", "Penryn", "Dunnington", "Nehalem", "Atom", "Nano", "Opteron", "Opteron_SSE3"}
WITHOUT_AVX |= {"Barcelona", "Bobcat"}


@contextmanager
def fitting_kernel() -> Iterator[None]:
    """A context in which to import FAISS, so that its OpenBLAS uses the kernel that suits the processor.

    The environment is restored afterwards. Does nothing if the user has set OPENBLAS_CORETYPE, if OpenBLAS's default is
    good, or if that default or the processor's flags cannot be determined.
    """
    kernel = better_kernel()
    if kernel is None:
        yield
        return
    import numpy  # noqa: F401  (before the variable is set, which NumPy's own OpenBLAS would read too)

    os.environ[VARIABLE] = kernel
    try:
        yield
    finally:
        del os.environ[VARIABLE]


def better_kernel() -> str | None:
    """The kernel that FAISS's OpenBLAS should use instead of its default; None to keep the default."""
    if VARIABLE in os.environ or "faiss" in sys.modules:
        return None
    kernel = best_kernel(processor_flags())
    return kernel if kernel and default_kernel() in WITHOUT_AVX else None


def best_kernel(flags: Set[str]) -> str | None:
    """The best kernel for a processor with these flags; None if it has no AVX2."""
    return next((kernel for kernel, needed in NEEDED.items() if needed <= flags), None)


def processor_flags(file: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Flags of an x86 processor as Linux names them; empty if they cannot be read."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


@cache
def default_kernel() -> str | None:
    """The kernel that FAISS's OpenBLAS chooses by default or by OPENBLAS_CORETYPE; None if it cannot be determined.

    Determined in another process (50 ms), because OpenBLAS chooses only once, while it is loaded.
    """
    library = faiss_library()
    if library is None or not sys.executable:
        return None
    # -I -S: no site packages and no settings of the user; ctypes is all that is needed.
    command = [sys.executable, "-I", "-S", __file__, str(library)]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return completed.stdout.strip() or None


def in_use() -> str | None:
    """The kernel that FAISS uses in this process, where it must be imported; None if it is not built on OpenBLAS."""
    library = faiss_library()
    return kernel_of(library) if library else None


def faiss_library() -> Path | None:
    """Path of FAISS's compiled module, which its BLAS is linked to; None if FAISS is not installed."""
    spec = importlib.util.find_spec("faiss")
    if spec is None or spec.origin is None:
        return None
    return min(Path(spec.origin).parent.glob("_swigfaiss*.so"), default=None)


def kernel_of(library: Path) -> str | None:
    """Name of the kernel of the OpenBLAS that this library is linked to; None if it uses no OpenBLAS."""
    try:
        corename = ctypes.CDLL(str(library)).openblas_get_corename
    except (OSError, AttributeError):  # does not load; another BLAS
        return None
    corename.restype = ctypes.c_char_p
    return corename().decode()


if __name__ == "__main__":
    sys.stdout.write(kernel_of(Path(sys.argv[1])) or "")
