"""Pictures made of panels in rows and columns, drawn with matplotlib. The same panels give the same bytes.

Maps are drawn in cividis, whose lightness rises evenly, for colour-blind readers and grey prints. Queries and boxes
also differ in number or dashes, not only in colour. Lengths in the layout are in inches.
"""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from textwrap import wrap
from typing import Any, Literal

import numpy as np
from PIL import Image

from bench.reports.drawing import COLOURS, DASHES, save_figure
from engine.errors import UserError
from engine.printing import printable

Format = Literal["png", "svg", "apng", "gif", "webp"]
ANIMATED = {"apng": "PNG", "gif": "GIF", "webp": "WEBP"}  # animated format -> Pillow's name
FPS = 10.0  # frames per second
RECORD = "bench visualize"  # key of the text in a PNG that describes the picture
COLOUR_MAP = "cividis"  # Nunez, Anderton and Renslow 2018
# Width of a cell; gap between cells; height of a line of text; width of a row's label; margin of the picture.
CELL, GAP, LINE, LABEL, EDGE = 1.5, 0.08, 0.15, 0.25, 0.1
HEADING_GAP = 0.14  # between the columns of two headings, in addition to GAP
MAX_ASPECT = 2.5  # largest height of a cell relative to its width; taller images are drawn narrower
NEARLY_FULL = 0.9  # share of a row's height; captions of panels that are higher are aligned below the row
FONT, LETTER = 7, 0.058  # font size in points; average width of a letter
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
class PanelRow:
    """Panels side by side."""

    panels: tuple[Panel | None, ...]  # None: an empty cell
    label: str = ""  # text at the left

    @property
    def height(self) -> float:
        """Height of the panels without titles and captions."""
        aspects = [panel.size[0] / panel.size[1] for panel in self.panels if panel]
        return CELL * min(max(aspects, default=1.0), MAX_ASPECT)

    def lines(self, part: Literal["title", "caption"]) -> int:
        """Number of lines of text above or below the panels."""
        texts = [getattr(panel, part) for panel in self.panels if panel]
        return max((len(text.split("\n")) for text in texts if text), default=0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Picture:
    """The contents of one file."""

    name: str  # of the file, without its suffix
    rows: tuple[PanelRow, ...]
    headings: tuple[tuple[str, int], ...] = ()  # texts above the rows, each with the number of columns that it spans
    note: str = ""  # text below the rows

    @property
    def column_edges(self) -> list[float]:
        """Left edges of the columns, and of one more behind the last, with a gap before the columns of each heading."""
        columns = max(len(row.panels) for row in self.rows)
        heading_starts = set(accumulate(span for _, span in self.headings))  # first columns of the second heading on
        edges = [EDGE + (LABEL if any(row.label for row in self.rows) else 0.0)]
        for column in range(1, columns + 1):
            starts_heading = column in heading_starts and column < columns
            edges.append(edges[-1] + CELL + GAP + HEADING_GAP * starts_heading)
        return edges


def encoded(picture: Picture, file_format: Format, checkpoints: Mapping[str, str]) -> bytes:
    """The bytes of a picture's file, without date, version or random ids.

    checkpoints: digest -> name of each checkpoint in the picture, which a PNG stores with kind and note for
    `bench report`.
    """
    title = printable(f"{picture.name}: {picture.note}")  # for screen readers
    record = json.dumps({"kind": picture.name, "note": picture.note, "checkpoints": checkpoints})
    if file_format == "png":
        metadata: dict[str, Any] = {"Software": None, RECORD: record}
    else:
        metadata = {"Date": None, "Creator": None, "Title": title}
    settings = {"svg.fonttype": "none", "svg.hashsalt": RECORD}
    figure = picture_figure(picture)
    return save_figure(figure, settings, format=file_format, dpi=DPI, facecolor="white", metadata=metadata)


def animated(picture: Picture, file_format: Format, fps: float = FPS) -> bytes:
    """A picture as an animation with a frame for each image. ValueError if the images differ in size."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    pictures = frames_of(picture)
    if len({frame.rows[0].panels[0].size for frame in pictures if frame.rows[0].panels[0]}) > 1:
        raise UserError("format", "the images differ in shape; give frames of one video, or add --square", file_format)
    images = []
    for frame in pictures:
        canvas = FigureCanvasAgg(picture_figure(frame))
        canvas.figure.set_dpi(DPI)
        canvas.draw()
        images.append(Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB"))
    # Frames without captions are smaller, and are padded.
    padded_images = [Image.new("RGB", max(image.size for image in images), "white") for _ in images]
    for padded_image, image in zip(padded_images, images, strict=True):
        padded_image.paste(image)
    first, *others = padded_images
    buffer, milliseconds = io.BytesIO(), round(1000 / fps)
    first.save(buffer, ANIMATED[file_format], save_all=True, append_images=others, duration=milliseconds, loop=0)
    return buffer.getvalue()


def frames_of(picture: Picture) -> list[Picture]:
    """A picture for each image, with the rows from the image to the next.

    Panels without a title take that of the first image's panel in the same row and column.
    """
    starts = [number for number, row in enumerate(picture.rows) if row.panels[0] is not None]
    groups = [picture.rows[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]
    titles = {
        (row_number, column): panel.title
        for row_number, row in enumerate(groups[0])
        for column, panel in enumerate(row.panels)
        if panel
    }

    def with_titles(row_number: int, row: PanelRow) -> PanelRow:
        panels = [
            panel and replace(panel, title=panel.title or titles.get((row_number, column), ""))
            for column, panel in enumerate(row.panels)
        ]
        return replace(row, panels=tuple(panels))

    return [replace(picture, rows=tuple(with_titles(*item) for item in enumerate(rows))) for rows in groups]


def picture_figure(picture: Picture) -> Any:
    """The picture as a matplotlib Figure."""
    from matplotlib.figure import Figure

    headings = [fitted_text(text, span * (CELL + GAP)) for text, span in picture.headings]
    width = picture.column_edges[-1] - GAP
    notes = wrap(printable(picture.note), int((width - EDGE) / LETTER))
    top = EDGE + LINE * max((len(lines) for lines in headings), default=0) + GAP * bool(headings)
    heights = [row.height + LINE * (row.lines("title") + row.lines("caption")) + GAP for row in picture.rows]
    total = top + sum(heights) + LINE * len(notes) + EDGE
    figure, column = Figure(figsize=(width + EDGE, total)), 0
    for lines, (_, span) in zip(headings, picture.headings, strict=True):
        middle = picture.column_edges[column] + (span * (CELL + GAP) - GAP) / 2
        _write(figure, middle, top - GAP, lines, weight="bold", va="bottom", ha="center")
        column += span
    for row, height in zip(picture.rows, heights, strict=True):
        _draw_row(figure, row, picture.column_edges, top)
        top += height
    _write(figure, EDGE, top, notes, color="0.3", va="top")
    return figure


def _write(figure: Any, x: float, y: float, lines: Sequence[str], **style: Any) -> None:
    """Write lines of text at a position from the left and the top. parse_math=False: a $ in a name is not a formula."""
    width, height = figure.get_size_inches()
    text = figure.text(x / width, 1 - y / height, "\n".join(lines), parse_math=False, fontsize=FONT, **style)
    text.set_linespacing(72 * LINE / (FONT * LINE_HEIGHT))


def fitted_text(text: str, width: float) -> list[str]:
    """A text wrapped to a width, and cut after MAX_LINES lines."""
    lines = wrap(printable(text), max(4, int(width / LETTER)))
    return lines if len(lines) <= MAX_LINES else [*lines[: MAX_LINES - 1], f"{lines[MAX_LINES - 1][:-3]}..."]


def _draw_row(figure: Any, row: PanelRow, column_edges: Sequence[float], top: float) -> None:
    """Draw titles, panels and captions of a row whose upper edge is at `top`."""
    figure_width, figure_height = figure.get_size_inches()
    panel_top = top + LINE * row.lines("title")
    if row.label:
        label = fitted_text(row.label, row.height)[:1]
        middle = EDGE + LABEL / 2 - GAP / 2, panel_top + row.height / 2
        _write(figure, *middle, label, rotation="vertical", va="center", ha="center")
    for left, panel in zip(column_edges, row.panels, strict=False):
        if panel is not None:
            height = min(row.height, CELL * panel.size[0] / panel.size[1])
            caption_top = row.height if height > NEARLY_FULL * row.height else height
            bounds = (
                left / figure_width,
                1 - (panel_top + height) / figure_height,
                CELL / figure_width,
                height / figure_height,
            )
            axes = figure.add_axes(bounds, xticks=[], yticks=[])
            _draw_panel(axes, panel)
            title, caption = ("\n".join(map(printable, text.split("\n"))) for text in (panel.title, panel.caption))
            style: dict[str, Any] = {"fontsize": FONT - 1, "parse_math": False}
            axes.set_title(title, pad=72 * LINE / 4, **style)
            axes.set_xlabel(caption, labelpad=72 * (caption_top - height + LINE / 4), **style)


def _draw_panel(axes: Any, panel: Panel) -> None:
    height, width = panel.size
    axes.imshow(
        panel.values,
        cmap=COLOUR_MAP,
        vmin=panel.low,
        extent=(0, width, height, 0),
        interpolation="nearest",
        aspect="equal",
    )
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    for spine in axes.spines.values():
        spine.set_linewidth(0.5 if panel.frame is None else 2.0)
        spine.set_color("0.3" if panel.frame is None else COLOURS[panel.frame % len(COLOURS)])
    for box in panel.boxes:
        _draw_box(axes, box, width, height)
    for point in panel.points:
        colour = COLOURS[point.number % len(COLOURS)]
        ring = {"boxstyle": "circle,pad=0.2", "facecolor": colour, "edgecolor": "white", "linewidth": 0.8}
        axes.text(
            point.x * width,
            point.y * height,
            str(point.number + 1),
            fontsize=FONT - 1,
            color="white",
            weight="bold",
            ha="center",
            va="center",
            bbox=ring,
        )


def _draw_box(axes: Any, box: Box, width: int, height: int) -> None:
    from matplotlib.patches import Rectangle

    place = (box.left * width, box.top * height)
    size = ((box.right - box.left) * width, (box.bottom - box.top) * height)
    colour, dashes = COLOURS[box.style % len(COLOURS)], DASHES[box.style % len(DASHES)]
    axes.add_patch(Rectangle(place, *size, fill=False, edgecolor="white", linewidth=3))  # visible on any background
    axes.add_patch(Rectangle(place, *size, fill=False, edgecolor=colour, linewidth=1.5, linestyle=dashes))


Block = Sequence[Sequence[Panel | None]]  # rows of panels, of one checkpoint and one image


def arranged(
    name: str,
    images: Sequence[Panel],
    blocks: Sequence[tuple[str, Sequence[Block]]],
    note: str = "",
    labels: Sequence[str] = (),
) -> Picture:
    """A picture with the images in the first column, and the blocks of each checkpoint next to them.

    blocks: name of a checkpoint, and its block for each image. labels: of the images.
    """
    widths = [max(len(row) for block in blocks_of_images for row in block) for _, blocks_of_images in blocks]
    rows = []
    for number, image in enumerate(images):
        blocks_of_image = [blocks_of_images[number] for _, blocks_of_images in blocks]
        for line in range(max(map(len, blocks_of_image))):
            panels: list[Panel | None] = [image if line == 0 else None]
            for block, width in zip(blocks_of_image, widths, strict=True):
                cells = list(block[line]) if line < len(block) else []
                panels += cells + [None] * (width - len(cells))
            label = labels[number] if labels and line == 0 else ""
            rows.append(PanelRow(panels=tuple(panels), label=label))
    headings = (("", 1), *((title, width) for (title, _), width in zip(blocks, widths, strict=True)))
    return Picture(name=name, rows=without_repeated_titles(rows), headings=headings, note=note)


def without_repeated_titles(rows: Sequence[PanelRow]) -> tuple[PanelRow, ...]:
    """The rows, without titles that are the same in the row before."""
    new_rows: list[PanelRow] = []
    titles_before: list[str] = []
    for row in rows:
        titles = [panel.title if panel else "" for panel in row.panels]
        if titles == titles_before:
            row = replace(row, panels=tuple(panel and replace(panel, title="") for panel in row.panels))
        new_rows.append(row)
        titles_before = titles
    return tuple(new_rows)
