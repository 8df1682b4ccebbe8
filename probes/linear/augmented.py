"""The papers' training augmentation, and the stream of features that the frozen backbone computes from such images.

A crop depends on seed, epoch and image alone, so neither the number of workers nor a kill changes a training. Images go
through the backbone as in probes/features/extract.py: on a CPU each core reads, decodes, crops and computes chunks
of its own. A chunk is the images of one forward pass; a piece is a few chunks of every process, exchanged among them:
process r of W computes chunks r, r + W, r + 2 W, ... of it. Several trainings follow one stream, each with its own
batches, and with its own augmentation of an image, which is read and decoded once for all of them.

B images of a batch, M of a piece, R augmentations, V vectors of an image (one of each feature kind, or all its patches,
of each augmentation), D width. A place is that of an image in the stream of one epoch.
"""

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.random import RandomState
from PIL import Image
from torch import Tensor

from checkpoints.backbone import Backbone
from checkpoints.frozen import FrozenSpec
from engine.distributed import World
from engine.seeding import AUGMENT, joined_order, seeded, shuffled, windowed
from engine.tasks import Workspace
from imagesets.augmentation import random_transform
from imagesets.decoding import releasing_large_images
from imagesets.random_crops import AREA, CropRule, OwnDraws, RandomResizedCrop
from imagesets.sets import ImageSet
from imagesets.stored import StoredImages, shards_of
from imagesets.transforms import Photo, planes
from probes.features.extract import Extractor, Loaded, Reader, Windowed, for_each_batch
from probes.features.kinds import FeatureKind
from probes.linear.batches import EpochPlan, Readouts

CHUNKS = 4  # of each process in a piece: fewer exchanges; alone 1, as there is nothing to exchange
AHEAD = 64  # chunks that may wait for their turn: the cores then wait for the heads

# Called with a piece: its places, features (M, V, D) and place -> why an image could not be read, its features zero.
Consume = Callable[[range, Tensor, Mapping[int, str]], None]


def pieces_of(spans: Mapping[int, range], world: World) -> list[list[Sequence[int]]]:
    """The pieces of chunks that follow each other, of which `spans` has the numbers: of each, the chunks of every
    process."""
    chunks = range(min(spans), max(spans) + 1)
    size = world.size * CHUNKS if world.size > 1 else 1
    pieces = [chunks[start : start + size] for start in range(0, len(chunks), size)]
    return [[piece[rank :: world.size] for rank in range(world.size)] for piece in pieces]


class Chunk(NamedTuple):
    """Features (B, V, D) of the images of a chunk, zero where unreadable."""

    number: int
    features: Tensor
    unreadable: Mapping[int, str]  # place -> reason


class Pieces:
    """Takes this process's chunks in any order and from any thread, and calls `consume` with the pieces in order.

    One thread at a time exchanges and consumes, while the others go on with chunks. If it fails, no piece follows.
    """

    def __init__(
        self,
        spans: Mapping[int, range],
        shape: tuple[int, int],
        consume: Consume,
        world: World,
        device: torch.device,
    ) -> None:
        """spans: chunk -> its places, for consecutive chunks, of which the last alone may be shorter. shape: (V, D)."""
        self.spans, self.shape, self.consume = spans, shape, consume
        self.world, self.device = world, device
        self.pieces = pieces_of(spans, world)
        self._next, self._failed = 0, False
        self._waiting: dict[int, Chunk] = {}
        self._lock, self._turn = threading.Lock(), threading.Lock()

    @property
    def own(self) -> dict[int, range]:
        """The chunks that this process computes."""
        return {number: self.spans[number] for piece in self.pieces for number in piece[self.world.rank]}

    def take(self, done: Chunk) -> None:
        """Add a chunk; hand on what is complete, unless another thread does and few chunks wait."""
        with self._lock:
            self._waiting[done.number] = done
        self.hand_on(wait=len(self._waiting) > AHEAD)

    def hand_on(self, wait: bool = True) -> None:
        """Consume the next pieces as long as this process's chunks of them are there."""
        while self._is_ready():  # again after another thread's turn, which may just have missed the newest chunk
            if not self._turn.acquire(blocking=wait):
                return
            try:
                while self._is_ready():
                    self._step()
            except BaseException:
                self._failed = True
                raise
            finally:
                self._turn.release()

    def _is_ready(self) -> bool:
        if self._failed or self._next == len(self.pieces):
            return False
        with self._lock:
            return all(number in self._waiting for number in self.pieces[self._next][self.world.rank])

    def _step(self) -> None:
        piece = self.pieces[self._next]
        with self._lock:
            own = [self._waiting.pop(number) for number in piece[self.world.rank]]
        self._next += 1
        reports = self.world.gather_results(lambda: [chunk.unreadable for chunk in own])
        bad = {place: reason for report in reports for chunk in report for place, reason in chunk.items()}
        rows = self._exchanged(own, piece)
        places = range(self.spans[min(rows)].start, self.spans[max(rows)].stop)
        self.consume(places, torch.cat([rows[number] for number in sorted(rows)]), bad)

    def _exchanged(self, own: Sequence[Chunk], piece: Sequence[Sequence[int]]) -> dict[int, Tensor]:
        """The features (B, V, D) of every chunk of a piece."""
        if self.world.size == 1:
            return {chunk.number: chunk.features.to(self.device) for chunk in own}
        longest = len(self.spans[min(self.spans)])
        mine = torch.zeros(CHUNKS, longest, *self.shape)
        for room, chunk in zip(mine[: len(own)], own, strict=True):
            room[: len(chunk.features)] = chunk.features
        gathered = self.world.gather_tensors(mine.to(self.device))
        return {
            number: gathered[rank][at, : len(self.spans[number])]
            for rank, numbers in enumerate(piece)
            for at, number in enumerate(numbers)
        }


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """What makes training images: a random crop, a mirror image and, where it is given, a policy of timm's."""

    interpolation: Literal["bilinear", "bicubic"]  # of resizing the crop
    rule: CropRule  # whose rule draws the window
    policy: str = ""
    erase: float = 0.0  # with a policy, share of the images that get a rectangle of noise

    @property
    def name(self) -> str:
        """`torchvision-crop-bilinear-flip_exact`"""
        policy = f"-{self.policy}-erase{self.erase:g}" if self.policy else ""
        return f"{self.rule}-crop-{self.interpolation}-flip_exact{policy}"


TIMM = threading.Lock()  # timm draws from the global generators, which threads share


@dataclass(frozen=True, kw_only=True)
class TrainTransform(Augmentation):
    """The images of one epoch: a random window, resized, mirrored with chance 1/2.

    With a policy, crop and mirror image are as timm draws them, its operations follow, and in a share of the images a
    rectangle of noise, which is cut to 8 bits; decoding is always exact then, as the policy takes far longer.
    """

    size: int | tuple[int, int]  # side in pixels, or height and width
    seed: int
    epoch: int
    names: np.ndarray  # (N,) numbers that seed the images' draws
    decode: Literal["exact", "fast"] = "exact"  # without a policy
    mean: Sequence[float] = ()  # (3,) of the network's images, for a policy
    std: Sequence[float] = ()

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a crop."""
        return 3, *(self.size if isinstance(self.size, tuple) else (self.size, self.size))

    @property
    def name(self) -> str:
        """All that decides about the pixels, beside the images' numbers."""
        suffix = f"-{self.policy}-erase{self.erase:g}" if self.policy else "_fast" if self.decode == "fast" else ""
        return f"{self.rule}-crop{self.shape[1:]}-{self.interpolation}-flip_seed{self.seed}_epoch{self.epoch}{suffix}"

    @cached_property
    def policy_steps(self) -> Callable[[Image.Image], Tensor]:
        drawn: dict[str, Any] = dict(policy=self.policy, crop_scale=AREA, flip=0.5, erase=self.erase)
        return random_transform(self.size, self.mean, self.std, interpolation=self.interpolation, **drawn)

    @releasing_large_images()
    def __call__(self, image_set: ImageSet, index: int) -> Tensor:
        """Image `index` of the set -> (3, H, W) uint8. Raises UnreadableImage."""
        return self.of(Photo(image_set, index))

    def of(self, photo: Photo) -> Tensor:
        """(3, H, W) uint8. Raises UnreadableImage."""
        numbers = self.seed, self.epoch, int(self.names[photo.index])
        if self.policy:
            image = photo.image
            with TIMM, seeded(AUGMENT, *numbers):
                pixels = self.policy_steps(image)
            mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
            return (255 * (pixels * std + mean)).round().clamp(0, 255).byte()
        generator = RandomState(numbers)
        crop = RandomResizedCrop(
            size=self.size, interpolation=self.interpolation, rule=self.rule, draws=OwnDraws(generator)
        )
        if self.decode == "fast":
            pixels = crop.fast(photo)
            return (pixels.flip(-1) if generator.random_sample() < 0.5 else pixels).contiguous()
        image = crop(photo.image)
        mirrored = generator.random_sample() < 0.5
        return planes(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else image)


@dataclass(frozen=True, kw_only=True)
class Crops:
    """The crops of several augmentations of an image, which is decoded once."""

    transforms: Sequence[TrainTransform]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all crops: (R, 3, H, W)."""
        return len(self.transforms), *self.transforms[0].shape

    @property
    def name(self) -> str:
        """All that decides about the pixels, beside the images' numbers."""
        return " + ".join(transform.name for transform in self.transforms)

    @releasing_large_images()
    def __call__(self, image_set: ImageSet, index: int) -> Tensor:
        """Image `index` of the set -> (R, 3, H, W) uint8. Raises UnreadableImage."""
        photo = Photo(image_set, index)
        return torch.stack([transform.of(photo) for transform in self.transforms])


class Follower(Protocol):
    """A training on the stream."""

    augmentation: Augmentation  # of the images that it trains on
    rows: np.ndarray  # (n,) images of the set that it trains on
    readouts: Readouts  # what its heads in this process read
    kinds: Sequence[FeatureKind]  # what its heads in all processes read
    iteration: int  # batches done of the epoch
    skipped: dict[int, str]  # image -> why it could not be read, so far
    followed: int  # images of the stream that went through the backbone in its epochs, in this run
    forwards: int  # its share of them

    @property
    def plan(self) -> EpochPlan: ...
    # A training step on features (B, D) of every readout and labels (B,), batch `number` of the epoch.
    def step(self, number: int, features: Mapping[str, Tensor], labels: Tensor) -> None: ...


@dataclass(kw_only=True)
class AugmentedStream:
    """The augmented training images in the order of an epoch, each once decoded, and of each augmentation once through
    the backbone for all that follow it.

    Order and crops depend on (seed, epoch, image) alone, and a follower's order is that of all images without those
    that it leaves out: alone and together it is given the same batches, to the rounding of forward passes.
    """

    image_set: ImageSet
    backbone: Backbone
    space: Workspace  # whose processes share the images
    chunk: int  # images of a forward pass
    shuffle_window: int = 0  # shards among which images are shuffled; 0: all images

    def run(self, epoch: int, followers: Sequence[Follower], pause: Callable[[], None]) -> None:
        """Give all followers the rest of their batches of an epoch, and call `pause` now and then, from any thread.

        Raises UnreadableImage, ValueError for features that are not finite, and what `pause` raises, in all processes.
        """
        images, space = self.image_set, self.space
        shards: list[tuple[int, np.ndarray]] = []
        everything = shuffled(len(images), space.seed, epoch)
        if self.shuffle_window:
            shards = windowed(shards_of(images), self.shuffle_window, space.seed, epoch)
            everything = joined_order(shards, self.shuffle_window)
        feeds, order = feeds_of(followers, everything, images.labels)
        if not feeds:
            return
        # Chunks as they were before a kill, so that a resumed training has the same bits.
        numbers = range(min(feed.first for feed in feeds) // self.chunk, -(-len(order) // self.chunk))
        spans = {at: range(at * self.chunk, min((at + 1) * self.chunk, len(order))) for at in numbers}
        by_augmentation: dict[Augmentation, list[Feed]] = {}
        for feed in feeds:
            by_augmentation.setdefault(feed.follower.augmentation, []).append(feed)
        windows = [Window(feeds_alike, self.backbone.spec) for feeds_alike in by_augmentation.values()]
        drawn: dict[str, Any] = dict(
            size=self.backbone.spec.size, seed=space.seed, epoch=epoch, names=order, decode=space.decode
        )
        drawn |= {name: getattr(self.backbone, name).flatten().tolist() for name in ("mean", "std")}
        transforms = [TrainTransform(**vars(augmentation), **drawn) for augmentation in by_augmentation]

        def consume(places: range, rows: Tensor, bad: Mapping[int, str]) -> None:
            for window, part in zip(windows, rows.split([window.vectors for window in windows], dim=1), strict=True):
                window.add(places, part.contiguous(), bad)  # so that no window keeps what another one is done with
            pause()
            next(ahead, None)

        ahead = self.reading(shards, np.flatnonzero(np.isin(everything, order)), spans)
        images = images.subset(order, f"epoch-{epoch}")
        with closing(ahead):
            next(ahead, None)
            self.send(images, Crops(transforms=transforms), [window.kinds for window in windows], spans, consume)
        passes = sum(map(len, spans.values()))
        for window in windows:  # followers of the same forward passes count equal shares of them
            share, rest = divmod(passes, len(window.feeds))
            for number, feed in enumerate(window.feeds):
                feed.follower.followed += passes
                feed.follower.forwards += share + (number < rest)

    def reading(
        self, shards: Sequence[tuple[int, np.ndarray]], among: np.ndarray, spans: Mapping[int, range]
    ) -> Generator[int]:
        """Reads what follows each piece of the stream; in the first process of each machine.

        shards: the parts of the order of all images. among: (n,) of each place of the stream, the place in that order.
        """
        images, world = self.image_set.images, self.space.world
        if not (shards and world.is_first_on_machine):
            return (place for place in range(0))
        assert isinstance(images, StoredImages)
        pieces = pieces_of(spans, world)
        lasts = [max(chunk for chunks in piece for chunk in chunks) for piece in pieces]
        steps = [int(among[place]) for place in (spans[min(spans)].start, *(spans[last].stop - 1 for last in lasts))]
        left = (part for part in shards if part[0] + (len(part[1]) - 1) * self.shuffle_window >= steps[0])
        distance = self.shuffle_window * len(self.image_set) // len(images.shards)
        return images.read_ahead(left, steps, distance)

    def send(
        self,
        images: ImageSet,
        transform: Windowed,
        kinds: Sequence[Sequence[FeatureKind]],
        spans: Mapping[int, range],
        consume: Consume,
    ) -> None:
        """Put images through the backbone, shared by the processes, and call `consume` with the pieces in order, in
        all of them. kinds: of each crop that the transform makes. spans: chunk -> its places among the images."""
        spec, device, space = self.backbone.spec, self.backbone.mean.device, self.space
        vectors = sum(kind.vectors(spec) for of_crop in kinds for kind in of_crop)
        pieces = Pieces(spans, (vectors, spec.width), consume, space.world, device)
        extractors = [Extractor(backbone=self.backbone, kinds=of_crop, image_set=images) for of_crop in kinds]

        def extract(loaded: Loaded, span: range) -> None:
            pixels, rows = loaded.pixels.to(device, non_blocking=True), []
            for extractor, crops in zip(
                extractors, pixels.view(len(span), -1, *pixels.shape[-3:]).unbind(1), strict=True
            ):
                computed = extractor(loaded._replace(pixels=crops.contiguous()), span)
                rows += [computed[kind].reshape(len(span), -1, spec.width) for kind in extractor.kinds]
            features = torch.from_numpy(np.concatenate(rows, axis=1))
            pieces.take(Chunk(loaded.number, features, loaded.unreadable))

        try:
            for_each_batch(Reader(images, transform, pieces.own, space.skip_bad), extract, device, space.workers)
            pieces.hand_on()  # the last piece, where this process has no chunk of it
        except Exception as error:
            if not hasattr(error, "reported_by"):  # the others do not know of it yet
                space.world.gather_results(partial(fail, error))
            raise


def fail(error: Exception) -> None:
    raise error


def feeds_of(
    followers: Sequence[Follower], everything: np.ndarray, labels: np.ndarray
) -> tuple[list["Feed"], np.ndarray]:
    """What each follower still takes of an epoch, and the images (n,) that any of them takes of it, in their order.

    everything: all images (N,) of the set in the order of the epoch. labels: (N,) theirs, in the order of the set.
    """
    taken = []
    for follower in followers:
        places = np.flatnonzero(np.isin(everything, follower.rows))
        taken.append(places[: follower.plan.count * follower.plan.size])
    needed = np.zeros(len(everything), bool)
    for places in taken:
        needed[places] = True
    order, place = everything[needed], np.cumsum(needed) - 1
    pairs = zip(followers, taken, strict=True)
    feeds = [Feed(follower, place[own_places], order, labels) for follower, own_places in pairs]
    return [feed for feed in feeds if not feed.is_over], order


class Feed:
    """The batches of one follower in one epoch."""

    def __init__(self, follower: Follower, places: np.ndarray, order: np.ndarray, labels: np.ndarray) -> None:
        """places: (m,) of its images. order: images (n,) of all places. labels: (N,) of the set's images."""
        self.follower, self.places, self.order, self.labels = follower, places, order, labels

    @property
    def is_over(self) -> bool:
        return self.follower.iteration == self.follower.plan.count

    @property
    def first(self) -> int:
        """The first place that it still needs; behind the last one when it is over."""
        return len(self.order) if self.is_over else int(self._batch()[0])

    def _batch(self) -> np.ndarray:
        start = self.follower.iteration * self.follower.plan.size
        return self.places[start : start + self.follower.plan.size]

    def advance(self, window: "Window") -> None:
        """Train on the batches of which all images are there, without the unreadable ones."""
        while not self.is_over and (places := self._batch())[-1] < window.end:
            follower, number = self.follower, self.follower.iteration
            bad = np.intersect1d(places, list(window.bad)).tolist() if window.bad else []
            follower.skipped |= {int(self.order[place]): window.bad[place] for place in bad}
            if len(bad) < len(places):
                places = places[~np.isin(places, bad)] if bad else places
                labels = torch.from_numpy(self.labels[self.order[places]]).to(window.device)
                follower.step(number, window.read(follower.readouts, places), labels)
            follower.iteration = number + 1


class Window:
    """Features of consecutive places, as far back as a follower needs them."""

    def __init__(self, feeds: Sequence[Feed], spec: FrozenSpec) -> None:
        """feeds: of one augmentation."""
        self.feeds = feeds
        self.kinds = list(dict.fromkeys(kind for feed in feeds for kind in feed.follower.kinds))
        ends = list(accumulate(kind.vectors(spec) for kind in self.kinds))
        self.columns = {
            kind: list(range(end - kind.vectors(spec), end)) for kind, end in zip(self.kinds, ends, strict=True)
        }
        self.vectors = ends[-1]
        self.bad: dict[int, str] = {}  # place -> why its image could not be read
        self.end = 0  # behind the last place
        self.device = torch.device("cpu")  # of the features
        self._pieces: list[tuple[range, Tensor]] = []

    def add(self, places: range, rows: Tensor, bad: Mapping[int, str]) -> None:
        """Take the next places and their features (M, V, D), train on all batches that are complete then, and forget
        what was read by all feeds."""
        self._pieces.append((places, rows))
        self.bad |= bad
        self.end, self.device = places.stop, rows.device
        for feed in self.feeds:
            feed.advance(self)
        before = min(feed.first for feed in self.feeds)
        self._pieces = [(span, rows) for span, rows in self._pieces if span.stop > before]
        self.bad = {place: reason for place, reason in self.bad.items() if place >= before}

    def read(self, readouts: Readouts, places: np.ndarray) -> dict[str, Tensor]:
        """Features (B, V D) of every readout at ascending places (B,), in memory of their own."""
        if not readouts:
            return {}
        pieces = [(span, rows) for span, rows in self._pieces if span.stop > places[0] and span.start <= places[-1]]
        offsets = torch.from_numpy(places - pieces[0][0].start).to(self.device)
        rows = torch.cat([rows for _, rows in pieces])[offsets]
        columns = {name: [place for kind in kinds for place in self.columns[kind]] for name, kinds in readouts.items()}
        return {name: rows[:, vectors].flatten(1) for name, vectors in columns.items()}
