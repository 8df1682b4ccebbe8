"""Subsets of training images: a number or share of each class, or the list files of MSN and SimCLR."""

import os
from collections import Counter
from pathlib import Path

import numpy as np

from engine.files import read_text
from imagesets.listing import short_list
from imagesets.selection import quotas, stratified_sample
from imagesets.sets import ImageSet


def few_shot(image_set: ImageSet, per_class: int, seed: int) -> ImageSet:
    """`per_class` random images of each class. With the same seed, a smaller subset is part of a larger, as in MSN.

    Raises ValueError if a class has fewer images.
    """
    if per_class < 1:
        raise ValueError(f"{image_set.url}: {per_class} images per class leave none; give 1 or more")
    counts = class_counts(image_set)
    if counts.min() < per_class:
        smallest = int(counts.argmin())
        raise ValueError(
            f"{image_set.url}: {per_class} images per class asked, but class {image_set.classes[smallest]!r} has "
            f"{counts[smallest]}; ask for {counts[smallest]} or fewer, or add images"
        )
    indices = stratified_sample(image_set.labels, np.full(len(counts), per_class), seed)
    return image_set.subset(indices, f"{per_class}-shot-seed{seed}")


def images_of_share(image_set: ImageSet, share: float) -> int:
    """Number of images in a share of them."""
    return int(share * len(image_set) + 1e-9)  # 0.29 * 100 is 28.999999999999996


def fraction(image_set: ImageSet, share: float, seed: int) -> ImageSet:
    """A random `share` of the images, equally many of each class and at least one.

    0.01 of ImageNet-1k are 12 811 images, 12 or 13 of each class, as many as in SimCLR's list (but others). Raises
    ValueError unless 0 < share <= 1.
    """
    if not 0 < share <= 1:
        raise ValueError(f"{image_set.url}: a share of {share}; give a number above 0 and up to 1, 0.01 for 1 %")
    counts = class_counts(image_set)
    total = max(images_of_share(image_set, share), int(np.count_nonzero(counts)))
    indices = stratified_sample(image_set.labels, quotas(counts, total), seed)
    return image_set.subset(indices, f"fraction-{share:g}-seed{seed}")


def from_list(image_set: ImageSet, path: str | Path) -> ImageSet:
    """The images that a list file names, one file name a line (`<wnid>_<number>.JPEG`), in the order of the file.

    MSN's imagenet_subsets*/*.txt and SimCLR's 1percent.txt and 10percent.txt are such files. Raises ValueError if the
    file is missing or empty, repeats a name, or names an image that the set does not have or has twice.
    """
    names = read_names(path)
    indices_of: dict[str, list[int]] = {name: [] for name in names}
    for index in range(len(image_set)):
        name = os.path.basename(image_set.path(index))
        if name in indices_of:
            indices_of[name].append(index)
    if missing := [name for name in names if not indices_of[name]]:
        raise ValueError(
            f"{path}: {len(missing)} of {len(names)} lines name no image of {image_set.url} {image_set.split}, "
            f"{missing[0]!r} first; use the list made for this set, or complete the set"
        )
    if duplicates := [name for name in names if len(indices_of[name]) > 1]:
        raise ValueError(
            f"{path}: {image_set.url} has more than one image called {short_list(duplicates)}; rename them"
        )
    return image_set.subset(np.array([indices_of[name][0] for name in names]), f"list-{Path(path).name}")


def read_names(path: str | Path) -> list[str]:
    """The non-empty lines of a list file. Raises ValueError if it cannot be read, is empty or repeats a line."""
    try:
        lines = read_text(path).splitlines()
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read as a list of file names ({error.strerror}); give a text file"
        ) from error
    names = [line.strip() for line in lines if line.strip()]
    if not names:
        raise ValueError(f"{path}: lists no image; give one file name a line, such as n01440764_10183.JPEG")
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise ValueError(f"{path}: {short_list(repeated)} listed more than once; list each image once")
    return names


def class_counts(image_set: ImageSet) -> np.ndarray:
    """Number of images (K,) of each class."""
    if image_set.has_several_labels:
        return (image_set.labels == 1).sum(axis=0)
    return np.bincount(image_set.labels, minlength=len(image_set.classes))
