"""Which boxes of objects can be used, decided in one way for every layout.

mmdet trains on no box with a side below a pixel and cuts boxes at the border of the image (CocoDataset.parse_data_info,
Resize), while pycocotools scores every box as it is. Here a box without area is left out of both and a box beyond the
image is cut in both; a thin box is scored, as in published numbers, and not trained on.
"""

from collections.abc import Sequence
from pathlib import Path

from imagesets.decoding import orientation_of, stored_size
from imagesets.sets import read_header

MIN_BOX_SIDE = 1.0  # pixels
MAX_OVERHANG = 1.0  # pixels beyond the border, left by rounding and by files that count pixels from 1
NO_AREA, BEYOND, THIN = "no area within the image", "parts beyond the image", "a side below one pixel"

Box = tuple[float, float, float, float]  # x1, y1, x2, y2 in pixels


def size_for_boxes(root: Path, name: str, has_boxes: bool) -> tuple[int, int]:
    """Width and height of the image `root`/`name`, whose annotation does not state the size that boxes were drawn on.

    Raises ValueError if it has boxes and an EXIF orientation, because labelling tools show the turned image, or if it
    cannot be read.
    """
    image = read_header(root / name)
    orientation = 1 if image.format == "PNG" and "exif" not in image.info else orientation_of(image)  # not decoded
    if has_boxes and orientation != 1:
        raise ValueError(
            f"{name} has the EXIF orientation {orientation}: labelling tools draw boxes on the turned image, and here "
            "pixels are read as they are stored; save the images turned, for example with exiftran -ai, and keep their "
            "annotations"
        )
    return stored_size(image)


def cut_at_border(box: Sequence[float], size: tuple[int, int]) -> Box:
    """The part of a box within an image of `size` (width, height); its edges are in no order if there is none."""
    x1, y1, x2, y2 = (min(max(edge, 0.0), float(size[axis % 2])) for axis, edge in enumerate(box))
    return x1, y1, x2, y2


def box_fault(box: Sequence[float], size: tuple[int, int]) -> str:
    """NO_AREA, BEYOND for a box that reaches out of an image of `size` (width, height), or THIN; "" for other boxes."""
    (x1, y1, x2, y2), inside = box, cut_at_border(box, size)
    if x1 >= x2 or y1 >= y2 or inside[0] >= inside[2] or inside[1] >= inside[3]:
        return NO_AREA
    if max(-x1, -y1, x2 - size[0], y2 - size[1]) > MAX_OVERHANG:
        return BEYOND
    return THIN if min(x2 - x1, y2 - y1) < MIN_BOX_SIDE else ""
