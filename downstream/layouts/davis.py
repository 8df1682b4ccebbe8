"""DAVIS 2017's videos, in which every frame has a mask whose values are object numbers; 0 is the ground.

DAVIS/ImageSets/2017/{train,val}.txt                names of videos, 60 and 30
DAVIS/JPEGImages/480p/VIDEO/00000.jpg, ...
DAVIS/Annotations/480p/VIDEO/00000.png, ...         palette images
"""

from pathlib import Path

import numpy as np

from downstream.data.listing import IGNORED, Listing, files_below, find_folder, mask_paths, read_names
from downstream.data.tiny_scenes import save_image, save_lines
from imagesets.sets import Split

IMAGES = {"train": "JPEGImages/480p", "val": "JPEGImages/480p"}
MASKS = "Annotations/480p"
COUNTS = {"train": 60, "val": 30}
OBJECTS = 20  # in a video, at most
MIN_FRAMES = 3  # frames of a video: the first and the last are not scored
TINY_SIZE, TINY_FRAMES, TINY_VIDEOS, SQUARE = (48, 72), 8, 3, 16


def recognised(root: Path) -> Path:
    """The folder that holds JPEGImages/480p/ and Annotations/480p/: `root`, or DAVIS in it."""
    needed = f"{IMAGES['val']}/", f"{MASKS}/"
    return find_folder(root, needed, "give the unpacked DAVIS-2017-trainval-480p", ("DAVIS",))


def listed(root: Path, split: Split) -> Listing:
    """All frames of one split, video after video. ValueError names a video that lacks frames or masks."""
    videos = sorted(read_names(root / f"ImageSets/2017/{split}.txt", "unpack the whole of DAVIS-2017-trainval-480p"))
    images: list[str] = []
    masks: list[str] = []
    for video in videos:
        frames = files_below(root / IMAGES[split] / video, ".jpg")
        numbers = [name.removesuffix(".jpg") for name in frames]
        if numbers != [f"{number:05d}" for number in range(len(frames))] or len(frames) < MIN_FRAMES:
            absent = next((f"{place:05d}" for place, name in enumerate(numbers) if name != f"{place:05d}"), None)
            raise ValueError(
                f"{IMAGES[split]}/{video} holds {len(frames)} frames"
                + (f", and {absent}.jpg is not among them" if absent else f"; a video needs {MIN_FRAMES}")
            )
        images += [f"{IMAGES[split]}/{video}/{name}" for name in frames]
        masks += mask_paths(root, split, frames, f"{MASKS}/{video}")
    return Listing(
        images=tuple(images),
        masks=tuple(masks),
        classes=("ground", *(f"object {number}" for number in range(1, OBJECTS + 1))),
        classes_of=(*range(OBJECTS + 1), *[254] * (255 - OBJECTS - 1), IGNORED),
        notes=() if len(videos) == COUNTS[split] else (f"{len(videos)} videos, DAVIS 2017 has {COUNTS[split]}",),
    )


def write_tiny(root: Path, split: Split) -> None:
    """The tiny set's split: two striped squares that move over a noisy ground."""
    random = np.random.RandomState(COUNTS[split])
    height, width = TINY_SIZE
    for number in range(TINY_VIDEOS):
        ground = random.randint(0, 80, size=(height, width, 3))
        corners = random.randint(4, 10, size=(2, 2)) + np.array([[0, 0], [18, 28]])
        steps = random.randint(0, 3, size=(2, 2))
        for frame in range(TINY_FRAMES):
            pixels, mask = ground.copy(), np.zeros(TINY_SIZE, np.uint8)
            for place, corner in enumerate(corners + frame * steps):
                top, left = np.minimum(corner, [height - SQUARE, width - SQUARE])
                window = slice(top, top + SQUARE), slice(left, left + SQUARE)
                pixels[window] = 255 * (np.indices((SQUARE, SQUARE))[place] // (2 + place) % 2)[..., None]
                mask[window] = place + 1
            name = f"{split}{number}/{frame:05d}"
            save_image(root / IMAGES[split] / f"{name}.jpg", pixels.astype(np.uint8), quality=95)
            save_image(root / MASKS / f"{name}.png", mask)
    save_lines(root / f"ImageSets/2017/{split}.txt", [f"{split}{number}" for number in range(TINY_VIDEOS)])
