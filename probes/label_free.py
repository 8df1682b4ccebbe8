"""Health of features without labels: effective ranks, decay of the spectrum, spread on the sphere, outlying norms.

Several codes call different numbers RankMe and LiDAR; a function names what is computed, and a result records formula
and epsilon. All sums are in float64. N images, D width, n groups of q views each.
"""

from typing import Any

import numpy as np
from scipy.linalg import eigh
from scipy.spatial.distance import pdist

RANKME_EPS = 1e-7  # Garrido et al. 2023 (arXiv 2210.02885), section 3.2
FIT_RANKS = (11, 100)  # eigenvalues that alpha-ReQ fits, counted from 1 (BARL-SSL/reptrix alpha.py)
DEAD = 1e-4  # standard deviation below which a dimension is dead, as a share of the mean over dimensions (ours)
OUTLYING = 5.0  # norms above so many times the median are outliers, whatever the model (ours)


def entropy_rank(spectrum: np.ndarray, eps: float) -> float:
    """exp of the entropy of the shares of a spectrum (R,), with eps added to each share after the division."""
    shares = spectrum / spectrum.sum() + eps
    return float(np.exp(-(shares * np.log(shares)).sum()))


def rankme(features: np.ndarray, eps: float = RANKME_EPS) -> float:
    """RankMe of the paper: of the singular values of uncentred features (N, D). At most min(N, D), and grows with N.

    stable-pretraining's RankMe is the same with eps 1e-5.
    """
    return entropy_rank(np.linalg.svd(np.asarray(features, np.float64), compute_uv=False), eps)


def variance_ratios(features: np.ndarray) -> np.ndarray:
    """Shares of the variance of (N, D) along its principal components, falling."""
    centred = np.asarray(features, np.float64)
    variances = np.linalg.svd(centred - centred.mean(axis=0), compute_uv=False) ** 2
    return variances / max(variances.sum(), np.finfo(np.float64).tiny)


def rankme_of_variances(features: np.ndarray, eps: float = RANKME_EPS) -> float:
    """What reptrix calls RankMe: of the variance ratios of centred features."""
    return entropy_rank(variance_ratios(features), eps)


def alpha_req(features: np.ndarray, ranks: tuple[int, int] = FIT_RANKS, weighted: bool = True) -> float:
    """alpha of a spectrum that falls as rank^-alpha: least squares of the logarithms, weighted by 1 / rank, over the
    eigenvalues of these ranks (alpha-ReQ, Agrawal et al. 2022; BARL-SSL/reptrix alpha.py, utils.py).

    ranks: first and last, counted from 1. ValueError where there are fewer eigenvalues, or zeros among them.
    """
    first, last = ranks
    ratios = variance_ratios(features)[first - 1 : last]
    if len(ratios) <= last - first or not (ratios > 0).all():
        raise ValueError(
            f"alpha-ReQ fits eigenvalues {first} to {last}, and {np.shape(features)} features have "
            f"{int((ratios > 0).sum()) + first - 1} above 0"
        )
    rank = np.arange(first, last + 1)
    weights = rank**-0.5 if weighted else None  # numpy weights residuals, not their squares
    return -float(np.polyfit(np.log(rank), np.log(ratios), 1, w=weights)[0])


def lidar(views: np.ndarray, delta: float = 1e-4, eps: float = 1e-8) -> tuple[float, np.ndarray]:
    """LiDAR (Thilak et al. 2023) of groups of views (n, q, D), and its eigenvalues (D,), falling.

    The effective rank of Sw^-1/2 Sb Sw^-1/2, by the generalised eigenproblem of both (stable-pretraining
    callbacks/lidar.py). delta: added to the diagonal of Sw. At most min(D, n - 1).
    """
    views = np.asarray(views, np.float64)
    groups, size, width = views.shape
    means = views.mean(axis=1)
    between = np.cov(means, rowvar=False).reshape(width, width)
    spread = (views - means[:, None]).reshape(-1, width)
    within = spread.T @ spread / (groups * (size - 1)) + delta * np.eye(width)
    eigenvalues = np.clip(eigh(between, within, eigvals_only=True)[::-1], 0, None) + eps
    return entropy_rank(eigenvalues, 0.0), eigenvalues


def uniformity(features: np.ndarray, t: float = 2.0) -> float:
    """log of the mean of exp(-t d^2) over pairs of unit vectors (N, D); the lower the more evenly they lie (Wang and
    Isola 2020)."""
    return float(np.log(np.exp(-t * pdist(unit(features), "sqeuclidean")).mean()))


def alignment(views: np.ndarray) -> float:
    """Mean squared distance of two views of one image, unit vectors of (n, q, D): 0 is the best (Wang and Isola)."""
    vectors = unit(views)
    size = vectors.shape[1]
    together = np.square(vectors.sum(axis=1)).sum(axis=-1)  # sum of all products of two views, with themselves
    return float(np.mean(2 - 2 * (together - size) / (size * (size - 1))))


def unit(vectors: np.ndarray) -> np.ndarray:
    """(..., D) of length one in float64."""
    vectors = np.asarray(vectors, np.float64)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def dead_dimensions(features: np.ndarray) -> float:
    """Percentage of the dimensions of (N, D) that hardly vary; all where none does."""
    deviations = np.asarray(features, np.float64).std(axis=0)
    return 100.0 * float((deviations <= DEAD * deviations.mean()).mean())


def norm_outliers(norms: np.ndarray, cutoff: float | None = None) -> dict[str, Any]:
    """Of norms of tokens, of any shape: percentage above OUTLYING medians, and the largest by the median; and above a
    cutoff, which belongs to a model (150 for DINOv2-g: Darcet et al. 2023)."""
    median = float(np.quantile(norms, 0.5, method="lower"))  # as torch.median: of two middle norms the smaller
    shares = {"share": float((norms > cutoff).mean())} if cutoff is not None else {}
    return shares | {"share_5_median": float((norms > OUTLYING * median).mean()), "ratio": float(norms.max()) / median}
