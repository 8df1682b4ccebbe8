"""Predictions on a few validation images, small, which results keep so that `bench report` can show them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

SHOWN = 8  # validation images
SIDE = 128  # pixels of a small mask's longer side, at most


def thumbnail(mask: Tensor) -> np.ndarray:
    """Classes (H, W) -> the same, uint8, of at most SIDE pixels a side, by the nearest pixel."""
    height, width = mask.shape
    scale = min(1.0, SIDE / max(height, width))
    rows, columns = (torch.arange(max(1, round(scale * size))) for size in (height, width))
    rows, columns = (((each + 0.5) * size / len(each)).long() for each, size in ((rows, height), (columns, width)))
    return mask.cpu()[rows][:, columns].to(torch.uint8).numpy()


def shown_masks(masks: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Of SHOWN images, evenly spread over all: their places "shown_of" (S,), small masks "shown_masks" (S, SIDE, SIDE)
    in the upper left corner, and sizes "shown_sizes" (S, 2) of these."""
    places = np.unique(np.arange(SHOWN) * len(masks) // SHOWN)
    shown = np.zeros((len(places), SIDE, SIDE), np.uint8)
    for canvas, place in zip(shown, places, strict=True):
        canvas[: masks[place].shape[0], : masks[place].shape[1]] = masks[place]
    sizes = np.array([masks[place].shape for place in places])
    return {"shown_of": places, "shown_masks": shown, "shown_sizes": sizes}
