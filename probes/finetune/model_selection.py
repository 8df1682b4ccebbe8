"""Which epoch of a fine-tuning is reported? Each is evaluated when it ends, so only the weights to report are kept.

last     the last epoch
holdout  the best epoch on held-out training images, the first of equals
val      the best epoch on the validation images that are reported, as in many papers; an optimistic number

Processes and threads share an evaluation. N images, B images of a batch, S side in pixels, C classes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.progress import Progress
from engine.tasks import Metric, Workspace
from imagesets.sets import ImageSet
from imagesets.transforms import EvalTransform, normalise
from probes.features.extract import DecodedBatch, Reader, batch_spans, for_each_batch, forward_batch
from probes.finetune.settings import Select
from probes.finetune.trainer import Training
from probes.scores import Hits, hits_of, nll_metric, percent, prediction_arrays

Network = Callable[[Tensor], Tensor]  # (B, 3, S, S) uint8 on the CPU -> logits (B, C)


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Evaluates networks on one set of images."""

    image_set: ImageSet
    transform: EvalTransform
    space: Workspace  # its `workers` are threads on a CPU, loader processes otherwise

    def __call__(self, network: Network) -> tuple[Hits, dict[str, str]]:
        """Hits on all images (N,), float32 and NaN for unreadable ones, and path of each of these -> reason.

        All processes must call it; all get the result. Raises UnreadableImage unless `space.skip_bad`.
        """
        count, world = len(self.image_set), self.space.world
        batches = batch_spans(count, forward_batch(self.space.device))
        own = {number: batches[number] for number in range(world.rank, len(batches), world.size)}
        arrays = np.full((5, count), np.nan, np.float32)
        unreadable: dict[str, str] = {}

        def evaluate() -> dict[int, tuple[np.ndarray, dict[int, str]]]:
            """Number of each own batch -> the five arrays of `Hits` (5, B), and index of unreadable images ->
            reason."""
            results = {}

            def evaluate_batch(batch: DecodedBatch, span: range) -> None:
                results[batch.number] = self.hits(network, batch, span), batch.unreadable
                progress.advance(len(span))

            reader = Reader(self.image_set, self.transform, own, self.space.skip_bad)
            with Progress(f"evaluating on {self.image_set.title}", sum(map(len, own.values()))) as progress:
                for_each_batch(reader, evaluate_batch, self.space.device, self.space.workers)
            return results

        for results in world.gather_results(evaluate):
            for number, (hits, unreadable_indices) in results.items():
                arrays[:, batches[number]] = hits
                unreadable |= {self.image_set.path(index): reason for index, reason in unreadable_indices.items()}
        return Hits(*arrays), unreadable

    def hits(self, network: Network, batch: DecodedBatch, span: range) -> np.ndarray:
        """The five arrays of `Hits` (5, B) of a batch; NaN for unreadable images."""
        with torch.inference_mode():
            logits = network(batch.pixels)
        labels = torch.tensor(self.image_set.labels[span.start : span.stop], device=logits.device)
        hits = np.stack(hits_of(logits, labels)).astype(np.float32)
        hits[:, [index - span.start for index in batch.unreadable]] = np.nan
        return hits


@dataclass(frozen=True, kw_only=True)
class ModelSelection:
    """Evaluates epochs and selects the one to report."""

    select: Select
    val: Evaluator  # on the validation images
    held_out: Evaluator | None  # on the held-out training images
    mean: tuple[float, ...]  # (3,) of the network's input normalisation
    std: tuple[float, ...]

    @property
    def ranked_by(self) -> str:
        """The images whose accuracy ranks epochs; with "last", it is only recorded."""
        return "holdout" if self.select == "holdout" else "val"

    def __call__(self, training: Training) -> None:
        """Evaluate an epoch that has just ended. Keeps the hits of the best and the last one, and the weights to
        report."""
        classifier, history = training.evaluated_network, training.history

        def network(pixels: Tensor) -> Tensor:
            with training.autocast():
                return classifier(normalise(pixels.to(training.space.device), self.mean, self.std)).float()

        hits, unreadable = (self.held_out or self.val)(network)
        training.skipped["train" if self.held_out else "val"] |= unreadable
        accuracy = 100.0 * float(np.nanmean(hits.top1, dtype=np.float64))
        best_before = max((entry[self.ranked_by] for entry in history), default=-1.0)
        entry = {"epoch": training.epoch, self.ranked_by: accuracy, "loss": training.losses[-1]}
        history.append(entry)
        is_best, is_last = entry[self.ranked_by] > best_before, training.epoch == training.settings.epochs
        if self.held_out and (is_best or is_last):
            hits, unreadable = self.val(network)
            training.skipped["val"] |= unreadable
        if is_last if self.select == "last" else is_best:
            training.reported = {name: value.detach().cpu().clone() for name, value in classifier.state_dict().items()}
        for epoch, applies in (("best", is_best), ("last", is_last)):
            if applies:
                training.arrays |= {f"{epoch}_{name}": values for name, values in hits._asdict().items()}

    def metrics(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Metric]:
        """Accuracies of the reported and of the last epoch, and the log loss of the reported one.

        arrays: `Training.arrays`.
        """
        metrics = {}
        for suffix, epoch in (("", "last" if self.select == "last" else "best"), ("_last", "last")):
            for top in ("top1", "top5"):
                correct = arrays[f"{epoch}_{top}"]
                by_val = self.select == "val" and epoch == "best"
                metrics[f"{top}{suffix}"] = Metric(
                    value=percent(correct[~np.isnan(correct)]), per_image=correct, chosen_on_val=by_val
                )
        nll = arrays.get("last_nll" if self.select == "last" else "best_nll")
        if nll is not None:  # absent in trainings that were begun with an earlier version
            indices = np.flatnonzero(~np.isnan(nll))
            metrics["nll"] = nll_metric(nll[indices], indices, len(nll), self.select == "val")
        return metrics

    def predictions(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Predictions of the reported epoch, in the form of results; {} if the training was begun with an earlier
        version.

        arrays: `Training.arrays`.
        """
        epoch = "last" if self.select == "last" else "best"
        if f"{epoch}_predicted" not in arrays:
            return {}
        predicted, confidence = arrays[f"{epoch}_predicted"], arrays[f"{epoch}_confidence"]
        indices = np.flatnonzero(~np.isnan(predicted))
        return prediction_arrays(predicted[indices], confidence[indices], indices, len(predicted))

    def facts(self, history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """JSON values: the rule, the reported, the best and the last epoch, and the accuracies of all."""
        best, last = max(history, key=lambda entry: entry[self.ranked_by])["epoch"], history[-1]["epoch"]
        return {
            "selection": self.select,
            "epoch": last if self.select == "last" else best,
            "best_epoch": best,
            "last_epoch": last,
            "history": history,
        }
