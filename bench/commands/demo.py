"""Pretrain a tiny ViT, compare it with raw pixels, and write a report; no data, no network; about a minute.

It pretrains the network for seconds on digits in noise, and compares it with its initial weights and with raw pixels,
with paired tests.
"""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.options import CommandOptions

if TYPE_CHECKING:
    from bench.statistics.compare import Comparison

IMAGES = "noisydigits:"
# The configuration, of those tried (docs/log.md), that beats initial weights and raw pixels in 20 seconds of one core:
# masks as the only augmentation, small updates. MAE, LUT and MOCA take longer.
METHOD, RECIPE = "extrema", "smoke"
SETTINGS = {
    **{"image_size": 48, "patch_size": 8, "epochs": 5, "batch": 32, "lr": 1e-3, "lr_batch": 0, "schedule.warmup": 1},
    **{"loss": "infonce", "crop": "none", "colour": "none", "masks": 2, "mask_ratio": 0.6, "teacher_momentum": 0.97},
    **{"drop_path": 0, "projector_hidden": 256, "projector_width": 64},
}
# Protocol -> its name in the sentence, and the metric that is compared.
PROTOCOLS = {"knn@dino": ("k-NN", "top1_k10"), "logreg@dinov2": ("linear", "top1_100percent")}
LIMIT = None  # images of each split; all
# Half the side of the images: here as good as the full size, in a quarter of the time. By k-NN alone: logistic
# regression on 1,728 pixels takes longer than all else together.
FLOOR, FLOOR_PROTOCOL = "pixels:24", "knn@dino"


@dataclass(frozen=True, kw_only=True)
class Options(CommandOptions):
    """Options of `bench demo`."""

    # DIR: folder of exports, results, leaderboard and report (bench-results/demo)
    out: Path = Path("bench-results/demo")
    seed: int = 0  # N: seed of initial weights, batches and tasks (0)


def run(options: Options) -> int:
    """Pretrain, or reuse the network of an earlier demo, evaluate, test, and write the report.

    The tests are corrected together (Holm). Raises Stopped (exit code 75) if a signal stopped the training, which the
    next demo continues.
    """
    from bench import api
    from bench.reports.page import report_page
    from bench.statistics.compare import conclusion
    from bench.statistics.paired import holm
    from engine.files import write_atomic
    from engine.machine import own_cores
    from engine.printing import say

    out, seed = options.out, options.seed
    network, images = out / "pretraining" / f"{METHOD}-seed{seed}", {"noisydigits": IMAGES}
    initial, trained = f"{METHOD}-initial", f"{METHOD}-trained"
    # Threads that read images and extract features, each with operators on one core.
    shared = api.Options(device="cpu", workers=own_cores())
    evaluated: dict[str, Any] = {"out": out, "seed": seed, "limit": LIMIT, "options": shared}
    with one_thread():
        # Quiet: the lines of a training and the leaderboard of the raw pixels alone are not the demo.
        training: dict[str, Any] = {"settings": SETTINGS, "seed": seed, "options": replace(shared, workers=1)}
        api.pretrain(METHOD, RECIPE, IMAGES, network, resume=True, progress=quiet, **training)
        api.evaluate_suite(FLOOR, FLOOR_PROTOCOL, images, names=["raw-pixels"], progress=quiet, **evaluated)
        networks = (str(network / "start"), str(network / "export"))
        api.evaluate_suite(networks, ",".join(PROTOCOLS), images, names=[initial, trained], **evaluated)
    comparisons = [
        comparison
        for other, protocol in (("raw-pixels", FLOOR_PROTOCOL), *((initial, protocol) for protocol in PROTOCOLS))
        for comparison in api.compare(trained, other, protocol=protocol, metric=PROTOCOLS[protocol][1], out=out).found
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


def quiet(lines: str) -> None:
    """Hear the lines of a step of the demo, and print none."""


@contextmanager
def one_thread() -> Iterator[None]:
    """A block in one thread: for such a small network, threads cost more than they gain, most of all beside others."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def sentence(floor: "Comparison", *tests: "Comparison") -> str:
    """What was learned, in numbers. floor: the test against raw pixels; tests: those against initial weights."""
    from bench.statistics.compare import interval_text, p_text
    from engine.printing import in_words

    parts = []
    for (name, _), comparison in zip(PROTOCOLS.values(), tests, strict=True):
        test, p = comparison.paired, p_text(comparison.p_holm, with_sign=True)
        gain = f"{test.difference:+.1f} points {interval_text(test.low, test.high)}, {p}"
        parts.append(f"{name} accuracy from {test.second:.1f} to {test.first:.1f} % ({gain})")
    return f"Pretraining without labels took {in_words(parts)}; raw pixels reach {floor.paired.second:.1f} % by k-NN."
