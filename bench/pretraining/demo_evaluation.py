"""The second half of `bench demo`: networks beside their initial weights and raw pixels, paired tests, a report."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bench.pretraining.demo_training import IMAGES
from bench.report_page.page import report_page
from bench.run.runner import RunRequest, run_suite
from bench.statistics.compare import Wanted, compare
from bench.statistics.paired import holm
from bench.statistics.report import conclusion
from engine.files import write_atomic
from engine.printing import say
from engine.tasks import Workspace

SUITE = "knn@dino,linear_sgd@ibot_base_cached"
LIMIT = None  # images of each split; all
FLOOR = "pixels:24"  # half the side of the images: as good as all of it here, and a quarter of the time
DATA = f"noisydigits={IMAGES}"
TESTED = {"knn@dino": "top1_k10", "linear_sgd@ibot_base_cached": "top1"}  # protocols and metrics that are compared


def evaluate_demo(networks: Mapping[str, Path], out: Path, seed: int) -> int:
    """Evaluate pretrained networks, method -> folder, and say what came out. Exit code of the evaluation."""
    checkpoints = {"raw-pixels": FLOOR}
    for method, folder in networks.items():
        checkpoints |= {f"{method}-initial": str(folder / "start"), f"{method}-trained": str(folder / "export")}
    space = Workspace(cache=out / "cache", data="", seed=seed, limit=LIMIT)
    request = RunRequest(
        checkpoints=tuple(checkpoints.values()),
        names=tuple(checkpoints),
        suite=SUITE,
        data=(DATA,),
        out=out,
        space=space,
    )
    if code := run_suite(request):
        return code
    pairs = [(f"{method}-trained", other) for method in networks for other in ("raw-pixels", f"{method}-initial")]
    say(*conclusions(out, pairs))
    page = out / "report.html"
    write_atomic(page, report_page(out))
    first = next(iter(networks.values()))
    pictures = (
        f"bench visualize pca --checkpoint {shlex.quote(str(first))} --images {IMAGES} --out {shlex.quote(str(out))}"
    )
    say("", f"What its patches show: {pictures}")
    say(f"The report, with pictures: {page.resolve()}", f"Open it: xdg-open {shlex.quote(str(page))}")
    return 0


def conclusions(out: Path, pairs: Sequence[tuple[str, str]]) -> list[str]:
    """A sentence on each pair of checkpoints and each of TESTED: paired tests, corrected over all of them."""
    found = [
        each
        for pair in pairs
        for protocol, metric in TESTED.items()
        for each in compare(out, pair, Wanted(protocol=protocol, metric=metric)).found
    ]
    corrected = holm([each.paired.p for each in found])
    return [conclusion(replace(each, p_holm=p), len(found)) for each, p in zip(found, corrected, strict=True)]
