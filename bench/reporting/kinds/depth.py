"""Predicted depth beside the measured one: heads of `depth_linear`, as `bench run` trained them.

A head is trained first where the cache holds none of this checkpoint, protocol and data. H x W pixels.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image

from bench.reporting.panels import MAP, Panel, Picture, arranged
from bench.reporting.visualize import GREY, MAX_PANEL, PictureRequest, Viewer, errors_naming, image_panel
from downstream.data.scenes import open_scenes, scene_depth, scene_image
from downstream.frozen.task import backbone_of
from downstream.tasks.depth_linear import PROTOCOLS, DepthLinear
from engine.printing import did_you_mean
from engine.settings import Validated
from engine.tasks import Split, Workspace
from imagesets.selection import evenly


@dataclass(frozen=True, kw_only=True)
class Depth(Validated):
    """Settings of the picture."""

    protocol: str = "depth_linear@dinov3"  # whose heads are drawn
    results: str = "bench-results"  # folder of the `bench run --out` that trained them
    precision: Literal["float32", "bfloat16"] = "float32"  # of that run

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.protocol not in PROTOCOLS:
            raise ValueError(
                f"protocol={self.protocol}: none of that name{did_you_mean(self.protocol, list(PROTOCOLS))}"
            )

    def pictures(self, request: PictureRequest) -> Iterator[Picture]:
        """One picture: rows are validation images; columns the image, its measured depth, and each checkpoint's."""
        if len(request.sources) != 1:
            raise ValueError("--images: give one set of depth maps, such as nyu:/data/nyu")
        space = Workspace(
            cache=Path(self.results) / "cache",
            data=request.sources[0],
            device=request.device,
            precision=self.precision,
            seed=request.seed,
        )
        task = PROTOCOLS[self.protocol].task
        assert isinstance(task, DepthLinear)
        task.check_images(space)
        split: Split = "train" if request.split == "train" else "val"
        scenes = space.images(split, partial(open_scenes, cache=space.cache))
        indices = evenly(len(scenes), min(request.limit or len(scenes), len(scenes))).tolist()
        images = [scene_image(scenes, index) for index in indices]
        depths = [scene_depth(scenes, index, image.size[::-1]) for index, image in zip(indices, images, strict=True)]
        farthest = [float(depth.max()) for depth in depths]
        measured = [[[depth_panel(depth, far, "measured")]] for depth, far in zip(depths, farthest, strict=True)]
        blocks = [("", measured)]
        for viewer in request.viewers():
            predictions = predicted_depths(viewer, task, space, indices, split)
            panels = [
                [[depth_panel(depth, far, "predicted", f"RMSE {error:.2f} m")]]
                for (depth, error), far in zip(predictions, farthest, strict=True)
            ]
            blocks.append((viewer.name, panels))
        yield arranged(
            "depth",
            [image_panel(image) for image in images],
            blocks,
            note=f"Depth by the linear head of {self.protocol}; yellow is an image's farthest measured depth, grey "
            "was not measured. The error is over the pixels that the evaluation counts.",
        )


def predicted_depths(
    viewer: Viewer, task: DepthLinear, space: Workspace, indices: list[int], split: Split
) -> list[tuple[np.ndarray, float]]:
    """Metres (H, W) and the root mean square error of each image, by the last head of the training."""
    export = viewer.export
    with errors_naming(viewer.name):
        task.check_network(export.spec)
        train, val = task.opened(space)
        state = task.train_heads(export, train, space)[-1].state
    head, backbone = task.head(export.spec, 0).to(space.device).eval(), backbone_of(export, space)
    head.load_state_dict(dict(state))
    predictions = []
    for index in indices:
        depth, truth, counted = task.predicted(backbone, head, (val if split == "val" else train).scenes, index)
        error = torch.nn.functional.mse_loss(depth[counted], truth[counted]).sqrt().item()
        predictions.append((depth.numpy(), error))
    return predictions


def depth_panel(depth: np.ndarray, farthest: float, title: str, caption: str = "") -> Panel:
    """Metres (H, W) from 0 to `farthest` in colours; grey where there are none."""
    import matplotlib

    colours = matplotlib.colormaps[MAP](depth / farthest, bytes=True)[..., :3].copy()
    colours[depth == 0] = GREY
    image = Image.fromarray(colours)
    image.thumbnail((MAX_PANEL, MAX_PANEL), Image.Resampling.NEAREST)
    return Panel(values=np.asarray(image), size=depth.shape, title=title, caption=caption)
