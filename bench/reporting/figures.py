"""Figures of a board, drawn by matplotlib: sweeps, cost against accuracy, trainings.

The same input gives the same bytes. A checkpoint has one colour, marker and kind of dashes in all figures of a board,
by its place among the board's networks, so that lines can be told apart in grey. On a page the ink follows it
(currentColor), so that light and dark need one figure.
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
Texts = tuple[str, str, str]  # title of a panel, and what its axes of x and y mean
Style = Mapping[str, Any]  # of matplotlib's lines: colour, marker, dashes
# Okabe and Ito's palette for colour-blind readers, without yellow, which is too light on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
DASHES = ("-", "--", "-.", ":")
MARKERS = "osD^vPX*"
INK = "#123456"  # dark; on a page it is replaced by currentColor
CURVES = {  # of a training's log, where it has them, and what they are called
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
ALONG = {"epoch": "epoch", "images": "images seen", "hours": "hours"}  # what a training's curves run over
NOTES = {  # on what a figure shows
    "robustness against clean accuracy": "The line goes through these networks in logits; the distance above it is "
    "effective robustness (Taori et al. 2020, arXiv 2007.00644), with this board's networks as the baseline. The "
    "highest is named.",
}
SWEEPS = {  # figure -> metrics that hold its x in their names, and what x is
    "k": (r"(\w+)_k(\d+)", "k of k-NN"),
    "shots": (r"(\w+)_(\d+)shot", "labelled images per class"),
    "blocks": (BLOCK, "block"),
}
COSTS = {  # of a network: what its axis means, before the unit
    "parameters": "parameters",
    "forward_gflop": "GFLOP per image, forward pass",
    "gflop_per_image": "GFLOP per image, pretraining",
    "hours": "time of pretraining",
}
PAGE = 9.0  # inches; width of a figure on a page
MARK = 12  # letters of changed settings in a panel's title, at most
LEVEL_COSTS = 1.2  # costs that differ by less are not drawn
SERIES = 12  # networks that a figure shows, those with the lowest mean ranks
POINTS = 400  # of a curve, at most
FEW = 30  # points of a curve up to which each has a marker
MARKED = 10  # points of a longer curve that have one
TICKS = 6  # numbers of an axis, at most
LETTER = 5.2  # points; about the width of a letter
LEGEND_LINE = 0.18  # inches
# Of a panel, inches; title: of each of its lines.
MARGINS = {"left": 0.72, "right": 0.12, "below": 0.44, "above": 0.1, "title": 0.155}


def styles_of(names: Iterable[str], baselines: Iterable[str] = ()) -> dict[str, Style]:
    """How each name is drawn, in the order given; baselines: raw pixels and initial weights, as thin lines."""
    styles: dict[str, Style] = {}
    for number, name in enumerate(names):
        marker = MARKERS[(number + number // len(COLOURS)) % len(MARKERS)]  # 48 different pairs
        dashes = DASHES[number % len(DASHES)]
        styles[name] = {"color": COLOURS[number % len(COLOURS)], "marker": marker, "linestyle": dashes}
    for number, name in enumerate(baselines):
        styles[name] = {"color": INK, "linestyle": DASHES[-1 - number % len(DASHES)], "linewidth": 1, "alpha": 0.7}
    return styles


def board_styles(report: ReportContents) -> dict[str, Style]:
    """Styles of a board's checkpoints by name: the networks that figures show first, so that no two of them look alike,
    each part in the order of names, so that another order of results gives the same."""
    names = {
        kind: [row.name for row in report.overview if row.kind == kind] for kind in ("measured", "floor", "initial")
    }
    shown, others = names["measured"][:SERIES], names["measured"][SERIES:]
    return styles_of([*sorted(shown), *sorted(others)], [*sorted(names["floor"]), *sorted(names["initial"])])


def sweep_figures(report: ReportContents, width: float = PAGE) -> "dict[str, Figure]":
    """Accuracy over k of k-NN, shots and blocks: name -> figure, with a panel for each table that has several."""
    styles, titles, figures = shown_styles(report), panel_titles(report), {}
    for name, (pattern, label) in SWEEPS.items():

        def draw(axes: "Axes", panel: Any, pattern: str = pattern, label: str = label) -> Texts:
            table, by_name = panel
            for row_name in filter(by_name.get, styles):
                _draw_numbers(axes, row_name, by_name[row_name], styles[row_name])
            if pattern == BLOCK:
                _count_axis(axes)
                if table.unit:  # ranks of raw pixels are of another order
                    _draw_floors(axes, table, styles)
            else:
                places = sorted({x for points in by_name.values() for x, _ in points})
                _log_axis(axes, places)
                axes.set_xticks(places, [f"{x:g}" for x in places])
            return titles[table.group], label, in_unit(table.metrics[0].split("_")[0], table.unit)

        swept = [(table, {row.name: sweep_of(row, table, pattern) for row in table.rows}) for table in report.tables]
        panels = [panel for panel in swept if any(len(points) > 1 for points in panel[1].values())]
        if panels:
            figures[f"accuracy over {name}"] = _figure(panels, draw, styles, width)
    return figures


def shown_names(report: ReportContents) -> list[str]:
    """The networks that figures show, those with the lowest mean ranks, and all raw pixels and initial weights."""
    networks = [row.name for row in report.overview if row.kind == "measured"]
    return [*networks[:SERIES], *(row.name for row in report.overview if row.kind in ("floor", "initial"))]


def shown_styles(report: ReportContents) -> dict[str, Style]:
    """Styles of the checkpoints that figures show, in the order of the legend."""
    styles = board_styles(report)
    return {name: styles[name] for name in shown_names(report)}


def panel_titles(report: ReportContents) -> dict[str, str]:
    """Group -> `knn@dino on cifar10`, with `[modified]` for a long list of settings where no other is called so."""
    titles = {}
    for table in report.tables:
        result, variant = table.result, " ".join(table.result.variant)
        mark = f" [{variant if len(variant) <= MARK else 'modified'}]" if variant else ""
        titles[table.group] = f"{result.protocol.name} on {result.data.name}{mark}"
    counts = Counter(titles.values())
    return {group: title if counts[title] == 1 else group.replace("[", " [") for group, title in titles.items()}


def scatter_figures(report: ReportContents, width: float = PAGE) -> "dict[str, Figure]":
    """Main metrics against what networks cost: name -> figure, with a panel for each table.

    The line joins networks that no other beats at the same cost or less (Pareto); raw pixels are a horizontal line.
    """
    titles, figures = panel_titles(report), {}
    styles = {
        name: {**style, "linestyle": "none"} if "marker" in style else style
        for name, style in shown_styles(report).items()
    }
    spent = {str(used["name"]): {"parameters": used["parameters"], **used["cost"]} for used in report.checkpoints}
    longest = max((used.get("hours", 0.0) for used in spent.values()), default=0.0)
    units = {"parameters": ("millions", 1e-6), "hours": time_unit(longest)}
    for cost, meaning in COSTS.items():
        unit, times = units.get(cost, ("", 1.0))

        def draw(axes: "Axes", panel: Any, label: str = in_unit(meaning, unit)) -> Texts:
            table, points = panel
            best = pareto({name: (x, number.value or 0.0) for name, (x, number) in points.items()}, table.higher)
            axes.plot(*zip(*best, strict=True), color=INK, alpha=0.5, linewidth=1, drawstyle="steps-post")
            for name, point in points.items():
                _draw_numbers(axes, name, [point], styles[name])
            _draw_floors(axes, table, styles)
            _log_axis(axes, [x for x, _ in points.values()])
            axes.margins(0.1)
            return titles[table.group], label, in_unit(table.metrics[0], table.unit)

        panels = []
        for table in (table for table in report.tables if table.result.task != "health"):
            points = {
                row.name: (times * spent[row.name][cost], row.numbers[0])
                for row in table.rows
                if row.kind == "measured" and row.name in styles and spent[row.name].get(cost)
                if row.numbers[0].value is not None
            }
            costs = [x for x, _ in points.values()]
            if costs and max(costs) > LEVEL_COSTS * min(costs):
                panels.append((table, points))
        if panels:
            figures[f"accuracy against {meaning}"] = _figure(panels, draw, styles, width)
    return figures


def robustness_figures(report: ReportContents, width: float = PAGE) -> "dict[str, Figure]":
    """Accuracy on shifted sets against the clean one, a panel for each set, and the line through the networks.

    It is straight in logits, and its vertical distance is effective robustness (Taori et al. 2020, arXiv 2007.00644,
    section 2), here over the networks of this board in place of theirs.
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
            above = 100 * (y - expit(np.polyval(fit, logit(x))))
            title += f"; {networks[above.argmax()]} {above.max():+.1f}"
        return title, "clean top1, %", f"top1 on {name}, %"

    panels = [(table, *panel) for table in report.tables for panel in shifted_accuracies(table).items()]
    return {"robustness against clean accuracy": _figure(panels, draw, styles, width)} if panels else {}


def shifted_accuracies(table: ReportTable) -> dict[str, dict[str, tuple[TableNumber, TableNumber]]]:
    """Shifted set -> network -> its clean and its shifted accuracy; of corruptions the mean over these."""
    if not table.result.task.startswith("robustness") or "top1" not in table.metrics:
        return {}
    sets: dict[str, list[int]] = {}
    for at, metric in enumerate(table.metrics):
        if match := re.fullmatch(r"(\w+)_(top1|error)", metric):
            corrupted = match[2] == "error"
            sets.setdefault(f"{match[1].partition('_')[0]} corruptions" if corrupted else match[1], []).append(at)
    accuracies: dict[str, dict[str, tuple[TableNumber, TableNumber]]] = {name: {} for name in sets}
    for name, places in sets.items():
        for row in table.rows:
            clean, numbers = row.numbers[table.metrics.index("top1")], [row.numbers[at] for at in places]
            values = [number.value for number in numbers if number.value is not None]
            if clean.value is not None and len(values) == len(numbers):
                mean = TableNumber(text="", value=100 - sum(values) / len(values))
                accuracies[name][row.name] = clean, mean if name.endswith(" corruptions") else numbers[0]
    return accuracies


def pareto(points: Mapping[str, tuple[float, float]], higher_is_better: bool = True) -> list[tuple[float, float]]:
    """Cost and number of those that none beats at the same cost or less, the cheapest first."""
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
    """Curves of trainings, a panel for each value of CURVES that any has; None where none has. logs: name -> its lines
    (`log_of`). along: one of ALONG."""
    curves = {value: {name: points_of(lines, value, along) for name, lines in logs.items()} for value in CURVES}
    drawn = {value: by_name for value, by_name in curves.items() if any(by_name.values())}
    if not drawn:
        return None
    styles = styles or styles_of(logs)

    def draw(axes: "Axes", value: str) -> Texts:
        _draw_lines(axes, drawn[value], styles)
        return CURVES[value], ALONG[along], ""

    return _figure(list(drawn), draw, styles, width)


def in_unit(metric: str, unit: str) -> str:
    """A metric for an axis: `top1, %`."""
    return f"{metric}, {unit}" if unit else metric


def points_of(lines: Sequence[Mapping[str, float]], value: str, along: str = "epoch") -> list[tuple[float, float]]:
    """Place and value of the lines of a log that hold it, POINTS at most."""
    points = [(line[along], line[value]) for line in lines if value in line and along in line]
    return points[:: max(1, -(-len(points) // POINTS))]


def lines_figure(curves: Mapping[str, Points], x: str, y: str, styles: Mapping[str, Style] | None = None) -> "Figure":
    """One line for each name. x, y: what the axes mean; x counts something."""
    styles = styles or styles_of(curves)

    def draw(axes: "Axes", panel: Mapping[str, Points]) -> Texts:
        _draw_lines(axes, panel, styles)
        _count_axis(axes)
        return "", x, y

    return _figure([curves], draw, styles, PAGE / 2)


def calibration_figure(bins: Mapping[str, Points], styles: Mapping[str, Style] | None = None) -> "Figure":
    """Accuracy against confidence, in percent, and the diagonal on which both are the same. bins: name -> (bins, 2)
    confidences and accuracies, from 0 to 1."""
    styles = styles or styles_of(bins)

    def draw(axes: "Axes", panel: Mapping[str, Points]) -> Texts:
        axes.plot([0, 100], [0, 100], color=INK, alpha=0.4, linewidth=1)
        percent = {name: [(100 * sure, 100 * right) for sure, right in points] for name, points in panel.items()}
        _draw_lines(axes, percent, styles)
        return "", "confidence, %", "accuracy, %"

    return _figure([bins], draw, styles, PAGE / 2)


def _draw_lines(axes: "Axes", curves: Mapping[str, Points], styles: Mapping[str, Style]) -> None:
    for name, points in curves.items():
        every = 1 if len(points) <= FEW else len(points) // MARKED
        axes.plot(*zip(*points, strict=True), label=name, markersize=4, markevery=every, **styles[name])


def _draw_numbers(axes: "Axes", name: str, points: Sequence[tuple[float, TableNumber]], style: Style) -> None:
    """Numbers with their intervals as bars."""
    axes.plot([x for x, _ in points], [number.value or 0.0 for _, number in points], label=name, markersize=5, **style)
    bars = [(x, *number.interval) for x, number in points if number.interval]
    if bars:
        axes.vlines(*zip(*bars, strict=True), color=style["color"], linewidth=0.8)


def _draw_floors(axes: "Axes", table: ReportTable, styles: Mapping[str, Style]) -> None:
    """Raw pixels as horizontal lines."""
    for row in table.rows:
        if row.kind == "floor" and row.numbers[0].value is not None:
            axes.axhline(row.numbers[0].value, label=row.name, **styles[row.name])


def _count_axis(axes: "Axes") -> None:
    """An axis of x that counts."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(TICKS, integer=True))


def _log_axis(axes: "Axes", values: Sequence[float]) -> None:
    """A logarithmic axis of x with at most TICKS numbers, which cannot overlap; linear where the values are close."""
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
    """What each name that is drawn looks like, below all panels: the figure grows by its height, which is returned in
    inches."""
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
        text.set_parse_math(False)  # a name is no formula
    return height


def training_logs(report: ReportContents) -> dict[str, list[dict[str, float]]]:
    """Name -> lines of the log of each network whose pretraining lies on this disk."""
    logs = {
        str(used["name"]): log_of(Path(str(used["source"])).parent / "log.jsonl")
        for used in report.checkpoints
        if used["kind"] == "measured"
    }
    return {name: lines for name, lines in logs.items() if lines}


def log_of(path: Path) -> list[dict[str, float]]:
    """Lines of a training's log.jsonl, each with the epoch, images and hours that it is of where they are known; none
    where the file is not there. A torn last line is left out.

    Lines of the k-NN monitor hold an update alone: its epoch follows from the updates of an epoch.
    """
    lines: list[dict[str, float]] = []
    with contextlib.suppress(OSError, ValueError, AttributeError):
        for text in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(text)
            lines.append({key: value for key, value in entry.items() if isinstance(value, int | float)})
    timed = [line for line in lines if line.get("epoch") and line.get("step")]
    ends = (timed[0], timed[-1]) if timed else ({}, {})
    span = (ends[1]["step"] - ends[0]["step"]) if timed else 0
    per_update = (ends[1]["epoch"] - ends[0]["epoch"]) / span if span else 0.0
    batch, hours = _batch_of(path.parent), 0.0
    for line in lines:
        if "step" not in line:
            continue
        if "epoch" not in line and per_update:
            line["epoch"] = ends[1]["epoch"] + (line["step"] - ends[1]["step"]) * per_update
        if batch:
            line["images"] = line["step"] * batch
            if line.get("images_per_second"):
                hours += line.get("updates", 1) * batch / line["images_per_second"] / 3600
            line["hours"] = hours
    return lines


def _batch_of(folder: Path) -> int:
    """Images of an update of a pretraining; 0 where its run.json does not say."""
    try:
        return int(json.loads((folder / "run.json").read_bytes())["settings"]["batch"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _figure(
    panels: Sequence[Any], draw: "Callable[[Axes, Any], Texts]", styles: Mapping[str, Style], width: float
) -> "Figure":
    """Panels in one column up to 4.5 inches, in two or three on a page's width, and what each name looks like.

    draw: draws a panel, and returns its title and what its axes mean.
    """
    from matplotlib.figure import Figure

    count = len(panels)
    width = min(width, PAGE / 2) if count == 1 else width
    columns = min(count, 1 if width < PAGE / 2 + 0.1 else 3 if width >= PAGE else 2)
    rows = -(-count // columns)
    figure, most = Figure(figsize=(width, rows * min(0.75 * width / columns, 3.0)), dpi=72), 0
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, number + 1)
        title, x, y = draw(axes, panel)
        lines = wrap(printable(title), int(56 * width / columns / LETTER), break_on_hyphens=False)
        axes.set_title("\n".join(lines), fontsize=9, color=INK, parse_math=False)
        most = max(most, len(lines))
        axes.set_xlabel(x, color=INK, fontsize=8)
        axes.set_ylabel(y, color=INK, fontsize=8)
        axes.set_facecolor("none")
        axes.tick_params(which="both", colors=INK, labelsize=8)
        axes.grid(color=INK, alpha=0.15)
        for spine in axes.spines.values():
            spine.set_color(INK)
    # Margins are fixed: matplotlib's layout engines draw all texts twice more, half of the time of a figure.
    below, above = MARGINS["below"], MARGINS["above"] + MARGINS["title"] * most
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
    """A figure as a file: fonts embedded, no date, no random ids."""
    metadata: dict[str, Any] = {
        "png": {"Software": None},
        "svg": {"Date": None, "Creator": None},
        "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    }[form]
    fonts = {"svg.fonttype": "path", "svg.hashsalt": "bench report", "pdf.fonttype": 42}
    return saved(figure, fonts, format=form, dpi=300, metadata=metadata)


def saved(figure: "Figure", fonts: Mapping[str, Any], **options: Any) -> bytes:
    """What matplotlib's savefig writes. fonts: its rcParams meanwhile; a salt among them fixes the ids of an SVG."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context(fonts), warnings.catch_warnings():  # type: ignore[arg-type]
        warnings.filterwarnings("ignore", "Glyph .* missing")  # of names; the browser's fonts have more
        figure.savefig(buffer, **options)
    return buffer.getvalue()


def svg_of(figure: "Figure | None", title: str) -> str:
    """A figure for a page, whose ink is the page's; "" for none."""
    if figure is None:
        return ""
    # Text stays text, which can be searched and read aloud; ids come from a fixed salt, and no date is written.
    fonts = {"svg.fonttype": "none", "svg.hashsalt": "bench report"}
    text = saved(figure, fonts, format="svg", transparent=True, metadata={"Date": None, "Creator": None}).decode()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r' style="([^"]*)"', _as_attributes, text)
    return re.sub(r"<svg ", lambda _: f'<svg role="img" aria-label="{escape(title)}" ', text, count=1)


def _as_attributes(style: re.Match[str]) -> str:
    """A style of matplotlib's as attributes of SVG, which a page may have whose policy allows no inline style."""
    declared = dict(part.split(": ", 1) for part in style[1].split("; ") if part)
    declared.pop("font-family", None)  # the page's own
    return "".join(f' {name}="{value}"' for name, value in declared.items())
