"""Segmentation by neighbours among labelled patches: memories, votes and scores of Hummingbird and CAPI.

Facts of vpariza/open-hummingbird-eval 5e79da2 and facebookresearch/capi 98b4fa1 (eval_segmentation.py).

N images, M patches of a memory, Q patches that are asked about, D width, K classes, P pixels of a patch.
"""

from collections.abc import Sequence

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment, minimize
from torch import Tensor
from torch.nn import functional as F

from engine.rows import row_slices

TOGETHER = 1 << 22  # labels of neighbours that are counted at once


def patch_pixels(labels: np.ndarray, patch: int) -> np.ndarray:
    """Labels (H, W) -> those of each patch, row by row: (L, P)."""
    height, width = (side // patch for side in labels.shape)
    return labels.reshape(height, patch, width, patch).swapaxes(1, 2).reshape(height * width, patch * patch)


def image_of_patches(pixels: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """The reverse: (L, P) -> (H, W)."""
    side = round(pixels.shape[1] ** 0.5)
    return pixels.reshape(*grid, side, side).swapaxes(1, 2).reshape(grid[0] * side, grid[1] * side)


def class_shares(pixels: np.ndarray, classes: int) -> np.ndarray:
    """Labels (M, P), all below K -> share of each class among a patch's pixels (M, K) float32."""
    places = pixels.astype(np.int64) + classes * np.arange(len(pixels))[:, None]
    counts = np.bincount(places.ravel(), minlength=classes * len(pixels)).reshape(len(pixels), classes)
    return (counts / pixels.shape[1]).astype(np.float32)


def rare_patches(pixels: np.ndarray, uniform: np.ndarray, classes: int, count: int) -> np.ndarray:
    """Which `count` patches of an image go into a memory: those with the lowest scores, in that order.

    pixels: labels (L, P). uniform: (L,) random numbers from 0 to 1. A patch's score is that times the sum, over its
    classes, of how many patches of the image have the class (hbird_eval.py:452-520).
    """
    present = class_shares(pixels, classes) > 0
    return np.argsort(present @ present.sum(0) * uniform, kind="stable")[:count]


def attended_labels(similarities: np.ndarray, neighbour_pixels: np.ndarray, classes: int, beta: float) -> np.ndarray:
    """Shares of classes (Q, K) float32: the neighbours' own, weighted by softmax(cosine / beta).

    similarities (Q, k): cosines. neighbour_pixels (Q, k, P): labels of their pixels.
    """
    weights = torch.from_numpy(similarities / np.float32(beta)).softmax(dim=1).numpy()
    label_shares = np.empty((len(weights), classes), np.float32)
    step = max(1, TOGETHER // (weights.shape[1] * max(classes, neighbour_pixels.shape[2])))
    for part in row_slices(len(weights), step):
        shares = class_shares(neighbour_pixels[part].reshape(-1, neighbour_pixels.shape[2]), classes)
        label_shares[part] = np.einsum("qk,qkc->qc", weights[part], shares.reshape(*weights[part].shape, classes))
    return label_shares


def enlarged_labels(shares: Tensor, size: tuple[int, int]) -> np.ndarray:
    """Shares of classes on the grid (h, w, K) -> the largest one's class at each pixel (H, W)."""
    maps = F.interpolate(shares.permute(2, 0, 1)[None], size=size, mode="bilinear", align_corners=False)
    return maps[0].argmax(0).numpy()


def most_frequent(labels: np.ndarray, axis: int) -> np.ndarray:
    """The most frequent value along an axis, the smallest of ties."""
    return torch.from_numpy(np.moveaxis(labels, axis, -1).copy()).mode(dim=-1).values.numpy()


def voted_pixels(neighbour_pixels: np.ndarray) -> np.ndarray:
    """Labels (Q, k, P) of neighbours -> those of the patches (Q, P), each pixel by a vote of the k at its own place."""
    labels = np.empty((len(neighbour_pixels), neighbour_pixels.shape[2]), neighbour_pixels.dtype)
    for part in row_slices(len(labels), max(1, TOGETHER // max(1, neighbour_pixels[:1].size))):
        labels[part] = most_frequent(neighbour_pixels[part], axis=1)
    return labels


def confusion(predicted: np.ndarray, labels: np.ndarray, classes: int, ignored: Sequence[int]) -> np.ndarray:
    """(K, K) pixels: rows are labels, columns predictions; none of the `ignored` labels."""
    known = ~np.isin(labels, ignored)
    places = classes * labels[known].astype(np.int64) + predicted[known]
    return np.bincount(places, minlength=classes * classes).reshape(classes, classes)


def matched_classes(counts: np.ndarray) -> np.ndarray:
    """(K,) the class that each predicted class is taken for, so that the sum of IoUs is largest (eval_metrics.py:143).

    counts: (K, K) confusion.
    """
    union = counts.sum(0)[None] + counts.sum(1)[:, None] - counts
    iou = np.divide(counts, union, out=np.zeros(counts.shape), where=union > 0)
    rows, columns = linear_sum_assignment(iou, maximize=True)
    return rows[np.argsort(columns)]


def logistic_weights(
    features: Tensor, labels: Tensor, classes: int, strength: float, iterations: int = 1000
) -> tuple[np.ndarray, np.ndarray]:
    """Weights (K, D) and biases (K,) of least  C sum CE + |W|^2 / 2,  biases free, by L-BFGS in float64.

    features: (M, D). labels: (M,), below K. strength: C. Rows are read in parts, so that logits stay small.
    """
    width, rows = features.shape[1], TOGETHER // classes
    onto = features.device

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weights = torch.from_numpy(flat).to(onto).view(classes, width + 1)
        loss, gradient = 0.0, torch.zeros_like(weights)
        for start in range(0, len(features), rows):
            part, truth = features[start : start + rows].double(), labels[start : start + rows]
            logits = part @ weights[:, :-1].T + weights[:, -1]
            logs = logits.log_softmax(dim=1)
            loss -= float(logs.gather(1, truth[:, None]).sum())
            error = logs.exp()
            error[torch.arange(len(truth), device=onto), truth] -= 1
            gradient[:, :-1] += error.T @ part
            gradient[:, -1] += error.sum(0)
        # Divided by C M, so that the solver's tolerances mean the same at every C.
        scale = 1.0 / (strength * len(features))
        loss = loss / len(features) + scale * float(weights[:, :-1].square().sum()) / 2
        gradient = gradient / len(features)
        gradient[:, :-1] += scale * weights[:, :-1]
        return loss, gradient.flatten().cpu().numpy()

    options = {"maxiter": iterations, "maxfun": 4 * iterations, "ftol": 1e-15, "gtol": 1e-10, "maxcor": 20}
    solution = minimize(objective, np.zeros(classes * (width + 1)), jac=True, method="L-BFGS-B", options=options)
    weights = solution.x.reshape(classes, width + 1)
    return weights[:, :-1], weights[:, -1]
