"""Shifted and cleaned test sets of ImageNet: where they lie, their own label rules, and scores.

N images, C classes of the head.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from imagesets.listing import class_tree, subfolders
from imagesets.sets import ImageSet

LEVELS = 5  # severities of a corruption
# ImageNet-C's corruptions with AlexNet's top-1 errors, by severity: Hendrycks and Dietterich 2019, the values as in
# facebookresearch/dinov3 eval/metrics/imagenet_c.py:23-156. The first 15 are the benchmark's.
ALEXNET = {
    "gaussian_noise": (0.69528, 0.82542, 0.93554, 0.98138, 0.99452),
    "shot_noise": (0.71224, 0.85108, 0.93574, 0.98182, 0.99146),
    "impulse_noise": (0.78374, 0.89808, 0.94870, 0.98720, 0.99548),
    "defocus_blur": (0.65624, 0.73202, 0.85036, 0.91364, 0.94714),
    "glass_blur": (0.64308, 0.75054, 0.88806, 0.91622, 0.93344),
    "motion_blur": (0.58430, 0.70048, 0.82108, 0.89750, 0.92638),
    "zoom_blur": (0.70008, 0.76992, 0.80784, 0.84198, 0.87198),
    "snow": (0.71726, 0.88392, 0.86468, 0.91870, 0.94952),
    "frost": (0.61390, 0.79734, 0.88790, 0.89942, 0.93430),
    "fog": (0.67474, 0.76050, 0.84378, 0.87260, 0.94500),
    "brightness": (0.45140, 0.48502, 0.54048, 0.62166, 0.72440),
    "contrast": (0.64548, 0.76150, 0.88874, 0.97760, 0.99270),
    "elastic_transform": (0.52596, 0.70116, 0.55686, 0.64076, 0.80554),
    "pixelate": (0.52218, 0.54620, 0.73728, 0.87092, 0.91262),
    "jpeg_compression": (0.51002, 0.54718, 0.57294, 0.65458, 0.74778),
    "speckle_noise": (0.66192, 0.74440, 0.90246, 0.94548, 0.97268),
    "gaussian_blur": (0.54732, 0.70444, 0.82574, 0.89864, 0.95940),
    "spatter": (0.47196, 0.62194, 0.75052, 0.84132, 0.90182),
    "saturate": (0.59342, 0.65514, 0.51174, 0.70834, 0.82260),
}
BENCHMARK = tuple(ALEXNET)[:15]


def mce(errors: Mapping[str, Sequence[float]]) -> float:
    """Mean corruption error in percent, of errors by severity from 0 to 1: of each corruption the mean error by
    AlexNet's mean error, and their mean. A ratio of means, not a mean of ratios."""
    ratios = [np.mean(values) / np.mean(ALEXNET[corruption]) for corruption, values in errors.items()]
    return 100.0 * float(np.mean(ratios))


def any_match(ranked: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Whether one of the ranked classes (N, k) is among an image's labels (N, m), padded with -1 -> (N,) float, NaN
    for an image without a label."""
    right = (ranked[:, :, None] == labels[:, None, :]) & (labels >= 0)[:, None, :]
    return np.where((labels >= 0).any(axis=1), right.any(axis=(1, 2)), np.nan)


def mapped(ranked: np.ndarray, counterpart: Mapping[int, int]) -> np.ndarray:
    """Ranked classes (N, k) as those of another set, -1 where they have no counterpart: such a guess is wrong."""
    table = np.full(max(int(ranked.max(initial=0)), *counterpart) + 1, -1)
    table[list(counterpart)] = list(counterpart.values())
    return table[ranked]


@dataclass(frozen=True, kw_only=True, eq=False)
class AlteredImages:
    """ImageSource of a set whose images are altered when they are read. name: how, all that it depends on."""

    source: ImageSet
    name: str
    alter: Callable[[ImageSet, int], Image.Image]
    changed: ClassVar[None] = None

    def path(self, index: int) -> str:
        return self.source.path(index)

    def encoded(self, index: int) -> None:
        return None

    def image(self, index: int) -> Image.Image:
        return self.alter(self.source, index)

    def take(self, indices: np.ndarray) -> "AlteredImages":
        return replace(self, source=self.source.subset(indices, "part"))

    def facts(self) -> tuple[bytes, ...]:
        return self.source.fingerprint.encode(), self.name.encode()

    @property
    def contents(self) -> str:
        return self.source.contents

    @property
    def modified(self) -> int:
        return self.source.modified


def altered(source: ImageSet, name: str, alter: Callable[[ImageSet, int], Image.Image]) -> ImageSet:
    """A set with each image altered; `name` is appended to its URL."""
    images = AlteredImages(source=source, name=name, alter=alter)
    return replace(source, url=f"{source.url}#{name}", images=images)


def without_border(source: ImageSet, index: int) -> Image.Image:
    """An image of ObjectNet without its red frame."""
    image = source.image(index)
    return image.crop((FRAME, FRAME, image.width - FRAME, image.height - FRAME))


# Folders of the sets as they are unpacked, each with a folder per class; metrics are named by the keys.
FOLDERS = {
    "v2": "imagenetv2-matched-frequency-format-val",
    "v2_threshold": "imagenetv2-threshold0.7-format-val",
    "v2_top": "imagenetv2-top-images-format-val",
    "a": "imagenet-a",
    "r": "imagenet-r",
    "sketch": "sketch",
    "objectnet": "objectnet-1.0",
}
REAL, CORRUPTED = "real.json", "imagenet-c"
FRAME = 2  # pixels of ObjectNet's red frame


def folder_of(place: str, name: str) -> str:
    """The path of a set's folder or file, in ImageNet's folder or beside it; "" where there is none."""
    places = (place, os.path.dirname(os.path.abspath(place)))
    return next((path for path in (os.path.join(each, name) for each in places) if os.path.exists(path)), "")


def tree(url: str, root: str) -> ImageSet:
    """Images in one folder per class, which are the set's classes by name."""
    classes = subfolders(root)
    if not classes:
        raise ValueError(f"{url}: no class folders in {root}; unpack the set again")
    return class_tree(url=url, split="val", root=root, classes=classes, notes=())


def classes_of(images: ImageSet, known: Sequence[str]) -> np.ndarray:
    """The head's class (K,) of each class folder: V2's folders are class numbers, all others WordNet ids.

    known: the head's classes. ValueError for folders that are none of these.
    """
    if all(name.isdecimal() for name in images.classes):
        numbers = np.array([int(name) for name in images.classes])
        strange = [name for name, number in zip(images.classes, numbers, strict=True) if number >= len(known)]
    else:
        place = {name: number for number, name in enumerate(known)}
        strange = [name for name in images.classes if name not in place]
        numbers = np.array([place.get(name, -1) for name in images.classes])
    if strange:
        raise ValueError(
            f"{images.url}: {len(strange)} of its {len(images.classes)} class folders, {strange[0]!r} first, are no "
            f"classes of the head, which knows {len(known)}, such as {known[0]!r}; train it on the same classes"
        )
    return numbers


def real_labels(path: str, images: ImageSet) -> np.ndarray:
    """ReaL's labels (N, m) of ImageNet's validation images, padded with -1: its list is in the order of their numbers.

    ValueError for images whose names have no number, or one beyond the list.
    """
    with open(path, encoding="ascii") as file:
        listed = json.load(file)
    found = [re.search(r"_val_(\d+)", os.path.basename(images.path(index))) for index in range(len(images))]
    numbers = [int(match[1]) if match else 0 for match in found]
    if wrong := next((at for at, number in enumerate(numbers) if not 1 <= number <= len(listed)), None):
        raise ValueError(
            f"{path}: has {len(listed)} entries, and none for {images.path(wrong)}; it is for ImageNet's own files, "
            "ILSVRC2012_val_00000001 and so on"
        )
    labels = np.full((len(images), max(1, *(len(listed[number - 1]) for number in numbers))), -1)
    for row, number in zip(labels, numbers, strict=True):
        row[: len(listed[number - 1])] = listed[number - 1]
    return labels


def objectnet_counterparts(root: str, images: ImageSet) -> dict[int, int]:
    """ImageNet's class number -> place of ObjectNet's folder, from the set's own files in mappings/."""

    def read(name: str) -> Any:
        with open(os.path.join(root, "mappings", name), encoding="utf-8") as file:
            return json.load(file) if name.endswith(".json") else file.read().splitlines()

    try:
        titles, synsets = read("folder_to_objectnet_label.json"), read("objectnet_to_imagenet_1k.json")
        order = {title: number for number, title in enumerate(read("imagenet_to_label_2012_v2"))}
        numbers = {place: int(number) for number, place in read("pytorch_to_imagenet_2012_id.json").items()}
        folders = {titles[name]: place for place, name in enumerate(images.classes)}
        pairs = [(synset, title) for title, names in synsets.items() for synset in names.split("; ")]
        return {numbers[order[synset]]: folders[title] for synset, title in pairs if title in folders}
    except (OSError, KeyError, ValueError) as error:
        why = " ".join(f"{type(error).__name__} {error}".split())
        raise ValueError(f"{images.url}: {root}/mappings cannot be read ({why}); unpack ObjectNet again") from error
