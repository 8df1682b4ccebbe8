"""NYU Depth v2 as BTS extracted it: images of rooms and their depth in millimetres.

    ROOT/nyu_train.txt, nyu_test.txt        a line for each image: image, depth, focal length; 24 231 and 654 lines
    ROOT/<scene>/rgb_*.jpg                  640 x 480
    ROOT/<scene>/sync_depth_*.png           16-bit PNG of millimetres, 0 where nothing was measured

The lists may also lie beside a folder NYU/ (or nyu/) that holds the scenes. The paths in them may begin with a slash.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from downstream.data.listing import DepthMaps, find_folder
from downstream.data.tiny_scenes import save_image, save_lines
from imagesets.sets import Split

LISTS = {"train": "nyu_train.txt", "val": "nyu_test.txt"}
IMAGES = {split: f"the folders that {name} names" for split, name in LISTS.items()}
COUNTS = {"train": 24231, "val": 654}
FOLDERS = ("NYU", "nyu")
RANGE = (0.1, 20.0)  # metres: what the largest depth of an image of a room can be
TINY_SIZE = (60, 80)
TINY_COUNTS = {"train": 64, "val": 24}


def recognised(root: Path) -> Path:
    """The folder that holds both lists: `root`, or NYU or nyu in it."""
    return find_folder(root, (*LISTS.values(),), "give the folder of BTS's extraction that holds both lists", FOLDERS)


def listed(root: Path, split: Split) -> DepthMaps:
    """All images of one split, in the order of the sorted list. ValueError names a line or a file that is wrong."""
    inside = next((f"{name}/" for name in FOLDERS if (root / name).is_dir()), "")
    images, depths = [], []
    lines = (root / LISTS[split]).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        words = line.split()
        if len(words) not in (0, 2, 3):
            raise ValueError(f"{LISTS[split]}, line {number}: {line!r}; write IMAGE DEPTH FOCAL_LENGTH")
        if words:
            images.append(inside + words[0].lstrip("/"))
            depths.append(inside + words[1].lstrip("/"))
    if lacking := [name for name in (*images, *depths) if not (root / name).is_file()]:
        raise ValueError(f"{len(lacking)} files of {LISTS[split]} are not there, such as {lacking[0]}")
    order = sorted(range(len(images)), key=lambda place: (images[place], depths[place]))
    return DepthMaps(
        images=tuple(images[place] for place in order),
        depths=tuple(depths[place] for place in order),
        per_metre=1000.0,
        range=RANGE,
        notes=() if len(images) == COUNTS[split] else (f"{len(images)} images, the set has {COUNTS[split]}",),
    )


def write_tiny(root: Path, split: Split) -> None:
    """The tiny set's split."""
    lines = []
    for number, (pixels, millimetres) in enumerate(tiny_rooms(split)):
        names = f"room_{split}/rgb_{number:05d}.jpg", f"room_{split}/sync_depth_{number:05d}.png"
        save_image(root / names[0], pixels, quality=95)
        Image.fromarray(millimetres).save(root / names[1])
        lines.append(f"/{names[0]} /{names[1]} 518.8579")
    save_lines(root / LISTS[split], lines)


def tiny_rooms(split: Split) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rooms of boxes before a wall: pixels (H, W, 3) uint8 and millimetres (H, W) uint16.

    Stripes on a box are the finer the further it is away; colours and brightness say nothing. Below them is the floor.
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
