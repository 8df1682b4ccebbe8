"""Evaluation of a classifier on shifted and cleaned test sets of ImageNet: V2, ReaL, A, R, Sketch, ObjectNet and C.

The sets are searched for in ImageNet's folder and beside it. Each has its own rule for which predictions are correct.

N: images of a set. n: those that are readable. C: classes of the classifier.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
from msgspec import Meta
from numpy.random import RandomState
from PIL import Image
from torch import Tensor

from checkpoints.frozen import FrozenExport
from engine.files import read_json, read_text
from engine.settings import Different, PositiveInt
from engine.tasks import Metric, Outcome, Protocol, Reads, Task, Workspace, resampled
from engine.work import Scale, Work
from imagesets.listing import class_tree, optional_path, short_list, subfolders
from imagesets.selection import evenly_spaced
from imagesets.sets import SPLITS, ImageSet, open_set, parse_url
from imagesets.transforms import EvalTransform
from probes.corruptions import CORRUPTIONS, Corruption, corrupt
from probes.features.extract import FeatureSet, extract, feature_pass
from probes.features.kinds import FeatureKind, feature_bytes
from probes.scores import cost

PlainTask = TypeVar("PlainTask", bound=Task)

# Metric prefix -> folder of the set as it is unpacked, with a folder per class.
FOLDERS = {
    "v2": "imagenetv2-matched-frequency-format-val",
    "v2_threshold": "imagenetv2-threshold0.7-format-val",
    "v2_top": "imagenetv2-top-images-format-val",
    "a": "imagenet-a",
    "r": "imagenet-r",
    "sketch": "sketch",
    "objectnet": "objectnet-1.0",
}
OWN_CLASSES = ("a", "r")  # sets on which the classifier chooses among the set's classes only
REAL, CORRUPTED = "real.json", "imagenet-c"
MAPPINGS = (  # in the folder mappings of ObjectNet
    "folder_to_objectnet_label.json",
    "objectnet_to_imagenet_1k.json",
    "pytorch_to_imagenet_2012_id.json",
    "imagenet_to_label_2012_v2",
)
MAX_TABLE = 1 << 24  # bytes of ReaL's labels or a mapping, of which the official ones have less than 1 MB
ClassNumber = Annotated[int, Meta(ge=0)]
BORDER = 2  # pixels of ObjectNet's red border

SEVERITIES = range(1, 6)  # of a corruption
# Top-1 errors of AlexNet on ImageNet-C, by severity: Hendrycks and Dietterich 2019, with the values of
# facebookresearch/dinov3 eval/metrics/imagenet_c.py:23-156. The first 15 corruptions are the benchmark's.
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
ALEXNET_CLASSES = 1000  # among which AlexNet made these errors


def mce(errors: Mapping[str, Sequence[float]]) -> float:
    """Mean corruption error in percent.

    For each corruption, the mean of its errors (from 0 to 1, by severity) is divided by the mean of AlexNet's; the
    ratios are averaged over corruptions. It is a ratio of means, not a mean of ratios over severities.
    """
    ratios = [np.mean(values) / np.mean(ALEXNET[corruption]) for corruption, values in errors.items()]
    return 100.0 * float(np.mean(ratios))


def mean_errors(wrong: Mapping[str, Sequence[np.ndarray]]) -> dict[str, list[float]]:
    """Corruption -> error for each severity, from 0 to 1. wrong: as for `mce_metric`."""
    return {corruption: [float(np.nanmean(values)) for values in sets] for corruption, sets in wrong.items()}


def mce_metric(wrong: Mapping[str, Sequence[np.ndarray]]) -> Metric:
    """Mean corruption error, with values on resamples of the images if all sets have the same number, N.

    wrong: corruption -> for each severity (N,), 1 for a misclassified image, 0 for another, NaN for an unreadable one.
    The k-th images of all sets show the same one, as in ImageNet-C.
    """
    value = mce(mean_errors(wrong))
    sizes = {len(values) for sets in wrong.values() for values in sets}
    if len(sizes) > 1:
        return Metric(value=value, higher_is_better=False)
    (count,) = sizes
    stacked = np.array(list(wrong.values())).reshape(-1, count)  # a row for each corruption and severity
    readable, values = (~np.isnan(stacked)).astype(np.float64), np.nan_to_num(stacked)

    def score(weights: np.ndarray) -> dict[str, np.ndarray]:
        rates = (weights @ values.T) / np.maximum(weights @ readable.T, 1)
        by_corruption = rates.reshape(len(weights), len(wrong), -1).mean(axis=2)
        return {"": 100 * (by_corruption / [np.mean(ALEXNET[corruption]) for corruption in wrong]).mean(axis=1)}

    return Metric(value=value, higher_is_better=False, resampled=resampled(score, count)[""], resampled_units=count)


def any_match(ranked: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Whether one of the predicted classes (N, k) is among the labels (N, m) of an image, which are padded with -1:
    (N,) float, NaN for an image without labels."""
    is_match = (ranked[:, :, None] == labels[:, None, :]) & (labels >= 0)[:, None, :]
    return np.where((labels >= 0).any(axis=1), is_match.any(axis=(1, 2)), np.nan)


def map_classes(ranked: np.ndarray, counterparts: Mapping[int, int]) -> np.ndarray:
    """Predicted classes (N, k) as classes of another set; -1, which is never correct, for those without counterpart."""
    table = np.full(max(int(ranked.max(initial=0)), *counterparts) + 1, -1)
    table[list(counterparts)] = list(counterparts.values())
    return table[ranked]


def open_class_folders(url: str, root: str) -> ImageSet:
    """The images of a folder with a folder per class. Raises ValueError if it has no class folders."""
    classes = subfolders(root)
    if not classes:
        raise ValueError(f"{url}: no class folders in {root}; unpack the set again, or remove it")
    return class_tree(url=url, split="val", root=root, classes=classes, notes=())


def corruptions_in(root: str) -> list[str]:
    """The corruptions in a folder of ImageNet-C. Raises ValueError for none, missing severities and other folders."""
    corruptions = [name for name in ALEXNET if optional_path(root, name)]
    levels = [f"{name}/{severity}" for name in corruptions or ["fog"] for severity in SEVERITIES]
    missing = [level for level in levels if not os.path.isdir(f"{root}/{level}")]
    if others := [name for name in subfolders(root) if name not in ALEXNET] or missing:
        problem = "lacks" if others is missing else "is no folder of ImageNet-C: it holds"
        raise ValueError(f"{root} {problem} {short_list(others)}; unpack all corruptions and severities, or remove it")
    return corruptions


def found_sets(place: str) -> dict[str, str]:
    """Prefix of metrics -> path of each shifted set, and of ReaL's labels, in ImageNet's folder or beside it."""
    folders = (place, os.path.dirname(os.path.abspath(place))) if place else ()
    paths: dict[str, str] = {}
    for prefix, name in {"real": REAL, **FOLDERS, "c": CORRUPTED}.items():
        if path := next(filter(None, (optional_path(folder, name) for folder in folders)), ""):
            paths[prefix] = path
    return paths


def open_shifted(name: str, root: str, space: Workspace, limit: int | None = None) -> ImageSet:
    """The images of a set in FOLDERS, or of one severity of ImageNet-C, at most `limit`; opened once for a run."""
    folder = f"{root}/images" if name == "objectnet" else root
    return space.opened.get(f"{name}:{root}", "val", lambda url, _: open_class_folders(url, folder), limit)


def head_classes(images: ImageSet, known: Sequence[str]) -> np.ndarray:
    """The classifier's class (K,) of each class folder of a set.

    V2 names folders by class numbers, all other sets by the names of the classes, ImageNet's WordNet ids. known: names
    of the classifier's classes; where the folders have these, digits in them are no class numbers. Raises ValueError
    for folders that are none of these.
    """
    number_of = {name: number for number, name in enumerate(known)}
    if not number_of.keys() >= set(images.classes) and all(name.isdecimal() for name in images.classes):
        number_of = {name: int(name) for name in images.classes if int(name) < len(known)}
    numbers = np.array([number_of.get(name, -1) for name in images.classes])
    unknown = [name for name in images.classes if name not in number_of]
    if unknown:
        raise ValueError(
            f"{images.url}: {len(unknown)} of its {len(images.classes)} class folders, {unknown[0]!r} first, are no "
            f"classes of the head, which knows {len(known)}, such as {known[0]!r}; train it on the same classes"
        )
    if same := [name for name, number in zip(images.classes, numbers, strict=True) if (numbers == number).sum() > 1]:
        raise ValueError(f"{images.url}: the class folders {short_list(same)} are of one class; keep one, or join them")
    return numbers


def real_labels(path: str, images: ImageSet, classes: int) -> list[list[int]]:
    """ReaL's labels of each of ImageNet's validation images, from 0 to `classes` - 1.

    The file lists them in the order of the numbers in ImageNet's file names. Raises ValueError for other labels, for
    images without such a number, or with one beyond the end of the list, and if no image has a label.
    """
    labels_by_number = read_json(path, MAX_TABLE, list[list[ClassNumber]])
    if wrong := [(number, label) for number, row in enumerate(labels_by_number) for label in row if label >= classes]:
        raise ValueError(
            f"{path}: `$[{wrong[0][0]}]` has the label {wrong[0][1]}, and the head knows {classes} classes; labels are "
            "numbers of ImageNet's 1000 classes: train the head on these"
        )
    matches = [re.search(r"_val_(\d+)", os.path.basename(images.path(index))) for index in range(len(images))]
    numbers = [int(match[1]) if match else 0 for match in matches]
    unlisted = [index for index, number in enumerate(numbers) if not 1 <= number <= len(labels_by_number)]
    if unlisted:
        raise ValueError(
            f"{path}: has {len(labels_by_number)} entries, and none for {images.path(unlisted[0])}; it is for "
            "ImageNet's own files, ILSVRC2012_val_00000001 and so on"
        )
    return [labels_by_number[number - 1] for number in numbers]


def objectnet_counterparts(root: str, images: ImageSet, classes: int) -> dict[int, int]:
    """ImageNet's class number, below `classes`, -> label of ObjectNet's class, from the files in ROOT/mappings.

    Raises ValueError, naming the file, if these cannot be read or do not fit each other.
    """
    titles_file, matches_file, places_file, texts_file = (os.path.join(root, "mappings", name) for name in MAPPINGS)

    def entry(table: Mapping[Any, Any], key: Any, file: str) -> Any:
        if key not in table:
            raise ValueError(f"{file} has no entry for {key!r}")
        return table[key]

    try:
        titles = read_json(titles_file, MAX_TABLE, dict[str, str])  # folder -> title of its class
        labels = {entry(titles, folder, titles_file): label for label, folder in enumerate(images.classes)}
        # ImageNet's classes are given by descriptions, in the order of the challenge and not of torchvision.
        challenge_numbers = {text: place for place, text in enumerate(read_text(texts_file, MAX_TABLE).splitlines())}
        places = read_json(places_file, MAX_TABLE, dict[ClassNumber, ClassNumber])
        imagenet_numbers = {place: number for number, place in places.items()}
        if len(imagenet_numbers) < len(places) or max(places, default=0) >= classes:
            problem = f"the classes 0 to {classes - 1} of the head, which must be ImageNet's, in another order"
            raise ValueError(f"{places_file} does not list {problem}")
        counterparts = {
            entry(imagenet_numbers, entry(challenge_numbers, text, texts_file), places_file): labels[title]
            for title, texts in read_json(matches_file, MAX_TABLE, dict[str, str]).items()
            if title in labels
            for text in texts.split("; ")
        }
        if not counterparts:
            raise ValueError(f"{matches_file} names none of {short_list(list(labels))}")
    except (OSError, ValueError) as error:
        raise ValueError(f"{images.url}: {' '.join(str(error).split())}; unpack ObjectNet again") from error
    return counterparts


@dataclass(frozen=True, kw_only=True, eq=False)
class AlteredImages:
    """ImageSource that alters the images of a set when they are read.

    name: identifies the alteration and its parameters. alter: (set, index) -> the altered image.
    """

    source: ImageSet
    name: str
    alter: Callable[[ImageSet, int], Image.Image]

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
    def changed(self) -> np.ndarray | None:
        return self.source.changed

    @property
    def contents(self) -> str:
        return self.source.contents


def alter_images(source: ImageSet, name: str, alter: Callable[[ImageSet, int], Image.Image]) -> ImageSet:
    """The set with each image altered when it is read; `name` is appended to its URL."""
    images = AlteredImages(source=source, name=name, alter=alter)
    return replace(source, url=f"{source.url}#{name}", images=images)


def crop_border(source: ImageSet, index: int) -> Image.Image:
    """An image of ObjectNet without its red border."""
    image = source.image(index)
    return image.crop((BORDER, BORDER, image.width - BORDER, image.height - BORDER))


def corrupted_crop(
    transform: EvalTransform,
    corruption: Corruption,
    severity: int,
    seeds: tuple[int, ...],
    source: ImageSet,
    index: int,
) -> Image.Image:
    """The evaluation crop of an image, corrupted. The noise depends only on `seeds` and the index of the image."""
    pixels = transform(source, index).permute(1, 2, 0).numpy()
    return corrupt(Image.fromarray(pixels), corruption, severity, RandomState([*seeds, index]))


@dataclass(frozen=True, kw_only=True)
class Shifts(Task):
    """Settings of the evaluation on shifted sets, mixed into those of the task that trains the classifier."""

    # Corruptions that are generated where there is no folder imagenet-c; an empty list for none.
    corruptions: Different[Corruption] = CORRUPTIONS
    images: PositiveInt = 5000  # validation images that are corrupted, evenly spread

    def reads(self, space: Workspace) -> Reads:
        reads = dict(super().reads(space))
        train, val = (space.images(split, open_set) for split in SPLITS)
        for prefix, path in found_sets(parse_url(space.data)[1]).items():
            name = os.path.basename(path)
            if prefix == "real":
                real_labels(path, val, len(train.classes))
                reads[name] = Path(path)
            elif prefix == "c":
                reads[name] = class_tree(url=path, split="val", root=path, classes=corruptions_in(path), notes=())
            else:
                reads[name] = images = open_shifted(prefix, path, space)
            if prefix == "objectnet":
                objectnet_counterparts(path, images, len(train.classes))
                reads |= {f"{name}/{file}": Path(path, "mappings", file) for file in MAPPINGS}
            elif prefix in FOLDERS:
                head_classes(images, train.classes)
        return reads

    def generated_images(self, val: int) -> int:
        """Number of images of the generated corruptions. val: number of validation images."""
        return len(self.corruptions) * len(SEVERITIES) * min(self.images, val)

    def plain(self, kind: type[PlainTask]) -> PlainTask:
        """The task that trains the classifier, with the same settings and without shifted sets."""
        return kind(**{field.name: getattr(self, field.name) for field in fields(kind)})

    def with_pass(self, work: Work, scale: Scale, images: int, kinds: int) -> Work:
        """`work` and a forward pass of `images` more, from which features of several kinds are stored."""
        part = feature_pass(scale, images, "generated corruptions")
        return replace(work, parts=(*work.parts, part), disk=work.disk + feature_bytes(scale.spec, images, kinds))


@dataclass(frozen=True, kw_only=True)
class ShiftedSets:
    """The shifted sets of an image set, and the classifier that is evaluated on them.

    export, kinds, transform: the network, and the features that the classifier reads. classes: names of its C classes.
    val: the clean validation images. logits: features of n images -> logits (n, C), or None in processes that do not
    hold the classifier.
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
    def val_features(self) -> FeatureSet:
        return self.extract(self.val, self.transform)

    def extract(self, images: ImageSet, transform: EvalTransform) -> FeatureSet:
        return extract(self.export, images, self.kinds, self.space, transform)

    def add_to(self, clean: Outcome) -> Outcome:
        """The outcome on clean validation images with the metrics of all shifted sets before its own."""
        place = parse_url(self.space.data)[1]
        metrics: dict[str, Metric] = {}
        facts: dict[str, Any] = {}
        warnings = list(clean.facts.get("warnings", ()))
        arrays = dict(clean.arrays)
        feature_sets = [self.val_features]
        for name, correct, features in self.evaluated_sets(place):
            facts[name] = dict(features.facts)
            feature_sets += [features] if features is not self.val_features else []
            if np.isnan(correct).all():
                warnings.append(f"no number for {name}: none of its {len(correct)} images has a class that counts")
            else:
                metrics[f"{name}_top1"] = top1_metric(correct)

        root = found_sets(place).get("c", "")
        wrong: dict[str, list[np.ndarray]] = {}
        skipped: dict[str, str] = {}
        for corruption, images, transform in self.corruptions(root):
            features = self.extract(images, transform)
            labels = head_classes(images, self.classes)[features.labels]
            correct = any_match(self.ranked(features)[:, :1], labels[:, None])
            is_wrong = np.full(len(images), np.nan)
            is_wrong[features.indices] = 1 - correct
            wrong.setdefault(corruption, []).append(is_wrong)
            skipped |= features.facts["skipped"]
            feature_sets.append(features)
        if wrong:
            errors = mean_errors(wrong)
            prefix = "c" if root else "generated"
            name = f"{prefix}_mce" if set(errors) == set(BENCHMARK) else f"{prefix}_mce_of{len(errors)}"
            metrics[name] = mce_metric(wrong)
            for corruption, values in errors.items():
                mean = 100 * float(np.mean(values))
                metrics[f"{prefix}_{corruption}_error"] = Metric(value=mean, higher_is_better=False)
            arrays[f"{prefix}_errors"] = np.array(list(errors.values()))
            facts[prefix] = {"corruptions": list(errors), "normalised by": "AlexNet's mean errors"}
            facts[prefix] |= {"skipped": skipped} if skipped else {}
            if len(self.classes) != ALEXNET_CLASSES:
                warnings.append(
                    f"{name} divides errors among {len(self.classes)} classes by AlexNet's among {ALEXNET_CLASSES}: do "
                    "not compare it with published ones"
                )
        all_facts = {**clean.facts, "shifted": facts} | ({"warnings": warnings} if warnings else {})
        spent = {name: clean.cost.get(name, 0) + value for name, value in cost(*feature_sets).items()}
        return replace(
            clean, metrics={**metrics, **clean.metrics}, arrays=arrays, facts=all_facts, cost={**clean.cost, **spent}
        )

    def evaluated_sets(self, place: str) -> Iterator[tuple[str, np.ndarray, FeatureSet]]:
        """Name, correctness (n,) and features of each set found for ImageNet's folder `place`, but not of ImageNet-C.

        Correctness is 0 or 1, and NaN for images that do not count.
        """
        found = found_sets(place)
        if path := found.get("real"):
            features = self.val_features
            labels = real_labels(path, self.val, len(self.classes))
            pairs = zip(self.ranked(features)[:, 0].tolist(), features.indices.tolist(), strict=True)
            correct = [float(best in labels[index]) if labels[index] else np.nan for best, index in pairs]
            yield "real", np.array(correct), features
        for name in [name for name in FOLDERS if name in found]:
            evaluate = self.evaluate_objectnet if name == "objectnet" else self.evaluate_set
            yield name, *evaluate(name, found[name])

    def evaluate_set(self, name: str, root: str) -> tuple[np.ndarray, FeatureSet]:
        """Correctness (n,) and features of a set whose classes are the classifier's, or some of them."""
        images = open_shifted(name, root, self.space, self.space.limit)
        features = self.extract(images, self.transform)
        numbers = head_classes(images, self.classes)
        if name in OWN_CLASSES:
            ranked, labels = self.ranked(features, among=numbers), features.labels
        else:
            ranked, labels = self.ranked(features), numbers[features.labels]
        return any_match(ranked[:, :1], labels[:, None]), features

    def evaluate_objectnet(self, name: str, root: str) -> tuple[np.ndarray, FeatureSet]:
        """Correctness (n,) and features of ObjectNet; only images of the classes that ImageNet has, too, count."""
        images = open_shifted(name, root, self.space, self.space.limit)
        counterparts = objectnet_counterparts(root, images, len(self.classes))
        features = self.extract(alter_images(images, "without-border", crop_border), self.transform)
        ranked = map_classes(self.ranked(features)[:, :1], counterparts)
        counts = np.isin(features.labels, list(counterparts.values()))
        return any_match(ranked, np.where(counts, features.labels, -1)[:, None]), features

    def corruptions(self, root: str) -> Iterator[tuple[str, ImageSet, EvalTransform]]:
        """Name of a corruption, its images of one severity, and their transform.

        root: folder of ImageNet-C; if it is "", corruptions of validation images are generated. In both cases images
        have the size of the crop and are not resized, which would blur their noise.
        """
        centre_crop = replace(self.transform, crop=1.0)
        if root:
            for corruption in corruptions_in(root):
                for severity in SEVERITIES:
                    images = open_shifted("c", f"{root}/{corruption}/{severity}", self.space, self.space.limit)
                    yield corruption, images, centre_crop
            return
        readable = self.val_features.indices
        chosen = readable[evenly_spaced(len(readable), min(self.shifts.images, len(readable)))]
        images = self.val.subset(chosen, "corrupted")
        for corruption in self.shifts.corruptions:
            for severity in SEVERITIES:
                seeds = (self.space.seed, CORRUPTIONS.index(corruption), severity)  # whatever else is generated
                name = f"{corruption}-{severity}-{self.transform.name}-seed{self.space.seed}"
                alter = partial(corrupted_crop, self.transform, corruption, severity, seeds)
                yield corruption, alter_images(images, name, alter), centre_crop

    def ranked(self, features: FeatureSet, among: np.ndarray | None = None) -> np.ndarray:
        """The five classes (n, 5) that the classifier ranks highest, or all if there are fewer; in every process.

        among: the classes (K,) to choose from; the results are then indices of this array.
        """

        def rank() -> np.ndarray | None:
            logits = self.logits(features)
            if logits is None:
                return None
            logits = logits if among is None else logits[:, torch.from_numpy(among)]
            return logits.topk(min(5, logits.shape[1]), dim=1).indices.numpy()

        return next(part for part in self.space.world.gather_results(rank) if part is not None)


def top1_metric(correct: np.ndarray) -> Metric:
    """Accuracy over the images that count. correct: (n,), NaN for an image that does not count."""
    counts, values = ~np.isnan(correct), np.nan_to_num(correct)

    def accuracy(weights: np.ndarray) -> dict[str, np.ndarray]:
        return {"": 100 * (weights @ values) / np.maximum(weights @ counts, 1)}

    value = 100 * float(values.sum() / counts.sum())
    return Metric(value=value, resampled=resampled(accuracy, len(correct))[""], resampled_units=len(correct))


def protocol_on_shifts(kind: type[Task], trained: Protocol, version: int, source: str, **shifts: Any) -> Protocol:
    """The protocol of the task `kind` that evaluates the classifiers of another protocol, with settings of `Shifts`."""
    settings = {field.name: getattr(trained.task, field.name) for field in fields(trained.task)}
    return Protocol(task=kind(**settings, **shifts), version=version, source=source)
