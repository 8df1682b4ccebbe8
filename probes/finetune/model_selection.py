"""Which epoch of a training is reported. Each is evaluated when it ends, so that its weights alone need to be kept.

last     the last one
holdout  the best on held-out training images, the first of equals
val      the best on the validation images that are reported, as in many papers: an optimistic number

An epoch's evaluation is shared by processes and threads. N images, B images of a batch, S side in pixels, C classes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.tasks import Metric, Workspace
from imagesets.sets import ImageSet
from imagesets.transforms import EvalTransform, normalise
from probes.features.extract import DecodedBatch, Reader, batch_spans, for_each_batch, forward_batch
from probes.finetune.settings import Select
from probes.finetune.trainer import Training
from probes.scores import Hits, hits_of, log_likelihood, percent, prediction_arrays

Network = Callable[[Tensor], Tensor]  # (B, 3, S, S) uint8 on the CPU -> logits (B, C)


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Evaluates networks on one set of images."""

    image_set: ImageSet
    transform: EvalTransform
    space: Workspace  # its `workers` are threads on a CPU, loader processes otherwise

    def __call__(self, network: Network) -> tuple[Hits, dict[str, str]]:
        """The hits on all images (N,), float32 and NaN where unreadable, and path -> why; in every process. Raises
        UnreadableImage unless `space.skip_bad`."""
        count, world = len(self.image_set), self.space.world
        batches = batch_spans(count, forward_batch(self.space.device))
        own = {number: batches[number] for number in range(world.rank, len(batches), world.size)}
        arrays = np.full((5, count), np.nan, np.float32)
        unreadable: dict[str, str] = {}

        def evaluate() -> dict[int, tuple[np.ndarray, dict[int, str]]]:
            """Number of each own batch -> its hits (5, B), the arrays of `Hits`, and its unreadable images."""
            parts = {}

            def evaluate_batch(loaded: DecodedBatch, span: range) -> None:
                parts[loaded.number] = self.hits(network, loaded, span), loaded.unreadable

            reader = Reader(self.image_set, self.transform, own, self.space.skip_bad)
            for_each_batch(reader, evaluate_batch, self.space.device, self.space.workers)
            return parts

        for part in world.gather_results(evaluate):
            for number, (hits, bad) in part.items():
                arrays[:, batches[number]] = hits
                unreadable |= {self.image_set.path(index): reason for index, reason in bad.items()}
        return Hits(*arrays), unreadable

    def hits(self, network: Network, loaded: DecodedBatch, span: range) -> np.ndarray:
        with torch.inference_mode():
            logits = network(loaded.pixels)
        labels = torch.tensor(self.image_set.labels[span.start : span.stop], device=logits.device)
        hits = np.stack(hits_of(logits, labels)).astype(np.float32)
        hits[:, [index - span.start for index in loaded.unreadable]] = np.nan
        return hits


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
        classifier, history = training.evaluated, training.history

        def network(pixels: Tensor) -> Tensor:
            with training.autocast():
                return classifier(normalise(pixels.to(training.space.device), self.mean, self.std)).float()

        hits, unreadable = (self.held or self.val)(network)
        training.skipped["train" if self.held else "val"] |= unreadable
        accuracy = 100.0 * float(np.nanmean(hits.top1, dtype=np.float64))
        earlier = max((entry[self.by] for entry in history), default=-1.0)
        entry = {"epoch": training.epoch, self.by: accuracy, "loss": training.losses[-1]}
        history.append(entry)
        is_best, is_last = entry[self.by] > earlier, training.epoch == training.settings.epochs
        if self.held and (is_best or is_last):
            hits, unreadable = self.val(network)
            training.skipped["val"] |= unreadable
        if is_last if self.select == "last" else is_best:
            training.reported = {name: value.detach().cpu().clone() for name, value in classifier.state_dict().items()}
        for name, is_kept in (("best", is_best), ("last", is_last)):
            if is_kept:
                training.arrays |= {f"{name}_{array}": values for array, values in hits._asdict().items()}

    def metrics(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Metric]:
        """Accuracies of the reported and of the last epoch, and the likelihood of the reported one."""
        metrics = {}
        for suffix, epoch in (("", "last" if self.select == "last" else "best"), ("_last", "last")):
            for top in ("top1", "top5"):
                correct = arrays[f"{epoch}_{top}"]
                by_val = self.select == "val" and epoch == "best"
                metrics[f"{top}{suffix}"] = Metric(
                    value=percent(correct[~np.isnan(correct)]), per_image=correct, chosen_on_val=by_val
                )
        nll = arrays.get("last_nll" if self.select == "last" else "best_nll")
        if nll is not None:  # trainings that began with an earlier version have none
            read = np.flatnonzero(~np.isnan(nll))
            metrics["nll"] = log_likelihood(nll[read], read, len(nll), self.select == "val")
        return metrics

    def predictions(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Of the reported epoch, as results keep them; nothing of a training that began before they were kept."""
        epoch = "last" if self.select == "last" else "best"
        if f"{epoch}_predicted" not in arrays:
            return {}
        values, images = arrays[f"{epoch}_predicted"], np.flatnonzero(~np.isnan(arrays[f"{epoch}_predicted"]))
        return prediction_arrays(values[images], arrays[f"{epoch}_confidence"][images], images, len(values))

    def facts(self, history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """JSON values: the rule, the best, the last and the reported epoch, and the accuracy of each."""
        best, last = max(history, key=lambda entry: entry[self.by])["epoch"], history[-1]["epoch"]
        return {
            "selection": self.select,
            "epoch": last if self.select == "last" else best,
            "best_epoch": best,
            "last_epoch": last,
            "history": history,
        }
