"""DAVIS 2017 or 2016: videos in which every frame has a mask of object numbers; 0 is the background.

DAVIS/ImageSets/2017/{train,val}.txt                names of videos, 60 and 30; or, in DAVIS 2016,
DAVIS/ImageSets/480p/{train,val}.txt                frames and masks of 30 and 20 videos, a pair of paths a line
DAVIS/JPEGImages/480p/VIDEO/00000.jpg, ...
DAVIS/Annotations/480p/VIDEO/00000.png, ...         palette images; in DAVIS 2016 grey, 255 for the only object

The training videos may be missing: nothing is trained on them.
"""

import os
from pathlib import Path

import numpy as np

from downstream.data.listing import IGNORED, Videos, files_below, find_folder, mask_paths, read_names
from downstream.data.tiny_scenes import save_image, save_lines
from imagesets.sets import MissingSplit, Split

IMAGES = {"train": "JPEGImages/480p", "val": "JPEGImages/480p"}
MASKS = "Annotations/480p"
NOTHING_TRAINED = True  # so that a video may be in both splits
OF_2017, OF_2016 = "ImageSets/2017", "ImageSets/480p"  # folders of the lists
COUNTS = {OF_2017: {"train": 60, "val": 30}, OF_2016: {"train": 30, "val": 20}}  # -> number of videos
MAX_OBJECTS = 20  # objects of a video
MIN_FRAMES = 3  # frames of a video, because the first and the last are not scored
TINY_SIZE, TINY_SQUARE = (48, 72), 16  # of a tiny video's frames (height, width) and moving squares, in pixels
TINY_VIDEOS, TINY_FRAMES = 3, 8  # tiny videos of a split, and frames of each


def recognised(root: Path) -> Path:
    """The folder with JPEGImages/480p/ and Annotations/480p/: `root`, or DAVIS in it."""
    advice = "give the unpacked DAVIS-2017-trainval-480p, or DAVIS 2016"
    return find_folder(root, (f"{IMAGES['val']}/", f"{MASKS}/"), advice, ("DAVIS",))


def listed(root: Path, split: Split) -> Videos:
    """All frames of one split, video by video.

    Raises:
        MissingSplit: the split has no list.
        ValueError: naming the video, if frames or masks are missing; or a list is wrong.
    """
    folder = next((folder for folder in COUNTS if os.path.lexists(root / folder / "val.txt")), OF_2017)
    is_2016 = folder == OF_2016
    name = f"{folder}/{split}.txt"
    if not os.path.lexists(root / name):
        raise MissingSplit(f"there is no list {root / name}, of the names of videos")
    paths = [Path(path) for path in read_names(root / name, "unpack the whole of DAVIS")]
    videos = sorted({path.parent.name or path.name for path in paths})
    images: list[str] = []
    masks: list[str] = []
    for video in videos:
        frames = files_below(root / IMAGES[split] / video, ".jpg")
        expected = [f"{number:05d}" for number in range(len(frames))]
        missing = next((stem for stem, frame in zip(expected, frames, strict=True) if Path(frame).stem != stem), None)
        if missing or len(frames) < MIN_FRAMES:
            raise ValueError(
                f"{IMAGES[split]}/{video} holds {len(frames)} frames"
                + (f", and {missing}.jpg is not among them" if missing else f"; a video needs {MIN_FRAMES}")
            )
        images += [f"{IMAGES[split]}/{video}/{frame}" for frame in frames]
        masks += mask_paths(root, split, frames, f"{MASKS}/{video}")
    year, official = ("2016" if is_2016 else "2017"), COUNTS[folder][split]
    notes = [f"{len(videos)} videos, DAVIS {year} has {official}"] if len(videos) != official else []
    if is_2016:
        notes.append("DAVIS 2016: one object in each video, so that numbers are not those of DAVIS 2017")
    # 254 is the number of no class, which Listing.to_classes refuses.
    objects, last = (1, 1) if is_2016 else (MAX_OBJECTS, IGNORED)
    return Videos(
        images=tuple(images),
        masks=tuple(masks),
        classes=("ground", *(f"object {number}" for number in range(1, objects + 1))),
        classes_of=(*range(objects + 1), *[254] * (255 - objects - 1), last),
        notes=tuple(notes),
        meaning="2016" if is_2016 else "",
    )


def write_tiny(root: Path, split: Split) -> None:
    """Write one split of the tiny set: two striped squares that move over a noisy background."""
    random = np.random.RandomState(COUNTS[OF_2017][split])
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
