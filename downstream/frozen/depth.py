"""Linear depth from frozen patches: heads, bins, losses, training images and the metrics of an image.

Settings and quirks are DINOv3's (facebookresearch/dinov3 6876159, eval/depth) and, of the heads on one and four layers,
DINOv2's (facebookresearch/dinov2 b8931f7, eval/depth and hub/depthers.py), written anew.

B images, H x W pixels, D width, n bins, h x w patches. Depths are metres, 0 where nothing was measured.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms import functional as vision

from downstream.frozen.segmentation import Random

Bins = Literal["linear", "log", "chmv2_mixlog"]
Weights = Literal["linear", "softmax", "sigmoid", "chmv2_mixlog"]
FLOOR = 0.1  # added to each bin's weight by the rule "linear"
EPSILON = 1e-3  # metres, added before a logarithm
STRIDES = (1, 2, 4, 6)  # of the gradient losses
NYU_SIZE = (480, 640)  # height and width that the two crops are given for
NYU_CROP = (45, 472, 43, 608)  # first and last row and column of training images: what is inside the white border
EIGEN_CROP = (45, 471, 41, 601)  # the same of what evaluations count (Eigen et al. 2014)
TURN = 2.5  # degrees, at most, that a training image is rotated by
GAMMA, BRIGHTNESS, TINT = (0.9, 1.1), (0.75, 1.25), (0.9, 1.1)


class DepthHead(nn.Module):
    """Maps (B, D, h, w) of one or several layers -> depths (B, 1, uh, uw) by a 1x1 convolution. Names are the source's.

    upsample: u, bilinear enlargement of the maps before the convolution. norm: a batch norm before it.
    """

    def __init__(
        self, width: int, bins: int, depths: tuple[float, float], norm: bool = True, upsample: int = 1
    ) -> None:
        super().__init__()
        self.depths, self.upsample = depths, upsample
        self.batchnorm_layer = nn.BatchNorm2d(width) if norm else nn.Identity()
        self.conv_depth = nn.Conv2d(width, bins, 1)
        nn.init.normal_(self.conv_depth.weight, std=0.01)
        nn.init.zeros_(self.conv_depth.bias)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        if self.upsample > 1:
            maps = [F.interpolate(one_map, scale_factor=self.upsample, mode="bilinear") for one_map in maps]
        return depths_of(self.conv_depth(self.batchnorm_layer(torch.cat(list(maps), dim=1))), *self.depths)


def depths_of(logits: Tensor, least: float, most: float, bins: Bins = "linear", weights: Weights = "linear") -> Tensor:
    """Logits (B, n, h, w) -> metres (B, 1, h, w): the weighted mean of n depths from `least` to `most`.

    n = 1 is no choice among bins: relu(logit) + least.
    """
    if logits.shape[1] == 1:
        return logits.relu() + least
    share = {
        "linear": lambda: logits.relu() + FLOOR,
        "softmax": lambda: logits.softmax(dim=1),
        "sigmoid": lambda: logits.sigmoid(),
        "chmv2_mixlog": lambda: logits.relu() + 1e-8,
    }[weights]()
    share = share / share.sum(dim=1, keepdim=True)
    centres = bin_centres(logits.shape[1], least, most, bins).to(logits)
    return torch.einsum("bnhw,n->bhw", share, centres)[:, None]


def bin_centres(count: int, least: float, most: float, bins: Bins) -> Tensor:
    """Depths (n,) float64 of the bins."""
    even = torch.linspace(least, most, count, dtype=torch.float64)
    even_in_log = torch.linspace(float(np.log(least)), float(np.log(most)), count, dtype=torch.float64).exp()
    if bins == "chmv2_mixlog":  # from even in the logarithm to even, over an eighth of the range
        near, far = (bin_centres(count, least, most / 8, kind) for kind in ("log", "linear"))
        return 8 * torch.lerp(near, far, torch.linspace(0, 1, count, dtype=torch.float64))
    return even if bins == "linear" else even_in_log


def scale_invariant_loss(predicted: Tensor, truth: Tensor, valid: Tensor, with_variance: bool) -> Tensor:
    """SigLoss of metres (B, 1, H, W). with_variance: the source leaves it out in its first 100 calls."""
    error = (predicted[valid] + EPSILON).log() - (truth[valid] + EPSILON).log()
    squared = 0.15 * error.mean() ** 2 + (error.var() if with_variance else 0.0)
    return squared.abs().sqrt()


def gradient_loss(
    predicted: Tensor, truth: Tensor, valid: Tensor, log: bool, axes: tuple[int, int] = (-2, -1)
) -> Tensor:
    """Differences of errors two places apart, at four strides, over the valid pixels of each.

    log: of logarithms. axes: those that are gone along. DINOv2 goes along the first two of (B, 1, H, W), images of the
    batch, so that its loss is 0 for two images.
    """
    error = (predicted + EPSILON).log() - (truth + EPSILON).log() if log else predicted - truth
    error, total = error * valid, torch.zeros((), dtype=predicted.dtype, device=predicted.device)
    for stride in STRIDES:
        part, counts = error, valid
        for axis in axes:
            part, counts = _strided(part, axis, stride), _strided(counts, axis, stride)
        for axis in axes:
            length = part.shape[axis] - 2
            if length < 1:
                continue
            difference = (part.narrow(axis, 2, length) - part.narrow(axis, 0, length)).abs()
            both = counts.narrow(axis, 2, length) & counts.narrow(axis, 0, length)
            total = total + (difference * both).sum() / counts.sum()
    return total


def _strided(values: Tensor, axis: int, stride: int) -> Tensor:
    return values.index_select(axis, torch.arange(0, values.shape[axis], stride, device=values.device))


def window_of(window: tuple[int, int, int, int], size: tuple[int, int]) -> tuple[slice, slice]:
    """Rows and columns of a crop that is given for NYU_SIZE, in an image of `size`."""
    scales = [new / old for new, old in zip(size, NYU_SIZE, strict=True)]
    top, bottom, left, right = (int(edge * scale) for edge, scale in zip(window, np.repeat(scales, 2), strict=True))
    return slice(top, bottom), slice(left, right)


def drawn_changes(size: tuple[int, int], crop: tuple[int, int], random: Random, rotate: bool) -> dict[str, Any]:
    """What `training_image` does to an image of `size`: angle in degrees, flip, corner of the crop, colours."""
    angle = random.uniform(-TURN, TURN) if rotate and random.rand() < 0.5 else None
    flip = random.rand() < 0.5
    top, left = (random.randint(0, max(side - length, 0) + 1) for side, length in zip(size, crop, strict=True))
    colours = None
    if random.rand() < 0.5:
        colours = (random.uniform(*GAMMA), random.uniform(*BRIGHTNESS), [random.uniform(*TINT) for _ in range(3)])
    return {"angle": angle, "flip": flip, "corner": (top, left), "colours": colours}


def training_image(
    pixels: Tensor,
    depth: Tensor,
    crop: tuple[int, int],
    angle: float | None,
    flip: bool,
    corner: tuple[int, int],
    colours: tuple[float, float, Sequence[float]] | None,
) -> tuple[Tensor, Tensor]:
    """(3, H, W) uint8 and metres (H, W), without border -> (3, *crop) float32 from 0 to 1, and metres (*crop).

    A rotated image is darker at the border than interpolation makes it, as torchvision multiplies by the mask of what
    is inside twice. The gamma acts on values from 0 to 255 (transforms.py:306-360).
    """
    image, depth = pixels.float() / 255, depth[None]
    if angle is not None:
        image = vision.rotate(image, angle, vision.InterpolationMode.BILINEAR, fill=[0.0])
        depth = vision.rotate(depth, angle, vision.InterpolationMode.NEAREST, fill=[0.0])
    if flip:
        image, depth = image.flip(-1), depth.flip(-1)
    place = (..., slice(corner[0], corner[0] + crop[0]), slice(corner[1], corner[1] + crop[1]))
    image, depth = image[place], depth[place]
    if colours is not None:
        gamma, brightness, tint = colours
        image = (image * 255) ** gamma * brightness * torch.tensor(tint, dtype=torch.float64).view(3, 1, 1)
        image = image.clip(0, 255).float() / 255
    edges = (0, crop[1] - depth.shape[-1], 0, crop[0] - depth.shape[-2])
    return F.pad(image, edges), F.pad(depth, edges)[0]


def centre_padded(images: Tensor, patch: int) -> Tensor:
    """Images (B, 3, H, W) with zeros on all sides up to multiples of the patch, the larger half right and below."""
    height, width = -images.shape[-2] % patch, -images.shape[-1] % patch
    return F.pad(images, (width // 2, width - width // 2, height // 2, height - height // 2))


def counted_pixels(truth: Tensor, depths: tuple[float, float], eigen: bool) -> Tensor:
    """Mask (H, W), 1 for pixels of metres (H, W) that an evaluation counts. eigen: inside of Eigen's crop alone."""
    valid = (truth > depths[0]) & (truth < depths[1])
    if eigen:
        inside = torch.zeros_like(valid)
        inside[window_of(EIGEN_CROP, (truth.shape[0], truth.shape[1]))] = True
        valid &= inside
    return valid


def final_depth(
    predicted: Tensor, mirrored: Tensor | None, truth: Tensor, valid: Tensor, depths: tuple[float, float], align: bool
) -> Tensor:
    """Predictions (1, 1, h, w), of the image and of its mirror image, -> metres (H, W) to compare with the truth.

    align: by the scale and shift that fit the valid pixels best.
    """
    if mirrored is not None:
        predicted = (predicted + mirrored.flip(-1)) / 2
    depth = F.interpolate(predicted, size=truth.shape, mode="bilinear", align_corners=False)[0, 0]
    if align:
        columns = torch.stack([depth[valid], torch.ones_like(depth[valid])], dim=1)
        scale, shift = torch.linalg.lstsq(columns, truth[valid][:, None]).solution[:, 0]
        depth = scale * depth + shift
    return depth.clamp(*depths)


def depth_metrics(predicted: Tensor, truth: Tensor) -> Mapping[str, float]:
    """Errors of one image from its valid pixels (P,) in metres; NaN where there are none."""
    if not len(truth):
        return dict.fromkeys(METRICS, float("nan"))
    ratio = torch.maximum(predicted / truth, truth / predicted)
    error, logs = predicted - truth, predicted.log() - truth.log()
    metrics = {
        "rmse": error.square().mean().sqrt(),
        "abs_rel": (error.abs() / truth).mean(),
        "log10": logs.abs().mean() / float(np.log(10)),
        **{f"delta{power}": (ratio < 1.25**power).double().mean() for power in (1, 2, 3)},
        "silog": 100 * (logs.square().mean() - logs.mean().square()).clamp_min(0).sqrt(),
        "rmse_log": logs.square().mean().sqrt(),
        "sq_rel": (error.square() / truth).mean(),
        "mae": error.abs().mean(),
    }
    return {name: metrics[name].item() for name in METRICS}


METRICS = {  # name -> unit, and whether higher is better
    "rmse": ("m", False),
    "abs_rel": ("", False),
    "log10": ("", False),
    "delta1": ("%", True),
    "delta2": ("%", True),
    "delta3": ("%", True),
    "silog": ("", False),
    "rmse_log": ("", False),
    "sq_rel": ("m", False),
    "mae": ("m", False),
}
