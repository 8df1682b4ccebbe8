"""How networks compute: autocast, exact float32, the fastest attention for a precision, and torch.compile.

torch.compile works on transformer blocks in place: modules and tensors keep their names, so states and exports do not
change. Blocks are compiled one by one; they share their code, so compiling all blocks of a network costs as much as
compiling one. Random numbers (drop path) are the same as without compilation. Rounding is not: compiled kernels fuse
operators, in half precision without rounding in between.
"""

import os
import shutil
import sysconfig
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.errors import option

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def autocast(device: str, precision: str) -> AbstractContextManager[Any]:
    """A context for forward passes on `device` in `precision`; it changes nothing for float32."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(torch.device(device).type, DTYPES[precision])


def keep_float32_exact() -> None:
    """Turn TF32 off for the whole process, so that GPUs compute float32 in full precision.

    By default torch rounds the inputs of convolutions to TF32's 10 bits, but not those of matrix products.
    """
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def fit_attention(network: nn.Module, device: str, precision: str) -> None:
    """Turn timm's fused attention off on a CPU in half precision: two matrix products around a softmax are faster.

    The fused kernel makes little use of a CPU's half-precision units: its forward and backward passes take twice as
    long at 197 tokens, 5 times at 65, 8 times at 17 (docs/log.md). The price is the memory of the attention weights,
    B x heads x tokens squared. On other devices and in float32 the fused kernel stays.
    """
    if torch.device(device).type != "cpu" or precision not in DTYPES:
        return
    for module in network.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False


def to_float32(tensor: Tensor) -> Tensor:
    """The tensor in float32 if its type is narrower: half precision is too coarse for a loss."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def l2_normalize(vectors: Tensor) -> Tensor:
    """Vectors (..., d) normalised to length one, in float32 or wider."""
    return F.normalize(to_float32(vectors), dim=-1)


COMPILERS = {"cpu": ("CXX", ("g++", "clang++", "c++")), "cuda": ("CC", ("gcc", "clang", "cc"))}
# Compiled variants of one block's code: drop path rates, shapes, with and without gradient. torch's default of 8 is too
# few.
MAX_VARIANTS = 64


def compile_blocks(network: nn.Module, device: str, backend: str = "inductor") -> int:
    """Compile every transformer block of `network`, a module with an `attn` and an `mlp`; returns their number.

    A block is compiled at its first call, which takes a minute or two. ValueError if this machine cannot compile.
    """
    check_compiler(device)
    torch._dynamo.config.recompile_limit = max(MAX_VARIANTS, torch._dynamo.config.recompile_limit)
    blocks = [module for module in network.modules() if {"attn", "mlp"} <= dict(module.named_children()).keys()]
    options = {"fallback_random": True} if backend == "inductor" else None
    for block in blocks:
        block.compile(backend=backend, options=options)
    return len(blocks)


def check_compiler(device: str) -> None:
    """Check that torch.compile has what it needs for `device`. ValueError that names what is missing."""
    kind = torch.device(device).type
    variable, names = COMPILERS.get(kind, COMPILERS["cpu"])
    if not any(map(shutil.which, [os.environ[variable]] if os.environ.get(variable) else names)):
        raise ValueError(
            f"{option('compiled')} needs a compiler, but there is no {', '.join(names[:-1])} or {names[-1]}: install "
            f"one (apt-get install g++), name it in {variable}, or leave out {option('compiled')}"
        )
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if not headers.is_file():
        raise ValueError(
            f"{option('compiled')} needs Python's headers, but there is no {headers}: install them (apt-get install "
            f"python3-dev), or leave out {option('compiled')}"
        )
    if kind == "cuda" and find_spec("triton") is None:
        raise ValueError(
            f"{option('compiled')} needs Triton on a GPU: pip install triton, or leave out {option('compiled')}"
        )
