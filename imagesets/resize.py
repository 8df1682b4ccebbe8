"""Pillow's resize followed by a centre crop, with less work and the same bits.

Pillow resizes in two passes with bytes between them: rows first (to the final width), then columns. So columns that
the crop drops can go between the passes, before the second one computes them. Along an axis whose scale is a dyadic
fraction (the short side, 256 px at crop 224, always is), the pass itself can be limited to the window by `box`: every
filter centre, in0 + (x + 0.5) * scale in Pillow's Resample.c, is then computed without rounding with and without box,
so the coefficients are the same numbers. On other axes `box` would move the centres by about 1e-6 pixels and could
change a byte, and is not used. tests/imagesets/test_resize.py holds the identity with the plain order of calls.
"""

import math

from PIL import Image


def resized_size(width: int, height: int, short: int) -> tuple[int, int]:
    """(width, height) after torchvision's Resize(short): the long side is cut down to whole pixels."""
    if width <= height:
        return short, int(short * height / width)
    return int(short * width / height), short


def resize_and_crop(image: Image.Image, short: int, crop: int, filter_: Image.Resampling) -> Image.Image:
    """Equal, bit for bit, to torchvision's Resize(short) and CenterCrop(crop) of a Pillow image, for crop <= short."""
    width, height = image.size
    new_width, new_height = resized_size(width, height, short)
    left, top = window_start(new_width, crop), window_start(new_height, crop)
    exact_rows = is_dyadic(height, new_height)
    if exact_rows:  # rows that no output row of the window looks at need no first pass
        first, last = rows_needed(height, new_height, top, crop)
        image = image.crop((0, first, width, last))
    rows = image.size[1]
    if is_dyadic(width, new_width):
        scale = width / new_width
        image = image.resize((crop, rows), filter_, box=(left * scale, 0, (left + crop) * scale, rows))
    else:
        image = image.resize((new_width, rows), filter_).crop((left, 0, left + crop, rows))
    if exact_rows:
        scale = height / new_height
        return image.resize((crop, crop), filter_, box=(0, top * scale - first, crop, (top + crop) * scale - first))
    return image.resize((crop, new_height), filter_).crop((0, top, crop, top + crop))


def window_start(length: int, crop: int) -> int:
    """First pixel of a centred window, rounded half to even as in torchvision's center_crop."""
    return round((length - crop) / 2)


def is_dyadic(length: int, new_length: int) -> bool:
    """Whether every boundary k * length / new_length is a binary fraction that Pillow's float32 `box` holds exactly."""
    denominator = new_length // math.gcd(length, new_length)
    return denominator & (denominator - 1) == 0 and length * denominator < 1 << 24  # float32 has 24 bits


def rows_needed(length: int, new_length: int, start: int, count: int) -> tuple[int, int]:
    """First and one past the last input row under the filter (up to 3 rows wide each side, Lanczos) of a window."""
    scale = length / new_length
    margin = 3 * max(scale, 1) + 1
    return max(0, math.floor(start * scale - margin)), min(length, math.ceil((start + count) * scale + margin))
