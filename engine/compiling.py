"""torch.compile for transformer blocks, in place: no module and no tensor gets another name, so states and exports are
those of the network as it was.

Blocks are compiled one by one. They share their code, so all blocks of a network cost what one costs. Random numbers
are those of the network uncompiled (drop path). Rounding is not: compiled kernels join operators, in half precision
without the rounding between them.
"""

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

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
