"""Video segmentation by propagated masks: the first frame's masks follow the patches that are most alike. DAVIS 2017.

Nothing is trained. Objects weigh equally in J and F, as in DAVIS's own evaluation; intervals draw whole videos.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from checkpoints.backbone import Backbone
from checkpoints.flops import forward_flops, frozen_bytes
from checkpoints.frozen import FrozenExport, FrozenSpec
from downstream.data.listing import IGNORED
from downstream.data.scenes import SceneSet, mask_classes, scene_image
from downstream.frozen import propagation as steps
from downstream.frozen.task import (
    FrozenTask,
    backbone_of,
    check_features,
    closing_seconds,
    patch_maps,
    resampled_metrics,
    shared_out,
)
from downstream.layouts.davis import FEWEST
from engine.resampling import resamples_of
from engine.settings import NonNegativeInt, PositiveFloat, PositiveInt
from engine.tasks import Outcome, Protocol, Workspace
from engine.work import Kind, Part, Scale, Work, seconds_of

SHAPE = (480, 854)  # of DAVIS's frames, by which the work is counted
OBJECTS = 2  # of a video, as DAVIS 2017 has 61 in its 30 videos for validation
NAMES = [f"{score}_{figure}" for score in "JF" for figure in ("mean", "recall", "decay")]


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
        size = steps.frame_size(height, width, self.short, spec.patch_size)
        if not min(size):
            raise ValueError(
                f"frames of {height} x {width} pixels at short={self.short} hold no patch of {spec.patch_size}, as "
                f"their long side becomes a multiple of {steps.LONG_SIDE}; --set {self.KEY}.short=480"
            )
        return size[0] // spec.patch_size, size[1] // spec.patch_size

    def summary(self, spec: FrozenSpec, images: Mapping[str, int]) -> dict[str, Any]:
        self.check_network(spec)
        rows, columns = self.grid(spec, *SHAPE)
        return {"frames": images["val"], "patches of a frame": rows * columns, "earlier frames": self.frames + 1}

    def cost(self, scale: Scale) -> Work:
        self.check_network(scale.spec)
        (rows, columns), spec = self.grid(scale.spec, *SHAPE), scale.spec
        patches, side = rows * columns, round((rows * columns) ** 0.5) * scale.spec.patch_size
        pairs = float(patches) ** 2 * (self.frames + 1)
        parts = (
            Part(
                kind="evaluation",
                count=scale.images["val"],
                flops=float(forward_flops(spec, side)) + 2.0 * spec.width * pairs,
            ),
            Part(kind="closing", count=resamples_of(scale.images["val"])),
        )
        return Work(parts=parts, memory=frozen_bytes(spec, 1, side) + 4 * 4 * pairs)  # four matrices of float32

    def benchmark(self, export: FrozenExport, space: Workspace, seconds: float) -> dict[Kind, float]:
        """Seconds of a frame, from reading to its scores, and of one resample of the videos."""
        scenes, backbone = self.opened(export, space)[1].scenes, backbone_of(export, space)
        videos = videos_of(scenes)
        frames = videos[0][: max(FEWEST, self.frames + 2)]
        truth = truth_of(scenes, frames)
        of_video = np.repeat(np.arange(len(videos)), OBJECTS)
        score = partial(averaged, np.zeros((len(of_video), len(NAMES))), of_video)
        per_video = seconds_of(lambda: scored(self.predicted(backbone, scenes, frames, truth[0]), truth), seconds)
        return {"evaluation": per_video / len(frames), "closing": closing_seconds(score, len(videos))}

    def run(self, export: FrozenExport, space: Workspace) -> Outcome:
        _, val = self.opened(export, space)
        scenes = val.scenes
        videos = videos_of(scenes)
        names = [scenes.image(frames[0]).parent.name for frames in videos]
        left_out = {
            name: f"{np.isin(frames, val.places, invert=True).sum()} of its {len(frames)} frames cannot be used"
            for name, frames in zip(names, videos, strict=True)
            if len(frames) < FEWEST or not np.isin(frames, val.places).all()
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
                f"{scenes.url}: none of the {len(videos)} videos can be used: a video needs {FEWEST} frames, all of "
                "them readable; raise --limit or mend what `bench data check` names"
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
        near, masks, start = None, steps.first_masks(first, grid), None
        earlier: deque[tuple[Tensor, Tensor]] = deque(maxlen=self.frames)
        for index in frames:
            pixels = np.asarray(scene_image(scenes, index))
            if pixels.shape[:2] != first.shape:
                raise ValueError(
                    f"{scenes.image(index)}: the frame is {pixels.shape[0]} x {pixels.shape[1]} pixels, and the "
                    f"video's first mask {first.shape[0]} x {first.shape[1]}; take both from the same download"
                )
            frame = steps.normalised_frame(
                steps.resized_frame(pixels, (grid[0] * spec.patch_size, grid[1] * spec.patch_size))
            )
            features = patch_maps(backbone, frame[None], [(-1, True)])[0][0].flatten(1).T
            check_features(features, scenes.image(index))
            if start is None:
                start, masks = features, masks.to(features)
                near = steps.near(grid, self.radius, features.device)
                continue
            assert near is not None
            context, known = zip((start, masks), *earlier, strict=True)
            soft = steps.propagated(context, known, features, near, self.k, self.temperature)
            labels.append(steps.labels_of(soft, spec.patch_size, (first.shape[0], first.shape[1])))
            earlier.append((features, soft))
        return np.stack(labels)


def videos_of(scenes: SceneSet) -> list[list[int]]:
    """The frames of each video, as places in the set."""
    return [list(places) for _, places in groupby(range(len(scenes)), lambda index: scenes.image(index).parent)]


def truth_of(scenes: SceneSet, frames: list[int]) -> np.ndarray:
    """Object numbers (T, H, W) of a video, IGNORED where no score counts. ValueError, naming the file, of a mask of
    another size than the first, and where the first shows no object."""
    masks = [mask_classes(scenes, frames[0])]
    if not ((masks[0] > 0) & (masks[0] != IGNORED)).any():
        raise ValueError(f"{scenes.mask(frames[0])}: the first frame shows no object to follow; give its mask")
    height, width = masks[0].shape
    return np.stack([*masks, *(mask_classes(scenes, index, (height, width)) for index in frames[1:])])


def scored(predicted: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Object numbers (T, H, W) -> of each object the mean, recall and decay of J, and of F: (N, 6)."""
    void = truth == IGNORED
    scores = steps.frame_scores(np.where(void, 0, predicted), np.where(void, 0, truth))
    return np.concatenate(list(steps.statistics(scores)), axis=1)


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
    "video_propagation@smoke": Protocol(
        task=VideoPropagation(short=64, frames=3, radius=4),
        version=1,
        source="ours: seconds on tiny-davis:; not to be compared with published numbers",
    ),
    "video_propagation@dino": Protocol(task=VideoPropagation(), version=1, source=SOURCE),
}
DENSE = ("video_propagation@dino",)
SUITES = {"smoke": ("video_propagation@smoke",), "dense": DENSE, "full": DENSE, "everything": DENSE}
