"""An evaluation by VisBench, by mteb and here: `python tests/benchmarks/peers.py --images FOLDER_OF_JPEGS --folder F`.

Each peer gets a virtual environment below F, into which pip installs it; torch, timm and what else fits are those of
this environment, so all compute with one build. All read one file of random weights, timm's ViT-S/16 at 224 px, and one
folder of 400 photos, resized to 224 px and normalised as ImageNet's: 20 classes, each of 20 windows of one photo, 16 to
train on and 4 to validate. Two heads on class tokens, each once and in a sweep of ten, whose features every program
takes from its own cache:

mteb      MIEB's 16 shots: scikit-learn's logistic regression, at most 100 iterations, five draws; the sweep is over C.
          Here: lowshot@mieb. The images of its task come from the folder in place of the Hub.
visbench  "classification": a linear layer, AdamW, 200 epochs, batch 256; the sweep is over the learning rate. Here:
          linear@dino_cached with these settings; its rate follows a cosine, VisBench's is constant.

A process of its own for each program, from its start to the first head and to the end of the sweep, imports included:
wall time, CPU seconds of all its threads, and peak of resident memory. Rounds alternate; medians.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from measuring import peak
from PIL import Image

PEERS = {"mteb": "mteb[image]==2.26", "visbench": "visbench==0.27"}
CLASSES, TRAIN, VAL = 20, 16, 4
SWEEP = [10.0**power for power in np.linspace(0, -4.5, 10)]  # C of the regression, a hundredth of it as learning rate
NETWORK = "vit_small_patch16_224"
PREPARATION = {  # of pixels, in timm's words
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
    "crop_pct": 1.0,
    "interpolation": "bicubic",
    "input_size": (3, 224, 224),
}
STAGES = ("one head", "sweep")
UNITS = ("wall s", "CPU s", "peak MiB", "accuracy")
ROOT = Path(__file__).parents[2]

# A program yields the accuracy of the first head, then the best of the sweep, then its features (80, 384).
Program = Callable[[Path], Iterator[float | np.ndarray]]


def ours(folder: Path, protocol: str, name: str, values: list[float], settings: dict) -> Iterator[float | np.ndarray]:
    import bench
    from checkpoints.spec import Preparation

    checkpoint = bench.load(f"timm:{folder / 'weights.safetensors'}", statistics="imagenet")
    checkpoint = replace(checkpoint, preparation=Preparation(crop=1.0))
    data, out = f"folder:{folder / 'images'}", folder / "out"
    for chosen in (values[:1], values):
        result = bench.evaluate(checkpoint, protocol, data, settings={name: tuple(chosen)} | settings, out=out)
        yield max(value for key, value in result.numbers.items() if "top1" in key)
    yield bench.extract(checkpoint, data, out=out, pool="cls").features


def ours_as_mteb(folder: Path) -> Iterator[float | np.ndarray]:
    return ours(folder, "lowshot@mieb", "lambdas", [1 / c for c in SWEEP], {"crop": 1.0})


def ours_as_visbench(folder: Path) -> Iterator[float | np.ndarray]:
    settings = dict(readouts=("cls1",), weight_decays=(1e-4,), optimizer="adamw", batch=256, epochs=200, crop=1.0)
    settings |= {"select": "val", "interpolation": "bicubic"}
    return ours(folder, "linear@dino_cached", "lrs", [c / 100 for c in SWEEP], settings)


def mteb(folder: Path) -> Iterator[float | np.ndarray]:
    import datasets
    import mteb
    import torch
    from mteb.models.cache_wrappers import CachedEmbeddingWrapper
    from mteb.models.model_implementations.dino_models import DINOModel, dinov2_small
    from sklearn.linear_model import LogisticRegression
    from transformers import TimmWrapperConfig, TimmWrapperModel

    task = mteb.get_task("OxfordFlowersClassification")  # for MIEB's settings
    task.dataset = datasets.DatasetDict(
        {
            split: datasets.load_dataset("imagefolder", data_dir=str(folder / "images" / name), split="train")
            for split, name in (("train", "train"), ("test", "val"))
        }
    )
    task.data_loaded = True
    config = TimmWrapperConfig(architecture=NETWORK, num_labels=0, pretrained_cfg=PREPARATION)
    network = TimmWrapperModel(config)
    network.timm_model.load_state_dict(weights(folder))
    network.save_pretrained(folder / "out" / "network")
    model = DINOModel(str(folder / "out" / "network"), revision=None, device="cpu")  # mteb's class of such networks
    model.mteb_model_meta = dinov2_small
    cached = CachedEmbeddingWrapper(model, folder / "out" / "features")
    best = 0.0
    for c in SWEEP:
        task.evaluator_model = LogisticRegression(max_iter=100, C=c)
        results = mteb.evaluate(cached, task, cache=None, show_progress_bar=False).task_results
        best = max(best, 100 * results[0].get_score())
        if c == SWEEP[0]:
            yield best
    yield best
    with torch.no_grad():
        images = [Image.open(path) for path in sorted((folder / "images" / "val").rglob("*.jpg"))]
        yield model.get_image_embeddings([{"image": images}], show_progress_bar=False).numpy()


def visbench(folder: Path) -> Iterator[float | np.ndarray]:
    import timm
    import visbench
    from timm.models import register_model
    from visbench.backbones.timm_backbone import TimmBackbone
    from visbench.cache import FeatureCache
    from visbench.data import ImageFolderDataset

    @register_model
    def vit_of_the_file(pretrained: bool = False, **options: object) -> object:
        network = timm.create_model(NETWORK, num_classes=0, pretrained_cfg_overlay=PREPARATION)
        network.load_state_dict(weights(folder))
        return network

    backbone = TimmBackbone(model_name="vit_of_the_file", device="cpu")
    cache = FeatureCache(folder / "out" / "features")
    train, val = (ImageFolderDataset(folder / "images" / split, split=split) for split in ("train", "val"))
    best = 0.0
    for c in SWEEP:
        result = visbench.run(backbone, "classification", val, train, cache=cache, lr=c / 100, device="cpu")
        best = max(best, 100 * result.metrics["top1"])
        if c == SWEEP[0]:
            yield best
    yield best
    yield cache.extract_dataset(backbone, val, keep="pooled", pooling="cls")["pooled"].numpy()


PROGRAMS: dict[str, Program] = {
    "mteb": mteb,
    "ours as mteb": ours_as_mteb,
    "visbench": visbench,
    "ours as visbench": ours_as_visbench,
}


def weights(folder: Path) -> dict:
    from safetensors.torch import load_file

    return load_file(folder / "weights.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, help="folder of at least 20 JPEG files")
    parser.add_argument("--folder", type=Path, required=True, help="for environments, images, weights and outputs")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--program", choices=PROGRAMS, help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if arguments.program:
        run_here(arguments.program, folder, arguments.started)
        return
    folder.mkdir(parents=True, exist_ok=True)
    pythons = {peer: environment(folder / peer, PEERS[peer]) for peer in arguments.peers}
    if not (folder / "weights.safetensors").exists():
        write_windows(sorted(arguments.images.glob("*.[jJ][pP]*[gG]"))[:CLASSES], folder / "images")
        write_weights(folder)
    runs: dict[str, list[dict]] = {name: [] for name in PROGRAMS if pythons.get(name.removeprefix("ours as "))}
    print(f"load average {os.getloadavg()[0]:.2f}, {os.cpu_count()} cores, {arguments.rounds} rounds", flush=True)
    for _ in range(arguments.rounds):
        for name, measured in runs.items():
            measured.append(run_program(pythons.get(name) or sys.executable, name, folder))
            print(name, {stage: measured[-1][stage] for stage in STAGES}, flush=True)
    print_table(runs)


def environment(place: Path, package: str) -> str | None:
    """Python of a virtual environment with this package, made if there is none; None, with pip's reason, if pip cannot
    install it."""
    python, packages = place / "bin" / "python", next(place.glob("lib/python*/site-packages"), place)
    if (packages / place.name).exists():
        return str(python)
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    packages = next(place.glob("lib/python*/site-packages"))
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")  # what pip finds there, it keeps
    pip = subprocess.run([python, "-m", "pip", "install", "-q", package], capture_output=True, text=True)
    if pip.returncode:
        print(f"left out: pip cannot install {package}: {pip.stderr.strip().splitlines()[-1]}")
    return None if pip.returncode else str(python)


def write_windows(photos: list[Path], folder: Path) -> None:
    """20 windows of 0.9 times the sides of each photo, whose name is their class."""
    if len(photos) < CLASSES:
        raise SystemExit(f"--images: {len(photos)} JPEG files, give {CLASSES}")
    generator = np.random.default_rng(0)
    for path in photos:
        photo = Image.open(path).convert("RGB")
        width, height = (9 * side // 10 for side in photo.size)
        for number in range(TRAIN + VAL):
            left, top = (int(generator.integers(side // 10 + 1)) for side in photo.size)
            target = folder / ("train" if number < TRAIN else "val") / path.stem / f"{number:02}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            photo.crop((left, top, left + width, top + height)).save(target, quality=90)


def write_weights(folder: Path) -> None:
    import timm
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    network = timm.create_model(NETWORK, num_classes=0)
    save_file(network.state_dict(), folder / "weights.safetensors")


def run_program(python: str, name: str, folder: Path) -> dict:
    """Run a program in a process of its own, on an empty folder for its outputs."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    (folder / "out").mkdir()
    variables = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "out" / "hf"), "PYTHONPATH": str(ROOT)}
    command = [python, __file__, "--folder", folder, "--program", name, "--started", str(time.time())]
    process = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(f"{name}: {process.stderr[-3000:]}")
    measured = json.loads(process.stdout.splitlines()[-1])
    return measured | {"features": np.load(folder / "out" / "features.npy")}


def run_here(name: str, folder: Path, started: float) -> None:
    """Run a program, and print what it took as JSON."""
    program, measured = PROGRAMS[name](folder), {}
    for stage in STAGES:
        accuracy = next(program)
        wall, cpu = time.time() - started, time.process_time()
        measured[stage] = dict(zip(UNITS, (wall, cpu, peak() / 2**20, accuracy), strict=True))
    np.save(folder / "out" / "features.npy", next(program))
    print(json.dumps(measured))


def print_table(runs: dict[str, list[dict]]) -> None:
    """Medians of the rounds of each program, ratios of a peer's to ours, and the difference of features."""
    for peer in (name for name in runs if name in PEERS):
        own = runs[f"ours as {peer}"]
        theirs, features = runs[peer][0]["features"], own[0]["features"]
        difference = np.abs(theirs - features).max() / np.abs(features).max()
        print(f"{PEERS[peer]}: features differ by {difference:.1e} of the largest value")
        for stage in STAGES:
            values = [[middle(measured, stage, key) for key in UNITS] for measured in (runs[peer], own)]
            values.append([theirs / ours for theirs, ours in zip(*values, strict=True)])
            for label, row in zip((peer, "here", "ratio"), values, strict=True):
                cells = "".join(f"{key:>10} {value:8.2f}" for key, value in zip(UNITS, row, strict=True))
                print(f"  {stage:9}{label:9}{cells}")


def middle(measured: list[dict], stage: str, key: str) -> float:
    return statistics.median(run[stage][key] for run in measured)


if __name__ == "__main__":
    main()
