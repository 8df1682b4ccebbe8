"""memory:NAME, images that a Python program holds: arrays and datasets that it gives to `bench.evaluate`.

The images are read once to be fingerprinted, and again whenever they are needed; they are there as long as the program
holds what `hold` returns.
"""

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np
from PIL import Image

from engine.progress import Progress
from imagesets.decoding import UnreadableImage, as_rgb, reason_of
from imagesets.selection import held_out_sample, rarest_classes
from imagesets.sets import ImageSet, Split

PLACE = "NAME"
SPLITS = ("train", "val")
HELD_OUT = 0.2  # share of each class that becomes the validation images, where there is one split alone
READ_TWICE = 3  # images by which random augmentation is noticed
FORMS = "give PIL images, or arrays (H, W, 3), (3, H, W) or (H, W) of uint8, or of floats from 0 to 1"
_turn = threading.Lock()  # datasets are made for one thread; several extract features


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldImages:
    """ImageSource of a dataset under a name.

    places: (N,) which items. digests: (N, 32) uint8, SHA-256 of the pixels of each.
    """

    dataset: Any
    name: str
    places: np.ndarray
    digests: np.ndarray

    def path(self, index: int) -> str:
        return f"{self.name}/{self.places[index]}"

    def encoded(self, index: int) -> None:
        return None

    def image(self, index: int) -> Image.Image:
        return read_item(self.dataset, int(self.places[index]), self.path(index))[0]

    def take(self, indices: np.ndarray) -> "HeldImages":
        return replace(self, places=self.places[indices], digests=self.digests[indices])

    changed: ClassVar[None] = None
    contents: ClassVar[str] = ""  # the fingerprint is of the pixels
    modified: ClassVar[int] = 0

    def facts(self) -> tuple[bytes, ...]:
        return (self.digests.tobytes(),)


class Arrays(Sequence):
    """Images and labels of equal length, as a dataset of pairs."""

    def __init__(self, images: Any, labels: Any) -> None:
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images and {len(labels)} labels; give one label for each image")
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: Any) -> Any:
        return self.images[index], self.labels[index]


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldSets:
    """Both splits of a set, which `memory:NAME` means for as long as this is held."""

    url: str
    splits: Mapping[Split, ImageSet]


_held: WeakValueDictionary[str, HeldSets] = WeakValueDictionary()


def open_split(place: str, split: Split) -> ImageSet:
    """One split of the set that the program holds under this name. ValueError where it holds none."""
    if f"memory:{place}" not in _held:
        raise ValueError(
            f"memory:{place}: its images were given by a Python program and are not in this one; give them again, as "
            "bench.evaluate(..., images=..., labels=...)"
        )
    return _held[f"memory:{place}"].splits[split]


def hold(name: str, train: Any, val: Any = None) -> HeldSets:
    """Make `memory:NAME` mean these images, as long as the answer is held.

    train, val: datasets, which have a length and whose items are an image and its label, in torchvision's form or as a
    dictionary with "image" and "label"; or pairs (images, labels). Labels are numbers or names of classes, or (K,) of
    several classes an image. Without `val`, a fifth of each class of `train` is held out, drawn by seed 0. ValueError,
    in one line, for images and labels of other forms, and for images that change when they are read again.
    """
    url = f"memory:{name}"
    splits: dict[Split, tuple[HeldImages, list[Any]]] = {"train": _read(url, "train", train)}
    notes: tuple[str, ...] = ()
    if val is not None:
        splits["val"] = _read(url, "val", val)
    classes, labels = _classes([labels for _, labels in splits.values()], url, getattr(train, "classes", None))
    sets = {
        split: ImageSet(url=url, split=split, classes=classes, labels=numbers, images=images)
        for (split, (images, _)), numbers in zip(splits.items(), labels, strict=True)
    }
    if val is None:
        whole, notes = sets["train"], (f"{HELD_OUT:.0%} of each class are held out as validation images",)
        strata = rarest_classes(whole.labels) if whole.has_several_labels else whole.labels
        chosen = held_out_sample(strata, len(classes) + 1, HELD_OUT, seed=0)
        parts: dict[Split, np.ndarray] = {"train": np.setdiff1d(np.arange(len(whole)), chosen), "val": chosen}
        sets = {
            split: replace(whole, split=split, labels=whole.labels[places], images=whole.images.take(places))
            for split, places in parts.items()
        }
    _held[url] = held = HeldSets(
        url=url, splits={split: replace(images, notes=notes) for split, images in sets.items()}
    )
    return held


def _read(url: str, split: Split, dataset: Any) -> tuple[HeldImages, list[Any]]:
    """All images of a dataset, each read once, and their labels."""
    dataset = Arrays(*dataset) if isinstance(dataset, tuple) and len(dataset) == 2 else dataset
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ValueError(f"{url}: {split} is a {type(dataset).__name__}; give a dataset with a length, or arrays")
    name, labels, digests = f"{url}/{split}", [], []
    with Progress(f"reading {name}", len(dataset)) as progress:
        for place in range(len(dataset)):
            try:
                image, label = read_item(dataset, place, f"{name}/{place}")
            except UnreadableImage as error:
                raise ValueError(f"{error.path}: {error.reason}") from error
            digests.append(_digest(image))
            labels.append(label)
            progress.advance(1)
    for place in range(min(READ_TWICE, len(dataset))):
        if _digest(read_item(dataset, place, name)[0]) != digests[place]:
            raise ValueError(f"{name}/{place} is another image when read again: leave random augmentation out")
    table = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, hashlib.sha256().digest_size)
    return HeldImages(dataset=dataset, name=name, places=np.arange(len(dataset)), digests=table), labels


def read_item(dataset: Any, place: int, path: str) -> tuple[Image.Image, Any]:
    """RGB image and label at a place of a dataset. UnreadableImage, with the `path`, where it holds something else."""
    try:
        with _turn:
            item = dataset[place]
        if isinstance(item, Mapping):
            image, label = (_named(item, names) for names in (("image", "img"), ("label", "labels")))
        else:
            image, label = item[0], item[1]
        return rgb(image), label
    except Exception as error:  # of any type: the dataset decides
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise UnreadableImage(path, " ".join(reason.split()) or reason_of(error)) from error


def _named(item: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    key = next((name for name in names if name in item), None)
    if key is None:
        raise ValueError(f"an item has {', '.join(item)}, and no {' or '.join(names)}")
    return item[key]


def rgb(image: Any) -> Image.Image:
    """An image in any of FORMS. ValueError for others."""
    if isinstance(image, Image.Image):
        return image if image.mode == "RGB" else as_rgb(image)
    pixels = _array(image)
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if pixels.ndim == 3 and pixels.shape[-1] not in (1, 3):
        pixels = np.moveaxis(pixels, 0, -1)
    if pixels.ndim != 3 or pixels.shape[-1] not in (1, 3) or pixels.dtype.kind not in "buif":
        shape = f"{type(image).__name__} {tuple(getattr(image, 'shape', ()))}"
        raise ValueError(f"an image is a {shape} of {pixels.dtype}; {FORMS}")
    white = 1 if pixels.dtype.kind in "bf" else 255
    if not (pixels.min() >= 0 and pixels.max() <= white):  # NaN too
        raise ValueError(
            f"an image of {pixels.dtype} has values from {pixels.min():g} to {pixels.max():g}; {FORMS}, and leave "
            "normalisation out"
        )
    scaled = pixels if white == 255 else np.rint(255.0 * pixels)
    return Image.fromarray(np.ascontiguousarray(np.broadcast_to(scaled, (*scaled.shape[:2], 3)), np.uint8))


def _array(value: Any) -> np.ndarray:
    """A tensor or whatever else as an array."""
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def _digest(image: Image.Image) -> bytes:
    return hashlib.sha256(f"{image.size}".encode() + image.tobytes()).digest()


def _classes(
    labels: Sequence[Sequence[Any]], url: str, names: Sequence[str] | None
) -> tuple[tuple[str, ...], list[np.ndarray]]:
    """Labels of every split -> class names and, for each split, their numbers (N,), or (N, K) of several labels."""
    tables = [np.array([_array(label).tolist() for label in of_split]) for of_split in labels]
    if any(not len(table) for table in tables):
        raise ValueError(f"{url}: a split has no images")
    kinds = {table.dtype.kind for table in tables}
    if not (kinds <= {"i", "u", "b"} or kinds == {"U"}) or {table.ndim for table in tables} not in ({1}, {2}):
        example = next((table for table in tables if table.dtype.kind not in "iubU"), tables[-1])
        value = f"{example.ravel().tolist()[0]!r} ({example.dtype}, {example.ndim} axes)"
        raise ValueError(
            f"{url}: labels such as {value}; give whole numbers or names, one for each image, or as many 0 and 1 as "
            "there are classes"
        )
    if tables[0].ndim == 2:
        if len({table.shape[1] for table in tables}) > 1 or not all(
            np.isin(table, (-1, 0, 1)).all() for table in tables
        ):
            raise ValueError(f"{url}: several labels an image are 0, 1 or -1 (not judged), one for each class")
        return _names(names, range(tables[0].shape[1])), [table.astype(np.int64) for table in tables]
    values = np.unique(np.concatenate(tables))
    if names and values.dtype.kind in "iu" and values[0] >= 0 and values[-1] < len(names):
        return tuple(map(str, names)), tables
    return tuple(map(str, values)), [np.searchsorted(values, table) for table in tables]


def _names(names: Sequence[str] | None, numbers: Sequence[int]) -> tuple[str, ...]:
    return tuple(map(str, names if names and len(names) == len(numbers) else numbers))
