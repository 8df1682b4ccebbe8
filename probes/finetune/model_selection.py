"""Which epoch of a training is reported. Each is evaluated when it ends, so that no weights need to be kept.

last     the last one
holdout  the best on held-out training images, the first of equals
val      the best on the validation images that are reported, as in many papers: an optimistic number
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from engine.tasks import Metric
from imagesets.transforms import normalise
from probes.finetune.evaluate import Evaluator
from probes.finetune.settings import Select
from probes.finetune.trainer import Training, TrainState
from probes.scores import percent, prediction_arrays


@dataclass(frozen=True, kw_only=True)
class ModelSelection:
    """Evaluates epochs and selects the one to report."""

    select: Select
    val: Evaluator  # on the validation images
    held: Evaluator | None  # on the held-out training images
    mean: tuple[float, ...]  # (3,) of the image preparation
    std: tuple[float, ...]

    @property
    def by(self) -> str:
        """The images that rank epochs; with "last" their order is only recorded."""
        return "holdout" if self.select == "holdout" else "val"

    def __call__(self, training: Training) -> None:
        """Evaluate an epoch that has just ended; keep what the best and the last epoch get right."""
        evaluated, train_state = training.evaluated, training.train_state

        def network(pixels: Tensor) -> Tensor:
            with training.autocast():
                return evaluated(normalise(pixels.to(training.space.device), self.mean, self.std)).float()

        right = (self.held or self.val)(network)
        train_state.skipped["train" if self.held else "val"] |= right.unreadable
        earlier = max((entry[self.by] for entry in train_state.history), default=-1.0)
        entry = {"epoch": training.epoch, self.by: right.accuracy, "loss": training.losses[-1]}
        train_state.history.append(entry)
        is_best, is_last = entry[self.by] > earlier, training.epoch == training.settings.epochs
        if self.held and (is_best or is_last):
            right = self.val(network)
            train_state.skipped["val"] |= right.unreadable
        for name, wanted in (("best", is_best), ("last", is_last)):
            if wanted:
                kept = {"top1": right.top1, "top5": right.top5}
                kept |= {"predicted": right.predicted, "confidence": right.confidence}
                train_state.arrays |= {f"{name}_{what}": values for what, values in kept.items()}

    def metrics(self, train_state: TrainState) -> dict[str, Metric]:
        """Accuracies of the reported and of the last epoch."""
        found = {}
        for suffix, epoch in (("", "last" if self.select == "last" else "best"), ("_last", "last")):
            for top in ("top1", "top5"):
                right = train_state.arrays[f"{epoch}_{top}"]
                by_val = self.select == "val" and epoch == "best"
                found[f"{top}{suffix}"] = Metric(
                    value=percent(right[~np.isnan(right)]), per_image=right, chosen_on_val=by_val
                )
        return found

    def predictions(self, train_state: TrainState) -> dict[str, np.ndarray]:
        """Of the reported epoch, as results keep them; nothing of a training that began before they were kept."""
        epoch, arrays = "last" if self.select == "last" else "best", train_state.arrays
        if f"{epoch}_predicted" not in arrays:
            return {}
        values, images = arrays[f"{epoch}_predicted"], np.flatnonzero(~np.isnan(arrays[f"{epoch}_predicted"]))
        return prediction_arrays(values[images], arrays[f"{epoch}_confidence"][images], images, len(values))

    def facts(self, train_state: TrainState) -> dict[str, Any]:
        """JSON values: the rule, the best, the last and the reported epoch, and the accuracy of each."""
        history = train_state.history
        best, last = max(history, key=lambda entry: entry[self.by])["epoch"], history[-1]["epoch"]
        return {
            "selection": self.select,
            "epoch": last if self.select == "last" else best,
            "best_epoch": best,
            "last_epoch": last,
            "history": history,
        }
