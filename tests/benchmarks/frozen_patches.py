"""Tasks on frozen patches against their bare computations: `python tests/benchmarks/frozen_patches.py` (minutes).

heads     a step of `HeadTraining.update` (all heads, schedule, loss checks) against forward pass, loss, backward pass
and AdamW of the same heads on the same cached features, written down bare; beside them the step's matrix products alone
(B h w x D by D x K forward, and the two of the backward pass), and its loss alone, over the enlarged logits.
search    `nearest_patches` from features on disk, as dense_knn searches, against a `faiss.knn` on unit rows in memory.

Random features and labels; rounds alternate; medians of CPU seconds, with OMP_NUM_THREADS=1 the time on an idle core.
"""

import argparse
import os
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from measuring import cpu_seconds
from torch.nn import functional as F

from checkpoints.export import ViTExport
from checkpoints.spec import Preparation, ViTSpec
from checkpoints.vit import ViT
from downstream.data.scenes import open_scenes
from downstream.frozen.heads import HeadTraining
from downstream.frozen.patches import nearest_patches
from downstream.frozen.task import UsableScenes
from downstream.tasks.segmentation_linear import PROTOCOLS, SegmentationHead, segmentation_loss
from engine.blas_kernel import fitting_kernel
from engine.neighbours import unit_rows
from engine.tasks import Workspace

WIDTH = 384
SPEC = ViTSpec(
    architecture="vit_small_patch16_224",
    image_size=224,
    patch_size=16,
    width=WIDTH,
    depth=1,
    heads=6,
    mlp_hidden=1536,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--side", type=int, default=512)
    parser.add_argument("--memory", type=int, default=102_400)
    parser.add_argument("--queries", type=int, default=8_192)
    parser.add_argument("--only", choices=("heads", "search"))
    options = parser.parse_args()
    load, threads = os.getloadavg()[0], torch.get_num_threads()
    print(f"load average {load:.2f}, {threads} threads, medians of {options.rounds} rounds", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        if options.only != "search":
            heads(Path(folder), options)
        if options.only != "heads":
            search(Path(folder), options)


def heads(folder: Path, options: argparse.Namespace) -> None:
    task = replace(PROTOCOLS["segmentation_linear@dinov3"].task, batch=options.batch)
    space = Workspace(cache=folder, data="tiny-ade20k:")
    scenes = open_scenes("tiny-ade20k:", "train", folder)
    train = UsableScenes(scenes, np.arange(len(scenes)), {})
    training = HeadTraining(task, ViTExport.from_vit(ViT(SPEC), Preparation()), train, space, folder, options.batch)
    classes, grid = len(scenes.classes), options.side // SPEC.patch_size
    maps = torch.randn(options.batch, WIDTH, grid, grid)
    targets = torch.randint(0, classes, (options.batch, options.side, options.side), dtype=torch.uint8)
    head = SegmentationHead(WIDTH, classes, task.dropout)
    optimiser = torch.optim.AdamW(head.parameters(), lr=1e-3)
    rows, logits = maps.permute(0, 2, 3, 1).reshape(-1, WIDTH), torch.randn(options.batch * grid * grid, classes)
    weights = torch.randn(WIDTH, classes)

    def bare() -> None:
        keep = torch.rand(maps.shape[:2]) >= task.dropout
        loss = segmentation_loss(head(maps, keep), targets)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    def products() -> None:
        rows @ weights, rows.T @ logits, logits @ weights.T

    def loss_alone() -> None:
        leaf = logits.view(options.batch, grid, grid, classes).permute(0, 3, 1, 2).clone().requires_grad_()
        enlarged = F.interpolate(leaf, size=targets.shape[1:], mode="bilinear")
        F.cross_entropy(enlarged, targets.long()).backward()

    works = {"step": lambda: training.update(maps, targets), "bare": bare, "products": products, "loss": loss_alone}
    times = medians(works, options.rounds)
    line = ", ".join(f"{name} {1000 * value:.1f} ms" for name, value in times.items())
    print(f"heads, batch {options.batch} of {options.side} px, {classes} classes: {line}")
    print(f"  rate of the bare step reached {times['bare'] / times['step']:.3f}")


def search(folder: Path, options: argparse.Namespace) -> None:
    with fitting_kernel():
        import faiss

    random = np.random.default_rng(0)
    files = {}
    for name, count in (("memory", options.memory), ("queries", options.queries)):
        np.save(folder / f"{name}.npy", random.standard_normal((count, WIDTH), np.float32))
        files[name] = np.load(folder / f"{name}.npy", mmap_mode="r")
    memory, queries = unit_rows(files["memory"]), unit_rows(files["queries"])
    space = Workspace(cache=folder, data="tiny-ade20k:")
    works = {
        "dense_knn": lambda: nearest_patches(files["memory"], files["queries"], 30, space, unit_rows),
        "bare": lambda: faiss.knn(queries, memory, 30, metric=faiss.METRIC_INNER_PRODUCT),
    }
    times = medians(works, options.rounds)
    ratio = times["dense_knn"] / times["bare"]
    print(f"search, {options.memory} x {options.queries} x {WIDTH}, k = 30: ratio {ratio:.3f}")
    print(f"  {times['dense_knn']:.2f} s from disk, bare {times['bare']:.2f} s in memory")


def medians(works: dict, rounds: int) -> dict[str, float]:
    """Median seconds of each work. Works alternate in every round; the first round is a warm-up."""
    times = [{name: cpu_seconds(work) for name, work in works.items()} for _ in range(rounds + 1)]
    return {name: statistics.median(seconds_of[name] for seconds_of in times[1:]) for name in works}


if __name__ == "__main__":
    main()
