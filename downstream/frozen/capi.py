"""CAPI's evaluation of frozen patches (facebookresearch/capi 98b4fa1, eval_segmentation.py): k-NN, logistic regression.

Images are squashed to squares, features standardised by the training patches. Training images that are held out choose
the hyperparameter; then all training patches predict the validation patches. The k-NN is `dense_knn@capi`, which votes
on every pixel of a patch; the logistic regression is `segmentation_linear@capi`, which gives a patch one label.

M training patches, Q queries, m rows of either, D width, K classes, P pixels of a patch.
"""

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from PIL import Image
from scipy.optimize import minimize
from torch import Tensor

from checkpoints.frozen import FrozenExport, FrozenSpec
from downstream.data.listing import IGNORED
from downstream.frozen.patches import (
    ROWS_READ,
    Evaluated,
    PatchFile,
    SquareTask,
    most_frequent,
    nearest_patches,
    read_labelled_image,
    unpatchify_labels,
)
from downstream.frozen.task import UsableScenes, best_choice, class_areas, normalised_tensor, round_up_to_patch
from downstream.metrics.scores import scores
from engine.neighbours import MIN_NORM, Prepare
from engine.progress import Progress, with_progress
from engine.rows import ChosenRows, Rows, release_pages, row_slices
from engine.settings import OneOrMoreDifferent, PositiveFloat, PositiveInt, ProperFraction
from engine.sweeps import edge_warnings
from engine.tasks import Workspace
from engine.work import Part, Scale, Work

MAX_LABELS = 1 << 22  # labels of neighbours' pixels that a vote reads at once
MAX_LOGITS = 1 << 22  # logits that a logistic regression holds at once
# logspace(-6, 5, 8)
STRENGTHS = (
    1e-06,
    3.72759372031494e-05,
    0.00138949549437314,
    0.0517947467923121,
    1.93069772888325,
    71.9685673001151,
    2682.69579527973,
    100000.0,
)
Distance = Literal["cosine", "L2"]
Choice = Mapping[str, Any]  # hyperparameter -> value


@dataclass(frozen=True, kw_only=True)
class PatchRows:
    """Some patches of a file, whose features are standardised when they are read."""

    file: PatchFile
    rows: np.ndarray  # (M,) of the file
    mean: np.ndarray  # (D,)
    std: np.ndarray  # (D,)

    @cached_property
    def features(self) -> ChosenRows:
        """The features (M, D) float32 as stored in the file."""
        return ChosenRows(self.file.features, self.rows)

    def standardised(self, part: slice = slice(None)) -> np.ndarray:
        """Standardised features (m, D) float32."""
        values = ((self.features[part] - self.mean) / self.std).astype(np.float32)
        release_pages(self.features)
        return values


def mean_and_std(features: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation (D,) of some rows (M,) of a file; 1 in place of a constant feature's deviation."""
    total, squares = np.zeros(features.shape[1]), np.zeros(features.shape[1])
    parts = [*row_slices(len(rows), ROWS_READ)]
    for part in with_progress(parts, "mean of the patches", "blocks"):
        total += features[rows[part]].sum(0, dtype=np.float64)
        release_pages(features)
    mean = total / len(rows)
    for part in with_progress(parts, "deviation of the patches", "blocks"):
        squares += np.square(features[rows[part]] - mean).sum(0)
        release_pages(features)
    std = np.sqrt(squares / len(rows))
    return mean, np.where(std > 10 * np.finfo(np.float64).eps * np.maximum(np.abs(mean), 1), std, 1.0)


def patch_areas(predicted: np.ndarray, queries: PatchRows) -> np.ndarray:
    """Areas (n, K+1, 3) of whole images, whose patches are `queries`, from predicted labels (Q, P) or (Q, 1).

    The last class stands for label 255: predicting it counts as a class that is always wrong, as in scikit-learn.
    """
    file, areas = queries.file, []
    classes, ignored = file.classes, file.classes if file.ignored == IGNORED else file.ignored
    for image in row_slices(len(queries.rows), file.per_image):
        labels = np.asarray(file.pixels[queries.rows[image]])
        guess, truth = (np.where(values == IGNORED, classes, values) for values in (predicted[image], labels))
        areas.append(class_areas(np.broadcast_to(guess, truth.shape), truth, classes + 1, (ignored,)))
    return np.stack(areas)


class CapiTask(SquareTask):
    """Base of both evaluations: how images are prepared and the hyperparameter is chosen."""

    holdout: float  # share of the training images that is held out to choose; a setting that both define

    @property
    def choices(self) -> list[Choice]:
        """Hyperparameters to try, in the source's order: the first of equally good ones is chosen."""
        raise NotImplementedError

    def predict(
        self, choices: Sequence[Choice], memory: PatchRows, queries: PatchRows, space: Workspace
    ) -> Iterator[tuple[Choice, np.ndarray]]:
        """Yield each choice with its predictions for the queries from the labelled patches `memory`, in any order.

        Every process gets all predictions: labels (Q, P) uint8, or (Q, 1) for one label per patch.
        """
        raise NotImplementedError

    def transform_name(self, spec: FrozenSpec) -> str:
        return f"squashed{round_up_to_patch(self.side, spec)}_bicubic"

    def read_square(self, export: FrozenExport, images: UsableScenes, position: int) -> tuple[Tensor, Tensor]:
        size = (round_up_to_patch(self.side, export.spec),) * 2
        image, labels = read_labelled_image(images.scenes, int(images.indices[position]))
        small = np.asarray(Image.fromarray(labels).resize(size, Image.Resampling.NEAREST))
        squashed = image.resize(size, Image.Resampling.BICUBIC)
        return normalised_tensor(squashed, export.mean, export.std), torch.from_numpy(small.copy())

    def evaluate(self, memory: PatchFile, queries: PatchFile, space: Workspace) -> Evaluated:
        images = len(memory) // memory.per_image
        count = int(self.holdout * images)
        if not count:
            raise ValueError(f"holdout={self.holdout:g} of {images} training images holds out none; raise holdout")
        order = np.random.RandomState(space.seed).permutation(images)
        held_out, learnt = (memory.rows_of_images(np.sort(part)) for part in (order[:count], order[count:]))
        mean, std = mean_and_std(memory.features, learnt)
        patch_rows = partial(PatchRows, mean=mean, std=std)
        is_labelled = memory.labels != memory.ignored

        fitted = patch_rows(file=memory, rows=learnt[is_labelled[learnt]])
        selection = patch_rows(file=memory, rows=held_out)
        miou = {}  # number of a choice -> mIoU on the held-out images
        for choice, labels in self.predict(self.choices, fitted, selection, space):
            miou[self.choices.index(choice)] = scores(patch_areas(labels, selection))["mIoU"]
        tried = [{**choice, "mIoU": miou[number]} for number, choice in enumerate(self.choices)]
        best = self.choices[best_choice([entry["mIoU"] for entry in tried], space)]

        labelled = patch_rows(file=memory, rows=np.flatnonzero(is_labelled))
        evaluated = patch_rows(file=queries, rows=np.arange(len(queries)))
        ((_, labels),) = self.predict([best], labelled, evaluated, space)

        def predict(position: int) -> np.ndarray:
            rows, grid = queries.rows_of_images(np.array([position])), round(queries.per_image**0.5)
            of_pixels = np.broadcast_to(labels[rows], (queries.per_image, queries.pixels.shape[1]))
            return unpatchify_labels(of_pixels, (grid, grid))

        facts: dict[str, Any] = {"patches": len(labelled.rows), **best, "tried": tried}
        if warnings := edge_warnings(tried, best, "mIoU"):
            facts["warnings"] = warnings
        return Evaluated(patch_areas(labels, evaluated), facts, predict)


def prepare_search(memory: PatchRows, queries: PatchRows, distance: Distance) -> Prepare:
    """How to read vectors whose largest inner product belongs to the nearest patch.

    Cosine: standardised rows of length one. L2: a standardised row of the memory with -|row|^2 / 2 appended, and one of
    the queries with 1, so that the inner product is (|query|^2 - |query - row|^2) / 2.
    """

    def prepare(rows: Rows, part: slice) -> np.ndarray:
        is_query = rows is queries.features
        values = (queries if is_query else memory).standardised(part)
        if distance == "cosine":
            return values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), MIN_NORM)
        appended = np.ones(len(values)) if is_query else -np.square(values).sum(1, dtype=np.float64) / 2
        return np.concatenate([values, appended[:, None]], axis=1).astype(np.float32)

    return prepare


@dataclass(frozen=True, kw_only=True)
class CapiKnn(CapiTask):
    """Settings of CAPI's k-NN on standardised patches."""

    COST: ClassVar[float] = 3.0  # an image of each split at 224 x 224, and three searches
    LAYOUT: ClassVar[str] = "ade20k"
    KEY: ClassVar[str] = "dense_knn"

    side: PositiveInt = 224  # side in pixels of the squares that images are squashed to, up to a multiple of the patch
    k: OneOrMoreDifferent[PositiveInt] = (1, 3, 10, 30)  # numbers of neighbours to choose from
    distances: OneOrMoreDifferent[Distance] = ("cosine", "L2")  # distances to choose from
    holdout: ProperFraction = 0.1  # share of the training images that is held out for this choice

    @property
    def choices(self) -> list[Choice]:
        return [{"k": k, "distance": distance} for k, distance in product(self.k, self.distances)]

    def cost(self, scale: Scale) -> Work:
        self.check_network(scale.spec)
        train, val = (self.patch_count(scale.spec) * scale.images[split] for split in ("train", "val"))
        held_out = self.holdout * train
        pairs = len(self.distances) * held_out * (train - held_out) + val * train
        passes = [self.extraction_part(scale, split) for split in scale.images]
        return self.search_work(scale, passes, train, pairs, max(self.k))

    def predict(
        self, choices: Sequence[Choice], memory: PatchRows, queries: PatchRows, space: Workspace
    ) -> Iterator[tuple[Choice, np.ndarray]]:
        pixels = memory.file.pixels
        for distance in dict.fromkeys(choice["distance"] for choice in choices):  # one search for all k
            same_distance = [choice for choice in choices if choice["distance"] == distance]
            largest = max(choice["k"] for choice in same_distance)
            prepare = prepare_search(memory, queries, distance)
            _, nearest = nearest_patches(memory.features, queries.features, largest, space, prepare)
            for choice in same_distance:
                neighbours = memory.rows[nearest[:, : choice["k"]]]  # (Q, k) rows of the file
                parts = [*row_slices(len(neighbours), max(1, MAX_LABELS // (choice["k"] * pixels.shape[1])))]
                # At each pixel of a patch the most frequent of the neighbours' labels there.
                shown = with_progress(parts, f"votes of {choice['k']} neighbours", "blocks")
                labels = [most_frequent(pixels[neighbours[part]], axis=1) for part in shown]
                yield choice, np.concatenate(labels)


@dataclass(frozen=True, kw_only=True)
class CapiLogistic(CapiTask):
    """Settings of CAPI's logistic regression on standardised patches, each labelled with its most frequent class."""

    COST: ClassVar[float] = 20.0  # an image of each split at 224 x 224, and nine fits
    LAYOUT: ClassVar[str] = "ade20k"
    KEY: ClassVar[str] = "segmentation_linear"

    side: PositiveInt = 224  # side in pixels of the squares that images are squashed to, up to a multiple of the patch
    strengths: OneOrMoreDifferent[PositiveFloat] = STRENGTHS  # C of  C sum CE + |W|^2 / 2  to choose from
    iterations: PositiveInt = 1000  # largest number of iterations of L-BFGS
    holdout: ProperFraction = 0.1  # share of the training images that is held out for this choice

    @property
    def choices(self) -> list[Choice]:
        return [{"C": strength} for strength in self.strengths]

    def cost(self, scale: Scale) -> Work:
        self.check_network(scale.spec)
        width, fits = scale.spec.width, float(len(self.strengths) + 1)
        train, val = (self.patch_count(scale.spec) * scale.images[split] for split in ("train", "val"))
        parts = [
            *(self.extraction_part(scale, split) for split in scale.images),
            # L-BFGS stops after about half of the allowed iterations.
            Part(kind="heads", count=fits * self.iterations / 2, flops=4.0 * width * scale.classes * train),
        ]
        return self.work(scale, parts, train + val, 4.0 * width * train)

    def predict(
        self, choices: Sequence[Choice], memory: PatchRows, queries: PatchRows, space: Workspace
    ) -> Iterator[tuple[Choice, np.ndarray]]:
        own_choices = range(space.world.rank, len(choices), space.world.size)  # numbers of those that this process fits

        def predict_own() -> dict[int, np.ndarray]:
            """Number of a choice -> predicted labels (Q, 1)."""
            if not own_choices:
                return {}
            values, labels = np.unique(memory.file.labels[memory.rows], return_inverse=True)
            features = torch.from_numpy(memory.standardised()).to(space.device)
            targets, classes = torch.from_numpy(labels).to(space.device), len(values)
            fits = {}
            with Progress("logistic regression", len(own_choices), "fits", parts=self.iterations) as progress:
                for done, number in enumerate(own_choices, 1):
                    strength = choices[number]["C"]
                    fits[number] = fit_logistic(features, targets, classes, strength, self.iterations, progress.advance)
                    progress.advance(done * self.iterations - progress.done)  # iterations that it did not need
            predicted = {number: np.empty((len(queries.rows), 1), np.uint8) for number in own_choices}
            for part in row_slices(len(queries.rows), ROWS_READ):
                standardised = queries.standardised(part)
                for number, (weights, biases) in fits.items():
                    predicted[number][part, 0] = values[(standardised @ weights.T + biases).argmax(1)]
            return predicted

        predicted = ChainMap(*space.world.gather_results(predict_own))
        yield from ((choice, predicted[number]) for number, choice in enumerate(choices))


def fit_logistic(
    features: Tensor,
    labels: Tensor,
    classes: int,
    strength: float,
    iterations: int = 1000,
    advance: Callable[[int], object] = lambda count: None,
) -> tuple[np.ndarray, np.ndarray]:
    """Minimise  C sum CE + |W|^2 / 2  over W and the biases, which are not penalised, by L-BFGS in float64.

    Args:
        features: (M, D) float32; read a few rows at a time, so that logits take little memory.
        labels: (M,) int64, below K = `classes`.
        strength: C.
        advance: called with 1 after each iteration.

    Returns:
        Weights (K, D) and biases (K,).
    """
    width, rows = features.shape[1], MAX_LOGITS // classes
    device = features.device

    def objective(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        """Loss and gradient, divided by C M so that the solver's tolerances mean the same at every C."""
        weights = torch.from_numpy(parameters).to(device).view(classes, width + 1)  # the last column: biases
        loss, gradient = 0.0, torch.zeros_like(weights)
        for start in range(0, len(features), rows):
            batch, targets = features[start : start + rows].double(), labels[start : start + rows]
            logits = batch @ weights[:, :-1].T + weights[:, -1]
            log_probabilities = logits.log_softmax(dim=1)
            loss -= float(log_probabilities.gather(1, targets[:, None]).sum())
            error = log_probabilities.exp()
            error[torch.arange(len(targets), device=device), targets] -= 1
            gradient[:, :-1] += error.T @ batch
            gradient[:, -1] += error.sum(0)
        scale = 1.0 / (strength * len(features))
        loss = loss / len(features) + scale * float(weights[:, :-1].square().sum()) / 2
        gradient = gradient / len(features)
        gradient[:, :-1] += scale * weights[:, :-1]
        return loss, gradient.flatten().cpu().numpy()

    options = {"maxiter": iterations, "maxfun": 4 * iterations, "ftol": 1e-15, "gtol": 1e-10, "maxcor": 20}
    start = np.zeros(classes * (width + 1))
    solution = minimize(
        objective, start, jac=True, method="L-BFGS-B", options=options, callback=lambda weights: advance(1)
    )
    weights = solution.x.reshape(classes, width + 1)
    return weights[:, :-1], weights[:, -1]
