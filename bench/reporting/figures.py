"""Figures of a leaderboard, drawn with matplotlib: sweeps, accuracy against cost, robustness, pretraining curves.

The same input gives the same bytes. A checkpoint has the same colour, marker and dashes in all figures of a
leaderboard; markers and dashes keep lines distinguishable in grey. On a page the ink has the page's text colour
(currentColor), so that one figure serves light and dark themes.
"""

import contextlib
import io
import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal

from bench.reporting.contents import (
    BLOCK,
    ReportContents,
    ReportTable,
    TableNumber,
    competing,
    sweep_of,
)
from bench.results.record import time_unit
from engine.printing import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FigureFormat = Literal["png", "svg", "pdf"]
Points = Sequence[tuple[float, float]]
Texts = tuple[str, str, str]  # title of a panel, and labels of its x- and y-axis
Style = Mapping[str, Any]  # properties of a matplotlib line: colour, marker, dashes
# Okabe and Ito's palette for colour-blind readers, without yellow, which is too light on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
DASHES = ("-", "--", "-.", ":")
MARKERS = "osD^vPX*"
INK = "#123456"  # dark; on a page it is replaced by currentColor
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
PAGE = 9.0  # width of a figure on a page, in inches
MARK = 12  # longest list of changed settings in a panel's title, in letters
LEVEL_COSTS = 1.2  # no panel if the largest cost is at most this many times the smallest
SERIES = 12  # networks that a figure shows at most: those with the lowest mean ranks
POINTS = 400  # of a curve, at most
FEW = 30  # up to so many points of a curve, each has a marker
MARKED = 10  # markers of a longer curve, about
TICKS = 6  # ticks of an axis, at most
LETTER = 5.2  # average width of a letter, in points
LEGEND_LINE = 0.18  # height of a line of the legend, in inches
# Margins of a panel in inches; title: height of each of its lines.
MARGINS = {"left": 0.72, "right": 0.12, "below": 0.44, "above": 0.1, "title": 0.155}


def styles_of(names: Iterable[str], baselines: Iterable[str] = ()) -> dict[str, Style]:
    """Name -> style, assigned in the order of the names. baselines: raw pixels and initial weights, as thin lines."""
    styles: dict[str, Style] = {}
    for number, name in enumerate(names):
        marker = MARKERS[(number + number // len(COLOURS)) % len(MARKERS)]  # 48 different pairs
        dashes = DASHES[number % len(DASHES)]
        styles[name] = {"color": COLOURS[number % len(COLOURS)], "marker": marker, "linestyle": dashes}
    for number, name in enumerate(baselines):
        styles[name] = {"color": INK, "linestyle": DASHES[-1 - number % len(DASHES)], "linewidth": 1, "alpha": 0.7}
    return styles


def board_styles(report: ReportContents) -> dict[str, Style]:
    """Name of each checkpoint -> style. The networks that figures show come first, so that no two of them look alike;
    names are sorted, so that the order of results does not matter."""
    names = {
        kind: [row.name for row in report.overview if row.kind == kind] for kind in ("measured", "floor", "initial")
    }
    in_figures, not_in_figures = names["measured"][:SERIES], names["measured"][SERIES:]
    networks = [*sorted(in_figures), *sorted(not_in_figures)]
    return styles_of(networks, [*sorted(names["floor"]), *sorted(names["initial"])])


def sweep_figures(report: ReportContents, width: float = PAGE) -> "dict[str, Figure]":
    """Accuracy over k of k-NN, shots and blocks: name -> figure, with a panel for each table of at least two points."""
    styles, titles, figures = shown_styles(report), panel_titles(report), {}
    for name, (pattern, label) in SWEEPS.items():

        def draw(axes: "Axes", panel: Any, pattern: str = pattern, label: str = label) -> Texts:
            table, by_name = panel
            for row_name in filter(by_name.get, styles):
                _draw_numbers(axes, row_name, by_name[row_name], styles[row_name])
            if pattern == BLOCK:
                _count_axis(axes)
                if table.unit:  # RankMe, without unit, of raw pixels has another order of magnitude
                    _draw_floors(axes, table, styles)
            else:
                ticks = sorted({x for points in by_name.values() for x, _ in points})
                _log_axis(axes, ticks)
                axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
            return titles[table.group], label, in_unit(table.metrics[0].split("_")[0], table.unit)

        swept = [(table, {row.name: sweep_of(row, table, pattern) for row in table.rows}) for table in report.tables]
        panels = [panel for panel in swept if any(len(points) > 1 for points in panel[1].values())]
        if panels:
            figures[f"accuracy over {name}"] = _figure(panels, draw, styles, width)
    return figures


def shown_names(report: ReportContents) -> list[str]:
    """Names that figures show: the networks with the lowest mean ranks, and all raw pixels and initial weights."""
    networks = [row.name for row in report.overview if row.kind == "measured"]
    return [*networks[:SERIES], *(row.name for row in report.overview if row.kind in ("floor", "initial"))]


def shown_styles(report: ReportContents) -> dict[str, Style]:
    """Styles of the checkpoints that figures show, in the order of the legend."""
    styles = board_styles(report)
    return {name: styles[name] for name in shown_names(report)}


def panel_titles(report: ReportContents) -> dict[str, str]:
    """Group -> `knn@dino on cifar10`; changed settings are in brackets, a long list as `[modified]` if unique."""
    titles = {}
    for table in report.tables:
        result, variant = table.result, " ".join(table.result.variant)
        mark = f" [{variant if len(variant) <= MARK else 'modified'}]" if variant else ""
        titles[table.group] = f"{result.protocol.name} on {result.data.name}{mark}"
    counts = Counter(titles.values())
    return {group: title if counts[title] == 1 else group.replace("[", " [") for group, title in titles.items()}


def scatter_figures(report: ReportContents, width: float = PAGE) -> "dict[str, Figure]":
    """Main metrics against the costs of networks: name -> figure, with a panel for each table.

    The line is the Pareto front: networks that no other beats at the same or a lower cost. Raw pixels are a horizontal
    line.
    """
    titles, figures = panel_titles(report), {}
    styles = {
        name: {**style, "linestyle": "none"} if "marker" in style else style
        for name, style in shown_styles(report).items()
    }
    costs = {str(used["name"]): {"parameters": used["parameters"], **used["cost"]} for used in report.checkpoints}
    longest = max((cost.get("hours", 0.0) for cost in costs.values()), default=0.0)
    units = {"parameters": ("millions", 1e-6), "hours": time_unit(longest)}
    for key, cost_label in COSTS.items():
        unit, times = units.get(key, ("", 1.0))

        def draw(axes: "Axes", panel: Any, label: str = in_unit(cost_label, unit)) -> Texts:
            table, points = panel
            front = pareto({name: (x, number.value or 0.0) for name, (x, number) in points.items()}, table.higher)
            axes.plot(*zip(*front, strict=True), color=INK, alpha=0.5, linewidth=1, drawstyle="steps-post")
            for name, point in points.items():
                _draw_numbers(axes, name, [point], styles[name])
            _draw_floors(axes, table, styles)
            _log_axis(axes, [x for x, _ in points.values()])
            axes.margins(0.1)
            return titles[table.group], label, in_unit(table.metrics[0], table.unit)

        panels = []
        for table in (table for table in report.tables if table.result.task != "health"):
            points = {
                row.name: (times * costs[row.name][key], row.numbers[0])
                for row in table.rows
                if row.kind == "measured" and row.name in styles and costs[row.name].get(key)
                if row.numbers[0].value is not None
            }
            values = [x for x, _ in points.values()]
            if values and max(values) > LEVEL_COSTS * min(values):
                panels.append((table, points))
        if panels:
            figures[f"accuracy against {cost_label}"] = _figure(panels, draw, styles, width)
    return figures


def robustness_figures(report: ReportContents, width: float = PAGE) -> "dict[str, Figure]":
    """Accuracy on each shifted set against accuracy on the clean one, with a line fitted to the networks.

    The line is straight in logits, and the vertical distance from it is effective robustness (Taori et al. 2020, arXiv
    2007.00644, section 2), with the networks of this leaderboard in place of theirs.
    """
    import numpy as np
    from scipy.special import expit, logit

    styles, titles = shown_styles(report), panel_titles(report)

    def draw(axes: "Axes", panel: Any) -> Texts:
        table, name, by_name = panel
        for row_name in filter(by_name.get, styles):
            clean, shifted = by_name[row_name]
            style = {"marker": ".", **styles[row_name]}
            _draw_numbers(axes, row_name, [(clean.value, shifted)], style)
            axes.plot(clean.interval or (), [shifted.value] * 2 * bool(clean.interval), color=style["color"], lw=0.8)
        title, networks = titles[table.group], [row.name for row in competing(table) if row.name in by_name]
        accuracies = np.array([[number.value for number in by_name[name]] for name in networks]).reshape(-1, 2)
        x, y = accuracies.clip(0.1, 99.9).T / 100
        if len(set(x)) > 2:
            line, fit = np.linspace(x.min(), x.max()), np.polyfit(logit(x), logit(y), 1)
            axes.plot(100 * line, 100 * expit(np.polyval(fit, logit(line))), color=INK, alpha=0.5, linewidth=1)
            effective = 100 * (y - expit(np.polyval(fit, logit(x))))
            title += f"; {networks[effective.argmax()]} {effective.max():+.1f}"
        return title, "clean top1, %", f"top1 on {name}, %"

    panels = [(table, *panel) for table in report.tables for panel in shifted_accuracies(table).items()]
    return {"robustness against clean accuracy": _figure(panels, draw, styles, width)} if panels else {}


def shifted_accuracies(table: ReportTable) -> dict[str, dict[str, tuple[TableNumber, TableNumber]]]:
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
    return accuracies


def pareto(points: Mapping[str, tuple[float, float]], higher_is_better: bool = True) -> list[tuple[float, float]]:
    """The Pareto front of points (cost, number): those that none beats at the same or a lower cost, cheapest first."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(points.values(), key=lambda point: (point[0], -point[1] if higher_is_better else point[1])):
        if not front or ((y > front[-1][1]) == higher_is_better and y != front[-1][1]):
            front.append((x, y))
    return front


def training_figure(
    logs: Mapping[str, Sequence[Mapping[str, float]]],
    styles: Mapping[str, Style] | None = None,
    along: str = "epoch",
    width: float = PAGE,
) -> "Figure | None":
    """Training curves, with a panel for each key of CURVES that is in any log; None if there is none.

    logs: name -> lines of its log (`log_of`). along: x-axis, a key of ALONG.
    """
    curves = {key: {name: points_of(lines, key, along) for name, lines in logs.items()} for key in CURVES}
    curves = {key: by_name for key, by_name in curves.items() if any(by_name.values())}
    if not curves:
        return None
    styles = styles or styles_of(logs)

    def draw(axes: "Axes", key: str) -> Texts:
        _draw_lines(axes, curves[key], styles)
        return CURVES[key], ALONG[along], ""

    return _figure(list(curves), draw, styles, width)


def in_unit(metric: str, unit: str) -> str:
    """Label of an axis: `top1, %`."""
    return f"{metric}, {unit}" if unit else metric


def points_of(lines: Sequence[Mapping[str, float]], key: str, along: str = "epoch") -> list[tuple[float, float]]:
    """Points (x, value) of a log's lines that have the key, thinned to POINTS at most."""
    points = [(line[along], line[key]) for line in lines if key in line and along in line]
    return points[:: max(1, -(-len(points) // POINTS))]


def lines_figure(curves: Mapping[str, Points], x: str, y: str, styles: Mapping[str, Style] | None = None) -> "Figure":
    """One line for each name. x, y: labels of the axes; x counts something, so its ticks are integers."""
    styles = styles or styles_of(curves)

    def draw(axes: "Axes", panel: Mapping[str, Points]) -> Texts:
        _draw_lines(axes, panel, styles)
        _count_axis(axes)
        return "", x, y

    return _figure([curves], draw, styles, PAGE / 2)


def calibration_figure(bins: Mapping[str, Points], styles: Mapping[str, Style] | None = None) -> "Figure":
    """Accuracy against confidence, in percent, and the diagonal on which both are equal.

    bins: name -> points (confidence, accuracy), from 0 to 1.
    """
    styles = styles or styles_of(bins)

    def draw(axes: "Axes", panel: Mapping[str, Points]) -> Texts:
        axes.plot([0, 100], [0, 100], color=INK, alpha=0.4, linewidth=1)
        percent = {
            name: [(100 * confidence, 100 * accuracy) for confidence, accuracy in points]
            for name, points in panel.items()
        }
        _draw_lines(axes, percent, styles)
        return "", "confidence, %", "accuracy, %"

    return _figure([bins], draw, styles, PAGE / 2)


def _draw_lines(axes: "Axes", curves: Mapping[str, Points], styles: Mapping[str, Style]) -> None:
    for name, points in curves.items():
        every = 1 if len(points) <= FEW else len(points) // MARKED
        axes.plot(*zip(*points, strict=True), label=name, markersize=4, markevery=every, **styles[name])


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


def _count_axis(axes: "Axes") -> None:
    """Give the x-axis integer ticks."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(TICKS, integer=True))


def _log_axis(axes: "Axes", values: Sequence[float]) -> None:
    """Make the x-axis logarithmic with at most TICKS ticks, whose labels cannot overlap; linear if values are close."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

    low, high = min(values), max(values)
    steps = [base * 10.0**power for power in range(-9, 16) for base in (1, 2, 5)]
    ticks = [step for step in steps if low / 1.05 <= step <= high * 1.05]
    if len(ticks) > TICKS:
        ticks = [tick for tick in ticks if f"{tick:e}".startswith("1.")]
    if low <= 0 or len(ticks) < 2:
        axes.xaxis.set_major_locator(MaxNLocator(TICKS - 2))
        return
    ticks = ticks[:: -(-len(ticks) // TICKS)]
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _legend(figure: "Figure", styles: Mapping[str, Style]) -> float:
    """Add a legend below all panels; the figure grows by its height, which is returned in inches."""
    lines = {str(line.get_label()): line for axes in figure.axes for line in axes.lines}
    lines = {name: lines[name] for name in styles if name in lines}
    texts = [printable(name) for name in lines]
    columns = max(1, int(72 * figure.get_figwidth() / (LETTER * max(map(len, texts)) + 40)))
    height = LEGEND_LINE * (1 - (-len(texts) // columns))
    figure.set_figheight(figure.get_figheight() + height)
    legend = figure.legend(
        list(lines.values()),
        texts,
        fontsize=8,
        labelcolor=INK,
        frameon=False,
        loc="lower center",
        ncols=min(columns, len(texts)),
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # a $ in a name is not a formula
    return height


def training_logs(report: ReportContents) -> dict[str, list[dict[str, float]]]:
    """Name -> lines of the log, of each network whose pretraining is on this disk."""
    logs = {
        str(used["name"]): log_of(Path(str(used["source"])).parent / "log.jsonl")
        for used in report.checkpoints
        if used["kind"] == "measured"
    }
    return {name: lines for name, lines in logs.items() if lines}


def log_of(path: Path) -> list[dict[str, float]]:
    """Lines of a training's log.jsonl, each with epoch, images and hours if known; empty if there is no such file.

    An incomplete last line is left out. Lines of the k-NN monitor hold only the number of updates; their epoch is
    computed from the updates per epoch.
    """
    lines: list[dict[str, float]] = []
    with contextlib.suppress(OSError, ValueError, AttributeError):
        for text in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(text)
            lines.append({key: value for key, value in entry.items() if isinstance(value, int | float)})
    with_epoch = [line for line in lines if line.get("epoch") and line.get("step")]
    first, last = (with_epoch[0], with_epoch[-1]) if with_epoch else ({}, {})
    updates = (last["step"] - first["step"]) if with_epoch else 0
    epochs_per_update = (last["epoch"] - first["epoch"]) / updates if updates else 0.0
    batch, hours = _batch_of(path.parent), 0.0
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


def _batch_of(folder: Path) -> int:
    """Batch size of a pretraining; 0 if its run.json does not have it."""
    try:
        return int(json.loads((folder / "run.json").read_bytes())["settings"]["batch"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _figure(
    panels: Sequence[Any], draw: "Callable[[Axes, Any], Texts]", styles: Mapping[str, Style], width: float
) -> "Figure":
    """Panels and a legend: one column up to a width of 4.5 inches, two beyond, three on a page.

    draw: draws a panel, and returns its title and the labels of its axes.
    """
    from matplotlib.figure import Figure

    count = len(panels)
    width = min(width, PAGE / 2) if count == 1 else width
    columns = min(count, 1 if width < PAGE / 2 + 0.1 else 3 if width >= PAGE else 2)
    rows = -(-count // columns)
    figure, title_lines = Figure(figsize=(width, rows * min(0.75 * width / columns, 3.0)), dpi=72), 0
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, number + 1)
        title, x, y = draw(axes, panel)
        lines = wrap(printable(title), int(56 * width / columns / LETTER), break_on_hyphens=False)
        axes.set_title("\n".join(lines), fontsize=9, color=INK, parse_math=False)
        title_lines = max(title_lines, len(lines))
        axes.set_xlabel(x, color=INK, fontsize=8)
        axes.set_ylabel(y, color=INK, fontsize=8)
        axes.set_facecolor("none")
        axes.tick_params(which="both", colors=INK, labelsize=8)
        axes.grid(color=INK, alpha=0.15)
        for spine in axes.spines.values():
            spine.set_color(INK)
    # Margins are fixed, as matplotlib's layout engines draw all texts two more times, half of the time of a figure.
    below, above = MARGINS["below"], MARGINS["above"] + MARGINS["title"] * title_lines
    inner = (
        width / columns - MARGINS["left"] - MARGINS["right"],
        figure.get_figheight() / rows - below - above,
    )
    legend = _legend(figure, styles)
    height = figure.get_figheight()
    figure.subplots_adjust(
        left=MARGINS["left"] / width,
        right=1 - MARGINS["right"] / width,
        bottom=(legend + below) / height,
        top=1 - above / height,
        wspace=(MARGINS["left"] + MARGINS["right"]) / inner[0],
        hspace=(below + above) / inner[1],
    )
    return figure


def encoded_figure(figure: "Figure", form: FigureFormat) -> bytes:
    """The bytes of a figure's file: fonts are embedded, and there is no date and no random id."""
    metadata: dict[str, Any] = {
        "png": {"Software": None},
        "svg": {"Date": None, "Creator": None},
        "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    }[form]
    fonts = {"svg.fonttype": "path", "svg.hashsalt": "bench report", "pdf.fonttype": 42}
    return saved(figure, fonts, format=form, dpi=300, metadata=metadata)


def saved(figure: "Figure", fonts: Mapping[str, Any], **options: Any) -> bytes:
    """The output of matplotlib's savefig. fonts: rcParams for fonts, and a salt that fixes the ids of an SVG."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context(fonts), warnings.catch_warnings():  # type: ignore[arg-type]
        warnings.filterwarnings("ignore", "Glyph .* missing")  # in names; the browser's fonts have more glyphs
        figure.savefig(buffer, **options)
    return buffer.getvalue()


def svg_of(figure: "Figure | None", title: str) -> str:
    """A figure as inline SVG in the page's text colour; "" for None."""
    if figure is None:
        return ""
    # Text stays text, so that it can be searched and read aloud; ids come from a fixed salt, and there is no date.
    fonts = {"svg.fonttype": "none", "svg.hashsalt": "bench report"}
    text = saved(figure, fonts, format="svg", transparent=True, metadata={"Date": None, "Creator": None}).decode()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r' style="([^"]*)"', _as_attributes, text)
    return re.sub(r"<svg ", lambda _: f'<svg role="img" aria-label="{escape(title)}" ', text, count=1)


def _as_attributes(style: re.Match[str]) -> str:
    """An inline style by matplotlib as SVG attributes, which the page's content security policy allows."""
    declared = dict(part.split(": ", 1) for part in style[1].split("; ") if part)
    declared.pop("font-family", None)  # the page's own
    return "".join(f' {name}="{value}"' for name, value in declared.items())
