"""digits:, the 1797 handwritten digits of 8 x 8 pixels in scikit-learn: real images without a download.

They are the test part of E. Alpaydin and C. Kaynak's "Optical Recognition of Handwritten Digits" (UCI, 1998), which is
not divided any further. Here val is a fixed random sample of 50 images of each class, train the other 1297.
"""

import numpy as np

from imagesets.names import PackedNames
from imagesets.selection import stratified_sample
from imagesets.sets import ImageSet, MemoryImages, Split

PLACE = ""
SPLITS = ("train", "val")
VAL_PER_CLASS = 50
SPLIT_SEED = 0  # never changes
MAX_INTENSITY = 16  # of scikit-learn's images


def open_split(place: str, split: Split) -> ImageSet:
    """Open one split of 8 x 8 images, with intensities scaled to 0..255. Raises ValueError if `place` is not empty."""
    from sklearn.datasets import load_digits

    if place:
        raise ValueError(f"digits:{place}: the digits are built in and take no path; write digits:")
    digits = load_digits()
    val = stratified_sample(digits.target, np.full(10, VAL_PER_CLASS), SPLIT_SEED)
    indices = val if split == "val" else np.setdiff1d(np.arange(len(digits.target)), val)
    grey = np.rint(digits.images[indices] * (255 / MAX_INTENSITY)).astype(np.uint8)
    return ImageSet(
        url="digits:",
        split=split,
        classes=tuple(str(name) for name in digits.target_names),
        labels=digits.target[indices],
        images=MemoryImages(
            names=PackedNames.pack(f"digits:{split}/{index}" for index in range(len(indices))),
            pixels=np.repeat(grey[..., None], 3, axis=3),
        ),
        notes=("scikit-learn's digits, 8 x 8 pixels; this project's own split into 1297 and 500",),
    )
