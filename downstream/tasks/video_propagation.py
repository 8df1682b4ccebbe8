"""Video segmentation by label propagation: each patch takes the masks of the most similar patches before. DAVIS 2017.

Nothing is trained. As in DAVIS's evaluation, every object has the same weight in J and F. Intervals resample whole
videos.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import ClassVar

import numpy as np
import torch
from PIL import Image
from scipy.ndimage import distance_transform_edt
from torch import Tensor
from torch.nn import functional as F

from checkpoints.backbone import Backbone
from checkpoints.frozen import FrozenExport, FrozenSpec
from downstream.data.listing import IGNORED
from downstream.data.scenes import SceneSet, check_palettes, check_video, open_both, scene_image, scene_mask
from downstream.frozen.task import (
    FrozenTask,
    backbone_of,
    check_features,
    evaluation_work,
    map_across_processes,
    normalised_tensor,
    patch_maps,
    resampled_metrics,
)
from engine.errors import option
from engine.printing import say
from engine.progress import with_progress
from engine.settings import NonNegativeInt, PositiveFloat, PositiveInt
from engine.tasks import Outcome, Protocol, Workspace, smoke_protocol
from engine.work import Scale, Work

# N objects, T frames, V videos, H x W pixels, h x w patches, D width.

FRAME_SIZE = (480, 854)  # height and width of DAVIS's frames, as plans assume
STATISTICS = [f"{score}_{statistic}" for score in "JF" for statistic in ("mean", "recall", "decay")]
MEAN, STD = (0.485, 0.456, 0.406), (0.228, 0.224, 0.225)  # eval_video_segmentation.py; 0.228 is a slip for 0.229
LONG_SIDE_MULTIPLE = 64  # the longer side is rounded down to a multiple of it
WEIGHT_SCALE = 1 << 11  # OpenCV's weights of pixels are multiples of 1 / WEIGHT_SCALE


def frame_size(height: int, width: int, short: int, patch: int = 1) -> tuple[int, int]:
    """Height and width to which a frame is resized: the shorter side to `short`, the longer side to a multiple of 64.

    Both are then rounded down to multiples of the patch size.
    """
    long = int(short * max(height, width) / min(height, width)) // LONG_SIDE_MULTIPLE * LONG_SIDE_MULTIPLE
    sides = (long, short) if height > width else (short, long)
    return sides[0] // patch * patch, sides[1] // patch * patch


def resize_like_opencv(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Pixels (H, W, 3) uint8 resized to `size` (height, width), bit for bit as by OpenCV's bilinear cv2.resize."""
    top, bottom, row_weights = _interpolation(pixels.shape[0], size[0])
    left, right, column_weights = _interpolation(pixels.shape[1], size[1])
    values = pixels.astype(np.int64)
    rows = values[:, left] * (WEIGHT_SCALE - column_weights)[:, None] + values[:, right] * column_weights[:, None]
    row_weights = row_weights[:, None, None]
    upper, lower = (WEIGHT_SCALE - row_weights) * (rows[top] >> 4) >> 16, row_weights * (rows[bottom] >> 4) >> 16
    return np.clip((upper + lower + 2) >> 2, 0, 255).astype(np.uint8)


def _interpolation(side: int, new_side: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each new pixel along a side, its two old pixels, and the weight of the second of them in 1 / WEIGHT_SCALE."""
    positions = ((np.arange(new_side) + 0.5) * (side / new_side) - 0.5).astype(np.float32)
    first = np.floor(positions)
    weights = np.rint((positions - first) * WEIGHT_SCALE).astype(np.int64)
    first = first.astype(np.int64)
    return first.clip(0, side - 1), (first + 1).clip(0, side - 1), weights


def first_masks(annotation: np.ndarray, grid: tuple[int, int]) -> Tensor:
    """Object numbers (H, W) of the first frame -> masks (N+1, h, w), 1 for patches that show the object; 0 is the
    background. Objects that appear later are not followed."""
    small = Image.fromarray(annotation).resize(grid[::-1], Image.Resampling.NEAREST)
    labels = torch.from_numpy(np.array(small)).long()
    return F.one_hot(labels, int(annotation.max()) + 1).permute(2, 0, 1)


def neighbourhood_mask(grid: tuple[int, int], radius: int, device: torch.device | str = "cpu") -> Tensor:
    """(hw, hw), True for two patches that are at most `radius` rows and columns apart; radius 0: for all."""
    radius = radius or max(grid)
    rows, columns = (torch.arange(side, device=device) for side in grid)
    near_rows, near_columns = ((place[:, None] - place).abs() <= radius for place in (rows, columns))
    return (near_rows[:, None, :, None] & near_columns[None, :, None, :]).flatten(2).flatten(0, 1)


def propagate(
    context: Sequence[Tensor], masks: Sequence[Tensor], target: Tensor, near: Tensor, k: int, temperature: float
) -> Tensor:
    """Soft masks (N+1, h, w) of a frame: weighted means of the masks of the k most similar patches before.

    Args:
        context: features (hw, D) of each earlier frame.
        masks: soft masks (N+1, h, w) of each earlier frame.
        target: features (hw, D) of the frame.
        near: (hw, hw), True for patches that may be matched.
        k: patches, of all earlier frames together, that have a weight; more if several tie for the k-th place.
        temperature: of the weights exp(cosine / temperature).
    """
    target = F.normalize(target, dim=1)
    similarities = [torch.exp(target @ F.normalize(features, dim=1).T / temperature) * near for features in context]
    weights = torch.cat(similarities, dim=1)  # (hw, frames x hw)
    smallest = weights.topk(k, dim=1).values[:, -1:]
    weights = torch.where(weights < smallest, 0, weights)
    weights = weights / weights.sum(1, keepdim=True)
    sources = torch.cat([mask.flatten(1).to(weights) for mask in masks], dim=1)
    return (sources @ weights.T).unflatten(1, masks[0].shape[1:])


def masks_to_labels(soft: Tensor, patch: int, size: tuple[int, int]) -> np.ndarray:
    """Soft masks (N+1, h, w) -> object numbers (H, W) uint8 of `size`. Each mask is first stretched to 0 to 1."""
    large = F.interpolate(soft[None], scale_factor=patch, mode="bilinear", align_corners=False)[0]
    shifted = large - large.amin((1, 2), keepdim=True)
    largest = shifted.amax((1, 2), keepdim=True)
    labels = torch.where(largest > 0, shifted / largest, large).argmax(0).to(torch.uint8).cpu().numpy()
    return np.asarray(Image.fromarray(labels).resize(size[::-1], Image.Resampling.NEAREST))


def region_similarity(predicted: np.ndarray, truth: np.ndarray) -> float:
    """DAVIS's J of masks (H, W) bool: intersection over union, 1 if both are empty."""
    union = np.count_nonzero(predicted | truth)
    return np.count_nonzero(predicted & truth) / union if union else 1.0


def boundary(mask: np.ndarray) -> np.ndarray:
    """Boundary (H, W) bool of a mask (H, W) bool: pixels unlike the one to the right, below, or below to the right."""
    padded = np.pad(mask, ((0, 1), (0, 1)), mode="edge")
    right, below, diagonal = padded[:-1, 1:], padded[1:, :-1], padded[1:, 1:]
    return (mask != right) | (mask != below) | (mask != diagonal)


def contour_accuracy(predicted: np.ndarray, truth: np.ndarray, tolerance: float = 0.008) -> float:
    """DAVIS's F of masks (H, W) bool: F1 of their boundaries, whose pixels match within a distance.

    tolerance: that distance as a share of the image's diagonal.
    """
    distance = ceil(tolerance * np.linalg.norm(truth.shape))
    predicted_edge, true_edge = boundary(predicted), boundary(truth)
    if not (predicted_edge.any() and true_edge.any()):
        return float(predicted_edge.any() == true_edge.any())
    precision = (distance_transform_edt(~true_edge) <= distance)[predicted_edge].mean()
    recall = (distance_transform_edt(~predicted_edge) <= distance)[true_edge].mean()
    return float(2 * precision * recall / (precision + recall)) if precision + recall else 0.0


def frame_scores(predicted: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Object numbers (T, H, W) -> J and F (2, N, T-2) of the N objects in the first frame.

    The first and the last frame are not scored.
    """
    objects = range(1, int(truth[0].max()) + 1)
    scores = np.empty((2, len(objects), max(len(truth) - 2, 0)))
    for frame in with_progress(range(1, len(truth) - 1), "scoring masks", "frames"):
        for row, number in enumerate(objects):
            masks = predicted[frame] == number, truth[frame] == number
            scores[:, row, frame - 1] = region_similarity(*masks), contour_accuracy(*masks)
    return scores


def statistics(scores: np.ndarray) -> np.ndarray:
    """Scores (..., T) of frames -> (..., 3): mean, recall (share above 0.5), and decay (mean of the first quarter minus
    that of the last)."""
    edges = np.round(np.linspace(1, scores.shape[-1], 5) + 1e-10).astype(int) - 1
    first, last = (scores[..., edges[quarter] : edges[quarter + 1] + 1].mean(-1) for quarter in (0, 3))
    return np.stack([scores.mean(-1), (scores > 0.5).mean(-1), first - last], axis=-1)


@dataclass(frozen=True, kw_only=True)
class VideoPropagation(FrozenTask):
    """Settings of one evaluation."""

    COST: ClassVar[float] = 3.0
    is_random: ClassVar[bool] = False
    LAYOUT: ClassVar[str] = "davis"
    KEY: ClassVar[str] = "video_propagation"
    NEEDS_TRAIN: ClassVar[bool] = False

    short: PositiveInt = 480  # shorter side of the frames in pixels
    frames: PositiveInt = 7  # preceding frames whose masks are read, in addition to the first
    radius: NonNegativeInt = 12  # largest distance of matched patches in rows and columns; 0: no limit
    k: PositiveInt = 5  # most similar patches of all these frames, whose masks are averaged
    temperature: PositiveFloat = 0.1  # of their weights

    def grid(self, spec: FrozenSpec, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of patches of a frame. ValueError if it holds none."""
        size = frame_size(height, width, self.short, spec.patch_size)
        if not min(size):
            raise ValueError(
                f"frames of {height} x {width} pixels at short={self.short} hold no patch of {spec.patch_size}, as "
                f"their long side becomes a multiple of {LONG_SIDE_MULTIPLE}; "
                f"{option('settings', {f'{self.KEY}.short': 480})}"
            )
        return size[0] // spec.patch_size, size[1] // spec.patch_size

    def check_images(self, space: Workspace) -> None:
        super().check_images(space)
        (scenes,) = open_both(space, ["val"])
        videos = [] if space.skip_bad else [*scenes.videos.values()]
        for frames in with_progress(videos, f"checking frames of {scenes.url}", "videos"):
            space.world.on_rank0(partial(check_video, scenes, frames))

    def cost(self, scale: Scale) -> Work:
        self.check_network(scale.spec)
        rows, columns = self.grid(scale.spec, *(scale.size or FRAME_SIZE))
        side, pairs = round((rows * columns) ** 0.5), float(rows * columns) ** 2 * (self.frames + 1)
        flops, memory = 2.0 * scale.spec.width * pairs, 4 * 4 * pairs  # four matrices of float32
        return evaluation_work(scale, side * scale.spec.patch_size, flops, memory)

    def run(self, export: FrozenExport, space: Workspace) -> Outcome:
        (val,) = self.load_scenes(export, space, ["val"])
        scenes, backbone = val.scenes, backbone_of(export, space)
        if space.world.is_rank0 and scenes.url != space.data:  # --limit
            say(f"{scenes.url}: {scenes.notes[-1]}", errors=True)
        names, videos = list(scenes.videos), list(scenes.videos.values())
        left_out = {
            name: f"{np.isin(frames, val.indices, invert=True).sum()} of its {len(frames)} frames cannot be used"
            for name, frames in zip(names, videos, strict=True)
            if not np.isin(frames, val.indices).all()
        }
        usable = np.array([number for number, name in enumerate(names) if name not in left_out], int)

        def evaluate_video(number: int) -> np.ndarray | str:
            """STATISTICS (N, 6) of a video's objects, or with --skip-bad why it cannot be used."""
            try:
                truth = read_truth(scenes, videos[number])
                return object_statistics(self.predict(backbone, scenes, videos[number], truth[0]), truth)
            except ValueError as error:
                if not space.skip_bad:
                    raise
                return str(error)

        results = map_across_processes(usable, evaluate_video, space, f"propagating on {scenes.url}", "videos")
        by_video: dict[str, np.ndarray] = {}
        for number, result in results.items():
            if isinstance(result, str):
                left_out[names[number]] = result
            else:
                by_video[names[number]] = result
        if not by_video:
            raise ValueError(
                f"{scenes.url}: none of the {len(videos)} videos can be used; `bench data check` names what to mend"
            )
        objects = np.concatenate(list(by_video.values()))  # (N, 6)
        video_of_object = np.repeat(np.arange(len(by_video)), [len(values) for values in by_video.values()])
        facts = {
            "val": val.facts,
            "notes": list(scenes.notes),
            "objects": len(objects),
            "videos": list(by_video),
            "videos left out": left_out,
        }
        metrics = resampled_metrics(partial(mean_scores, objects, video_of_object), len(by_video))
        return Outcome(
            metrics={
                name: replace(
                    metric,
                    higher_is_better=not name.endswith("decay"),
                    resampled_units=len(by_video) if metric.resampled is not None else None,
                )
                for name, metric in metrics.items()
            },
            arrays={"objects": objects, "videos": video_of_object},
            facts=facts,
        )

    @torch.no_grad()
    def predict(self, backbone: Backbone, scenes: SceneSet, frames: list[int], first: np.ndarray) -> np.ndarray:
        """Object numbers (T, H, W) of a video, propagated from those of its first frame (H, W).

        Raises:
            ValueError: a frame, which the message names, cannot be read or has another size than the first mask.
        """
        spec, labels = backbone.spec, [first]
        first = np.where(first == IGNORED, 0, first).astype(np.uint8)
        height, width = first.shape
        rows, columns = self.grid(spec, height, width)
        size = rows * spec.patch_size, columns * spec.patch_size

        def read_features(index: int) -> Tensor:
            """Features (hw, D) of a frame."""
            pixels = np.asarray(scene_image(scenes, index))
            if pixels.shape[:2] != first.shape:
                raise ValueError(
                    f"{scenes.image_path(index)}: the frame is {pixels.shape[0]} x {pixels.shape[1]} pixels, and the "
                    f"video's first mask {height} x {width}; take both from the same download"
                )
            frame = normalised_tensor(Image.fromarray(resize_like_opencv(pixels, size)), MEAN, STD)
            features = patch_maps(backbone, frame[None], [(-1, True)])[0][0].flatten(1).T
            check_features(features, scenes.image_path(index))
            return features

        start = read_features(frames[0])
        start_masks = first_masks(first, (rows, columns)).to(start)
        near = neighbourhood_mask((rows, columns), self.radius, start.device)
        earlier: deque[tuple[Tensor, Tensor]] = deque(maxlen=self.frames)
        for index in with_progress(frames[1:], f"propagating {scenes.image_path(frames[0]).parent.name}", "frames"):
            features = read_features(index)
            context, masks = zip((start, start_masks), *earlier, strict=True)
            soft = propagate(context, masks, features, near, self.k, self.temperature)
            labels.append(masks_to_labels(soft, spec.patch_size, (height, width)))
            earlier.append((features, soft))
        return np.stack(labels)


def read_truth(scenes: SceneSet, frames: list[int]) -> np.ndarray:
    """Object numbers (T, H, W) of a video, IGNORED for pixels that no score counts.

    The N objects of the first frame are numbered from 1 to N, whatever the masks call them: DAVIS's evaluation would
    count a number that is left out as an object that is always right. Objects that appear later are background.

    Raises:
        ValueError: a mask, which the message names, has another size than the first, or the first shows no object.
    """
    check_video(scenes, frames[:1])
    first = scene_mask(scenes, frames[0])
    size = (first.shape[0], first.shape[1])
    others = with_progress(frames[1:], "reading masks", "frames")
    masks = np.stack([first, *(scene_mask(scenes, index, size) for index in others)])
    check_palettes(scenes, video=scenes.image_path(frames[0]).parent.name)
    numbers = np.setdiff1d(first, [0, IGNORED])
    renumbered = np.zeros(IGNORED + 1, np.uint8)
    renumbered[numbers], renumbered[IGNORED] = np.arange(1, len(numbers) + 1), IGNORED
    return renumbered[masks]


def object_statistics(predicted: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """STATISTICS (N, 6) of the objects of a video from its object numbers (T, H, W): of J and then of F."""
    void = truth == IGNORED
    scores = frame_scores(np.where(void, 0, predicted), np.where(void, 0, truth))
    return np.concatenate(list(statistics(scores)), axis=1)


def mean_scores(objects: np.ndarray, video_of_object: np.ndarray, weights: np.ndarray) -> dict[str, np.ndarray]:
    """Metric -> (R,) percent: means over the objects.

    objects: STATISTICS (N, 6). video_of_object: (N,). weights: (R, V), how often each video counts.
    """
    counts = weights[:, video_of_object]
    means = 100 * (counts @ objects) / counts.sum(1, keepdims=True)
    by_name = {name: means[:, column] for column, name in enumerate(STATISTICS)}
    return {"JF_mean": (means[:, 0] + means[:, 3]) / 2} | by_name


SOURCE = (
    "DINO (facebookresearch/dino 7c446df) eval_video_segmentation.py, its standard deviation 0.228 of red kept; J and "
    "F of davisvideochallenge/davis2017-evaluation ac7c43f"
)
PROTOCOLS = {
    "video_propagation@smoke": smoke_protocol(VideoPropagation(short=64, frames=3, radius=4), "seconds on tiny-davis:"),
    "video_propagation@dino": Protocol(task=VideoPropagation(), version=1, source=SOURCE),
}
DENSE = ("video_propagation@dino",)
SUITES = {"smoke": ("video_propagation@smoke",), "dense": DENSE, "full": DENSE, "everything": DENSE}
