"""Speed of fine-tuning from JPEG files against a bare loop: `python tests/benchmarks/finetune.py` (a minute or two).

ViT-S/16 at 224 px with finetune@mae's augmentation, mixing and optimiser, on pictures of noise and gradients that are
written first. The bare loop is forward, loss, backward and optimiser step of the same network on tensors in memory, in
the same parts. Rounds of both alternate in one process.
"""

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from checkpoints.export import ViTExport
from checkpoints.spec import Preparation, ViTSpec
from checkpoints.vit import ViT
from engine.machine import keep_memory
from engine.tasks import Workspace
from imagesets.sets import open_set
from probes.finetune.classifier import Classifier
from probes.finetune.trainer import Training
from probes.finetune.training_groups import MixedGroups, mixed_groups, training_transform
from probes.tasks.finetune import PROTOCOLS, Finetune

SPEC = ViTSpec(
    architecture="vit_small_patch16_224", image_size=224, patch_size=16, width=384, depth=12, heads=6, mlp_hidden=1536
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--part", type=int, default=16, help="images at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, help="loader processes, chosen for the machine unless given")
    arguments = parser.parse_args()
    keep_memory()
    print(f"load average before: {os.getloadavg()[0]:.2f} (numbers under load are worthless)")
    with tempfile.TemporaryDirectory() as folder:
        space = Workspace(
            cache=Path(folder),
            data=pictures(Path(folder), arguments.batch),
            device=arguments.device,
            precision=arguments.precision,
            batch_size=arguments.part,
            workers=arguments.workers,
        )
        task = replace(PROTOCOLS["finetune@mae"].task, batch=arguments.batch, mixed_together=arguments.batch)
        subject = Subject(task, space)
        subject.bare(), subject.step()  # memory, caches
        rounds = [(subject.bare(), subject.step()) for _ in range(arguments.rounds)]
    bare, ours = (arguments.batch / statistics.median(seconds) for seconds in zip(*rounds, strict=True))
    loaders = "the machine's" if arguments.workers is None else arguments.workers
    print(
        f"{arguments.precision} on {arguments.device}, batch {arguments.batch} in parts of {arguments.part}, "
        f"{torch.get_num_threads()} threads, {loaders} loaders: bare {bare:.2f} images/s, fine-tuning "
        f"{ours:.2f} images/s, ratio {ours / bare:.3f}"
    )


def pictures(folder: Path, count: int) -> str:
    """URL of a generated image set of 500 x 375 JPEG files, the usual size in ImageNet."""
    generator = np.random.default_rng(0)
    y, x = np.mgrid[0:375, 0:500]
    for split in ("train", "val"):
        for number in range(count):
            waves = np.stack(
                [128 + 90 * np.sin(x / (9 + number + 7 * c) + y / (11 + 3 * c)) for c in range(3)], axis=-1
            )
            pixels = np.clip(waves + generator.normal(0, 12, waves.shape), 0, 255).astype(np.uint8)
            place = folder / "set" / split / f"class{number % 2}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(place / f"{number:04d}.jpg", quality=90)
    return f"folder:{folder / 'set'}"


class Subject:
    """A training on files, and the same network with one batch in memory."""

    def __init__(self, task: Finetune, space: Workspace) -> None:
        torch.manual_seed(0)
        export = ViTExport.from_vit(ViT(SPEC), Preparation())
        train = open_set(space.data, "train")
        plan, part = task.plan(len(train), space)
        classifier = Classifier(export, 1000, task, seed=0)
        self.training = Training(classifier, task, space, plan=plan, micro_batch_size=part, folder=Path("unused"))
        self.training.network.train()
        groups = MixedGroups(
            image_set=replace(train, classes=tuple(map(str, range(1000)))),
            plan=plan,
            steps=range(1000),
            groups=self.training.groups,
            settings=task,
            transform=training_transform(task, SPEC.image_size, export.mean, export.std),
        )
        self.batch = groups[0]
        self.batches = mixed_groups(groups, space)

    def step(self) -> float:
        """Seconds of one update from files."""
        return self.timed(lambda: self.training.update(self.batches))

    def bare(self) -> float:
        """Seconds of forward, loss, backward and optimiser on tensors in memory."""
        return self.timed(self.bare_step)

    def bare_step(self) -> None:
        training, part = self.training, self.training.micro_batch_size
        training.optimizer.zero_grad(set_to_none=True)
        for first in range(0, len(self.batch.images), part):
            images, targets = (t[first : first + part].to(training.space.device) for t in self.batch[:2])
            with training.autocast():
                logits = training.network(images)
            loss = torch.nn.functional.cross_entropy(logits.float(), targets) * part / len(self.batch.images)
            loss.backward()
        training.optimizer.step()

    def timed(self, work) -> float:
        started = time.perf_counter()
        work()
        if self.training.space.device != "cpu":
            torch.cuda.synchronize()
        self.training.step += 1
        return time.perf_counter() - started


if __name__ == "__main__":
    main()
