"""Masks propagated through a video by the similarity of patches, as DINO does, and DAVIS's scores J and F.

N objects, T frames, H x W pixels, h x w patches, D width.
"""

from collections.abc import Sequence
from math import ceil

import numpy as np
import torch
from PIL import Image
from scipy.ndimage import distance_transform_edt
from torch import Tensor
from torch.nn import functional as F

MEAN, STD = (0.485, 0.456, 0.406), (0.228, 0.224, 0.225)  # eval_video_segmentation.py; 0.228 is a slip for 0.229
LONG_SIDE = 64  # the long side is cut to a multiple of it
SCALE = 1 << 11  # OpenCV's weights of pixels are multiples of 1 / SCALE


def frame_size(height: int, width: int, short: int, patch: int = 1) -> tuple[int, int]:
    """Height and width of what the network sees: whole patches, and a long side that is a multiple of 64."""
    long = int(short * max(height, width) / min(height, width)) // LONG_SIDE * LONG_SIDE
    sides = (long, short) if height > width else (short, long)
    return sides[0] // patch * patch, sides[1] // patch * patch


def resized_frame(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Pixels (H, W, 3) uint8 -> (H', W', 3) uint8 of `size`: OpenCV's bilinear resizing, in integers."""
    (rows, next_rows, down), (columns, next_columns, across) = map(_weights, pixels.shape[:2], size)
    values = pixels.astype(np.int64)
    lines = values[:, columns] * (SCALE - across)[:, None] + values[:, next_columns] * across[:, None]
    down = down[:, None, None]
    upper, lower = (SCALE - down) * (lines[rows] >> 4) >> 16, down * (lines[next_rows] >> 4) >> 16
    return np.clip((upper + lower + 2) >> 2, 0, 255).astype(np.uint8)


def _weights(side: int, new: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each new place the two old ones, and the weight of the second of them, of SCALE."""
    places = ((np.arange(new) + 0.5) * (side / new) - 0.5).astype(np.float32)
    first = np.floor(places)
    share = np.rint((places - first) * SCALE).astype(np.int64)
    first = first.astype(np.int64)
    return first.clip(0, side - 1), (first + 1).clip(0, side - 1), share


def normalised_frame(pixels: np.ndarray) -> Tensor:
    """Pixels (H, W, 3) uint8 -> (3, H, W) float32."""
    values = (pixels.astype(np.float32) / 255 - np.array(MEAN, np.float32)) / np.array(STD, np.float32)
    return torch.from_numpy(values.transpose(2, 0, 1).copy())


def first_masks(annotation: np.ndarray, grid: tuple[int, int]) -> Tensor:
    """Object numbers (H, W) of the first frame -> (N+1, h, w), 1 where a patch shows the object; 0 is the ground.
    Objects that appear later do not exist."""
    small = Image.fromarray(annotation).resize(grid[::-1], Image.Resampling.NEAREST)
    labels = torch.from_numpy(np.array(small)).long()
    return F.one_hot(labels, int(annotation.max()) + 1).permute(2, 0, 1)


def near(grid: tuple[int, int], radius: int, device: torch.device | str = "cpu") -> Tensor:
    """(hw, hw): whether two patches are at most `radius` rows and columns apart. A radius of 0: all of them."""
    rows, columns = (torch.arange(side, device=device) for side in grid)
    reach = radius or max(grid)
    down, across = ((place[:, None] - place).abs() <= reach for place in (rows, columns))
    return (down[:, None, :, None] & across[None, :, None, :]).flatten(2).flatten(0, 1)


def propagated(
    context: Sequence[Tensor], masks: Sequence[Tensor], target: Tensor, near: Tensor, k: int, temperature: float
) -> Tensor:
    """Soft masks (N+1, h, w) of a frame from those of the frames before.

    context: features (hw, D) of earlier frames. masks: theirs (N+1, h, w). target: features (hw, D) of the frame.
    near: (hw, hw), which patches may be alike. k: patches of all earlier frames whose masks count; more at a tie.
    """
    target = F.normalize(target, dim=1)
    alike = [torch.exp(target @ F.normalize(features, dim=1).T / temperature) * near for features in context]
    weights = torch.cat(alike, dim=1)  # (hw, frames x hw)
    least = weights.topk(k, dim=1).values[:, -1:]
    weights = torch.where(weights < least, 0, weights)
    weights = weights / weights.sum(1, keepdim=True)
    sources = torch.cat([mask.flatten(1).to(weights) for mask in masks], dim=1)
    return (sources @ weights.T).unflatten(1, masks[0].shape[1:])


def labels_of(soft: Tensor, patch: int, size: tuple[int, int]) -> np.ndarray:
    """Soft masks (N+1, h, w) -> object numbers (H, W) uint8 of `size`. Each mask is stretched to 0 to 1 before."""
    large = F.interpolate(soft[None], scale_factor=patch, mode="bilinear", align_corners=False)[0]
    lifted = large - large.amin((1, 2), keepdim=True)
    highest = lifted.amax((1, 2), keepdim=True)
    labels = torch.where(highest > 0, lifted / highest, large).argmax(0).to(torch.uint8).cpu().numpy()
    return np.asarray(Image.fromarray(labels).resize(size[::-1], Image.Resampling.NEAREST))


def region_similarity(predicted: np.ndarray, truth: np.ndarray) -> float:
    """DAVIS's J of masks (H, W) bool: intersection over union, 1 where both are empty."""
    union = np.count_nonzero(predicted | truth)
    return np.count_nonzero(predicted & truth) / union if union else 1.0


def boundary(mask: np.ndarray) -> np.ndarray:
    """Mask (H, W) bool -> its pixels that differ from the one to the right, below, or below and to the right."""
    padded = np.pad(mask, ((0, 1), (0, 1)), mode="edge")
    right, below, corner = padded[:-1, 1:], padded[1:, :-1], padded[1:, 1:]
    return (mask != right) | (mask != below) | (mask != corner)


def contour_accuracy(predicted: np.ndarray, truth: np.ndarray, tolerance: float = 0.008) -> float:
    """DAVIS's F of masks (H, W) bool: F1 of boundaries that are at most `tolerance` of the diagonal apart."""
    reach = ceil(tolerance * np.linalg.norm(truth.shape))
    edges = boundary(predicted), boundary(truth)
    if not (edges[0].any() and edges[1].any()):
        return float(edges[0].any() == edges[1].any())
    near_truth, near_predicted = (distance_transform_edt(~edge) <= reach for edge in edges[::-1])
    precision, recall = near_truth[edges[0]].mean(), near_predicted[edges[1]].mean()
    return float(2 * precision * recall / (precision + recall)) if precision + recall else 0.0


def frame_scores(predicted: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Object numbers (T, H, W) -> J and F (2, N, T-2) of the first frame's N objects; the first and the last
    frame are left out."""
    objects = range(1, int(truth[0].max()) + 1)
    pairs = [
        [(found == number, true == number) for found, true in zip(predicted, truth, strict=True)][1:-1]
        for number in objects
    ]
    return np.array(
        [[[score(*pair) for pair in own] for own in pairs] for score in (region_similarity, contour_accuracy)]
    )


def statistics(values: np.ndarray) -> np.ndarray:
    """Scores (..., T) of frames -> (..., 3): mean, share above 0.5, and mean of the first quarter minus the last."""
    edges = np.round(np.linspace(1, values.shape[-1], 5) + 1e-10).astype(int) - 1
    first, last = (values[..., edges[part] : edges[part + 1] + 1].mean(-1) for part in (0, 3))
    return np.stack([values.mean(-1), (values > 0.5).mean(-1), first - last], axis=-1)
