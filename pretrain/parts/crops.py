"""Multi-crop (Caron et al. 2020, SwAV): large views of most of an image, and smaller ones of less of it.

B images, G large ("global") crops, N small ("local") ones, S and s their sides in pixels.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor


@dataclass(frozen=True)
class Crops:
    """RGB image -> "global" (G, 3, S, S) and, where there are any, "local" (N, 3, s, s)."""

    large: tuple[Callable[[Image.Image], Tensor], ...]
    small: tuple[Callable[[Image.Image], Tensor], ...] = ()

    def __call__(self, image: Image.Image) -> dict[str, Tensor]:
        groups = {"global": self.large, "local": self.small}
        return {name: torch.stack([make(image) for make in group]) for name, group in groups.items() if group}
