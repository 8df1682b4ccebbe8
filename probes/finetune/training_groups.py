"""Training images for fine-tuning: timm's augmentation, with mixup and cutmix inside groups.

A batch consists of groups, whose images are mixed with each other; in the sources a group is what one GPU holds.
Everything random about image i in epoch e comes from (seed, e, i, repeat), and about a mix from (seed, step, group), so
a training depends neither on the number of loader processes nor on being killed.

m images of a group, S side in pixels, C classes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from engine.machine import own_cores
from engine.seeding import AUGMENT, MIX, seeded, shuffled
from engine.tasks import Workspace
from engine.training.loading import read_ahead
from engine.training.schedules import micro_batch_size
from imagesets.augmentation import drawn_mix, mixed, random_transform, smoothed
from imagesets.decoding import UnreadableImage
from imagesets.sets import ImageSet
from imagesets.transforms import Photo
from probes.finetune.settings import FinetuneSettings

LOADERS = 8  # at most; a core makes 150 to 190 augmented ImageNet files a second


def training_transform(
    settings: FinetuneSettings, size: int, mean: Sequence[float], std: Sequence[float]
) -> Callable[[Image.Image], Tensor]:
    """Image -> (3, size, size) float32, normalised; draws from the global generators."""
    return random_transform(
        size,
        mean,
        std,
        policy=settings.policy,
        crop_scale=(settings.crop_scale, 1.0),
        flip=settings.flip,
        erase=settings.erase,
        interpolation=settings.train_interpolation,
    )


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """How the training images of an epoch are divided into steps and groups.

    Images that do not fill a batch are left out, others in every epoch.
    """

    count: int  # training images
    batch: int  # images of a step, over all processes
    group: int  # images of a group
    seed: int  # of the order
    # Times that an epoch shows an image (DeiT's RASampler); it then shows fewer images. The repeats of an image lie
    # next to each other in the batch, and so go to different groups, as far as there are enough.
    repeats: int = 1

    @property
    def steps_per_epoch(self) -> int:
        return self.count // self.batch

    @property
    def groups(self) -> int:
        """Groups of a step, over all processes."""
        return self.batch // self.group

    def images(self, step: int, group: int) -> list[tuple[int, int]]:
        """(place in the training set, number of the repeat) of each image of one group of `step`."""
        epoch, within = divmod(step, self.steps_per_epoch)
        order = shuffled(self.count, self.seed, epoch)
        first = within * self.batch + group
        positions = range(first, first + self.groups * self.group, self.groups)
        return [(int(order[position // self.repeats]), position % self.repeats) for position in positions]


def group_size(share: int, largest: int, even: bool) -> int:
    """The largest divisor of `share` images up to `largest`, an even one if `even`. ValueError where there is none."""
    if size := micro_batch_size(share, largest, even):
        return size
    raise ValueError(
        f"{share} images for each process and step cannot be mixed in pairs; give an even batch for each process, or "
        "none: --set finetune.mixup=0 finetune.cutmix=0 (semi.mixup for semi@...)"
    )


class MixedGroup(NamedTuple):
    """The images of a group, mixed."""

    images: Tensor  # (m, 3, S, S) float32
    targets: Tensor  # (m, C) probabilities
    unreadable: dict[str, str]  # path -> reason; the next readable image took its place


@dataclass(frozen=True, kw_only=True, eq=False)
class MixedGroups:
    """Groups of one process, step by step."""

    image_set: ImageSet
    plan: GroupPlan
    steps: range
    groups: range  # of each step
    settings: FinetuneSettings  # how images are mixed
    transform: Callable[[Image.Image], Tensor]
    decode: Literal["exact", "fast"] = "exact"

    def __len__(self) -> int:
        return len(self.steps) * len(self.groups)

    def augmented(self, numbers: tuple[int, ...], place: int) -> Tensor:
        """The image at a place, with draws that depend on the numbers alone. Raises UnreadableImage."""
        with seeded(AUGMENT, *numbers):
            return self.transform(Photo(self.image_set, place).opened(self.decode))

    def __getitem__(self, item: int) -> MixedGroup:
        step, group = self.steps[item // len(self.groups)], self.groups[item % len(self.groups)]
        epoch, seed, classes = step // self.plan.steps_per_epoch, self.plan.seed, len(self.image_set.classes)
        unreadable: dict[int, str] = {}
        images, labels = [], []
        for index, repeat in self.plan.images(step, group):
            make = partial(self.augmented, (seed, epoch, index, repeat))
            image, place = self.image_set.next_readable(index, unreadable, make)
            images.append(image)
            labels.append(int(self.image_set.labels[place]))
        batch, targets = torch.stack(images), smoothed(torch.tensor(labels), classes, self.settings.smoothing)
        if self.settings.mixes:
            with seeded(MIX, seed, step, group):
                batch, targets = mixed(batch, targets, drawn_mix(self.settings.mixup, self.settings.cutmix))
        return MixedGroup(batch, targets, {self.image_set.path(place): why for place, why in unreadable.items()})


def loaders(space: Workspace) -> int:
    """Loader processes: as asked, else some for a GPU and none for a CPU, whose cores the training needs."""
    if space.workers is not None:
        return space.workers
    return min(LOADERS, own_cores()) if torch.device(space.device).type == "cuda" else 0


def mixed_groups(groups: MixedGroups, space: Workspace) -> Iterator[MixedGroup]:
    """All groups in order. Raises UnreadableImage unless `space.skip_bad`."""
    for group in read_ahead(groups, loaders(space), space.device, ahead=2):
        if group.unreadable and not space.skip_bad:
            raise UnreadableImage(*next(iter(group.unreadable.items())))
        yield group
