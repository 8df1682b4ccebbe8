"""Speed on a GPU: `python tests/benchmarks/gpu.py` (under 8 minutes on one H100, a table a part, as JSON in --out).

A bare machine needs a driver for CUDA 13 and these wheels, for Python 3.12 on x86-64 Linux:
    torch 2.11 and torchvision 0.26 for CUDA (PyPI's own, +cu130, with the nvidia-* and triton wheels that they name),
    timm 1.0.31, safetensors, huggingface-hub, numpy 2.2, pillow, msgspec, scipy, scikit-learn; faiss-gpu 1.15 for k-NN;
    and gcc with Python's headers for --compile.

extraction   frozen ViT-S/16 and ViT-B/16 at 224 px, tensors in pinned memory to rows in memory; no decoding.
pretraining  one update of every method's 224 px recipe (views of one noise image, loaded before) on ViT-S/16 and
             ViT-B/16: forward passes, loss, backward, clipping, optimiser, teacher.
official     the same step of the official code of MAE and DINO, of which --official PATH holds clones `mae` and `dino`.

limit  matrix products a second at block shapes, forward and both gradients, measured in the same process, TFLOP/s.
MFU    floating-point operations, as torch's counter counts them, by time, as a share of that limit; and of the peak of
       the GPU's data sheet, which --peak TFLOPS gives.
GiB    peak of the GPU's tensors in this row; on a CPU the process's, which only rises from row to row.
Rows with --compile come last, since each compiles for up to a minute; what no longer fits --minutes is left out, and
said so: measure it with a second `--compile yes --methods ...`. `--device cpu --smoke` runs everything at a tiny
size, to show that it works.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pretraining import views_of
from torch import Tensor

from checkpoints.backbone import Backbone
from checkpoints.export import ViTExport
from checkpoints.spec import Preparation, ViTSpec
from checkpoints.vit import ViT
from engine.extensions import load_extension, source_files
from engine.precision import autocast, keep_float32_exact
from engine.work import count_flops
from pretrain.loop.records import peak_memory
from pretrain.loop.trainer import build
from pretrain.loop.updates import Updates
from pretrain.method import TrainProgress
from pretrain.recipe import VIT_B, VIT_S, VIT_SMOKE
from probes.features.kinds import FeatureKind, feature_rows

SIZES = {"S": VIT_S, "B": VIT_B}
BATCH = {"S": 128, "B": 64}  # images of an update that every method fits on 80 GB
EXTRACTED = {"S": 512, "B": 256}  # images of a forward pass
OFFICIAL = {"mae": "main_pretrain.py", "dino": "main_dino.py"}  # a file that shows that a clone is there
COLUMNS = ("part", "row", "ViT", "compiled", "img/s", "GFLOP/img", "TFLOP/s", "limit", "MFU", "of peak", "GiB")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table: what a process measures."""

    part: str  # extraction, pretraining or official
    name: str  # method, or what is extracted
    size: str  # S or B
    compiled: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--methods", nargs="+", default=list(source_files("methods")))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=10, help="timed, after three that are not")
    parser.add_argument("--compile", choices=("no", "yes", "both"), default="both")
    parser.add_argument("--official", type=Path, help="folder with the clones mae and dino; their code is run")
    parser.add_argument("--peak", type=float, help="TFLOP/s of the GPU's data sheet, without sparsity")
    parser.add_argument("--minutes", type=float, default=7.5, help="rows that would start later are left out")
    parser.add_argument("--smoke", action="store_true", help="tiny networks and batches: a check that it runs")
    parser.add_argument("--out", type=Path, help="file for the rows as JSON lines")
    asked = parser.parse_args()
    keep_float32_exact()
    show_table(asked)


def show_table(asked: argparse.Namespace) -> None:
    """Measure and print row by row; those without --compile first, of all sizes and parts."""
    started, left_out = time.monotonic(), []
    name = torch.cuda.get_device_name(asked.device) if asked.device != "cpu" else "CPU"
    print(f"{name}, torch {torch.__version__}, {asked.precision}{', smoke' if asked.smoke else ''}")
    print("{:>11} {:>10} {:>4} {:>8} {:>9} {:>9} {:>8} {:>6} {:>6} {:>7} {:>6}".format(*COLUMNS))
    for row in rows_of(asked):
        if time.monotonic() - started > asked.minutes * 60:
            left_out.append(row)
            continue
        found = {**vars(row), **attempted(row, asked)}
        if asked.out:
            with asked.out.open("a") as file:
                file.write(json.dumps(found) + "\n")
        print(line_of(found, asked.peak), flush=True)
    if left_out:
        print(f"left out after {asked.minutes} minutes: {len(left_out)} rows, the first {left_out[0]}")


def rows_of(asked: argparse.Namespace) -> list[Row]:
    compiled = {"no": [False], "yes": [True], "both": [False, True]}[asked.compile]
    found = []
    for each in compiled:
        for size in asked.sizes:
            if "extraction" in asked.parts:
                found.append(Row(part="extraction", name="features", size=size, compiled=each))
            if "pretraining" in asked.parts:
                found += [Row(part="pretraining", name=name, size=size, compiled=each) for name in asked.methods]
            if "official" in asked.parts and asked.official and not each:
                found += [Row(part="official", name=name, size=size) for name in OFFICIAL]
    return found


def attempted(row: Row, asked: argparse.Namespace) -> dict[str, Any]:
    """What was measured, or `error`; with the memory of the row before given back."""
    gc.collect()
    torch.compiler.reset()
    if asked.device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        return measure(row, asked)
    except Exception as error:  # out of memory, code of a clone that does not fit: the other rows go on
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def line_of(found: dict[str, Any], peak: float | None) -> str:
    head = f"{found['part']:>11} {found['name']:>10} {found['size']:>4} {'yes' if found['compiled'] else 'no':>8} "
    if "error" in found:
        return head + f"failed: {found['error'][:90]}"
    rate, limit = found["images_per_second"], found["limit"] / 1e12
    reached = rate * found["operations"] / 1e12
    of_peak = f"{reached / peak:7.3f}" if peak else f"{'':7}"
    return head + (
        f"{rate:9.1f} {found['operations'] / 1e9:9.2f} {reached:8.2f} {limit:6.1f} {reached / limit:6.3f} {of_peak} "
        f"{found['gib']:6.2f}"
    )


def measure(row: Row, asked: argparse.Namespace) -> dict[str, float]:
    """images_per_second, operations of an image, limit (both in FLOP), gib of the GPU or the process."""
    spec, batch = size_of(row, asked)
    work = PARTS[row.part](row, spec, batch, asked)
    before = gemm_limit(spec, batch, asked)
    operations = count_flops(work)[1]
    for _ in range(3):  # compiles, chooses kernels, fills the allocator
        work()
    times = [seconds(work, asked.device) for _ in range(asked.steps)]
    memory = peak_memory(asked.device)
    return {
        "images_per_second": batch / statistics.median(times),
        "operations": operations / batch,
        "limit": statistics.mean([before, gemm_limit(spec, batch, asked)]),
        "gib": memory.get("gpu_memory_gib", memory["memory_gib"]),
        "seconds": [round(each, 5) for each in times],
    }


def size_of(row: Row, asked: argparse.Namespace) -> tuple[ViTSpec, int]:
    """The network that a row is about, and its batch."""
    if asked.smoke:
        return VIT_SMOKE, 8
    return SIZES[row.size], (EXTRACTED if row.part == "extraction" else BATCH)[row.size]


def extraction(row: Row, spec: ViTSpec, batch: int, asked: argparse.Namespace) -> Callable[[], object]:
    """Pixels of uint8 in pinned memory -> two kinds of rows in NumPy arrays."""
    torch.manual_seed(0)
    backbone = Backbone(ViTExport.from_vit(ViT(spec), Preparation()), asked.device, asked.precision, row.compiled)
    pixels = torch.randint(0, 256, (batch, 3, spec.image_size, spec.image_size), dtype=torch.uint8)
    pixels = pixels if asked.device == "cpu" else pixels.pin_memory()
    kinds = [FeatureKind("cls"), FeatureKind("avg")]
    return lambda: feature_rows(backbone, backbone.prepare(pixels.to(asked.device, non_blocking=True)), kinds)


def pretraining(row: Row, spec: ViTSpec, batch: int, asked: argparse.Namespace) -> Callable[[], object]:
    """An update of the method on views that are on the device already."""
    module = load_extension("methods", row.name)
    recipe = module.RECIPES["smoke"] if asked.smoke else at_224(module.RECIPES, spec)
    method = build(module, replace(recipe, batch=batch), 0)
    views = {name: each.to(asked.device) for name, each in views_of(method, batch).items()}
    if method.needs_labels:
        views["label"] = torch.arange(batch, device=asked.device) % recipe.settings.classes
    updates = Updates(method, recipe, device=asked.device, precision=asked.precision, compiled=row.compiled)
    progress = TrainProgress(step=2000, steps_per_epoch=1000, epochs=100)
    return lambda: updates.run([views], progress)


def at_224(recipes: dict[str, Any], spec: ViTSpec) -> Any:
    """The method's first recipe for 224 px, on a network of this size."""
    recipe = next(recipe for recipe in recipes.values() if recipe.spec.image_size == 224)
    sizes = {name: getattr(spec, name) for name in ("width", "depth", "heads", "mlp_hidden")}
    return replace(recipe, spec=replace(recipe.spec, **sizes))


def official(row: Row, spec: ViTSpec, batch: int, asked: argparse.Namespace) -> Callable[[], object]:
    """The step of the clone in --official, by its own modules: forward passes, loss, backward, AdamW, EMA."""
    clone = asked.official.resolve() / row.name
    if not (clone / OFFICIAL[row.name]).is_file():
        raise ValueError(f"{clone} holds no {OFFICIAL[row.name]}: clone facebookresearch/{row.name} there")
    sys.path.insert(0, str(clone))
    return {"mae": official_mae, "dino": official_dino}[row.name](spec, batch, asked)


def official_mae(spec: ViTSpec, batch: int, asked: argparse.Namespace) -> Callable[[], object]:
    """engine_pretrain.py:20-69 with the settings of PRETRAIN.md; its decoder of 512 x 8."""
    from models_mae import MaskedAutoencoderViT

    model = MaskedAutoencoderViT(
        img_size=spec.image_size,
        patch_size=spec.patch_size,
        embed_dim=spec.width,
        depth=spec.depth,
        num_heads=spec.heads,
        norm_pix_loss=True,
    ).to(asked.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.05)
    images = torch.randn(batch, 3, spec.image_size, spec.image_size, device=asked.device)

    def step() -> None:
        with autocast(asked.device, asked.precision):
            loss = model(images, mask_ratio=0.75)[0]
        loss.item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def official_dino(spec: ViTSpec, batch: int, asked: argparse.Namespace) -> Callable[[], object]:
    """main_dino.py:303-353 with its defaults: two crops of 224 px and eight of 96, 65536 outputs."""
    import utils
    from main_dino import DINOLoss
    from vision_transformer import DINOHead, VisionTransformer

    def network(drop_path: float) -> torch.nn.Module:
        vit = VisionTransformer(
            patch_size=spec.patch_size,
            embed_dim=spec.width,
            depth=spec.depth,
            num_heads=spec.heads,
            mlp_ratio=4,
            qkv_bias=True,
            drop_path_rate=drop_path,
        )
        return utils.MultiCropWrapper(vit, DINOHead(spec.width, 65536)).to(asked.device)

    student, teacher = network(0.1), network(0.0)
    teacher.load_state_dict(student.state_dict())
    loss_of = DINOLoss(65536, 10, 0.04, 0.04, 0, 100).to(asked.device)
    optimizer = torch.optim.AdamW(utils.get_params_groups(student), lr=1e-4)
    sides = [spec.image_size] * 2 + [spec.image_size * 3 // 7] * 8
    crops = [torch.randn(batch, 3, side, side, device=asked.device) for side in sides]

    def step() -> None:
        with autocast(asked.device, asked.precision):
            loss = loss_of(student(crops), teacher(crops[:2]), 1)
        loss.item()
        optimizer.zero_grad()
        loss.backward()
        utils.clip_gradients(student, 3.0)
        optimizer.step()
        with torch.no_grad():
            for ours, its in zip(student.parameters(), teacher.parameters(), strict=True):
                its.data.mul_(0.996).add_(0.004 * ours.detach().data)

    start_alone(asked.device)  # its loss averages the centre over processes
    return step


def start_alone(device: str) -> None:
    """A process group of this process."""
    backend = "gloo" if device == "cpu" else "nccl"
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)


PARTS = {"extraction": extraction, "pretraining": pretraining, "official": official}


def gemm_limit(spec: ViTSpec, batch: int, asked: argparse.Namespace) -> float:
    """FLOP a second of the four linear layers of a block on the tokens of a batch, forward and both gradients."""
    dtype, tokens = getattr(torch, asked.precision), batch * (spec.grid[0] * spec.grid[1] + 1)
    operations, spent = 0, 0.0
    for inputs, outputs in ((1, 3), (1, 1), (1, 4), (4, 1)):
        shape = (inputs * spec.width, outputs * spec.width)
        x, g, w = (noise(*sides, asked.device, dtype) for sides in ((tokens, shape[0]), (tokens, shape[1]), shape))
        for product in (lambda x=x, w=w: x @ w, lambda g=g, w=w: g @ w.T, lambda g=g, x=x: x.T @ g):
            product()
            spent += statistics.median(seconds(product, asked.device) for _ in range(7))
            operations += 2 * tokens * shape[0] * shape[1]
    return operations / spent


def noise(rows: int, columns: int, device: str, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, columns, device=device, dtype=dtype)


def seconds(work: Callable[[], object], device: str) -> float:
    """Wall time until the device has done it."""
    wait = torch.cuda.synchronize if device != "cpu" else lambda: None
    wait()
    started = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
