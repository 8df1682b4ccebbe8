"""Predictions of tasks on frozen patches next to the ground truth: depth, masks of a video, keypoints of a pair, boxes.

Depth is predicted by the linear head that `bench run` trained; if the cache has none for this checkpoint, protocol and
data, it is trained first. In shapes, H x W are pixels.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

from bench.reports.pictures import COLOUR_MAP, Box, Panel, Picture, Spot, arranged
from bench.reports.visualize import GREY, MAX_PANEL, PictureRequest, errors_naming, image_panel
from checkpoints.backbone import Backbone
from checkpoints.frozen import FrozenExport
from downstream.data.overlays import class_colours, tinted
from downstream.data.scenes import SceneSet, open_scenes, scene_depth, scene_image, scene_pair, serves
from downstream.frozen.task import FrozenTask, backbone_of
from downstream.tasks import correspondence, depth_linear, discovery, video_propagation
from downstream.tasks.discovery import box_ious
from engine.errors import UserError
from engine.printing import did_you_mean
from engine.settings import Validated
from engine.tasks import Split, Workspace
from imagesets.selection import evenly_spaced

PROTOCOLS = {
    name: protocol
    for module in (depth_linear, video_propagation, correspondence, discovery)
    for name, protocol in module.PROTOCOLS.items()
}


@dataclass(frozen=True, kw_only=True)
class Predictions(Validated):
    """Settings of the picture."""

    protocol: str = "depth_linear@dinov3"  # a protocol of depth, video, correspondence or discovery
    results: str = "bench-results"  # folder of the `bench run --out` that trained the head of depth
    precision: Literal["float32", "bfloat16"] = "float32"  # of that run

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.protocol not in PROTOCOLS:
            raise ValueError(
                f"protocol={self.protocol}: there is no such protocol{did_you_mean(self.protocol, list(PROTOCOLS))}"
            )

    def pictures(self, request: PictureRequest) -> Iterator[Picture]:
        """One picture: rows are validation images, videos or pairs; columns are the image, the ground truth, and the
        prediction of each checkpoint."""
        task = PROTOCOLS[self.protocol].task
        assert isinstance(task, FrozenTask)
        if len(request.sources) != 1:
            raise UserError("images", f"give one set of scenes, such as {task.LAYOUT}:/data/{task.LAYOUT}")
        space = Workspace(
            cache=Path(self.results) / "cache",
            data=request.sources[0],
            device=request.device,
            precision=self.precision,
            seed=request.seed,
        )
        try:
            task.check_images(space)
        except ValueError as error:
            fitting = [name for name, protocol in PROTOCOLS.items() if serves(space.data, protocol.task.LAYOUT)]
            others = f", or --set protocol={' or '.join(fitting)}" if fitting else ""
            raise ValueError(f"{error} for protocol={self.protocol}{others}") from error
        split: Split = "train" if request.split == "train" else "val"
        scenes = space.images(split, partial(open_scenes, cache=space.cache))
        drawer = DRAWERS[type(task)](task, scenes)
        rows = drawer.rows()
        chosen = [
            rows[place] for place in evenly_spaced(len(rows), min(request.limit or len(rows), len(rows))).tolist()
        ]
        blocks = [("", [[[drawer.truth(row)]] for row in chosen])]
        for viewer in request.viewers():
            with errors_naming(viewer.name):
                task.check_network(viewer.export.spec)
                panels = drawer.predictions(viewer.export, space, chosen)
            blocks.append((viewer.name, [[[panel]] for panel in panels]))
        images = [drawer.image(row) for row in chosen]
        yield arranged(f"predictions-{task.KEY}", images, blocks, note=f"{drawer.note} Protocol {self.protocol}.")


class Drawer:
    """The panels of a task. A row is what the task predicts at once: here the index of an image."""

    note: str

    def __init__(self, task: Any, scenes: SceneSet) -> None:
        self.task, self.scenes = task, scenes

    def rows(self) -> Sequence[Any]:
        """All rows that can be drawn."""
        return range(len(self.scenes))

    def image(self, row: Any) -> Panel:
        """The panel of the input."""
        return image_panel(scene_image(self.scenes, row))

    def truth(self, row: Any) -> Panel:
        """The panel of the ground truth."""
        raise NotImplementedError

    def predictions(self, export: FrozenExport, space: Workspace, rows: Sequence[Any]) -> list[Panel]:
        """The panels of a network's predictions for some rows."""
        backbone = backbone_of(export, space)
        return [self.prediction(backbone, row) for row in rows]

    def prediction(self, backbone: Backbone, row: Any) -> Panel:
        """The panel of a network's prediction for a row."""
        raise NotImplementedError


class DepthDrawer(Drawer):
    """Depth maps of images."""

    note = (
        "Depth by a linear head; yellow is an image's farthest measured depth, grey was not measured. The error is "
        "over the pixels that the evaluation counts."
    )

    def measured_depth(self, row: int) -> np.ndarray:
        """Measured depth in metres (H, W), 0 where it was not measured."""
        return scene_depth(self.scenes, row, scene_image(self.scenes, row).size[::-1])

    def truth(self, row: int) -> Panel:
        depth = self.measured_depth(row)
        return depth_panel(depth, float(depth.max()), "measured")

    def predictions(self, export: FrozenExport, space: Workspace, rows: Sequence[int]) -> list[Panel]:
        state = self.task.train_heads(export, *self.task.load_scenes(export, space), space)[-1].state
        self.head = self.task.build_head(export.spec, 0).to(space.device).eval()
        self.head.load_state_dict(dict(state))
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


DRAWERS: dict[type[FrozenTask], type[Drawer]] = {
    depth_linear.DepthLinear: DepthDrawer,
    video_propagation.VideoPropagation: VideoDrawer,
    correspondence.Correspondence: PairDrawer,
    discovery.Discovery: BoxDrawer,
}
