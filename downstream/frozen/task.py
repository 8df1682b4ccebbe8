"""What tasks on the patches of a frozen network share: usable scenes, maps of patches, and work shared by processes.

B images, D width, h x w patches, H x W pixels.
"""

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
from downstream.data.scenes import SceneSet, check_layout, open_both
from downstream.metrics.scores import weighted_scores
from engine.progress import Progress
from engine.tasks import Metric, Score, Task, Workspace, resampled, resamples_of
from engine.work import Part, Scale, Work

# Mean and standard deviation of several sources for every network.
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Each = TypeVar("Each")
Random = np.random.RandomState  # what augmentations draw from
Layer = tuple[int, bool]  # number of a block, negative from the end; whether the final norm follows


class UsableScenes(NamedTuple):
    """One split, and the scenes that a run with --skip-bad leaves out. places: (n,) of the usable scenes."""

    scenes: SceneSet
    places: np.ndarray
    skipped: Mapping[str, str]  # path -> why

    @property
    def facts(self) -> dict[str, Any]:
        return self.scenes.facts | {"skipped": dict(self.skipped)}

    def key(self, export: FrozenExport, space: Workspace) -> dict[str, Any]:
        """Everything that cached features of these scenes depend on."""
        return {
            "export": export.digest,
            "images": self.scenes.fingerprint,
            "used": np.asarray(self.places).tolist() if len(self.places) < len(self.scenes) else None,
            "machine": [torch.device(space.device).type, space.precision, space.compiled],
        }

    def subset(self, chosen: np.ndarray) -> "UsableScenes":
        """The usable scenes at `chosen` places of `places` alone."""
        return self._replace(places=self.places[np.sort(chosen)])


class FrozenTask(Task):
    """Base of these tasks."""

    KEY: ClassVar[str]  # name of its file, and of its folder in the cache

    def check_network(self, spec: FrozenSpec) -> None:
        if not spec.has_patches:
            raise ValueError(
                f"{getattr(spec, 'reference', spec.label)} returns one vector per image, and {self.KEY} reads patch "
                "tokens: let it return class token or None, patch tokens and their grid"
            )

    def check_images(self, space: Workspace) -> None:
        check_layout(space.data, self.LAYOUT)
        if space.decode != "exact":
            raise ValueError(f"{space.data}: dense tasks read images exactly; run them without --decode {space.decode}")

    def opened(self, export: FrozenExport, space: Workspace) -> tuple[UsableScenes, UsableScenes]:
        """Training and validation scenes. ValueError for a network or images that cannot be evaluated, and where a run
        with --skip-bad would leave no image."""
        self.check_network(export.spec)
        self.check_images(space)
        usable = []
        for scenes in open_both(space):
            bad = space.world.on_rank0(partial(getattr, scenes, "unusable")) if space.skip_bad else {}
            places = np.setdiff1d(np.arange(len(scenes)), np.array(list(bad), np.int64))
            if not len(places):
                raise ValueError(
                    f"{scenes.url}: none of the {len(scenes)} scenes of {scenes.split} can be used; the first is "
                    f"{next(iter(bad.values()))}"
                )
            usable.append(UsableScenes(scenes, places, {str(scenes.image(place)): why for place, why in bad.items()}))
        return usable[0], usable[1]


def check_classes(space: Workspace, *splits: UsableScenes) -> None:
    """ValueError where the masks of a split hold fewer than two classes, or one of them cannot be read."""

    def check() -> None:
        for scenes, places, _ in splits:
            used = scenes if len(places) == len(scenes) else scenes.subset(places, "usable")
            used.pixels.check()

    space.world.on_rank0(check)


def work_of_images(scale: Scale, side: int, flops: float, memory: float, *parts: Part) -> Work:
    """The work of encoding validation images one at a time, and other parts. side: of an image in pixels, about. flops,
    memory: FLOPs and bytes that an image needs beside the network."""
    evaluation = Part(
        kind="evaluation", count=scale.images["val"], flops=float(forward_flops(scale.spec, side)) + flops
    )
    return Work(parts=(evaluation, *parts), memory=frozen_bytes(scale.spec, 1, side) + memory)


def resamples(scale: Scale) -> Part:
    """The work of resampling the validation images."""
    return Part(kind="closing", count=resamples_of(scale.images["val"]))


class SizedBackbone(Backbone):
    """A backbone that resizes tables of relative positions for each size of images; other networks take any size."""

    def __init__(self, export: FrozenExport, space: Workspace) -> None:
        super().__init__(export, space.device, space.precision, space.compiled)
        self.export, self.space = export, space
        self.others: dict[tuple[int, int], SizedBackbone] = {}

    def of_size(self, images: Tensor) -> "SizedBackbone":
        """The backbone whose tables fit these images."""
        size, export = (images.shape[-2], images.shape[-1]), self.export
        if not isinstance(export, ViTExport) or export.spec.relative_position == "none" or size == export.spec.size:
            return self
        if size not in self.others:
            self.others[size] = SizedBackbone(export.at_size(size), self.space)
        return self.others[size]

    def views(self, images: Tensor, wanted: Sequence[Layer]) -> dict[Layer, Features]:
        return Backbone.views(self.of_size(images), images, wanted)

    def keys(self, images: Tensor) -> Tensor:
        return Backbone.keys(self.of_size(images), images)


def backbone_of(export: FrozenExport, space: Workspace) -> Backbone:
    """The frozen network on the workspace's device."""
    return SizedBackbone(export, space)


def patch_maps(backbone: Backbone, images: Tensor, layers: Sequence[Layer], cls: bool = False) -> list[Tensor]:
    """Normalised images (B, 3, H, W), H and W multiples of the patch -> of each layer (B, D, h, w); registers and class
    tokens are no patches. cls: with the class token beside each patch, (B, 2D, h, w)."""
    views = backbone.views(images.to(backbone.mean.device), layers)
    maps = []
    for layer in layers:
        patches = views[layer].patches.permute(0, 3, 1, 2)
        if cls:
            token = views[layer].cls
            assert token is not None  # checked by check_network
            patches = with_class_token(patches, token)
        # A copy outside of inference mode, on which heads can be trained; channels first, or convolutions would round
        # otherwise than on what processes exchange.
        maps.append(patches.clone(memory_format=torch.contiguous_format))
    return maps


def check_features(features: Tensor, path: Path) -> None:
    """ValueError, naming the image's file, for features that are NaN or infinite."""
    if not features.isfinite().all():
        raise ValueError(f"{path}: its features are not finite; check the image, or the checkpoint's weights")


def with_class_token(patches: Tensor, cls: Tensor) -> Tensor:
    """Patch map (B, D, h, w) and class tokens (B, D) -> (B, 2D, h, w)."""
    return torch.cat([patches, cls[..., None, None].expand_as(patches)], dim=1)


def whole_patches(side: int, spec: FrozenSpec) -> int:
    """The next multiple of the patch from `side` on."""
    return -(-side // spec.patch_size) * spec.patch_size


def own_share(items: np.ndarray, space: Workspace) -> np.ndarray:
    """The items that this process works on."""
    return items[space.world.rank :: space.world.size]


def shared_out(
    items: np.ndarray, work: Callable[[int], Each], space: Workspace, label: str, unit: str = "images"
) -> dict[int, Each]:
    """Item -> `work` of it, in order and in every process. The items are divided among the processes."""
    world = space.world

    def share() -> dict[int, Each]:
        own, results = own_share(items, space).tolist(), {}
        with Progress(label, len(own), unit, quiet=not world.is_rank0) as progress:
            for item in own:
                results[item] = work(item)
                progress.advance(1)
        return results

    return dict(sorted(ChainMap(*world.gather_results(share)).items()))


class Batches:
    """Item i: images (B, 3, H, W) and targets (B, H', W') that `read_one` gives of `batches[i]`; ValueError where one
    cannot be read."""

    def __init__(self, read_one: Callable[[int], tuple[Tensor, Tensor]], batches: Sequence[Sequence[int]]) -> None:
        self.read_one, self.batches = read_one, batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, item: int) -> tuple[Tensor, Tensor]:
        images, targets = zip(*map(self.read_one, self.batches[item]), strict=True)
        return torch.stack(images), torch.stack(targets)


def resampled_metrics(score: Score, images: int) -> dict[str, Metric]:
    """The metrics of `score` (engine/tasks.py) on so many images, and their values on resamples of these."""
    values, drawn = score(np.ones((1, images))), resampled(score, images)
    return {name: Metric(value=float(value[0]), resampled=drawn[name]) for name, value in values.items()}


def areas_score(scenes: SceneSet) -> Score:
    """A score of made-up areas, of as many images and classes as the set has, for timing."""
    return partial(weighted_scores, [np.ones((len(scenes), max(len(scenes.classes), 1), 3), np.int64)])


def nearest(labels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Labels (H, W) resized to `size` (height, width) by the pixels at floor(i * in / out)."""
    rows, columns = (np.arange(new) * old // new for new, old in zip(size, labels.shape, strict=True))
    return labels[rows][:, columns]


def normalised(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(3, H, W) uint8 -> float32."""
    means, stds = (torch.tensor(values).view(3, 1, 1) for values in (mean, std))
    return (pixels.float() - 255 * means) / (255 * stds)


def normalised_pixels(image: Image.Image, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(3, H, W) float32, scaled to 0 to 1 first, as some sources do; it rounds otherwise than `normalised`."""
    means, stds = (torch.tensor(values).view(3, 1, 1) for values in (mean, std))
    return (vision.pil_to_tensor(image).float() / 255 - means) / stds


def to_whole_patches(images: Tensor, patch: int) -> Tensor:
    """Images (B, 3, H, W) with zeros at the right and bottom up to multiples of the patch."""
    return F.pad(images, (0, -images.shape[-1] % patch, 0, -images.shape[-2] % patch))


def centre_padded(images: Tensor, patch: int) -> Tensor:
    """Images (B, 3, H, W) with zeros on all sides up to multiples of the patch, the larger half right and below."""
    height, width = -images.shape[-2] % patch, -images.shape[-1] % patch
    return F.pad(images, (width // 2, width - width // 2, height // 2, height - height // 2))


def areas_of(
    predicted: np.ndarray, labels: np.ndarray, classes: int, ignored: Sequence[int] = (IGNORED,)
) -> np.ndarray:
    """(K, 3) pixels of one image by class, for downstream.metrics.scores: predicted rightly, predicted, labelled.

    predicted, labels: of one shape, classes below K. Pixels whose label is in `ignored` count nowhere.
    """
    known = ~np.isin(labels, ignored)
    truth, seen = labels[known].astype(np.int64), predicted[known].astype(np.int64)
    return np.stack([np.bincount(values, minlength=classes) for values in (truth[truth == seen], seen, truth)], axis=1)
