"""Small predictions on a few validation images, which results keep so that `bench report` can show them.

S previews. Arrays of a result: "shown_of" (S,), indices of the images; "shown_masks" (S, SIDE, SIDE), small masks in
the upper left corner; "shown_sizes" (S, 2), heights and widths of these.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from downstream.data.listing import Instances

IMAGES = 8  # of a validation set, at most
SIDE = 128  # pixels of a small mask's longer side, at most
MAX_NUMBERED_OBJECTS = 255  # objects of an image, as they are numbered in uint8


def thumbnail(mask: Tensor) -> np.ndarray:
    """Classes (H, W) -> the same, uint8, of at most SIDE pixels a side, by the nearest pixel."""
    height, width = mask.shape
    scale = min(1.0, SIDE / max(height, width))

    def nearest(size: int) -> Tensor:
        count = max(1, round(scale * size))
        return ((torch.arange(count) + 0.5) * size / count).long()

    return mask.cpu()[nearest(height)][:, nearest(width)].to(torch.uint8).numpy()


def preview_indices(images: int) -> np.ndarray:
    """Indices (S,), evenly spread, of the images of so many that get a preview."""
    return np.unique(np.arange(IMAGES) * images // IMAGES)


def preview_masks(masks: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Thumbnails of all images' masks -> the previews' arrays."""
    indices = preview_indices(len(masks))
    return _arrays(indices, [masks[index] for index in indices])


def preview_detections(listing: Instances, detections: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Detections in all images (see detection_metric.py) -> the previews' arrays.

    A mask numbers the best detections from 1 on, as many as the image has labelled objects (at least one), the best in
    front; 0 where there is none.
    """
    indices, masks = preview_indices(len(detections)), []
    for index in indices:
        entry, detected = listing.entries[index], detections[index]
        best = np.argsort(-detected["scores"], kind="stable")[: max(1, len(listing.objects[index]))]
        masks.append(number_outlines([detected["masks"][k] for k in best], entry["height"], entry["width"]))
    return _arrays(indices, masks)


def number_outlines(outlines: Sequence[Any], height: int, width: int) -> np.ndarray:
    """COCO's outlines (polygons or run lengths) in an image -> (h, w) uint8, at most SIDE pixels a side: the number,
    from 1 on, of the first one that covers a pixel, or 0."""
    from pycocotools import mask

    numbers = np.zeros((height, width), np.uint8)
    for number, outline in reversed(list(enumerate(outlines[:MAX_NUMBERED_OBJECTS], 1))):
        if isinstance(outline, list):
            outline = mask.merge(mask.frPyObjects(outline, height, width))
        elif isinstance(outline["counts"], list):
            outline = mask.frPyObjects(outline, height, width)
        numbers[mask.decode(outline).astype(bool)] = number
    return thumbnail(torch.from_numpy(numbers))


def _arrays(indices: np.ndarray, masks: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    padded = np.zeros((len(masks), SIDE, SIDE), np.uint8)
    for canvas, mask in zip(padded, masks, strict=True):
        canvas[: mask.shape[0], : mask.shape[1]] = mask
    return {"shown_of": indices, "shown_masks": padded, "shown_sizes": np.array([mask.shape for mask in masks])}
