"""The numeric tests, computed as other processors would: `tox -e portable`, or `python tests/portable.py --help`.

Torch, OpenBLAS (NumPy, SciPy, faiss), MKL and oneDNN choose their kernels by what the processor has, and add in another
order with another number of threads. Here environment variables limit what they choose from. A test whose tolerance
holds by luck fails under one of the rows of the table printed at the end.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
NUMERIC = [
    "probes",
    "pretrain",
    "checkpoints",
    "downstream",
    "engine",
    "test_method_contract.py",
    "test_task_contract.py",
]
LIMITS = ("ATEN_CPU_CAPABILITY", "OPENBLAS_CORETYPE", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
KERNELS = {
    "sse4": ("default", "Nehalem", "SSE4_2", "SSE41"),
    "avx2": ("avx2", "Haswell", "AVX2", "AVX2"),
    "avx512": ("avx512", "SkylakeX", "AVX512", "AVX512_CORE"),
}
FLAGS = {"sse4": "sse4_2", "avx2": "avx2", "avx512": "avx512f"}  # as /proc/cpuinfo names them


def run_tests(kernel: str, threads: int, tests: list[str], log: Path) -> tuple[str, str]:
    """The counts that pytest prints at its end, and the lines of failed tests."""
    limits = dict(zip(LIMITS, KERNELS[kernel], strict=True))
    environment = {**os.environ, **limits, "OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "--dist", "worksteal", *tests]
    with log.open("w") as file:
        subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False)
    text = log.read_text()
    counts = re.findall(r"^(?=.*\b(?:passed|failed|error)).* in [\d.]+s.*$", text, flags=re.MULTILINE)
    failed = re.findall(r"^(?:FAILED|ERROR) .*$", text, flags=re.MULTILINE)
    return counts[-1] if counts else "pytest did not finish", "\n".join(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS), help="default: all there are")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2, 4], help="of each test process, one row each")
    parser.add_argument("--load", type=int, default=0, metavar="N", help="beside N processes that never rest")
    parser.add_argument("--logs", type=Path, default=Path(os.environ.get("TMPDIR", "/tmp")), help="of each row: a file")
    parser.add_argument("tests", nargs="*", help="arguments of pytest; default: the numeric tests not marked slow")
    options = parser.parse_args()
    tests = options.tests or ["-m", "not slow and not exhaustive", *(f"tests/{name}" for name in NUMERIC)]
    flags = set(Path("/proc/cpuinfo").read_text().split())
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.load)]
    rows, failures = [], []
    try:
        for kernel in options.kernels:
            for threads in options.threads if FLAGS[kernel] in flags else []:
                began = time.monotonic()
                log = options.logs / f"portable-{kernel}-{threads}.txt"
                counts, failed = run_tests(kernel, threads, tests, log)
                rows.append((kernel, threads, f"{time.monotonic() - began:.0f} s", counts))
                if failed or "passed" not in counts:
                    failures.append(f"{kernel}, {threads} threads ({log}):\n{failed}")
            if FLAGS[kernel] not in flags:
                rows.append((kernel, "-", "-", "not run: this processor lacks it"))
    finally:
        for process in busy:
            process.kill()
    print("\n".join(failures))
    print(f"{'kernels':<8} {'threads':>7} {'time':>7}  tests")
    for kernel, threads, seconds, counts in rows:
        print(f"{kernel:<8} {threads:>7} {seconds:>7}  {counts}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
