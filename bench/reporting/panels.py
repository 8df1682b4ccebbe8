"""Pictures of panels in rows and columns, drawn with matplotlib: the same panels give the same bytes.

Maps are drawn in cividis, whose lightness rises evenly, for colour-blind readers and grey prints. Queries and boxes
also differ in number or dashes, not only in colour. Sizes of the layout are in inches.
"""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import Any, Literal

import numpy as np
from PIL import Image

from bench.reporting.drawing import COLOURS, DASHES, save_figure
from engine.printing import printable

Format = Literal["png", "svg", "apng", "gif", "webp"]
ANIMATED = {"apng": "PNG", "gif": "GIF", "webp": "WEBP"}  # animated format -> Pillow's name
FPS = 10.0  # frames per second
RECORD = "bench visualize"  # key of the text in a PNG that describes the picture
MAP = "cividis"  # Nunez, Anderton and Renslow 2018
# Width of a cell; gap between cells; height of a line of text; width of a row's label; margin of the picture.
CELL, GAP, LINE, LABEL, EDGE = 1.5, 0.08, 0.15, 0.25, 0.1
APART = 0.14  # gap between the columns of two headings, in addition to GAP
TALLEST = 2.5  # largest height of a cell relative to its width; taller images are drawn narrower
ABOUT = 0.9  # share of a row's height from which the caption of a panel is placed below the row
FONT, LETTER = 7, 0.058  # font size in points; average width of a letter in inches
LINES = 2  # lines of a heading, at most; longer ones are cut
LINE_HEIGHT = 1.2  # matplotlib's height of a line, relative to the font size
DPI = 150


@dataclass(frozen=True, kw_only=True)
class Spot:
    """A numbered point of an image. x, y: from the left and the top, as shares of the image's width and height."""

    x: float
    y: float
    number: int  # from 0; shown from 1 on


@dataclass(frozen=True, kw_only=True)
class Box:
    """A box in an image, in shares of its width and height. style: index of its colour and dashes."""

    left: float
    top: float
    right: float
    bottom: float
    style: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Panel:
    """One cell of a picture.

    values: colours (H, W, 3) uint8, or a map (h, w), whose colours run from its lowest to its highest value.
    size: height and width of the image that the values cover, which determine the shape of the panel.
    frame: number of the point to which the panel belongs; its frame has that point's colour.
    low: value with the darkest colour; None: the lowest value.
    """

    values: np.ndarray
    size: tuple[int, int]
    title: str = ""  # above
    caption: str = ""  # below
    points: tuple[Spot, ...] = ()
    boxes: tuple[Box, ...] = ()
    frame: int | None = None
    low: float | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class PanelRow:
    """Panels side by side; None is an empty cell. label: text at the left."""

    panels: tuple[Panel | None, ...]
    label: str = ""

    @property
    def height(self) -> float:
        """Height of the panels without their captions."""
        shapes = [panel.size[0] / panel.size[1] for panel in self.panels if panel]
        return CELL * min(max(shapes, default=1.0), TALLEST)

    def lines(self, part: Literal["title", "caption"]) -> int:
        """Lines of text above or below the panels."""
        return max(
            (len(getattr(panel, part).split("\n")) for panel in self.panels if panel and getattr(panel, part)),
            default=0,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Picture:
    """The contents of one file. headings: texts above the rows, each with the number of columns that it spans. note:
    text below."""

    name: str  # of the file, without its suffix
    rows: tuple[PanelRow, ...]
    headings: tuple[tuple[str, int], ...] = ()
    note: str = ""

    @property
    def columns(self) -> int:
        return max(len(row.panels) for row in self.rows)

    @property
    def places(self) -> list[float]:
        """Left edges of the columns, and of one more behind the last; columns of different headings stand apart."""
        starts, column = set[int](), 0  # first columns of headings
        for _, span in self.headings:
            column += span
            starts.add(column)
        places = [EDGE + (LABEL if any(row.label for row in self.rows) else 0.0)]
        for column in range(1, self.columns + 1):
            places.append(places[-1] + CELL + GAP + APART * (column in starts and column < self.columns))
        return places


def encoded(picture: Picture, form: Format, checkpoints: Mapping[str, str]) -> bytes:
    """The bytes of a picture's file, without date, version or random ids.

    checkpoints: digest -> name of each checkpoint in the picture, which a PNG stores with kind and note for
    `bench report`.
    """
    title = printable(f"{picture.name}: {picture.note}")  # for screen readers
    record = json.dumps({"kind": picture.name, "note": picture.note, "checkpoints": checkpoints})
    metadata = {"png": {"Software": None, RECORD: record}}.get(form, {"Date": None, "Creator": None, "Title": title})
    fonts = {"svg.fonttype": "none", "svg.hashsalt": RECORD}
    return save_figure(drawn_figure(picture), fonts, format=form, dpi=DPI, facecolor="white", metadata=metadata)


def animated(picture: Picture, form: Format, fps: float = FPS) -> bytes:
    """A picture as an animation with a frame for each image. ValueError if the images differ in size."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    pictures, drawn = frames_of(picture), []
    if len({frame.rows[0].panels[0].size for frame in pictures if frame.rows[0].panels[0]}) > 1:
        raise ValueError(f"--format {form}: the images differ in shape; give frames of one video, or add --square")
    for frame in pictures:
        canvas = FigureCanvasAgg(drawn_figure(frame))
        canvas.figure.set_dpi(DPI)
        canvas.draw()
        drawn.append(Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB"))
    # Frames without captions are smaller, and are padded.
    frames = [Image.new("RGB", max(image.size for image in drawn), "white") for _ in drawn]
    for frame_image, image in zip(frames, drawn, strict=True):
        frame_image.paste(image)
    buffer, milliseconds = io.BytesIO(), round(1000 / fps)
    frames[0].save(buffer, ANIMATED[form], save_all=True, append_images=frames[1:], duration=milliseconds, loop=0)
    return buffer.getvalue()


def frames_of(picture: Picture) -> list[Picture]:
    """A picture for each image: the rows from one with a first panel to the next. All have the titles of the first."""
    starts = [place for place, row in enumerate(picture.rows) if row.panels[0] is not None]
    groups = [picture.rows[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]
    titles = [[panel.title if panel else "" for panel in row.panels] for row in groups[0]]

    def titled(row: PanelRow, texts: Sequence[str]) -> PanelRow:
        panels = zip(row.panels, texts, strict=False)
        return replace(row, panels=tuple(panel and replace(panel, title=panel.title or text) for panel, text in panels))

    return [replace(picture, rows=tuple(map(titled, rows, titles))) for rows in groups]


def drawn_figure(picture: Picture) -> Any:
    """The picture as a matplotlib Figure."""
    from matplotlib.figure import Figure

    headings = [fitted_text(text, span * (CELL + GAP)) for text, span in picture.headings]
    width = picture.places[-1] - GAP
    notes = wrap(printable(picture.note), int((width - EDGE) / LETTER))
    top = EDGE + LINE * max((len(lines) for lines in headings), default=0) + GAP * bool(headings)
    heights = [row.height + LINE * (row.lines("title") + row.lines("caption")) + GAP for row in picture.rows]
    total = top + sum(heights) + LINE * len(notes) + EDGE
    figure, column = Figure(figsize=(width + EDGE, total)), 0
    for lines, (_, span) in zip(headings, picture.headings, strict=True):
        middle = picture.places[column] + (span * (CELL + GAP) - GAP) / 2
        _write(figure, middle, top - GAP, lines, weight="bold", va="bottom", ha="center")
        column += span
    for row, height in zip(picture.rows, heights, strict=True):
        _draw_row(figure, row, picture.places, top)
        top += height
    _write(figure, EDGE, top, notes, color="0.3", va="top")
    return figure


def _write(figure: Any, x: float, y: float, lines: Sequence[str], **style: Any) -> None:
    """Write lines of text at a position in inches from the left and the top. A $ in a name is not a formula."""
    width, height = figure.get_size_inches()
    text = figure.text(x / width, 1 - y / height, "\n".join(lines), parse_math=False, fontsize=FONT, **style)
    text.set_linespacing(72 * LINE / (FONT * LINE_HEIGHT))


def fitted_text(text: str, width: float) -> list[str]:
    """A text wrapped to `width` inches, and cut after LINES lines."""
    lines = wrap(printable(text), max(4, int(width / LETTER)))
    return lines if len(lines) <= LINES else [*lines[: LINES - 1], f"{lines[LINES - 1][:-3]}..."]


def _draw_row(figure: Any, row: PanelRow, places: Sequence[float], top: float) -> None:
    """Draw titles, panels and captions of a row whose upper edge is at `top`. places: left edges of the columns."""
    across, down = figure.get_size_inches()
    panel_top = top + LINE * row.lines("title")
    if row.label:
        label = fitted_text(row.label, row.height)[:1]
        middle = EDGE + LABEL / 2 - GAP / 2, panel_top + row.height / 2
        _write(figure, *middle, label, rotation="vertical", va="center", ha="center")
    for left, panel in zip(places, row.panels, strict=False):
        if panel is not None:
            height = min(row.height, CELL * panel.size[0] / panel.size[1])
            level = row.height if height > ABOUT * row.height else height  # aligns captions of nearly equal panels
            box = left / across, 1 - (panel_top + height) / down, CELL / across, height / down
            axes = figure.add_axes(box, xticks=[], yticks=[])
            _draw_panel(axes, panel)
            title, caption = ("\n".join(map(printable, text.split("\n"))) for text in (panel.title, panel.caption))
            style: dict[str, Any] = {"fontsize": FONT - 1, "parse_math": False}
            axes.set_title(title, pad=72 * LINE / 4, **style)
            axes.set_xlabel(caption, labelpad=72 * (level - height + LINE / 4), **style)


def _draw_panel(axes: Any, panel: Panel) -> None:
    height, width = panel.size
    axes.imshow(
        panel.values, cmap=MAP, vmin=panel.low, extent=(0, width, height, 0), interpolation="nearest", aspect="equal"
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
    widths = [max(len(row) for block in image_blocks for row in block) for _, image_blocks in blocks]
    rows = []
    for number, image in enumerate(images):
        parts = [image_blocks[number] for _, image_blocks in blocks]
        for line in range(max(map(len, parts))):
            panels: list[Panel | None] = [image if line == 0 else None]
            for part, width in zip(parts, widths, strict=True):
                cells = list(part[line]) if line < len(part) else []
                panels += cells + [None] * (width - len(cells))
            label = labels[number] if labels and line == 0 else ""
            rows.append(PanelRow(panels=tuple(panels), label=label))
    headings = (("", 1), *((title, width) for (title, _), width in zip(blocks, widths, strict=True)))
    return Picture(name=name, rows=titled_once(rows), headings=headings, note=note)


def titled_once(rows: Sequence[PanelRow]) -> tuple[PanelRow, ...]:
    """The rows, without titles that repeat those of the row before."""
    titled: list[PanelRow] = []
    before: list[str] = []
    for row in rows:
        titles = [panel.title if panel else "" for panel in row.panels]
        same = titles == before
        titled.append(replace(row, panels=tuple(p and replace(p, title="") for p in row.panels)) if same else row)
        before = titles
    return tuple(titled)
