"""Show what is installed, what is missing and how to fix it."""

import contextlib
import importlib
import importlib.util
import io
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

from bench.options import CommandOptions
from engine import blas_kernel
from engine.errors import in_one_line, memory_limit
from engine.extensions import FOLDERS, extensions, import_extension, refused_plugins
from engine.machine import cores, cpu_model, installed, memory_bytes
from engine.optional import OPTIONAL, install_command, is_lacking
from engine.printing import counted, say, table

Options = CommandOptions


def run(options: Options) -> int:
    """0: `bench run` works in this environment; 1: something that it needs is missing."""
    checks = examine()
    good = not any(check.mark == "missing" and check.needed for check in checks)
    rows = []
    for check in checks:
        mark = check.mark.upper() if check.mark == "missing" and check.needed else check.mark
        rows.append((mark, check.name, check.text))
        rows += [("", "", f"fix: {check.fix}")] if check.fix else []
    say(*table(rows))
    say("", "usable: nothing that bench run needs is missing" if good else "not usable until what is MISSING is fixed")
    return 0 if good else 1


TESTED = ("2.11", "0.26"), ("2.14", "0.29")  # torch and torchvision: tox, and tox -e newest
PAIR = "pip install 'torch==2.11.*' 'torchvision==0.26.*'"
EVERYTHING = "pip install 'ssl-vit-bench[cpu]'"
ONE_FAISS = "pip uninstall -y faiss-cpu faiss-gpu && pip install 'faiss-cpu>=1.15,<2'  (with a GPU: faiss-gpu)"
SMALL_DISK = 5  # GiB; about what an export of a ViT-L and its ImageNet features take

Mark = Literal["ok", "missing", "note"]


@dataclass(frozen=True)
class Check:
    """One line of the report. `bench run` is unusable only if a check is both `missing` and `needed`."""

    name: str
    mark: Mark
    text: str
    fix: str = ""
    needed: bool = True


def examine() -> list[Check]:
    """All checks, in the order of the report. No check may raise: broken imports are why people run doctor."""
    checks: list[Check] = []
    for check in (
        _python,
        _torch,
        _devices,
        _libraries,
        _faiss,
        _openblas,
        _mmcv,
        _optional,
        _plugins,
        _machine,
        _disk,
    ):
        try:
            checks += check()
        except Exception as error:  # a check that cannot run is reported too
            text = f"cannot be examined: {in_one_line(error)}"
            checks.append(Check(check.__name__.strip("_"), "note", text, needed=False))
    return checks


def quietly_imported(name: str) -> ModuleType | str:
    """The module, or one line that explains why it cannot be imported. What the module prints is discarded."""
    discarded = io.StringIO()
    with contextlib.redirect_stdout(discarded), contextlib.redirect_stderr(discarded), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except Exception as error:  # binary packages fail with anything from ImportError to SystemError
            return _reason(error)


def _reason(error: Exception) -> str:
    # Not `in_one_line`, whose message would advise to run doctor.
    if "failed to map segment" in str(error) and (limit := memory_limit()):
        return f"{' '.join(str(error).split())}; {limit}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _library(name: str, package: str, fix: str = EVERYTHING) -> Check:
    module, version = quietly_imported(name), installed(package)
    if isinstance(module, ModuleType):
        return Check(package, "ok", version or "version unknown")
    text = f"{version} is installed but cannot be imported: {module}" if version else f"not installed ({module})"
    return Check(package, "missing", text, fix="a higher limit" if "(ulimit " in module else fix)


def _python() -> Iterator[Check]:
    good = sys.version_info >= (3, 11)
    fix = "" if good else "use Python 3.11 or later"
    text = f"{platform.python_version()}, {sys.executable}"
    yield Check("python", "ok" if good else "missing", text, fix=fix)


def _torch() -> Iterator[Check]:
    checks = [_library("torch", "torch", PAIR), _library("torchvision", "torchvision", PAIR)]
    yield from checks
    if any(check.mark == "missing" for check in checks):
        return
    import torch
    import torchvision

    pair = f"torch {torch.__version__} with torchvision {torchvision.__version__}"
    try:
        boxes = torchvision.ops.nms(torch.tensor([[0.0, 0, 1, 1], [0.0, 0, 1, 1]]), torch.tensor([0.9, 0.8]), 0.5)
        works = boxes.tolist() == [0]
        reason = "" if works else ": nms gives a wrong answer"
    except (RuntimeError, AttributeError) as error:
        works, reason = False, f": {in_one_line(error)}"
    if not works:
        yield Check("operators", "missing", f"{pair} do not work together{reason}", fix=PAIR)
    elif any(torch.__version__.startswith(a) and torchvision.__version__.startswith(b) for a, b in TESTED):
        yield Check("operators", "ok", f"{pair}: a tested pair, torchvision.ops.nms runs")
    else:
        text = f"{pair}: works; tested are {' and '.join(' with '.join(pair) for pair in TESTED)}"
        yield Check("operators", "note", text, fix=PAIR)


def _devices() -> Iterator[Check]:
    torch = quietly_imported("torch")
    if isinstance(torch, str):
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        memory = torch.cuda.get_device_properties(index).total_memory / 2**30
        yield Check(f"cuda:{index}", "ok", f"{torch.cuda.get_device_name(index)}, {memory:.0f} GiB")
    if not count:
        yield Check("gpu", "note", "torch sees none; everything runs on the CPU", needed=False)


def _libraries() -> Iterator[Check]:
    yield _library("timm", "timm")
    yield _library("safetensors.torch", "safetensors")
    yield _library("numpy", "numpy")
    yield _library("PIL.Image", "pillow")
    yield _library("sklearn", "scikit-learn")


def _faiss() -> Iterator[Check]:
    cpu, gpu = installed("faiss-cpu"), installed("faiss-gpu")
    if cpu and gpu:
        # Both packages install into one folder: the last one installed is there, and removing one breaks the other.
        text = f"faiss-cpu {cpu} and faiss-gpu {gpu} are both installed and overwrite each other"
        yield Check("faiss", "missing", text, fix=ONE_FAISS)
        return
    with blas_kernel.fitting_kernel():
        module = quietly_imported("faiss")
    if isinstance(module, str):
        text = "not installed; k-NN needs it" if not (cpu or gpu) else f"installed but cannot be imported: {module}"
        fix = (
            f"{EVERYTHING}, or with an NVIDIA GPU: pip install 'ssl-vit-bench[gpu]'" if not (cpu or gpu) else ONE_FAISS
        )
        yield Check("faiss", "missing", text, fix=fix)
        return
    gpus = module.get_num_gpus() if hasattr(module, "get_num_gpus") else 0
    build = "faiss-gpu" if gpu else "faiss-cpu"
    searching = f"searches on {counted(gpus, 'GPU')}" if gpus else "searches on the CPU"
    yield Check("faiss", "ok", f"{build} {gpu or cpu or module.__version__}, {searching}")


def _openblas() -> Iterator[Check]:
    """The kernel of FAISS's matrix products, which decides how long a search on the CPU takes."""
    if isinstance(quietly_imported("faiss"), str):
        return
    kernel, best = blas_kernel.in_use(), blas_kernel.best_kernel(blas_kernel.processor_flags())
    setting = os.environ.get(blas_kernel.VARIABLE)
    text = f"FAISS's OpenBLAS uses its {kernel or 'unknown'} kernel"
    text += f", with {blas_kernel.VARIABLE}={setting}" if setting is not None else ""
    if best and kernel in blas_kernel.WITHOUT_AVX:
        text += f"; {best} fits this processor and is several times as fast"
        fix = f"export {blas_kernel.VARIABLE}={best}" if setting is None else f"unset {blas_kernel.VARIABLE}"
        yield Check("openblas", "note", text, fix=fix, needed=False)
    else:
        yield Check("openblas", "ok", text)


def _mmcv() -> Iterator[Check]:
    # The code that will run the operators determines which they are; without mmcv nothing is imported.
    package = next((name for name in ("onedl-mmcv", "mmcv", "mmcv-lite") if installed(name)), None)
    if package is None or importlib.util.find_spec("mmcv") is None:
        fix = "use Python 3.12, this one has no wheels" if is_lacking("mmcv") else EVERYTHING
        yield Check("mmcv", "missing", "not installed; dense tasks need it", fix, needed=False)
        return
    from downstream.models import operators
    from downstream.models.operators import quiet_libraries

    version = f"{package} {installed(package)}"
    try:
        with quiet_libraries():
            source = operators.install_operators()
    except Exception as error:  # binary packages fail with anything from ImportError to SystemError
        text = f"{version}: its compiled operators cannot be loaded (built for another torch?): {_reason(error)}"
        fix = "pip cache remove onedl_mmcv; pip install --force-reinstall --no-deps --no-cache-dir onedl-mmcv"
        yield Check("mmcv", "missing", text, fix=fix, needed=False)
        return
    texts = {
        "compiled": "its compiled nms and roi_align run",
        "torchvision": "without compiled operators; torchvision's nms and roi_align run instead",
    }
    yield Check("mmcv", "ok", f"{version}: {texts[source]}")


def _optional() -> Iterator[Check]:
    for name, (package, _, feature) in OPTIONAL.items():  # not imported, because that takes seconds and prints
        if name == "mmcv":  # examined above
            continue
        if version := installed(package) or (importlib.util.find_spec(name) and f"{name}, from another package"):
            yield Check(package, "ok", version, needed=False)
        else:
            fix = "use Python 3.12, this one has no wheels" if is_lacking(name) else install_command(name)
            yield Check(package, "note", f"not installed; for {feature}", fix=fix, needed=False)


def _plugins() -> Iterator[Check]:
    plugins = [extension for kind in FOLDERS for extension in extensions(kind).values() if extension.plugin]
    left_out = {extension: reason for kind in FOLDERS for extension, reason in refused_plugins(kind).items()}
    if plugins:
        from bench.run.suites import catalogue

        # Tasks can also clash by the names of their protocols and suites.
        left_out |= {task: reason for task, reason in catalogue().broken.items() if task.plugin}
    for plugin in [plugin for plugin in plugins if plugin not in left_out]:
        try:
            import_extension(plugin)
            yield Check("plugin", "ok", plugin.title)
        except ValueError as error:
            left_out[plugin] = in_one_line(error)
    for plugin, reason in left_out.items():
        text, fix = f"{plugin.title} is left out: {reason}", f"repair it, or: pip uninstall {plugin.plugin.split()[0]}"
        yield Check("plugin", "note", text, fix=fix, needed=False)


def _machine() -> Iterator[Check]:
    torch = quietly_imported("torch")
    threads = 0 if isinstance(torch, str) else torch.get_num_threads()
    setting = f" (OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']})" if "OMP_NUM_THREADS" in os.environ else ""
    text = f"{cpu_model()}, {counted(cores(), 'usable core')}, torch uses {counted(threads, 'thread')}{setting}"
    if threads > cores():
        yield Check("cpu", "note", text, fix=f"export OMP_NUM_THREADS={cores()}")
    else:
        yield Check("cpu", "ok", text)
    yield Check("memory", "ok", f"{memory_bytes() / 2**30:.1f} GiB")


def _disk() -> Iterator[Check]:
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    enough = free >= SMALL_DISK
    fix = "" if enough else "give --out a folder on a larger disk"
    yield Check("disk", "ok" if enough else "note", f"{free:.0f} GiB free at {Path.cwd()}", fix=fix)
