"""Norms of patch tokens and the share above a cutoff: artefacts of large networks.

Darcet et al. 2023, "Vision transformers need registers", figure 3: a few patches of plain areas have norms many times
the median before the final norm, and attention maps follow them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bench.reports.pictures import Block, Panel, Picture, arranged
from bench.reports.visualize import PictureRequest, Viewer, block_text, image_panel
from engine.settings import NonNegativeFloat, Validated
from probes.label_free import OUTLYING


@dataclass(frozen=True, kw_only=True)
class Norms(Validated):
    """Settings of the picture."""

    layer: int = -1  # block, negative from the end
    cutoff: NonNegativeFloat = 0.0  # norm above which a patch is an artefact; 0: five medians of all images' patches

    def pictures(self, request: PictureRequest) -> Iterator[Picture]:
        """One picture: rows are images, columns checkpoints."""
        yield arranged(
            "norms",
            [image_panel(image.image) for image in request.images],
            [(viewer.name, self.blocks(viewer, request)) for viewer in request.viewers],
            note=f"Norms of the patch tokens of {block_text(self.layer)} before the final norm. Each map goes from its "
            f"lowest, dark, to its highest, yellow; below, this range, and the share above "
            f"{'the cutoff' if self.cutoff else f'{OUTLYING:g} medians'}.",
        )

    def blocks(self, viewer: Viewer, request: PictureRequest) -> list[Block]:
        """A map of norms for each image."""
        maps = [np.linalg.norm(viewer.patches(image.image, self.layer, False), axis=-1) for image in viewer.images()]
        cutoff = self.cutoff or OUTLYING * float(np.median(np.concatenate([norms.ravel() for norms in maps])))
        blocks: list[Block] = []
        for image, norms in zip(request.images, maps, strict=True):
            caption = f"{norms.min():.3g} to {norms.max():.3g}, {(norms > cutoff).mean():.1%} above {cutoff:.3g}"
            blocks.append([[Panel(values=norms, size=image.size, caption=caption)]])
        return blocks
