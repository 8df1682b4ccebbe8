"""`bench demo`: pretrains a tiny network for seconds on digits in noise, and compares it with its initial weights and
with raw pixels, with paired tests and a report.
"""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from bench.evaluation import evaluate
from bench.options import EvaluationOptions
from bench.pretraining.recipes import choose_recipe
from bench.pretraining.run import make_trainer
from bench.reports.page import report_page
from bench.statistics.compare import Comparison, compare, conclusion, interval_text, p_text
from bench.statistics.paired import holm
from engine.distributed import World
from engine.files import digest, write_atomic
from engine.machine import own_cores
from engine.printing import in_words, say
from imagesets.sets import open_set
from pretrain.loop.trainer import Run

IMAGES = "noisydigits:"


# The configuration, of those tried (docs/log.md), that beats initial weights and raw pixels in 20 seconds of one core:
# masks as the only augmentation, small updates. MAE, LUT and MOCA take longer.
METHOD, RECIPE = "extrema", "smoke"
CHANGES = (
    *("image_size=48", "patch_size=8", "epochs=5", "batch=32", "lr=1e-3", "lr_batch=0", "schedule.warmup=1"),
    *("loss=infonce", "crop=none", "colour=none", "masks=2", "mask_ratio=0.6", "teacher_momentum=0.97"),
    *("drop_path=0", "projector_hidden=256", "projector_width=64"),
)


def pretrained(out: Path, seed: int) -> Path | None:
    """Pretrain the network in a folder below `out`, named after settings and images; an earlier training is reused.

    A training that was stopped continues, as with `bench pretrain --resume`. Returns the folder: start/ and export/ in
    it are the network before and after. None if a signal stopped the training.
    """
    chosen = choose_recipe(METHOD, RECIPE, CHANGES)
    images = open_set(IMAGES, "train")
    inputs = digest({"settings": chosen.recipe.to_json(), "images": images.fingerprint})
    folder = out / f"{METHOD}-seed{seed}-{inputs[:8]}"
    if (folder / "export" / "config.json").exists():
        return folder
    trainer = make_trainer(chosen, images, Run(out=folder, seed=seed, workers=1, resume=True), World())
    with one_thread():
        return folder if trainer.train() == "finished" else None


@contextmanager
def one_thread() -> Iterator[None]:
    """A block in one thread: for such a small network, threads cost more than they gain, most of all beside others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# Protocol -> its name in the sentence, and the metric that is compared.
PROTOCOLS = {"knn@dino": ("k-NN", "top1_k10"), "logreg@dinov2": ("linear", "top1_100percent")}
LIMIT = None  # images of each split; all
# Half the side of the images: here as good as the full size, in a quarter of the time. By k-NN alone: logistic
# regression on 1,728 pixels takes longer than all else together.
FLOOR, FLOOR_PROTOCOL = "pixels:24", "knn@dino"


def evaluate_demo(network: Path, out: Path, seed: int) -> int:
    """Evaluate a pretrained network, its initial weights and raw pixels, and write the report; print paired tests, how
    to open the report, and what was learned.

    The tests are corrected together (Holm). Returns the exit code of the evaluation.
    """
    floor = EvaluationOptions(
        checkpoint=(FLOOR,),
        name=("raw-pixels",),
        suite=FLOOR_PROTOCOL,
        data=(f"noisydigits={IMAGES}",),
        out=out,
        device="cpu",
        seed=(seed,),
        limit=LIMIT,
        workers=own_cores(),  # threads that read images and extract features, each with operators on one core
    )
    initial, trained = f"{METHOD}-initial", f"{METHOD}-trained"
    networks = replace(
        floor,
        checkpoint=(str(network / "start"), str(network / "export")),
        name=(initial, trained),
        suite=",".join(PROTOCOLS),
    )
    with one_thread():
        if evaluate(floor, show=False).failed or evaluate(networks).failed:
            return 1
    comparisons = [
        comparison
        for other, protocol in (("raw-pixels", FLOOR_PROTOCOL), *((initial, protocol) for protocol in PROTOCOLS))
        for comparison in compare(out, (trained, other), protocol=protocol, metric=PROTOCOLS[protocol][1]).found
    ]
    corrected = holm([comparison.paired.p for comparison in comparisons])
    comparisons = [replace(comparison, p_holm=p) for comparison, p in zip(comparisons, corrected, strict=True)]
    say(*(conclusion(comparison, len(comparisons)) for comparison in comparisons))
    learned, page = sentence(*comparisons), out / "report.html"
    write_atomic(page, report_page(out, introduction=learned))
    pictures = shlex.join(
        ["bench", "visualize", "pca", "--checkpoint", str(network), "--images", IMAGES, "--out", str(out)]
    )
    program = "open" if sys.platform == "darwin" else "xdg-open"
    say("", f"What its patches show: {pictures}", f"Open the report: {program} {shlex.quote(str(page.resolve()))}")
    say("", learned)
    return 0


def sentence(floor: Comparison, *tests: Comparison) -> str:
    """What was learned, in numbers. floor: the test against raw pixels; tests: those against initial weights."""
    parts = []
    for (name, _), comparison in zip(PROTOCOLS.values(), tests, strict=True):
        test, p = comparison.paired, p_text(comparison.p_holm, with_sign=True)
        gain = f"{test.difference:+.1f} points {interval_text(test.low, test.high)}, {p}"
        parts.append(f"{name} accuracy from {test.second:.1f} to {test.first:.1f} % ({gain})")
    return f"Pretraining without labels took {in_words(parts)}; raw pixels reach {floor.paired.second:.1f} % by k-NN."
