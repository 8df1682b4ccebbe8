"""Batches of images through the backbone at full speed: a thread for each core on a CPU, loader processes on a GPU.

On a CPU every core reads, decodes, resizes and computes its own batches (engine.machine). With the usual loader
processes beside one forward pass on all cores, each operator would wait for the core that a decoder took; and nothing
crosses processes here. `tests/benchmarks/extraction.py` compares the two.

B images of a batch, H x W pixels, D width.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from checkpoints.backbone import Backbone
from engine.machine import own_cores, run_on_core_threads, sharing_memory
from engine.training.interruptions import ignore_signals, loaded_by
from imagesets.decoding import UnreadableImage
from imagesets.sets import ImageSet
from probes.features.kinds import FeatureKind, feature_rows

LOADERS = 8  # loader processes at most, for a GPU; a core decodes about 300 ImageNet files a second


class Loaded(NamedTuple):
    """Decoded images of batch `number`: (B, 3, H, W) uint8, black where unreadable."""

    number: int
    pixels: Tensor
    unreadable: dict[int, str]


OnBatch = Callable[[Loaded, range], None]  # told of a batch and of its places in the image set


class Computed(NamedTuple):
    """Kind -> (B, D) float32 rows of batch `number`, zero where unreadable."""

    number: int
    rows: dict[FeatureKind, np.ndarray]
    unreadable: dict[int, str]


class Windowed(Protocol):
    """A transform of images to one size."""

    @property
    def window(self) -> tuple[int, int]: ...  # height and width

    def __call__(self, image_set: ImageSet, index: int) -> Tensor: ...  # (3, H, W) uint8


class Reader(Dataset):
    """Item i is the i-th of `spans` (batch number -> places in the image set), decoded.

    skip_bad: leave out unreadable images instead of stopping at the first.
    """

    def __init__(self, image_set: ImageSet, transform: Windowed, spans: Mapping[int, range], skip_bad: bool) -> None:
        self.image_set, self.transform, self.spans, self.skip_bad = image_set, transform, list(spans.items()), skip_bad

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, item: int) -> Loaded:
        number, span = self.spans[item]
        pixels = torch.zeros(len(span), 3, *self.transform.window, dtype=torch.uint8)
        unreadable = {}
        for place, index in enumerate(span):
            try:
                pixels[place] = self.transform(self.image_set, index)
            except UnreadableImage as error:
                unreadable[index] = error.reason
        if get_worker_info() is not None:
            with sharing_memory():
                pixels.share_memory_()
        return Loaded(number, pixels, unreadable)

    def check(self, loaded: Loaded) -> None:
        """Raises UnreadableImage unless `skip_bad`: not in a loader process, out of which it would come as a text."""
        if loaded.unreadable and not self.skip_bad:
            index, reason = next(iter(loaded.unreadable.items()))
            raise UnreadableImage(self.image_set.path(index), reason)


@dataclass(frozen=True, kw_only=True)
class Extractor:
    """Turns decoded batches into features."""

    backbone: Backbone
    kinds: Sequence[FeatureKind]
    image_set: ImageSet

    def __call__(self, loaded: Loaded, span: range) -> Computed:
        """Features of the images `span`. ValueError for features that are not finite."""
        device = self.backbone.mean.device
        images = self.backbone.prepare(loaded.pixels.to(device, non_blocking=True))
        rows = feature_rows(self.backbone, images, self.kinds)
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


def work_off_behind_loaders(reader: Reader, work: OnBatch, loaders: int, pinned: bool) -> None:
    """Work off all batches in this thread while `loaders` processes decode; for devices other than the CPU."""
    loader = DataLoader(
        reader,
        batch_size=None,  # the reader's items are batches
        num_workers=loaders,
        worker_init_fn=ignore_signals,
        prefetch_factor=4 if loaders else None,
        pin_memory=pinned,
    )
    with closing(loaded_by(loader)) as batches:
        for batch, (_, span) in zip(batches, reader.spans, strict=True):
            reader.check(Loaded(*batch))
            work(Loaded(*batch), span)


def work_off(reader: Reader, work: OnBatch, device: str | torch.device, workers: int | None) -> None:
    """Call `work` with every batch and its places, in the way that suits the device: on a CPU from several threads.

    workers: threads on a CPU, loader processes otherwise; chosen for the machine when None. Raises UnreadableImage
    unless the reader skips such images.
    """
    kind = torch.device(device).type
    if kind != "cpu":
        loaders = min(LOADERS, own_cores()) if workers is None else workers
        work_off_behind_loaders(reader, work, loaders, pinned=kind == "cuda")
        return

    def read_and_work(item: int) -> None:
        loaded = reader[item]
        reader.check(loaded)
        work(loaded, reader.spans[item][1])

    run_on_core_threads(read_and_work, range(len(reader)), workers)


def run_extraction(
    reader: Reader, extractor: Extractor, consume: Callable[[Computed], None], workers: int | None
) -> None:
    """Features of all batches, for `consume`, which is called from several threads. workers: as of `work_off`."""
    device = extractor.backbone.mean.device
    work_off(reader, lambda loaded, span: consume(extractor(loaded, span)), device, workers)
