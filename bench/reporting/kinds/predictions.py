"""What tasks on frozen patches predict beside the truth: depth, masks of a video, keypoints of a pair, boxes.

The linear head of a depth map is that which `bench run` trained; one is trained first where the cache holds none of
this checkpoint, protocol and data. H x W pixels.
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

from bench.reporting.panels import MAP, Box, Panel, Picture, Spot, arranged
from bench.reporting.scenes import class_colours, tinted
from bench.reporting.visualize import GREY, MAX_PANEL, PictureRequest, errors_naming, image_panel
from checkpoints.backbone import Backbone
from checkpoints.frozen import FrozenExport
from downstream.data.scenes import SceneSet, open_scenes, scene_depth, scene_image, scene_pair, serves
from downstream.frozen.task import FrozenTask, backbone_of
from downstream.tasks import correspondence, depth_linear, discovery, video_propagation
from downstream.tasks.discovery import overlaps
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

    protocol: str = "depth_linear@dinov3"  # whose predictions are drawn: of depth, video, correspondence or discovery
    results: str = "bench-results"  # folder of the `bench run --out` that trained heads of depth
    precision: Literal["float32", "bfloat16"] = "float32"  # of that run

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.protocol not in PROTOCOLS:
            raise ValueError(
                f"protocol={self.protocol}: none of that name{did_you_mean(self.protocol, list(PROTOCOLS))}"
            )

    def pictures(self, request: PictureRequest) -> Iterator[Picture]:
        """One picture: rows are validation images, videos or pairs; columns the image, the truth, and each
        checkpoint's."""
        task = PROTOCOLS[self.protocol].task
        assert isinstance(task, FrozenTask)
        if len(request.sources) != 1:
            raise ValueError(f"--images: give one set of scenes, such as {task.LAYOUT}:/data/{task.LAYOUT}")
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
    """Panels of a task's rows, by default the images of a set."""

    note: str

    def __init__(self, task: Any, scenes: SceneSet) -> None:
        self.task, self.scenes = task, scenes

    def rows(self) -> Sequence[Any]:
        """What may be a row."""
        return range(len(self.scenes))

    def image(self, row: Any) -> Panel:
        """What the networks see."""
        return image_panel(scene_image(self.scenes, row))

    def truth(self, row: Any) -> Panel:
        """What they should predict."""
        raise NotImplementedError

    def predictions(self, export: FrozenExport, space: Workspace, rows: Sequence[Any]) -> list[Panel]:
        """What a network predicts of each row."""
        backbone = backbone_of(export, space)
        return [self.prediction(backbone, row) for row in rows]

    def prediction(self, backbone: Backbone, row: Any) -> Panel:
        """What a network predicts of a row."""
        raise NotImplementedError


class DepthDrawer(Drawer):
    """Depth in colours."""

    note = (
        "Depth by a linear head; yellow is an image's farthest measured depth, grey was not measured. The error is "
        "over the pixels that the evaluation counts."
    )

    def measured(self, row: int) -> np.ndarray:
        """Metres (H, W)."""
        return scene_depth(self.scenes, row, scene_image(self.scenes, row).size[::-1])

    def truth(self, row: int) -> Panel:
        depth = self.measured(row)
        return depth_panel(depth, float(depth.max()), "measured")

    def predictions(self, export: FrozenExport, space: Workspace, rows: Sequence[int]) -> list[Panel]:
        state = self.task.train_heads(export, *self.task.opened(export, space), space)[-1].state
        self.head = self.task.head(export.spec, 0).to(space.device).eval()
        self.head.load_state_dict(dict(state))
        return super().predictions(export, space, rows)

    def prediction(self, backbone: Backbone, row: int) -> Panel:
        depth, truth, counted = self.task.predicted(backbone, self.head, self.scenes, row)
        error = torch.nn.functional.mse_loss(depth[counted], truth[counted]).sqrt().item()
        return depth_panel(depth.numpy(), float(self.measured(row).max()), "predicted", f"RMSE {error:.2f} m")


def depth_panel(depth: np.ndarray, farthest: float, title: str, caption: str = "") -> Panel:
    """Metres (H, W) from 0 to `farthest` in colours; grey where there are none."""
    import matplotlib

    colours = matplotlib.colormaps[MAP](depth / farthest, bytes=True)[..., :3].copy()
    colours[depth == 0] = GREY
    image = Image.fromarray(colours)
    image.thumbnail((MAX_PANEL, MAX_PANEL), Image.Resampling.NEAREST)
    return Panel(values=np.asarray(image), size=depth.shape, title=title, caption=caption)


class VideoDrawer(Drawer):
    """The last frame that is scored of each video, a list of frames, under the colours of its objects."""

    note = "Masks of the first frame, propagated to the last frame that is scored; colours are objects."

    def rows(self) -> list[list[int]]:
        return video_propagation.videos_of(self.scenes)

    def image(self, row: list[int]) -> Panel:
        return super().image(row[-2])

    def painted(self, row: list[int], masks: np.ndarray, title: str, caption: str = "") -> Panel:
        """The frame under object numbers (H, W)."""
        colours = class_colours(Counter(range(1, 8)), len(self.scenes.classes))
        return image_panel(tinted(scene_image(self.scenes, row[-2]), masks, colours, 0), title=title, caption=caption)

    def truth(self, row: list[int]) -> Panel:
        return self.painted(row, video_propagation.truth_of(self.scenes, row)[-2], "truth")

    def prediction(self, backbone: Backbone, row: list[int]) -> Panel:
        truth = video_propagation.truth_of(self.scenes, row)
        masks = self.task.predicted(backbone, self.scenes, row, truth[0])
        score = 100 * video_propagation.scored(masks, truth)[:, [0, 3]].mean()
        return self.painted(row, masks[-2], "propagated", f"J&F {score:.1f} of the video")


class PairDrawer(Drawer):
    """Keypoints of pairs, by number."""

    note = "Numbered keypoints of the left image, and where they are in the other image of the pair."

    def rows(self) -> list[int]:
        return self.task.drawn(self.scenes, np.arange(len(self.scenes))).numbers.tolist()

    def marked(self, row: int, end: int, points: np.ndarray, **text: str) -> Panel:
        """The source (end 0) or target of a pair with those of the points (K, 2), in pixels, that lie in it."""
        image = scene_image(self.scenes, int(self.scenes.image_pairs.ends[row, end]))
        spots = [Spot(x=x / image.width, y=y / image.height, number=n) for n, (x, y) in enumerate(points.tolist())]
        inside = [spot for spot in spots if spot.x <= 1 and spot.y <= 1]
        return image_panel(image, points=tuple(inside), **text)

    def image(self, row: int) -> Panel:
        return self.marked(row, 0, np.array(scene_pair(self.scenes, row, {}).src_kps).reshape(-1, 2))

    def truth(self, row: int) -> Panel:
        return self.marked(row, 1, np.array(scene_pair(self.scenes, row, {}).trg_kps).reshape(-1, 2), title="truth")

    def prediction(self, backbone: Backbone, row: int) -> Panel:
        ends = self.scenes.image_pairs.ends[row].tolist()
        patches = {index: self.task.patches_of(backbone, self.scenes, index) for index in ends}
        places, errors = self.task.matched(self.scenes, row, patches)
        caption = f"{np.count_nonzero(errors < self.task.threshold)} of {len(errors)} found"
        points, size = places * max(patches[ends[1]].size), patches[ends[1]].size
        if padded := np.count_nonzero((points > size).any(axis=1)):
            caption += f"\n{padded} in the padding"
        return self.marked(row, 1, points, title="most similar patch", caption=caption)


class BoxDrawer(Drawer):
    """Boxes of images."""

    note = "Boxes of the objects, and the one that is discovered without labels; IoU with the nearest of them."

    def boxed(self, row: int, boxes: np.ndarray, **text: str) -> Panel:
        """The image with boxes (B, 4) in pixels."""
        image = scene_image(self.scenes, row)
        shares = boxes / (2 * image.size)
        drawn = [Box(left=x1, top=y1, right=x2, bottom=y2) for x1, y1, x2, y2 in shares.tolist()]
        return image_panel(image, boxes=tuple(drawn), **text)

    def truth(self, row: int) -> Panel:
        return self.boxed(row, discovery.object_boxes(self.scenes, row), title="truth")

    def prediction(self, backbone: Backbone, row: int) -> Panel:
        (box,) = discovery.boxes_of([self.task], backbone, self.scenes, row)
        overlap = overlaps(box, discovery.object_boxes(self.scenes, row)).max(initial=0.0)
        return self.boxed(row, box[None], title="discovered", caption=f"IoU {overlap:.2f}")


DRAWERS: dict[type[FrozenTask], type[Drawer]] = {
    depth_linear.DepthLinear: DepthDrawer,
    video_propagation.VideoPropagation: VideoDrawer,
    correspondence.Correspondence: PairDrawer,
    discovery.Discovery: BoxDrawer,
}
