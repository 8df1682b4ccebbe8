"""Speed of feature extraction from JPEG files against the bare forward pass: `python tests/benchmarks/extraction.py
--images DIR` (a folder with any JPEGs; about 15 minutes on two cores).

ViT-S/16 at 224 px with random weights. All rates of one line come from one process, whose bare and extraction rounds
alternate. The bare rate is that of the same backbone on prepared tensors in memory, at the best of several batch sizes,
and in two layouts: one pass at a time on all cores, as is usual, and one pass on each core.
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
from pathlib import Path

import numpy as np
from measuring import peak, resident

from engine.machine import KEEP_MEMORY_VARIABLE, keep_memory

BATCHES = (8, 16, 32, 64, 128)
SCAN = 64  # images to find the best batch size with
BARE = 192  # images of one round of a bare layout; it has no start and end to be outweighed
COLUMNS = "{:9} {:12} {:>9} {:>16} {:>16} {:>12} {:>14} {:>14} {:>11}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path, required=True, help="folder with JPEG files, repeated as needed")
    parser.add_argument("--count", type=int, default=640, help="images to extract in one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--decode", choices=("exact", "fast"), default="exact")
    parser.add_argument("--precision", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.in_this_process:
        print(json.dumps(measure(arguments)))
        return
    print(f"load average before: {os.getloadavg()[0]:.2f} (numbers under load are worthless)")
    heads = "precision|kept memory|extract|all cores|each core|with loaders|/ all cores|/ best bare|peak MiB"
    print(COLUMNS.format(*heads.split("|")))
    for precision in arguments.precision:
        for kept in ("1", "0"):
            command = [sys.executable, *sys.argv, "--precision", precision, "--in-this-process"]
            done = subprocess.run(
                command, env=os.environ | {KEEP_MEMORY_VARIABLE: kept}, stdout=subprocess.PIPE, check=True
            )
            show(precision, json.loads(done.stdout))


def show(precision: str, measured: dict) -> None:
    best = max(measured["all cores"], measured["each core"])
    print(
        COLUMNS.format(
            precision,
            "yes" if measured["kept"] else "no",
            f"{measured['extraction']:.1f}/s",
            f"{measured['all cores']:.1f}/s at {measured['all cores batch']}",
            f"{measured['each core']:.1f}/s at {measured['each core batch']}",
            f"{measured['loaders']:.1f}/s",
            f"{measured['extraction'] / measured['all cores']:.3f}",
            f"{measured['extraction'] / best:.3f}",
            f"+{measured['peak']}",
        ),
        flush=True,
    )


def measure(arguments: argparse.Namespace) -> dict:
    """Rates in images/s, and the growth of resident memory by extraction in MiB beyond the model and libraries."""
    kept = keep_memory()
    subject = Subject(arguments.images, arguments.count, arguments.precision[0], arguments.decode)
    before = resident()
    subject.extraction()
    measured: dict = {"kept": kept, "peak": (peak() - before) >> 20}
    layouts = {"all cores": subject.on_all_cores, "each core": subject.on_each_core}
    for name, layout in layouts.items():
        measured[f"{name} batch"] = max(BATCHES, key=lambda batch, layout=layout: rate(layout, batch, SCAN))
    rounds: dict[str, list[float]] = {name: [] for name in (*layouts, "extraction", "loaders")}
    for _ in range(arguments.rounds):
        for name, layout in layouts.items():
            rounds[name].append(rate(layout, measured[f"{name} batch"], BARE))
        rounds["extraction"].append(subject.extraction())
    rounds["loaders"].append(subject.behind_loaders())
    return measured | {name: statistics.median(values) for name, values in rounds.items()}


def rate(layout: Callable[[int, int], int], batch: int, count: int) -> float:
    """Images/s of bare forward passes in a layout, after one pass that allocates its memory."""
    layout(batch, 1)
    started = time.perf_counter()
    done = layout(batch, count)
    return done / (time.perf_counter() - started)


class Subject:
    """A backbone, files to extract from, and tensors in memory."""

    def __init__(self, folder: Path, count: int, precision: str, decode: str) -> None:
        import torch

        from checkpoints.backbone import Backbone
        from checkpoints.export import ViTExport
        from checkpoints.spec import Preparation, ViTSpec
        from checkpoints.vit import ViT

        spec = ViTSpec(
            architecture="vit_small_patch16_224",
            image_size=224,
            patch_size=16,
            width=384,
            depth=12,
            heads=6,
            mlp_hidden=1536,
        )
        torch.manual_seed(0)
        self.export = ViTExport.from_vit(ViT(spec), Preparation())
        self.precision, self.decode = precision, decode
        self.backbone = Backbone(self.export, "cpu", precision)
        self.images = files_as_set(folder, count)

    def encoded(self, images):
        return self.backbone.views(images, [(-1, True)])

    def on_all_cores(self, batch: int, count: int) -> int:
        """One pass after the other, every operator on all cores."""
        images = prepared(batch)
        passes = max(1, count // batch)
        for _ in range(passes):
            self.encoded(images)
        return passes * batch

    def on_each_core(self, batch: int, count: int) -> int:
        """One pass on each core at the same time."""
        import torch

        from engine.machine import run_on_core_threads

        threads = torch.get_num_threads()
        images = [prepared(batch) for _ in range(threads)]
        passes = max(1, count // (batch * threads)) * threads
        run_on_core_threads(lambda item: self.encoded(images[item % threads]), range(passes), threads)
        return passes * batch

    def extraction(self) -> float:
        """Images/s of the product: files to features on disk."""
        from engine.tasks import Workspace
        from probes.features.extract import extract
        from probes.features.kinds import FeatureKind

        with tempfile.TemporaryDirectory() as cache:
            space = Workspace(cache=Path(cache), data="", precision=self.precision, decode=self.decode)
            features = extract(self.export, self.images, [FeatureKind("cls"), FeatureKind("avg")], space)
            return features.forwards / features.seconds

    def behind_loaders(self, batch: int = 32, loaders: int = 2) -> float:
        """Images/s of the usual design: loader processes, and one pass at a time on all cores."""
        from imagesets.transforms import EvalTransform
        from probes.features.extract import Extractor, Reader, read_with_loaders
        from probes.features.kinds import FeatureKind

        count = len(self.images)
        spans = {n: range(start, min(start + batch, count)) for n, start in enumerate(range(0, count, batch))}
        reader = Reader(self.images, EvalTransform(decode=self.decode), spans, skip_bad=False)
        kinds = [FeatureKind("cls"), FeatureKind("avg")]
        extractor = Extractor(backbone=self.backbone, kinds=kinds, image_set=self.images)
        started = time.perf_counter()
        read_with_loaders(reader, lambda loaded, span: extractor(loaded, span), loaders, "cpu")
        return count / (time.perf_counter() - started)


def prepared(batch: int):
    """Random normalised images (B, 3, 224, 224)."""
    import torch

    return torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(batch))


def files_as_set(folder: Path, count: int):
    """An image set of `count` files: those of `folder`, repeated as needed."""
    from imagesets.names import PackedNames
    from imagesets.sets import FileImages, ImageSet

    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if not files:
        raise SystemExit(f"{folder}: no .jpg or .jpeg files")
    chosen = [files[number % len(files)] for number in range(count)]
    return ImageSet(
        url=f"folder:{folder}",
        split="val",
        classes=("any",),
        labels=np.zeros(count, np.int64),
        images=FileImages(
            root=str(folder),
            names=PackedNames.pack(str(path.relative_to(folder)) for path in chosen),
            sizes=np.array([path.stat().st_size for path in chosen]),
            changed=np.array([(path.stat().st_mtime_ns, path.stat().st_ino) for path in chosen]),
        ),
    )


if __name__ == "__main__":
    main()
