"""Run tasks on frozen patches under torchrun; every process prints their metrics.

frozen_program.py FOLDER
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from toy_scenes import export_of, workspace

from downstream.tasks.correspondence import PROTOCOLS as CORRESPONDENCE
from downstream.tasks.dense_knn import PROTOCOLS as KNN
from downstream.tasks.depth_linear import PROTOCOLS as DEPTH
from downstream.tasks.discovery import PROTOCOLS as DISCOVERY
from downstream.tasks.segmentation_linear import PROTOCOLS as SEGMENTATION
from downstream.tasks.video_propagation import PROTOCOLS as VIDEO
from engine.distributed import World, start_world
from engine.tasks import Task

SHORT = {"steps": 6, "warmup": 2, "batch": 4}
SEGMENTER = replace(
    SEGMENTATION["segmentation_linear@smoke"].task, **SHORT, crop_size=32, stride=24, short=40, holdout=0.3
)
DEPTHS = replace(DEPTH["depth_linear@smoke"].task, **SHORT)
HUMMINGBIRD = replace(KNN["dense_knn@smoke"].task, side=32, memory=64, k=5)
CAPI = replace(KNN["dense_knn@capi_smoke"].task, side=32, holdout=0.3)
LOGISTIC = replace(SEGMENTATION["segmentation_linear@capi_smoke"].task, side=32, holdout=0.3)
TASKS: dict[str, tuple[Task, str]] = {
    "segmentation": (SEGMENTER, "tiny-ade20k:"),
    "depth": (DEPTHS, "tiny-nyu:"),
    "hummingbird": (HUMMINGBIRD, "tiny-ade20k:"),
    "capi": (CAPI, "tiny-voc:"),
    "video": (VIDEO["video_propagation@smoke"].task, "tiny-davis:"),
    "correspondence": (CORRESPONDENCE["correspondence@smoke"].task, "tiny-spair:"),
    "discovery": (DISCOVERY["discovery@smoke"].task, "tiny-trainval:"),
    "logistic": (LOGISTIC, "tiny-voc:"),
}


def compute_metrics(folder: Path, world: World) -> dict[str, dict[str, float]]:
    """Metrics of every task, by name."""
    metrics = {}
    for name, (task, url) in TASKS.items():
        metrics[name] = task.run(export_of(), workspace(folder, url, world=world)).numbers
    return metrics


if __name__ == "__main__":
    with start_world("cpu") as world:
        line = json.dumps(compute_metrics(Path(sys.argv[1]), world)) + "\n"
    os.write(1, line.encode())  # one write, so that lines of several processes do not mix
