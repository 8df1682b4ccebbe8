"""The curves of a report: accuracy over k, shots and blocks, and pretrainings over the images seen."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench.reports.contents import ReportContents, ReportTable
from bench.reports.drawing import DrawPanel, Style, Texts, figure_of, styles_of
from bench.reports.leaderboard import Cell, Leaderboard
from bench.results.record import CheckpointUsed
from engine.files import read_json, read_json_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TrainingLog = Sequence[Mapping[str, float]]  # lines of a log.jsonl, each with the numbers in it by key
Points = Sequence[tuple[float, float]]
LOSS = "loss of "  # and the method: losses of different methods are never on one axis
BLOCK = r"(\w+)_block(\d+)"  # pattern of the metrics of blocks before the last
SWEEPS = {  # figure -> pattern of metrics with x in their names, and label of x
    "k": (r"(\w+)_k(\d+)", "k of k-NN"),
    "shots": (r"(\w+)_(\d+)shot", "labelled images per class"),
    "blocks": (BLOCK, "block"),
}
MAX_CURVES = 12  # in a panel: of the networks with the lowest mean ranks
MAX_POINTS = 400  # of a training curve
MAX_ALL_MARKED = 30  # points; in a training curve with more, not every point has a marker
MARKERS_OF_CURVE = 10  # about how many markers such a curve has
MAX_TICKS = 6  # of an axis of blocks


def curve_figures(report: ReportContents, logs: Mapping[str, TrainingLog]) -> "dict[str, Figure]":
    """Accuracy over k, shots and blocks, and curves of pretrainings: name -> figure.

    logs: name -> log of its training.
    """
    networks = [report.board.names[used] for used in report.overview if report.board.kinds[used] == "measured"]
    baselines = [report.board.names[used] for used in report.overview if used.is_raw_pixels]
    styles = styles_of(networks[:MAX_CURVES], baselines)
    figures = sweep_figures(report, styles)
    if training := training_figure({name: log for name, log in logs.items() if name in styles}, styles):
        figures["pretraining"] = training
    return figures


def sweep_figures(report: ReportContents, styles: Mapping[str, Style]) -> "dict[str, Figure]":
    """Accuracy over each of SWEEPS: name -> figure, with a panel for each table of at least two points."""
    figures = {}
    for name, (pattern, x_label) in SWEEPS.items():
        panels: list[DrawPanel] = []
        for table in report.tables:
            curves = {table.board.names[used]: sweep_of(used, table, pattern) for used in table.checkpoints}
            if any(len(points) > 1 for points in curves.values()):
                title = f"{table.title} on {table.result.data.name}"
                y_label = next(match[1] for metric in table.metrics if (match := re.fullmatch(pattern, metric)))
                texts = (title, x_label, f"{y_label}, {table.unit}" if table.unit else y_label)
                panels.append(partial(_draw_sweep, table, curves, styles, texts))
        if panels:
            figures[f"accuracy over {name}"] = figure_of(panels, styles)
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
    from matplotlib.ticker import MaxNLocator

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
    axes.xaxis.set_major_locator(MaxNLocator(MAX_TICKS, integer=True))
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
    """Lines of a training's log.jsonl, each with the images seen, if known; empty if there is no such file.

    The loss is called by its method, "loss of mae". An incomplete last line is left out.
    """
    lines: list[dict[str, float]] = []
    with contextlib.suppress(OSError, ValueError):
        for entry in read_json_lines(path):
            lines.append({key: value for key, value in entry.items() if isinstance(value, int | float)})
    batch, method = _batch_and_method(path.parent)
    for line in lines:
        if "loss" in line:
            line[f"{LOSS}{method}"] = line.pop("loss")
        if batch and "step" in line:
            line["images"] = line["step"] * batch
    return lines


def _batch_and_method(run: Path) -> tuple[int, str]:
    """Batch size and method of the pretraining in a folder; 0 and "" if its run.json does not have them."""
    try:
        facts = read_json(run / "run.json")
        return int(facts["settings"]["batch"]), str(facts.get("method", ""))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0, ""


def training_figure(logs: Mapping[str, TrainingLog], styles: Mapping[str, Style] | None = None) -> "Figure | None":
    """Curves over the images seen: the loss if all are of one method, and the k-NN accuracy; None if there is none.

    logs: name -> its log (`read_log`).
    """
    losses = {key for lines in logs.values() for line in lines for key in line if key.startswith(LOSS)}
    titles = ({key: "loss" for key in losses} if len(losses) == 1 else {}) | {"knn_top1": "k-NN top-1, %"}
    styles, panels = styles or styles_of(logs), list[DrawPanel]()
    for key, title in titles.items():
        curves = {name: points_of(lines, key) for name, lines in logs.items()}
        if any(curves.values()):
            panels.append(partial(_draw_training, curves, styles, title))
    return figure_of(panels, styles) if panels else None


def points_of(lines: TrainingLog, key: str) -> Points:
    """Points (images seen, value) of a log's lines that have the key, thinned to MAX_POINTS."""
    points = [(line["images"], line[key]) for line in lines if key in line and "images" in line]
    return points[:: max(1, -(-len(points) // MAX_POINTS))]


def _draw_training(curves: Mapping[str, Points], styles: Mapping[str, Style], title: str, axes: "Axes") -> Texts:
    """Draw a line through the points of each name."""
    for name, points in curves.items():
        every = 1 if len(points) <= MAX_ALL_MARKED else len(points) // MARKERS_OF_CURVE
        axes.plot(*zip(*points, strict=True), label=name, markersize=4, markevery=every, **styles[name])
    return title, "images seen", ""
