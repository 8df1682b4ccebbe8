"""Training subsets of low-shot protocols: so many images per class, or a share of all, drawn or read from list files.

MSN's lists (facebookresearch/msn, also shipped by MOCA) are nested: in one split the image of 1-shot is among those of
2-shot, and these among those of 5-shot. Draws with one seed are nested in the same way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from imagesets.sets import ImageSet, parse_url
from imagesets.subsets import class_counts, few_shot, fraction, from_list

OFFICIAL = "published"  # value of `lists`: those of MSN and SimCLR, which lie in the folder of the images


@dataclass(frozen=True, kw_only=True)
class Subset:
    """Images to train on. name: of the metric, "5shot" or "1percent". split: number of the draw or list, from 0."""

    name: str
    split: int
    images: ImageSet


def subsets(
    train: ImageSet, shots: Sequence[int], shares: Sequence[float], splits: int, seed: int, lists: str = ""
) -> list[Subset]:
    """`splits` draws for every number of shots and one for every share; from the folder `lists` when it is given.

    Seeds 0, 1, ... of a run share no draw. ValueError where a class has fewer images than shots, and for lists that are
    absent or do not fit the set.
    """
    seeds = range(seed * splits, (seed + 1) * splits)
    parts = []
    for count in shots:
        for split in range(splits):
            images = images_of_list(train, lists, count, split) if lists else few_shot(train, count, seeds[split])
            parts.append(Subset(name=f"{count}shot", split=split, images=images))
    for share in shares:
        parts.append(Subset(name=percentage(share), split=0, images=part_of(train, share, seeds[0], lists)))
    return parts


def possible_shots(train: ImageSet, shots: Sequence[int], others: bool) -> tuple[tuple[int, ...], str]:
    """The numbers of shots that every class has images for, and a sentence about those that are left out, "" if none.

    others: whether there is something else to evaluate on. ValueError where nothing is left, or a class has no image.
    """
    counts = class_counts(train)
    fewest, name = int(counts.min()), train.classes[int(counts.argmin())]
    if not fewest:
        raise ValueError(f"{train.url}: class {name!r} has no training image; add some, or raise --limit")
    possible = tuple(count for count in shots if count <= fewest)
    if possible == tuple(shots):
        return possible, ""
    asked = f"{' and '.join(str(count) for count in shots if count > fewest)} images per class"
    reason = f"class {name!r} has {fewest} training image{'s' * (fewest > 1)}"
    if not (possible or others):
        raise ValueError(f"{train.url}: {asked} asked, but {reason}; --set lowshot.shots={fewest}, or add images")
    return possible, f"{asked} left out: {reason}"


def part_of(train: ImageSet, share: float, seed: int, lists: str) -> ImageSet:
    """A share of the images; there is one list of it, in the first folder."""
    if share == 1:
        return train
    if not lists:
        return fraction(train, share, seed)
    folder, name = lists_folder(train, lists), f"{percentage(share)}.txt"
    of_simclr = folder / "imagenet_subsets" / name  # where google-research/simclr has its 1 % and 10 %
    return from_list(train, of_simclr if of_simclr.is_file() else existing(folder / "imagenet_subsets1" / name))


def lists_folder(train: ImageSet, lists: str) -> Path:
    """The folder that `lists` names: itself, or that of the images. ValueError for images without a folder."""
    if lists != OFFICIAL:
        return Path(lists).expanduser()
    place = parse_url(train.url.partition("#")[0])[1]
    folder = Path(place)
    if not (place and folder.is_dir()):
        raise ValueError(
            f"{train.url}: the published lists name ImageNet's files and lie beside them, imagenet_subsets1 to 3 in "
            "the ROOT of imagenet:ROOT; evaluate on that, or choose a protocol that draws its subsets"
        )
    return folder


def images_of_list(train: ImageSet, lists: str, count: int, split: int) -> ImageSet:
    """The images of a split's list, as many of each class as its name says."""
    path = shot_list(lists_folder(train, lists), count, split)
    images = from_list(train, path)
    counts = class_counts(images)
    if len(wrong := np.flatnonzero(counts != count)):
        name = train.classes[wrong[0]]
        raise ValueError(
            f"{path}: lists {counts[wrong[0]]} images of class {name!r}, {count} expected; use MSN's files"
        )
    return images


def percentage(share: float) -> str:
    """0.01 -> "1percent"."""
    return f"{100 * share:g}percent"


def shot_list(folder: Path, count: int, split: int) -> Path:
    """The list of `count` images per class of a split, numbered from 1 in the names of its folders.

    MSN ships the third 5-shot list as 3imgs_class.txt, with five images of each class; MOCA has it under its own name.
    """
    place = folder / f"imagenet_subsets{split + 1}"
    path = place / f"{count}imgs_class.txt"
    misnamed = place / "3imgs_class.txt"
    if not path.exists() and (count, split) == (5, 2) and misnamed.exists():
        return misnamed
    return existing(path)


def existing(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(
            f"{path}: no such list; name the folder that holds imagenet_subsets1 to 3 of github.com/facebookresearch/"
            "msn (10percent.txt: google-research/simclr): --set lowshot.lists=FOLDER (semi.lists for semi@...), or "
            "leave it empty to draw by the seed"
        )
    return path


def indices_of(train: ImageSet, parts: Sequence[Subset]) -> list[np.ndarray]:
    """Places (n,) in `train` of the images of every part, in the part's order.

    One walk through the paths of `train` for all parts; only the paths that parts need are held in memory.
    """
    places_of: dict[str, int] = {}
    drawn = [part for part in parts if part.images is not train]
    for part in drawn:
        places_of |= dict.fromkeys((part.images.path(index) for index in range(len(part.images))), -1)
    for index in range(len(train) if drawn else 0):
        if (path := train.path(index)) in places_of:
            places_of[path] = index

    def places(part: Subset) -> np.ndarray:
        if part.images is train:
            return np.arange(len(train))
        return np.array([places_of[part.images.path(index)] for index in range(len(part.images))], np.int64)

    return [places(part) for part in parts]


def rows_among(indices: np.ndarray, read: np.ndarray) -> np.ndarray:
    """Rows of some images (n,) in features of the images `read` (m,), ascending; images that were skipped as
    unreadable have none."""
    rows = np.searchsorted(read, indices)
    return rows[read[np.minimum(rows, len(read) - 1)] == indices]
