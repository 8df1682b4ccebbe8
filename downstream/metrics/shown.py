"""Predictions on a few validation images, small, which results keep so that `bench report` can show them.

S shown images.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from downstream.data.instances import Instances

SHOWN = 8  # validation images
SIDE = 128  # pixels of a small mask's longer side, at most
MOST = 255  # things of an image, as they are numbered in uint8


def thumbnail(mask: Tensor) -> np.ndarray:
    """Classes (H, W) -> the same, uint8, of at most SIDE pixels a side, by the nearest pixel."""
    height, width = mask.shape
    scale = min(1.0, SIDE / max(height, width))
    rows, columns = (torch.arange(max(1, round(scale * size))) for size in (height, width))
    rows, columns = (((each + 0.5) * size / len(each)).long() for each, size in ((rows, height), (columns, width)))
    return mask.cpu()[rows][:, columns].to(torch.uint8).numpy()


def shown_places(images: int) -> np.ndarray:
    """Which (S,) of so many images are shown: SHOWN of them, evenly spread."""
    return np.unique(np.arange(SHOWN) * images // SHOWN)


def shown_masks(masks: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Of the shown ones of all images: their places "shown_of" (S,), small masks "shown_masks" (S, SIDE, SIDE) in the
    upper left corner, and sizes "shown_sizes" (S, 2) of these."""
    places = shown_places(len(masks))
    return {"shown_of": places, **_in_corners([masks[place] for place in places])}


def shown_things(listing: Instances, found: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Of the shown images what `shown_masks` keeps, of masks that number the surest things found, from 1 on: as many as
    the labels hold, the surer in front, 0 where there is none. found: of each image, see detection_metric.py."""
    places, small = shown_places(len(found)), []
    for place in places:
        entry, each = listing.entries[place], found[place]
        surest = np.argsort(-each["scores"], kind="stable")[: max(1, len(listing.objects[place]))]
        small.append(numbered_things([each["masks"][k] for k in surest], entry["height"], entry["width"]))
    return {"shown_of": places, **_in_corners(small)}


def numbered_things(outlines: Sequence[Any], height: int, width: int) -> np.ndarray:
    """COCO's outlines (polygons or run lengths) in an image -> (h, w) uint8, at most SIDE pixels a side: the number,
    from 1 on, of the first one that covers a pixel, or 0."""
    from pycocotools import mask

    numbers = np.zeros((height, width), np.uint8)
    for number, outline in reversed(list(enumerate(outlines[:MOST], 1))):
        if isinstance(outline, list):
            outline = mask.merge(mask.frPyObjects(outline, height, width))
        elif isinstance(outline["counts"], list):
            outline = mask.frPyObjects(outline, height, width)
        numbers[mask.decode(outline).astype(bool)] = number
    return thumbnail(torch.from_numpy(numbers))


def _in_corners(masks: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    shown = np.zeros((len(masks), SIDE, SIDE), np.uint8)
    for canvas, mask in zip(shown, masks, strict=True):
        canvas[: mask.shape[0], : mask.shape[1]] = mask
    return {"shown_masks": shown, "shown_sizes": np.array([mask.shape for mask in masks])}
