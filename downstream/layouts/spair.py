"""SPair-71k's pairs of images that show an object of one class each, with keypoints that correspond.

    SPair-71k/PairAnnotation/{trn,test}/000001-SOURCE-TARGET:CLASS.json     53 340 and 12 234 pairs of 18 classes
    SPair-71k/JPEGImages/CLASS/NAME.jpg

A pair's file holds the keypoints that both images show. An image belongs to one split. Published numbers are on test,
which is the split `val` here; SPair's own PairAnnotation/val is not read.
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
NAME = re.compile(r"\d+-([^-]+)-([^-]+):(.+)\.json")
TINY_CLASSES, TINY_IMAGES, VIEWS, KEYPOINTS, TILE = ("cat", "dog"), 6, 3, 5, 12


def recognised(root: Path) -> Path:
    """The folder that holds PairAnnotation/ and JPEGImages/: `root`, or SPair-71k in it."""
    return find_folder(root, ("PairAnnotation/", "JPEGImages/"), "give the unpacked SPair-71k.tar.gz", ("SPair-71k",))


def listed(root: Path, split: Split) -> ImagePairs:
    """All pairs of one split in the order of their files' names, and the images in them. No pair's file is read."""
    files = files_below(root / PAIRS[split], ".json")
    parts = [NAME.fullmatch(file) for file in files]
    if None in parts:
        wrong = f"{PAIRS[split]}/{files[parts.index(None)]}"
        raise ValueError(
            f"{wrong} is no pair's name; these are NUMBER-SOURCE-TARGET:CLASS.json, as 000001-a-b:cat.json"
        )
    ends = [tuple(f"{part[3]}/{part[end]}.jpg" for end in (1, 2)) for part in parts if part]
    images = sorted({image for pair in ends for image in pair})
    check_present(images, files_below(root / "JPEGImages", ".jpg"), f"images of {split}", "JPEGImages")
    places = {image: place for place, image in enumerate(images)}
    return ImagePairs(
        images=tuple(f"JPEGImages/{image}" for image in images),
        pairs=tuple(f"{PAIRS[split]}/{file}" for file in files),
        ends=np.array([[places[image] for image in pair] for pair in ends], np.int64).reshape(-1, 2),
        notes=() if len(files) == COUNTS[split] else (f"{len(files)} pairs, SPair-71k has {COUNTS[split]}",),
    )


def write_tiny(root: Path, split: Split) -> None:
    """The tiny set's split: striped tiles on a noisy ground are keypoints; a class has its own colours and places. Seen
    from another side an object is turned. Some keypoints are hidden."""
    random, names = np.random.RandomState(COUNTS[split]), count(1)
    (root / PAIRS[split]).mkdir(parents=True)
    for kind, title in enumerate(TINY_CLASSES):
        shape = np.random.RandomState(kind)  # the same in both splits
        colours, corners = shape.randint(60, 256, (KEYPOINTS, 3)), shape.permutation(9)[:KEYPOINTS]
        drawn = [_draw(corners, colours, place % VIEWS, random) for place in range(TINY_IMAGES)]
        for place, (pixels, _) in enumerate(drawn):
            save_image(root / "JPEGImages" / title / f"{split}_{place}.jpg", pixels, quality=95)
        for ends in combinations(range(TINY_IMAGES), 2):
            both = sorted(drawn[ends[0]][1].keys() & drawn[ends[1]][1].keys())
            content: dict[str, object] = {"category": title, "kps_ids": [str(point) for point in both]}
            for side, end in zip(("src", "trg"), ends, strict=True):
                pixels, points = drawn[end]
                places = np.array(list(points.values()))
                box = [*(places.min(0) - TILE // 2), *(places.max(0) + TILE // 2)]
                content |= {
                    f"{side}_imname": f"{split}_{end}.jpg",
                    f"{side}_imsize": [pixels.shape[1], pixels.shape[0], 3],
                    f"{side}_bndbox": [int(edge) for edge in box],
                    f"{side}_kps": [points[point] for point in both],
                }
            content["viewpoint_variation"] = abs(ends[0] % VIEWS - ends[1] % VIEWS)
            name = f"{next(names):06d}-{split}_{ends[0]}-{split}_{ends[1]}:{title}.json"
            (root / PAIRS[split] / name).write_text(json.dumps(content), encoding="utf-8")


def _draw(
    corners: np.ndarray, colours: np.ndarray, view: int, random: np.random.RandomState
) -> tuple[np.ndarray, dict[int, list[int]]]:
    """Pixels (H, W, 3) uint8 of an object of tiles in a 3 x 3 grid, and its visible keypoints: number -> x, y."""
    height, width = random.randint(64, 80), random.randint(80, 96)
    pixels, points = random.randint(0, 60, (height, width, 3)), {}
    hidden = random.randint(3 * KEYPOINTS)
    for point in range(KEYPOINTS):
        if point == hidden:
            continue
        row, column = divmod(int(corners[point]), 3)
        for _ in range(view):  # a quarter turn for each step of the view
            row, column = column, 2 - row
        top, left = (int(4 + 20 * place + random.randint(0, 6)) for place in (row, column))
        stripes = np.indices((TILE, TILE))[point % 2] // (2 + point // 2) % 2
        pixels[top : top + TILE, left : left + TILE] = colours[point] * (0.3 + 0.7 * stripes[..., None])
        points[point] = [left + TILE // 2, top + TILE // 2]
    return pixels.astype(np.uint8), points
