"""`bench demo`: a tiny network as its method initialises it and pretrained for seconds on digits in noise, both
evaluated beside raw pixels, with paired tests and a report.
"""

import shlex
from dataclasses import replace
from pathlib import Path

import torch

from bench.cli.options import EvaluationOptions
from bench.pretraining.recipes import choose_recipe
from bench.pretraining.run import prepared
from bench.reporting.page import report_page
from bench.run.runner import run_suite
from bench.statistics.compare import compare, conclusion
from bench.statistics.paired import holm
from engine.distributed import World
from engine.files import digest, write_atomic
from engine.printing import say
from imagesets.sets import open_set
from pretrain.loop.trainer import Run

IMAGES = "noisydigits:"


# Of what was tried (docs/log.md) what beats initial weights and raw pixels under every protocol in half a minute of a
# core: masks as the only augmentation, small updates. MAE, LUT and MOCA take longer.
METHOD, RECIPE = "extrema", "smoke"
CHANGES = (
    *("image_size=48", "patch_size=8", "epochs=12", "batch=32", "lr=1e-3", "lr_batch=0", "schedule.warmup=1"),
    *("loss=infonce", "crop=none", "colour=none", "masks=2", "mask_ratio=0.6", "teacher_momentum=0.97"),
    *("drop_path=0", "projector_hidden=256", "projector_width=64"),
)


def pretrained(out: Path, seed: int) -> Path | None:
    """Train in a folder below `out` that is named after what makes the network; use what the same made before.

    A training that was stopped goes on, as by `bench pretrain --resume`. Returns the folder: start/ and export/ in it
    are the network before and after. None where a signal stopped the training.
    """
    chosen = choose_recipe(METHOD, RECIPE, CHANGES)
    images = open_set(IMAGES, "train")
    made_of = digest({"settings": chosen.recipe.to_json(), "images": images.fingerprint})
    folder = out / f"{METHOD}-seed{seed}-{made_of[:8]}"
    if (folder / "export" / "config.json").exists():
        return folder
    trainer = prepared(chosen, images, Run(out=folder, seed=seed, workers=1, resume=True), World())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a network waits for its threads more than it gains by them
    try:
        return folder if trainer.train() == "finished" else None
    finally:
        torch.set_num_threads(threads)


SUITE = "knn@dino,linear_sgd@ibot_base_cached"
LIMIT = None  # images of each split; all
FLOOR = "pixels:24"  # half the side of the images: as good as all of it here, and a quarter of the time
TESTED = {"knn@dino": "top1_k10", "linear_sgd@ibot_base_cached": "top1"}  # protocols and metrics that are compared


def evaluate_demo(network: Path, out: Path, seed: int) -> int:
    """Evaluate a pretrained network, its initial weights and raw pixels, and say what came out, with paired tests that
    are corrected over all of them. Exit code of the evaluation."""
    checkpoints = {
        "raw-pixels": FLOOR,
        f"{METHOD}-initial": str(network / "start"),
        f"{METHOD}-trained": str(network / "export"),
    }
    options = EvaluationOptions(
        checkpoint=tuple(checkpoints.values()),
        name=tuple(checkpoints),
        suite=SUITE,
        data=(f"noisydigits={IMAGES}",),
        out=out,
        device="cpu",
        seed=seed,
        limit=LIMIT,
    )
    if code := run_suite(options):
        return code
    comparisons = [
        comparison
        for other in ("raw-pixels", f"{METHOD}-initial")
        for protocol, metric in TESTED.items()
        for comparison in compare(out, (f"{METHOD}-trained", other), protocol=protocol, metric=metric).found
    ]
    corrected = holm([comparison.paired.p for comparison in comparisons])
    for comparison, p in zip(comparisons, corrected, strict=True):
        say(conclusion(replace(comparison, p_holm=p), len(comparisons)))
    page = out / "report.html"
    write_atomic(page, report_page(out))
    pictures = shlex.join(
        ["bench", "visualize", "pca", "--checkpoint", str(network), "--images", IMAGES, "--out", str(out)]
    )
    say("", f"What its patches show: {pictures}")
    say(f"The report, with pictures: {page.resolve()}", f"Open it: xdg-open {shlex.quote(str(page))}")
    return 0
