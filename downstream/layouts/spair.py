"""SPair-71k: pairs of images of objects of the same class, with corresponding keypoints.

    SPair-71k/PairAnnotation/{trn,test}/000001-SOURCE-TARGET:CLASS.json     53 340 and 12 234 pairs of 18 classes
    SPair-71k/JPEGImages/CLASS/NAME.jpg

A pair's file has the keypoints that are visible in both images. An image belongs to one split. Published numbers are on
test, which is the split `val` here; SPair's own PairAnnotation/val is not read.
"""

import json
import re
from itertools import combinations, count
from pathlib import Path

import numpy as np

from downstream.data.listing import ImagePairs, check_present, files_below, find_folder
from downstream.data.tiny_scenes import save_image
from imagesets.sets import Split

IMAGES = {"train": "JPEGImages", "val": "JPEGImages"}
PAIRS = {"train": "PairAnnotation/trn", "val": "PairAnnotation/test"}
COUNTS = {"train": 53340, "val": 12234}
NOTHING_TRAINED = True  # so that an image may be in both splits
PAIR_NAME = re.compile(r"\d+-([^-]+)-([^-]+):(.+)\.json")  # source, target, class
TINY_CLASSES, TINY_IMAGES = ("cat", "dog"), 6  # in the tiny set; images of each class
TINY_VIEWS, TINY_KEYPOINTS, TINY_TILE = 3, 5, 12  # viewpoints; keypoints of an object; side of a keypoint in pixels


def recognised(root: Path) -> Path:
    """The folder with PairAnnotation/ and JPEGImages/: `root`, or SPair-71k in it."""
    return find_folder(root, ("PairAnnotation/", "JPEGImages/"), "give the unpacked SPair-71k.tar.gz", ("SPair-71k",))


def listed(root: Path, split: Split) -> ImagePairs:
    """All pairs of one split, in the order of their files' names, and their images. The files are not read.

    Raises ValueError if the name of a file is wrong or an image is missing.
    """
    files = files_below(root / PAIRS[split], ".json")
    pairs: list[tuple[str, str]] = []  # source and target image of each file
    for file in files:
        parts = PAIR_NAME.fullmatch(file)
        if parts is None:
            raise ValueError(
                f"{PAIRS[split]}/{file} is no pair's name; these are NUMBER-SOURCE-TARGET:CLASS.json, as "
                "000001-a-b:cat.json"
            )
        source, target, title = parts.groups()
        if source == target:
            raise ValueError(f"{PAIRS[split]}/{file} is a pair of an image with itself; remove it")
        pairs.append((f"{title}/{source}.jpg", f"{title}/{target}.jpg"))
    images = sorted({image for pair in pairs for image in pair})
    first_of = dict(zip(reversed(pairs), reversed(files), strict=True))  # pair -> its first file
    repeated = [(file, first_of[pair]) for file, pair in zip(files, pairs, strict=True) if file != first_of[pair]]
    check_present(images, files_below(root / "JPEGImages", ".jpg"), f"images of {split}", "JPEGImages")
    index_of = {image: index for index, image in enumerate(images)}
    return ImagePairs(
        images=tuple(f"JPEGImages/{image}" for image in images),
        pairs=tuple(f"{PAIRS[split]}/{file}" for file in files),
        ends=np.array([[index_of[image] for image in pair] for pair in pairs], np.int64).reshape(-1, 2),
        warnings=tuple(
            f"{len(repeated)} files of {PAIRS[split]} are of a pair that another file has, which counts twice: {file} "
            f"and {first}; remove one"
            for file, first in repeated[:1]
        ),
        notes=() if len(files) == COUNTS[split] else (f"{len(files)} pairs, SPair-71k has {COUNTS[split]}",),
    )


def write_tiny(root: Path, split: Split) -> None:
    """Write one split of the tiny set: objects whose keypoints are striped tiles, on a noisy background.

    Colours and positions of the tiles depend on the class. A viewpoint turns the object; some keypoints are hidden.
    """
    random, numbers = np.random.RandomState(COUNTS[split]), count(1)
    (root / PAIRS[split]).mkdir(parents=True)
    for class_index, title in enumerate(TINY_CLASSES):
        class_random = np.random.RandomState(class_index)  # the same in both splits
        colours = class_random.randint(60, 256, (TINY_KEYPOINTS, 3))
        cells = class_random.permutation(9)[:TINY_KEYPOINTS]
        objects = [_draw(cells, colours, index % TINY_VIEWS, random) for index in range(TINY_IMAGES)]
        for index, (pixels, _) in enumerate(objects):
            save_image(root / "JPEGImages" / title / f"{split}_{index}.jpg", pixels, quality=95)
        for ends in combinations(range(TINY_IMAGES), 2):
            source, target = ends
            shared = sorted(objects[source][1].keys() & objects[target][1].keys())
            content: dict[str, object] = {"category": title, "kps_ids": [str(keypoint) for keypoint in shared]}
            for side, index in zip(("src", "trg"), ends, strict=True):
                pixels, keypoints = objects[index]
                centres = np.array(list(keypoints.values()))
                box = [*(centres.min(0) - TINY_TILE // 2), *(centres.max(0) + TINY_TILE // 2)]
                content |= {
                    f"{side}_imname": f"{split}_{index}.jpg",
                    f"{side}_imsize": [pixels.shape[1], pixels.shape[0], 3],
                    f"{side}_bndbox": [int(edge) for edge in box],
                    f"{side}_kps": [keypoints[keypoint] for keypoint in shared],
                }
            content["viewpoint_variation"] = abs(source % TINY_VIEWS - target % TINY_VIEWS)
            name = f"{next(numbers):06d}-{split}_{source}-{split}_{target}:{title}.json"
            (root / PAIRS[split] / name).write_text(json.dumps(content), encoding="utf-8")


def _draw(
    cells: np.ndarray, colours: np.ndarray, view: int, random: np.random.RandomState
) -> tuple[np.ndarray, dict[int, list[int]]]:
    """Pixels (H, W, 3) uint8 of an object, and its visible keypoints: number -> x, y.

    cells: cell of each keypoint in a 3 x 3 grid. colours: (keypoints, 3). view: quarter turns of the object.
    """
    height, width = random.randint(64, 80), random.randint(80, 96)
    pixels, keypoints = random.randint(0, 60, (height, width, 3)), {}
    hidden = random.randint(3 * TINY_KEYPOINTS)  # the hidden keypoint, or none in two of three images
    for keypoint in range(TINY_KEYPOINTS):
        if keypoint == hidden:
            continue
        row, column = divmod(int(cells[keypoint]), 3)
        for _ in range(view):
            row, column = column, 2 - row
        top, left = (int(4 + 20 * cell + random.randint(0, 6)) for cell in (row, column))
        stripes = np.indices((TINY_TILE, TINY_TILE))[keypoint % 2] // (2 + keypoint // 2) % 2
        pixels[top : top + TINY_TILE, left : left + TINY_TILE] = colours[keypoint] * (0.3 + 0.7 * stripes[..., None])
        keypoints[keypoint] = [left + TINY_TILE // 2, top + TINY_TILE // 2]
    return pixels.astype(np.uint8), keypoints
