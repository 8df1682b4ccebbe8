"""How figures are drawn with matplotlib: styles, axes, legends, and files.

The same input gives the same bytes. A checkpoint has the same colour, marker and dashes in all figures of a
leaderboard; markers and dashes keep lines distinguishable in grey. On a page the ink has the page's text colour
(currentColor), so that one figure serves light and dark themes.
"""

import io
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal

from engine.printing import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Format = Literal["png", "svg"]
Texts = tuple[str, str, str]  # title of a panel, and labels of its x- and y-axis
DrawPanel = Callable[["Axes"], Texts]  # draws into the axes of a panel
Style = Mapping[str, Any]  # properties of a matplotlib line: colour, marker, dashes
# Okabe and Ito's palette for colour-blind readers, without yellow, which is too light on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
DASHES = ("-", "--", "-.", ":")
MARKERS = "osD^vPX*"
INK = "#123456"  # dark; on a page it is replaced by currentColor
PAGE_WIDTH = 9.0  # of a figure on a page, in inches
LETTER_WIDTH = 5.2  # average, in points
LEGEND_LINE = 0.18  # height of a line of the legend, in inches


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


def figure_of(panels: Sequence[DrawPanel], styles: Mapping[str, Style]) -> "Figure":
    """Panels, three in a row of the page, and a legend below them; a single panel has half the width of the page."""
    from matplotlib.figure import Figure

    width, columns = PAGE_WIDTH / (2 if len(panels) == 1 else 1), min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(width, rows * min(0.75 * width / columns, 3.0)), dpi=72, layout="constrained")
    for number, draw_panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, number + 1)
        title, x_label, y_label = draw_panel(axes)
        lines = wrap(printable(title), int(56 * width / columns / LETTER_WIDTH), break_on_hyphens=False)
        axes.set_title("\n".join(lines), fontsize=9, color=INK, parse_math=False)
        axes.set_xlabel(x_label, color=INK, fontsize=8)
        axes.set_ylabel(y_label, color=INK, fontsize=8)
        axes.set_facecolor("none")
        axes.tick_params(which="both", colors=INK, labelsize=8)
        axes.grid(color=INK, alpha=0.15)
        for spine in axes.spines.values():
            spine.set_color(INK)
    drawn = {str(line.get_label()): line for axes in figure.axes for line in axes.lines}
    drawn = {name: drawn[name] for name in styles if name in drawn}
    names = [printable(name) for name in drawn]
    columns = max(1, int(72 * width / (LETTER_WIDTH * max(map(len, names)) + 40)))
    figure.set_figheight(figure.get_figheight() + LEGEND_LINE * (1 - (-len(names) // columns)))
    style = {"fontsize": 8, "labelcolor": INK, "frameon": False}
    legend = figure.legend(list(drawn.values()), names, loc="outside lower center", ncols=columns, **style)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a $ in a name is not a formula
    return figure


def figure_bytes(
    figure: "Figure", file_format: Format, metadata: Mapping[str, str] | None = None, **options: Any
) -> bytes:
    """The bytes of a figure's file, without dates, versions and random ids. Text of an SVG can be searched.

    metadata: additional texts in the file. options: of matplotlib's savefig.
    """
    import matplotlib

    no_dates: dict[str, Any] = {
        "png": {"Software": None},
        "svg": {"Date": None, "Creator": None},
    }[file_format]
    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "bench report"}
    buffer = io.BytesIO()
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # in names; the browser's fonts have more glyphs
        figure.savefig(buffer, format=file_format, metadata={**no_dates, **(metadata or {})}, **options)
    return buffer.getvalue()


def svg_of(figure: "Figure | None", title: str) -> str:
    """A figure as inline SVG in the page's text colour; "" for None. title: for screen readers."""
    if figure is None:
        return ""
    text = figure_bytes(figure, "svg", transparent=True).decode()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r' style="([^"]*)"', _style_as_attributes, text)
    return re.sub(r"<svg ", lambda _: f'<svg role="img" aria-label="{escape(title)}" ', text, count=1)


def _style_as_attributes(style: re.Match[str]) -> str:
    """An inline style by matplotlib as SVG attributes, which the page's content security policy allows."""
    properties = dict(part.split(": ", 1) for part in style[1].split("; ") if part)
    properties.pop("font-family", None)  # the page's own
    return "".join(f' {name}="{value}"' for name, value in properties.items())
