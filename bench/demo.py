"""`bench demo`: pretrains a tiny network for seconds on digits in noise, and compares it with its initial weights and
with raw pixels, with paired tests and a report.
"""

import shlex
from dataclasses import replace
from pathlib import Path

import torch

from bench.evaluation import evaluate
from bench.options import EvaluationOptions
from bench.pretraining.recipes import choose_recipe
from bench.pretraining.run import make_trainer
from bench.reports.page import report_page
from bench.statistics.compare import compare, conclusion
from bench.statistics.paired import holm
from engine.distributed import World
from engine.files import digest, write_atomic
from engine.printing import say
from imagesets.sets import open_set
from pretrain.loop.trainer import Run

IMAGES = "noisydigits:"


# The configuration, of those tried (docs/log.md), that beats initial weights and raw pixels under every protocol in
# half a minute of one core: masks as the only augmentation, small updates. MAE, LUT and MOCA take longer.
METHOD, RECIPE = "extrema", "smoke"
CHANGES = (
    *("image_size=48", "patch_size=8", "epochs=12", "batch=32", "lr=1e-3", "lr_batch=0", "schedule.warmup=1"),
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
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for such a small network, threads cost more than they gain
    try:
        return folder if trainer.train() == "finished" else None
    finally:
        torch.set_num_threads(threads)


SUITE = "knn@dino,linear_sgd@ibot_base_cached"
LIMIT = None  # images of each split; all
FLOOR = "pixels:24"  # half the side of the images: here as good as the full size, in a quarter of the time
TESTED = {"knn@dino": "top1_k10", "linear_sgd@ibot_base_cached": "top1"}  # protocols and metrics that are compared


def evaluate_demo(network: Path, out: Path, seed: int) -> int:
    """Evaluate a pretrained network, its initial weights and raw pixels, print paired tests, and write the report.

    The tests are corrected together (Holm). Returns the exit code of the evaluation.
    """
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
        seed=(seed,),
        limit=LIMIT,
    )
    if evaluate(options).failed:
        return 1
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
