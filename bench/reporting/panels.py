"""Pictures as panels in rows and columns, drawn by matplotlib as PNG or SVG: the same panels give the same bytes.

Maps are drawn in cividis, whose lightness rises evenly, so that colour-blind readers and grey prints see the same.
Queries and boxes differ in number or dashes too, not in colour alone. Sizes of the layout are in inches.
"""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import Any, Literal

import numpy as np
from PIL import Image

from bench.reporting.figures import COLOURS, DASHES, saved
from engine.printing import printable

Format = Literal["png", "svg", "apng", "gif", "webp"]
ANIMATED = {"apng": "PNG", "gif": "GIF", "webp": "WEBP"}  # format of which every image is a frame -> Pillow's name
FPS = 10.0  # frames a second
RECORD = "bench visualize"  # key of a PNG's text that holds what the picture is of
MAP = "cividis"  # Nunez, Anderton and Renslow 2018
CELL, GAP, LINE, LABEL, EDGE = 1.5, 0.08, 0.15, 0.25, 0.1  # width of a cell; a line of text; a row's label
APART = 0.14  # between the columns of two headings, beside GAP
TALLEST = 2.5  # height of a cell over its width, at most; longer images are drawn narrower
ABOUT = 0.9  # of a row's height from which on a panel is as high as the row
FONT, LETTER = 7, 0.058  # points; about the width of a letter
LINES = 2  # of a heading; what is longer is cut
LINE_HEIGHT = 1.2  # of matplotlib's lines, by their font's size
DPI = 150


@dataclass(frozen=True, kw_only=True)
class Spot:
    """A numbered place of an image; x, y: shares of its width and height from the left and the top."""

    x: float
    y: float
    number: int  # from 0; shown from 1 on


@dataclass(frozen=True, kw_only=True)
class Box:
    """A part of an image, in shares of its width and height. style: number of its colour and dashes."""

    left: float
    top: float
    right: float
    bottom: float
    style: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Panel:
    """One cell. values: colours (H, W, 3) uint8, or a map (h, w) that is drawn from its least to its largest value.

    size: height and width of the image that the values cover, which give the panel its shape. frame: number of the
    point that it belongs to. low: what is drawn darkest, in place of the least value.
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
    """Panels side by side; None leaves a cell empty. label: at the left."""

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
    """One file. headings: texts above the rows, each with the number of columns that it spans. note: a line below."""

    name: str  # of the file, without its suffix
    rows: tuple[PanelRow, ...]
    headings: tuple[tuple[str, int], ...] = ()
    note: str = ""

    @property
    def columns(self) -> int:
        return max(len(row.panels) for row in self.rows)

    @property
    def places(self) -> list[float]:
        """Left edges of the columns and of what would follow them; those under one heading stand together."""
        firsts, column = set[int](), 0
        for _, span in self.headings:
            column += span
            firsts.add(column)
        places = [EDGE + (LABEL if any(row.label for row in self.rows) else 0.0)]
        for column in range(1, self.columns + 1):
            places.append(places[-1] + CELL + GAP + APART * (column in firsts and column < self.columns))
        return places


def encoded(picture: Picture, form: Format, checkpoints: Mapping[str, str]) -> bytes:
    """The file's bytes. They hold no date, no version and no random ids. checkpoints: digest -> name, which a PNG
    keeps beside its kind and note for `bench report`."""
    title = printable(f"{picture.name}: {picture.note}")  # for those who hear it
    record = json.dumps({"kind": picture.name, "note": picture.note, "checkpoints": checkpoints})
    metadata = {"png": {"Software": None, RECORD: record}}.get(form, {"Date": None, "Creator": None, "Title": title})
    fonts = {"svg.fonttype": "none", "svg.hashsalt": RECORD}
    return saved(drawn_figure(picture), fonts, format=form, dpi=DPI, facecolor="white", metadata=metadata)


def animated(picture: Picture, form: Format, fps: float = FPS) -> bytes:
    """A picture as a film whose frames are its images, in their order. ValueError where these differ in size."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    pictures, drawn = frames_of(picture), []
    if len({frame.rows[0].panels[0].size for frame in pictures if frame.rows[0].panels[0]}) > 1:
        raise ValueError(f"--format {form}: the images differ in shape; give frames of one film, or add --square")
    for frame in pictures:
        canvas = FigureCanvasAgg(drawn_figure(frame))
        canvas.figure.set_dpi(DPI)
        canvas.draw()
        drawn.append(Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB"))
    frames = [Image.new("RGB", max(image.size for image in drawn), "white") for _ in drawn]  # some lack captions
    for film, image in zip(frames, drawn, strict=True):
        film.paste(image)
    buffer, every = io.BytesIO(), round(1000 / fps)
    frames[0].save(buffer, ANIMATED[form], save_all=True, append_images=frames[1:], duration=every, loop=0)
    return buffer.getvalue()


def frames_of(picture: Picture) -> list[Picture]:
    """A picture for each image, that is for the rows from one with a first panel to the next, with all titles."""
    starts = [place for place, row in enumerate(picture.rows) if row.panels[0] is not None]
    groups = [picture.rows[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]
    titles = [[panel.title if panel else "" for panel in row.panels] for row in groups[0]]

    def titled(row: PanelRow, texts: Sequence[str]) -> PanelRow:
        panels = zip(row.panels, texts, strict=False)
        return replace(row, panels=tuple(panel and replace(panel, title=panel.title or text) for panel, text in panels))

    return [replace(picture, rows=tuple(map(titled, rows, titles))) for rows in groups]


def drawn_figure(picture: Picture) -> Any:
    """matplotlib's Figure, every panel at its place."""
    from matplotlib.figure import Figure

    heads, width = [fitted_text(text, span * (CELL + GAP)) for text, span in picture.headings], picture.places[-1] - GAP
    notes = wrap(printable(picture.note), int((width - EDGE) / LETTER))
    top = EDGE + LINE * max((len(head) for head in heads), default=0) + GAP * bool(heads)
    heights = [row.height + LINE * (row.lines("title") + row.lines("caption")) + GAP for row in picture.rows]
    total = top + sum(heights) + LINE * len(notes) + EDGE
    figure, column = Figure(figsize=(width + EDGE, total)), 0
    for lines, (_, span) in zip(heads, picture.headings, strict=True):
        middle = picture.places[column] + (span * (CELL + GAP) - GAP) / 2
        _write(figure, middle, top - GAP, lines, weight="bold", va="bottom", ha="center")
        column += span
    for row, height in zip(picture.rows, heights, strict=True):
        _draw_row(figure, row, picture.places, top)
        top += height
    _write(figure, EDGE, top, notes, color="0.3", va="top")
    return figure


def _write(figure: Any, x: float, y: float, lines: Sequence[str], **style: Any) -> None:
    """Lines of text at inches from the left and the top; a name is no formula."""
    width, height = figure.get_size_inches()
    text = figure.text(x / width, 1 - y / height, "\n".join(lines), parse_math=False, fontsize=FONT, **style)
    text.set_linespacing(72 * LINE / (FONT * LINE_HEIGHT))


def fitted_text(text: str, width: float) -> list[str]:
    """The lines of a text in `width` inches; what does not fit in LINES is cut."""
    lines = wrap(printable(text), max(4, int(width / LETTER)))
    return lines if len(lines) <= LINES else [*lines[: LINES - 1], f"{lines[LINES - 1][:-3]}..."]


def _draw_row(figure: Any, row: PanelRow, places: Sequence[float], top: float) -> None:
    """Titles, panels and captions of one row whose upper edge is at `top`. places: left edges of its panels."""
    across, down = figure.get_size_inches()
    panel_top = top + LINE * row.lines("title")
    if row.label:
        label = fitted_text(row.label, row.height)[:1]
        middle = EDGE + LABEL / 2 - GAP / 2, panel_top + row.height / 2
        _write(figure, *middle, label, rotation="vertical", va="center", ha="center")
    for left, panel in zip(places, row.panels, strict=False):
        if panel is not None:
            height = min(row.height, CELL * panel.size[0] / panel.size[1])
            level = row.height if height > ABOUT * row.height else height  # so that captions stand on one line
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
    axes.add_patch(Rectangle(place, *size, fill=False, edgecolor="white", linewidth=3))  # seen on any ground
    axes.add_patch(Rectangle(place, *size, fill=False, edgecolor=colour, linewidth=1.5, linestyle=dashes))


Block = Sequence[Sequence[Panel | None]]  # rows of panels, of one checkpoint and one image


def arranged(
    name: str,
    images: Sequence[Panel],
    blocks: Sequence[tuple[str, Sequence[Block]]],
    note: str = "",
    labels: Sequence[str] = (),
) -> Picture:
    """A picture: the images at the left, beside them for each checkpoint (its name, a block for each image).

    labels: of the images.
    """
    widths = [max(len(row) for block in of_images for row in block) for _, of_images in blocks]
    rows = []
    for number, image in enumerate(images):
        parts = [of_images[number] for _, of_images in blocks]
        for line in range(max(map(len, parts))):
            panels: list[Panel | None] = [image if line == 0 else None]
            for part, width in zip(parts, widths, strict=True):
                of_checkpoint = list(part[line]) if line < len(part) else []
                panels += of_checkpoint + [None] * (width - len(of_checkpoint))
            label = labels[number] if labels and line == 0 else ""
            rows.append(PanelRow(panels=tuple(panels), label=label))
    headings = (("", 1), *((title, width) for (title, _), width in zip(blocks, widths, strict=True)))
    return Picture(name=name, rows=titled_once(rows), headings=headings, note=note)


def titled_once(rows: Sequence[PanelRow]) -> tuple[PanelRow, ...]:
    """The rows, with titles that repeat those of the row before left out."""
    titled: list[PanelRow] = []
    before: list[str] = []
    for row in rows:
        titles = [panel.title if panel else "" for panel in row.panels]
        same = titles == before
        titled.append(replace(row, panels=tuple(p and replace(p, title="") for p in row.panels)) if same else row)
        before = titles
    return tuple(titled)
