"""How networks compute: autocast, exact float32, the fastest attention for a precision, and torch.compile.

torch.compile works on transformer blocks in place: no module and no tensor gets another name, so states and exports are
those of the network as it was. Blocks are compiled one by one. They share their code, so all blocks of a network cost
what one costs. Random numbers are those of the network uncompiled (drop path). Rounding is not: compiled kernels join
operators, in half precision without the rounding between them.
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

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def autocast(device: str, precision: str) -> AbstractContextManager[Any]:
    """A context for forward passes on `device` in `precision`; it changes nothing for float32."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(torch.device(device).type, DTYPES[precision])


def keep_float32_exact() -> None:
    """Let GPUs compute what is in float32 in float32, for the whole process.

    torch rounds the inputs of convolutions to the 10 bits of TF32 unless told otherwise, those of matrix products not.
    """
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def fit_attention(network: nn.Module, device: str, precision: str) -> None:
    """Let timm's attention compute two matrix products around a softmax, on a CPU in half precision.

    The fused kernel that timm takes by default makes little use of a CPU's half-precision units: its two passes take
    twice as long at 197 tokens, 5 times at 65, 8 times at 17 (docs/log.md). The price is the memory of the weights,
    B x heads x tokens squared. Elsewhere the fused kernel stays.
    """
    if torch.device(device).type != "cpu" or precision not in DTYPES:
        return
    for module in network.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False


def to_float32(tensor: Tensor) -> Tensor:
    """In float32, or in a wider type that it has: half precision is too coarse for a loss."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def l2_normalize(vectors: Tensor) -> Tensor:
    """Vectors (..., d) of length one, in float32 at least."""
    return F.normalize(to_float32(vectors), dim=-1)


COMPILERS = {"cpu": ("CXX", ("g++", "clang++", "c++")), "cuda": ("CC", ("gcc", "clang", "cc"))}
VARIANTS = 64  # of one block's code: its rate of drop path, shapes, with gradient or without; torch's 8 are too few


def compile_blocks(network: nn.Module, device: str, backend: str = "inductor") -> int:
    """Compile every transformer block in `network`, a module with an `attn` and an `mlp`; return how many there are.

    A block is compiled at its first call, which takes a minute or two. ValueError where torch cannot compile here.
    """
    check_compiler(device)
    torch._dynamo.config.recompile_limit = max(VARIANTS, torch._dynamo.config.recompile_limit)
    blocks = [module for module in network.modules() if {"attn", "mlp"} <= dict(module.named_children()).keys()]
    options = {"fallback_random": True} if backend == "inductor" else None
    for block in blocks:
        block.compile(backend=backend, options=options)
    return len(blocks)


def check_compiler(device: str) -> None:
    """ValueError that names what torch.compile lacks for `device`."""
    kind = torch.device(device).type
    variable, names = COMPILERS.get(kind, COMPILERS["cpu"])
    if not any(map(shutil.which, [os.environ[variable]] if os.environ.get(variable) else names)):
        raise ValueError(
            f"--compile needs a compiler, and there is no {', '.join(names[:-1])} or {names[-1]}: install one "
            f"(apt-get install g++), name it in {variable}, or leave out --compile"
        )
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if not headers.is_file():
        raise ValueError(
            f"--compile needs Python's headers, and there is no {headers}: install them (apt-get install python3-dev), "
            "or leave out --compile"
        )
    if kind == "cuda" and find_spec("triton") is None:
        raise ValueError("--compile needs Triton on a GPU: pip install triton, or leave out --compile")
