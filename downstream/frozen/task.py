"""What the tasks on patches of a frozen network share: readable scenes, patch maps, work divided among processes.

B images, D width, h x w patches, H x W pixels, K classes.
"""

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import functional as vision

from checkpoints.backbone import Backbone, Features
from checkpoints.export import ViTExport
from checkpoints.flops import forward_flops, frozen_bytes
from checkpoints.frozen import FrozenExport, FrozenSpec
from downstream.data.listing import IGNORED
from downstream.data.scenes import SceneSet, check_workspace, open_both
from engine.progress import Progress
from engine.tasks import Metric, Score, Task, Workspace, resampled
from engine.work import Part, Scale, Work
from imagesets.sets import SPLITS, Split

# Mean and standard deviation with which several sources normalise the images of every network.
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Result = TypeVar("Result")
Random = np.random.RandomState  # from which augmentations draw
Layer = tuple[int, bool]  # index of a block, negative from the end; whether the final norm follows


class UsableScenes(NamedTuple):
    """The scenes of one split that a run uses: all of them, or with --skip-bad those that can be read.

    indices: (n,) in the split, ascending. skipped: path of each image that is left out -> reason.
    """

    scenes: SceneSet
    indices: np.ndarray
    skipped: Mapping[str, str]

    @property
    def used(self) -> SceneSet:
        """The set of the usable scenes alone."""
        return self.scenes if len(self.indices) == len(self.scenes) else self.scenes.subset(self.indices, "usable")

    @property
    def facts(self) -> dict[str, Any]:
        """What results record about the split."""
        return self.scenes.facts | {"skipped": dict(self.skipped)}

    def key(self, export: FrozenExport, space: Workspace) -> dict[str, Any]:
        """Everything that cached features of these scenes depend on."""
        return {
            "export": export.digest,
            "images": self.scenes.fingerprint,
            "used": np.asarray(self.indices).tolist() if len(self.indices) < len(self.scenes) else None,
            "machine": [torch.device(space.device).type, space.precision, space.compiled],
        }

    def subset(self, positions: np.ndarray) -> "UsableScenes":
        """The usable scenes at `positions` (m,) in `indices`, in ascending order."""
        return self._replace(indices=self.indices[np.sort(positions)])


def usable_scenes(scenes: SceneSet, space: Workspace) -> UsableScenes:
    """A split without the scenes that --skip-bad leaves out. ValueError if no scene can be read."""
    reasons = space.world.on_rank0(lambda: scenes.unusable) if space.skip_bad else {}
    indices = np.setdiff1d(np.arange(len(scenes)), np.array(list(reasons), np.int64))
    if not len(indices):
        raise ValueError(
            f"{scenes.url}: none of the {len(scenes)} scenes of {scenes.split} can be used; the first is "
            f"{next(iter(reasons.values()))}"
        )
    return UsableScenes(scenes, indices, {str(scenes.image_path(index)): why for index, why in reasons.items()})


class FrozenTask(Task):
    """Base of the tasks that read patches of a frozen network."""

    KEY: ClassVar[str]  # name of the task's file, and of its folder in the cache

    def check_network(self, spec: FrozenSpec) -> None:
        if not spec.has_patches:
            raise ValueError(
                f"{getattr(spec, 'reference', spec.label)} returns one vector per image, and {self.KEY} reads patch "
                "tokens: let it return class token or None, patch tokens and their grid"
            )

    def check_images(self, space: Workspace) -> None:
        check_workspace(space, self.LAYOUT)

    def load_scenes(
        self, export: FrozenExport, space: Workspace, splits: Sequence[Split] = SPLITS
    ) -> list[UsableScenes]:
        """Usable training and validation scenes, or those of other `splits`.

        Raises:
            ValueError: the task cannot evaluate the network or the images, or --skip-bad would leave no image.
        """
        self.check_network(export.spec)
        self.check_images(space)
        return [usable_scenes(scenes, space) for scenes in open_both(space, splits)]


def best_choice(mious: Sequence[float], space: Workspace) -> int:
    """Index of the highest mIoU on the held-out images, the first of equals. ValueError if these have no labels."""
    if np.isnan(mious).any():
        raise ValueError(
            f"{space.data}: no pixel of the held-out training images is of a class, so that they choose nothing; raise "
            "holdout, or leave out images without labels"
        )
    return int(np.argmax(mious))


def evaluation_work(scale: Scale, side: int, flops: float, memory: float) -> Work:
    """The work of evaluating the validation images one at a time.

    side: approximate side of an image in pixels. flops, memory: FLOPs and bytes per image in addition to the network's.
    """
    count = scale.images["val"]
    parts = (
        Part(kind="evaluation", count=count, flops=float(forward_flops(scale.spec, side))),
        Part(kind="heads", count=count, flops=flops),
    )
    return Work(parts=parts, memory=frozen_bytes(scale.spec, 1, side) + memory)


class SizedBackbone(Backbone):
    """A backbone for images of any size. Tables of relative positions are resized once for each size of images."""

    def __init__(self, export: FrozenExport, space: Workspace) -> None:
        super().__init__(export, space.device, space.precision, space.compiled)
        self.export, self.space = export, space
        self.resized: dict[tuple[int, int], SizedBackbone] = {}  # by height and width of the images

    def for_images(self, images: Tensor) -> "SizedBackbone":
        """The backbone whose tables fit images (B, 3, H, W)."""
        size, export = (images.shape[-2], images.shape[-1]), self.export
        if not isinstance(export, ViTExport) or export.spec.relative_position == "none" or size == export.spec.size:
            return self
        if size not in self.resized:
            self.resized[size] = SizedBackbone(export.at_size(size), self.space)
        return self.resized[size]

    def views(self, images: Tensor, layers_and_norms: Sequence[Layer]) -> dict[Layer, Features]:
        return Backbone.views(self.for_images(images), images, layers_and_norms)

    def keys(self, images: Tensor) -> Tensor:
        return Backbone.keys(self.for_images(images), images)


def backbone_of(export: FrozenExport, space: Workspace) -> Backbone:
    """The frozen network on the workspace's device, for images of any size."""
    return SizedBackbone(export, space)


def patch_maps(backbone: Backbone, images: Tensor, layers: Sequence[Layer], cls: bool = False) -> list[Tensor]:
    """Patch features (B, D, h, w) of each layer, without registers and class token.

    Args:
        backbone: of `backbone_of`.
        images: normalised, (B, 3, H, W); H and W are multiples of the patch size.
        layers: which layers to read.
        cls: append the class token's channels to each patch's: (B, 2D, h, w).
    """
    features = backbone.views(images.to(backbone.mean.device), layers)
    maps = []
    for layer in layers:
        patches = features[layer].patches.permute(0, 3, 1, 2)
        if cls:
            token = features[layer].cls
            assert token is not None  # checked by check_network
            patches = torch.cat([patches, token[..., None, None].expand_as(patches)], dim=1)
        # A copy, because autograd refuses tensors made in inference mode; contiguous like the features that processes
        # exchange, because convolutions of another memory format round differently.
        maps.append(patches.clone(memory_format=torch.contiguous_format))
    return maps


def check_features(features: Tensor, path: Path) -> None:
    """ValueError, naming the image's file, for features that are NaN or infinite."""
    if not features.isfinite().all():
        raise ValueError(f"{path}: its features are not finite; check the image, or the checkpoint's weights")


def round_up_to_patch(side: int, spec: FrozenSpec) -> int:
    """`side` in pixels, rounded up to a multiple of the patch size."""
    return -(-side // spec.patch_size) * spec.patch_size


def map_across_processes(
    items: np.ndarray, work: Callable[[int], Result], space: Workspace, label: str, unit: str = "images"
) -> dict[int, Result]:
    """Item -> `work(item)`, ascending, in every process. The items (n,) are divided among the processes."""
    world = space.world

    def work_on_share() -> dict[int, Result]:
        share, results = items[world.rank :: world.size].tolist(), {}
        with Progress(label, len(share), unit) as progress:
            for item in share:
                results[item] = work(item)
                progress.advance(1)
        return results

    return dict(sorted(ChainMap(*world.gather_results(work_on_share)).items()))


class Batches:
    """A dataset of batches: item i stacks `read(number)` of the numbers in `batches[i]`.

    read: number -> image (3, H, W) and target (H', W'); ValueError if it cannot be read.
    """

    def __init__(self, read: Callable[[int], tuple[Tensor, Tensor]], batches: Sequence[Sequence[int]]) -> None:
        self.read, self.batches = read, batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, item: int) -> tuple[Tensor, Tensor]:
        images, targets = zip(*map(self.read, self.batches[item]), strict=True)
        return torch.stack(images), torch.stack(targets)


def resampled_metrics(score: Score, images: int) -> dict[str, Metric]:
    """The metrics that `score` (engine/tasks.py) computes, with their values on resamples of the N = `images`.

    A single image or video has no other resample than itself, and so no interval.
    """
    values, on_resamples = score(np.ones((1, images))), resampled(score, images) if images > 1 else {}
    return {name: Metric(value=float(value[0]), resampled=on_resamples.get(name)) for name, value in values.items()}


def resize_nearest(labels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Labels (H, W) resized to `size` (height, width): output pixel i reads input pixel floor(i * in / out)."""
    rows, columns = (np.arange(new) * old // new for new, old in zip(size, labels.shape, strict=True))
    return labels[rows][:, columns]


def normalise(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Pixels (3, H, W) from 0 to 255 -> float32, normalised by a mean and std (3,) of values from 0 to 1."""
    means, stds = (torch.tensor(values).view(3, 1, 1) for values in (mean, std))
    return (pixels.float() - 255 * means) / (255 * stds)


def normalised_tensor(image: Image.Image, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Image -> (3, H, W) float32, scaled to 0 to 1 and then normalised, which rounds differently from `normalise`."""
    means, stds = (torch.tensor(values).view(3, 1, 1) for values in (mean, std))
    return (vision.pil_to_tensor(image).float() / 255 - means) / stds


def pad_to_patches(images: Tensor, patch: int) -> Tensor:
    """Pad images (B, 3, H, W) with zeros at the right and bottom to multiples of the patch size."""
    return F.pad(images, (0, -images.shape[-1] % patch, 0, -images.shape[-2] % patch))


def pad_centred(images: Tensor, patch: int) -> Tensor:
    """Pad images (B, 3, H, W) with zeros on all sides to multiples of the patch size.

    An odd row or column of zeros goes below or right.
    """
    height, width = -images.shape[-2] % patch, -images.shape[-1] % patch
    return F.pad(images, (width // 2, width - width // 2, height // 2, height - height // 2))


def class_areas(
    predicted: np.ndarray, labels: np.ndarray, classes: int, ignored: Sequence[int] = (IGNORED,)
) -> np.ndarray:
    """Pixels (K, 3) of one image by class, for downstream/metrics/scores.py: correctly predicted, predicted, labelled.

    predicted, labels: of equal shape, classes below K. Pixels whose label is in `ignored` are not counted.
    """
    known = ~np.isin(labels, ignored)
    truth, guess = labels[known].astype(np.int64), predicted[known].astype(np.int64)
    correct = truth[truth == guess]
    return np.stack([np.bincount(values, minlength=classes) for values in (correct, guess, truth)], axis=1)
