"""Measures of features without labels: effective ranks, decay of the spectrum, uniformity, dead dimensions, norms.

Several code bases use the names RankMe and LiDAR for different numbers. Here, the name of a function states what it
computes, and results record formula and epsilon. All sums are in float64.

N: images. D: width. n groups of q views each: random crops of the same image form a group.
"""

from typing import Any

import numpy as np
from scipy.linalg import eigh
from scipy.spatial.distance import pdist

RANKME_EPS = 1e-7  # Garrido et al. 2023 (arXiv 2210.02885), section 3.2
FIT_RANKS = (11, 100)  # first and last eigenvalue that alpha-ReQ fits, from 1 (BARL-SSL/reptrix alpha.py)
DEAD = 1e-4  # a dimension is dead if its standard deviation is at most this share of the mean over dimensions (ours)
OUTLYING = 5.0  # norms above so many times the median are outliers (ours)


def entropy_rank(spectrum: np.ndarray, eps: float) -> float:
    """exp of the entropy of a spectrum (R,), normalised to sum 1; eps is added after the normalisation."""
    shares = spectrum / spectrum.sum() + eps
    return float(np.exp(-(shares * np.log(shares)).sum()))


def rankme(features: np.ndarray, eps: float = RANKME_EPS) -> float:
    """RankMe as in the paper: the entropy rank of the singular values of uncentred features (N, D).

    At most min(N, D), and grows with N. stable-pretraining's RankMe is the same with eps 1e-5.
    """
    return entropy_rank(np.linalg.svd(np.asarray(features, np.float64), compute_uv=False), eps)


def variance_ratios(features: np.ndarray) -> np.ndarray:
    """Shares of the variance of features (N, D) along their principal components, in descending order: (min(N, D),)."""
    features = np.asarray(features, np.float64)
    variances = np.linalg.svd(features - features.mean(axis=0), compute_uv=False) ** 2
    return variances / max(variances.sum(), np.finfo(np.float64).tiny)


def rankme_of_variances(features: np.ndarray, eps: float = RANKME_EPS) -> float:
    """What reptrix calls RankMe: the entropy rank of the variance ratios of features (N, D)."""
    return entropy_rank(variance_ratios(features), eps)


def alpha_req(features: np.ndarray, ranks: tuple[int, int] = FIT_RANKS, weighted: bool = True) -> float:
    """Exponent alpha of a spectrum that decays as rank^-alpha (alpha-ReQ, Agrawal et al. 2022).

    Fitted by least squares to the logarithms of eigenvalue and rank, weighted by 1 / rank, as in BARL-SSL/reptrix
    alpha.py and utils.py.

    features: (N, D). ranks: first and last eigenvalue of the fit, from 1. Raises ValueError if there are fewer
    eigenvalues, or zeros among them.
    """
    first, last = ranks
    ratios = variance_ratios(features)[first - 1 : last]
    if len(ratios) <= last - first or not (ratios > 0).all():
        raise ValueError(
            f"alpha-ReQ fits eigenvalues {first} to {last}, but features of shape {np.shape(features)} have "
            f"{int((ratios > 0).sum()) + first - 1} above 0"
        )
    rank = np.arange(first, last + 1)
    weights = rank**-0.5 if weighted else None  # polyfit weights residuals, not their squares
    return -float(np.polyfit(np.log(rank), np.log(ratios), 1, w=weights)[0])


def lidar(views: np.ndarray, delta: float = 1e-4, eps: float = 1e-8) -> tuple[float, np.ndarray]:
    """LiDAR (Thilak et al. 2023) of features of views (n, q, D), and its eigenvalues (D,) in descending order.

    The entropy rank of Sw^-1/2 Sb Sw^-1/2, where Sb and Sw are the scatter between and within groups, by the
    generalised eigenproblem of both (stable-pretraining callbacks/lidar.py). At most min(D, n - 1). delta: added to the
    diagonal of Sw. eps: added to the eigenvalues.
    """
    views = np.asarray(views, np.float64)
    groups, size, width = views.shape
    means = views.mean(axis=1)
    between = np.cov(means, rowvar=False).reshape(width, width)
    deviations = (views - means[:, None]).reshape(-1, width)
    within = deviations.T @ deviations / (groups * (size - 1)) + delta * np.eye(width)
    eigenvalues = np.clip(eigh(between, within, eigvals_only=True)[::-1], 0, None) + eps
    return entropy_rank(eigenvalues, 0.0), eigenvalues


def uniformity(features: np.ndarray, t: float = 2.0) -> float:
    """log of the mean of exp(-t d^2) over all pairs of normalised features (N, D), which have distance d.

    Lower values mean that the features are more evenly distributed on the sphere (Wang and Isola 2020).
    """
    return float(np.log(np.exp(-t * pdist(normalised(features), "sqeuclidean")).mean()))


def alignment(views: np.ndarray) -> float:
    """Mean squared distance of two views of one image, of normalised features (n, q, D); 0 is the best (Wang and Isola
    2020)."""
    vectors = normalised(views)
    size = vectors.shape[1]
    products = np.square(vectors.sum(axis=1)).sum(axis=-1)  # (n,) of all ordered pairs of views, also of equal ones
    return float(np.mean(2 - 2 * (products - size) / (size * (size - 1))))


def normalised(vectors: np.ndarray) -> np.ndarray:
    """Vectors (..., D) scaled to unit length, in float64."""
    vectors = np.asarray(vectors, np.float64)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def dead_dimensions(features: np.ndarray) -> float:
    """Percentage of the dimensions of features (N, D) that hardly vary; 100 for constant features."""
    deviations = np.asarray(features, np.float64).std(axis=0)
    return 100.0 * float((deviations <= DEAD * deviations.mean()).mean())


def norm_outliers(norms: np.ndarray, cutoff: float | None = None) -> dict[str, Any]:
    """Outliers among the norms of tokens, an array of any shape.

    share_5_median: share of norms above OUTLYING times the median, from 0 to 1. ratio: the largest norm divided by the
    median. share: share above `cutoff`, if given, which depends on the model (150 for DINOv2-g: Darcet et al. 2023).
    """
    median = float(np.quantile(norms, 0.5, method="lower"))  # the smaller of two middle norms, as in torch.median
    shares = {"share": float((norms > cutoff).mean())} if cutoff is not None else {}
    return shares | {"share_5_median": float((norms > OUTLYING * median).mean()), "ratio": float(norms.max()) / median}
