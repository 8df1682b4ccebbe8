"""The box of one object found in an image by the similarity of its patches: LOST and TokenCut. Nothing is trained.

L = h x w patches in raster order, D width; boxes are x1, y1, x2, y2 in pixels.
"""

from collections.abc import Sequence

import numpy as np
import torch
from scipy.linalg import eigh
from scipy.ndimage import label
from torch import Tensor


def lost_seed(keys: Tensor, k: int) -> tuple[int, Tensor, Tensor]:
    """Keys (L, D) -> the patch that is like the fewest others, those of the k fewest that are like it, and whether each
    patch is foreground (L,).

    Of equals the first is the seed; the source's sort leaves it open.
    """
    alike = keys @ keys.T
    degree = (alike > 0).fill_diagonal_(False).sum(1)
    order = degree.argsort(stable=True)
    candidates = order[:k]
    similar = candidates[alike[order[0], candidates] > 0]
    return int(order[0]), similar, alike[similar].sum(0) > 0


def tokencut_seed(keys: Tensor, tau: float, eps: float) -> tuple[int, np.ndarray, np.ndarray]:
    """Keys (L, D) -> the patch with the largest entry of the second eigenvector, whether each patch is on its side of
    the mean (L,), and that eigenvector (L,), of (D - W) x = l D x."""
    unit = torch.nn.functional.normalize(keys, dim=1)
    weights = torch.where(unit @ unit.T > tau, 1.0, eps).double().cpu().numpy()
    degrees = np.diag(weights.sum(1))
    vector = eigh(degrees - weights, degrees, subset_by_index=[1, 1])[1][:, 0]
    seed, foreground = int(np.abs(vector).argmax()), vector > vector.mean()
    return seed, foreground if foreground[seed] else ~foreground, vector


def component(foreground: np.ndarray, seed: int) -> np.ndarray:
    """Foreground (h, w) bool -> the part (h, w) bool of it that holds patch `seed`; diagonal neighbours are apart."""
    parts, _ = label(foreground)
    return parts == parts.flat[seed]


def box_of(part: np.ndarray, patch: int, size: tuple[int, int]) -> np.ndarray:
    """Patches (h, w) bool of an image of `size` (height, width), which may end within the last -> their box (4,)."""
    rows, columns = np.flatnonzero(part.any(1)), np.flatnonzero(part.any(0))
    x2, y2 = patch * (columns[-1] + 1), patch * (rows[-1] + 1)
    return np.array([patch * columns[0], patch * rows[0], min(x2, size[1]), min(y2, size[0])], np.float64)


def overlaps(box: np.ndarray, boxes: np.ndarray | Sequence[Sequence[float]]) -> np.ndarray:
    """Intersection over union (B,) of a box (4,) with each of `boxes` (B, 4)."""
    boxes, tiny = np.asarray(boxes, np.float64).reshape(-1, 4), 1e-7  # datasets.py:282
    sides = np.minimum(box[2:], boxes[:, 2:]) - np.maximum(box[:2], boxes[:, :2])
    shared = sides.clip(min=0).prod(1)
    areas = [(each[:, 2] - each[:, 0]) * (each[:, 3] - each[:, 1] + tiny) for each in (box[None], boxes)]
    return shared / (areas[0] + areas[1] - shared + tiny)
