"""Shifted and cleaned test sets of ImageNet: where they lie, their own label rules, and how a classifier does on them.

N images, n of them readable, C classes of the head.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.random import RandomState
from PIL import Image
from torch import Tensor

from checkpoints.frozen import FrozenExport
from engine.settings import Different, PositiveInt, Validated
from engine.tasks import Metric, Outcome, Protocol, Task, Workspace, resampled
from engine.work import Scale, Work
from imagesets.listing import class_tree, subfolders
from imagesets.selection import evenly
from imagesets.sets import ImageSet, parse_url
from imagesets.transforms import EvalTransform
from probes.corruptions import CORRUPTIONS, Corruption, corrupted
from probes.features.extract import FeatureSet, extract
from probes.features.kinds import FeatureKind, feature_bytes, feature_pass
from probes.scores import cost

PlainTask = TypeVar("PlainTask", bound=Task)

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
ALEXNET_CLASSES = 1000  # among which AlexNet's errors were made


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
OWN_CLASSES = ("a", "r")  # sets whose images are classified among their own classes alone
REAL, CORRUPTED = "real.json", "imagenet-c"
FRAME = 2  # pixels of ObjectNet's red frame


def folder_of(place: str, name: str) -> str:
    """The path of a set's folder or file, in ImageNet's folder or beside it; "" where there is none."""
    paths = [os.path.join(folder, name) for folder in (place, os.path.dirname(os.path.abspath(place)))]
    return next(filter(os.path.exists, paths), "")


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
    matches = [re.search(r"_val_(\d+)", os.path.basename(images.path(index))) for index in range(len(images))]
    numbers = [int(match[1]) if match else 0 for match in matches]
    if unlisted := [index for index, number in enumerate(numbers) if not 1 <= number <= len(listed)]:
        raise ValueError(
            f"{path}: has {len(listed)} entries, and none for {images.path(unlisted[0])}; it is for ImageNet's own "
            "files, ILSVRC2012_val_00000001 and so on"
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


@dataclass(frozen=True, kw_only=True)
class Shifts(Validated):
    """What a classifier is evaluated on besides."""

    # Generated where imagenet-c is not there; none: an empty list.
    corruptions: Different[Corruption] = CORRUPTIONS
    images: PositiveInt = 5000  # validation images that are corrupted, evenly spread

    def generated(self, val: int) -> int:
        """Images of the generated corruptions, of so many validation images."""
        return len(self.corruptions) * LEVELS * min(self.images, val)

    def plain(self, kind: type[PlainTask]) -> PlainTask:
        """The task alone that trains the classifier, whose training is the same."""
        return kind(**{field.name: getattr(self, field.name) for field in fields(kind)})

    def with_pass(self, work: Work, scale: Scale, images: int, kinds: int) -> Work:
        """Counted work with that of so many `images` more, of which `kinds` vectors are read."""
        part = feature_pass(scale.spec, images, "generated corruptions")
        return replace(work, parts=(*work.parts, part), disk=work.disk + feature_bytes(scale.spec, images, kinds))


@dataclass(frozen=True, kw_only=True)
class ShiftedSets:
    """The shifted sets of an image set, and the classifier that is judged on them.

    export, kinds, transform: what it reads of an image. classes: that it knows. logits: of features (n, C), None in
    processes that have no part in it.
    """

    shifts: Shifts
    export: FrozenExport
    kinds: Sequence[FeatureKind]
    transform: EvalTransform
    space: Workspace
    classes: Sequence[str]
    val: ImageSet
    logits: Callable[[FeatureSet], Tensor | None]

    @cached_property
    def queries(self) -> FeatureSet:
        """The features of `val`."""
        return extract(self.export, self.val, self.kinds, self.space, self.transform)

    def added_to(self, clean: Outcome) -> Outcome:
        """The classifier's numbers on all shifted sets that are there, the main one first, and those of `clean`, its
        outcome on `val`."""
        metrics: dict[str, Metric] = {}
        arrays = dict(clean.arrays)
        notes: dict[str, Any] = {}
        passes = [self.queries]
        place = parse_url(self.space.data)[1]
        for name, right, features in self.judged(place):
            metrics[f"{name}_top1"] = share(right)
            notes[name] = dict(features.facts)
            passes += [features] if features is not self.queries else []
        root = folder_of(place, CORRUPTED) if place else ""
        prefix = "c" if root else "generated"
        errors: dict[str, list[float]] = {}
        for corruption, images, transform in self.corruptions(root):
            features = extract(self.export, images, self.kinds, self.space, transform)
            right = any_match(self.ranked(features)[:, :1], classes_of(images, self.classes)[features.labels, None])
            errors.setdefault(corruption, []).append(1 - float(np.nanmean(right)))
            passes.append(features)
        if errors:
            name = f"{prefix}_mce" if set(errors) == set(BENCHMARK) else f"{prefix}_mce_of{len(errors)}"
            metrics[name] = Metric(value=mce(errors), higher_is_better=False)
            metrics |= {
                f"{prefix}_{corruption}_error": Metric(value=100 * float(np.mean(values)), higher_is_better=False)
                for corruption, values in errors.items()
            }
            arrays[f"{prefix}_errors"] = np.array(list(errors.values()))
            notes[prefix] = {"corruptions": list(errors), "normalised by": "AlexNet's mean errors"}
        spent = {name: clean.cost.get(name, 0) + value for name, value in cost(*passes).items()}
        warnings = list(clean.facts.get("warnings", ()))
        if errors and len(self.classes) != ALEXNET_CLASSES:
            warnings.append(
                f"{name} divides errors among {len(self.classes)} classes by AlexNet's among {ALEXNET_CLASSES}: do not "
                "compare it with published ones"
            )
        facts = {**clean.facts, "shifted": notes} | ({"warnings": warnings} if warnings else {})
        metrics |= clean.metrics
        return replace(clean, metrics=metrics, arrays=arrays, facts=facts, cost={**clean.cost, **spent})

    def judged(self, place: str) -> Iterator[tuple[str, np.ndarray, FeatureSet]]:
        """Of each set that is there: its name, what is right (n,), NaN for images that do not count, and features."""
        if place and (path := folder_of(place, REAL)):
            labels = real_labels(path, self.val)[self.queries.indices]
            yield "real", any_match(self.ranked(self.queries)[:, :1], labels), self.queries
        for name, folder in FOLDERS.items():
            root = folder_of(place, folder) if place else ""
            if not root:
                continue
            images = self.opened(f"{name}:{root}", f"{root}/images" if name == "objectnet" else root)
            if name == "objectnet":
                counterparts = objectnet_counterparts(root, images)
                images = altered(images, "without-border", without_border)
                features = extract(self.export, images, self.kinds, self.space, self.transform)
                guesses = mapped(self.ranked(features)[:, :1], counterparts)
                shared = np.isin(features.labels, list(counterparts.values()))
                yield name, any_match(guesses, np.where(shared, features.labels, -1)[:, None]), features
                continue
            features = extract(self.export, images, self.kinds, self.space, self.transform)
            numbers = classes_of(images, self.classes)
            own = numbers if name in OWN_CLASSES else None
            truth = features.labels if own is not None else numbers[features.labels]
            yield name, any_match(self.ranked(features, own)[:, :1], truth[:, None]), features

    def opened(self, url: str, root: str) -> ImageSet:
        """All images of a set, or as many as the workspace allows."""
        images = tree(url, root)
        return images.limited(self.space.limit) if self.space.limit else images

    def corruptions(self, root: str) -> Iterator[tuple[str, ImageSet, EvalTransform]]:
        """Corruption, images of one severity and their transform: those below `root`, else generated ones. Stored
        images have the size of the crop, and a resize would blur their noise: the centre is cut alone."""
        cut = replace(self.transform, crop=1.0)
        if root:
            for corruption in (name for name in ALEXNET if folder_of(root, name)):
                for level in range(1, LEVELS + 1):
                    path = f"{root}/{corruption}/{level}"
                    yield corruption, self.opened(f"c:{path}", path), cut
            return
        count = min(self.shifts.images, len(self.queries))
        few = self.val.subset(self.queries.indices[evenly(len(self.queries), count)], "corrupted")
        for number, corruption in enumerate(self.shifts.corruptions):
            for level in range(1, LEVELS + 1):
                alter = partial(corrupted_crop, self.transform, corruption, level, (self.space.seed, number, level))
                name = f"{corruption}-{level}-{self.transform.name}-seed{self.space.seed}"
                yield corruption, altered(few, name, alter), cut

    def ranked(self, features: FeatureSet, own: np.ndarray | None = None) -> np.ndarray:
        """The five classes (n, 5) that the classifier ranks highest, in every process; of `own` classes (K,) alone,
        as places among these."""

        def rank() -> np.ndarray | None:
            logits = self.logits(features)
            if logits is None:
                return None
            logits = logits if own is None else logits[:, torch.from_numpy(own)]
            return logits.topk(min(5, logits.shape[1]), dim=1).indices.numpy()

        return next(part for part in self.space.world.gather_results(rank) if part is not None)


def corrupted_crop(
    transform: EvalTransform, corruption: Corruption, level: int, seeds: tuple[int, ...], source: ImageSet, index: int
) -> Image.Image:
    """The evaluation crop of an image, corrupted; noise depends on seeds and image alone."""
    pixels = transform(source, index).permute(1, 2, 0).numpy()
    return corrupted(Image.fromarray(pixels), corruption, level, RandomState([*seeds, index]))


def share(right: np.ndarray) -> Metric:
    """Accuracy of (n,) over the images that count, those that are not NaN, with its values on resamples of the n."""
    counts, values = ~np.isnan(right), np.nan_to_num(right)

    def on(weights: np.ndarray) -> dict[str, np.ndarray]:
        return {"": 100 * (weights @ values) / np.maximum(weights @ counts, 1)}

    return Metric(value=100 * float(values.sum() / max(counts.sum(), 1)), resampled=resampled(on, len(right))[""])


def evaluated_as(kind: type[Task], trained: Protocol, version: int, source: str, **shifts: Any) -> Protocol:
    """The protocol of `kind` that judges what another protocol trains."""
    settings = {field.name: getattr(trained.task, field.name) for field in fields(trained.task)}
    return Protocol(task=kind(**settings, **shifts), version=version, source=source)
