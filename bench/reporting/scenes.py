"""Some validation scenes with what they hold and what a table's checkpoints saw in them: classes, or things.

From the small masks of segmentation results, and the boxes and small masks of detection results (docs/results.md).

Images are shown if their set is on this machine and still the one that was measured.
"""

import base64
import colorsys
import functools
import io
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from PIL import Image, ImageDraw

from bench.results.record import Result
from bench.results.store import StoredResult
from downstream.data.listing import IGNORED, Instances
from downstream.data.scenes import SceneSet, open_scenes, scene_mask
from downstream.metrics.previews import MAX_NUMBERED_OBJECTS, number_outlines, preview_indices
from engine.files import read_regular
from imagesets.decoding import MAX_BYTES, UnreadableImage, open_image
from imagesets.sets import ImageSet, open_set

SIDE = 96  # pixels of the longer side of a small picture
OpenSplit = Callable[[Result, Literal["train", "val"]], ImageSet | None]


def image_opener() -> OpenSplit:
    """A function that opens a split of the images of a result, each once; None where they are not on this machine, or
    are others. Of a result with a limit, the images that it saw."""

    @functools.cache
    def opened(url: str, split: Literal["train", "val"]) -> ImageSet | None:
        try:
            return open_set(url, split)
        except (ValueError, OSError):  # moved, unmounted, or no image set
            return None

    return lambda result, split: measured_images(opened(result.data.url, split), result, split)


Images = TypeVar("Images", ImageSet, SceneSet)


def measured_images(images: Images | None, result: Result, split: str) -> Images | None:
    """Those that a result saw; None where they changed since."""
    if images is None or images.fingerprint != result.data.fingerprints.get(split):
        return None
    return images if result.limit is None else images.limited(result.limit)


def thumbnail_url(images: ImageSet, index: int) -> str:
    """An image of a set as a data: URL of a small JPEG; "" where it cannot be read."""
    try:
        return data_url(images.image(index))
    except (UnreadableImage, OSError):
        return ""


def data_url(image: Image.Image, side: int = SIDE) -> str:
    """An RGB image as a data: URL of a JPEG of at most `side` pixels; one of less than half is enlarged pixel by pixel,
    so that browsers do not blur it."""
    times = side // max(image.size)
    if times > 1:
        image = image.resize((times * image.width, times * image.height), Image.Resampling.NEAREST)
    else:
        image = image.copy()
        image.thumbnail((side, side))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


BEST = 3  # checkpoints
PIXELS = 192  # of a picture's longer side
TINT = 0.6  # share of a class's colour in its pixels
NAMED = 12  # classes in the legend, the largest ones
# Of the most frequent classes: those of Okabe and Ito for colour-blind readers, yellow first, far apart in lightness.
FAR_APART = ("#F0E442", "#0072B2", "#D55E00", "#56B4E9", "#CC79A7", "#009E73", "#E69F00")

Box = tuple[tuple[float, float, float, float], int]  # x1, y1, x2, y2 in pixels, and a class


@dataclass(frozen=True, kw_only=True, eq=False)
class Detections:
    """Things in an image, the surest first. numbers (h, w) uint8: which covers a pixel, from 1 on, or 0 (None: not
    kept)."""

    boxes: Sequence[Box]
    numbers: np.ndarray | None


def scene_view(measured: Mapping[str, StoredResult], cache: Path) -> dict[str, Any] | None:
    """What the named results of one table, the best first, saw. None where that is not kept, or the scenes are not on
    this machine. cache: where tiny sets are drawn.

    columns: "image", "labels" and checkpoints; rows: their pictures, data: URLs. legend: names of classes and their
    colours, the largest first; unnamed: how many classes it leaves out. things: whether the pictures show things, each
    with its box, and not a class of every pixel. without_masks: checkpoints whose results keep boxes alone.
    """
    best = dict([(name, one) for name, one in measured.items() if _keeps_scenes(one)][:BEST])
    if not best:
        return None
    result = next(iter(best.values())).result
    try:
        scenes = measured_images(open_scenes(result.data.url, "val", cache), result, "val")
        if scenes is None:
            return None
        things = isinstance(scenes.listing, Instances)
        names, rows, counts, colours = _things(best, scenes) if things else _masks(best, scenes)
    except (OSError, ValueError, IndexError):  # moved, unmounted, cannot be read, or arrays of other scenes
        return None
    largest = [number for number, _ in counts.most_common(NAMED)]
    return {
        "columns": ["image", "labels", *names],
        "rows": [[data_url(picture, PIXELS) for picture in row] for row in rows],
        "legend": [(scenes.classes[number], "#" + bytes(colours[number].tolist()).hex()) for number in largest],
        "unnamed": len(counts) - len(largest),
        "things": things,
        "without_masks": [name for name in best if things and "shown_masks" not in best[name].result.arrays],
    }


def _keeps_scenes(measured: StoredResult) -> bool:
    """Whether a result keeps masks or boxes to draw."""
    names = set(measured.result.arrays)
    return {"shown_of", "shown_masks", "shown_sizes"} <= names or {"boxes", "scores", "classes"} <= names


# Names of checkpoints, rows of pictures, how often there is each class, and the classes' colours.
Drawn = tuple[Iterable[str], list[list[Image.Image]], Counter[int], np.ndarray]


def _masks(measured: Mapping[str, StoredResult], scenes: SceneSet) -> Drawn:
    places = next(iter(measured.values())).arrays["shown_of"].tolist()
    kept = {name: one for name, one in measured.items() if one.arrays["shown_of"].tolist() == places}
    labels = [scene_mask(scenes, index) for index in places]
    pixels = Counter(np.concatenate([mask[mask != IGNORED] for mask in labels]).tolist())
    colours, rows = class_colours(pixels, len(scenes.classes)), []
    for row, (index, label) in enumerate(zip(places, labels, strict=True)):
        image, masks = scene_picture(scenes, index), [label, *(_kept_mask(one, row) for one in kept.values())]
        rows.append([image, *(tinted(image, mask, colours) for mask in masks)])
    return kept, rows, pixels, colours


def _things(measured: Mapping[str, StoredResult], scenes: SceneSet) -> Drawn:
    places = preview_indices(len(scenes)).tolist()
    labels = [labelled_things(scenes.instances, index) for index in places]
    counts = Counter(number for label in labels for _, number in label.boxes)
    colours, rows = class_colours(counts, len(scenes.classes)), []
    for row, (index, label) in enumerate(zip(places, labels, strict=True)):
        image, entry = scene_picture(scenes, index), scenes.instances.entries[index]
        things = [label, *(found_things(one, row, index, max(1, len(label.boxes))) for one in measured.values())]
        scale = image.width / entry["width"], image.height / entry["height"]
        rows.append([image, *(with_things(image, detections, scale, colours) for detections in things)])
    return measured, rows, counts, colours


def class_colours(counts: Counter[int], classes: int) -> np.ndarray:
    """(256 or more, 3) uint8: colours of classes. The most frequent get FAR_APART, in their order; the
    others hues that are far apart for neighbours in number, light and dark in turn."""
    hues = np.arange(classes) * 0.618034 % 1.0  # the golden ratio: every stretch of them is spread over the circle
    values = np.where(np.arange(classes) % 2, 0.65, 1.0)
    colours = np.zeros((max(256, classes), 3), np.uint8)
    drawn = [colorsys.hsv_to_rgb(hue, 0.85, value) for hue, value in zip(hues, values, strict=True)]
    colours[:classes] = np.rint(255 * np.array(drawn).reshape(-1, 3))
    largest = counts.most_common(len(FAR_APART))
    for (number, _), colour in zip(largest, FAR_APART[: len(largest)], strict=True):
        colours[number] = list(bytes.fromhex(colour[1:]))
    return colours


def scene_picture(scenes: SceneSet, index: int) -> Image.Image:
    """A scene's image, RGB, of at most PIXELS a side."""
    image = open_image(read_regular(scenes.image_path(index), MAX_BYTES)).convert("RGB")
    image.thumbnail((PIXELS, PIXELS))
    return image


def _kept_mask(measured: StoredResult, row: int) -> np.ndarray:
    height, width = measured.arrays["shown_sizes"][row].tolist()
    return measured.arrays["shown_masks"][row, :height, :width]


def tinted(image: Image.Image, mask: np.ndarray, colours: np.ndarray, bare: int = IGNORED) -> Image.Image:
    """An image under the colours (256, 3) of the classes (h, w) uint8 of its parts; those of class `bare` stay as they
    are."""
    large = np.asarray(Image.fromarray(mask).resize(image.size, Image.Resampling.NEAREST))
    pixels = np.asarray(image, np.float64)
    mixed = np.where((large == bare)[..., None], pixels, (1 - TINT) * pixels + TINT * colours[large])
    return Image.fromarray(mixed.round().astype(np.uint8))


def labelled_things(listing: Instances, index: int) -> Detections:
    """What the labels of an image hold."""
    numbers = {value: place for place, value in enumerate(listing.categories)}
    things, entry, boxes = listing.objects[index], listing.entries[index], []
    for thing in things:
        x, y, width, height = thing["bbox"]
        boxes.append(((x, y, x + width, y + height), numbers[thing["category_id"]]))
    outlines = [thing["segmentation"] for thing in things] if listing.has_outlines else []
    covered = number_outlines(outlines, entry["height"], entry["width"]) if listing.has_outlines else None
    return Detections(boxes=boxes, numbers=covered)


def found_things(measured: StoredResult, row: int, index: int, count: int) -> Detections:
    """The `count` surest things that were found in an image, which is the shown image `row`."""
    arrays = measured.arrays
    classes, scores, boxes = (arrays[name][index] for name in ("classes", "scores", "boxes"))
    surest = [place for place in np.argsort(-scores, kind="stable")[:count].tolist() if classes[place] >= 0]
    return Detections(
        boxes=[(tuple(boxes[place].tolist()), int(classes[place])) for place in surest],
        numbers=_kept_mask(measured, row) if "shown_masks" in measured.result.arrays else None,
    )


def with_things(image: Image.Image, things: Detections, scale: tuple[float, float], colours: np.ndarray) -> Image.Image:
    """An image under the masks of things, and their boxes, in the colours of their classes. scale: pixels of it by
    pixels of the boxes, across and down."""
    image = image.copy()
    if things.numbers is not None:
        own = np.zeros((256, 3), np.uint8)
        numbered = things.boxes[:MAX_NUMBERED_OBJECTS]
        own[1 : 1 + len(numbered)] = colours[[number for _, number in numbered]]
        image = tinted(image, things.numbers, own, bare=0)
    draw = ImageDraw.Draw(image)
    for corners, number in reversed(things.boxes):
        x1, y1, x2, y2 = (np.array(scale * 2) * corners).tolist()
        draw.rectangle((x1, y1, max(x1, x2), max(y1, y2)), outline=tuple(colours[number].tolist()), width=2)
    return image
