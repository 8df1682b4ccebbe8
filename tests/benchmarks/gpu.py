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
MFU    FLOPs of torch's counter per second, as a share of that limit; and of the peak in the GPU's data sheet, given
       by --peak TFLOPS.
GiB    peak of the GPU's tensors in this row; on a CPU the process's, which only rises from row to row.
Rows with --compile come last, since each compiles for up to a minute; rows beyond --minutes are left out and named:
measure them with a second `--compile yes --methods ...`. `--device cpu --smoke` runs everything at a tiny size, to show
that it works.
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
OFFICIAL = {"mae": "main_pretrain.py", "dino": "main_dino.py"}  # a file that every clone has
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
    arguments = parser.parse_args()
    keep_float32_exact()
    show_table(arguments)


def show_table(arguments: argparse.Namespace) -> None:
    """Measure and print each row; those without --compile come first."""
    started, left_out = time.monotonic(), []
    name = torch.cuda.get_device_name(arguments.device) if arguments.device != "cpu" else "CPU"
    print(f"{name}, torch {torch.__version__}, {arguments.precision}{', smoke' if arguments.smoke else ''}")
    print("{:>11} {:>10} {:>4} {:>8} {:>9} {:>9} {:>8} {:>6} {:>6} {:>7} {:>6}".format(*COLUMNS))
    for row in rows_of(arguments):
        if time.monotonic() - started > arguments.minutes * 60:
            left_out.append(row)
            continue
        result = {**vars(row), **measure_or_error(row, arguments)}
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(json.dumps(result) + "\n")
        print(line_of(result, arguments.peak), flush=True)
    if left_out:
        print(f"left out after {arguments.minutes} minutes: {len(left_out)} rows, the first {left_out[0]}")


def rows_of(arguments: argparse.Namespace) -> list[Row]:
    compiled = {"no": [False], "yes": [True], "both": [False, True]}[arguments.compile]
    rows = []
    for is_compiled in compiled:
        for size in arguments.sizes:
            if "extraction" in arguments.parts:
                rows.append(Row(part="extraction", name="features", size=size, compiled=is_compiled))
            if "pretraining" in arguments.parts:
                rows += [
                    Row(part="pretraining", name=name, size=size, compiled=is_compiled) for name in arguments.methods
                ]
            if "official" in arguments.parts and arguments.official and not is_compiled:
                rows += [Row(part="official", name=name, size=size) for name in OFFICIAL]
    return rows


def measure_or_error(row: Row, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measurements of a row, or its `error`. Frees the memory of the row before."""
    gc.collect()
    torch.compiler.reset()
    if arguments.device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        return measure(row, arguments)
    except Exception as error:  # out of memory, code of a clone that does not fit: the other rows go on
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def line_of(result: dict[str, Any], peak: float | None) -> str:
    head = f"{result['part']:>11} {result['name']:>10} {result['size']:>4} {'yes' if result['compiled'] else 'no':>8} "
    if "error" in result:
        return head + f"failed: {result['error'][:90]}"
    rate, limit = result["images_per_second"], result["limit"] / 1e12
    reached = rate * result["operations"] / 1e12
    of_peak = f"{reached / peak:7.3f}" if peak else f"{'':7}"
    return head + (
        f"{rate:9.1f} {result['operations'] / 1e9:9.2f} {reached:8.2f} {limit:6.1f} {reached / limit:6.3f} {of_peak} "
        f"{result['gib']:6.2f}"
    )


def measure(row: Row, arguments: argparse.Namespace) -> dict[str, float]:
    """images_per_second, operations (FLOP per image), limit (FLOP/s), gib (of the GPU or the process)."""
    spec, batch = size_of(row, arguments)
    work = PARTS[row.part](row, spec, batch, arguments)
    before = gemm_limit(spec, batch, arguments)
    operations = count_flops(work)[1]
    for _ in range(3):  # compiles, chooses kernels, fills the allocator
        work()
    times = [seconds(work, arguments.device) for _ in range(arguments.steps)]
    memory = peak_memory(arguments.device)
    return {
        "images_per_second": batch / statistics.median(times),
        "operations": operations / batch,
        "limit": statistics.mean([before, gemm_limit(spec, batch, arguments)]),
        "gib": memory.get("gpu_memory_gib", memory["memory_gib"]),
        "seconds": [round(value, 5) for value in times],
    }


def size_of(row: Row, arguments: argparse.Namespace) -> tuple[ViTSpec, int]:
    """Network and batch size of a row."""
    if arguments.smoke:
        return VIT_SMOKE, 8
    return SIZES[row.size], (EXTRACTED if row.part == "extraction" else BATCH)[row.size]


def extraction(row: Row, spec: ViTSpec, batch: int, arguments: argparse.Namespace) -> Callable[[], object]:
    """Extraction of two kinds of features from uint8 pixels in pinned memory."""
    torch.manual_seed(0)
    backbone = Backbone(
        ViTExport.from_vit(ViT(spec), Preparation()), arguments.device, arguments.precision, row.compiled
    )
    pixels = torch.randint(0, 256, (batch, 3, spec.image_size, spec.image_size), dtype=torch.uint8)
    pixels = pixels if arguments.device == "cpu" else pixels.pin_memory()
    kinds = [FeatureKind("cls"), FeatureKind("avg")]
    return lambda: feature_rows(backbone, backbone.prepare(pixels.to(arguments.device, non_blocking=True)), kinds)


def pretraining(row: Row, spec: ViTSpec, batch: int, arguments: argparse.Namespace) -> Callable[[], object]:
    """One update of the method, with views that are on the device already."""
    module = load_extension("methods", row.name)
    recipe = module.RECIPES["smoke"] if arguments.smoke else at_224(module.RECIPES, spec)
    method = build(module, replace(recipe, batch=batch), 0)
    views = {name: view.to(arguments.device) for name, view in views_of(method, batch).items()}
    if method.needs_labels:
        views["label"] = torch.arange(batch, device=arguments.device) % recipe.settings.classes
    updates = Updates(method, recipe, device=arguments.device, precision=arguments.precision, compiled=row.compiled)
    progress = TrainProgress(step=2000, steps_per_epoch=1000, epochs=100)
    return lambda: updates.run([views], progress)


def at_224(recipes: dict[str, Any], spec: ViTSpec) -> Any:
    """The method's first recipe for 224 px, with a network of this size."""
    recipe = next(recipe for recipe in recipes.values() if recipe.spec.image_size == 224)
    sizes = {name: getattr(spec, name) for name in ("width", "depth", "heads", "mlp_hidden")}
    return replace(recipe, spec=replace(recipe.spec, **sizes))


def official(row: Row, spec: ViTSpec, batch: int, arguments: argparse.Namespace) -> Callable[[], object]:
    """One step by the modules of the clone in --official: forward passes, loss, backward, AdamW, EMA."""
    clone = arguments.official.resolve() / row.name
    if not (clone / OFFICIAL[row.name]).is_file():
        raise ValueError(f"{clone} holds no {OFFICIAL[row.name]}: clone facebookresearch/{row.name} there")
    sys.path.insert(0, str(clone))
    return {"mae": official_mae, "dino": official_dino}[row.name](spec, batch, arguments)


def official_mae(spec: ViTSpec, batch: int, arguments: argparse.Namespace) -> Callable[[], object]:
    """engine_pretrain.py:20-69 with the settings of PRETRAIN.md: decoder of width 512, depth 8."""
    from models_mae import MaskedAutoencoderViT

    model = MaskedAutoencoderViT(
        img_size=spec.image_size,
        patch_size=spec.patch_size,
        embed_dim=spec.width,
        depth=spec.depth,
        num_heads=spec.heads,
        norm_pix_loss=True,
    ).to(arguments.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.05)
    images = torch.randn(batch, 3, spec.image_size, spec.image_size, device=arguments.device)

    def step() -> None:
        with autocast(arguments.device, arguments.precision):
            loss = model(images, mask_ratio=0.75)[0]
        loss.item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def official_dino(spec: ViTSpec, batch: int, arguments: argparse.Namespace) -> Callable[[], object]:
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
        return utils.MultiCropWrapper(vit, DINOHead(spec.width, 65536)).to(arguments.device)

    student, teacher = network(0.1), network(0.0)
    teacher.load_state_dict(student.state_dict())
    loss_of = DINOLoss(65536, 10, 0.04, 0.04, 0, 100).to(arguments.device)
    optimizer = torch.optim.AdamW(utils.get_params_groups(student), lr=1e-4)
    sides = [spec.image_size] * 2 + [spec.image_size * 3 // 7] * 8
    crops = [torch.randn(batch, 3, side, side, device=arguments.device) for side in sides]

    def step() -> None:
        with autocast(arguments.device, arguments.precision):
            loss = loss_of(student(crops), teacher(crops[:2]), 1)
        loss.item()
        optimizer.zero_grad()
        loss.backward()
        utils.clip_gradients(student, 3.0)
        optimizer.step()
        with torch.no_grad():
            for ours, its in zip(student.parameters(), teacher.parameters(), strict=True):
                its.data.mul_(0.996).add_(0.004 * ours.detach().data)

    start_alone(arguments.device)  # its loss averages the centre over processes
    return step


def start_alone(device: str) -> None:
    """Start a process group of this process alone."""
    backend = "gloo" if device == "cpu" else "nccl"
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)


PARTS = {"extraction": extraction, "pretraining": pretraining, "official": official}


def gemm_limit(spec: ViTSpec, batch: int, arguments: argparse.Namespace) -> float:
    """FLOP/s of a block's four linear layers on the tokens of a batch, forward and both gradients."""
    dtype, tokens = getattr(torch, arguments.precision), batch * (spec.grid[0] * spec.grid[1] + 1)
    operations, spent = 0, 0.0
    for inputs, outputs in ((1, 3), (1, 1), (1, 4), (4, 1)):
        shape = (inputs * spec.width, outputs * spec.width)
        x, g, w = (noise(*sides, arguments.device, dtype) for sides in ((tokens, shape[0]), (tokens, shape[1]), shape))
        for product in (lambda x=x, w=w: x @ w, lambda g=g, w=w: g @ w.T, lambda g=g, x=x: x.T @ g):
            product()
            spent += statistics.median(seconds(product, arguments.device) for _ in range(7))
            operations += 2 * tokens * shape[0] * shape[1]
    return operations / spent


def noise(rows: int, columns: int, device: str, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, columns, device=device, dtype=dtype)


def seconds(work: Callable[[], object], device: str) -> float:
    """Wall time until the device has finished."""
    wait = torch.cuda.synchronize if device != "cpu" else lambda: None
    wait()
    started = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
