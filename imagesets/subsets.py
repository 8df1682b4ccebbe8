"""Class-balanced subsets for few-shot and semi-supervised protocols, and the list files of MSN and SimCLR."""

import os
from collections import Counter
from pathlib import Path

import numpy as np

from imagesets.listing import short_list
from imagesets.selection import quotas, stratified_sample
from imagesets.sets import ImageSet


def few_shot(image_set: ImageSet, per_class: int, seed: int) -> ImageSet:
    """`per_class` random images of every class. With one seed, fewer shots lie inside more, as in MSN's lists.

    Raises ValueError when a class has fewer images.
    """
    if per_class < 1:
        raise ValueError(f"{image_set.url}: {per_class} images per class leave none; give 1 or more")
    counts = class_counts(image_set)
    if counts.min() < per_class:
        poorest = int(counts.argmin())
        raise ValueError(
            f"{image_set.url}: {per_class} images per class asked, but class {image_set.classes[poorest]!r} has "
            f"{counts[poorest]}; ask for {counts[poorest]} or fewer, or add images"
        )
    chosen = stratified_sample(image_set.labels, np.full(len(counts), per_class), seed)
    return image_set.subset(chosen, f"{per_class}-shot-seed{seed}")


def fraction(image_set: ImageSet, share: float, seed: int) -> ImageSet:
    """A random `share` of the images, equally many of each class and at least one.

    On ImageNet-1k 0.01 gives the 12 811 images of SimCLR's list, 12 or 13 a class (not the same ones). Raises
    ValueError for a share outside 0..1.
    """
    if not 0 < share <= 1:
        raise ValueError(f"{image_set.url}: a share of {share}; give a number above 0 and up to 1, 0.01 for 1 %")
    counts = class_counts(image_set)
    size = int(share * len(image_set) + 1e-9)  # 0.29 * 100 is 28.999999999999996
    total = max(size, int(np.count_nonzero(counts)))
    return image_set.subset(
        stratified_sample(image_set.labels, quotas(counts, total), seed), f"fraction-{share:g}-seed{seed}"
    )


def from_list(image_set: ImageSet, path: str | Path) -> ImageSet:
    """The images that a list file names, one file name a line (`<wnid>_<number>.JPEG`), in the file's order.

    MSN's imagenet_subsets*/*.txt and SimCLR's 1percent.txt and 10percent.txt have this form. Raises ValueError when the
    file is missing, empty, repeats a name, or names an image that the set lacks or has twice.
    """
    names = read_names(path)
    places: dict[str, list[int]] = {name: [] for name in names}
    for index in range(len(image_set)):
        name = os.path.basename(image_set.path(index))
        if name in places:
            places[name].append(index)
    absent = [name for name in names if not places[name]]
    if absent:
        raise ValueError(
            f"{path}: {len(absent)} of {len(names)} lines name no image of {image_set.url} {image_set.split}, "
            f"{absent[0]!r} first; use the list made for this set, or complete the set"
        )
    double = [name for name in names if len(places[name]) > 1]
    if double:
        raise ValueError(f"{path}: {image_set.url} has more than one image called {short_list(double)}; rename them")
    return image_set.subset(np.array([places[name][0] for name in names]), f"list-{Path(path).name}")


def read_names(path: str | Path) -> list[str]:
    """The non-empty lines of a list file, each of which may occur once."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        raise ValueError(f"{path}: cannot be read as a list of file names ({why}); give a text file") from error
    names = [line.strip() for line in lines if line.strip()]
    if not names:
        raise ValueError(f"{path}: lists no image; give one file name a line, such as n01440764_10183.JPEG")
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise ValueError(f"{path}: {short_list(repeated)} listed more than once; list each image once")
    return names


def class_counts(image_set: ImageSet) -> np.ndarray:
    """Images of every class (K,)."""
    if image_set.has_several_labels:
        return (image_set.labels == 1).sum(axis=0)
    return np.bincount(image_set.labels, minlength=len(image_set.classes))
