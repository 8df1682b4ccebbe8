"""Linear segmentation of frozen patches: the head, its training images, sliding windows and areas of classes.

Settings and quirks are DINOv3's (facebookresearch/dinov3 6876159, eval/segmentation), written anew.

B images, H x W pixels, C crop, D width, K classes, h x w patches. Images are float, normalised, unless said.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms import functional as vision

from downstream.data.listing import IGNORED

Random = np.random.RandomState  # what augmentations draw from
REDRAWN = 10  # times, at most, that a crop is drawn again
MOST_OF_ONE = 0.75  # of a crop's labelled pixels, above which it is drawn again
BRIGHTNESS = 32.0  # added, at most
FACTORS = (0.5, 1.5)  # of contrast and saturation
HUE = 0.5  # turns of the circle of hues, at most: mmseg's 18 of 180 are a tenth of it


class SegmentationHead(nn.Module):
    """Batch norm and a 1x1 convolution on patches (B, D, h, w) -> logits (B, K, h, w). Names are the source's."""

    def __init__(self, width: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.batchnorm_layer = nn.BatchNorm2d(width)
        self.conv = nn.Conv2d(width, classes, 1)
        nn.init.normal_(self.conv.weight, std=0.01)
        nn.init.zeros_(self.conv.bias)

    def forward(self, patches: Tensor, keep: Tensor | None = None) -> Tensor:
        """keep: (B, D), 1 for channels that dropout leaves in an image; None: all, as they are."""
        if keep is not None:
            patches = patches * (keep.to(patches) / (1 - self.dropout))[..., None, None]
        return self.conv(self.batchnorm_layer(patches))


def segmentation_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of logits (B, K, h, w), enlarged to labels (B, H, W), over all pixels: ignored ones count as 0, so
    that crops with many of them weigh less (loss.py:256)."""
    enlarged = F.interpolate(logits, size=labels.shape[-2:], mode="bilinear", align_corners=False)
    return F.cross_entropy(enlarged, labels.long(), ignore_index=IGNORED, reduction="sum") / labels.numel()


def resized_sides(height: int, width: int, short: int) -> tuple[int, int]:
    """Height and width with the shorter side `short`; the other one is rounded."""
    long = int(short * max(height, width) / min(height, width) + 0.5)
    return (short, long) if height < width else (long, short)


def resized(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """To (height, width), bilinear with antialias."""
    return image.resize(size[::-1], Image.Resampling.BILINEAR)


def nearest(labels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """(H, W) -> (height, width) of the pixels at floor(i * in / out)."""
    rows, columns = (np.arange(new) * old // new for new, old in zip(size, labels.shape, strict=True))
    return labels[rows][:, columns]


def training_crop(
    image: Image.Image,
    labels: np.ndarray,
    crop: int,
    scale: int,
    ratios: tuple[float, float],
    random: Random,
    flip: float = 0.5,
    most_of_one: float = MOST_OF_ONE,
) -> tuple[Tensor, Tensor]:
    """A random crop in random colours: pixels (3, h, w) uint8, h and w up to `crop`, and labels (h, w) uint8.

    scale: shorter side in pixels, times a random factor. labels: (H, W) uint8, IGNORED where there is no class. flip:
    chance of a mirror image. most_of_one: share of the labelled pixels above which a crop is drawn again.
    Nothing is drawn for a colour change that is off (transforms.py:391-448).
    """
    low, high = ratios
    height, width = labels.shape
    size = resized_sides(height, width, int(scale * (random.random_sample() * (high - low) + low)))
    pixels = np.asarray(resized(image, size))
    labels = nearest(labels, size)
    rows, columns = _drawn_window(labels, crop, random)
    for _ in range(REDRAWN):
        if _is_varied(labels[rows, columns], most_of_one):
            break
        rows, columns = _drawn_window(labels, crop, random)
    pixels, labels = pixels[rows, columns], labels[rows, columns]
    if random.rand() < flip:
        pixels, labels = pixels[:, ::-1], labels[:, ::-1]
    coloured = _recoloured(torch.from_numpy(pixels.transpose(2, 0, 1).copy()), random)
    return coloured, torch.from_numpy(labels.copy())


def _drawn_window(labels: np.ndarray, crop: int, random: Random) -> tuple[slice, slice]:
    tops, lefts = (max(side - crop, 0) for side in labels.shape)
    top, left = random.randint(0, tops + 1), random.randint(0, lefts + 1)
    return slice(top, top + crop), slice(left, left + crop)


def _is_varied(labels: np.ndarray, most_of_one: float) -> bool:
    """Whether more than one class occurs and none has so large a share of the labelled pixels."""
    counts = np.bincount(labels[labels != IGNORED])
    return np.count_nonzero(counts) > 1 and counts.max() / counts.sum() < most_of_one


def _recoloured(pixels: Tensor, random: Random) -> Tensor:
    """mmseg's photometric distortion on RGB (3, H, W) uint8, each step with a chance of one half."""

    def contrast(pixels: Tensor) -> Tensor:
        return (pixels.float() * random.uniform(*FACTORS)).clip(0, 255).byte() if random.randint(2) else pixels

    if random.randint(2):
        pixels = (pixels.float() + random.uniform(-BRIGHTNESS, BRIGHTNESS)).clip(0, 255).byte()
    contrast_first = random.randint(2)
    pixels = contrast(pixels) if contrast_first else pixels
    if random.randint(2):
        pixels = vision.adjust_saturation(pixels, random.uniform(*FACTORS))
    if random.randint(2):
        pixels = vision.adjust_hue(pixels, random.uniform(-HUE, HUE))
    return pixels if contrast_first else contrast(pixels)


def normalised(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(3, H, W) uint8 -> float32."""
    means, stds = (torch.tensor(values).view(3, 1, 1) for values in (mean, std))
    return (pixels.float() - 255 * means) / (255 * stds)


def padded(image: Tensor, labels: Tensor, crop: int) -> tuple[Tensor, Tensor]:
    """Normalised image (3, h, w) and labels (h, w) with zeros and IGNORED at the right and bottom, crop x crop."""
    edges = (0, crop - labels.shape[1], 0, crop - labels.shape[0])
    return F.pad(image, edges), F.pad(labels, edges, value=IGNORED)


def to_whole_patches(images: Tensor, patch: int) -> Tensor:
    """Images (B, 3, H, W) with zeros at the right and bottom up to multiples of the patch."""
    return F.pad(images, (0, -images.shape[-1] % patch, 0, -images.shape[-2] % patch))


def sliding_windows(size: tuple[int, int], crop: int, stride: int) -> list[tuple[slice, slice]]:
    """Rows and columns of the windows of an image (H, W), row by row, the last ones shifted back inside.

    An image smaller than the window in both directions is cut into squares of its shorter side, as in the source
    (inference.py:93-149).
    """
    crop = min(size) if max(size) < crop else crop

    def starts(side: int) -> list[int]:
        count = max(side - crop + stride - 1, 0) // stride + 1
        return [max(min(number * stride, side - crop), 0) for number in range(count)]

    height, width = size
    return [
        (slice(top, min(top + crop, height)), slice(left, min(left + crop, width)))
        for top in starts(height)
        for left in starts(width)
    ]


def joined_logits(logits: Tensor, windows: Sequence[tuple[slice, slice]], size: tuple[int, int]) -> Tensor:
    """Logits (W, K, h, w) of all windows of an image, each resized to its window -> their mean (1, K, H, W)."""
    total = logits.new_zeros(1, logits.shape[1], *size)
    count = logits.new_zeros(1, 1, *size)
    for own, (rows, columns) in zip(logits.split(1), windows, strict=True):
        shape = rows.stop - rows.start, columns.stop - columns.start
        total[..., rows, columns] += F.interpolate(own, size=shape, mode="bilinear", align_corners=False)
        count[..., rows, columns] += 1
    return total / count


def evaluation_sides(height: int, width: int, short: int, ratios: Sequence[float]) -> list[tuple[int, int]]:
    """Height and width of an image at each ratio of the scale `short`; smaller ones are rounded up to multiples of 32
    (inference with test-time augmentation)."""
    sides = []
    for ratio in ratios:
        side = int(short * ratio)
        sides.append(resized_sides(height, width, side if ratio >= 1 else math.ceil(side / 32) * 32))
    return sides


def class_probabilities(logits: Sequence[Tensor], flipped: Sequence[bool], size: tuple[int, int]) -> Tensor:
    """Mean probabilities (K, *size) of the logits (1, K, H, W) of one image at several scales, some mirrored."""
    total: Tensor | float = 0.0
    for values, mirrored in zip(logits, flipped, strict=True):
        shares = F.interpolate(values, size=size, mode="bilinear", align_corners=False).softmax(dim=1)
        total = total + (shares.flip(-1) if mirrored else shares)
    return (total / len(logits))[0]  # type: ignore[index]


def areas_of(
    predicted: np.ndarray, labels: np.ndarray, classes: int, ignored: Sequence[int] = (IGNORED,)
) -> np.ndarray:
    """(K, 3) pixels of one image by class, for downstream.metrics.scores: predicted rightly, predicted, labelled.

    predicted, labels: of one shape, classes below K. Pixels whose label is in `ignored` count nowhere.
    """
    known = ~np.isin(labels, ignored)
    truth, seen = labels[known].astype(np.int64), predicted[known].astype(np.int64)
    return np.stack([np.bincount(values, minlength=classes) for values in (truth[truth == seen], seen, truth)], axis=1)
