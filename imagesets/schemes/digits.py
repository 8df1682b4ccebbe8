"""digits:, the 1797 handwritten digits of 8 x 8 pixels in scikit-learn: real images without a download.

They are the test part of E. Alpaydin and C. Kaynak's "Optical Recognition of Handwritten Digits" (UCI, 1998), which is
not divided any further. Here val is a fixed random sample of 50 images of each class, train the other 1297.
"""

from importlib.metadata import distribution

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
    if place:
        raise ValueError(f"digits:{place}: the digits are built in and take no path; write digits:")
    # As sklearn.datasets.load_digits reads it; importing that takes a second.
    table = np.loadtxt(
        str(distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")), delimiter=","
    )
    labels = table[:, -1].astype(np.int64)
    val = stratified_sample(labels, np.full(10, VAL_PER_CLASS), SPLIT_SEED)
    indices = val if split == "val" else np.setdiff1d(np.arange(len(labels)), val)
    grey = np.rint(table[indices, :-1].reshape(-1, 8, 8) * (255 / MAX_INTENSITY)).astype(np.uint8)
    return ImageSet(
        url="digits:",
        split=split,
        classes=tuple(map(str, range(10))),
        labels=labels[indices],
        images=MemoryImages(
            names=PackedNames.pack(f"digits:{split}/{index}" for index in range(len(indices))),
            pixels=np.repeat(grey[..., None], 3, axis=3),
        ),
        notes=("scikit-learn's digits, 8 x 8 pixels; this project's own split into 1297 and 500",),
    )
