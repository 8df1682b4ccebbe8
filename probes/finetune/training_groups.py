"""Which augmented images does each step of a fine-tuning train on? With timm's augmentation, mixup and cutmix.

A batch consists of groups, and images are mixed within a group: in the sources, the images of one GPU. The draws of
image i in epoch e depend on (seed, e, i, repeat) alone, and those of mixing on (seed, step, group). So neither the
number of loader processes nor a kill changes a training.

m images of a group, S side in pixels, C classes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from engine.errors import option
from engine.machine import own_cores
from engine.seeding import AUGMENT, MIX, seeded, shuffled
from engine.tasks import Workspace
from engine.training.loading import read_ahead
from engine.training.schedules import micro_batch_size
from imagesets.augmentation import draw_mix, mix_batch, random_transform, smooth_labels
from imagesets.decoding import UnreadableImage
from imagesets.sets import ImageSet
from imagesets.transforms import Photo
from probes.features.extract import MAX_LOADERS
from probes.finetune.settings import FinetuneSettings


def training_transform(
    settings: FinetuneSettings, size: int, mean: Sequence[float], std: Sequence[float]
) -> Callable[[Image.Image], Tensor]:
    """The augmentation: RGB image -> (3, size, size) float32, normalised; draws from the global random generators."""
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

    Images that do not fill a batch are left out: different ones in each epoch.
    """

    count: int  # training images
    batch: int  # images of a step, over all processes
    group: int  # images of a group
    seed: int  # of the order
    # How often an epoch repeats an image, of which it then has fewer (DeiT's RASampler). The repeats are next to each
    # other in a batch, so they are in different groups if there are enough groups.
    repeats: int = 1

    @property
    def steps_per_epoch(self) -> int:
        return self.count // self.batch

    @property
    def groups(self) -> int:
        """Groups of a step, over all processes."""
        return self.batch // self.group

    def images(self, step: int, group: int) -> list[tuple[int, int]]:
        """(index in the training set, number of the repeat) of each image in a group of `step`."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        order = shuffled(self.count, self.seed, epoch)
        first = step_in_epoch * self.batch + group
        positions = range(first, first + self.groups * self.group, self.groups)
        return [(int(order[position // self.repeats]), position % self.repeats) for position in positions]


def group_size(share: int, max_size: int, even: bool) -> int:
    """The largest divisor of `share` images up to `max_size`; an even one if `even`. ValueError if there is none."""
    if size := micro_batch_size(share, max_size, even):
        return size
    raise ValueError(
        f"{share} images for each process and step cannot be mixed in pairs; give an even batch for each process, or "
        f"none: {option('settings', {'finetune.mixup': 0})} finetune.cutmix=0 (semi.mixup for semi@...)"
    )


class MixedGroup(NamedTuple):
    """The images of a group, after mixup and cutmix."""

    images: Tensor  # (m, 3, S, S) float32
    targets: Tensor  # (m, C) probabilities
    unreadable: dict[str, str]  # path -> reason; the next readable image replaces it


@dataclass(frozen=True, kw_only=True, eq=False)
class MixedGroups:
    """A sequence of the groups of one process, step by step."""

    image_set: ImageSet
    plan: GroupPlan
    steps: range
    groups: range  # of each step, those of this process
    settings: FinetuneSettings  # of smoothing, mixup and cutmix
    transform: Callable[[Image.Image], Tensor]
    decode: Literal["exact", "fast"] = "exact"

    def __len__(self) -> int:
        return len(self.steps) * len(self.groups)

    def augment(self, numbers: tuple[int, ...], index: int) -> Tensor:
        """(3, S, S), image `index` of the set. Draws depend on the numbers alone. Raises UnreadableImage."""
        with seeded(AUGMENT, *numbers):
            return self.transform(Photo(self.image_set, index).pil_image(self.decode))

    def __getitem__(self, item: int) -> MixedGroup:
        step, group = self.steps[item // len(self.groups)], self.groups[item % len(self.groups)]
        epoch, seed = step // self.plan.steps_per_epoch, self.plan.seed
        unreadable: dict[int, str] = {}
        images, labels = [], []
        for index, repeat in self.plan.images(step, group):
            augment = partial(self.augment, (seed, epoch, index, repeat))
            image, read_index = self.image_set.next_readable(index, unreadable, augment)
            images.append(image)
            labels.append(int(self.image_set.labels[read_index]))
        batch = torch.stack(images)
        targets = smooth_labels(torch.tensor(labels), len(self.image_set.classes), self.settings.smoothing)
        if self.settings.mixes:
            with seeded(MIX, seed, step, group):
                batch, targets = mix_batch(batch, targets, draw_mix(self.settings.mixup, self.settings.cutmix))
        return MixedGroup(batch, targets, {self.image_set.path(index): why for index, why in unreadable.items()})


def mixed_groups(groups: MixedGroups, space: Workspace) -> Iterator[MixedGroup]:
    """The groups in order, loaded ahead of their use. Raises UnreadableImage unless `space.skip_bad`."""
    workers = space.workers
    if workers is None:  # a core augments 150 to 190 ImageNet files a second; a CPU needs its cores for the training
        workers = min(MAX_LOADERS, own_cores()) if torch.device(space.device).type == "cuda" else 0
    for group in read_ahead(groups, workers, space.device, ahead=2):
        if group.unreadable and not space.skip_bad:
            raise UnreadableImage(*next(iter(group.unreadable.items())))
        yield group
