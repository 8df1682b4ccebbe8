"""Linear heads on shifted and cleaned test sets of ImageNet: V2, ReaL, A, R, Sketch, ObjectNet and C.

Nothing is trained on these sets: the heads are those of a linear probe, trained once for both where a run has both;
robustness_finetune.py does the same for fine-tuned networks. The sets are looked for in ImageNet's folder and beside
it, under the names that they unpack to (probes/shifted.py). Where there is no imagenet-c, its corruptions are generated
from validation images, in metrics called generated_....
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.random import RandomState
from PIL import Image
from torch import Tensor

from checkpoints.frozen import FrozenExport, FrozenSpec
from engine.resampling import resampled
from engine.settings import Different, PositiveInt, Validated
from engine.tasks import Metric, Outcome, Protocol, Workspace
from engine.work import Scale, Work
from imagesets.selection import evenly
from imagesets.sets import ImageSet, parse_url
from imagesets.transforms import EvalTransform
from probes.corruptions import CORRUPTIONS, Corruption, corrupted
from probes.features.extract import FeatureSet, extract, transform_of
from probes.features.kinds import FeatureKind, feature_bytes, feature_pass
from probes.linear.probe import Probe
from probes.linear.sweep import Sweep
from probes.published import changed_protocol
from probes.scores import cost
from probes.shifted import (
    ALEXNET,
    BENCHMARK,
    CORRUPTED,
    FOLDERS,
    LEVELS,
    REAL,
    altered,
    any_match,
    classes_of,
    folder_of,
    mapped,
    mce,
    objectnet_counterparts,
    real_labels,
    tree,
    without_border,
)
from probes.tasks.linear import PROTOCOLS as LINEAR
from probes.tasks.linear import Linear

ALEXNET_CLASSES = 1000  # among which AlexNet's errors were made
OWN_CLASSES = ("a", "r")  # sets whose images are classified among their own classes alone


@dataclass(frozen=True, kw_only=True)
class Shifts(Validated):
    """What a classifier is evaluated on besides."""

    # Generated where imagenet-c is not there; none: an empty list.
    corruptions: Different[Corruption] = CORRUPTIONS
    images: PositiveInt = 5000  # validation images that are corrupted, evenly spread

    def generated(self, val: int) -> int:
        """Images of the generated corruptions, of so many validation images."""
        return len(self.corruptions) * LEVELS * min(self.images, val)

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

        def found() -> np.ndarray | None:
            logits = self.logits(features)
            if logits is None:
                return None
            logits = logits if own is None else logits[:, torch.from_numpy(own)]
            return logits.topk(min(5, logits.shape[1]), dim=1).indices.numpy()

        return next(part for part in self.space.world.gather_results(found) if part is not None)


@dataclass(frozen=True, kw_only=True)
class Robustness(Shifts, Linear):
    """A linear probe's settings, and what it is evaluated on besides."""

    WITHOUT_VALUES: ClassVar[tuple[str, ...]] = ("c_*", "generated_*")  # of corrupted images
    COST: ClassVar[float] = 3.0  # after the linear probe, whose training it shares

    @property
    def linear(self) -> Linear:
        """The linear probe alone, whose training is the same."""
        return Linear(**{field.name: getattr(self, field.name) for field in fields(Linear)})

    def probe(self, export: FrozenExport, space: Workspace) -> "RobustnessProbe":
        plain = Probe.of(self.linear, export, space)
        values = {field.name: getattr(plain, field.name) for field in fields(Probe)}
        return RobustnessProbe(**values, shifts=self)

    def summary(self, spec: FrozenSpec, images: Mapping[str, int]) -> dict[str, Any]:
        summary = super().summary(spec, images)
        return summary | {"forward passes": summary["forward passes"] + self.generated(images["val"])}

    def cost(self, scale: Scale) -> Work:
        return self.with_pass(super().cost(scale), scale, self.generated(scale.images["val"]), len(self.kinds))


@dataclass(frozen=True, kw_only=True)
class RobustnessProbe(Probe):
    """A linear probe whose outcome is on shifted sets, too."""

    shifts: Robustness

    def outcome(self, sweep: Sweep, spent: bool = True) -> Outcome:
        head = sweep.own_chosen().get("top1")

        def logits(features: FeatureSet) -> Tensor | None:
            if head is None:
                return None
            blocks = self.table(features, head.readouts).blocks(np.arange(len(features)))
            return torch.cat([head.logits(inputs)[:, 0].cpu() for inputs, _ in blocks])

        sets = ShiftedSets(
            shifts=self.shifts,
            export=self.export,
            kinds=self.task.kinds,
            transform=transform_of(self.export, self.space, self.task),
            space=self.space,
            classes=self.train.classes,
            val=self.val,
            logits=logits,
        )
        return sets.added_to(super().outcome(sweep, spent))


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


SOURCE = (
    "V2 (Recht et al. 2019), ReaL (Beyer et al. 2020), A (Hendrycks et al. 2021), R, Sketch (Wang et al. 2019), "
    "ObjectNet (Barbu et al. 2019), C with AlexNet's errors (Hendrycks and Dietterich 2019), by the rules of "
    "facebookresearch/dinov2 eval/linear.py and dinov3 eval/metrics/imagenet_c.py; ours: the generated corruptions"
)


def evaluated_as(name: str) -> Protocol:
    """The robustness of a linear protocol's heads."""
    settings = {field.name: getattr(LINEAR[name].task, field.name) for field in fields(Linear)}
    return Protocol(task=Robustness(**settings), version=2, source=f"heads of {name} on {SOURCE}")


PROTOCOLS = {
    "robustness@dinov2": evaluated_as("linear@dinov2"),
    "robustness@ibot_base": evaluated_as("linear_sgd@ibot_base"),
    "robustness@cached": evaluated_as("linear_sgd@ibot_base_cached"),
}
PROTOCOLS["robustness@smoke"] = changed_protocol(
    PROTOCOLS["robustness@cached"],
    version=1,
    source="ours: robustness@cached with one generated corruption of a few images, to try the machinery",
    corruptions=("contrast",),
    images=100,
)
SUITES = {
    "smoke": ("robustness@smoke",),
    "full": ("robustness@ibot_base",),
    "today": ("robustness@dinov2",),
    "everything": ("robustness@dinov2", "robustness@ibot_base", "robustness@cached"),
}
