"""Batches of images through the backbone at the machine's speed: in lanes on a CPU, behind loader processes on a GPU.

CPU. Every core is a lane: one thread that reads, decodes, resizes, computes (with one-threaded operators) and hands
over its own batches. Against the usual loader processes and one forward pass on all cores, no operator waits at its
barrier for the core that a decoder took, and nothing crosses processes. It also makes the features independent of the
number of cores: every batch is computed by one of them. `tests/benchmarks/extraction.py` compares the two.

B images of a batch, S side in pixels, D width.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from checkpoints.backbone import Backbone
from imagesets.decoding import UnreadableImage
from imagesets.sets import ImageSet
from imagesets.transforms import EvalTransform
from probes.kinds import FeatureKind, rows_of

LOADERS = 8  # loader processes at most, for a GPU; a core decodes about 300 ImageNet files a second


class Loaded(NamedTuple):
    """Decoded images of batch `number`: (B, 3, S, S) uint8, black where unreadable."""

    number: int
    pixels: Tensor
    unreadable: dict[int, str]


class Computed(NamedTuple):
    """Kind -> (B, D) float32 rows of batch `number`, zero where unreadable."""

    number: int
    rows: dict[FeatureKind, np.ndarray]
    unreadable: dict[int, str]


class Reader(Dataset):
    """Item i is the i-th of `spans` (batch number -> places in the image set), decoded."""

    def __init__(self, image_set: ImageSet, transform: EvalTransform, spans: Mapping[int, range]) -> None:
        self.image_set, self.transform, self.spans = image_set, transform, list(spans.items())

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, item: int) -> Loaded:
        number, span = self.spans[item]
        pixels = torch.zeros(len(span), 3, self.transform.size, self.transform.size, dtype=torch.uint8)
        unreadable = {}
        for place, index in enumerate(span):
            try:
                pixels[place] = self.transform(self.image_set, index)
            except UnreadableImage as error:
                unreadable[index] = error.reason
        return Loaded(number, pixels, unreadable)


@dataclass(frozen=True, kw_only=True)
class Extractor:
    """Turns decoded batches into features. skip_bad: leave out unreadable images instead of stopping at the first."""

    backbone: Backbone
    kinds: Sequence[FeatureKind]
    image_set: ImageSet
    skip_bad: bool

    def __call__(self, loaded: Loaded, span: range) -> Computed:
        """Features of the images `span`. Raises UnreadableImage, and ValueError for features that are not finite."""
        if loaded.unreadable and not self.skip_bad:
            index, reason = next(iter(loaded.unreadable.items()))
            raise UnreadableImage(self.image_set.path(index), reason)
        device = self.backbone.mean.device
        images = self.backbone.prepare(loaded.pixels.to(device, non_blocking=True))
        rows = rows_of(self.backbone, images, self.kinds)
        for kind, values in rows.items():
            self._check_finite(kind, values, span)
            values[[index - span.start for index in loaded.unreadable]] = 0
        return Computed(loaded.number, rows, loaded.unreadable)

    def _check_finite(self, kind: FeatureKind, values: np.ndarray, span: range) -> None:
        broken = ~np.isfinite(values).all(axis=1)
        if broken.any():
            path = self.image_set.path(span[int(broken.argmax())])
            raise ValueError(
                f"{path}: features of layer {kind.layer} ({kind.name}) are not finite; check the checkpoint, or run "
                "in float32 if this was bfloat16"
            )


def run_in_lanes(reader: Reader, extractor: Extractor, consume: Callable[[Computed], None], lanes: int) -> None:
    """Work off all batches on `lanes` threads, which call `consume`. An error in one stops all after their batch."""
    items = iter(range(len(reader)))  # shared: each `next` on it is one step under the interpreter's lock
    stop = threading.Event()
    threads_before = torch.get_num_threads()

    def lane() -> None:
        torch.set_num_threads(1)  # of this thread, and of threads that torch starts later
        try:
            for item in items:
                if stop.is_set():
                    return
                consume(extractor(reader[item], reader.spans[item][1]))
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(lanes, thread_name_prefix="lane") as pool:
        try:
            for ending in [pool.submit(lane) for _ in range(lanes)]:
                ending.result()
        finally:
            stop.set()  # Ctrl-C reaches this thread alone
            torch.set_num_threads(threads_before)


def run_behind_loaders(reader: Reader, extractor: Extractor, consume: Callable[[Computed], None], loaders: int) -> None:
    """Work off all batches in this thread while `loaders` processes decode; for devices other than the CPU."""
    spans = dict(reader.spans)
    loader = DataLoader(
        reader,
        batch_size=None,  # the reader's items are batches
        num_workers=loaders,
        prefetch_factor=4 if loaders else None,
        pin_memory=extractor.backbone.mean.device.type == "cuda",
    )
    for loaded in loader:
        consume(extractor(Loaded(*loaded), spans[loaded[0]]))


def run(reader: Reader, extractor: Extractor, consume: Callable[[Computed], None], workers: int | None) -> None:
    """Work off all batches in the way that suits the backbone's device. workers: lanes or loader processes.

    Unless told, there is a lane for each thread that torch was given (OMP_NUM_THREADS, or the cores).
    """
    if extractor.backbone.mean.device.type == "cpu":
        run_in_lanes(reader, extractor, consume, workers or torch.get_num_threads())
    else:
        loaders = min(LOADERS, os.cpu_count() or 1) if workers is None else workers
        run_behind_loaders(reader, extractor, consume, loaders)
