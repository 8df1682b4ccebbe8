"""Small predictions for a few validation images, stored in results so that `bench report` can show them.

The arrays of a result for S images: "shown_of" (S,), indices of the images; "shown_masks" (S, SIDE, SIDE) uint8, small
masks in the upper left corner; "shown_sizes" (S, 2), height and width of these masks. Segmentation of frozen patches
stores the same of the images with the lowest and with the median mIoU, as "ranked_of", "ranked_masks", "ranked_sizes".
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from downstream.data.listing import Instances

MAX_IMAGES = 8  # of a validation set, which get a preview
SIDE = 128  # longest side of a small mask in pixels
MAX_NUMBERED_OBJECTS = 255  # objects of an image, because their numbers are uint8


def thumbnail(mask: Tensor) -> np.ndarray:
    """A mask of classes (H, W), subsampled to at most SIDE pixels a side, as uint8."""
    height, width = mask.shape
    scale = min(1.0, SIDE / max(height, width))

    def nearest(size: int) -> Tensor:
        """Indices of the rows or columns to keep, of `size`."""
        count = max(1, round(scale * size))
        return ((torch.arange(count) + 0.5) * size / count).long()

    return mask.cpu()[nearest(height)][:, nearest(width)].to(torch.uint8).numpy()


def preview_indices(images: int) -> np.ndarray:
    """Evenly spaced indices (S,) of the images that get a preview, out of `images`."""
    return np.unique(np.arange(MAX_IMAGES) * images // MAX_IMAGES)


def preview_masks(masks: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays of the previews, from the thumbnails of all images."""
    indices = preview_indices(len(masks))
    return preview_arrays(indices, [masks[index] for index in indices])


def stored_masks(arrays: Mapping[str, np.ndarray]) -> dict[int, np.ndarray]:
    """Index of a scene -> its small mask (h, w) uint8, of a result's arrays: the ranked scenes before the others."""
    masks: dict[int, np.ndarray] = {}
    for kind in ("ranked", "shown"):
        for index, mask, (height, width) in zip(
            *(arrays.get(f"{kind}_{part}", np.empty((0, 2), int)) for part in ("of", "masks", "sizes")), strict=True
        ):
            masks.setdefault(int(index), mask[:height, :width])
    return masks


def preview_detections(listing: Instances, detections: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """The arrays of the previews, from the detections of all images (see detection_metric.py).

    A mask numbers the detections with the highest scores from 1 on, as many as the image has labelled objects but at
    least one, the best in front; 0 is background.
    """
    indices, masks = preview_indices(len(detections)), []
    for index in indices:
        entry, detected = listing.entries[index], detections[index]
        best = np.argsort(-detected["scores"], kind="stable")[: max(1, len(listing.objects[index]))]
        masks.append(number_outlines([detected["masks"][k] for k in best], entry["height"], entry["width"]))
    return preview_arrays(indices, masks)


def number_outlines(outlines: Sequence[Any], height: int, width: int) -> np.ndarray:
    """A thumbnail (h, w) uint8 with the number, from 1 on, of the first outline that covers a pixel; 0 for none.

    outlines: COCO's outlines (polygons or run lengths) in an image of this height and width.
    """
    from pycocotools import mask

    numbers = np.zeros((height, width), np.uint8)
    for number, outline in reversed(list(enumerate(outlines[:MAX_NUMBERED_OBJECTS], 1))):
        if isinstance(outline, list):
            outline = mask.merge(mask.frPyObjects(outline, height, width))
        elif isinstance(outline["counts"], list):
            outline = mask.frPyObjects(outline, height, width)
        numbers[mask.decode(outline).astype(bool)] = number
    return thumbnail(torch.from_numpy(numbers))


def preview_arrays(
    indices: Sequence[int] | np.ndarray, masks: Sequence[np.ndarray], kind: Literal["shown", "ranked"] = "shown"
) -> dict[str, np.ndarray]:
    """The arrays of some scenes, from their thumbnails. kind: "ranked" for those of `worst_and_median`."""
    padded = np.zeros((len(masks), SIDE, SIDE), np.uint8)
    for canvas, mask in zip(padded, masks, strict=True):
        canvas[: mask.shape[0], : mask.shape[1]] = mask
    sizes = np.array([mask.shape for mask in masks], np.int64).reshape(-1, 2)
    return {f"{kind}_of": np.asarray(indices, np.int64), f"{kind}_masks": padded, f"{kind}_sizes": sizes}
