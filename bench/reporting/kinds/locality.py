"""ExtreMA's locality probe as a picture: the box of a scene that is most like an image of a class.

Figure 3 of the paper. Scenes, boxes and queries are those of `bench run --suite locality@extrema`, which gives the
number. With a query of one's own, each image is a scene.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from bench.reporting.panels import Box, Panel, PanelRow, Picture
from bench.reporting.visualize import (
    PictureRequest,
    Viewer,
    central_square,
    errors_naming,
    image_panel,
    read_image,
)
from engine.neighbours import unit_rows
from engine.settings import Validated
from imagesets.selection import evenly_spaced
from imagesets.sets import open_set
from imagesets.transforms import FILTERS, EvalTransform, planes
from probes.features.fallbacks import with_supported_pool
from probes.features.kinds import feature_rows
from probes.mosaics import candidate_boxes
from probes.tasks.locality import EXTREMA_LOCALITY as PROBE


@dataclass(frozen=True, kw_only=True, eq=False)
class Scene:
    """query, crops: square images of the network's size. boxes: of the crops. known: where the query's class is.
    shown_query: the query for people."""

    image: Image.Image
    shown_query: Image.Image
    query: Image.Image
    crops: tuple[Image.Image, ...]
    boxes: tuple[Box, ...]
    known: Box | None
    label: str


@dataclass(frozen=True, kw_only=True)
class LocalityPicture(Validated):
    """Settings of the picture."""

    query: str = ""  # an image file, looked for in each of --images; else --images are a labelled set, such as digits:

    def pictures(self, request: PictureRequest) -> Iterator[Picture]:
        """One picture: rows are scenes; columns are the query, the scene, and the box that each checkpoint finds."""
        columns, scenes = [], []
        for viewer in request.viewers():
            scenes = self.scenes(viewer, request)
            columns.append([box_panel(scene, *best_box(viewer, scene)) for scene in scenes])
        rows = [
            PanelRow(panels=(image_panel(scene.shown_query), image_panel(scene.image), *panels), label=scene.label)
            for scene, *panels in zip(scenes, *columns, strict=True)
        ]
        names = [(viewer.name, 1) for viewer in request.viewers()]
        known = "" if self.query else "; dashed: where the class is"
        yield Picture(
            name="locality",
            rows=tuple(rows),
            headings=(("query", 1), ("scene", 1), *names),
            note=f"The box, of {PROBE.boxes} of {len(PROBE.scales)} sizes, whose representation is nearest to that of "
            f"the query{known}.",
        )

    def scenes(self, viewer: Viewer, request: PictureRequest) -> list[Scene]:
        """As this network sees them; boxes and images are the same for all."""
        return self.own(viewer, request) if self.query else mosaic_scenes(viewer, request)

    def own(self, viewer: Viewer, request: PictureRequest) -> list[Scene]:
        """The images, with the boxes of the probe's sizes at random places."""
        query, shape = read_image(self.query), viewer.spec.size[::-1]
        scenes = []
        for number, scene in enumerate(request.images):
            size, seed = scene.image.size, request.seed + number
            (boxes,) = candidate_boxes(1, size, shape, PROBE.scales, PROBE.locations, seed).tolist()
            crops = [scene.image.crop((left, top, left + width, top + height)) for left, top, width, height in boxes]
            scenes.append(
                Scene(
                    image=scene.image,
                    shown_query=query,
                    query=query.resize(shape, FILTERS["bilinear"]),
                    crops=tuple(crop.resize(shape, FILTERS["bilinear"]) for crop in crops),
                    boxes=tuple(box_of(box, scene.image.size) for box in boxes),
                    known=None,
                    label=scene.name,
                )
            )
        return scenes


def mosaic_scenes(viewer: Viewer, request: PictureRequest) -> list[Scene]:
    """Some of the probe's mosaics, evenly spread, with one of the images that are looked for in each."""
    if len(request.sources) != 1 or ":" not in request.sources[0]:
        raise ValueError("--images: name one labelled set, such as digits:, or a query of your own: --set query=FILE")
    with errors_naming(f"--images {request.sources[0]}"):
        train, val = (open_set(request.sources[0], split) for split in ("train", "val"))
    transform = EvalTransform(size=viewer.spec.size, crop=PROBE.crop, interpolation=PROBE.interpolation)
    search = PROBE.search(train, val, transform, request.seed)
    mosaics, (wide, high) = search.mosaics, search.mosaics.tile_size
    size = (mosaics.side * wide, mosaics.side * high)
    scenes = []
    for number, mosaic in enumerate(
        evenly_spaced(len(mosaics.tiles), min(request.limit or 4, len(mosaics.tiles))).tolist()
    ):
        tile = number % PROBE.tiles
        image = int(mosaics.tiles[mosaic, tile])
        left, top = tile % mosaics.side * wide, tile // mosaics.side * high
        example = int(search.queries[image])
        scenes.append(
            Scene(
                image=mosaics.mosaic(mosaic),
                shown_query=central_square(train.image(example)),
                query=Image.fromarray(transform(train, example).permute(1, 2, 0).numpy()),
                crops=tuple(mosaics.image(mosaic * PROBE.boxes + box) for box in range(PROBE.boxes)),
                boxes=tuple(box_of(box, size) for box in mosaics.boxes[mosaic].tolist()),
                known=box_of([left, top, wide, high], size),
                label=val.classes[val.labels[image]],
            )
        )
    return scenes


def best_box(viewer: Viewer, scene: Scene) -> tuple[int, float]:
    """Which box is nearest to the query, and its cosine."""
    kind = with_supported_pool(PROBE, viewer.spec).kind
    pixels = np.stack([planes(image).numpy() for image in (scene.query, *scene.crops)])
    images = viewer.backbone.prepare(viewer.backbone.mean.new_tensor(pixels))
    query, *boxes = unit_rows(feature_rows(viewer.backbone, images, [kind])[kind])
    similar = np.stack(boxes) @ query
    return int(similar.argmax()), float(similar.max())


def box_panel(scene: Scene, box: int, similarity: float) -> Panel:
    """The scene with the box, and where the class is."""
    nearest, known = scene.boxes[box], scene.known
    caption = f"cosine {similarity:.2f}"
    if known:
        caption += f", overlap {overlap(nearest, known):.0%}"
    boxes = (nearest,) if known is None else (replace(known, style=1), nearest)
    return image_panel(scene.image, boxes=boxes, caption=caption)


def overlap(first: Box, second: Box) -> float:
    """Intersection over union."""
    width = min(first.right, second.right) - max(first.left, second.left)
    height = min(first.bottom, second.bottom) - max(first.top, second.top)
    common = max(width, 0.0) * max(height, 0.0)
    areas = [(box.right - box.left) * (box.bottom - box.top) for box in (first, second)]
    return common / (sum(areas) - common)


def box_of(box: list[int], size: tuple[int, int]) -> Box:
    """Left, top, width and height in pixels of an image of size = (width, height)."""
    left, top, width, height = box
    across, down = size
    return Box(left=left / across, top=top / down, right=(left + width) / across, bottom=(top + height) / down)
