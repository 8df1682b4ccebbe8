"""DAVIS 2017: videos in which every frame has a mask of object numbers; 0 is the background.

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
MAX_OBJECTS = 20  # objects of a video
MIN_FRAMES = 3  # frames of a video, because the first and the last are not scored
TINY_SIZE, TINY_SQUARE = (48, 72), 16  # of a tiny video's frames (height, width) and moving squares, in pixels
TINY_VIDEOS, TINY_FRAMES = 3, 8  # tiny videos of a split, and frames of each


def recognised(root: Path) -> Path:
    """The folder with JPEGImages/480p/ and Annotations/480p/: `root`, or DAVIS in it."""
    advice = "give the unpacked DAVIS-2017-trainval-480p"
    return find_folder(root, (f"{IMAGES['val']}/", f"{MASKS}/"), advice, ("DAVIS",))


def listed(root: Path, split: Split) -> Listing:
    """All frames of one split, video by video. Raises ValueError, naming the video, if frames or masks are missing."""
    videos = sorted(read_names(root / f"ImageSets/2017/{split}.txt", "unpack the whole of DAVIS-2017-trainval-480p"))
    images: list[str] = []
    masks: list[str] = []
    for video in videos:
        frames = files_below(root / IMAGES[split] / video, ".jpg")
        expected = [f"{number:05d}.jpg" for number in range(len(frames))]
        missing = next((name for name, frame in zip(expected, frames, strict=True) if frame != name), None)
        if missing or len(frames) < MIN_FRAMES:
            raise ValueError(
                f"{IMAGES[split]}/{video} holds {len(frames)} frames"
                + (f", and {missing} is not among them" if missing else f"; a video needs {MIN_FRAMES}")
            )
        images += [f"{IMAGES[split]}/{video}/{name}" for name in frames]
        masks += mask_paths(root, split, frames, f"{MASKS}/{video}")
    return Listing(
        images=tuple(images),
        masks=tuple(masks),
        classes=("ground", *(f"object {number}" for number in range(1, MAX_OBJECTS + 1))),
        # 254 is the number of no class, which Listing.to_classes refuses.
        classes_of=(*range(MAX_OBJECTS + 1), *[254] * (255 - MAX_OBJECTS - 1), IGNORED),
        notes=() if len(videos) == COUNTS[split] else (f"{len(videos)} videos, DAVIS 2017 has {COUNTS[split]}",),
    )


def write_tiny(root: Path, split: Split) -> None:
    """Write one split of the tiny set: two striped squares that move over a noisy background."""
    random = np.random.RandomState(COUNTS[split])
    height, width = TINY_SIZE
    for number in range(TINY_VIDEOS):
        background = random.randint(0, 80, size=(height, width, 3))
        corners = random.randint(4, 10, size=(2, 2)) + np.array([[0, 0], [18, 28]])  # top and left of both squares
        steps = random.randint(0, 3, size=(2, 2))  # pixels down and right from one frame to the next
        for frame in range(TINY_FRAMES):
            pixels, mask = background.copy(), np.zeros(TINY_SIZE, np.uint8)
            for square, corner in enumerate(corners + frame * steps):
                top, left = np.minimum(corner, [height - TINY_SQUARE, width - TINY_SQUARE])
                window = slice(top, top + TINY_SQUARE), slice(left, left + TINY_SQUARE)
                stripes = np.indices((TINY_SQUARE, TINY_SQUARE))[square] // (2 + square) % 2
                pixels[window] = 255 * stripes[..., None]
                mask[window] = square + 1
            name = f"{split}{number}/{frame:05d}"
            save_image(root / IMAGES[split] / f"{name}.jpg", pixels.astype(np.uint8), quality=95)
            save_image(root / MASKS / f"{name}.png", mask)
    save_lines(root / f"ImageSets/2017/{split}.txt", [f"{split}{number}" for number in range(TINY_VIDEOS)])
