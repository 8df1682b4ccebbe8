"""What a training step costs over the work it cannot avoid: `python tests/benchmarks/pretraining.py` (an hour).

step   one update of the trainer's (forward passes, loss, backward, clipping, optimiser, teacher), ViT-S/16 at 224 px, a
       batch of 16 made of one noise image's views, no loading.
bare   the transformer blocks, linear layers, convolutions and products with prototypes or words which that step calls,
       called again on tensors of the same shapes, with a backward pass where the step has one; no loss, no masks, no
       optimiser, no teacher's move.
limit  matrix products a second at a ViT-S's block shapes, forward and both gradients, measured before and after.
formula the step's FLOPs over those of the official code's step, by arithmetic (official_steps.py).

FLOPs: torch's counter over one step; fused attention counts as the four (backward: eight) products that it stands for.
BEiT's and CAE's codebook is fitted to a few noise images; rows "dall-e" have that encoder instead, untrained.
Rounds of step and bare alternate after one of each that is not counted, as the heap grows in it; medians of CPU seconds
of all threads, which other work on the machine changes little: with OMP_NUM_THREADS=1 the time on an idle core. Every
method runs in a process of its own, for its peak memory. --profile prints where the rest goes.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from measuring import cpu_seconds, peak
from official_steps import official_flops
from PIL import Image
from timm.models import beit, eva, vision_transformer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.data import default_collate
from torch.utils.flop_counter import FlopCounterMode

from engine.extensions import load_extension
from engine.machine import keep_memory
from engine.precision import autocast
from pretrain.loop.trainer import build
from pretrain.loop.updates import Updates
from pretrain.method import Method, TrainProgress
from pretrain.methods.cae import RegressorBlock
from pretrain.parts.tokenizers import DalleEncoder
from pretrain.recipe import VIT_S

# Row of the table -> method, and settings that differ from those of its first recipe for 224 px.
ROWS = {
    "moca": ("moca", {}),
    "moca x1": ("moca", {"mask_ratios": (0.65,), "decoder_mask_ratios": (0.45,)}),
    "moca x1 whole": ("moca", {"mask_ratios": (0.65,), "decoder_mask_ratios": (0.0,)}),  # all hidden patches decoded
    "extrema x1": ("extrema", {"masks": 1}),
    "extrema x5": ("extrema", {"masks": 5}),
    "mae": ("mae", {}),
    "dino 2 crops": ("dino", {"local_crops": 0}),
    "ibot": ("ibot", {}),
    "msn": ("msn", {}),
    "mocov3": ("mocov3", {}),
    "byol": ("byol", {}),
    "supervised": ("supervised", {}),
    "beit": ("beit", {}),
    "beit dall-e": ("beit", {}),
    "cae": ("cae", {}),
    "cae dall-e": ("cae", {}),
    "data2vec": ("data2vec", {}),
    "maskfeat": ("maskfeat", {}),
    "can": ("can", {}),
    "lejepa": ("lejepa", {}),
    "dinov2": ("dinov2", {}),
    "ijepa": ("ijepa", {}),
    "capi": ("capi", {"drop_path": 0.0}),
    "nepa": ("nepa", {}),
    "simdino": ("simdino", {}),
    "simdinov2": ("simdinov2", {}),
}
FITTED_ON = 64  # images: 12544 patches, as k-means needs one for each of 8192 codes
DALLE = dict(width=256, codes=8192, blocks=2)  # openai/DALL-E dall_e/encoder.py:13-25
BLOCK_SHAPES = ((384, 1152), (384, 384), (384, 1536), (1536, 384))
TOKENS = 16 * 197
BLOCKS = (vision_transformer.Block, beit.Block, eva.EvaBlock, RegressorBlock)
WHOLE = (*BLOCKS, nn.Linear, nn.Conv2d)  # what is called again; a block counts as one
PRODUCTS = (F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__)  # outside of them


@dataclass(frozen=True, kw_only=True)
class TensorFormat:
    """Shape, strides, dtype and need of a gradient of a recorded tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorFormat":
        needs = torch.is_grad_enabled() and tensor.requires_grad
        return cls(shape=tensor.shape, stride=tensor.stride(), dtype=tensor.dtype, needs_gradient=needs)

    def make(self) -> Tensor:
        is_expanded = 0 in self.stride  # such as copies of a mask token, which are written out
        tensor = torch.empty(self.shape) if is_expanded else torch.empty_strided(self.shape, self.stride)
        tensor = tensor.to(self.dtype).normal_()
        return tensor.requires_grad_(self.needs_gradient)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A recorded call of a module or product: its inputs, and whether it had a backward pass."""

    work: Callable[..., Tensor]
    inputs: tuple[TensorFormat, ...]
    named: dict[str, TensorFormat | bool]  # a block's inputs by keyword; NEPA's is_causal is a bool
    backward: bool
    autocast: bool  # what a method computes in float32 all the same is also called so again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--precision", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone:
        keep_memory()
        measure(arguments.rows[0], arguments.precision[0], arguments)
        return
    print(f"load average {os.getloadavg()[0]:.2f}, {torch.get_num_threads()} threads, batch {arguments.batch}")
    print(
        f"{'step':13} {'dtype':9} {'step s':>7} {'bare s':>7} {'ratio':>6} {'img/s':>6} {'TFLOP':>6} {'limit':>6} "
        f"{'share':>6} {'MB/image':>9} {'formula':>7}"
    )
    for row in arguments.rows:
        for precision in arguments.precision:
            profile_option = ["--profile"] if arguments.profile else []
            subprocess.run(
                [
                    sys.executable,
                    __file__,
                    "--alone",
                    "--rows",
                    row,
                    "--precision",
                    precision,
                    "--rounds",
                    str(arguments.rounds),
                    "--batch",
                    str(arguments.batch),
                    *profile_option,
                ],
                check=True,
            )


def measure(row: str, precision: str, arguments: argparse.Namespace) -> None:
    """Print one line of the table."""
    name, settings = ROWS[row]
    module = load_extension("methods", name)
    recipe = next(recipe for recipe in module.RECIPES.values() if recipe.spec.image_size == 224)
    spec = replace(recipe.spec, **{size: getattr(VIT_S, size) for size in ("width", "depth", "heads", "mlp_hidden")})
    recipe = replace(recipe, spec=spec, batch=arguments.batch, settings=replace(recipe.settings, **settings))
    method = build(module, recipe, 0)
    if "dall-e" in row:
        method.tokenizer = DalleEncoder(**DALLE)
    elif method.fitted_on:
        method.fit([views_of(method, FITTED_ON)])
    views = views_of(method, arguments.batch)
    updates = Updates(method, recipe, precision=precision)
    progress = TrainProgress(step=2000, steps_per_epoch=1000, epochs=100)
    before = peak()
    with FlopCounterMode(display=False, custom_mapping=ATTENTION_FLOPS) as flops, Recording(method) as recording:
        updates.run([views], progress)
    memory = (peak() - before) / 2**20 / arguments.batch
    updates.run([views], progress)
    replay(stacks_of(recording.calls), precision)
    if arguments.profile:
        profile(lambda: updates.run([views], progress))
    limits, steps, bares = [gemm_limit(precision)], [], []
    for _ in range(arguments.rounds):
        steps.append(cpu_seconds(lambda: updates.run([views], progress)))
        bares.append(replay(stacks_of(recording.calls), precision))
    limits.append(gemm_limit(precision))
    step, bare, limit = statistics.median(steps), statistics.median(bares), statistics.mean(limits)
    count, official = flops.get_total_flops(), official_flops(row)
    formula = f"{count / arguments.batch / official:7.3f}" if official else f"{'-':>7}"
    print(
        f"{row:13} {precision:9} {step:7.3f} {bare:7.3f} {step / bare:6.3f} {arguments.batch / step:6.2f} "
        f"{count / 1e12:6.3f} {limit / 1e9:6.0f} {count / limit / step:6.2f} {memory:9.1f} {formula}",
        flush=True,
    )


def views_of(method: Method, batch: int) -> dict[str, Tensor]:
    """A batch of the method's views of one noise image, with labels where the method needs them."""
    image = Image.fromarray(np.random.RandomState(0).randint(0, 256, (256, 256, 3), np.uint8))
    make = method.views()
    labels = {"label": torch.arange(batch)} if method.needs_labels else {}
    return default_collate([make(image) for _ in range(batch)]) | labels


class Recording(TorchFunctionMode):
    """Records the outermost blocks, linear layers, convolutions and products called while it is active."""

    def __init__(self, method: nn.Module) -> None:
        super().__init__()
        self.method, self.calls, self.depth = method, [], 0

    def __enter__(self) -> "Recording":
        modules = [m for m in self.method.modules() if isinstance(m, WHOLE)]
        self.handles = [m.register_forward_pre_hook(self.enter, with_kwargs=True) for m in modules]
        self.handles += [m.register_forward_hook(self.leave) for m in modules]
        return super().__enter__()

    def enter(self, module: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        if self.depth == 0:
            backward = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
            likes = [TensorFormat.of(tensor) for tensor in inputs]
            likes[0] = replace(likes[0], needs_gradient=backward and not isinstance(module, nn.Conv2d))  # of images: no
            others = {name: TensorFormat.of(it) if isinstance(it, Tensor) else it for name, it in named.items()}
            self.note(module, likes, others, backward)
        self.depth += 1

    def note(
        self, work: Callable, inputs: list[TensorFormat], named: dict[str, TensorFormat | bool], backward: bool
    ) -> None:
        autocast = torch.is_autocast_enabled("cpu")
        self.calls.append(Call(work=work, inputs=tuple(inputs), named=named, backward=backward, autocast=autocast))

    def leave(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.depth -= 1

    def __torch_function__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        if func in PRODUCTS and self.depth == 0:
            inputs = [TensorFormat.of(tensor) for tensor in args[:2]]
            self.note(func, inputs, {}, any(tensor.needs_gradient for tensor in inputs))
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for handle in self.handles:
            handle.remove()


def stacks_of(calls: list[Call]) -> list[list[Call]]:
    """Group consecutive blocks of one shape, which go forward together and then backward."""
    stacks: list[list[Call]] = []
    for call in calls:
        if stacks and is_stacked(stacks[-1][-1], call):
            stacks[-1].append(call)
        else:
            stacks.append([call])
    return stacks


def is_stacked(before: Call, after: Call) -> bool:
    same = replace(before, work=after.work) == after and type(before.work) is type(after.work)
    return same and isinstance(after.work, BLOCKS)


def replay(stacks: list[list[Call]], precision: str) -> float:
    """Seconds of repeating all calls on noise. As in a step, gradients begin as None, and images need none."""
    for stack in stacks:
        for call in stack:
            if isinstance(call.work, nn.Module):
                call.work.zero_grad(set_to_none=True)
    inputs_of_stacks = [inputs_of(stack[0]) for stack in stacks]
    started = time.process_time()
    for stack, (inputs, named) in zip(stacks, inputs_of_stacks, strict=True):
        kind = precision if stack[0].autocast else "float32"
        with autocast("cpu", kind), nullcontext() if stack[0].backward else torch.no_grad():
            output = stack[0].work(*inputs, **named)
            for call in stack[1:]:
                output = call.work(output, *inputs[1:], **named)
        if stack[0].backward:
            output.backward(torch.ones_like(output))
    return time.process_time() - started


def inputs_of(call: Call) -> tuple[list[Tensor], dict[str, Tensor]]:
    named = {name: it.make() if isinstance(it, TensorFormat) else it for name, it in call.named.items()}
    return [tensor_format.make() for tensor_format in call.inputs], named


def attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *rest: object, **more: object) -> int:
    """FLOPs of the two products of (B, H, N, d) queries, keys and values."""
    batch, heads, rows, width = query
    return 2 * batch * heads * rows * key[2] * (width + value[3])


def attention_backward_flops(gradient: torch.Size, *rest: object, **more: object) -> int:
    return 2 * attention_flops(*rest[:3])


ATTENTION_FLOPS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
}


def gemm_limit(precision: str) -> float:
    """FLOP/s of matrix products at block shapes."""
    dtype = getattr(torch, precision)
    operations, spent = 0, 0.0
    for inputs, outputs in BLOCK_SHAPES:
        x, w = torch.randn(TOKENS, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
        g = torch.randn(TOKENS, outputs).to(dtype)
        for product in (lambda x=x, w=w: x @ w.T, lambda g=g, w=w: g @ w, lambda g=g, x=x: g.T @ x):
            spent += statistics.median(cpu_seconds(product) for _ in range(7))
            operations += 2 * TOKENS * inputs * outputs
    return operations / spent


def profile(step: Callable[[], object]) -> None:
    """Print a table of operators by their own time."""
    with torch.profiler.profile() as profiler:
        step()
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=40))


if __name__ == "__main__":
    main()
