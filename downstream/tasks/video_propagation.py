"""Video segmentation by propagated masks: the first frame's masks follow the patches that are most alike. DAVIS 2017.

Nothing is trained. Objects weigh equally in J and F, as in DAVIS's own evaluation; intervals draw whole videos.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from math import ceil
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from scipy.ndimage import distance_transform_edt
from torch import Tensor
from torch.nn import functional as F

from checkpoints.backbone import Backbone
from checkpoints.frozen import FrozenExport, FrozenSpec
from downstream.data.listing import IGNORED
from downstream.data.scenes import SceneSet, scene_image, scene_mask
from downstream.frozen.task import (
    FrozenTask,
    backbone_of,
    check_features,
    normalised_pixels,
    patch_maps,
    resampled_metrics,
    resamples,
    shared_out,
    work_of_images,
)
from downstream.layouts.davis import MIN_FRAMES
from downstream.metrics.scores import closing_seconds
from engine.settings import NonNegativeInt, PositiveFloat, PositiveInt
from engine.tasks import Outcome, Protocol, Workspace, smoke_protocol
from engine.work import Kind, Scale, Work, seconds_of

SHAPE = (480, 854)  # of DAVIS's frames, by which the work is counted
OBJECTS = 2  # of a video, as DAVIS 2017 has 61 in its 30 videos for validation
NAMES = [f"{score}_{figure}" for score in "JF" for figure in ("mean", "recall", "decay")]
# N objects, T frames, H x W pixels, h x w patches, D width.

MEAN, STD = (0.485, 0.456, 0.406), (0.228, 0.224, 0.225)  # eval_video_segmentation.py; 0.228 is a slip for 0.229
LONG_SIDE = 64  # the long side is cut to a multiple of it
SCALE = 1 << 11  # OpenCV's weights of pixels are multiples of 1 / SCALE


def frame_size(height: int, width: int, short: int, patch: int = 1) -> tuple[int, int]:
    """Height and width of what the network sees: whole patches, and a long side that is a multiple of 64."""
    long = int(short * max(height, width) / min(height, width)) // LONG_SIDE * LONG_SIDE
    sides = (long, short) if height > width else (short, long)
    return sides[0] // patch * patch, sides[1] // patch * patch


def resized_frame(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Pixels (H, W, 3) uint8 -> (H', W', 3) uint8 of `size`: OpenCV's bilinear resizing, in integers."""
    (rows, next_rows, down), (columns, next_columns, across) = map(_weights, pixels.shape[:2], size)
    values = pixels.astype(np.int64)
    lines = values[:, columns] * (SCALE - across)[:, None] + values[:, next_columns] * across[:, None]
    down = down[:, None, None]
    upper, lower = (SCALE - down) * (lines[rows] >> 4) >> 16, down * (lines[next_rows] >> 4) >> 16
    return np.clip((upper + lower + 2) >> 2, 0, 255).astype(np.uint8)


def _weights(side: int, new: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each new place the two old ones, and the weight of the second of them, of SCALE."""
    places = ((np.arange(new) + 0.5) * (side / new) - 0.5).astype(np.float32)
    first = np.floor(places)
    share = np.rint((places - first) * SCALE).astype(np.int64)
    first = first.astype(np.int64)
    return first.clip(0, side - 1), (first + 1).clip(0, side - 1), share


def first_masks(annotation: np.ndarray, grid: tuple[int, int]) -> Tensor:
    """Object numbers (H, W) of the first frame -> (N+1, h, w), 1 where a patch shows the object; 0 is the ground.
    Objects that appear later do not exist."""
    small = Image.fromarray(annotation).resize(grid[::-1], Image.Resampling.NEAREST)
    labels = torch.from_numpy(np.array(small)).long()
    return F.one_hot(labels, int(annotation.max()) + 1).permute(2, 0, 1)


def near(grid: tuple[int, int], radius: int, device: torch.device | str = "cpu") -> Tensor:
    """(hw, hw): whether two patches are at most `radius` rows and columns apart. A radius of 0: all of them."""
    rows, columns = (torch.arange(side, device=device) for side in grid)
    reach = radius or max(grid)
    down, across = ((place[:, None] - place).abs() <= reach for place in (rows, columns))
    return (down[:, None, :, None] & across[None, :, None, :]).flatten(2).flatten(0, 1)


def propagated(
    context: Sequence[Tensor], masks: Sequence[Tensor], target: Tensor, near: Tensor, k: int, temperature: float
) -> Tensor:
    """Soft masks (N+1, h, w) of a frame from those of the frames before.

    context: features (hw, D) of earlier frames. masks: theirs (N+1, h, w). target: features (hw, D) of the frame.
    near: (hw, hw), which patches may be alike. k: patches of all earlier frames whose masks count; more at a tie.
    """
    target = F.normalize(target, dim=1)
    alike = [torch.exp(target @ F.normalize(features, dim=1).T / temperature) * near for features in context]
    weights = torch.cat(alike, dim=1)  # (hw, frames x hw)
    least = weights.topk(k, dim=1).values[:, -1:]
    weights = torch.where(weights < least, 0, weights)
    weights = weights / weights.sum(1, keepdim=True)
    sources = torch.cat([mask.flatten(1).to(weights) for mask in masks], dim=1)
    return (sources @ weights.T).unflatten(1, masks[0].shape[1:])


def labels_of(soft: Tensor, patch: int, size: tuple[int, int]) -> np.ndarray:
    """Soft masks (N+1, h, w) -> object numbers (H, W) uint8 of `size`. Each mask is stretched to 0 to 1 before."""
    large = F.interpolate(soft[None], scale_factor=patch, mode="bilinear", align_corners=False)[0]
    lifted = large - large.amin((1, 2), keepdim=True)
    highest = lifted.amax((1, 2), keepdim=True)
    labels = torch.where(highest > 0, lifted / highest, large).argmax(0).to(torch.uint8).cpu().numpy()
    return np.asarray(Image.fromarray(labels).resize(size[::-1], Image.Resampling.NEAREST))


def region_similarity(predicted: np.ndarray, truth: np.ndarray) -> float:
    """DAVIS's J of masks (H, W) bool: intersection over union, 1 where both are empty."""
    union = np.count_nonzero(predicted | truth)
    return np.count_nonzero(predicted & truth) / union if union else 1.0


def boundary(mask: np.ndarray) -> np.ndarray:
    """Mask (H, W) bool -> its pixels that differ from the one to the right, below, or below and to the right."""
    padded = np.pad(mask, ((0, 1), (0, 1)), mode="edge")
    right, below, corner = padded[:-1, 1:], padded[1:, :-1], padded[1:, 1:]
    return (mask != right) | (mask != below) | (mask != corner)


def contour_accuracy(predicted: np.ndarray, truth: np.ndarray, tolerance: float = 0.008) -> float:
    """DAVIS's F of masks (H, W) bool: F1 of boundaries that are at most `tolerance` of the diagonal apart."""
    reach = ceil(tolerance * np.linalg.norm(truth.shape))
    edges = boundary(predicted), boundary(truth)
    if not (edges[0].any() and edges[1].any()):
        return float(edges[0].any() == edges[1].any())
    near_truth, near_predicted = (distance_transform_edt(~edge) <= reach for edge in edges[::-1])
    precision, recall = near_truth[edges[0]].mean(), near_predicted[edges[1]].mean()
    return float(2 * precision * recall / (precision + recall)) if precision + recall else 0.0


def frame_scores(predicted: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Object numbers (T, H, W) -> J and F (2, N, T-2) of the first frame's N objects; the first and the last
    frame are left out."""
    objects = range(1, int(truth[0].max()) + 1)
    pairs = [
        [(found == number, true == number) for found, true in zip(predicted, truth, strict=True)][1:-1]
        for number in objects
    ]
    return np.array(
        [[[score(*pair) for pair in own] for own in pairs] for score in (region_similarity, contour_accuracy)]
    )


def statistics(values: np.ndarray) -> np.ndarray:
    """Scores (..., T) of frames -> (..., 3): mean, share above 0.5, and mean of the first quarter minus the last."""
    edges = np.round(np.linspace(1, values.shape[-1], 5) + 1e-10).astype(int) - 1
    first, last = (values[..., edges[part] : edges[part + 1] + 1].mean(-1) for part in (0, 3))
    return np.stack([values.mean(-1), (values > 0.5).mean(-1), first - last], axis=-1)


@dataclass(frozen=True, kw_only=True)
class VideoPropagation(FrozenTask):
    """Settings of one evaluation."""

    COST: ClassVar[float] = 3.0
    LAYOUT: ClassVar[str] = "davis"
    KEY: ClassVar[str] = "video_propagation"

    short: PositiveInt = 480  # shorter side of the frames in pixels
    frames: PositiveInt = 7  # earlier frames whose masks are read, beside the first
    radius: NonNegativeInt = 12  # rows and columns of patches that an object moves at most; 0: any
    k: PositiveInt = 5  # patches of all these frames whose masks a patch takes
    temperature: PositiveFloat = 0.1  # of their weights

    def grid(self, spec: FrozenSpec, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of patches of a frame. ValueError where there is none."""
        size = frame_size(height, width, self.short, spec.patch_size)
        if not min(size):
            raise ValueError(
                f"frames of {height} x {width} pixels at short={self.short} hold no patch of {spec.patch_size}, as "
                f"their long side becomes a multiple of {LONG_SIDE}; --set {self.KEY}.short=480"
            )
        return size[0] // spec.patch_size, size[1] // spec.patch_size

    def summary(self, spec: FrozenSpec, images: Mapping[str, int]) -> dict[str, Any]:
        self.check_network(spec)
        rows, columns = self.grid(spec, *SHAPE)
        return {"frames": images["val"], "patches of a frame": rows * columns, "earlier frames": self.frames + 1}

    def cost(self, scale: Scale) -> Work:
        self.check_network(scale.spec)
        rows, columns = self.grid(scale.spec, *SHAPE)
        side, pairs = round((rows * columns) ** 0.5), float(rows * columns) ** 2 * (self.frames + 1)
        flops, memory = 2.0 * scale.spec.width * pairs, 4 * 4 * pairs  # four matrices of float32
        return work_of_images(scale, side * scale.spec.patch_size, flops, memory, resamples(scale))

    def benchmark(self, export: FrozenExport, space: Workspace, seconds: float) -> dict[Kind, float]:
        """Seconds of a frame, from reading to its scores, and of one resample of the videos."""
        scenes, backbone = self.opened(export, space)[1].scenes, backbone_of(export, space)
        videos = videos_of(scenes)
        frames = videos[0][: max(MIN_FRAMES, self.frames + 2)]
        truth = truth_of(scenes, frames)
        of_video = np.repeat(np.arange(len(videos)), OBJECTS)
        score = partial(averaged, np.zeros((len(of_video), len(NAMES))), of_video)
        per_video = seconds_of(lambda: scored(self.predicted(backbone, scenes, frames, truth[0]), truth), seconds)
        return {"evaluation": per_video / len(frames), "closing": closing_seconds(score, len(videos))}

    def run(self, export: FrozenExport, space: Workspace) -> Outcome:
        _, val = self.opened(export, space)
        scenes = val.scenes
        videos = videos_of(scenes)
        names = [scenes.image_path(frames[0]).parent.name for frames in videos]
        left_out = {
            name: f"{np.isin(frames, val.places, invert=True).sum()} of its {len(frames)} frames cannot be used"
            for name, frames in zip(names, videos, strict=True)
            if len(frames) < MIN_FRAMES or not np.isin(frames, val.places).all()
        }
        usable = np.array([place for place, name in enumerate(names) if name not in left_out], int)
        backbone = backbone_of(export, space)

        def figures_of(place: int) -> np.ndarray | str:
            """Figures (N, 6) of a video's objects, or why it cannot be used."""
            try:
                truth = truth_of(scenes, videos[place])
                return scored(self.predicted(backbone, scenes, videos[place], truth[0]), truth)
            except ValueError as error:
                if not space.skip_bad:
                    raise
                return str(error)

        results = shared_out(usable, figures_of, space, f"propagating on {scenes.url}", "videos")
        left_out |= {names[place]: why for place, why in results.items() if isinstance(why, str)}
        figures = {names[place]: own for place, own in results.items() if not isinstance(own, str)}
        if not figures:
            raise ValueError(
                f"{scenes.url}: none of the {len(videos)} videos can be used: a video needs {MIN_FRAMES} frames, all "
                "of them readable; raise --limit or mend what `bench data check` names"
            )
        objects = np.concatenate(list(figures.values()))  # (N, 6)
        of_video = np.concatenate([np.full(len(own), place) for place, own in enumerate(figures.values())])
        facts = {
            "val": val.facts,
            "notes": list(scenes.notes),
            "objects": len(objects),
            "videos": list(figures),
            "videos left out": left_out,
        }
        metrics = {
            name: replace(metric, higher_is_better=not name.endswith("decay"))
            for name, metric in resampled_metrics(partial(averaged, objects, of_video), len(figures)).items()
        }
        return Outcome(metrics=metrics, arrays={"objects": objects, "videos": of_video}, facts=facts, random=False)

    @torch.no_grad()
    def predicted(self, backbone: Backbone, scenes: SceneSet, frames: list[int], first: np.ndarray) -> np.ndarray:
        """Object numbers (T, H, W) of a video, from those of its first frame. ValueError names a frame of another
        size."""
        spec, labels = backbone.spec, [first]
        first = np.where(first == IGNORED, 0, first).astype(np.uint8)
        grid = self.grid(spec, *first.shape)
        window, masks, start = None, first_masks(first, grid), None
        earlier: deque[tuple[Tensor, Tensor]] = deque(maxlen=self.frames)
        for index in frames:
            pixels = np.asarray(scene_image(scenes, index))
            if pixels.shape[:2] != first.shape:
                raise ValueError(
                    f"{scenes.image_path(index)}: the frame is {pixels.shape[0]} x {pixels.shape[1]} pixels, and the "
                    f"video's first mask {first.shape[0]} x {first.shape[1]}; take both from the same download"
                )
            frame = resized_frame(pixels, (grid[0] * spec.patch_size, grid[1] * spec.patch_size))
            view = normalised_pixels(Image.fromarray(frame), MEAN, STD)[None]
            features = patch_maps(backbone, view, [(-1, True)])[0][0].flatten(1).T
            check_features(features, scenes.image_path(index))
            if start is None:
                start, masks = features, masks.to(features)
                window = near(grid, self.radius, features.device)
                continue
            assert window is not None
            context, known = zip((start, masks), *earlier, strict=True)
            soft = propagated(context, known, features, window, self.k, self.temperature)
            labels.append(labels_of(soft, spec.patch_size, (first.shape[0], first.shape[1])))
            earlier.append((features, soft))
        return np.stack(labels)


def videos_of(scenes: SceneSet) -> list[list[int]]:
    """The frames of each video, as places in the set."""
    return [list(places) for _, places in groupby(range(len(scenes)), lambda index: scenes.image_path(index).parent)]


def truth_of(scenes: SceneSet, frames: list[int]) -> np.ndarray:
    """Object numbers (T, H, W) of a video, IGNORED where no score counts. ValueError, naming the file, of a mask of
    another size than the first, and where the first shows no object."""
    masks = [scene_mask(scenes, frames[0])]
    if not ((masks[0] > 0) & (masks[0] != IGNORED)).any():
        raise ValueError(f"{scenes.mask_path(frames[0])}: the first frame shows no object to follow; give its mask")
    height, width = masks[0].shape
    return np.stack([*masks, *(scene_mask(scenes, index, (height, width)) for index in frames[1:])])


def scored(predicted: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Object numbers (T, H, W) -> of each object the mean, recall and decay of J, and of F: (N, 6)."""
    void = truth == IGNORED
    scores = frame_scores(np.where(void, 0, predicted), np.where(void, 0, truth))
    return np.concatenate(list(statistics(scores)), axis=1)


def averaged(objects: np.ndarray, of_video: np.ndarray, weights: np.ndarray) -> dict[str, np.ndarray]:
    """Figures (N, 6) of objects, the video (N,) of each, weights of videos (R, V) -> metric -> (R,) percent."""
    counts = weights[:, of_video]
    means = 100 * (counts @ objects) / counts.sum(1, keepdims=True)
    return {"JF_mean": (means[:, 0] + means[:, 3]) / 2} | {name: means[:, place] for place, name in enumerate(NAMES)}


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
