"""Whether a training learns at all: its losses against those of a prediction that ignores the image, and how far the
encoder tells images apart. Assessed at the end of every epoch, on its last batch; an update costs a few numbers in
Python.

B images, D width.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.precision import autocast
from pretrain.method import Method, TrainProgress
from pretrain.parts.batch_norm import in_eval_mode
from pretrain.recipe import Recipe

FEWEST = 200  # updates before anything is said: an untrained network looks like a broken one
SHARE = 0.02  # of the newest update in a running mean of the losses, so that some 50 count
NEAR = 0.98  # of a trivial loss: a loss from there on has learned nothing
COLLAPSED = 0.005  # spread of features below which all images are the same to the encoder
IMAGES = (8, 256)  # of a batch from which anything follows, and whose features are compared at most
TINY = 1e-300  # in a denominator


@dataclass(kw_only=True)
class Learning:
    """means: of each log, over the newest updates. warnings: subject -> what is wrong, as of the last epoch's end."""

    means: dict[str, float] = field(default_factory=dict)
    warnings: dict[str, str] = field(default_factory=dict)

    def state(self) -> dict[str, Any]:
        """What a training state keeps of it, as JSON."""
        return {"means": dict(self.means), "warnings": dict(self.warnings)}

    def add(self, step: int, logs: Mapping[str, float]) -> None:
        """The logs of update `step`."""
        share = max(SHARE, 1.0 / (step + 1))
        for name, value in logs.items():
            before = self.means.get(name, value)
            self.means[name] = before + share * (value - before)

    def assess(
        self, method: Method, recipe: Recipe, views: Mapping[str, Tensor], progress: TrainProgress, precision: str
    ) -> dict[str, float]:
        """Measure on `views`, the last ones of an epoch, and replace the warnings. Returns values for the log.

        progress: after the epoch. Changes nothing in the method, draws nothing and meets no other process.
        """
        self.warnings, first = {}, next(iter(views.values()))
        if len(first) < IMAGES[0]:
            return {}
        with torch.no_grad(), autocast(first.device.type, precision):
            trivial = {name: float(value) for name, value in method.trivial(views).items()}
            features = features_of(method, views)
        spread, rank = (1.0, 1.0) if features is None else spread_and_rank(features)
        if progress.step >= FEWEST and progress.time >= getattr(recipe.schedule, "warmup", 0):
            advice = f"try lr (peak now {recipe.peak:.3g}) 3 to 10 times lower{method.remedy}"
            self.warnings = dict(self.doubts(trivial, spread, rank, advice))
        found = {f"trivial_{name}": value for name, value in trivial.items()}
        return found if features is None else found | {"feature_spread": spread, "feature_rank": rank}

    def doubts(
        self, trivial: Mapping[str, float], spread: float, rank: float, advice: str
    ) -> Iterator[tuple[str, str]]:
        """Subject -> why this is no learning, and what to change."""
        for name, value in trivial.items():
            if (mean := self.means[name]) >= NEAR * value:
                label = name if name == "loss" else f"loss {name}"
                comparison = f"the {label} is {mean:.4g}, and {value:.4g} for a prediction that ignores the image"
                yield name, f"{comparison}: nothing is learned; {advice}; or higher, if the loss never moved"
        if spread < COLLAPSED:
            alike = f"the features of all images are the same, to {spread:.1g} of their length (rank {rank:.1f})"
            yield "features", f"{alike}: the encoder has collapsed; {advice}"


def features_of(method: Method, views: Mapping[str, Tensor]) -> Tensor | None:
    """What the first encoder says of one view of each image, as its source reads it (B, D); None without such views."""
    vit = next(iter(method.encoders().values())).vit
    pictures = pictures_of(views, vit.spec.image_size)
    if pictures is None:
        return None
    with in_eval_mode(vit):
        (tokens,) = vit(pictures[: IMAGES[1]])
    patches = vit.spec.grid[0] * vit.spec.grid[1]
    return tokens[:, 0] if vit.spec.pool == "cls" else tokens[:, tokens.shape[1] - patches :].mean(dim=1)


def pictures_of(views: Mapping[str, Tensor], size: int) -> Tensor | None:
    """The first view (B, 3, S, S) of `size` x `size` pixels."""
    for view in views.values():
        if view.ndim >= 4 and view.shape[-3:] == (3, size, size):
            return view.reshape(len(view), -1, 3, size, size)[:, 0]
    return None


def spread_and_rank(features: Tensor) -> tuple[float, float]:
    """Of features (B, D): their standard deviation as a share of their length, 0 where all are the same; and how many
    directions they differ in, exp of the entropy of the shares of variance (Roy and Vetterli 2007)."""
    features = features.double()
    centred = features - features.mean(dim=0)
    spread = (centred.square().sum() / features.square().sum().clamp(min=TINY)).sqrt()
    variances = torch.linalg.svdvals(centred).square()
    shares = variances / variances.sum().clamp(min=TINY)
    return spread.item(), torch.special.entr(shares).sum().exp().item()
