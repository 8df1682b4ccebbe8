"""How do augmented images become batches of features for the heads of several probes? An epoch of a `FeatureStream`:

    images -> crops -> chunks -> frozen backbone -> features -> rounds -> buffers -> batches -> heads

1. The images of an epoch are shuffled once for all probes. Position i of the stream is the i-th image of this order.
2. The stream is cut into chunks, the images of one forward pass. An image is decoded once and cropped once for each
   augmentation. On a CPU each core decodes, crops and computes chunks of its own (probes/features/extract.py).
3. Processes share the chunks. A round is a few chunks of every process, of which process r of W computes r, r + W, ...
   `ChunkGatherer` exchanges their features, so that every process receives all rounds, in order.
4. A `FeatureBuffer` for each augmentation keeps the features until no batch needs them any more.
5. `EpochBatches` cuts them into the batches of one probe, whose heads (a `Sweep`) train on them.

Order and crops depend on (seed, epoch, image) alone. So neither the number of processes or workers nor a kill changes a
training.

B images of a batch or chunk, M of a round, R augmentations, D width, V vectors of an image: for each augmentation one
of each feature kind, or all patches.
"""

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from checkpoints.backbone import Backbone
from checkpoints.frozen import FrozenSpec
from engine.distributed import World
from engine.seeding import joined_order, shuffled, windowed
from engine.tasks import Workspace
from imagesets.sets import ImageSet
from imagesets.stored import StoredImages, shards_of
from probes.features.extract import DecodedBatch, Extractor, ImageTransform, Reader, for_each_batch
from probes.features.kinds import FeatureKind
from probes.linear.batches import Readouts
from probes.linear.sweep import Sweep
from probes.linear.train_transform import Augmentation, MultiTransform, TrainTransform

CHUNKS_PER_ROUND = 4  # of each process, for fewer exchanges; one process exchanges nothing and has rounds of one chunk
MAX_WAITING_CHUNKS = 64  # computed before their turn; beyond that, the cores wait for the heads

# Called with a round: its positions, features (M, V, D), and position -> why its image is unreadable (features are 0).
OnRound = Callable[[range, Tensor, Mapping[int, str]], None]


@dataclass(kw_only=True)
class FeatureStream:
    """Features of the training images, computed once for all probes that train on them.

    A probe's order is that of all images without those that it leaves out. So it trains on the same batches alone and
    beside other probes, up to the rounding of forward passes, whose chunks differ.
    """

    image_set: ImageSet
    backbone: Backbone
    space: Workspace  # its processes share the images
    chunk: int  # images of a forward pass
    shuffle_window: int = 0  # shards among which images are shuffled; 0: among all images

    def run(self, epoch: int, sweeps: Sequence[Sweep], between_batches: Callable[[], None]) -> None:
        """Train all sweeps on the remaining batches of an epoch.

        `between_batches` is called after each round, from any thread. Every process raises UnreadableImage, ValueError
        for features that are not finite, and whatever `between_batches` raises.
        """
        images, space, spec = self.image_set, self.space, self.backbone.spec
        shard_parts: list[tuple[int, np.ndarray]] = []
        epoch_order = shuffled(len(images), space.seed, epoch)
        if self.shuffle_window:
            shard_parts = windowed(shards_of(images), self.shuffle_window, space.seed, epoch)
            epoch_order = joined_order(shard_parts, self.shuffle_window)
        remaining, order = remaining_batches(sweeps, epoch_order, images.labels)
        if not remaining:
            return
        # Chunks are numbered from the epoch's start, so that a resumed training has the same ones and the same bits.
        first_chunk = min(batches.first_position for batches in remaining) // self.chunk
        chunks = range(first_chunk, -(-len(order) // self.chunk))
        spans = {number: range(number * self.chunk, min((number + 1) * self.chunk, len(order))) for number in chunks}

        by_augmentation: dict[Augmentation, list[EpochBatches]] = {}
        for batches in remaining:
            by_augmentation.setdefault(batches.sweep.augmentation, []).append(batches)
        buffers = [FeatureBuffer(all_batches, spec) for all_batches in by_augmentation.values()]
        transforms = [
            TrainTransform(
                **vars(augmentation),
                size=spec.size,
                seed=space.seed,
                epoch=epoch,
                image_numbers=order,
                decode=space.decode,
                mean=self.backbone.mean.flatten().tolist(),
                std=self.backbone.std.flatten().tolist(),
            )
            for augmentation in by_augmentation
        ]

        def train(positions: range, features: Tensor, unreadable: Mapping[int, str]) -> None:
            parts = features.split([buffer.vectors for buffer in buffers], dim=1)
            for buffer, part in zip(buffers, parts, strict=True):
                # A copy: a view would keep the features of all buffers in memory for as long as one needs its own.
                buffer.add(positions, part.contiguous(), unreadable)
            between_batches()
            next(shard_reads, None)

        epoch_positions = np.flatnonzero(np.isin(epoch_order, order))
        shard_reads = self._read_shards_ahead(shard_parts, epoch_positions, spans)
        ordered_images = images.subset(order, f"epoch-{epoch}")
        with closing(shard_reads):
            next(shard_reads, None)
            kinds = [buffer.kinds for buffer in buffers]
            self.compute_features(ordered_images, MultiTransform(transforms=transforms), kinds, spans, train)
        self._count_forwards(buffers, sum(map(len, spans.values())))

    def compute_features(
        self,
        images: ImageSet,
        transform: ImageTransform,
        kinds: Sequence[Sequence[FeatureKind]],
        spans: Mapping[int, range],
        on_round: OnRound,
    ) -> None:
        """Compute the features of images, shared by the processes. Every process calls `on_round` with all rounds.

        Args:
            images: In the order of the stream.
            transform: (3, H, W), or (R, 3, H, W) of R crops, of an image.
            kinds: For each crop of an image, the features to compute.
            spans: Chunk -> its positions, for consecutive chunks, of which only the last may be shorter.
            on_round: Called in the order of rounds, from any thread, but by one at a time.
        """
        spec, device, space = self.backbone.spec, self.backbone.mean.device, self.space
        vectors = sum(kind.vectors(spec) for crop_kinds in kinds for kind in crop_kinds)
        gatherer = ChunkGatherer(spans, (vectors, spec.width), on_round, space.world, device)
        extractors = [Extractor(backbone=self.backbone, kinds=crop_kinds, image_set=images) for crop_kinds in kinds]

        def extract(chunk: DecodedBatch, span: range) -> None:
            pixels = chunk.pixels.to(device, non_blocking=True)
            crops = pixels.view(len(span), -1, *pixels.shape[-3:]).unbind(1)  # R tensors (B, 3, H, W)
            features = []
            for extractor, crop in zip(extractors, crops, strict=True):
                by_kind = extractor(chunk._replace(pixels=crop.contiguous()), span)
                features += [by_kind[kind].reshape(len(span), -1, spec.width) for kind in extractor.kinds]
            joined = torch.from_numpy(np.concatenate(features, axis=1))
            gatherer.add(Chunk(chunk.number, joined, chunk.unreadable))

        try:
            reader = Reader(images, transform, gatherer.own_spans, space.skip_bad)
            for_each_batch(reader, extract, device, space.workers)
            gatherer.deliver()  # the last round, if this process has no chunk in it
        except Exception as error:
            if not hasattr(error, "reported_by"):  # the other processes do not know of it yet
                space.world.gather_results(partial(raise_error, error))
            raise

    def _read_shards_ahead(
        self, shard_parts: Sequence[tuple[int, np.ndarray]], epoch_positions: np.ndarray, spans: Mapping[int, range]
    ) -> Generator[int]:
        """A generator that reads shards ahead in the background, those of one more round at each `next`.

        Empty without a window of shards, and in every process but the first of a machine, which reads for the others.

        Args:
            shard_parts: What `windowed` returned for all images of the epoch.
            epoch_positions: (n,) for each position of the stream, the position in the order of all images.
            spans: Chunk -> its positions in the stream.
        """
        images, world = self.image_set.images, self.space.world
        if not (shard_parts and world.is_first_on_machine):
            return (step for step in range(0))
        assert isinstance(images, StoredImages)
        positions = [spans[min(spans)].start]  # of the first image, and then of the last one of each round
        for chunks_by_rank in rounds_of(spans, world):
            last_chunk = max(chunk for chunks in chunks_by_rank for chunk in chunks)
            positions.append(spans[last_chunk].stop - 1)
        steps = [int(epoch_positions[position]) for position in positions]
        remaining_parts = (
            (start, part) for start, part in shard_parts if start + (len(part) - 1) * self.shuffle_window >= steps[0]
        )
        distance = self.shuffle_window * len(self.image_set) // len(images.shards)
        return images.read_ahead(remaining_parts, steps, distance)

    def _count_forwards(self, buffers: Sequence["FeatureBuffer"], forwards: int) -> None:
        """Add an epoch's forward passes to the sweeps' counts; those of one augmentation get equal shares."""
        for buffer in buffers:
            share, rest = divmod(forwards, len(buffer.all_batches))
            for number, batches in enumerate(buffer.all_batches):
                batches.sweep.stream_forwards += forwards
                batches.sweep.augmented_forwards += share + (number < rest)


def raise_error(error: Exception) -> None:
    raise error


def remaining_batches(
    sweeps: Sequence[Sweep], epoch_order: np.ndarray, labels: np.ndarray
) -> tuple[list["EpochBatches"], np.ndarray]:
    """The batches that sweeps still need in an epoch, and the stream's images (n,) in order: those of their batches.

    epoch_order: (N,) all images of the set in the order of the epoch. labels: (N,) of image 0, 1, ... of the set.
    """
    epoch_positions = []  # of each sweep's images in the order of the epoch
    for sweep in sweeps:
        own = np.flatnonzero(np.isin(epoch_order, sweep.train_indices))
        epoch_positions.append(own[: sweep.plan.images_per_epoch])
    is_needed = np.zeros(len(epoch_order), bool)
    for own in epoch_positions:
        is_needed[own] = True
    order, stream_positions = epoch_order[is_needed], np.cumsum(is_needed) - 1
    all_batches = [
        EpochBatches(sweep, stream_positions[own], order, labels)
        for sweep, own in zip(sweeps, epoch_positions, strict=True)
    ]
    return [batches for batches in all_batches if not batches.are_done], order


class EpochBatches:
    """The batches of one sweep in one epoch."""

    def __init__(self, sweep: Sweep, positions: np.ndarray, order: np.ndarray, labels: np.ndarray) -> None:
        """positions: (m,) of its images in the stream. order: (n,) images of the stream. labels: (N,) of the set."""
        self.sweep, self.positions, self.order, self.labels = sweep, positions, order, labels

    @property
    def are_done(self) -> bool:
        return self.sweep.iteration == self.sweep.plan.steps_per_epoch

    @property
    def first_position(self) -> int:
        """The first position that is still needed; the length of the stream if none is."""
        return len(self.order) if self.are_done else int(self._next_positions()[0])

    def _next_positions(self) -> np.ndarray:
        start = self.sweep.iteration * self.sweep.plan.batch
        return self.positions[start : start + self.sweep.plan.batch]

    def train(self, buffer: "FeatureBuffer") -> None:
        """Train the sweep on the batches whose images are all in the buffer; unreadable images are left out."""
        while not self.are_done and (positions := self._next_positions())[-1] < buffer.end:
            sweep, number = self.sweep, self.sweep.iteration
            unreadable = np.intersect1d(positions, list(buffer.unreadable)).tolist() if buffer.unreadable else []
            sweep.skipped |= {int(self.order[position]): buffer.unreadable[position] for position in unreadable}
            if len(unreadable) < len(positions):
                positions = positions[~np.isin(positions, unreadable)] if unreadable else positions
                labels = torch.from_numpy(self.labels[self.order[positions]]).to(buffer.device)
                sweep.step(number, buffer.read(sweep.readouts, positions), labels)
            sweep.iteration = number + 1


class FeatureBuffer:
    """Features of one augmentation at consecutive positions, back to the first that a batch still needs."""

    def __init__(self, all_batches: Sequence[EpochBatches], spec: FrozenSpec) -> None:
        """all_batches: of the sweeps that train on this augmentation."""
        self.all_batches = all_batches
        self.kinds = list(dict.fromkeys(kind for batches in all_batches for kind in batches.sweep.kinds))
        ends = list(accumulate(kind.vectors(spec) for kind in self.kinds))
        self.columns = {
            kind: list(range(end - kind.vectors(spec), end)) for kind, end in zip(self.kinds, ends, strict=True)
        }  # kind -> its vectors among the V
        self.vectors = ends[-1]
        self.unreadable: dict[int, str] = {}  # position -> reason
        self.end = 0  # position after the last one
        self.device = torch.device("cpu")  # of the features
        self._rounds: list[tuple[range, Tensor]] = []  # positions and features (M, V, D)

    def add(self, positions: range, features: Tensor, unreadable: Mapping[int, str]) -> None:
        """Add the next positions and their features (M, V, D), train on all batches that are now complete, and drop the
        rounds that no batch needs any more."""
        self._rounds.append((positions, features))
        self.unreadable |= unreadable
        self.end, self.device = positions.stop, features.device
        for batches in self.all_batches:
            batches.train(self)
        first = min(batches.first_position for batches in self.all_batches)
        self._rounds = [(span, features) for span, features in self._rounds if span.stop > first]
        self.unreadable = {position: reason for position, reason in self.unreadable.items() if position >= first}

    def read(self, readouts: Readouts, positions: np.ndarray) -> dict[str, Tensor]:
        """A copy of the features (B, V D) of every readout at ascending positions (B,); V vectors of this readout."""
        if not readouts:
            return {}
        first, last = positions[0], positions[-1]
        rounds = [(span, features) for span, features in self._rounds if span.stop > first and span.start <= last]
        rows = torch.from_numpy(positions - rounds[0][0].start).to(self.device)
        features = torch.cat([features for _, features in rounds])[rows]
        by_readout = {}
        for name, kinds in readouts.items():
            columns = [column for kind in kinds for column in self.columns[kind]]
            by_readout[name] = features[:, columns].flatten(1)
        return by_readout


class Chunk(NamedTuple):
    """The features of one chunk."""

    number: int
    features: Tensor  # (B, V, D), 0 where unreadable
    unreadable: Mapping[int, str]  # position -> reason


def rounds_of(spans: Mapping[int, range], world: World) -> list[list[Sequence[int]]]:
    """Divide consecutive chunks into rounds: for each round, the chunks of every process. spans: chunk -> positions."""
    chunks = range(min(spans), max(spans) + 1)
    size = world.size * CHUNKS_PER_ROUND if world.size > 1 else 1
    rounds = [chunks[start : start + size] for start in range(0, len(chunks), size)]
    return [[chunks_of_round[rank :: world.size] for rank in range(world.size)] for chunks_of_round in rounds]


class ChunkGatherer:
    """Takes the chunks of this process in any order, from any thread, and calls `on_round` with all rounds in order.

    One thread at a time exchanges and delivers, while the others go on with chunks. After an error no round follows.
    """

    def __init__(
        self,
        spans: Mapping[int, range],
        shape: tuple[int, int],
        on_round: OnRound,
        world: World,
        device: torch.device,
    ) -> None:
        """spans: chunk -> positions, for consecutive chunks, of which only the last may be shorter. shape: (V, D)."""
        self.spans, self.shape, self.on_round = spans, shape, on_round
        self.world, self.device = world, device
        self.rounds = rounds_of(spans, world)
        self._next_round, self._failed = 0, False
        self._waiting: dict[int, Chunk] = {}  # chunks of this process that are not delivered yet
        self._waiting_lock, self._delivery_lock = threading.Lock(), threading.Lock()

    @property
    def own_spans(self) -> dict[int, range]:
        """The chunks that this process computes -> their positions."""
        return {number: self.spans[number] for chunks in self.rounds for number in chunks[self.world.rank]}

    def add(self, chunk: Chunk) -> None:
        """Add a chunk and deliver complete rounds. While another thread delivers, wait only if many chunks do."""
        with self._waiting_lock:
            self._waiting[chunk.number] = chunk
        self.deliver(wait=len(self._waiting) > MAX_WAITING_CHUNKS)

    def deliver(self, wait: bool = True) -> None:
        """Deliver the next rounds whose chunks this process has computed. wait: if another thread delivers just now."""
        while self._is_ready():  # again after another thread's turn, which may just have missed the newest chunk
            if not self._delivery_lock.acquire(blocking=wait):
                return
            try:
                while self._is_ready():
                    self._deliver_round()
            except BaseException:
                self._failed = True
                raise
            finally:
                self._delivery_lock.release()

    def _is_ready(self) -> bool:
        if self._failed or self._next_round == len(self.rounds):
            return False
        with self._waiting_lock:
            return all(number in self._waiting for number in self.rounds[self._next_round][self.world.rank])

    def _deliver_round(self) -> None:
        chunks_by_rank = self.rounds[self._next_round]
        with self._waiting_lock:
            own = [self._waiting.pop(number) for number in chunks_by_rank[self.world.rank]]
        self._next_round += 1
        by_rank = self.world.gather_results(lambda: [chunk.unreadable for chunk in own])
        unreadable: dict[int, str] = {}
        for unreadable_by_chunk in by_rank:
            for unreadable_of_chunk in unreadable_by_chunk:
                unreadable |= unreadable_of_chunk
        features = self._gather(own, chunks_by_rank)
        positions = range(self.spans[min(features)].start, self.spans[max(features)].stop)
        self.on_round(positions, torch.cat([features[number] for number in sorted(features)]), unreadable)

    def _gather(self, own: Sequence[Chunk], chunks_by_rank: Sequence[Sequence[int]]) -> dict[int, Tensor]:
        """Chunk -> its features (B, V, D), for all chunks of a round."""
        if self.world.size == 1:
            return {chunk.number: chunk.features.to(self.device) for chunk in own}
        longest = len(self.spans[min(self.spans)])
        padded = torch.zeros(CHUNKS_PER_ROUND, longest, *self.shape)
        for slot, chunk in enumerate(own):
            padded[slot, : len(chunk.features)] = chunk.features
        by_rank = self.world.gather_tensors(padded.to(self.device))
        return {
            number: by_rank[rank][slot, : len(self.spans[number])]
            for rank, numbers in enumerate(chunks_by_rank)
            for slot, number in enumerate(numbers)
        }
