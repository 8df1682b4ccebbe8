"""What dense training and its evaluation cost over the libraries: `python tests/benchmarks/dense.py` (half an hour).

step     an iteration of mmengine's Runner as downstream/loop/running.py sets it up: loading, augmentation, hooks,
update. bare     forward pass, losses, backward pass and optimiser of the same model on the tensors of that very
iteration. loading  the part of step before its images are there.

ViT-S/16, random weights, shorter side or crop 512 px, on generated images as large as the sets' own; the recipes'
augmentation, schedule and optimiser. Steps and bare ones alternate; medians. Every task runs in a process of its own,
for its peak memory. Evaluation is timed against the libraries' own metrics on the same results.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import peak, seconds
from PIL import Image

from checkpoints.export import ViTExport
from checkpoints.spec import Preparation, ViTSpec
from checkpoints.vit import ViT
from downstream.data.scenes import open_scenes
from downstream.models.operators import quiet_libraries
from downstream.tasks.cascade_coco import PROTOCOLS as CASCADE
from downstream.tasks.maskrcnn_coco import PROTOCOLS as MASK
from downstream.tasks.segmenter_cityscapes import PROTOCOLS as CITY
from downstream.tasks.upernet_ade20k import PROTOCOLS as ADE
from engine.machine import keep_memory
from engine.precision import autocast
from engine.tasks import Workspace

with quiet_libraries():
    from mmdet.evaluation import CocoMetric
    from mmengine.hooks import Hook
    from mmengine.logging import MMLogger
    from mmengine.runner import Runner
    from mmseg.evaluation import IoUMetric
    from pycocotools import mask as masks

    from downstream.layouts.coco import listed
    from downstream.loop import running
    from downstream.metrics.detection_metric import DetectionMetric, evaluator_version
    from downstream.models.segmentors import AreasMetric

SPEC = ViTSpec(
    architecture="vit_small_patch16_224", image_size=224, patch_size=16, width=384, depth=12, heads=6, mlp_hidden=1536
)
EPOCHS = 1000  # as long as a real training in steps, so that none of those timed saves a state or is trained
DETECTION = {"augment": "scales", "short": (512,), "long": 768, "epochs": EPOCHS}
TASKS = {
    "upernet": replace(ADE["upernet@ibot_S"].task, crop=512),
    "segmenter": replace(CITY["segmenter_mask@moca"].task, crop=512, lr=(0.01,), epochs=EPOCHS, judge_every=EPOCHS),
    "maskrcnn": replace(MASK["maskrcnn@ibot"].task, **DETECTION),
    "cascade": replace(CASCADE["cascade@ibot_S"].task, **DETECTION),
}
SIZES = {"ade20k": (512, 683), "cityscapes": (1024, 2048), "coco": (480, 640)}  # usual ones, height and width
IMAGES, OBJECTS, DETECTIONS = 16, 7, 100  # a split's; a COCO image's on average; of an image that is evaluated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--precision", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0, help="loader processes; 0: the training loads between steps")
    parser.add_argument("--evaluated", type=int, default=1000, help="images of the evaluations; 0: leave them out")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone:
        keep_memory()
        with tempfile.TemporaryDirectory() as folder:
            train(arguments.tasks[0], arguments.precision[0], Path(folder), arguments)
        return
    print(
        f"load average {os.getloadavg()[0]:.2f} (numbers under load are worthless), batch {arguments.batch}, "
        f"{torch.get_num_threads()} threads, {arguments.workers} loaders"
    )
    print(f"{'task':10} {'dtype':9} {'step s':>7} {'bare s':>7} {'ratio':>6} {'loading':>8} {'peak MB':>8}", flush=True)
    for task in arguments.tasks:
        for precision in arguments.precision:
            command = [sys.executable, __file__, "--alone", "--tasks", task, "--precision", precision]
            options = {"rounds": arguments.rounds, "batch": arguments.batch, "workers": arguments.workers}
            subprocess.run([*command, *(f"--{name}={value}" for name, value in options.items())], check=True)
    if arguments.evaluated:
        evaluate(arguments.evaluated)


class Rounds(Hook):
    """Times an iteration, then its bare work; ends the training after `count` rounds."""

    priority = "LOWEST"

    def __init__(self, count: int, precision: str) -> None:
        self.count, self.precision = count, precision
        self.steps: list[float] = []
        self.bares: list[float] = []
        self.loadings: list[float] = []

    def before_train(self, runner: Runner) -> None:
        runner.model.data_preprocessor.register_forward_hook(self.keep)
        self.started = time.perf_counter()

    def keep(self, module: torch.nn.Module, inputs: tuple, output: dict[str, Any]) -> None:
        self.tensors = output

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        self.loadings.append(time.perf_counter() - self.started)

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.steps.append(time.perf_counter() - self.started)
        self.bares.append(seconds(lambda: self.bare(runner.model, runner.optim_wrapper.optimizer)))
        if len(self.steps) > self.count:
            raise TrainingEnded
        self.started = time.perf_counter()

    def bare(self, model: torch.nn.Module, optimiser: torch.optim.Optimizer) -> None:
        with autocast("cpu", self.precision):
            losses = model(**self.tensors, mode="loss")
        model.parse_losses(losses)[0].backward()
        optimiser.step()
        optimiser.zero_grad()

    def medians(self) -> tuple[float, float, float]:
        """Without the first round, in which memory is taken for the first time."""
        return tuple(statistics.median(times[1:]) for times in (self.steps, self.bares, self.loadings))


class TrainingEnded(Exception):
    """Raised to end a training."""


def train(name: str, precision: str, folder: Path, arguments: argparse.Namespace) -> None:
    """Print one line of the table."""
    task, rounds = replace(TASKS[name], batch=arguments.batch), Rounds(arguments.rounds, precision)
    original = running.build_runner
    layout = task.LAYOUT
    url = f"{layout}:{generate_set(layout, folder)}"
    scenes = [open_scenes(url, split, folder) for split in ("train", "val")]
    torch.manual_seed(0)
    export = ViTExport.from_vit(ViT(SPEC), Preparation())
    space = Workspace(
        cache=folder, data=url, precision=precision, batch_size=arguments.batch, workers=arguments.workers
    )

    def build_watched_runner(*values: Any) -> Runner:
        runner = original(*values)
        runner.register_hook(rounds, "LOWEST")
        return runner

    running.build_runner = build_watched_runner
    try:
        running.run_plan(task.plan(export, *scenes, 0), space)
    except TrainingEnded:
        step, bare, loading = rounds.medians()
        print(
            f"{name:10} {precision:9} {step:7.3f} {bare:7.3f} {step / bare:6.3f} {loading:8.3f} {peak() / 2**20:8.0f}",
            flush=True,
        )


def generate_set(layout: str, folder: Path) -> Path:
    """Write a set of smooth noise images in a layout, with masks of blocks and objects of ellipses; its folder."""
    root, random = folder / "set", np.random.RandomState(0)
    for split in ("train", "val"):
        if layout == "coco":
            write_coco_split(root, split, random, IMAGES)
            continue
        for number in range(IMAGES):
            blocks = random.randint(1, 19, (8, 16)).astype(np.uint8)
            long = {"train": "training", "val": "validation"}[split]
            city = f"{split}/aachen/aachen_{number:06d}_000019"
            picture, mask = (
                (f"images/{long}/{number}.jpg", f"annotations/{long}/{number}.png")
                if layout == "ade20k"
                else (f"leftImg8bit/{city}_leftImg8bit.png", f"gtFine/{city}_gtFine_labelTrainIds.png")
            )
            save(root / picture, noise(SIZES[layout], random))
            save(root / mask, Image.fromarray(blocks).resize(SIZES[layout][::-1], Image.Resampling.NEAREST))
    return root


def noise(size: tuple[int, int], random: np.random.RandomState) -> Image.Image:
    """A noise image of (height, width), about as smooth as a photo."""
    small = random.randint(0, 256, (size[0] // 8, size[1] // 8, 3), np.uint8)
    return Image.fromarray(small).resize(size[::-1], Image.Resampling.BICUBIC)


def save(path: Path, image: Image.Image) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def write_coco_split(root: Path, split: str, random: np.random.RandomState, count: int, pictures: bool = True) -> None:
    """Write one split in COCO's layout: `count` images with ellipses of 80 classes."""
    height, width = SIZES["coco"]
    images, things = [], []
    for number in range(1, count + 1):
        images.append({"id": number, "file_name": f"{number:012d}.jpg", "height": height, "width": width})
        if pictures or number == 1:
            save(root / f"{split}2017" / images[-1]["file_name"], noise(SIZES["coco"], random))
        for outline, (x, y, w, h) in (ellipse(random) for _ in range(1 + random.randint(2 * OBJECTS - 1))):
            facts = {"id": len(things) + 1, "image_id": number, "category_id": random.randint(1, 81), "iscrowd": 0}
            things.append(facts | {"segmentation": [outline], "bbox": [x, y, w, h], "area": 0.78 * w * h})
    content = {"images": images, "annotations": things}
    content["categories"] = [{"id": value, "name": f"thing {value}"} for value in range(1, 81)]
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    (root / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(content))


def ellipse(random: np.random.RandomState) -> tuple[list[float], tuple[float, float, float, float]]:
    """A random ellipse: polygon of 24 corners, and box (x, y, w, h)."""
    height, width = SIZES["coco"]
    w, h = np.exp(random.uniform(np.log(16), np.log(300), 2))
    x, y = random.uniform(0, width - w), random.uniform(0, height - h)
    angles = np.linspace(0, 2 * np.pi, 24, endpoint=False)
    corners = np.stack([x + w / 2 * (1 + np.cos(angles)), y + h / 2 * (1 + np.sin(angles))], axis=1)
    return corners.ravel().tolist(), (x, y, w, h)


def evaluate(count: int) -> None:
    """Print the times of both metrics over `count` images, ours and the libraries' own, twice in turn.

    mmdet's also finds AP by size and average recall.
    """
    MMLogger.get_current_instance().setLevel("ERROR")
    print(f"{'evaluation of ' + str(count) + ' images':28} {'ours s':>7} {'theirs s':>8} {'ratio':>6}")
    for name, (ours, theirs) in {
        f"box and mask AP, {evaluator_version()}": average_precision(count),
        "mIoU, 150 classes, 512 x 683": mean_iou(count),
    }.items():
        pairs = [(seconds(ours), seconds(theirs)) for _ in range(2)]
        ours, other = (min(times) for times in zip(*pairs, strict=True))
        print(f"{name:28} {ours:7.2f} {other:8.2f} {ours / other:6.3f}", flush=True)


def average_precision(count: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Our metric and mmdet's on 100 detections per image, of which the first ones are correct."""
    random = np.random.RandomState(1)
    with tempfile.TemporaryDirectory() as folder:
        write_coco_split(Path(folder), "val", random, count, pictures=False)
        (Path(folder) / "val2017").mkdir(exist_ok=True)
        for number in range(2, count + 1):
            (Path(folder) / "val2017" / f"{number:012d}.jpg").touch()
        listing = listed(Path(folder), "val")
        with quiet_libraries():
            theirs = CocoMetric(ann_file=str(Path(folder) / listing.annotations), metric=["bbox", "segm"])
    theirs.dataset_meta = {"classes": listing.classes}
    ours = DetectionMetric(listing, DETECTIONS)
    results = [
        ({}, detections_of_image(entry, objects, random))
        for entry, objects in zip(listing.entries, listing.objects, strict=True)
    ]

    def quiet(metric: CocoMetric) -> object:
        with quiet_libraries():
            return metric.compute_metrics(results)

    return lambda: quiet(ours), lambda: quiet(theirs)


def detections_of_image(
    entry: dict[str, Any], objects: tuple[dict[str, Any], ...], random: np.random.RandomState
) -> dict[str, Any]:
    """Detections of an image by descending score, in the format of mmdet's CocoMetric."""
    correct = [
        (annotation["segmentation"][0], annotation["bbox"], annotation["category_id"] - 1) for annotation in objects
    ]
    wrong = [(*ellipse(random), random.randint(80)) for _ in range(DETECTIONS - len(correct))]
    outlines, boxes, labels = zip(*correct, *wrong, strict=True)
    boxes = np.array(boxes)
    boxes[:, 2:] += boxes[:, :2]
    return {
        "img_id": entry["id"],
        "bboxes": boxes,
        "scores": np.sort(random.rand(DETECTIONS))[::-1].astype(np.float32),
        "labels": np.array(labels),
        "masks": [masks.frPyObjects([outline], entry["height"], entry["width"])[0] for outline in outlines],
    }


def mean_iou(count: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Our metric with areas per image, and mmseg's."""
    random = np.random.RandomState(2)
    predicted, labelled = (torch.from_numpy(random.randint(0, 150, (1, *SIZES["ade20k"]))) for _ in range(2))
    sample = {"pred_sem_seg": {"data": predicted}, "gt_sem_seg": {"data": labelled}}

    def done(kind: type[IoUMetric]) -> object:
        with quiet_libraries():
            metric = kind()
            metric.dataset_meta = {"classes": [str(value) for value in range(150)]}
            for _ in range(count):
                metric.process({}, [sample])
            return metric.compute_metrics(metric.results)

    return lambda: done(AreasMetric), lambda: done(IoUMetric)


if __name__ == "__main__":
    main()
