"""The figures of a report: sweeps, accuracy against cost, robustness, pretraining curves, calibration."""

import contextlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bench.reports.contents import BLOCK, ReportContents, ReportTable, TableNumber, competing, read_contents, sweep_of
from bench.reports.drawing import (
    INK,
    PAGE_WIDTH,
    DrawPanel,
    Points,
    Style,
    Texts,
    draw_lines,
    figure_of,
    styles_of,
    use_integer_ticks,
    use_log_scale,
)
from bench.reports.leaderboard import read_leaderboard
from bench.results.record import time_unit
from engine.errors import UserError, spelled
from engine.files import read_json, read_json_lines
from engine.printing import did_you_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TrainingLog = Sequence[Mapping[str, float]]  # lines of a log.jsonl, each with the numbers in it by key
CURVES = {  # key in a training's log -> its title
    "loss": "loss",
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
NOTES = {  # figure -> explanation below it
    "robustness against clean accuracy": "The line goes through these networks in logits; the distance above it is "
    "effective robustness (Taori et al. 2020, arXiv 2007.00644), with this board's networks as the baseline. The "
    "highest is named.",
}
SWEEPS = {  # figure -> pattern of metrics with x in their names, and label of x
    "k": (r"(\w+)_k(\d+)", "k of k-NN"),
    "shots": (r"(\w+)_(\d+)shot", "labelled images per class"),
    "blocks": (BLOCK, "block"),
}
COSTS = {  # cost of a network -> label of its axis, without the unit
    "parameters": "parameters",
    "forward_gflop": "GFLOP per image, forward pass",
    "gflop_per_image": "GFLOP per image, pretraining",
    "hours": "time of pretraining",
}
MAX_CHANGES = 12  # letters of changed settings in a panel's title; longer texts are replaced by `modified`
MIN_COST_RATIO = 1.2  # no panel if the largest cost is at most this many times the smallest
MAX_NETWORKS = 12  # in a figure: those with the lowest mean ranks
MAX_POINTS = 400  # of a training curve


def board_styles(report: ReportContents) -> dict[str, Style]:
    """Name of each checkpoint -> style.

    The networks that figures show come first, so that no two of them look alike; names are sorted, so that the order of
    results does not matter.
    """
    names = {
        kind: [row.name for row in report.overview if row.kind == kind] for kind in ("measured", "floor", "initial")
    }
    in_figures, not_in_figures = names["measured"][:MAX_NETWORKS], names["measured"][MAX_NETWORKS:]
    networks = [*sorted(in_figures), *sorted(not_in_figures)]
    return styles_of(networks, [*sorted(names["floor"]), *sorted(names["initial"])])


def figure_styles(report: ReportContents) -> dict[str, Style]:
    """Styles of the checkpoints in figures: the networks with the lowest mean ranks, raw pixels and initial weights.

    They are in the order of the legend.
    """
    styles = board_styles(report)
    networks = [row.name for row in report.overview if row.kind == "measured"]
    baselines = [row.name for row in report.overview if row.kind in ("floor", "initial")]
    return {name: styles[name] for name in [*networks[:MAX_NETWORKS], *baselines]}


def panel_titles(report: ReportContents) -> dict[str, str]:
    """Group -> `knn@dino on cifar10`; changed settings are in brackets, a long list as `[modified]` if unique."""
    titles = {}
    for table in report.tables:
        result, changes = table.result, " ".join(table.result.variant)
        mark = f" [{changes if len(changes) <= MAX_CHANGES else 'modified'}]" if changes else ""
        titles[table.group] = f"{result.protocol.name} on {result.data.name}{mark}"
    counts = Counter(titles.values())
    return {group: title if counts[title] == 1 else group.replace("[", " [") for group, title in titles.items()}


def axis_label(name: str, unit: str) -> str:
    """Label of an axis: `top1, %`."""
    return f"{name}, {unit}" if unit else name


def sweep_figures(report: ReportContents, width: float = PAGE_WIDTH) -> "dict[str, Figure]":
    """Accuracy over k of k-NN, shots and blocks: name -> figure, with a panel for each table of at least two points."""
    styles, titles, figures = figure_styles(report), panel_titles(report), {}
    for name, (pattern, x_label) in SWEEPS.items():
        panels: list[DrawPanel] = []
        for table in report.tables:
            curves = {row.name: sweep_of(row, table, pattern) for row in table.rows}
            if any(len(points) > 1 for points in curves.values()):
                texts = (titles[table.group], x_label, axis_label(table.metrics[0].split("_")[0], table.unit))
                panels.append(partial(_draw_sweep, table, curves, styles, texts, pattern == BLOCK))
        if panels:
            figures[f"accuracy over {name}"] = figure_of(panels, styles, width)
    return figures


def _draw_sweep(
    table: ReportTable,
    curves: Mapping[str, Sequence[tuple[float, TableNumber]]],
    styles: Mapping[str, Style],
    texts: Texts,
    is_over_blocks: bool,
    axes: "Axes",
) -> Texts:
    for name in filter(curves.get, styles):
        _draw_numbers(axes, name, curves[name], styles[name])
    if is_over_blocks:
        use_integer_ticks(axes)
        if table.unit:  # RankMe, without unit, of raw pixels has another order of magnitude
            _draw_floors(axes, table, styles)
    else:
        ticks = sorted({x for points in curves.values() for x, _ in points})
        use_log_scale(axes, ticks)
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    return texts


def scatter_figures(report: ReportContents, width: float = PAGE_WIDTH) -> "dict[str, Figure]":
    """Main metrics against the costs of networks: name -> figure, with a panel for each table.

    The line is the Pareto front: networks that no other beats at the same or a lower cost. Raw pixels are a horizontal
    line.
    """
    titles, figures = panel_titles(report), {}
    styles = {
        name: {**style, "linestyle": "none"} if "marker" in style else style
        for name, style in figure_styles(report).items()
    }
    costs = {
        str(checkpoint["name"]): {"parameters": checkpoint["parameters"], **checkpoint["cost"]}
        for checkpoint in report.checkpoints
    }
    longest = max((cost.get("hours", 0.0) for cost in costs.values()), default=0.0)
    units = {"parameters": ("millions", 1e-6), "hours": time_unit(longest)}
    for key, cost_label in COSTS.items():
        unit, factor = units.get(key, ("", 1.0))
        panels: list[DrawPanel] = []
        for table in report.tables:
            if table.result.task == "health":
                continue
            points = {
                row.name: (factor * costs[row.name][key], row.numbers[0])
                for row in table.rows
                if row.kind == "measured" and row.name in styles and costs[row.name].get(key)
                if row.numbers[0].value is not None
            }
            costs_of_table = [cost for cost, _ in points.values()]
            if costs_of_table and max(costs_of_table) > MIN_COST_RATIO * min(costs_of_table):
                x_label, y_label = axis_label(cost_label, unit), axis_label(table.metrics[0], table.unit)
                panels.append(partial(_draw_scatter, table, points, styles, (titles[table.group], x_label, y_label)))
        if panels:
            figures[f"accuracy against {cost_label}"] = figure_of(panels, styles, width)
    return figures


def _draw_scatter(
    table: ReportTable,
    points: Mapping[str, tuple[float, TableNumber]],
    styles: Mapping[str, Style],
    texts: Texts,
    axes: "Axes",
) -> Texts:
    front = pareto(
        {name: (cost, number.value or 0.0) for name, (cost, number) in points.items()}, table.higher_is_better
    )
    axes.plot(*zip(*front, strict=True), color=INK, alpha=0.5, linewidth=1, drawstyle="steps-post")
    for name, point in points.items():
        _draw_numbers(axes, name, [point], styles[name])
    _draw_floors(axes, table, styles)
    use_log_scale(axes, [cost for cost, _ in points.values()])
    axes.margins(0.1)
    return texts


def pareto(points: Mapping[str, tuple[float, float]], higher_is_better: bool = True) -> list[tuple[float, float]]:
    """The Pareto front of points (cost, number): those that none beats at the same or a lower cost, cheapest first."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(points.values(), key=lambda point: (point[0], -point[1] if higher_is_better else point[1])):
        if not front or ((y > front[-1][1]) == higher_is_better and y != front[-1][1]):
            front.append((x, y))
    return front


def _draw_numbers(axes: "Axes", name: str, points: Sequence[tuple[float, TableNumber]], style: Style) -> None:
    """Draw numbers as points, and their intervals as vertical bars."""
    axes.plot([x for x, _ in points], [number.value or 0.0 for _, number in points], label=name, markersize=5, **style)
    bars = [(x, *number.interval) for x, number in points if number.interval]
    if bars:
        axes.vlines(*zip(*bars, strict=True), color=style["color"], linewidth=0.8)


def _draw_floors(axes: "Axes", table: ReportTable, styles: Mapping[str, Style]) -> None:
    """Draw raw pixels as horizontal lines."""
    for row in table.rows:
        if row.kind == "floor" and row.numbers[0].value is not None:
            axes.axhline(row.numbers[0].value, label=row.name, **styles[row.name])


Accuracies = Mapping[str, tuple[TableNumber, TableNumber]]  # network -> its clean and its shifted accuracy


def robustness_figures(report: ReportContents, width: float = PAGE_WIDTH) -> "dict[str, Figure]":
    """Accuracy on each shifted set against accuracy on the clean one, with a line fitted to the networks.

    The line is straight in logits, and the vertical distance from it is effective robustness (Taori et al. 2020, arXiv
    2007.00644, section 2), with the networks of this leaderboard in place of theirs.
    """
    styles, titles = figure_styles(report), panel_titles(report)
    panels: list[DrawPanel] = [
        partial(_draw_robustness, table, shifted_set, accuracies, styles, titles[table.group])
        for table in report.tables
        for shifted_set, accuracies in shifted_accuracies(table).items()
    ]
    return {"robustness against clean accuracy": figure_of(panels, styles, width)} if panels else {}


def _draw_robustness(
    table: ReportTable,
    shifted_set: str,
    accuracies: Accuracies,
    styles: Mapping[str, Style],
    title: str,
    axes: "Axes",
) -> Texts:
    """Draw the accuracies, and the line; the title names the network that is farthest above it."""
    import numpy as np
    from scipy.special import expit, logit

    for name in filter(accuracies.get, styles):
        clean, shifted = accuracies[name]
        style = {"marker": ".", **styles[name]}
        _draw_numbers(axes, name, [(clean.value or 0.0, shifted)], style)
        if clean.interval:
            axes.plot(clean.interval, [shifted.value or 0.0] * 2, color=style["color"], lw=0.8)
    networks = [row.name for row in competing(table) if row.name in accuracies]
    values = np.array([[number.value for number in accuracies[name]] for name in networks]).reshape(-1, 2)
    x, y = values.clip(0.1, 99.9).T / 100
    if len(set(x)) > 2:
        line, fit = np.linspace(x.min(), x.max()), np.polyfit(logit(x), logit(y), 1)
        axes.plot(100 * line, 100 * expit(np.polyval(fit, logit(line))), color=INK, alpha=0.5, linewidth=1)
        effective = 100 * (y - expit(np.polyval(fit, logit(x))))
        title += f"; {networks[effective.argmax()]} {effective.max():+.1f}"
    return title, "clean top1, %", f"top1 on {shifted_set}, %"


def shifted_accuracies(table: ReportTable) -> dict[str, Accuracies]:
    """Shifted set -> network -> its clean and its shifted accuracy; for corruptions the mean over these."""
    if not table.result.task.startswith("robustness") or "top1" not in table.metrics:
        return {}
    sets: dict[str, list[int]] = {}  # shifted set -> columns of its metrics
    for column, metric in enumerate(table.metrics):
        if match := re.fullmatch(r"(\w+)_(top1|error)", metric):
            is_corruption = match[2] == "error"
            name = f"{match[1].partition('_')[0]} corruptions" if is_corruption else match[1]
            sets.setdefault(name, []).append(column)
    accuracies: dict[str, dict[str, tuple[TableNumber, TableNumber]]] = {name: {} for name in sets}
    for name, columns in sets.items():
        for row in table.rows:
            clean, numbers = row.numbers[table.metrics.index("top1")], [row.numbers[column] for column in columns]
            values = [number.value for number in numbers if number.value is not None]
            if clean.value is not None and len(values) == len(numbers):
                mean = TableNumber(text="", value=100 - sum(values) / len(values))
                accuracies[name][row.name] = clean, mean if name.endswith(" corruptions") else numbers[0]
    return dict(accuracies)


def training_logs(report: ReportContents) -> dict[str, TrainingLog]:
    """Name -> log of each network of a report whose pretraining is on this machine."""
    logs = {
        str(checkpoint["name"]): read_log(Path(str(checkpoint["source"])).parent / "log.jsonl")
        for checkpoint in report.checkpoints
        if checkpoint["kind"] == "measured"
    }
    return {name: lines for name, lines in logs.items() if lines}


def read_log(path: Path) -> TrainingLog:
    """Lines of a training's log.jsonl, each with epoch, images and hours if known; empty if there is no such file.

    An incomplete last line is left out. Lines of the k-NN monitor hold only the number of updates; their epoch is
    computed from the updates per epoch.
    """
    lines: list[dict[str, float]] = []
    with contextlib.suppress(OSError, ValueError):
        for entry in read_json_lines(path):
            lines.append({key: value for key, value in entry.items() if isinstance(value, int | float)})
    with_epoch = [line for line in lines if line.get("epoch") and line.get("step")]
    first, last = (with_epoch[0], with_epoch[-1]) if with_epoch else ({}, {})
    updates = (last["step"] - first["step"]) if with_epoch else 0
    epochs_per_update = (last["epoch"] - first["epoch"]) / updates if updates else 0.0
    batch, hours = _batch_size(path.parent), 0.0
    for line in lines:
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


def _batch_size(run: Path) -> int:
    """Batch size of the pretraining in a folder; 0 if its run.json does not have it."""
    try:
        return int(read_json(run / "run.json")["settings"]["batch"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def training_figure(
    logs: Mapping[str, TrainingLog],
    styles: Mapping[str, Style] | None = None,
    along: str = "epoch",
    width: float = PAGE_WIDTH,
) -> "Figure | None":
    """Training curves, with a panel for each key of CURVES that is in any log; None if there is none.

    logs: name -> its log (`read_log`). along: x-axis, a key of ALONG.
    """
    styles = styles or styles_of(logs)

    def draw_panel(curves: Mapping[str, Points], title: str, axes: "Axes") -> Texts:
        draw_lines(axes, curves, styles)
        return title, ALONG[along], ""

    panels: list[DrawPanel] = []
    for key, title in CURVES.items():
        curves = {name: points_of(lines, key, along) for name, lines in logs.items()}
        if any(curves.values()):
            panels.append(partial(draw_panel, curves, title))
    return figure_of(panels, styles, width) if panels else None


def points_of(lines: TrainingLog, key: str, along: str = "epoch") -> list[tuple[float, float]]:
    """Points (x, value) of a log's lines that have the key, thinned to MAX_POINTS."""
    points = [(line[along], line[key]) for line in lines if key in line and along in line]
    return points[:: max(1, -(-len(points) // MAX_POINTS))]


def lines_figure(
    curves: Mapping[str, Points], x_label: str, y_label: str, styles: Mapping[str, Style] | None = None
) -> "Figure":
    """One line for each name; x counts something, so its ticks are integers."""
    styles = styles or styles_of(curves)

    def draw_panel(axes: "Axes") -> Texts:
        draw_lines(axes, curves, styles)
        use_integer_ticks(axes)
        return "", x_label, y_label

    return figure_of([draw_panel], styles, PAGE_WIDTH / 2)


def calibration_figure(bins: Mapping[str, Points], styles: Mapping[str, Style] | None = None) -> "Figure":
    """Accuracy against confidence, in percent, and the diagonal on which both are equal.

    bins: name -> points (confidence, accuracy), from 0 to 1.
    """
    styles = styles or styles_of(bins)

    def draw_panel(axes: "Axes") -> Texts:
        axes.plot([0, 100], [0, 100], color=INK, alpha=0.4, linewidth=1)
        percent = {
            name: [(100 * confidence, 100 * accuracy) for confidence, accuracy in points]
            for name, points in bins.items()
        }
        draw_lines(axes, percent, styles)
        return "", "confidence, %", "accuracy, %"

    return figure_of([draw_panel], styles, PAGE_WIDTH / 2)


def paper_figures(
    kind: Literal["curves", "scatter"],
    out: Path | None,
    runs: Sequence[str] = (),
    along: str = "epoch",
    width: float = 6.75,
) -> "dict[str, Figure]":
    """The figures of a report in a width for a paper.

    Args:
        kind: "curves": k-NN over k, low-shot over shots, trainings over `along`; "scatter": accuracy against the costs
            of networks, and robustness against clean accuracy.
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
    report = read_contents(read_leaderboard(out), out) if out else None
    if kind == "scatter":
        figures = scatter_figures(report, width) | robustness_figures(report, width) if report else {}
    else:
        figures = sweep_figures(report, width) if report else {}
        logs_of_runs = {Path(run): read_log(Path(run) / "log.jsonl") for run in runs}
        if missing := [run for run, lines in logs_of_runs.items() if not lines]:
            problem = "has no log.jsonl" if missing[0].exists() else "does not exist"
            raise ValueError(f"{missing[0]} {problem}: name folders of `bench pretrain --out`")
        logs = (training_logs(report) if report else {}) | {run.name: lines for run, lines in logs_of_runs.items()}
        styles_on_board = board_styles(report) if report else {}
        new_names = [name for name in logs if name not in styles_on_board]
        styles = styles_of([*styles_on_board, *new_names]) | styles_on_board
        if training := training_figure(logs, styles, along, width):
            figures["pretraining"] = training
    if not figures:
        what = f"{spelled('--results', 'out')} with two networks, or runs of `bench pretrain`"
        raise ValueError(f"nothing to draw for {kind}: give {what}")
    return figures
