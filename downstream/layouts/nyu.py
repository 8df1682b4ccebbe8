"""NYU Depth v2 as extracted by BTS, or depth of your own: images of rooms with depth in millimetres.

    ROOT/nyu_train.txt, nyu_test.txt        one line per image: image, depth, focal length; 24 231 and 654 lines
    ROOT/<scene>/rgb_*.jpg                  640 x 480
    ROOT/<scene>/sync_depth_*.png           16-bit PNG of millimetres, 0 or 65535 where nothing was measured

The scenes may also be in a folder NYU/ or nyu/ next to the lists. Paths in the lists may begin with a slash. The lists
may also be called train.txt and val.txt or test.txt; other options of the URL:

    ?train=LIST&val=LIST    lists of any name
    ?unit=m&scale=5000      a unit, m, cm or mm, and the value of one unit (by default 1); ?scale= alone is of a metre
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from downstream.data.listing import DepthMaps, check_different
from downstream.data.tiny_scenes import save_image, save_lines
from engine.files import read_text
from imagesets.sets import Split

LISTS = {"train": ("nyu_train.txt", "train.txt"), "val": ("nyu_test.txt", "val.txt", "test.txt")}  # the first is read
OPTIONS = ("unit", "scale", *LISTS)
UNITS = {"m": 1.0, "cm": 100.0, "mm": 1000.0}  # -> number of them in a metre
IMAGES = {split: f"the folders that {names[0]} names" for split, names in LISTS.items()}
COUNTS = {"train": 24231, "val": 654}
SCENE_FOLDERS = ("NYU", "nyu")
DEPTH_RANGE = (0.1, 20.0)  # metres; the largest depth in an image of a room is within it
TINY_SIZE = (60, 80)  # height and width in pixels
TINY_COUNTS = {"train": 64, "val": 24}  # images of a split, which are also the seed of its random numbers


def recognised(root: Path) -> Path:
    """The folder with the lists: NYU or nyu in `root` if they are there, else `root`."""
    names = [name for split_names in LISTS.values() for name in split_names]
    folders = (root, *(root / folder for folder in SCENE_FOLDERS))
    return next((folder for folder in folders if any((folder / name).is_file() for name in names)), root)


def listed(root: Path, split: Split, unit: str = "", scale: str = "", train: str = "", val: str = "") -> DepthMaps:
    """All images of one split, sorted by path. Raises ValueError if an option or line is wrong or a file is missing."""
    own = train if split == "train" else val
    names = (own,) if own else LISTS[split]
    if not (present := [name for name in names if (root / name).is_file()]):
        raise ValueError(f"there is no list {' or '.join(names)} in {root}; name yours, such as ?{split}=LIST")
    unit = unit or ("m" if scale else "mm")
    if unit not in UNITS or not (re.fullmatch(r"\d+(\.\d+)?", scale or "1") and float(scale or 1)):
        raise ValueError(f"unit is {', '.join(UNITS)}, and scale the value of one {unit}, a number above 0")
    per_metre = UNITS[unit] * float(scale or 1)
    prefix = next((f"{name}/" for name in SCENE_FOLDERS if (root / name).is_dir()), "")
    images, depths = [], []
    for number, line in enumerate(read_text(root / present[0]).splitlines(), 1):
        words = line.split()
        if len(words) not in (0, 2, 3):
            raise ValueError(f"{present[0]}, line {number}: {line!r}; write IMAGE DEPTH FOCAL_LENGTH")
        if words:
            images.append(prefix + words[0].lstrip("/"))
            depths.append(prefix + words[1].lstrip("/"))
    if missing := [name for name in (*images, *depths) if not os.path.lexists(root / name)]:
        raise ValueError(f"{len(missing)} files of {present[0]} are not there, such as {missing[0]}")
    check_different(images, f"images of {present[0]}")
    pairs = sorted(zip(images, depths, strict=True))
    notes = [f"{len(images)} images, the set has {COUNTS[split]}"] if len(images) != COUNTS[split] else []
    notes += [f"{present[0]} is read, not {' or '.join(present[1:])}"] if present[1:] else []
    return DepthMaps(
        images=tuple(image for image, _ in pairs),
        depths=tuple(depth for _, depth in pairs),
        per_metre=per_metre,
        range=DEPTH_RANGE,
        scaled=bool(scale),
        meaning="" if per_metre == UNITS["mm"] else f"{per_metre:g} per metre",
        notes=tuple(notes),
    )


def write_tiny(root: Path, split: Split) -> None:
    """Write one split of the tiny set."""
    lines = []
    for number, (pixels, millimetres) in enumerate(tiny_rooms(split)):
        image, depth = f"room_{split}/rgb_{number:05d}.jpg", f"room_{split}/sync_depth_{number:05d}.png"
        save_image(root / image, pixels, quality=95)
        Image.fromarray(millimetres).save(root / depth)
        lines.append(f"/{image} /{depth} 518.8579")
    save_lines(root / LISTS[split][0], lines)


def tiny_rooms(split: Split) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rooms with a floor and boxes in front of a wall: pixels (H, W, 3) uint8 and millimetres (H, W) uint16.

    Everything is striped, with finer stripes the farther away it is; colour and brightness are unrelated to depth.
    """
    random = np.random.RandomState(TINY_COUNTS[split])
    height, width = TINY_SIZE
    rows, columns = np.mgrid[:height, :width]
    for _ in range(TINY_COUNTS[split]):
        depth = np.full(TINY_SIZE, random.uniform(5.0, 8.0))
        horizon = height * 5 // 8
        floor = rows > horizon
        depth[floor] = (depth * (height - horizon) / np.maximum(4 * (rows - horizon), height - horizon))[floor]
        tint = np.full((*TINY_SIZE, 3), random.uniform(0.4, 1.0, 3))
        for distance in sorted(random.uniform(1.0, 5.0, 4), reverse=True):
            side = int(40 / distance) + 8
            top, left = random.randint(0, height - side // 2), random.randint(0, width - side // 2)
            depth[top : top + side, left : left + side] = distance
            tint[top : top + side, left : left + side] = random.uniform(0.4, 1.0, 3)
        stripes = 0.5 + 0.5 * np.sin(2 * np.pi * columns * np.minimum(depth, 8.0) / 32 + random.uniform(0, 6))
        pixels = 255 * tint * (0.35 + 0.65 * stripes)[..., None] + random.normal(0, 6, (*TINY_SIZE, 3))
        millimetres = np.round(1000 * depth).astype(np.uint16)
        millimetres[random.randint(height) :: 17, random.randint(width) :: 13] = 0  # not measured
        yield np.clip(pixels, 0, 255).astype(np.uint8), millimetres
