"""Principal components of patch tokens as colours.

Oquab et al. 2023 (DINOv2, figure 1): the patches of all images together; the first component tells the foreground, the
next analysis is of that alone. N patches, D width, K components.
"""

import numpy as np

# OKLab to linear sRGB (B. Ottosson, bottosson.github.io/posts/oklab): to cone responses, cubed, then to colours.
TO_CONES = np.array(
    [[1, 0.3963377774, 0.2158037573], [1, -0.1055613458, -0.0638541728], [1, -0.0894841775, -1.2914855480]]
)
TO_RGB = np.array(
    [
        [4.0767416621, -3.3077115913, 0.2309699292],
        [-1.2684380046, 2.6097574011, -0.3413193965],
        [-0.0041960863, -0.7034186147, 1.7076147010],
    ]
)
LIGHT = (0.25, 0.92)  # lightness of the least and the largest value
CHROMA = 0.11  # of the largest value of the other components; more leaves sRGB
TAILS = (1, 99)  # percentiles between which a component is spread


def principal_components(tokens: np.ndarray, count: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (N, D) -> their first components (N, K), and the shares (K,) of the variance that these hold.

    A direction and its opposite are the same component: the one is taken whose largest entry is positive.
    """
    centred = tokens.astype(np.float64) - tokens.mean(axis=0, dtype=np.float64)
    values, vectors = np.linalg.eigh(centred.T @ centred)
    kept = vectors[:, ::-1][:, :count]
    kept = kept * np.sign(kept[np.abs(kept).argmax(axis=0), np.arange(kept.shape[1])])
    return centred @ kept, values[::-1][:count] / max(values.sum(), np.finfo(np.float64).tiny)


def is_foreground(component: np.ndarray, on_border: np.ndarray) -> np.ndarray:
    """First component (N,), which patches lie at an image's border (N,) bool -> which are foreground (N,) bool.

    The component is cut where that divides it best into two (Otsu 1979); the foreground is the side of which a smaller
    share lies at a border.
    """
    upper = component > _threshold(component)
    if upper.all() or not upper.any():
        return np.ones(len(component), bool)
    return upper if on_border[upper].mean() <= on_border[~upper].mean() else ~upper


def _threshold(values: np.ndarray) -> float:
    # Otsu's: the greatest variance between the two sides.
    ordered = np.sort(values)
    below = np.arange(1, len(ordered))
    sums = ordered.cumsum()
    means = sums[:-1] / below, (sums[-1] - sums[:-1]) / (len(ordered) - below)
    between = below * (len(ordered) - below) * np.square(means[0] - means[1])
    return float(ordered[between.argmax()]) if len(ordered) > 1 else 0.0


def spread_evenly(components: np.ndarray) -> np.ndarray:
    """(N, K) -> values from 0 to 1, between the percentiles TAILS of each."""
    low, high = np.percentile(components, TAILS, axis=0)
    return np.clip((components - low) / np.maximum(high - low, 1e-12), 0, 1)


def in_rgb(values: np.ndarray) -> np.ndarray:
    """Values (..., 3) from 0 to 1 as red, green and blue -> uint8."""
    return np.rint(255 * values).astype(np.uint8)


def in_lab(values: np.ndarray) -> np.ndarray:
    """Values (..., 3) from 0 to 1 as lightness, blue to yellow and green to red of OKLab -> sRGB uint8.

    A grey print shows the first, and nearly all colour-blind readers see the second.
    """
    lightness = LIGHT[0] + (LIGHT[1] - LIGHT[0]) * values[..., 0]
    yellow, red = (CHROMA * (2 * values[..., part] - 1) for part in (1, 2))
    cones = np.stack([lightness, red, yellow], axis=-1) @ TO_CONES.T
    linear = np.clip(cones**3 @ TO_RGB.T, 0, 1)
    curved = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)  # IEC 61966-2-1
    return in_rgb(curved)
