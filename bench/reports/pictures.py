"""Pictures made of panels in rows and columns, drawn with matplotlib.

Maps are drawn in cividis, whose lightness rises evenly, for colour-blind readers and grey prints. Queries and boxes
also differ in number or dashes, not only in colour. Lengths in the layout are in inches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from textwrap import wrap
from typing import Any

import numpy as np

from bench.reports.drawing import COLOURS, DASHES, Format, figure_bytes
from engine.printing import printable

COLOUR_MAP = "cividis"  # Nunez, Anderton and Renslow 2018
# Width of a cell; gap between cells; height of a line of text; margin of the picture.
CELL, GAP, LINE, EDGE = 1.5, 0.08, 0.15, 0.1
HEADING_GAP = 0.14  # between the columns of two headings, in addition to GAP
MAX_ASPECT = 2.5  # largest height of a cell relative to its width; taller images are drawn narrower
NEARLY_FULL = 0.9  # share of a row's height; captions of panels that are higher are aligned below the row
FONT, LETTER = 7, 0.058  # font size in points; average width of a letter
LEGEND = 1.2  # width of a name in the legend
MAX_LINES = 2  # of a heading; longer ones are cut
LINE_HEIGHT = 1.2  # matplotlib's height of a line, relative to the font size
DPI = 150


@dataclass(frozen=True, kw_only=True)
class Spot:
    """A numbered point of an image."""

    x: float  # from the left, as a share of the image's width
    y: float  # from the top, as a share of the image's height
    number: int  # from 0 on; shown from 1 on


@dataclass(frozen=True, kw_only=True)
class Box:
    """A box in an image, in shares of its width and height."""

    left: float
    top: float
    right: float
    bottom: float
    style: int = 0  # index of its colour and dashes


@dataclass(frozen=True, kw_only=True, eq=False)
class Panel:
    """One cell of a picture."""

    values: np.ndarray  # an image (H, W, 3) uint8; or a map (h, w), drawn in colours from its lowest to highest value
    size: tuple[int, int]  # height and width of the image that the values cover: the shape of the panel
    title: str = ""  # above
    caption: str = ""  # below
    points: tuple[Spot, ...] = ()
    boxes: tuple[Box, ...] = ()
    frame: int | None = None  # number of the point to which the panel belongs; its frame has that point's colour
    low: float | None = None  # value of a map with the darkest colour; None: the lowest value


@dataclass(frozen=True, kw_only=True, eq=False)
class Picture:
    """The contents of one file."""

    name: str  # of the file, without its suffix
    rows: tuple[Sequence[Panel | None], ...]  # panels side by side; None: an empty cell
    headings: tuple[tuple[str, int], ...] = ()  # texts above the rows, each with the number of columns that it spans
    note: str = ""  # text below the rows
    legend: tuple[tuple[str, str], ...] = ()  # classes and their colours (#RRGGBB), below the rows


Block = Sequence[Sequence[Panel | None]]  # rows of panels, of one checkpoint and one image


def arranged(
    name: str,
    images: Sequence[Panel],
    blocks: Sequence[tuple[str, Sequence[Block]]],
    note: str,
    legend: Sequence[tuple[str, str]] = (),
) -> Picture:
    """A picture with the images in the first column, and the blocks of each checkpoint next to them.

    blocks: name of a checkpoint, and its block for each image. Titles that are the same in the row before are left out.
    """
    widths = [max(len(row) for block in blocks_of_images for row in block) for _, blocks_of_images in blocks]
    rows: list[list[Panel | None]] = []
    titles_before: list[str] = []
    for number, image in enumerate(images):
        blocks_of_image = [blocks_of_images[number] for _, blocks_of_images in blocks]
        for line in range(max(map(len, blocks_of_image))):
            panels: list[Panel | None] = [image if line == 0 else None]
            for block, width in zip(blocks_of_image, widths, strict=True):
                cells = list(block[line]) if line < len(block) else []
                panels += cells + [None] * (width - len(cells))
            titles = [panel.title if panel else "" for panel in panels]
            if titles == titles_before:
                panels = [panel and replace(panel, title="") for panel in panels]
            rows.append(panels)
            titles_before = titles
    headings = (("", 1), *((title, width) for (title, _), width in zip(blocks, widths, strict=True)))
    return Picture(name=name, rows=tuple(rows), headings=headings, note=note, legend=tuple(legend))


def encoded(picture: Picture, file_format: Format) -> bytes:
    """The bytes of a picture's file, whose title a screen reader reads."""
    metadata = {"Title": printable(f"{picture.name}: {picture.note}")}
    figure = picture_figure(picture)
    return figure_bytes(figure, file_format, metadata, dpi=DPI, facecolor="white")


def picture_figure(picture: Picture) -> Any:
    """The picture as a matplotlib Figure."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    heading_starts = set(accumulate(span for _, span in picture.headings))  # first columns of the second heading on
    columns = max(map(len, picture.rows))
    lefts = [EDGE]  # of the columns, and of one behind the last
    for column in range(1, columns + 1):
        gap = HEADING_GAP * (column in heading_starts and column < columns)
        lefts.append(lefts[-1] + CELL + GAP + gap)
    width = lefts[-1] - GAP
    headings = [_fitted(text, span * (CELL + GAP)) for text, span in picture.headings]
    notes = wrap(printable(picture.note), int((width - EDGE) / LETTER))
    top = EDGE + LINE * max((len(lines) for lines in headings), default=0) + GAP * bool(headings)
    sizes = [_heights(row) for row in picture.rows]
    heights = [height + LINE * (titles + captions) + GAP for height, titles, captions in sizes]
    names = [_fitted(name, LEGEND)[0] for name, _ in picture.legend]
    names_in_line = max(1, int((width - EDGE) / LEGEND))
    total = top + sum(heights) + LINE * (len(notes) - (-len(names) // names_in_line)) + EDGE
    figure, column = Figure(figsize=(width + EDGE, total)), 0
    for lines, (_, span) in zip(headings, picture.headings, strict=True):
        middle = lefts[column] + (span * (CELL + GAP) - GAP) / 2
        _write(figure, middle, top - GAP, lines, weight="bold", va="bottom", ha="center")
        column += span
    for row, (panel_height, titles, _), height in zip(picture.rows, sizes, heights, strict=True):
        panel_top = top + LINE * titles
        for left, panel in zip(lefts, row, strict=False):
            if panel is not None:
                _draw_panel(figure, panel, left, panel_top, panel_height)
        top += height
    for number, (name, (_, colour)) in enumerate(zip(names, picture.legend, strict=True)):
        line, column = divmod(number, names_in_line)
        left, middle = EDGE + LEGEND * column, top + LINE * (line + 0.5)
        size = 0.7 * LINE / (width + EDGE), 0.7 * LINE / total
        corner = left / (width + EDGE), 1 - middle / total - size[1] / 2
        figure.add_artist(Rectangle(corner, *size, facecolor=colour, edgecolor="0.3", linewidth=0.5))
        _write(figure, left + LINE, middle, [name], va="center")
    top -= LINE * (-len(names) // names_in_line)
    _write(figure, EDGE, top, notes, color="0.3", va="top")
    return figure


def _heights(row: Sequence[Panel | None]) -> tuple[float, int, int]:
    """Height of a row's panels, and the numbers of lines of text above and below them."""
    panels = [panel for panel in row if panel]
    aspect = max((panel.size[0] / panel.size[1] for panel in panels), default=1.0)
    titles, captions = ([panel.title for panel in panels], [panel.caption for panel in panels])
    titles_lines, captions_lines = (
        max((len(text.split("\n")) for text in texts if text), default=0) for texts in (titles, captions)
    )
    return CELL * min(aspect, MAX_ASPECT), titles_lines, captions_lines


def _write(figure: Any, x: float, y: float, lines: Sequence[str], **style: Any) -> None:
    """Write lines of text at a position from the left and the top. parse_math=False: a $ in a name is not a formula."""
    width, height = figure.get_size_inches()
    text = figure.text(x / width, 1 - y / height, "\n".join(lines), parse_math=False, fontsize=FONT, **style)
    text.set_linespacing(72 * LINE / (FONT * LINE_HEIGHT))


def _fitted(text: str, width: float) -> list[str]:
    """A text wrapped to a width, and cut after MAX_LINES lines."""
    lines = wrap(printable(text), max(4, int(width / LETTER)))
    return lines if len(lines) <= MAX_LINES else [*lines[: MAX_LINES - 1], f"{lines[MAX_LINES - 1][:-3]}..."]


def _draw_panel(figure: Any, panel: Panel, left: float, top: float, row_height: float) -> None:
    """Draw a panel with its title and caption. left, top: its position. row_height: of the panels of its row."""
    from matplotlib.patches import Rectangle

    height, width = panel.size
    drawn_height = min(row_height, CELL * height / width)
    total_width, total_height = figure.get_size_inches()
    bottom = 1 - (top + drawn_height) / total_height
    bounds = left / total_width, bottom, CELL / total_width, drawn_height / total_height
    axes = figure.add_axes(bounds, xticks=[], yticks=[])
    extent = (0, width, height, 0)
    axes.imshow(panel.values, COLOUR_MAP, vmin=panel.low, extent=extent, interpolation="nearest", aspect="equal")
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    for spine in axes.spines.values():
        spine.set_linewidth(0.5 if panel.frame is None else 2.0)
        spine.set_color("0.3" if panel.frame is None else COLOURS[panel.frame % len(COLOURS)])
    for box in panel.boxes:
        place = (box.left * width, box.top * height)
        size = ((box.right - box.left) * width, (box.bottom - box.top) * height)
        colour, dashes = COLOURS[box.style % len(COLOURS)], DASHES[box.style % len(DASHES)]
        axes.add_patch(Rectangle(place, *size, fill=False, edgecolor="white", linewidth=3))  # on any background
        axes.add_patch(Rectangle(place, *size, fill=False, edgecolor=colour, linewidth=1.5, linestyle=dashes))
    small: dict[str, Any] = {"fontsize": FONT - 1, "parse_math": False}
    for point in panel.points:
        colour, number = COLOURS[point.number % len(COLOURS)], str(point.number + 1)
        ring = {"boxstyle": "circle,pad=0.2", "facecolor": colour, "edgecolor": "white", "linewidth": 0.8}
        text = axes.text(point.x * width, point.y * height, number, color="white", weight="bold", bbox=ring, **small)
        text.set(ha="center", va="center")
    title, caption = ("\n".join(map(printable, text.split("\n"))) for text in (panel.title, panel.caption))
    axes.set_title(title, pad=72 * LINE / 4, **small)
    caption_top = row_height if drawn_height > NEARLY_FULL * row_height else drawn_height
    axes.set_xlabel(caption, labelpad=72 * (caption_top - drawn_height + LINE / 4), **small)
