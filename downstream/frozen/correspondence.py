"""Keypoints of one image found in another by the similarity of patches, as Probe3D does on SPair-71k.

K keypoints, D width, h x w patches.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

WHITE = 255


def squared(image: Image.Image, side: int) -> Image.Image:
    """An image, white to its right or below it up to a square, resized to `side`: bicubic."""
    canvas = Image.new("RGB", (max(image.size),) * 2, (WHITE,) * 3)
    canvas.paste(image, (0, 0))
    return canvas.resize((side, side), Image.Resampling.BICUBIC)


def scaled_keypoints(points: Sequence[Sequence[float] | None], longest: int, side: int) -> Tensor:
    """Keypoints (x, y) of an image, None where not visible -> (K, 3) int64: whole pixels x and y of the square of
    `side`, cut and not rounded, and whether it is visible."""
    known = torch.tensor([[*point, 1] if point else [0, 0, 0] for point in points], dtype=torch.float32).reshape(-1, 3)
    known[:, :2] *= side / longest
    return known.long()


def best_places(source: Tensor, target: Tensor, points: Tensor, side: int) -> Tensor:
    """The most similar patch of `target` for each keypoint of `source`: column and row (K, 2) int64.

    source, target: features (D, h, w). points: (K, 2) pixels x and y of the square of `side`.
    """
    source, target = F.normalize(source, dim=0), F.normalize(target, dim=0)
    places = 2 * points.to(source) / side - 1
    described = F.grid_sample(source[None], places[None, None], mode="bilinear", align_corners=True)[0, :, 0].T
    best = (described @ target.flatten(1)).argmax(1)
    return torch.stack([best % target.shape[2], best // target.shape[2]], dim=1)


def errors_of(source: Tensor, target: Tensor, best: Tensor, shape: tuple[int, int], side: int, scale: float) -> Tensor:
    """Distances (K, K) between where each keypoint of the source is found and each keypoint of the target, in units of
    the length `scale`, a share of the square's side; inf where one of the two is not visible.

    source, target: keypoints (K, 3). best: (K, 2) of `best_places`; its place is the patch's upper left corner.
    """
    found = best / torch.tensor(shape[::-1])
    distances = (found[:, None] - target[None, :, :2] / side).norm(dim=2) / scale
    visible = (source[:, None, 2] > 0) & (target[None, :, 2] > 0)
    return distances.masked_fill(~visible, float("inf"))


def threshold_scale(box: Sequence[float], size: Sequence[int]) -> float:
    """The longer side of the object's box (x1, y1, x2, y2) in units of the image's longer side."""
    return max(box[2] - box[0], box[3] - box[1]) / max(size)


def pck(errors: Sequence[np.ndarray], threshold: float) -> Mapping[str, float]:
    """Percent of correct keypoints of pairs: errors of each pair's (K,). By point all keypoints weigh equally, by image
    all pairs. A keypoint is correct below the threshold."""
    shares = [np.mean(own < threshold) for own in errors if len(own)]
    return {"image": 100 * float(np.mean(shares)), "point": 100 * float(np.mean(np.concatenate(errors) < threshold))}
