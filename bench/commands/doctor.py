"""Show what is installed, what is missing and how to fix it."""

import contextlib
import importlib
import importlib.util
import io
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType

from bench.options import CommandOptions
from engine import blas_kernel
from engine.errors import in_one_line
from engine.machine import cores, cpu_model, installed
from engine.optional import OPTIONAL, install_command, is_lacking
from engine.printing import counted, say, table

Options = CommandOptions

TESTED = ("2.11", "0.26"), ("2.14", "0.29")  # torch and torchvision: tox, and tox -e newest
PAIR = "pip install 'torch==2.11.*' 'torchvision==0.26.*'"
EVERYTHING = "pip install 'ssl-vit-bench[cpu]'  (with an NVIDIA GPU: [gpu])"
ONE_FAISS = "pip uninstall -y faiss-cpu faiss-gpu && pip install 'faiss-cpu>=1.15,<2'  (with a GPU: faiss-gpu)"
# Module -> its package, and what repairs it.
NEEDED = {
    "torch": ("torch", PAIR),
    "torchvision": ("torchvision", PAIR),
    "timm": ("timm", EVERYTHING),
    "safetensors.torch": ("safetensors", EVERYTHING),
    "numpy": ("numpy", EVERYTHING),
    "PIL.Image": ("pillow", EVERYTHING),
    "sklearn": ("scikit-learn", EVERYTHING),
}
Line = tuple[str, str, str, str]  # ok, note, missing, or MISSING if bench run needs it; name; text; fix, or ""


def run(options: Options) -> int:
    """0: `bench run` works in this environment; 1: something that it needs is missing."""
    rows, is_usable = [], True
    for check in (libraries, operators, devices, faiss, mmcv, optional):
        try:
            lines = list(check())
        except Exception as error:  # broken imports are why people run doctor
            lines = [("note", check.__name__, f"cannot be examined: {in_one_line(error)}", "")]
        for mark, name, text, fix in lines:
            rows += [(mark, name, text), *([("", "", f"fix: {fix}")] if fix else [])]
            is_usable &= mark != "MISSING"
    say(*table(rows), "")
    say("usable: nothing that bench run needs is missing" if is_usable else "not usable until what is MISSING is fixed")
    return 0 if is_usable else 1


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
    return f"{type(error).__name__}: {' '.join(str(error).split())}"  # `in_one_line` would advise to run doctor


def libraries() -> Iterator[Line]:
    yield "ok", "python", f"{platform.python_version()}, {sys.executable}", ""
    for name, (package, fix) in NEEDED.items():
        module, version = quietly_imported(name), installed(package)
        if isinstance(module, ModuleType):
            yield "ok", package, version or "version unknown", ""
        else:
            text = f"{version} is installed but cannot be imported" if version else "not installed"
            yield "MISSING", package, f"{text}: {module}", fix


def operators() -> Iterator[Line]:
    torch, torchvision = quietly_imported("torch"), quietly_imported("torchvision")
    if isinstance(torch, str) or isinstance(torchvision, str):
        return
    pair = f"torch {torch.__version__} with torchvision {torchvision.__version__}"
    try:
        torchvision.ops.nms(torch.tensor([[0.0, 0, 1, 1]]), torch.tensor([0.9]), 0.5)
    except (RuntimeError, AttributeError) as error:
        yield "MISSING", "operators", f"{pair} do not work together: {in_one_line(error)}", PAIR
        return
    if any(torch.__version__.startswith(a) and torchvision.__version__.startswith(b) for a, b in TESTED):
        yield "ok", "operators", f"{pair}: a tested pair, torchvision.ops.nms runs", ""
    else:
        text = f"{pair}: works; tested are {' and '.join(' with '.join(pair) for pair in TESTED)}"
        yield "note", "operators", text, PAIR


def devices() -> Iterator[Line]:
    torch = quietly_imported("torch")
    if isinstance(torch, str):
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        memory = torch.cuda.get_device_properties(index).total_memory / 2**30
        yield "ok", f"cuda:{index}", f"{torch.cuda.get_device_name(index)}, {memory:.0f} GiB", ""
    if not count:
        yield "note", "gpu", "torch sees none; everything runs on the CPU", ""
    threads = torch.get_num_threads()
    text = f"{cpu_model()}, {counted(cores(), 'usable core')}, torch uses {counted(threads, 'thread')}"
    too_many = threads > cores()
    yield "note" if too_many else "ok", "cpu", text, f"export OMP_NUM_THREADS={cores()}" if too_many else ""


def faiss() -> Iterator[Line]:
    """FAISS, and the kernel of its matrix products, which decides how long a search on the CPU takes."""
    packages = [f"{name} {version}" for name in ("faiss-cpu", "faiss-gpu") if (version := installed(name))]
    if len(packages) == 2:  # both install into one folder: the last one is there, and removing one breaks the other
        yield "MISSING", "faiss", f"{' and '.join(packages)} are both installed and overwrite each other", ONE_FAISS
        return
    with blas_kernel.fitting_kernel():
        module = quietly_imported("faiss")
    if isinstance(module, str) and packages:
        yield "MISSING", "faiss", f"{packages[0]} is installed but cannot be imported: {module}", ONE_FAISS
    elif isinstance(module, str):
        yield "MISSING", "faiss", "not installed; k-NN needs it", EVERYTHING
    else:
        yield "ok", "faiss", packages[0] if packages else module.__version__, ""
        setting = os.environ.get(blas_kernel.VARIABLE)
        chosen = f", with {blas_kernel.VARIABLE}={setting}" if setting is not None else ""
        yield "ok", "openblas", f"FAISS's OpenBLAS uses its {blas_kernel.in_use() or 'unknown'} kernel{chosen}", ""


def mmcv() -> Iterator[Line]:
    # The code that will run the operators determines which they are; without mmcv nothing is imported.
    package = next((name for name in ("onedl-mmcv", "mmcv", "mmcv-lite") if installed(name)), None)
    if package is None or importlib.util.find_spec("mmcv") is None:
        fix = "use Python 3.12, this one has no wheels" if is_lacking("mmcv") else EVERYTHING
        yield "missing", "mmcv", "not installed; dense tasks need it", fix
        return
    from downstream.models.operators import install_operators, quiet_libraries

    version = f"{package} {installed(package)}"
    try:
        with quiet_libraries():
            source = install_operators()
    except Exception as error:  # binary packages fail with anything from ImportError to SystemError
        text = f"{version}: its compiled operators cannot be loaded (built for another torch?): {_reason(error)}"
        fix = "pip cache remove onedl_mmcv; pip install --force-reinstall --no-deps --no-cache-dir onedl-mmcv"
        yield "missing", "mmcv", text, fix
        return
    texts = {
        "compiled": "its compiled nms and roi_align run",
        "torchvision": "without compiled operators; torchvision's nms and roi_align run instead",
    }
    yield "ok", "mmcv", f"{version}: {texts[source]}", ""


def optional() -> Iterator[Line]:
    for name, (package, _, feature) in OPTIONAL.items():  # not imported, because that takes seconds and prints
        if name == "mmcv":  # examined above
            continue
        if version := installed(package) or (importlib.util.find_spec(name) and f"{name}, from another package"):
            yield "ok", package, version, ""
        else:
            fix = "use Python 3.12, this one has no wheels" if is_lacking(name) else install_command(name)
            yield "note", package, f"not installed; for {feature}", fix
