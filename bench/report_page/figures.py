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
from pathlib import Path

from engine.printing import printable

# Okabe and Ito's palette for colour-blind readers, without yellow, which is too light on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
DASHES = ("-", "--", "-.", ":")
MARKERS = "osD^vPX*"
INK = "#123456"  # drawn in this colour, then replaced by currentColor
CURVES = ("loss", "lr", "grad_norm", "images_per_second", "knn_top1")  # of a training's log, where it has them
POINTS = 400  # of a curve, at most
FEW = 30  # points of a curve up to which each has a marker


def cost_figure(points: Mapping[str, tuple[float, float]], cost: str, metric: str) -> str:
    """Checkpoints by what their pretraining cost (x) and how good they are (y)."""
    figure, (axes,) = _axes(1)
    for number, (name, (x, y)) in enumerate(points.items()):
        axes.plot(x, y, MARKERS[number % len(MARKERS)], color=COLOURS[number % len(COLOURS)], markersize=8)
        # A name is no formula.
        axes.annotate(
            printable(name), (x, y), xytext=(6, 4), textcoords="offset points", fontsize=9, color=INK, parse_math=False
        )
    if len({x for x, _ in points.values()}) > 1 and min(x for x, _ in points.values()) > 0:
        axes.set_xscale("log")
        for formatter in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
            formatter(lambda value, _: f"{value:.3g}")
    axes.margins(0.15)
    axes.set_xlabel(cost)
    axes.set_ylabel(metric)
    return _svg(figure, f"{metric} against {cost}")


def training_figure(logs: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Curves of trainings over their epochs, a panel for each value of CURVES that any has. logs: name -> its lines."""
    shown = [value for value in CURVES if any(value in line for lines in logs.values() for line in lines)]
    if not shown:
        return ""
    figure, panels = _axes(len(shown))
    for axes, value in zip(panels, shown, strict=True):
        _draw_lines(axes, {name: points_of(lines, value) for name, lines in logs.items()})
        axes.set_title(value.replace("_", " "), fontsize=10, color=INK)
        axes.set_xlabel("epoch")
    _legend(panels[0], logs)
    return _svg(figure, "curves of the pretrainings")


def points_of(lines: Sequence[Mapping[str, float]], value: str) -> list[tuple[float, float]]:
    """Epoch and value of the lines of a log that hold it, POINTS at most."""
    points = [(line["epoch"], line[value]) for line in lines if value in line and "epoch" in line]
    return points[:: max(1, -(-len(points) // POINTS))]


def lines_figure(curves: Mapping[str, Sequence[tuple[float, float]]], x: str, y: str, title: str) -> str:
    """One line for each name. x, y: what the axes mean."""
    figure, (axes,) = _axes(1)
    _draw_lines(axes, curves)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    _legend(axes, curves)
    return _svg(figure, title)


def calibration_figure(bins: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Accuracy against confidence, in percent, and the diagonal on which both are the same. bins: name -> (bins, 2)
    confidences and accuracies, from 0 to 1."""
    figure, (axes,) = _axes(1)
    axes.plot([0, 100], [0, 100], color=INK, alpha=0.4, linewidth=1)
    _draw_lines(axes, {name: [(100 * sure, 100 * right) for sure, right in each] for name, each in bins.items()})
    axes.set_xlabel("confidence, %")
    axes.set_ylabel("accuracy, %")
    _legend(axes, bins)
    return _svg(figure, "accuracy against confidence")


def _draw_lines(axes, curves: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    for number, points in enumerate(curves.values()):
        colour, dashes = COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]
        marker = MARKERS[number % len(MARKERS)] if len(points) <= FEW else ""
        axes.plot([x for x, _ in points], [y for _, y in points], dashes, color=colour, marker=marker, markersize=4)


def _legend(axes, names: Iterable[str]) -> None:
    lines = [line for line in axes.get_lines() if line.get_color() != INK]
    legend = axes.legend(lines, [printable(name) for name in names], fontsize=8, labelcolor=INK, framealpha=0)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a name is no formula


def log_of(path: Path) -> list[dict[str, float]]:
    """Lines of a training's log.jsonl; none where the file is not there. A torn last line is left out."""
    found = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            found.append({key: value for key, value in entry.items() if isinstance(value, int | float)})
    except (OSError, ValueError, AttributeError):
        return found
    return found


def _axes(count: int):
    from matplotlib.figure import Figure

    columns = min(count, 3)
    rows = -(-count // columns)
    figure = Figure(
        figsize=(4.2 * columns if count > 1 else 6.5, 3.0 * rows if count > 1 else 4.2), layout="constrained"
    )
    panels = [figure.add_subplot(rows, columns, number + 1) for number in range(count)]
    for axes in panels:
        axes.set_facecolor("none")
        axes.tick_params(colors=INK, labelsize=8)
        axes.xaxis.label.set_color(INK)
        axes.yaxis.label.set_color(INK)
        axes.grid(color=INK, alpha=0.15)
        for spine in axes.spines.values():
            spine.set_color(INK)
    return figure, panels


def _svg(figure, title: str) -> str:
    import matplotlib

    buffer = io.StringIO()
    # Text stays text, which can be searched and read aloud; ids come from a fixed salt, and no date is written.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "bench report"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # of names; the browser's fonts have more
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(r"<svg ", lambda _: f'<svg role="img" aria-label="{escape(title)}" ', text, count=1)
