"""Some validation scenes with what they hold and what a table's checkpoints saw in them: masks, or boxes.

From the small masks of segmentation results, and the boxes of detection results (docs/results.md).
"""

import colorsys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from bench.report_page.pictures import data_url
from bench.statistics.matching import Measured
from downstream.data.instances import Instances
from downstream.data.listing import IGNORED
from downstream.data.scenes import SceneSet, open_scenes
from imagesets.decoding import open_image

SHOWN = 8  # scenes with boxes, evenly spread; with masks those that results keep
BEST = 3  # checkpoints
PIXELS = 192  # of a picture's longer side
TINT = 0.6  # share of a class's colour in its pixels
NAMED = 12  # classes in the legend, the largest ones

Box = tuple[tuple[float, float, float, float], int]  # x1, y1, x2, y2 in pixels, and a class


@dataclass(frozen=True, kw_only=True)
class SceneView:
    """Pictures of scenes. columns: "image", "labels" and checkpoints. legend: names of classes and their colours."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]  # data: URLs
    legend: tuple[tuple[str, str], ...]  # largest first; colours as #rrggbb
    boxes: bool  # whether they show boxes, not masks


def scene_view(measured: Mapping[str, Measured], cache: Path) -> SceneView | None:
    """What the named results of one table, the best first, saw. None where that is not kept, or the scenes are not on
    this machine. cache: where tiny sets are drawn."""
    kept = {name: each for name, each in measured.items() if _keeps(each)}
    best = dict(list(kept.items())[:BEST])
    scenes = _scenes_of(next(iter(best.values())), cache) if best else None
    if scenes is None:
        return None
    show = _boxes if isinstance(scenes.listing, Instances) else _masks
    try:
        return show(best, scenes)
    except (OSError, ValueError):  # an image that cannot be read, or arrays of other scenes
        return None


def _keeps(measured: Measured) -> bool:
    names = set(measured.result.arrays)
    return {"shown_of", "shown_masks", "shown_sizes"} <= names or {"boxes", "scores", "classes"} <= names


def _scenes_of(measured: Measured, cache: Path) -> SceneSet | None:
    data = measured.result.data
    try:
        scenes = open_scenes(data.url, "val", cache)
    except (ValueError, OSError):  # moved, unmounted, or no scenes
        return None
    return scenes.limited(measured.result.limit) if scenes.fingerprint == data.fingerprints.get("val") else None


def _masks(measured: Mapping[str, Measured], scenes: SceneSet) -> SceneView:
    first, colours = next(iter(measured.values())), class_colours(len(scenes.classes))
    places, seen, rows = first.arrays["shown_of"].tolist(), Counter[int](), []
    kept = {name: each for name, each in measured.items() if each.arrays["shown_of"].tolist() == places}
    for row, index in enumerate(places):
        image, labels = scene_picture(scenes, index), label_mask(scenes, index)
        seen.update(labels[labels != IGNORED].tolist())
        masks = [labels, *(_kept_mask(each, row) for each in kept.values())]
        rows.append((data_url(image, PIXELS), *(data_url(tinted(image, mask, colours), PIXELS) for mask in masks)))
    legend = _legend(seen, scenes, colours)
    return SceneView(columns=("image", "labels", *kept), rows=tuple(rows), legend=legend, boxes=False)


def _boxes(measured: Mapping[str, Measured], scenes: SceneSet) -> SceneView:
    colours, seen, rows = class_colours(len(scenes.classes)), Counter[int](), []
    for index in np.unique(np.arange(SHOWN) * len(scenes) // SHOWN).tolist():
        labels = list(labelled_boxes(scenes.listing, index))
        seen.update(number for _, number in labels)
        many = max(1, len(labels))
        found = [labels, *(list(found_boxes(each.arrays, index, many)) for each in measured.values())]
        pictures = [boxed(scenes.image(index), boxes, colours) for boxes in ([], *found)]
        rows.append(tuple(data_url(picture, PIXELS) for picture in pictures))
    legend = _legend(seen, scenes, colours)
    return SceneView(columns=("image", "labels", *measured), rows=tuple(rows), legend=legend, boxes=True)


def _legend(seen: Counter[int], scenes: SceneSet, colours: np.ndarray) -> tuple[tuple[str, str], ...]:
    largest = [number for number, _ in seen.most_common(NAMED)]
    return tuple((scenes.classes[number], "#" + bytes(colours[number].tolist()).hex()) for number in largest)


def class_colours(classes: int) -> np.ndarray:
    """(256, 3) uint8: colours of classes, far apart in hue for neighbours in number, and light and dark in turn."""
    hues = np.arange(classes) * 0.618034 % 1.0  # the golden ratio: every stretch of them is spread over the circle
    values = np.where(np.arange(classes) % 2, 0.65, 1.0)
    found = np.zeros((256, 3), np.uint8)
    drawn = [colorsys.hsv_to_rgb(hue, 0.85, value) for hue, value in zip(hues, values, strict=True)]
    found[:classes] = np.rint(255 * np.array(drawn).reshape(-1, 3))
    return found


def scene_picture(scenes: SceneSet, index: int) -> Image.Image:
    """A scene's image, RGB, of at most PIXELS a side."""
    image = open_image(scenes.image(index).read_bytes()).convert("RGB")
    image.thumbnail((PIXELS, PIXELS))
    return image


def label_mask(scenes: SceneSet, index: int) -> np.ndarray:
    """Classes (H, W) uint8 of a scene, IGNORED where there is none."""
    mask = open_image(scenes.mask(index).read_bytes())
    return scenes.listing.coded(np.asarray(mask.convert("RGB") if scenes.listing.colours else mask, np.uint8))


def _kept_mask(measured: Measured, row: int) -> np.ndarray:
    height, width = measured.arrays["shown_sizes"][row].tolist()
    return measured.arrays["shown_masks"][row, :height, :width]


def tinted(image: Image.Image, mask: np.ndarray, colours: np.ndarray) -> Image.Image:
    """An image under the colours (256, 3) of the classes (h, w) uint8 of its parts; IGNORED parts stay as they are."""
    large = np.asarray(Image.fromarray(mask).resize(image.size, Image.Resampling.NEAREST))
    pixels = np.asarray(image, np.float64)
    mixed = np.where((large == IGNORED)[..., None], pixels, (1 - TINT) * pixels + TINT * colours[large])
    return Image.fromarray(mixed.round().astype(np.uint8))


def labelled_boxes(listing: Instances, index: int) -> Iterator[Box]:
    """Boxes of the things in an image."""
    numbers = {value: place for place, value in enumerate(listing.categories)}
    for thing in listing.objects[index]:
        x, y, width, height = thing["bbox"]
        yield (x, y, x + width, y + height), numbers[thing["category_id"]]


def found_boxes(arrays: Mapping[str, np.ndarray], index: int, count: int) -> Iterator[Box]:
    """The `count` surest boxes that were found in an image."""
    classes, scores, boxes = (arrays[name][index] for name in ("classes", "scores", "boxes"))
    for place in np.argsort(-scores, kind="stable")[:count].tolist():
        if classes[place] >= 0:
            yield tuple(boxes[place].tolist()), int(classes[place])


def boxed(path: Path, boxes: Sequence[Box], colours: np.ndarray) -> Image.Image:
    """An image with outlines in the colours of their classes."""
    image = open_image(path.read_bytes()).convert("RGB")
    full = image.size
    image.thumbnail((PIXELS, PIXELS))
    draw = ImageDraw.Draw(image)
    scale = np.array([image.size[0] / full[0], image.size[1] / full[1]] * 2)
    for corners, number in boxes:
        x1, y1, x2, y2 = (scale * corners).tolist()
        draw.rectangle((x1, y1, max(x1, x2), max(y1, y2)), outline=tuple(colours[number].tolist()), width=2)
    return image
