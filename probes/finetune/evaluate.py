"""Which validation images a network gets right in the middle of its training; processes and threads share the work.

N images, B images of a batch, S side in pixels, C classes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.tasks import Workspace
from imagesets.sets import ImageSet
from imagesets.transforms import EvalTransform
from probes.features.extract import Loaded, Reader, forward_batch, work_off
from probes.scores import hits_of

Network = Callable[[Tensor], Tensor]  # (B, 3, S, S) uint8 on the CPU -> logits (B, C)


class Correct(NamedTuple):
    """Which images are right. All arrays (N,) float32, NaN where unreadable."""

    top1: np.ndarray  # 1 where the label is the first guess, else 0
    top5: np.ndarray  # the same for the first five guesses
    predicted: np.ndarray  # class that is the first guess
    confidence: np.ndarray  # its probability
    unreadable: dict[str, str]  # path -> reason

    @property
    def accuracy(self) -> float:
        """Top-1 in percent of the readable images."""
        return 100.0 * float(np.nanmean(self.top1, dtype=np.float64))


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Evaluates networks on one set of images."""

    image_set: ImageSet
    transform: EvalTransform
    space: Workspace  # its `workers` are threads on a CPU, loader processes otherwise

    def __call__(self, network: Network) -> Correct:
        """The result on all images, in every process. Raises UnreadableImage unless `space.skip_bad`."""
        count, size = len(self.image_set), forward_batch(self.space.device)
        batches = {number: range(at, min(at + size, count)) for number, at in enumerate(range(0, count, size))}
        world = self.space.world
        mine = {number: batches[number] for number in range(world.rank, len(batches), world.size)}
        places = np.full((4, count), np.nan, np.float32)
        unreadable: dict[str, str] = {}
        for found in world.gather_results(lambda: self.share(network, mine)):
            for number, (hits, bad) in found.items():
                places[:, batches[number]] = hits
                unreadable |= {self.image_set.path(index): why for index, why in bad.items()}
        top1, top5, predicted, confidence = places
        return Correct(top1, top5, predicted, confidence, unreadable)

    def share(self, network: Network, batches: dict[int, range]) -> dict[int, tuple[np.ndarray, dict[int, str]]]:
        """Number of each of these batches -> hits (4, B), the arrays of `Correct`, and the reasons."""
        found = {}

        def evaluate(loaded: Loaded, span: range) -> None:
            found[loaded.number] = self.hits(network, loaded, span), loaded.unreadable

        reader = Reader(self.image_set, self.transform, batches, self.space.skip_bad)
        work_off(reader, evaluate, self.space.device, self.space.workers)
        return found

    def hits(self, network: Network, loaded: Loaded, span: range) -> np.ndarray:
        with torch.inference_mode():
            logits = network(loaded.pixels)
        labels = torch.tensor(self.image_set.labels[span.start : span.stop], device=logits.device)
        hits = np.stack(hits_of(logits, labels)).astype(np.float32)
        hits[:, [index - span.start for index in loaded.unreadable]] = np.nan
        return hits
