"""Which images do low-shot protocols train on? So many of each class, or a share of all: drawn, or read from lists.

MSN's lists (facebookresearch/msn, also in MOCA's repository) are nested: the images of 1-shot are among those of 2-shot
of the same split, and these among those of 5-shot. Draws with one seed are nested in the same way.

n images of a subset, m images that could be read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from engine.errors import option
from engine.tasks import Workspace
from imagesets.sets import ImageSet, open_set, parse_url
from imagesets.subsets import class_counts, few_shot, fraction, from_list, images_of_share
from probes.lowshot import mieb

Draws = Literal["nested", "mieb"]
PUBLISHED_LISTS = "published"  # value of `lists`: the lists of MSN and SimCLR, in the folder of the images


@dataclass(frozen=True, kw_only=True)
class Subset:
    """Images to train on."""

    name: str  # in metrics: "5shot" or "1percent"
    split: int  # number of the draw or list, from 0
    images: ImageSet


def draw_subsets(
    train: ImageSet,
    shots: Sequence[int],
    shares: Sequence[float],
    splits: int,
    seed: int,
    lists: str = "",
    draws: Draws = "nested",
) -> list[Subset]:
    """`splits` subsets for each number of images per class, and one for each share of all images.

    Args:
        train: The training images.
        shots: Numbers of images per class.
        shares: Shares of all images.
        splits: Draws or lists of each number of shots.
        seed: Different seeds have different draws.
        lists: Folder of lists, or PUBLISHED_LISTS; empty: draw.
        draws: Rule of the draws.

    Raises:
        ValueError: For a class with fewer images than shots, and for lists that are absent or do not fit the images.
    """
    seeds = range(seed * splits, (seed + 1) * splits)
    all_subsets = []
    for count in shots:
        if draws == "mieb":
            generators = (np.random.RandomState(mieb.SEED + seed) for _ in range(splits))
            drawn = mieb.draw(train.labels, count, generators)
            sets = [train.subset(rows, f"{count}-shot-mieb{seed}-{split}") for split, rows in enumerate(drawn)]
        elif lists:
            sets = [read_shot_list(train, lists, count, split) for split in range(splits)]
        else:
            sets = [few_shot(train, count, seeds[split]) for split in range(splits)]
        all_subsets += [Subset(name=f"{count}shot", split=split, images=images) for split, images in enumerate(sets)]
    for share in shares:
        all_subsets.append(Subset(name=percentage(share), split=0, images=draw_share(train, share, seeds[0], lists)))
    return all_subsets


def possible_shots(
    train: ImageSet, shots: Sequence[int], has_shares: bool, draws: Draws = "nested"
) -> tuple[tuple[int, ...], str]:
    """The numbers of images per class that all classes have, and a warning about the others, "" if there are none.

    MIEB's draws take all images of a smaller class, which the warning says. has_shares: whether shares of all images
    are evaluated, too. Raises ValueError if nothing is left to evaluate, or if a class has no image.
    """
    counts = class_counts(train)
    fewest, name = int(counts.min()), train.classes[int(counts.argmin())]
    if not fewest:
        raise ValueError(f"{train.url}: class {name!r} has no training image; add some, or raise {option('limit')}")
    possible = tuple(count for count in shots if count <= fewest)
    if possible == tuple(shots):
        return possible, ""
    if draws == "mieb":
        fewer = int((counts < max(shots)).sum())
        text = f"{max(shots)} images per class: {fewer} of {len(counts)} classes have fewer, {name!r} {fewest}; all of "
        return tuple(shots), f"{text}theirs were taken"
    impossible = f"{' and '.join(str(count) for count in shots if count > fewest)} images per class"
    reason = f"class {name!r} has {fewest} training image{'s' * (fewest > 1)}"
    if not (possible or has_shares):
        raise ValueError(
            f"{train.url}: {impossible} requested, but {reason}; {option('settings', {'lowshot.shots': fewest})}, or "
            f"add images"
        )
    return possible, f"{impossible} left out: {reason}"


def share_warning(train: ImageSet, share: float, lists: str) -> str:
    """A warning about a share that is drawn larger, since it has fewer images than there are classes; "" if not."""
    classes = int(np.count_nonzero(class_counts(train)))
    if lists or images_of_share(train, share) >= classes:
        return ""
    return (
        f"{100 * share:g} % of {len(train)} images is less than one of each class: {classes} images were taken, one of "
        f"each, {100 * classes / len(train):.2g} %"
    )


def draw_share(train: ImageSet, share: float, seed: int, lists: str) -> ImageSet:
    """A share of the images, drawn or read from its one list."""
    if share == 1:
        return train
    if not lists:
        return fraction(train, share, seed)
    folder, name = lists_folder(train, lists), f"{percentage(share)}.txt"
    simclr_list = folder / "imagenet_subsets" / name  # where google-research/simclr has its 1 % and 10 %
    return from_list(train, simclr_list if simclr_list.is_file() else checked_list(folder / "imagenet_subsets1" / name))


def lists_folder(train: ImageSet, lists: str) -> Path:
    """The folder of lists; with PUBLISHED_LISTS that of the images. ValueError for images without a folder."""
    if lists != PUBLISHED_LISTS:
        return Path(lists).expanduser()
    path = parse_url(train.url.partition("#")[0])[1]
    folder = Path(path)
    if not (path and folder.is_dir()):
        raise ValueError(
            f"{train.url}: the published lists name ImageNet's files and lie beside them, imagenet_subsets1 to 3 in "
            "the ROOT of imagenet:ROOT; evaluate on that, or choose a protocol that draws its subsets"
        )
    return folder


def lists_read(lists: str, space: Workspace) -> dict[str, Path]:
    """The files in the folder of lists, by their path in it; none if subsets are drawn."""
    if not lists:
        return {}
    folder = lists_folder(space.images("train", open_set), lists)
    return {str(path.relative_to(folder)): path for path in sorted(folder.glob("imagenet_subsets*/*.txt"))}


def read_shot_list(train: ImageSet, lists: str, count: int, split: int) -> ImageSet:
    """The images of a split's list. ValueError unless they are `count` of each class."""
    path = shot_list_path(lists_folder(train, lists), count, split)
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


def shot_list_path(folder: Path, count: int, split: int) -> Path:
    """Path of the list with `count` images per class of a split, numbered from 0. ValueError if there is none.

    MSN's third list of 5 images per class is called 3imgs_class.txt; MOCA's has the correct name.
    """
    split_folder = folder / f"imagenet_subsets{split + 1}"
    path = split_folder / f"{count}imgs_class.txt"
    misnamed = split_folder / "3imgs_class.txt"
    if not path.exists() and (count, split) == (5, 2) and misnamed.exists():
        return misnamed
    return checked_list(path)


def checked_list(path: Path) -> Path:
    """The path. ValueError if there is no such file."""
    if not path.is_file():
        raise ValueError(
            f"{path}: no such list; name the folder that holds imagenet_subsets1 to 3 of github.com/facebookresearch/"
            f"msn (10percent.txt: google-research/simclr): {option('settings', {'lowshot.lists': 'FOLDER'})} "
            f"(semi.lists for semi@...), or "
            "leave it empty to draw by the seed"
        )
    return path


def subset_indices(train: ImageSet, all_subsets: Sequence[Subset]) -> list[np.ndarray]:
    """For each subset the indices (n,) in `train` of its images, in the subset's order.

    Goes through the paths of `train` once for all subsets, and keeps only the paths of the subsets in memory.
    """
    smaller = [subset for subset in all_subsets if subset.images is not train]
    index_by_path: dict[str, int] = {}
    for subset in smaller:
        index_by_path |= dict.fromkeys((subset.images.path(index) for index in range(len(subset.images))), -1)
    for index in range(len(train) if smaller else 0):
        if (path := train.path(index)) in index_by_path:
            index_by_path[path] = index

    def indices(images: ImageSet) -> np.ndarray:
        if images is train:
            return np.arange(len(train))
        return np.array([index_by_path[images.path(index)] for index in range(len(images))], np.int64)

    return [indices(subset.images) for subset in all_subsets]


def rows_of_images(indices: np.ndarray, read_indices: np.ndarray) -> np.ndarray:
    """Rows of images (n,) in features of the images `read_indices` (m,), which ascend.

    Images without features, because they were unreadable, are left out.
    """
    rows = np.searchsorted(read_indices, indices)
    return rows[read_indices[np.minimum(rows, len(read_indices) - 1)] == indices]
