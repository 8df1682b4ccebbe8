"""Boxes of objects, checked in one way for every layout.

mmdet trains on no box with a side below a pixel and on no object marked as "ignore", and it cuts boxes at the border of
the image (CocoDataset.parse_data_info, Resize). pycocotools scores all of them as they are. Here an object counts the
same in training and score, and the notes of a set count the objects that this changes, or that look wrong.
"""

from collections.abc import Sequence

MIN_BOX_SIDE = 1.0  # pixels
MAX_OVERHANG = 1.0  # pixels beyond the border, left by rounding and by files that count pixels from 1
MAX_OFFSET = 2.0, 0.1  # of a box's edge from its outline's: in pixels, and as a share of the box's longer side

NO_AREA = "have no area in their image: neither trained on nor scored"
NO_OUTLINE = "have no polygon of three points: neither trained on nor scored"
BEYOND = "reach beyond their image and are cut at its border; COCO's boxes are x, y, width, height"
OFF_OUTLINE = "have a box elsewhere than their outline; COCO's boxes are x, y, width, height"
IGNORED_OBJECTS = 'are marked as "ignore": neither trained on nor scored, like crowds'
REPEATED = "repeat the class and box of another object of their image"

Box = tuple[float, float, float, float]  # x1, y1, x2, y2 in pixels


def has_area(box: Sequence[float]) -> bool:
    """Whether both sides of a box are at least a pixel long."""
    return box[2] - box[0] >= MIN_BOX_SIDE and box[3] - box[1] >= MIN_BOX_SIDE


def reaches_out(box: Sequence[float], size: tuple[int, int]) -> bool:
    """Whether a box reaches more than MAX_OVERHANG beyond an image of `size` (width, height)."""
    return max(-box[0], -box[1], box[2] - size[0], box[3] - size[1]) > MAX_OVERHANG


def cut_at_border(box: Sequence[float], size: tuple[int, int]) -> Box:
    """The part of a box within an image of `size` (width, height)."""
    x1, y1, x2, y2 = (min(max(edge, 0.0), float(size[axis % 2])) for axis, edge in enumerate(box))
    return x1, y1, x2, y2


def is_off(box: Sequence[float], outline: Sequence[float]) -> bool:
    """Whether an edge of a box is further than MAX_OFFSET from that of the box of its outline."""
    pixels, share = MAX_OFFSET
    most = max(pixels, share * max(box[2] - box[0], box[3] - box[1]))
    return any(abs(edge - other) > most for edge, other in zip(box, outline, strict=True))
