"""Does a pretraining learn at all? At the end of every epoch, on its last batch, the losses are compared with those of
a prediction that ignores the image, and the encoder's features with each other.

B images, D width.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.precision import autocast
from pretrain.method import Method, TrainProgress
from pretrain.parts.batch_norm import in_eval_mode
from pretrain.recipe import Recipe

MIN_UPDATES = 200  # updates before the first warning: an untrained network looks like a broken one
MAX_ACCURACY_DROP = 1.0  # percentage points that a monitored accuracy may fall below that of the initial checkpoint
MEAN_WEIGHT = 0.02  # weight of the newest update in the running mean of the losses, which covers about 50 updates
MAX_BASELINE_SHARE = 0.98  # a loss above this share of the baseline's has learned nothing
MIN_SPREAD = 0.005  # spread of features below which the encoder has collapsed
MIN_IMAGES = 8  # smallest batch that is assessed
MAX_IMAGES = 256  # of the batch, for which features are computed
TINY = 1e-300  # smallest value of a denominator


@dataclass(kw_only=True)
class Learning:
    """Running means of the logged values, and the warnings at the end of the last epoch."""

    means: dict[str, float] = field(default_factory=dict)  # name of a logged value -> mean over the newest updates
    warnings: dict[str, str] = field(default_factory=dict)  # subject -> what is wrong
    start: dict[str, float] = field(default_factory=dict)  # the monitor's values for the initial checkpoint

    def add(self, step: int, logs: Mapping[str, float]) -> None:
        """Take in the logs of update `step`."""
        weight = max(MEAN_WEIGHT, 1.0 / (step + 1))
        for name, value in logs.items():
            mean = self.means.get(name, value)
            self.means[name] = mean + weight * (value - mean)

    def assess(
        self, method: Method, recipe: Recipe, views: Mapping[str, Tensor], progress: TrainProgress, precision: str
    ) -> dict[str, float]:
        """Measure on `views`, the last batch of an epoch, and replace the warnings. Returns values for the log.

        progress: after the epoch. Neither changes the method, nor draws random numbers, nor communicates.
        """
        self.warnings = {}
        first_view = next(iter(views.values()))
        if len(first_view) < MIN_IMAGES:
            return {}
        with torch.no_grad(), autocast(first_view.device.type, precision):
            baselines = {name: float(value) for name, value in method.baseline_loss(views).items()}
            features = features_of(method, views)
        spread, rank = (1.0, 1.0) if features is None else spread_and_rank(features)
        if progress.step >= MIN_UPDATES and progress.time >= getattr(recipe.schedule, "warmup", 0):
            advice = f"try lr (peak now {recipe.peak:.3g}) 3 to 10 times lower{method.remedy}"
            self.warnings = dict(self.problems(baselines, spread, rank, advice))
        values = {f"trivial_{name}": value for name, value in baselines.items()}
        return values if features is None else values | {"feature_spread": spread, "feature_rank": rank}

    def problems(
        self, baselines: Mapping[str, float], spread: float, rank: float, advice: str
    ) -> Iterator[tuple[str, str]]:
        """Pairs of a subject and a warning: the sign that nothing is learned, and what to change."""
        for name, value in baselines.items():
            if (mean := self.means[name]) >= MAX_BASELINE_SHARE * value:
                label = name if name == "loss" else f"loss {name}"
                comparison = f"the {label} is {mean:.4g}, and {value:.4g} for a prediction that ignores the image"
                yield name, f"{comparison}: nothing is learned; {advice}; or higher, if the loss never moved"
        if spread < MIN_SPREAD:
            alike = f"the features of all images are the same, to {spread:.1g} of their length (rank {rank:.1f})"
            yield "features", f"{alike}: the encoder has collapsed; {advice}"

    def fallen(self, values: Mapping[str, float]) -> Iterator[str]:
        """Warnings for monitored accuracies that have fallen below those of the initial checkpoint."""
        for name, before in self.start.items():
            if values.get(name, before) < before - MAX_ACCURACY_DROP:
                yield (
                    f"{name} is {values[name]:.2f}, and was {before:.2f} at the checkpoint that this training began "
                    "with: lower lr, or let the new heads learn first with --freeze-first-epochs"
                )


def features_of(method: Method, views: Mapping[str, Tensor]) -> Tensor | None:
    """Features (B, D) of the first encoder on one view of each image, pooled as in its source; None if no view fits."""
    vit = next(iter(method.encoders().values())).vit
    pictures = pictures_of(views, vit.spec.side)
    if pictures is None:
        return None
    with in_eval_mode(vit):
        (tokens,) = vit(pictures[:MAX_IMAGES])
    patches = vit.spec.grid[0] * vit.spec.grid[1]
    return tokens[:, 0] if vit.spec.pool == "cls" else tokens[:, tokens.shape[1] - patches :].mean(dim=1)


def pictures_of(views: Mapping[str, Tensor], size: int) -> Tensor | None:
    """The first view (B, 3, S, S) of `size` x `size` pixels, or None."""
    for view in views.values():
        if view.ndim >= 4 and view.shape[-3:] == (3, size, size):
            return view.reshape(len(view), -1, 3, size, size)[:, 0]
    return None


def spread_and_rank(features: Tensor) -> tuple[float, float]:
    """Spread and effective rank of features (B, D).

    Spread: their standard deviation divided by their length, 0 if all are equal. Effective rank: the exponential of the
    entropy of the normalised variances (Roy and Vetterli 2007, there of the singular values).
    """
    features = features.double()
    centred = features - features.mean(dim=0)
    spread = (centred.square().sum() / features.square().sum().clamp(min=TINY)).sqrt()
    variances = torch.linalg.svdvals(centred).square()
    shares = variances / variances.sum().clamp(min=TINY)
    return spread.item(), torch.special.entr(shares).sum().exp().item()
