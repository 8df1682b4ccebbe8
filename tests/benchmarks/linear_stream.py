"""What augmented linear probes cost together: `python tests/benchmarks/linear_stream.py` (a minute or two, two cores).

The augmented protocols of suite `everything`, a tenth of their epochs, on the digits, with a small random ViT: every
one by itself, and those of one stream together. Counted: augmented images through the backbone, which do not depend on
the machine; the sum over results must be what was computed. Timed: both, one after the other, in one process.

official: what the sources' own scripts compute for their recipe in one run, epochs x training images, by their default
epochs; each script trains one recipe in a run, so the recipes of a stream add up (their code is not run here).
"""

import argparse
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from checkpoints.export import ViTExport
from checkpoints.spec import Preparation, ViTSpec
from checkpoints.vit import ViT
from engine.tasks import Outcome, Workspace
from probes.linear.probe import train_together
from probes.tasks.linear import PAPERS, Linear

SPEC = ViTSpec(
    architecture="vit_tiny_patch16_224", image_size=32, patch_size=8, width=96, depth=6, heads=3, mlp_hidden=384
)
# Source: epochs, learning rates that one run trains, where it says so.
OFFICIAL = {
    "DINO": (100, 1, "eval_linear.py:237-272"),
    "iBOT": (100, 45, "evaluation/eval_linear_multi.py, run.sh:50-60"),
    "MOCA": (100, 45, "eval_linear.py:88-120"),
    "MAE": (90, 1, "main_linprobe.py:44-67"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=200, help="training images")
    parser.add_argument("--shorter", type=int, default=10, help="divides the epochs")
    arguments = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.2f} (times under load are worthless), {torch.get_num_threads()} threads")
    torch.manual_seed(0)
    export = ViTExport.from_vit(ViT(SPEC), Preparation())
    streams: dict[str, dict[str, Linear]] = defaultdict(dict)
    for name, protocol in PAPERS.items():
        task = protocol.task
        warmup = task.warmup_epochs // arguments.shorter
        streams[task.augmentation.name][name] = replace(
            task, epochs=task.epochs // arguments.shorter, warmup_epochs=warmup
        )
    print("| stream | recipes | images alone | images together | ratio | s alone | s together | ratio |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    rows = [compare(name, tasks, export, arguments.images) for name, tasks in streams.items()]
    print(format_row("all", [sum(column) for column in zip(*rows, strict=True)]))
    print("\n| official script | epochs | rates of a run | where |\n|---|---:|---:|---|")
    for name, (epochs, rates, source) in OFFICIAL.items():
        print(f"| {name} | {epochs} | {rates} | {source} |")


def compare(name: str, tasks: Mapping[str, Linear], export: ViTExport, images: int) -> list[float]:
    """Number of recipes; forwarded images alone and together; seconds alone and together."""
    alone = [timed([task], export, images) for task in tasks.values()]
    together = timed(list(tasks.values()), export, images)
    numbers = [len(tasks), sum(cost[0] for cost in alone), together[0], sum(cost[1] for cost in alone), together[1]]
    print(format_row(name, numbers), flush=True)
    return numbers


def timed(tasks: Sequence[Linear], export: ViTExport, images: int) -> tuple[float, float]:
    """Augmented images through the backbone, and seconds, starting without cached files."""
    with tempfile.TemporaryDirectory() as folder:
        space = Workspace(cache=Path(folder), data="digits:", limit=images)
        started = time.perf_counter()
        outcomes = [outcome for _, outcome in train_together(tasks, export, space)]
        seconds = time.perf_counter() - started
    finished = [outcome for outcome in outcomes if isinstance(outcome, Outcome)]
    assert len(finished) == len(tasks), outcomes
    return sum(outcome.cost["augmented_forwards"] for outcome in finished), seconds


def format_row(name: str, numbers: Sequence[float]) -> str:
    recipes, alone, together, alone_seconds, together_seconds = numbers
    return (
        f"| {name} | {recipes:.0f} | {alone:.0f} | {together:.0f} | {alone / together:.1f} "
        f"| {alone_seconds:.1f} | {together_seconds:.1f} | {alone_seconds / together_seconds:.1f} |"
    )


if __name__ == "__main__":
    main()
