"""Figures of a report as SVG text, drawn by matplotlib: the same input gives the same bytes.

Colours follow the page (currentColor), so that light and dark need one figure; lines differ in dashes and markers too,
so that they can be told apart in grey.
"""

import io
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from engine.printing import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette for colour-blind readers, without yellow, which is too light on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
DASHES = ("-", "--", "-.", ":")
MARKERS = "osD^vPX*"
INK = "#123456"  # drawn in this colour, then replaced by currentColor
CURVES = {  # of a training's log, where it has them, and what they are called
    "loss": "loss",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "images_per_second": "images per second",
    "knn_top1": "k-NN top-1, %",
}
POINTS = 400  # of a curve, at most
FEW = 30  # points of a curve up to which each has a marker
MARKED = 10  # points of a longer curve that have one
LETTER = 5.2  # points; about the width of a letter


def cost_figure(points: Mapping[str, tuple[float, float]], cost: str, metric: str) -> str:
    """Checkpoints by what their pretraining cost (x) and how good they are (y)."""
    figure, (axes,) = _axes(1)
    for number, (x, y) in enumerate(points.values()):
        axes.plot(x, y, MARKERS[number % len(MARKERS)], color=COLOURS[number % len(COLOURS)], markersize=8)
    if len({x for x, _ in points.values()}) > 1 and min(x for x, _ in points.values()) > 0:
        axes.set_xscale("log")
        for formatter in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
            formatter(lambda value, _: f"{value:.3g}")
    axes.margins(0.15)
    axes.set_xlabel(cost)
    axes.set_ylabel(metric)
    _name_points(figure, axes, points)
    return _svg(figure, f"{metric} against {cost}")


def training_figure(logs: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Curves of trainings over their epochs, a panel for each value of CURVES that any has. logs: name -> its lines."""
    drawn = [value for value in CURVES if any(value in line for lines in logs.values() for line in lines)]
    if not drawn:
        return ""
    figure, panels = _axes(len(drawn))
    for axes, value in zip(panels, drawn, strict=True):
        _draw_lines(axes, {name: points_of(lines, value) for name, lines in logs.items()})
        axes.set_title(CURVES[value], fontsize=10, color=INK)
        axes.set_xlabel("epoch")
    _legend(figure, panels[0], logs)
    return _svg(figure, "curves of the pretrainings")


def in_unit(metric: str, unit: str) -> str:
    """A metric for an axis: `top1, %`."""
    return f"{metric}, {unit}" if unit else metric


def points_of(lines: Sequence[Mapping[str, float]], value: str) -> list[tuple[float, float]]:
    """Epoch and value of the lines of a log that hold it, POINTS at most."""
    points = [(line["epoch"], line[value]) for line in lines if value in line and "epoch" in line]
    return points[:: max(1, -(-len(points) // POINTS))]


def lines_figure(curves: Mapping[str, Sequence[tuple[float, float]]], x: str, y: str, title: str) -> str:
    """One line for each name. x, y: what the axes mean; x counts something."""
    from matplotlib.ticker import AutoLocator

    figure, (axes,) = _axes(1)
    _draw_lines(axes, curves)
    whole = AutoLocator()
    whole.set_params(integer=True)
    axes.xaxis.set_major_locator(whole)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    _legend(figure, axes, curves)
    return _svg(figure, title)


def calibration_figure(bins: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Accuracy against confidence, in percent, and the diagonal on which both are the same. bins: name -> (bins, 2)
    confidences and accuracies, from 0 to 1."""
    figure, (axes,) = _axes(1)
    axes.plot([0, 100], [0, 100], color=INK, alpha=0.4, linewidth=1)
    _draw_lines(axes, {name: [(100 * sure, 100 * right) for sure, right in each] for name, each in bins.items()})
    axes.set_xlabel("confidence, %")
    axes.set_ylabel("accuracy, %")
    _legend(figure, axes, bins)
    return _svg(figure, "accuracy against confidence")


def _draw_lines(axes: "Axes", curves: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    for number, points in enumerate(curves.values()):
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            DASHES[number % len(DASHES)],
            color=COLOURS[number % len(COLOURS)],
            marker=MARKERS[number % len(MARKERS)],
            markersize=4,
            markevery=1 if len(points) <= FEW else len(points) // MARKED,
        )


def _legend(figure: "Figure", axes: "Axes", names: Iterable[str]) -> None:
    """The lines of one panel by name, below all panels, where they hide nothing."""
    lines, texts = [line for line in axes.get_lines() if line.get_color() != INK], [printable(name) for name in names]
    columns = int(72 * figure.get_figwidth() / (LETTER * max(map(len, texts)) + 40))
    legend = figure.legend(
        lines,
        texts,
        fontsize=8,
        labelcolor=INK,
        frameon=False,
        loc="outside lower center",
        ncols=min(max(columns, 1), len(texts)),
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # a name is no formula


def _name_points(figure: "Figure", axes: "Axes", points: Mapping[str, tuple[float, float]]) -> None:
    """Names beside points, in their order, each right or left, above or below, where it hits no point and no name."""
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()  # from now on places are known
    places = {name: axes.transData.transform(point) for name, point in points.items()}
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in places.values()]
    for name, (x, y) in places.items():
        text, boxes = printable(name), {}
        for rise, side in product((4, -12, 16, -24), ("left", "right")):
            left = x + 6 if side == "left" else x - 6 - LETTER * len(text)
            boxes[rise, side] = Bbox.from_bounds(left, y + rise, LETTER * len(text), 9)
        inside = [place for place, box in boxes.items() if axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1]
        free = [place for place in inside if not boxes[place].count_overlaps(taken)]
        rise, side = (free or inside or list(boxes))[0]
        taken.append(boxes[rise, side])
        axes.annotate(
            text,
            points[name],
            xytext=(6 if side == "left" else -6, rise),
            textcoords="offset points",
            ha=side,
            fontsize=9,
            color=INK,
            parse_math=False,
        )  # a name is no formula


def log_of(path: Path) -> list[dict[str, float]]:
    """Lines of a training's log.jsonl; none where the file is not there. A torn last line is left out."""
    lines = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            lines.append({key: value for key, value in entry.items() if isinstance(value, int | float)})
    except (OSError, ValueError, AttributeError):
        return lines
    return lines


def _axes(count: int) -> "tuple[Figure, list[Axes]]":
    from matplotlib.figure import Figure

    columns = 2 if count == 4 else min(count, 3)
    rows = -(-count // columns)
    figure = Figure(
        figsize=(4.2 * columns if count > 1 else 6.5, 3.0 * rows if count > 1 else 4.2), layout="constrained", dpi=72
    )
    panels = [figure.add_subplot(rows, columns, number + 1) for number in range(count)]
    for axes in panels:
        axes.set_facecolor("none")
        axes.tick_params(which="both", colors=INK, labelsize=8)  # both: minor ones of a log axis have numbers too
        axes.xaxis.label.set_color(INK)
        axes.yaxis.label.set_color(INK)
        axes.grid(color=INK, alpha=0.15)
        for spine in axes.spines.values():
            spine.set_color(INK)
    return figure, panels


def _svg(figure: "Figure", title: str) -> str:
    import matplotlib

    buffer = io.StringIO()
    # Text stays text, which can be searched and read aloud; ids come from a fixed salt, and no date is written.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "bench report"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # of names; the browser's fonts have more
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r' style="([^"]*)"', _as_attributes, text)
    return re.sub(r"<svg ", lambda _: f'<svg role="img" aria-label="{escape(title)}" ', text, count=1)


def _as_attributes(style: re.Match[str]) -> str:
    """A style of matplotlib's as attributes of SVG, which a page may have whose policy allows no inline style."""
    declared = dict(part.split(": ", 1) for part in style[1].split("; ") if part)
    declared.pop("font-family", None)  # the page's own
    return "".join(f' {name}="{value}"' for name, value in declared.items())
