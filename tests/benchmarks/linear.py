"""What a sweep of 45 linear heads costs: `python tests/benchmarks/linear.py` (a minute and a half on one core).

cached   50 000 x 384 features, 10 classes: one epoch of 45 heads together, and of 45 trainings with torch's own layer,
         loss and optimiser one after another, the features in memory.
limit    100 and 1000 classes, batch 1024: the sweep's arithmetic (two products a step) a second, as a share of what
         matrix products of a ViT-S's blocks reach in the same round.
images   augmented images of 500 x 375 through a frozen ViT-S/16, 1000 classes: 45 heads, and one head.

Rounds of what is compared alternate in one process; the quickest of each counts, as other work only slows down.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from checkpoints.backbone import Backbone
from checkpoints.export import ViTExport
from checkpoints.spec import Preparation, ViTSpec
from checkpoints.vit import ViT
from engine.machine import keep_memory
from engine.tasks import Workspace
from imagesets.names import PackedNames
from imagesets.sets import ImageSet, MemoryImages
from probes.features.kinds import kinds_of
from probes.linear.batches import EpochPlan, Table
from probes.linear.heads import Head, Heads, HeadSettings
from probes.linear.stream import FeatureStream
from probes.linear.train_transform import Augmentation
from probes.tasks.linear import IBOT_LRS

ROWS, WIDTH, BATCH = 50_000, 384, 1024
READOUT = "cls1"
BLOCK_SHAPES = ((384, 1152), (384, 384), (384, 1536), (1536, 384))  # ViT-S, for 16 images of 197 tokens
TOKENS = 16 * 197
SHORT = 5  # times as many rounds where one takes under a second, to meet quiet moments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=48, help="of a batch of the last comparison")
    arguments = parser.parse_args()
    keep_memory()
    print(
        f"load average {os.getloadavg()[0]:.2f} (numbers under load are worthless), {torch.get_num_threads()} threads"
    )
    cached(arguments.rounds)
    for classes in (100, 1000):
        limit(classes, arguments.rounds)
    images(arguments.images, min(2, arguments.rounds))


def alternated(first: Callable[[], None], second: Callable[[], None], rounds: int) -> tuple[float, float]:
    """Fastest time of each, in seconds; both alternate."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for work, taken in zip((first, second), times, strict=True):
            started = time.perf_counter()
            work()
            taken.append(time.perf_counter() - started)
    return min(times[0]), min(times[1])


def grid(count: int = len(IBOT_LRS)) -> list[Head]:
    return [Head(readout=READOUT, lr=lr * BATCH / 256) for lr in IBOT_LRS[:count]]


def features(rows: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Class centres plus noise (N, D), and labels (N,)."""
    random = np.random.default_rng(0)
    labels = random.integers(0, classes, rows)
    centres = random.standard_normal((classes, WIDTH), dtype=np.float32)
    return centres[labels] + 3 * random.standard_normal((rows, WIDTH), dtype=np.float32), labels


def cached(rounds: int) -> None:
    rows, numbers = features(ROWS, 10)
    kinds = kinds_of(READOUT, norm=True)
    table = Table(arrays={kinds[0]: rows}, labels=numbers, readouts={READOUT: kinds}, device="cpu")
    plan = EpochPlan(images=ROWS, requested_batch=BATCH, drop_last=False, seed=0)
    heads = Heads(grid(), {READOUT: WIDTH}, 10, HeadSettings(), batch=BATCH)
    values, labels = torch.from_numpy(rows), torch.from_numpy(numbers)

    def together() -> None:
        for _, inputs, truth in table.batches(np.arange(ROWS), plan, 0):
            heads.step(inputs, truth, 0.01)

    def one_after_another() -> None:
        for head in heads.heads:
            layer = nn.Linear(WIDTH, 10)
            optimizer = torch.optim.SGD(layer.parameters(), lr=head.lr, momentum=0.9)
            for places in torch.from_numpy(plan.order(0)).split(BATCH):
                loss = F.cross_entropy(layer(values[places]), labels[places])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    ours, theirs = alternated(together, one_after_another, rounds)
    print(f"cached: 45 heads {ours:.2f} s an epoch, one after another {theirs:.2f} s: {theirs / ours:.2f} times")


def limit(classes: int, rounds: int) -> None:
    heads = Heads(grid(), {READOUT: WIDTH}, classes, HeadSettings(), batch=BATCH)
    values, labels = features(BATCH, classes)
    inputs, truth = {READOUT: torch.from_numpy(values)}, torch.from_numpy(labels)
    operands = [(torch.randn(TOKENS, rows), torch.randn(rows, columns)) for rows, columns in BLOCK_SHAPES]

    def sweep() -> None:
        heads.step(inputs, truth, 0.01)

    def products() -> None:
        for left, right in operands:
            left @ right

    ours, bare = alternated(sweep, products, SHORT * rounds)
    speed = 2 * 2 * BATCH * WIDTH * classes * len(heads.heads) / ours
    most = sum(2 * TOKENS * rows * columns for rows, columns in BLOCK_SHAPES) / bare
    print(
        f"limit: {classes} classes, {len(heads.groups)} groups: {speed / 1e9:.0f} GFLOP/s, products of blocks "
        f"{most / 1e9:.0f}: {speed / most:.2f}"
    )


class Training:
    """Heads that train on a stream of augmented images."""

    def __init__(self, heads: Heads, count: int) -> None:
        self.heads, self.train_indices, self.readouts = heads, np.arange(count), {READOUT: kinds_of(READOUT, norm=True)}
        self.kinds, self.plan = (
            self.readouts[READOUT],
            EpochPlan(images=count, requested_batch=count, drop_last=False, seed=0),
        )
        self.iteration, self.stream_forwards, self.augmented_forwards, self.skipped = 0, 0, 0, {}
        self.augmentation = Augmentation(rule="torchvision", interpolation="bilinear")

    def step(self, number: int, features: dict[str, torch.Tensor], labels: torch.Tensor) -> None:
        self.heads.step(features, labels, 0.01)


def images(count: int, rounds: int) -> None:
    classes = 1000
    random = np.random.default_rng(0)
    image_set = ImageSet(
        url="benchmark",
        split="train",
        classes=tuple(map(str, range(classes))),
        labels=random.integers(0, classes, count),
        images=MemoryImages(
            names=PackedNames.pack(map(str, range(count))),
            pixels=random.integers(0, 256, (count, 375, 500, 3), dtype=np.uint8),
        ),
    )
    spec = ViTSpec(
        architecture="vit_small_patch16_224",
        image_size=224,
        patch_size=16,
        width=WIDTH,
        depth=12,
        heads=6,
        mlp_hidden=4 * WIDTH,
    )
    stream = FeatureStream(
        image_set=image_set,
        backbone=Backbone(ViTExport.from_vit(ViT(spec), Preparation())),
        space=Workspace(cache=Path("nowhere"), data=image_set.url),
        chunk=8,
    )
    sweep, single = (
        Heads(grid(number), {READOUT: WIDTH}, classes, HeadSettings(), batch=count) for number in (len(IBOT_LRS), 1)
    )

    def epoch(heads: Heads) -> None:
        stream.run(0, [Training(heads, count)], lambda: None)

    many, one = alternated(lambda: epoch(sweep), lambda: epoch(single), rounds)
    print(f"images: 45 heads {count / many:.1f} images/s, one head {count / one:.1f}: {many / one:.2f} times the time")


if __name__ == "__main__":
    main()
