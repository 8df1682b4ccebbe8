"""digits:, the 1797 handwritten digits of 8 x 8 pixels that come with scikit-learn: real images without a download.

They are the test part of E. Alpaydin and C. Kaynak's "Optical Recognition of Handwritten Digits" (UCI, 1998). The
source has no split of them; here 500 images, drawn once and balanced over the ten classes, are val, 1297 are train.
"""

import numpy as np

from imagesets.names import PackedNames
from imagesets.selection import stratified_sample
from imagesets.sets import ImageSet, MemoryImages, Split

PLACE = ""
SPLITS = ("train", "val")
VAL_PER_CLASS = 50
SEED = 0  # of the split, which never changes
WHITE = 16  # intensities of the source are 0..16


def open_split(place: str, split: Split) -> ImageSet:
    """Open one split; images are 8 x 8 with intensities stretched to 0..255. Raises ValueError when given a path."""
    from sklearn.datasets import load_digits

    if place:
        raise ValueError(f"digits:{place}: the digits are built in and take no path; write digits:")
    source = load_digits()
    val = stratified_sample(source.target, np.full(10, VAL_PER_CLASS), SEED)
    kept = val if split == "val" else np.setdiff1d(np.arange(len(source.target)), val)
    grey = np.rint(source.images[kept] * (255 / WHITE)).astype(np.uint8)
    return ImageSet(
        url="digits:",
        split=split,
        classes=tuple(str(name) for name in source.target_names),
        labels=source.target[kept],
        images=MemoryImages(
            names=PackedNames.pack(f"digits:{split}/{number}" for number in range(len(kept))),
            pixels=np.repeat(grey[..., None], 3, axis=3),
        ),
        notes=("scikit-learn's digits, 8 x 8 pixels; this project's own split into 1297 and 500",),
    )
