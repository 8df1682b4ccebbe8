"""Predictions of tasks on frozen patches next to the ground truth: classes, depth, videos, keypoints, boxes.

Segmentation masks are those that the result of `bench run` stores; without a result for this checkpoint, protocol and
data the task runs first. Depth is predicted by the linear head that `bench run` trained; if the cache has none, it is
trained first. In shapes, H x W are pixels.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from bench.reports.pictures import COLOUR_MAP, Block, Box, Panel, Picture, Spot, arranged
from bench.reports.scenes import legend_of, mask_counts, measured_images, scene_captions
from bench.reports.visualize import GREY, MAX_PANEL, PictureRequest, errors_naming, image_panel
from bench.results.record import Result
from bench.results.store import StoredResult, read_results
from checkpoints.backbone import Backbone
from checkpoints.frozen import FrozenExport
from downstream.data.overlays import class_colours, tinted
from downstream.data.scenes import SceneSet, open_scenes, scene_depth, scene_image, scene_mask, scene_pair, serves
from downstream.frozen.patches import SquareTask
from downstream.frozen.task import FrozenTask, backbone_of
from downstream.metrics.previews import stored_masks
from downstream.metrics.scores import worst_and_median
from downstream.tasks import (
    correspondence,
    dense_knn,
    depth_linear,
    discovery,
    segmentation_linear,
    video_propagation,
)
from downstream.tasks.discovery import box_ious
from engine.errors import UserError
from engine.printing import did_you_mean, say
from engine.progress import with_progress
from engine.settings import Validated
from engine.tasks import Split, Workspace, with_reported
from imagesets.selection import evenly_spaced

PROTOCOLS = {
    name: protocol
    for module in (segmentation_linear, dense_knn, depth_linear, video_propagation, correspondence, discovery)
    for name, protocol in with_reported(module.PROTOCOLS).items()
}


@dataclass(frozen=True, kw_only=True)
class Predictions(Validated):
    """Settings of the picture."""

    protocol: str = "depth_linear@dinov3"  # a protocol of segmentation, depth, video, correspondence or discovery
    results: str = "bench-results"  # folder of the `bench run --out` with masks of segmentation, and heads of depth

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.protocol not in PROTOCOLS:
            fix = did_you_mean(self.protocol, list(PROTOCOLS)) or f"; name one of {', '.join(PROTOCOLS)}"
            raise ValueError(f"protocol={self.protocol}: not drawable here, as no protocol of frozen patches{fix}")

    def pictures(self, request: PictureRequest) -> Iterator[Picture]:
        """One picture: rows are validation images, videos or pairs; columns are the image, the ground truth, and the
        prediction of each checkpoint. The first rows are the worst and the median image, where these are known."""
        task = PROTOCOLS[self.protocol].task
        assert isinstance(task, FrozenTask)
        if len(request.sources) != 1:
            raise UserError("images", f"give one set of scenes, such as {task.LAYOUT}:/data/{task.LAYOUT}")
        space = Workspace(
            cache=Path(self.results) / "cache",
            data=request.sources[0],
            device=request.device,
            precision=request.precision,
            seed=request.seed,
        )
        try:
            task.check_images(space)
        except ValueError as error:
            fitting = [name for name, protocol in PROTOCOLS.items() if serves(space.data, protocol.task.LAYOUT)]
            others = f", or --set protocol={' or '.join(fitting)}" if fitting else ""
            raise ValueError(f"{error} for protocol={self.protocol}{others}") from error
        split: Split = "train" if request.split == "train" else "val"
        viewers = request.viewers
        for viewer in viewers:
            with errors_naming(viewer.name):
                task.check_network(viewer.loaded.spec)
        kind = next(DRAWERS[parent] for parent in type(task).__mro__ if parent in DRAWERS)
        if kind is MaskDrawer and split == "train":
            raise UserError("split", f"not drawable here: {self.protocol} predicts the validation images", split)
        opener = partial(open_scenes, cache=space.cache)
        results = self.results_on(space.images(split, opener), space) if split == "val" else []
        limits = [used.result.limit for used in results if used.result.checkpoint.digest == viewers[0].loaded.digest]
        space = replace(space, limit=limits[0] if limits else None)  # all networks on the same scenes
        drawer = kind(task, space.images(split, opener))
        same_scenes = [used for used in results if used.result.limit == space.limit]
        newest = {used.result.checkpoint.digest: used for used in reversed(same_scenes)}
        for viewer in viewers:
            with errors_naming(viewer.name):
                stored = newest.get(viewer.loaded.digest)
                drawer.load(viewer.loaded, space, stored.arrays if stored else {})
        ranked, candidates = drawer.ranked()[: request.limit], drawer.rows()
        rest = [row for row in candidates if row not in ranked]
        count = min((request.limit or len(candidates)) - len(ranked), len(rest))
        rows = [*ranked, *(rest[number] for number in evenly_spaced(len(rest), count).tolist())]
        blocks: list[tuple[str, Sequence[Block]]] = [("", [[[drawer.truth(row)]] for row in rows])]
        for viewer in viewers:
            with errors_naming(viewer.name):
                panels = drawer.predictions(viewer.loaded, space, rows)
            blocks.append((viewer.name, [[[panel]] for panel in panels]))
        images = [drawer.image(row) for row in rows]
        for number, title in zip(range(len(ranked)), ("worst", "median"), strict=False):
            images[number] = replace(images[number], title=f"{title} for {viewers[0].name}")
        note = f"{drawer.note} Protocol {self.protocol}."
        yield arranged(f"predictions-{task.KEY}", images, blocks, note, drawer.legend)

    def results_on(self, scenes: SceneSet, space: Workspace) -> list[StoredResult]:
        """The results of `bench run` on these validation scenes or a limited number of them, the newest first."""
        wanted = ("ok", self.protocol, False, space.precision, space.seed)

        def is_wanted(used: Result) -> bool:
            key = used.status, used.protocol.name, used.protocol.modified, used.precision, used.seed
            return key == wanted and measured_images(scenes, used, "val") is not None

        results = [stored for stored in read_results(Path(self.results))[0] if is_wanted(stored.result)]
        return sorted(results, key=lambda stored: stored.result.date, reverse=True)


class Drawer:
    """The panels of a task. A row is what the task predicts at once: here the index of an image."""

    note: str

    def __init__(self, task: Any, scenes: SceneSet) -> None:
        self.task, self.scenes = task, scenes

    def load(self, export: FrozenExport, space: Workspace, arrays: Mapping[str, np.ndarray]) -> None:
        """Take what the next checkpoint has stored, empty without a result."""

    def ranked(self) -> list[Any]:
        """The rows of the worst and the median image of the first checkpoint, where they are known."""
        return []

    @property
    def legend(self) -> list[tuple[str, str]]:
        """Classes and their colours."""
        return []

    def rows(self) -> Sequence[Any]:
        """All rows that can be drawn."""
        return range(len(self.scenes))

    def image(self, row: Any) -> Panel:
        """The panel of the input."""
        return image_panel(scene_image(self.scenes, row))

    def truth(self, row: Any) -> Panel:
        """The panel of the ground truth."""
        raise NotImplementedError

    def predictions(self, export: FrozenExport, space: Workspace, rows: Sequence[Any]) -> Sequence[Panel | None]:
        """The panels of a network's predictions for some rows; None where it has none."""
        backbone = backbone_of(export, space)
        return [self.prediction(backbone, row) for row in with_progress(rows, f"drawing {self.task.KEY}", "rows")]

    def prediction(self, backbone: Backbone, row: Any) -> Panel:
        """The panel of a network's prediction for a row."""
        raise NotImplementedError


class MaskDrawer(Drawer):
    """Classes of images, in the small masks that results store."""

    note = "Classes; below each mask the mIoU of the image."

    def __init__(self, task: Any, scenes: SceneSet) -> None:
        super().__init__(task, scenes)
        self.arrays: list[Mapping[str, np.ndarray]] = []  # of each checkpoint
        self.remaining = iter(self.arrays)  # those that are not drawn yet

    def load(self, export: FrozenExport, space: Workspace, arrays: Mapping[str, np.ndarray]) -> None:
        if "ranked_of" not in arrays:
            say(f"no result with masks of these scenes is in {space.cache.parent}: the task runs first")
            arrays = self.task.run(export, space).arrays
        self.arrays.append(arrays)

    def ranked(self) -> list[int]:
        return self.arrays[0]["ranked_of"].tolist()

    def rows(self) -> list[int]:
        return sorted(stored_masks(self.arrays[0]))

    @cached_property
    def truths(self) -> dict[int, np.ndarray]:
        """Classes (H, W) of all scenes that may be drawn."""
        return {row: scene_mask(self.scenes, row) for row in self.rows()}

    @cached_property
    def colours(self) -> np.ndarray:
        return class_colours(mask_counts(self.truths.values()), len(self.scenes.classes))

    @property
    def legend(self) -> list[tuple[str, str]]:
        return legend_of(self.scenes, mask_counts(self.truths.values()), self.colours)

    def mask_panel(self, row: int, mask: np.ndarray, **text: str) -> Panel:
        """The image with the colours of a mask of classes (h, w)."""
        return image_panel(tinted(scene_image(self.scenes, row), mask, self.colours), **text)

    def truth(self, row: int) -> Panel:
        return self.mask_panel(row, self.truths[row], title="truth")

    def predictions(self, export: FrozenExport, space: Workspace, rows: Sequence[int]) -> list[Panel | None]:
        arrays = next(self.remaining)
        masks, captions = stored_masks(arrays), scene_captions(arrays, rows)
        return [
            self.mask_panel(row, masks[row], title="predicted", caption=caption) if row in masks else None
            for row, caption in zip(rows, captions, strict=True)
        ]


class DepthDrawer(Drawer):
    """Depth maps of images."""

    note = (
        "Depth by a linear head; yellow is an image's farthest measured depth, grey was not measured. The error is "
        "over the pixels that the evaluation counts."
    )

    errors: np.ndarray | None = None  # of the first checkpoint's result, RMSE first (N, METRICS); N = 0 without one

    def load(self, export: FrozenExport, space: Workspace, arrays: Mapping[str, np.ndarray]) -> None:
        if self.errors is None:
            self.errors = arrays.get("errors", np.empty((0, 1)))

    def ranked(self) -> list[int]:
        assert self.errors is not None
        return worst_and_median(-self.errors[:, 0])

    def measured_depth(self, row: int) -> np.ndarray:
        """Measured depth in metres (H, W), 0 where it was not measured."""
        return scene_depth(self.scenes, row, scene_image(self.scenes, row).size[::-1])

    def truth(self, row: int) -> Panel:
        depth = self.measured_depth(row)
        return depth_panel(depth, float(depth.max()), "measured")

    def predictions(self, export: FrozenExport, space: Workspace, rows: Sequence[int]) -> Sequence[Panel | None]:
        state = self.task.train_heads(export, *self.task.load_scenes(export, space), space)[-1].state
        self.head = self.task.load_head(export.spec, 0, state, space.device)
        return super().predictions(export, space, rows)

    def prediction(self, backbone: Backbone, row: int) -> Panel:
        depth, truth, counted = self.task.predict(backbone, self.head, self.scenes, row)
        error = torch.nn.functional.mse_loss(depth[counted], truth[counted]).sqrt().item()
        return depth_panel(depth.numpy(), float(self.measured_depth(row).max()), "predicted", f"RMSE {error:.2f} m")


def depth_panel(depth: np.ndarray, farthest: float, title: str, caption: str = "") -> Panel:
    """A depth map in metres (H, W), with colours from 0 to `farthest`; pixels with depth 0 are grey."""
    import matplotlib

    colours = matplotlib.colormaps[COLOUR_MAP](depth / farthest, bytes=True)[..., :3].copy()
    colours[depth == 0] = GREY
    image = Image.fromarray(colours)
    image.thumbnail((MAX_PANEL, MAX_PANEL), Image.Resampling.NEAREST)
    return Panel(values=np.asarray(image), size=depth.shape, title=title, caption=caption)


class VideoDrawer(Drawer):
    """Masks of videos on the last scored frame, the second last of a video. A row is the list of a video's frames."""

    note = "Masks of the first frame, propagated to the last frame that is scored; colours are objects."

    def rows(self) -> list[list[int]]:
        return list(self.scenes.videos.values())

    def image(self, row: list[int]) -> Panel:
        return super().image(row[-2])

    def mask_panel(self, row: list[int], masks: np.ndarray, title: str, caption: str = "") -> Panel:
        """The frame with the colours of its objects. masks: object numbers (H, W)."""
        colours = class_colours(Counter(range(1, 8)), len(self.scenes.classes))  # far apart for the first objects
        return image_panel(tinted(scene_image(self.scenes, row[-2]), masks, colours, 0), title=title, caption=caption)

    def truth(self, row: list[int]) -> Panel:
        return self.mask_panel(row, video_propagation.read_truth(self.scenes, row)[-2], "truth")

    def prediction(self, backbone: Backbone, row: list[int]) -> Panel:
        truth = video_propagation.read_truth(self.scenes, row)
        masks = self.task.predict(backbone, self.scenes, row, truth[0])
        score = 100 * video_propagation.object_statistics(masks, truth)[:, [0, 3]].mean()
        return self.mask_panel(row, masks[-2], "propagated", f"J&F {score:.1f} of the video")


class PairDrawer(Drawer):
    """Numbered keypoints of pairs of images. A row is the index of a pair."""

    note = "Numbered keypoints of the left image, and where they are in the other image of the pair."

    def rows(self) -> list[int]:
        return self.task.select_pairs(self.scenes, np.arange(len(self.scenes))).numbers.tolist()

    def keypoint_panel(self, row: int, end: int, points: np.ndarray, **text: str) -> Panel:
        """The source (end 0) or target (end 1) of a pair with the points (K, 2), in pixels, that are inside of it."""
        image = scene_image(self.scenes, int(self.scenes.image_pairs.ends[row, end]))
        spots = [Spot(x=x / image.width, y=y / image.height, number=n) for n, (x, y) in enumerate(points.tolist())]
        inside = [spot for spot in spots if spot.x <= 1 and spot.y <= 1]
        return image_panel(image, points=tuple(inside), **text)

    def image(self, row: int) -> Panel:
        return self.keypoint_panel(row, 0, np.array(scene_pair(self.scenes, row, {}).src_kps).reshape(-1, 2))

    def truth(self, row: int) -> Panel:
        return self.keypoint_panel(
            row, 1, np.array(scene_pair(self.scenes, row, {}).trg_kps).reshape(-1, 2), title="truth"
        )

    def prediction(self, backbone: Backbone, row: int) -> Panel:
        ends = self.scenes.image_pairs.ends[row].tolist()
        patches = {index: self.task.read_patches(backbone, self.scenes, index) for index in ends}
        places, errors = self.task.match_pair(self.scenes, row, patches)
        caption = f"{np.count_nonzero(errors < self.task.threshold)} of {len(errors)} found"
        points, size = places * max(patches[ends[1]].size), patches[ends[1]].size
        if padded := np.count_nonzero((points > size).any(axis=1)):
            caption += f"\n{padded} in the padding"
        return self.keypoint_panel(row, 1, points, title="most similar patch", caption=caption)


class BoxDrawer(Drawer):
    """Boxes of objects in images."""

    note = "Boxes of the objects, and the one that is discovered without labels; IoU with the nearest of them."

    def box_panel(self, row: int, boxes: np.ndarray, **text: str) -> Panel:
        """The image with boxes (B, 4): x1, y1, x2, y2 in pixels."""
        image = scene_image(self.scenes, row)
        shares = boxes / (2 * image.size)
        panel_boxes = [Box(left=x1, top=y1, right=x2, bottom=y2) for x1, y1, x2, y2 in shares.tolist()]
        return image_panel(image, boxes=tuple(panel_boxes), **text)

    def truth(self, row: int) -> Panel:
        return self.box_panel(row, discovery.object_boxes(self.scenes, row), title="truth")

    def prediction(self, backbone: Backbone, row: int) -> Panel:
        (box,) = discovery.discover_boxes([self.task], backbone, self.scenes, row)
        overlap = box_ious(box, discovery.object_boxes(self.scenes, row)).max(initial=0.0)
        return self.box_panel(row, box[None], title="discovered", caption=f"IoU {overlap:.2f}")


DRAWERS: dict[type, type[Drawer]] = {
    segmentation_linear.SegmentationLinear: MaskDrawer,
    SquareTask: MaskDrawer,
    depth_linear.DepthLinear: DepthDrawer,
    video_propagation.VideoPropagation: VideoDrawer,
    correspondence.Correspondence: PairDrawer,
    discovery.Discovery: BoxDrawer,
}
