"""Some validation scenes with their labels and the predictions of a table's checkpoints, as small pictures.

Made from the small masks of segmentation results, and the boxes and small masks of detection results (docs/results.md).
Images are shown if their set is on this machine and has not changed since the measurement. H x W pixels.
"""

import base64
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
from downstream.data.overlays import class_colours, tinted
from downstream.data.scenes import SceneSet, open_scenes, scene_image, scene_mask
from downstream.metrics.previews import MAX_NUMBERED_OBJECTS, number_outlines, preview_indices, stored_masks
from downstream.metrics.scores import scene_mious
from imagesets.decoding import UnreadableImage
from imagesets.sets import ImageSet, contents_differ, open_set

THUMBNAIL_SIDE = 96  # pixels of the longer side
OpenSplit = Callable[[Result, Literal["train", "val"]], ImageSet | None]


def image_opener() -> OpenSplit:
    """A function that opens a split of the image set of a result, with the result's limit; each split is opened once.

    It returns None if the images are not on this machine, or are not those that were measured.
    """

    @functools.cache
    def open_once(url: str, split: Literal["train", "val"]) -> ImageSet | None:
        try:
            return open_set(url, split)
        except (ValueError, OSError):  # moved, unmounted, or no image set
            return None

    return lambda result, split: measured_images(open_once(result.data.url, split), result, split)


Images = TypeVar("Images", ImageSet, SceneSet)


def measured_images(images: Images | None, result: Result, split: str) -> Images | None:
    """The images of the split on which a result was measured; None if the set has changed since."""
    data = result.data
    if images is None or images.fingerprint != data.fingerprints.get(split):
        return None
    if contents_differ(images.contents, data.contents.get(split, "")):
        return None
    return images if result.limit is None else images.limited(result.limit)


def thumbnail_url(images: ImageSet, index: int) -> str:
    """An image of a set as a data: URL of a small JPEG; "" if it cannot be read."""
    try:
        return data_url(images.image(index))
    except (UnreadableImage, OSError):
        return ""


def data_url(image: Image.Image, side: int = THUMBNAIL_SIDE) -> str:
    """An RGB image as a data: URL of a JPEG with at most `side` pixels a side.

    An image of less than half the side is enlarged by repeating pixels, so that browsers do not blur it.
    """
    times = side // max(image.size)
    if times > 1:
        image = image.resize((times * image.width, times * image.height), Image.Resampling.NEAREST)
    else:
        image = image.copy()
        image.thumbnail((side, side))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


MAX_CHECKPOINTS = 3  # in a table of scenes
SCENE_SIDE = 192  # pixels of the longer side of a scene's picture
MAX_LEGEND = 12  # classes in the legend, the most frequent ones

Box = tuple[tuple[float, float, float, float], int]  # x1, y1, x2, y2 in pixels, and a class


@dataclass(frozen=True, kw_only=True, eq=False)
class Objects:
    """The labelled or detected objects of an image, the most confident detection first."""

    boxes: Sequence[Box]
    numbers: np.ndarray | None  # (h, w) uint8: 1 + index of the object that covers a pixel, 0 for none; None: no masks


def scene_details(results: Mapping[str, StoredResult], cache: Path) -> dict[str, Any] | None:
    """Pictures of some scenes with labels and predictions; None if none are stored, or the set is not on this machine.

    Args:
        results: name of checkpoint -> its result, the best first.
        cache: folder in which tiny scene sets are generated.

    Returns:
        columns: "image", "labels" and names of checkpoints. rows: a list of data: URLs for each scene, "" for a missing
        picture. captions: likewise, texts below the pictures. legend: pairs of class and colour, the most frequent
        class first. unnamed: number of classes missing from it. has_objects: True for detections with boxes, False for
        masks of classes. without_masks: checkpoints with boxes but no masks.
    """
    best = dict([(name, stored) for name, stored in results.items() if _has_predictions(stored)][:MAX_CHECKPOINTS])
    if not best:
        return None
    result = next(iter(best.values())).result
    try:
        scenes = measured_images(open_scenes(result.data.url, "val", cache), result, "val")
        if scenes is None:
            return None
        has_objects = isinstance(scenes.listing, Instances)
        draw = _draw_objects if has_objects else _draw_masks
        names, rows, captions, counts, colours = draw(best, scenes)
    except (OSError, ValueError, LookupError):  # moved, unmounted, cannot be read, or arrays of other scenes
        return None
    legend = legend_of(scenes, counts, colours)
    return {
        "columns": ["image", "labels", *names],
        "rows": [[data_url(picture, SCENE_SIDE) if picture else "" for picture in row] for row in rows],
        "captions": captions,
        "legend": legend,
        "unnamed": len(counts) - len(legend),
        "has_objects": has_objects,
        "without_masks": [name for name in best if has_objects and "shown_masks" not in best[name].result.arrays],
    }


def _has_predictions(stored: StoredResult) -> bool:
    """Whether a result stores masks or boxes to draw."""
    names = set(stored.result.arrays)
    return {"shown_of", "shown_masks", "shown_sizes"} <= names or {"boxes", "scores", "classes"} <= names


# Names of checkpoints; rows of pictures; their captions; frequency of each class; colours (256 or more, 3) of classes.
Drawings = tuple[Iterable[str], list[list[Image.Image | None]], list[list[str]], Counter[int], np.ndarray]


def legend_of(scenes: SceneSet, counts: Counter[int], colours: np.ndarray) -> list[tuple[str, str]]:
    """Names and colours (#rrggbb) of the MAX_LEGEND most frequent classes."""
    most_frequent = [number for number, _ in counts.most_common(MAX_LEGEND)]
    return [(scenes.classes[number], "#" + bytes(colours[number].tolist()).hex()) for number in most_frequent]


def scene_captions(arrays: Mapping[str, np.ndarray], indices: Sequence[int]) -> list[str]:
    """A caption for each of some scenes of a result's arrays: its mIoU, and which scene is the worst or the median."""
    if "areas" not in arrays:
        return ["" for _ in indices]
    mious = scene_mious(arrays["areas"])
    places = dict(zip(arrays.get("ranked_of", np.empty(0, int)).tolist(), ("worst: ", "median: "), strict=False))
    return [f"{places.get(index, '')}mIoU {mious[index]:.1f}" for index in indices]


def mask_counts(masks: Iterable[np.ndarray]) -> Counter[int]:
    """Number of pixels of each class in masks of classes."""
    return Counter(np.concatenate([mask[mask != IGNORED] for mask in masks]).tolist())


def _draw_masks(results: Mapping[str, StoredResult], scenes: SceneSet) -> Drawings:
    """Pictures of a segmentation, of the scenes that the first result stores."""
    masks = {name: stored_masks(stored.arrays) for name, stored in results.items()}
    indices = list(next(iter(masks.values())))
    captions = [scene_captions(stored.arrays, indices) for stored in results.values()]
    labels = {index: scene_mask(scenes, index) for index in indices}
    pixels = mask_counts(labels.values())
    colours, rows = class_colours(pixels, len(scenes.classes)), []
    for index, label in labels.items():
        image = scene_picture(scenes, index)
        of_row = [label, *(by_index.get(index) for by_index in masks.values())]
        rows.append([image, *(None if mask is None else tinted(image, mask, colours) for mask in of_row)])
    return results, rows, [["", "", *texts] for texts in zip(*captions, strict=True)], pixels, colours


def _draw_objects(results: Mapping[str, StoredResult], scenes: SceneSet) -> Drawings:
    """Pictures of a detection, with as many detections as there are labelled objects."""
    indices, rows = preview_indices(len(scenes)).tolist(), list[list[Image.Image | None]]()
    labels = [labelled_objects(scenes.instances, index) for index in indices]
    counts = Counter(number for label in labels for _, number in label.boxes)
    colours = class_colours(counts, len(scenes.classes))
    for index, label in zip(indices, labels, strict=True):
        image, entry = scene_picture(scenes, index), scenes.instances.entries[index]
        count = max(1, len(label.boxes))
        objects = [label, *(detected_objects(stored, index, count) for stored in results.values())]
        scale = image.width / entry["width"], image.height / entry["height"]
        rows.append([image, *(with_objects(image, in_column, scale, colours) for in_column in objects)])
    return results, rows, [[""] * len(row) for row in rows], counts, colours


def scene_picture(scenes: SceneSet, index: int) -> Image.Image:
    """A scene's image, RGB, with at most SCENE_SIDE pixels a side."""
    image = scene_image(scenes, index)
    image.thumbnail((SCENE_SIDE, SCENE_SIDE))
    return image


def labelled_objects(listing: Instances, index: int) -> Objects:
    """The labelled objects of an image."""
    numbers = {category: number for number, category in enumerate(listing.categories)}
    labels, entry, boxes = listing.objects[index], listing.entries[index], []
    for label in labels:
        x, y, width, height = label["bbox"]
        boxes.append(((x, y, x + width, y + height), numbers[label["category_id"]]))
    if not listing.has_outlines:
        return Objects(boxes=boxes, numbers=None)
    outlines = [label["segmentation"] for label in labels]
    return Objects(boxes=boxes, numbers=number_outlines(outlines, entry["height"], entry["width"]))


def detected_objects(stored: StoredResult, index: int, count: int) -> Objects:
    """The `count` most confident detections in image `index` of the set."""
    classes, scores, boxes = (stored.arrays[name][index] for name in ("classes", "scores", "boxes"))
    best = [place for place in np.argsort(-scores, kind="stable")[:count].tolist() if classes[place] >= 0]
    return Objects(
        boxes=[(tuple(boxes[place].tolist()), int(classes[place])) for place in best],
        numbers=stored_masks(stored.arrays)[index] if "shown_masks" in stored.result.arrays else None,
    )


def with_objects(image: Image.Image, objects: Objects, scale: tuple[float, float], colours: np.ndarray) -> Image.Image:
    """An image with the masks and boxes of objects in the colours of their classes.

    scale: pixels of this image per pixel of the boxes, horizontally and vertically.
    """
    image = image.copy()
    if objects.numbers is not None:
        boxes = objects.boxes[:MAX_NUMBERED_OBJECTS]
        colours_of_numbers = np.zeros((256, 3), np.uint8)
        colours_of_numbers[1 : 1 + len(boxes)] = colours[[number for _, number in boxes]]
        image = tinted(image, objects.numbers, colours_of_numbers, untinted=0)
    draw = ImageDraw.Draw(image)
    for corners, number in reversed(objects.boxes):
        x1, y1, x2, y2 = (np.array(scale * 2) * corners).tolist()
        draw.rectangle((x1, y1, max(x1, x2), max(y1, y2)), outline=tuple(colours[number].tolist()), width=2)
    return image
