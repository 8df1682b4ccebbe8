"""The curves of a report: accuracy over k, shots and blocks, and pretrainings."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench.reports.contents import ReportContents, ReportTable, contents
from bench.reports.drawing import (
    PAGE_WIDTH,
    DrawPanel,
    Points,
    Style,
    Texts,
    draw_lines,
    figure_of,
    styles_of,
    use_integer_ticks,
)
from bench.reports.leaderboard import Cell, Leaderboard, read_leaderboard
from bench.results.record import CheckpointUsed
from engine.errors import UserError, spelled
from engine.files import read_json, read_json_lines
from engine.printing import did_you_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TrainingLog = Sequence[Mapping[str, float]]  # lines of a log.jsonl, each with the numbers in it by key
LOSS = "loss of "  # and the method: losses of different methods are never on one axis
CURVES = {  # key in a training's log -> its title
    "knn_top1": "k-NN top-1, %",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "feature_rank": "rank of features",
    "feature_spread": "spread of features",
    "health_rankme": "RankMe",
    "health_alpha_req": "alpha-ReQ",
    "health_lidar": "LiDAR",
    "health_uniformity": "uniformity",
    "health_dead_dimensions": "dead dimensions, %",
    "images_per_second": "images per second",
}
ALONG = {"epoch": "epoch", "images": "images seen", "hours": "hours"}  # x-axis of training curves -> its label
BLOCK = r"(\w+)_block(\d+)"  # pattern of the metrics of blocks before the last
SWEEPS = {  # figure -> pattern of metrics with x in their names, and label of x
    "k": (r"(\w+)_k(\d+)", "k of k-NN"),
    "shots": (r"(\w+)_(\d+)shot", "labelled images per class"),
    "blocks": (BLOCK, "block"),
}
MAX_CURVES = 12  # in a panel: of the networks with the lowest mean ranks
MAX_POINTS = 400  # of a training curve


def curve_figures(
    report: ReportContents, logs: Mapping[str, TrainingLog], width: float = PAGE_WIDTH, along: str = ""
) -> "dict[str, Figure]":
    """Accuracy over k, shots and blocks, and curves of pretrainings: name -> figure.

    logs: name -> log of its training. along: x-axis of the pretrainings, whose curves are then all drawn; "" draws
    k-NN and losses over the images seen, as a report does.
    """
    networks = [report.board.names[used] for used in report.overview if report.board.kinds[used] == "measured"]
    baselines = [report.board.names[used] for used in report.overview if used.is_raw_pixels]
    styles = styles_of([*networks, *(name for name in logs if name not in networks)], baselines)
    drawn = {name: styles[name] for name in [*networks[:MAX_CURVES], *baselines]}
    figures = sweep_figures(report, drawn, width)
    keys = CURVES if along else {"knn_top1": CURVES["knn_top1"]}
    if training := training_figure(logs, styles, along or "images", width, keys):
        figures["pretraining"] = training
    return figures


def sweep_figures(report: ReportContents, styles: Mapping[str, Style], width: float) -> "dict[str, Figure]":
    """Accuracy over each of SWEEPS: name -> figure, with a panel for each table of at least two points."""
    figures = {}
    for name, (pattern, x_label) in SWEEPS.items():
        panels: list[DrawPanel] = []
        for table in report.tables:
            curves = {table.board.names[used]: sweep_of(used, table, pattern) for used in table.checkpoints}
            if any(len(points) > 1 for points in curves.values()):
                title, y_label = f"{table.title} on {table.result.data.name}", table.metrics[0].split("_")[0]
                texts = (title, x_label, f"{y_label}, {table.unit}" if table.unit else y_label)
                panels.append(partial(_draw_sweep, table, curves, styles, texts))
        if panels:
            figures[f"accuracy over {name}"] = figure_of(panels, styles, width)
    return figures


def sweep_of(used: CheckpointUsed, table: ReportTable, pattern: str) -> list[tuple[float, Cell]]:
    """Points (x, number) of the first metric that is swept, such as `top1` over k in `top1_k10` and `top1_k20`.

    pattern: matches a metric's name; its groups are the name without x, and x. For BLOCK the main number is added as
    that of the last block.
    """
    cells = {metric: cell for metric in table.metrics if (cell := table.board.rows[used].get((table.group, metric)))}
    matches = [(match, cell) for metric, cell in cells.items() if (match := re.fullmatch(pattern, metric))]
    points = {float(match[2]): cell for match, cell in matches if match[1] == matches[0][0][1]}
    if pattern == BLOCK and points and used in table.cells:
        points[max(points) + 1] = table.cells[used]
    return sorted(points.items())


def _draw_sweep(
    table: ReportTable,
    curves: Mapping[str, Sequence[tuple[float, Cell]]],
    styles: Mapping[str, Style],
    texts: Texts,
    axes: "Axes",
) -> Texts:
    """Draw numbers as points, and their intervals as vertical bars; over blocks, raw pixels are horizontal lines."""
    for name in filter(curves.get, styles):
        points, style = curves[name], styles[name]
        axes.plot([x for x, _ in points], [cell.mean for _, cell in points], label=name, markersize=5, **style)
        if bars := [(x, *cell.interval) for x, cell in points if cell.interval]:
            axes.vlines(*zip(*bars, strict=True), color=style["color"], linewidth=0.8)
    if texts[1] != SWEEPS["blocks"][1]:
        ticks = sorted({x for points in curves.values() for x, _ in points})
        axes.set_xscale("log")
        axes.minorticks_off()
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        return texts
    use_integer_ticks(axes)
    for used, cell in table.cells.items():
        name = table.board.names[used]
        if used.is_raw_pixels and table.has_intervals and name in styles:  # its RankMe has another order of magnitude
            axes.axhline(cell.mean, label=name, **styles[name])
    return texts


def training_logs(board: Leaderboard) -> dict[str, TrainingLog]:
    """Name -> log of each network of a leaderboard whose pretraining is on this machine."""
    networks = [used for used, kind in board.kinds.items() if kind == "measured"]
    logs = {board.names[used]: read_log(Path(used.source).parent / "log.jsonl") for used in networks}
    return {name: lines for name, lines in logs.items() if lines}


def updates_in(logs: Mapping[str, TrainingLog]) -> dict[str, int]:
    """Name -> number of updates of its training."""
    return {name: int(max(line.get("step", 0) for line in lines)) for name, lines in logs.items()}


def read_log(path: Path) -> TrainingLog:
    """Lines of a training's log.jsonl, each with epoch, images and hours if known; empty if there is no such file.

    The loss is called by its method, "loss of mae". An incomplete last line is left out. Lines of the k-NN monitor hold
    only the number of updates; their epoch is computed from the updates per epoch.
    """
    lines: list[dict[str, float]] = []
    with contextlib.suppress(OSError, ValueError):
        for entry in read_json_lines(path):
            lines.append({key: value for key, value in entry.items() if isinstance(value, int | float)})
    with_epoch = [line for line in lines if line.get("epoch") and line.get("step")]
    first, last = (with_epoch[0], with_epoch[-1]) if with_epoch else ({}, {})
    updates = (last["step"] - first["step"]) if with_epoch else 0
    epochs_per_update = (last["epoch"] - first["epoch"]) / updates if updates else 0.0
    batch, method = _batch_and_method(path.parent)
    hours = 0.0
    for line in lines:
        if "loss" in line:
            line[f"{LOSS}{method}"] = line.pop("loss")
        if "step" not in line:
            continue
        if "epoch" not in line and epochs_per_update:
            line["epoch"] = last["epoch"] + (line["step"] - last["step"]) * epochs_per_update
        if batch:
            line["images"] = line["step"] * batch
            if line.get("images_per_second"):
                hours += line.get("updates", 1) * batch / line["images_per_second"] / 3600
            line["hours"] = hours
    return lines


def _batch_and_method(run: Path) -> tuple[int, str]:
    """Batch size and method of the pretraining in a folder; 0 and "" if its run.json does not have them."""
    try:
        facts = read_json(run / "run.json")
        return int(facts["settings"]["batch"]), str(facts.get("method", ""))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0, ""


def training_figure(
    logs: Mapping[str, TrainingLog],
    styles: Mapping[str, Style] | None = None,
    along: str = "epoch",
    width: float = PAGE_WIDTH,
    keys: Mapping[str, str] = CURVES,
) -> "Figure | None":
    """Training curves, with a panel for each of `keys` that is in any log, and for the loss if all are of one method;
    None if there is none.

    logs: name -> its log (`read_log`). along: x-axis, a key of ALONG. keys: key in the logs -> title.
    """
    losses = {key for lines in logs.values() for line in lines for key in line if key.startswith(LOSS)}
    keys = ({key: "loss" for key in losses} if len(losses) == 1 else {}) | dict(keys)
    styles = styles or styles_of(logs)

    def draw_panel(curves: Mapping[str, Points], title: str, axes: "Axes") -> Texts:
        draw_lines(axes, curves, styles)
        return title, ALONG[along], ""

    panels: list[DrawPanel] = []
    for key, title in keys.items():
        curves = {name: points_of(lines, key, along) for name, lines in logs.items()}
        if any(curves.values()):
            panels.append(partial(draw_panel, curves, title))
    return figure_of(panels, styles, width) if panels else None


def points_of(lines: TrainingLog, key: str, along: str = "epoch") -> list[tuple[float, float]]:
    """Points (x, value) of a log's lines that have the key, thinned to MAX_POINTS."""
    points = [(line[along], line[key]) for line in lines if key in line and along in line]
    return points[:: max(1, -(-len(points) // MAX_POINTS))]


def paper_figures(
    out: Path | None, runs: Sequence[str] = (), along: str = "epoch", width: float = 6.75
) -> "dict[str, Figure]":
    """The curves of a report, and of further pretrainings, in a width for a paper.

    Args:
        out: folder of results.
        runs: folders of further pretrainings.
        along: x-axis of the training curves, a key of ALONG.
        width: in inches.

    Returns:
        Name -> figure.

    Raises:
        ValueError: if there is nothing to draw, or one of `runs` has no log.
    """
    if along not in ALONG:
        raise UserError("along", f"no such axis{did_you_mean(along, list(ALONG))}", along)
    logs_of_runs = {Path(run): read_log(Path(run) / "log.jsonl") for run in runs}
    if missing := [run for run, lines in logs_of_runs.items() if not lines]:
        problem = "has no log.jsonl" if missing[0].exists() else "does not exist"
        raise ValueError(f"{missing[0]} {problem}: name folders of `bench pretrain --out`")
    board = read_leaderboard(out) if out else Leaderboard(rows={}, groups={}, caveats={})
    logs = training_logs(board) | {run.name: lines for run, lines in logs_of_runs.items()}
    figures = curve_figures(contents(board), logs, width, along)
    if not figures:
        what = f"{spelled('--results', 'out')} with several numbers of k, shots or blocks, or runs of `bench pretrain`"
        raise ValueError(f"nothing to draw: give {what}")
    return figures
