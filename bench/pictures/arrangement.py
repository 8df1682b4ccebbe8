"""Panels of several checkpoints side by side: each image has its rows, each checkpoint its columns."""

from collections.abc import Sequence
from dataclasses import replace

from bench.pictures.pictures import Panel, PanelRow, Picture

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
                found = list(part[line]) if line < len(part) else []
                panels += found + [None] * (width - len(found))
            label = labels[number] if labels and line == 0 else ""
            rows.append(PanelRow(panels=tuple(panels), label=label))
    headings = (("", 1), *((title, width) for (title, _), width in zip(blocks, widths, strict=True)))
    return Picture(name=name, rows=titled_once(rows), headings=headings, note=note)


def titled_once(rows: Sequence[PanelRow]) -> tuple[PanelRow, ...]:
    """The rows, with titles that repeat those of the row before left out."""
    found: list[PanelRow] = []
    before: list[str] = []
    for row in rows:
        titles = [panel.title if panel else "" for panel in row.panels]
        same = titles == before
        found.append(replace(row, panels=tuple(p and replace(p, title="") for p in row.panels)) if same else row)
        before = titles
    return tuple(found)
