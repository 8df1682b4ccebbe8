"""The kernel set for FAISS's OpenBLAS, on simulated processors; and the one it then uses, in fresh processes."""

import os
import subprocess
import sys

import pytest

from engine import blas_kernel

HASWELL = {"sse3", "avx", "avx2", "fma"}
SAPPHIRE_RAPIDS = HASWELL | {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "amx_tile"}
KNIGHTS_LANDING = HASWELL | {"avx512f", "avx512cd", "avx512er", "avx512pf"}


def test_the_best_kernel_needs_only_instructions_of_the_processor():
    for flags, kernel in [
        (SAPPHIRE_RAPIDS, "SkylakeX"),
        (SAPPHIRE_RAPIDS - {"avx512vl"}, "Haswell"),
        (KNIGHTS_LANDING, "Haswell"),
        (HASWELL, "Haswell"),
        (HASWELL - {"fma"}, None),
        ({"sse3", "avx"}, None),
        (set(), None),
    ]:
        assert blas_kernel.best_kernel(flags) == kernel


@pytest.fixture
def simulate(monkeypatch):
    """A function that simulates a fresh process: the processor's flags, and the kernel that OpenBLAS would choose."""

    def apply(flags, default):
        monkeypatch.delenv(blas_kernel.VARIABLE, raising=False)
        monkeypatch.delitem(sys.modules, "faiss", raising=False)
        monkeypatch.setattr(blas_kernel, "processor_flags", lambda: flags)
        monkeypatch.setattr(blas_kernel, "default_kernel", lambda: default)

    return apply


@pytest.mark.parametrize(
    ("flags", "default", "kernel"),
    [
        (SAPPHIRE_RAPIDS, "Prescott", "SkylakeX"),
        (HASWELL, "Prescott", "Haswell"),
        (HASWELL, "Nehalem", "Haswell"),
        (SAPPHIRE_RAPIDS, "SapphireRapids", None),
        (SAPPHIRE_RAPIDS, "Zen", None),
        (SAPPHIRE_RAPIDS, "a future kernel", None),
        (SAPPHIRE_RAPIDS, None, None),
        (set(), "Prescott", None),
    ],
)
def test_only_a_default_kernel_without_avx_is_replaced(flags, default, kernel, simulate):
    simulate(flags, default)
    with blas_kernel.fitting_kernel():
        assert os.environ.get(blas_kernel.VARIABLE) == kernel
    assert blas_kernel.VARIABLE not in os.environ


@pytest.mark.parametrize("setting", ["Prescott", "", "no such kernel"])
def test_the_users_setting_is_kept(setting, simulate, monkeypatch):
    simulate(SAPPHIRE_RAPIDS, "Prescott")
    monkeypatch.setenv(blas_kernel.VARIABLE, setting)
    with blas_kernel.fitting_kernel():
        assert os.environ[blas_kernel.VARIABLE] == setting
    assert os.environ[blas_kernel.VARIABLE] == setting


@pytest.fixture
def best_kernel(monkeypatch):
    """The best kernel for the processor that runs this test."""
    monkeypatch.delenv(blas_kernel.VARIABLE, raising=False)
    blas_kernel.default_kernel.cache_clear()
    kernel = blas_kernel.best_kernel(blas_kernel.processor_flags())
    if kernel is None or blas_kernel.default_kernel() is None:
        pytest.skip("no FAISS whose OpenBLAS chooses by processor, or no processor with AVX2")
    yield kernel
    blas_kernel.default_kernel.cache_clear()


# Prints the kernels of FAISS, of numpy and of the environment. Argument: the default kernel of a simulated Haswell.
KERNELS = """
import ctypes, os, sys
from pathlib import Path
from engine import blas_kernel
if len(sys.argv) > 1:
    blas_kernel.default_kernel = lambda: sys.argv[1]
    blas_kernel.processor_flags = lambda: {"avx2", "fma"}
with blas_kernel.fitting_kernel():
    import faiss
import numpy._core._multiarray_umath as numpy
numpys = getattr(ctypes.CDLL(numpy.__file__), "scipy_openblas_get_corename64_", lambda: b"another BLAS")
numpys.restype = ctypes.c_char_p
print(blas_kernel.in_use(), numpys().decode(), os.environ.get(blas_kernel.VARIABLE), sep=", ")
"""


def output_of(program, *arguments, **environment):
    process = subprocess.run(
        [sys.executable, "-c", program, *arguments], env=os.environ | environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip().split(", ")


def test_only_faiss_gets_the_best_kernel(best_kernel):
    default = blas_kernel.default_kernel()
    kernel, numpys, _ = output_of(KERNELS)
    assert kernel == (best_kernel if default in blas_kernel.WITHOUT_AVX else default)
    assert output_of(KERNELS, "Prescott") == ["Haswell", numpys, "None"]
    assert output_of(KERNELS, "Prescott", OPENBLAS_CORETYPE="Nehalem")[0] == "Nehalem"


SEARCH = """
import numpy as np
from engine import blas_kernel
from engine.neighbours import search, unit_rows
blas_kernel.default_kernel = lambda: "Prescott"
random = np.random.default_rng(0)
gallery, queries = (unit_rows(random.standard_normal((count, 384))) for count in (3000, 100))
_, similarities, indices = search(gallery, queries, 50)
product = queries.astype(np.float64) @ gallery.T.astype(np.float64)
print(blas_kernel.in_use(), end=", ")
print((np.argsort(-product, axis=1, kind="stable")[:, :50] == indices).all(), end=", ")
print(np.abs(np.take_along_axis(product, indices, axis=1) - similarities).max() < 1e-6)
"""


def test_a_search_uses_the_best_kernel_and_is_exact(best_kernel):
    assert output_of(SEARCH) == [best_kernel, "True", "True"]
