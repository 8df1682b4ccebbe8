"""ExtreMA's locality probe as a picture: the box of a scene whose features are nearest to those of a query image.

Figure 3 of the paper. Scenes, boxes and queries are those of `bench run --suite locality@extrema`, which computes the
number. With the setting `query`, each image is a scene in which this query is searched.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from bench.reports.pictures import Box, Panel, PanelRow, Picture
from bench.reports.visualize import PictureRequest, Viewer, central_square, errors_naming, image_panel, read_image
from engine.errors import UserError, option
from engine.neighbours import unit_rows
from engine.settings import Validated
from imagesets.selection import evenly_spaced
from imagesets.sets import open_set
from imagesets.transforms import FILTERS, EvalTransform, image_to_tensor
from probes.features.fallbacks import with_supported_pool
from probes.features.kinds import feature_rows
from probes.mosaics import candidate_boxes
from probes.tasks.locality import EXTREMA_LOCALITY as PROBE


@dataclass(frozen=True, kw_only=True, eq=False)
class Scene:
    """An image in which the box that is most similar to a query is searched."""

    image: Image.Image
    shown_query: Image.Image  # as drawn
    query: Image.Image  # at the size of the network
    crops: tuple[Image.Image, ...]  # the contents of the boxes, at the size of the network
    boxes: tuple[Box, ...]
    truth: Box | None  # where the class of the query is; None if unknown
    label: str


@dataclass(frozen=True, kw_only=True)
class LocalityPicture(Validated):
    """Settings of the picture."""

    query: str = (
        ""  # image file that is searched in each of --images; by default --images is a labelled set like digits:
    )

    def pictures(self, request: PictureRequest) -> Iterator[Picture]:
        """One picture: rows are scenes; columns are the query, the scene, and the nearest box of each checkpoint."""
        columns, scenes = [], []
        for viewer in request.viewers():
            scenes = self.scenes(viewer, request)
            columns.append([box_panel(scene, *best_box(viewer, scene)) for scene in scenes])
        rows = [
            PanelRow(panels=(image_panel(scene.shown_query), image_panel(scene.image), *panels), label=scene.label)
            for scene, *panels in zip(scenes, *columns, strict=True)
        ]
        names = [(viewer.name, 1) for viewer in request.viewers()]
        truth = "" if self.query else "; dashed: where the class is"
        yield Picture(
            name="locality",
            rows=tuple(rows),
            headings=(("query", 1), ("scene", 1), *names),
            note=f"The box, of {PROBE.boxes} of {len(PROBE.scales)} sizes, whose representation is nearest to that of "
            f"the query{truth}.",
        )

    def scenes(self, viewer: Viewer, request: PictureRequest) -> list[Scene]:
        """The scenes, with crops at the size of this network; images and boxes are the same for all networks."""
        return self.image_scenes(viewer, request) if self.query else mosaic_scenes(viewer, request)

    def image_scenes(self, viewer: Viewer, request: PictureRequest) -> list[Scene]:
        """The requested images as scenes, with boxes of the probe's sizes at random positions."""
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
                    truth=None,
                    label=scene.name,
                )
            )
        return scenes


def mosaic_scenes(viewer: Viewer, request: PictureRequest) -> list[Scene]:
    """Some of the probe's mosaics, evenly spaced, each with one of its queries. ValueError for unlabelled sets."""
    if len(request.sources) != 1 or ":" not in request.sources[0]:
        raise UserError(
            "images",
            f"name one labelled set, such as digits:, or a query of your own: {option('settings', {'query': 'FILE'})}",
        )
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
                truth=box_of([left, top, wide, high], size),
                label=val.classes[val.labels[image]],
            )
        )
    return scenes


def best_box(viewer: Viewer, scene: Scene) -> tuple[int, float]:
    """Index of the box that is nearest to the query, and its cosine similarity."""
    kind = with_supported_pool(PROBE, viewer.spec).kind
    pixels = np.stack([image_to_tensor(image).numpy() for image in (scene.query, *scene.crops)])
    images = viewer.backbone.prepare(viewer.backbone.mean.new_tensor(pixels))
    query, *boxes = unit_rows(feature_rows(viewer.backbone, images, [kind])[kind])
    similarities = np.stack(boxes) @ query
    return int(similarities.argmax()), float(similarities.max())


def box_panel(scene: Scene, box: int, similarity: float) -> Panel:
    """The scene with box number `box`, and with the true box if it is known."""
    nearest, truth = scene.boxes[box], scene.truth
    caption = f"cosine {similarity:.2f}"
    if truth is None:
        return image_panel(scene.image, boxes=(nearest,), caption=caption)
    caption += f", overlap {overlap(nearest, truth):.0%}"
    return image_panel(scene.image, boxes=(replace(truth, style=1), nearest), caption=caption)


def overlap(first: Box, second: Box) -> float:
    """Intersection over union of two boxes."""
    width = min(first.right, second.right) - max(first.left, second.left)
    height = min(first.bottom, second.bottom) - max(first.top, second.top)
    common = max(width, 0.0) * max(height, 0.0)
    areas = [(box.right - box.left) * (box.bottom - box.top) for box in (first, second)]
    return common / (sum(areas) - common)


def box_of(box: list[int], size: tuple[int, int]) -> Box:
    """A box in pixels as shares of the image. box: left, top, width, height. size: width and height of the image."""
    left, top, width, height = box
    image_width, image_height = size
    return Box(
        left=left / image_width,
        top=top / image_height,
        right=(left + width) / image_width,
        bottom=(top + height) / image_height,
    )
