"""`python -m tools.board` pretrains small ViTs by all methods with the same FLOPs, and evaluates them: docs/boards.md.

    python -m tools.board --images cifar10:PATH --transfer folder:PATH --out runs/board --budget 50 \\
        --record records/cifar10-50tflop
    python -m tools.board ... --seeds 1 2 --methods mae dino --evaluate knn@dino    two more trainings of these methods
    python -m tools.board ... --methods mae --evaluate                  train only
    python -m tools.board --table records/cifar10-50tflop               the table, from the record alone
    python -m tools.board --figure records/cifar10-50tflop docs/board.png    the picture of README.md, from the record

Trainings and evaluations are calls of `import bench`. Results in --out are not computed again, so the same command
resumes after a kill. The record contains the methods that are finished. Those that it has already are kept and not
trained again, so another machine can continue it.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import bench
from bench.reports.contents import BASELINES, SUPERVISED, Gain, gains, initial_weights, outcomes
from bench.reports.leaderboard import leaderboard_of_stored
from bench.reports.record import stored_results, take_up_record, write_record
from bench.reports.site import training_log
from bench.results.record import CheckpointUsed, MetricRecord, Result
from bench.results.store import StoredResult
from bench.statistics.compare import interval_text, p_text
from bench.statistics.intervals import LEVEL
from bench.statistics.paired import PairedTest, paired_t
from bench.statistics.significance import PairedTestCache
from engine.errors import on_command_line
from engine.files import write_atomic
from engine.printing import markdown_table, say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = [  # in the order in which they are trained
    *("extrema", "moca", "lut", "mst", "mae", "dino", "ibot", "lejepa", "dinov2", "byol", "mocov3", "simmim"),
    *("data2vec", "beit", "msn", "can", "cae", "maskfeat", "simdino", "simdinov2", "ijepa", "nepa", "supervised"),
    "capi",
]
NETWORK = {"patch_size": 8, "batch": 64}  # of the recipe 32px: a ViT-128x4, here with 4 x 4 patches
# The recipe's masks and HOG cells are for 8 x 8 patches and do not fit 4 x 4.
CHANGES: dict[str, dict[str, Any]] = {
    "beit": {"num_mask_patches": 6, "min_mask_patches_per_block": 2},
    "cae": {"num_mask_patches": 8, "min_mask_patches_per_block": 2},
    "data2vec": {"num_mask_patches": 10, "min_mask_patches_per_block": 2},
    "ijepa": {"min_keep": 1},
    "maskfeat": {"hog_cell": 8},
}
RATES = (1 / 3, 1.0, 3.0)  # multiples of the recipe's learning rate that are tried
# Points of accuracy by which another rate has to be better than the recipe's: about two standard errors of one accuracy
# on SEARCH_IMAGES queries. Chosen after the supervised baseline's first training, as docs/boards.md says.
MARGIN = 2.0
SEARCH_IMAGES = 2000  # in the gallery, and held-out queries, of the k-NN that selects the rate
CURVE_POINTS = 10  # at most this many k-NN accuracies during a training
HELD_OUT = 0.1  # share of the training images on which rates are selected and no network is trained
PER_CLASS = 5000  # training images of each of CIFAR-10's ten classes


class Readout(NamedTuple):
    """Protocols of one group: the images that they read, and the networks that they evaluate."""

    protocols: tuple[str, ...]
    data: str = "cifar10"  # or "cifar100", the images of --transfer
    limit: int = 5000  # images of each split
    of_starts: bool = True  # initial weights are evaluated as well
    of_pixels: bool = False  # and raw pixels


LINEAR = "linear_sgd@ibot_base_cached"
READOUTS = (
    Readout(("knn@dino", "knn@moca"), of_pixels=True),
    Readout(("knn@dino",), data="cifar100", of_pixels=True),
    # A linear probe of raw pixels overfits, with 3072 numbers per image and thousands of images: no baseline.
    Readout((LINEAR,)),
    Readout((LINEAR,), data="cifar100"),
    Readout(("lowshot@mieb",), of_starts=False),
    Readout(("finetune@smoke",), limit=2500),
    Readout(("attentive@smoke",), limit=2500, of_starts=False),
)
SETTINGS: dict[str, Any] = {
    **{"knn.k": (20,), "knn.temperature": (0.07,)},
    **{"linear.epochs": 20, "linear.batch": 256},
    **{"finetune.epochs": 10, "finetune.batch": 64},
    **{"attentive.epochs": 20, "attentive.batch": 128},
    **{"attentive.attention_heads": 4, "attentive.lrs": (0.0005, 0.002, 0.005)},
}
DRAWN = ("k-NN, class token", "k-NN, patches", "linear", "fine-tuning", "CIFAR-100, linear")  # columns in the picture
CURVES_IN_ROW = 6
PIXELS, START, SEED = "pixels-32", "-start", "-seed"  # parts of the names in results


class Column(NamedTuple):
    """A column of the table: the metric of a protocol."""

    header: str
    protocol: str
    metric: str
    data: str = "cifar10"


KNN = Column("k-NN, class token", "knn@dino", "top1_k20")
COLUMNS = (  # those that a record has no numbers of are left out
    KNN,
    Column("k-NN, patches", "knn@moca", "top1_k20"),
    Column("linear", LINEAR, "top1"),
    Column("few-shot", "lowshot@mieb", "top1_16shot"),
    Column("attentive", "attentive@smoke", "top1"),
    Column("fine-tuning", "finetune@smoke", "top1"),
    Column("CIFAR-100, k-NN", "knn@dino", "top1_k20", data="cifar100"),
    Column("CIFAR-100, linear", LINEAR, "top1", data="cifar100"),
)
OPTIONS = bench.Options(workers=0)
PAGE = """# CIFAR-10, {tflop:g} TFLOP per method

{count} methods pretrained a ViT of width 128 and depth 4 on images of 32 px in patches of 8 px, with {tflop:g} TFLOP
each: all multiply-adds of all networks, forward and backward, of 2 FLOP each. The supervised baseline learns from
labels, all others from images alone.

[docs/boards.md](../docs/boards.md) says what this shows, and what it cannot. `bench record --check {name}` checks the
numbers. `python -m tools.board --table FOLDER` prints the first table.

Accuracies in % on {images} validation images, with {training_images} training images behind a probe{fewer}; few-shot
probes use 16 of a class. Fine-tuning is `finetune@smoke`, short, no published protocol. In brackets 95 % intervals over
images; with a sign the gain over the network's own initial weights. Methods with the same initial weights share them,
named after one of these. The table has one training of each method; seeds can change the order. s: better than the own
initial weights; p: better than raw pixels; -s and -p: worse; all p <= {level} after Holm's correction over the tests of
a column. ?: doubted for the reason in leaderboard.md.{transfer}{left}

{table}

{better}

## Significant differences

{differences}{seeds}

## Trainings

The last columns are the search: k-NN (k = 20, class token or mean patch,
whichever is better) of {search_images} held-out training images among {search_images} others, after a training with
{share:g} of the budget at each multiple of the recipe's learning rate. The chosen rate is bold: the best,
unless the recipe's is within {margin:g} points of it.

{trainings}
"""
TRANSFER = " Columns of CIFAR-100 evaluate the same networks on its images."
SEEDS = """

## Several seeds

The same trainings with other seeds for initial weights, images and augmentation, at the same learning rate: mean and
standard deviation over trainings, and the mean gain over their own initial weights with its 95 % interval (Student's t
over trainings; intervals above are over validation images).

{table}"""


def chosen_rate(accuracies: Mapping[str, float], margin: float = MARGIN) -> str:
    """The best rate, or the recipe's own if it is within the margin. accuracies: rate as text -> k-NN accuracy in %."""
    best = max(accuracies, key=accuracies.__getitem__)
    return "1" if round(accuracies[best] - accuracies["1"], 6) <= margin else best


class Board:
    """The trainings and evaluations of one budget, below the folder `out`."""

    def __init__(
        self, images: str, out: Path, tflop: float, search_share: float = 0.05, transfer: str | None = None
    ) -> None:
        self.images, self.out, self.tflop, self.search_share = images, out, tflop, search_share
        self.transfer = transfer  # URL of other images on which the networks are evaluated
        self.recorded: dict[str, str] = {}  # networks of an earlier record -> name of their initial weights

    @property
    def searched(self) -> str:
        """The URL of the search's images, whose validation split is held out."""
        return f"{self.images}?val={HELD_OUT}&seed=0"

    def training_subset(self, images: int) -> str:
        """The URL of a number of training images, the same number of each class.

        Larger subsets contain the smaller ones, and none contains the held-out images.
        """
        return f"{self.images}?val={1 - ceil(images / 10) / PER_CLASS:.4f}&seed=0"

    def pretrain(self, method: str, images: str, run: Path, seed: int = 0, knn_every: int = 0, **settings: Any) -> Path:
        """Run or resume a training, unless it is finished; returns its folder `run`."""
        if not (run / "export" / "cost.json").exists():
            bench.pretrain(
                method,
                "32px",
                images,
                run,
                settings=NETWORK | CHANGES.get(method, {}) | settings,
                resume=True,
                seed=seed,
                knn_every=knn_every,
                knn_data=self.searched if knn_every else None,
                knn_limit=SEARCH_IMAGES if knn_every else None,
                options=OPTIONS,
            )
        return run

    def run(self, method: str, seed: int, rate: str, kind: str = "runs") -> Path:
        """The folder of a training."""
        return self.out / kind / f"{method}-seed{seed}-lr{rate}"

    def train(self, method: str, seed: int, rate: float, share: float) -> Path:
        """Train with a share of the budget, at `rate` times the recipe's learning rate; returns the folder.

        The number of epochs is the recipe's, and the number of updates in each is that which comes closest to the
        budget; if there are not enough images, there are more epochs. A training of one update per epoch counts the
        FLOPs of an image.
        """
        batch = NETWORK["batch"]
        counting_run = self.pretrain(method, self.training_subset(batch), self.out / "counts" / method)
        gflop_per_image = json.loads((counting_run / "export" / "cost.json").read_text())["gflop_per_image"]
        recipe = json.loads((counting_run / "run.json").read_text())["settings"]
        images_seen = share * self.tflop * 1e3 / gflop_per_image
        epochs = max(recipe["epochs"], ceil(images_seen / (10 * PER_CLASS * (1 - HELD_OUT))))
        updates = max(1, round(images_seen / epochs / batch))  # of an epoch
        run = self.run(method, seed, f"{rate:.2g}", "runs" if share == 1 else "search")
        lr = float(f"{recipe['lr'] * rate:.3g}")
        knn_every = ceil(epochs / CURVE_POINTS) if share == 1 else 0
        images = self.training_subset(updates * batch)
        return self.pretrain(method, images, run, seed, knn_every, epochs=epochs, lr=lr)

    def search_rate(self, method: str) -> dict[str, float]:
        """Rate -> k-NN accuracy on held-out training images, of the class token or the mean patch."""
        path = self.out / "search" / f"{method}.json"
        if not path.exists():
            runs = {f"{rate:.2g}": self.train(method, 0, rate, self.search_share) for rate in RATES}
            top1s = {rate: self.heldout_top1(run) for rate, run in runs.items()}
            write_atomic(path, json.dumps(top1s, indent=1) + "\n")
        return json.loads(path.read_text())

    def heldout_top1(self, run: Path) -> float:
        """k-NN accuracy on held-out training images, of the class token or the mean patch, whichever is better."""
        results = bench.evaluate_suite(
            [run / "export"],
            "knn@dino,knn@moca",
            {"heldout": self.searched},
            names=[run.name],
            settings=settings_for(["knn@dino"]),
            limit=SEARCH_IMAGES,
            out=self.out / "search-results",
            options=OPTIONS,
        )
        return max(result.numbers["top1_k20"] for result in results)

    def train_at_best_rate(self, method: str, seed: int) -> Path:
        """Train with the whole budget, at the chosen rate; returns the folder."""
        chosen = chosen_rate(self.search_rate(method))
        return self.train(method, seed, next(rate for rate in RATES if f"{rate:.2g}" == chosen), 1.0)

    @property
    def about(self) -> dict[str, Any]:
        """What all trainings of a board have in common, as FOLDER.json has it."""
        return {"tflop": self.tflop, "search_share": self.search_share, "margin": MARGIN}

    def take_up(self, folder: Path) -> None:
        """Go on from the record in `folder`, if there is one: its evaluated networks are not trained again.

        ValueError if it is of another budget or search.
        """
        if not companion_file(folder, "json").is_file():
            return
        record = Record(folder=folder)
        for name, value in self.about.items():
            if record.about.get(name) != value:
                text = f"{folder} has {name} {record.about.get(name)}, and this board {value}"
                raise ValueError(f"{text}: give it another --record")
        take_up_record(folder, self.out)
        evaluated = {name for name, *_ in record.results}
        self.recorded = {name: start for name, start in record.about["starts"].items() if name in evaluated}
        for method, accuracies in record.about["search"].items():
            path = self.out / "search" / f"{method}.json"
            if not path.exists():
                write_atomic(path, json.dumps(accuracies, indent=1) + "\n")

    @property
    def seeds(self) -> list[int]:
        """Seeds with at least one finished training."""
        names = {path.parents[1].name for path in self.out.glob("runs/*/export/cost.json")}
        return sorted({int(name.partition(SEED)[2].partition("-")[0]) for name in names})

    def finished(self, seed: int) -> dict[str, Path]:
        """Method -> folder of its finished training with the whole budget, at the chosen rate."""
        searched = [method for method in METHODS if (self.out / "search" / f"{method}.json").exists()]
        runs = {method: self.run(method, seed, chosen_rate(self.search_rate(method))) for method in searched}
        return {method: run for method, run in runs.items() if (run / "export" / "cost.json").exists()}

    def starts(self, seed: int) -> dict[str, str]:
        """Trained network -> name of its initial weights; networks with the same initial weights share a name."""
        recorded, results = set(self.recorded.values()), [stored.result for stored in stored_results(self.out)]
        used = [result.checkpoint for result in results if result.checkpoint.name in recorded]
        names = {checkpoint.digest: checkpoint.name for checkpoint in used}
        return {
            label(method, seed): names.setdefault(bench.load(run / "start").digest, f"{label(method, seed)}{START}")
            for method, run in self.finished(seed).items()
        }

    def evaluate(self, seed: int, protocols: Collection[str]) -> None:
        """Evaluate raw pixels, initial weights and finished trainings by those READOUTS that are among `protocols`."""
        runs = {label(method, seed): run for method, run in self.finished(seed).items()}
        networks: dict[str, Path | str] = {name: run / "export" for name, run in runs.items()}
        different = set(self.starts(seed).values())
        starts = {f"{name}{START}": run / "start" for name, run in runs.items() if f"{name}{START}" in different}
        for readout in READOUTS:
            chosen = [protocol for protocol in readout.protocols if protocol in protocols]
            url = {"cifar10": self.images, "cifar100": self.transfer}[readout.data]
            if not (chosen and url):
                continue
            others = ({PIXELS: "pixels:32"} if readout.of_pixels else {}) | (starts if readout.of_starts else {})
            checkpoints = others | networks
            bench.evaluate_suite(
                list(checkpoints.values()),
                ",".join(chosen),
                {readout.data: url},
                names=list(checkpoints),
                settings=settings_for(chosen),
                limit=readout.limit,
                out=self.out,
                options=OPTIONS,
            )

    def write_record(self, folder: Path) -> None:
        """Write the record of all finished trainings and evaluations, and its two companion files."""
        searches = {path.stem: json.loads(path.read_text()) for path in self.out.glob("search/*.json")}
        starts = self.recorded | {name: start for seed in self.seeds for name, start in self.starts(seed).items()}
        about = self.about | {"starts": starts, "search": {name: searches[name] for name in sorted(searches)}}
        write_atomic(companion_file(folder, "json"), json.dumps(about, indent=1) + "\n")
        write_record(self.out, folder)
        write_atomic(companion_file(folder, "md"), page(folder))


def companion_file(folder: Path, ending: str) -> Path:
    """A file next to a record, which itself contains only what `bench record --check` can check.

    FOLDER.json has the budget, the search and the names of initial weights; FOLDER.md is the page.
    """
    return folder.with_name(f"{folder.name}.{ending}")


def label(method: str, seed: int) -> str:
    """The name of a trained network in results."""
    return f"{method}{SEED}{seed}" if seed else method


def settings_for(protocols: Sequence[str]) -> dict[str, Any]:
    """The entries of SETTINGS for the tasks of these protocols."""
    tasks = {protocol.partition("@")[0].partition("_")[0] for protocol in protocols}
    return {name: value for name, value in SETTINGS.items() if name.partition(".")[0] in tasks}


@dataclass(frozen=True, kw_only=True)
class Record:
    """A record and its companion files: the numbers of the page."""

    folder: Path

    @cached_property
    def about(self) -> dict[str, Any]:
        """The contents of FOLDER.json: budget, initial weights of each network, search."""
        return json.loads(companion_file(self.folder, "json").read_text())

    @cached_property
    def networks(self) -> dict[str, str]:
        """Network of the first seed -> its initial weights. ValueError if none was evaluated."""
        evaluated = {name for name, *_ in self.results}
        starts = self.about["starts"].items()
        networks = {name: start for name, start in starts if SEED not in name and name in evaluated}
        if not networks:
            raise ValueError(f"{self.folder} has no result of a network trained with seed 0")
        return networks

    @cached_property
    def results(self) -> dict[tuple[str, str, str], StoredResult]:
        """(checkpoint, name of the images, protocol) -> its result. ValueError if there are two."""
        results: dict[tuple[str, str, str], StoredResult] = {}
        for entry in stored_results(self.folder):
            result = entry.result
            key = result.checkpoint.name, result.data.name, result.protocol.name
            if key in results:
                raise ValueError(f"{entry.path}: a second result of {' '.join(key)}: remove that of the older training")
            results[key] = entry
        return results

    @cached_property
    def columns(self) -> list[Column]:
        """The columns of which the record has numbers of trained networks."""
        present = {(data, protocol) for name, data, protocol in self.results if name in self.networks}
        return [column for column in COLUMNS if (column.data, column.protocol) in present]

    @cached_property
    def gains(self) -> dict[tuple[str, str], Gain]:
        """(network of the first seed, header of a column) -> its paired tests against its initial weights and raw
        pixels, corrected over the column, as a report has them."""
        results = [entry for (name, *_), entry in self.results.items() if SEED not in name]
        board = leaderboard_of_stored(results)
        starts, names = initial_weights(board, self.about["starts"]), {used.key: used.name for used in board.rows}
        cache = PairedTestCache()
        by_column: dict[tuple[str, str], Gain] = {}
        for column in self.columns:
            group = self.any_result(column).group
            in_column = gains(board, (group, column.metric), starts, cache)
            by_column |= {(names[key], column.header): gain for key, gain in in_column.items()}
        return by_column

    def any_result(self, column: Column) -> Result:
        """The result of one of the networks, for its settings and limit."""
        return next(entry.result for name in self.networks if (entry := self.stored(name, column)))

    def stored(self, name: str, column: Column) -> StoredResult | None:
        return self.results.get((name, column.data, column.protocol))

    def number(self, name: str, column: Column) -> MetricRecord | None:
        stored = self.stored(name, column)
        return stored.result.metrics.get(column.metric) if stored else None

    def cell(self, name: str, column: Column) -> str:
        """A number, its interval, the gain on initial weights, and marks; "" if there is no result."""
        stored, number = self.stored(name, column), self.number(name, column)
        gain = self.gains.get((name, column.header))
        if not (stored and number):
            return ""
        doubt = " ?" * (column.metric in stored.result.doubted_metrics)
        interval = f" {interval_text(*number.interval)}" if number.interval else ""
        compared = f", {' '.join(filter(None, (gain.text, gain.marks)))}" if gain else ""
        return f"{number.value:.1f}{interval}{doubt}{compared}"

    @property
    def names(self) -> list[str]:
        """Trained networks and raw pixels by falling k-NN accuracy."""
        names = [*self.networks, *([PIXELS] if self.number(PIXELS, KNN) else [])]
        return sorted(names, key=lambda name: (-self.best_knn(name), name))

    def best_knn(self, name: str) -> float:
        """k-NN accuracy on the images of the training, of the class token or the mean patch."""
        numbers = [self.number(name, column) for column in COLUMNS[:2]]
        return max((number.value for number in numbers if number), default=0.0)

    def table(self) -> str:
        """Markdown table of the trained networks of the first seed, and of raw pixels."""
        rows = [[name, *(self.cell(name, column) for column in self.columns)] for name in self.names]
        return "\n".join(markdown_table([["", *(column.header for column in self.columns)], *rows], "---:"))

    def better_counts(self) -> str:
        """Markdown table of how many networks are significantly better than their initial weights and raw pixels."""
        columns = [column for column in self.columns if any(column.header == header for _, header in self.gains)]
        rows = [[words] for words in BASELINES.values()]
        for column in columns:
            in_column = [gain for (_, header), gain in self.gains.items() if header == column.header]
            for row, role in zip(rows, BASELINES, strict=True):
                count = outcomes(role, in_column)
                row.append(f"{count.better} of {count.of}" if count.of else "")
        header = ["significantly better than", *(column.header for column in columns)]
        return "\n".join(markdown_table([header, *rows], "---:"))

    def figure(self, marked: str = "") -> "Figure":
        """The accuracies of DRAWN with their intervals: a row for each trained network; open circles are its initial
        weights, strokes its trainings with other seeds, and the band is raw pixels. The row of the network `marked` is
        shaded."""
        from matplotlib.figure import Figure

        drawn = [column for column in self.columns if column.header in DRAWN]
        if not drawn:
            raise ValueError(f"{self.folder} has no result of {', '.join(DRAWN)}")

        networks = [name for name in self.names if name in self.networks][::-1]  # the best at the top
        labels = [f"{name} (labels)" if name == SUPERVISED else name for name in networks]
        figure = Figure(figsize=(9.5, 1.5 + 0.15 * len(networks)), layout="constrained")
        panels = figure.subplots(1, len(drawn), sharey=True, squeeze=False)[0]
        for axis, column in zip(panels, drawn, strict=True):
            pixels = self.number(PIXELS, column)
            if pixels and pixels.interval:
                axis.axvspan(*pixels.interval, color="0.9", label="raw pixels")
            for row, name in enumerate(networks):
                if name == marked:
                    axis.axhspan(row - 0.5, row + 0.5, color="#0072b2", alpha=0.2)
                start, trained = self.number(self.networks[name], column), self.number(name, column)
                if start:
                    axis.plot(start.value, row, "o", color="0.55", markerfacecolor="white", label="initial weights")
                if trained and trained.interval:
                    axis.plot(trained.interval, [row, row], "-", color="#0072b2", label="pretrained, 95 % interval")
                    axis.plot(trained.value, row, "o", color="#0072b2")
                for other in filter(None, (self.number(other, column) for other in self.repeated(name))):
                    axis.plot(other.value, row, "|", color="#d55e00", label="other seeds")
            axis.set_title(f"{column.header}, %", fontsize="medium")
            axis.set_yticks(range(len(networks)), labels)
            axis.grid(axis="x", color="0.9")
            axis.set_axisbelow(True)
        entries = {
            label: line for axis in panels for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=4, frameon=False)
        return figure

    def curves(self) -> "Figure":
        """k-NN accuracy during each training, over the share of its updates; grey: the other trainings."""
        from matplotlib.figure import Figure

        curves = {name: self.curve(name) for name in self.names if name in self.networks}
        if not any(shares for shares, _ in curves.values()):
            raise ValueError(f"{self.folder} has no log with k-NN accuracies")
        rows = ceil(len(curves) / CURVES_IN_ROW)
        across = ceil(len(curves) / rows)
        figure = Figure(figsize=(9.5, 1 + 1.5 * rows), layout="constrained")
        panels = figure.subplots(rows, across, sharex=True, sharey=True, squeeze=False).flat
        for name, axis in zip(curves, panels, strict=False):
            for other in curves.values():
                axis.plot(*other, color="0.85", linewidth=0.8)
            axis.plot(*curves[name], color="#0072b2", marker="o", markersize=3)
            axis.set_title(name, fontsize="medium")
            axis.tick_params(labelbottom=True)  # the panel below may be empty
            axis.grid(axis="y", color="0.9")
        for axis in panels:  # those that are left over
            axis.set_axis_off()
        figure.supxlabel("share of the budget", fontsize="medium")
        figure.supylabel("k-NN accuracy in %", fontsize="medium")
        return figure

    def curve(self, name: str) -> tuple[list[float], list[float]]:
        """Shares of the updates, and the k-NN accuracy after them, from the log of a training."""
        lines = training_log(self.folder, self.checkpoint(name))
        steps = max((line["step"] for line in lines), default=1)
        points = [(line["step"] / steps, line["knn_top1"]) for line in lines if "knn_top1" in line]
        return [share for share, _ in points], [top1 for _, top1 in points]

    def checkpoint(self, name: str) -> CheckpointUsed:
        return next(entry.result.checkpoint for (network, *_), entry in self.results.items() if network == name)

    def differences(self) -> str:
        """Table of the significant differences, largest first."""
        tests: list[tuple[str, str, str, PairedTest, float]] = []
        for (name, header), gain in self.gains.items():
            for role, other in zip(BASELINES, (self.networks[name], PIXELS), strict=True):
                if gain.significant(role):
                    tests.append((name, other, header, *gain.tests[role]))
        rows = [
            [name, other, header, f"{test.difference:+.1f} {interval_text(test.low, test.high)}", p_text(p)]
            for name, other, header, test, p in sorted(tests, key=lambda entry: -entry[3].difference)
        ]
        return "\n".join(
            markdown_table([["network", "compared with", "by", "difference", "p, corrected"], *rows], "---:")
        )

    def repeated(self, method: str) -> list[str]:
        """The networks of a method that were trained with other seeds than the first."""
        return [name for name in self.about["starts"] if name.startswith(f"{method}{SEED}")]

    def seeds(self) -> str:
        """The section on methods with several seeds; "" if there are none."""
        rows: list[list[str]] = []
        for method in self.networks:
            names = [method, *self.repeated(method)]
            cells = [self.over_seeds(names, column) for column in self.columns] if names[1:] else []
            rows += [[method, str(len(names)), *cells]] if cells else []
        header = ["method", "trainings", *(column.header for column in self.columns)]
        filled = [index for index, _ in enumerate(header) if any(row[index] for row in rows)]
        table = [[row[index] for index in filled] for row in (header, *rows)]
        return SEEDS.format(table="\n".join(markdown_table(table, "---:"))) if rows else ""

    def over_seeds(self, names: Sequence[str], column: Column) -> str:
        """Mean and standard deviation over the networks of a method, and the mean gain on initial weights with its
        interval; "" if one of them has no result."""
        numbers = [self.number(name, column) for name in (*names, *(self.about["starts"][name] for name in names))]
        if None in numbers:
            return ""
        values, starts = np.array([number.value for number in numbers if number]).reshape(2, -1)
        interval, _ = paired_t(values - starts)
        gain = f"{(values - starts).mean():+.1f} {interval_text(*interval)}"
        return f"{values.mean():.1f} \u00b1 {values.std(ddof=1):.1f}, {gain}"

    def trainings(self) -> str:
        """Table of the cost of each training, and of held-out accuracy by learning rate, with the chosen rate bold."""
        rows = []
        for name in self.networks:
            used = self.checkpoint(name)
            folder = self.folder / "checkpoints" / used.unique_name
            run, cost = (json.loads((folder / file).read_text()) for file in ("run.json", "cost.json"))
            settings, gflop = run["settings"], cost["gflop_per_image"]
            updates = run["data"]["images"] // settings["batch"]
            images = settings["epochs"] * updates * settings["batch"]
            top1s = self.about["search"][used.method]
            best = chosen_rate(top1s, self.about["margin"])
            row = [
                name,
                f"{gflop:.3f}",
                f"{settings['epochs']} x {updates}",
                f"{images:,}",
                f"{images * gflop / 1e3:.2f}",
                f"{settings['lr']:.2g}",
            ]
            rows.append(row + [f"**{top1:.2f}**" if rate == best else f"{top1:.2f}" for rate, top1 in top1s.items()])
        header = ["method", "GFLOP an image", "epochs x updates", "images", "TFLOP", "learning rate"]
        rates = next(iter(self.about["search"].values()))
        return "\n".join(markdown_table([[*header, *(f"x {rate}" for rate in rates)], *rows], "---:"))


def page(folder: Path) -> str:
    """The text of FOLDER.md, made from the record and FOLDER.json."""
    record = Record(folder=folder)
    tflop, trained = record.about["tflop"], record.networks
    untrained = [method for method in METHODS if method not in trained]
    used = {column.header: record.any_result(column) for column in record.columns}
    limit = max(result.limit or 0 for result in used.values())
    images = {split: min(n, limit or n) for split, n in next(iter(used.values())).data.images.items()}
    fewer = defaultdict[int, list[str]](list)
    for header, result in used.items():
        if result.limit and result.limit < limit:
            fewer[result.limit].append(header)
    return PAGE.format(
        name=folder.name,
        tflop=tflop,
        count=len(trained),
        images=f"{images['val']:,}",
        training_images=f"{images['train']:,}",
        fewer="".join(f" ({', '.join(headers)}: {number:,} of both)" for number, headers in fewer.items()),
        margin=record.about["margin"],
        level=LEVEL,
        transfer=TRANSFER if any(column.data == "cifar100" for column in record.columns) else "",
        left=f" Not in this record: {', '.join(untrained)}." if untrained else "",
        better=record.better_counts(),
        table=record.table(),
        differences=record.differences(),
        seeds=record.seeds(),
        search_images=SEARCH_IMAGES,
        share=record.about["search_share"],
        trainings=record.trainings(),
    )


@on_command_line()
def main() -> None:
    """Make a board, from counting FLOPs to the record; or print or draw the numbers of a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, metavar="FOLDER", help="print the table of a record, and do nothing else")
    parser.add_argument(
        "--figure", type=Path, nargs=2, metavar=("FOLDER", "FILE"), help="draw a record, and do nothing else"
    )
    parser.add_argument(
        "--curves", type=Path, nargs=2, metavar=("FOLDER", "FILE"), help="draw its k-NN curves, and do nothing else"
    )
    parser.add_argument("--images", metavar="URL", help="cifar10:PATH")
    parser.add_argument(
        "--transfer", metavar="URL", help="images of CIFAR-100, such as folder:PATH: the same networks on other images"
    )
    parser.add_argument("--out", type=Path, help="folder of trainings and results")
    parser.add_argument("--budget", type=float, default=1.0, metavar="TFLOP", help="of each training (1)")
    parser.add_argument(
        "--search-share", type=float, default=0.05, metavar="SHARE", help="of the budget, for each learning rate (0.05)"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS, metavar="METHOD")
    known = list(dict.fromkeys(protocol for readout in READOUTS for protocol in readout.protocols))
    parser.add_argument("--evaluate", nargs="*", default=known, choices=known, metavar="PROTOCOL", help="(all)")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="written at the end")
    arguments = parser.parse_args()
    if arguments.table:
        say(*Record(folder=arguments.table).table().splitlines())
        return
    for chosen, draw in ((arguments.figure, Record.figure), (arguments.curves, Record.curves)):
        if chosen:
            draw(Record(folder=chosen[0])).savefig(chosen[1], dpi=150)
            return
    if not (arguments.images and arguments.out):
        parser.error("--images and --out are needed")
    board = Board(arguments.images, arguments.out, arguments.budget, arguments.search_share, arguments.transfer)
    if arguments.record:
        board.take_up(arguments.record)
    for seed in arguments.seeds:
        for method in arguments.methods:
            if label(method, seed) in board.recorded:
                continue
            say(f"seed {seed}: {board.train_at_best_rate(method, seed)}")
        board.evaluate(seed, arguments.evaluate)
    if arguments.record:
        board.write_record(arguments.record)


if __name__ == "__main__":
    main()
