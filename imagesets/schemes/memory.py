"""memory:NAME, arrays and datasets in a Python program, which passes them to `bench.evaluate`.

The images are read once for the fingerprint, and again whenever they are needed. The name is valid as long as the
program holds the object that `hold` returns.
"""

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np
from PIL import Image

from engine.printing import say
from engine.progress import Progress
from imagesets.decoding import UnreadableImage, as_rgb, reason_of
from imagesets.listing import check_minus_one
from imagesets.selection import held_out_sample, rarest_classes
from imagesets.sets import ImageSet, Split

PLACE = "NAME"
SPLITS = ("train", "val")
VAL_SHARE = 0.2  # of each class, if there is only one split
IMAGES_READ_TWICE = 3  # to detect random augmentation at once; it is refused later, too
DARK = 16  # of 255; images of 0 and 1, or of scikit-learn's digits, as whole numbers are no brighter
IMAGE_FORMS = "give PIL images, or arrays (H, W, 3), (3, H, W) or (H, W) of uint8, or of floats from 0 to 1"
_dataset_lock = threading.Lock()  # datasets need not be thread-safe, but features are extracted by several threads


@dataclass(frozen=True, kw_only=True, eq=False)
class DatasetImages:
    """ImageSource that reads items of a dataset."""

    dataset: Any
    name: str  # text before the index of an image in messages
    item_indices: np.ndarray  # (N,) indices of the items
    digests: np.ndarray  # (N, 32) uint8, SHA-256 of the pixels of each image

    def path(self, index: int) -> str:
        return f"{self.name}/{self.item_indices[index]}"

    def encoded(self, index: int) -> None:
        return None

    def image(self, index: int) -> Image.Image:
        image, _ = read_item(self.dataset, int(self.item_indices[index]), self.path(index))
        if _pixel_digest(image) != self.digests[index].tobytes():
            raise another_image(self.path(index))
        return image

    def take(self, indices: np.ndarray) -> "DatasetImages":
        return replace(self, item_indices=self.item_indices[indices], digests=self.digests[indices])

    changed: ClassVar[None] = None
    contents: ClassVar[str] = ""  # the fingerprint covers the pixels

    def facts(self) -> tuple[bytes, ...]:
        return (self.digests.tobytes(),)


class Arrays(Sequence):
    """Images and labels of equal length, as a dataset of pairs (image, label)."""

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
    """Both splits of the set that `memory:NAME` names as long as this object exists."""

    url: str
    splits: Mapping[Split, ImageSet]


_sets_by_url: WeakValueDictionary[str, HeldSets] = WeakValueDictionary()


def open_split(place: str, split: Split) -> ImageSet:
    """One split of the set that the program holds under this name. Raises ValueError if there is none."""
    if f"memory:{place}" not in _sets_by_url:
        raise ValueError(
            f"memory:{place}: its images were given by a Python program and are not in this one; give them again, as "
            "bench.evaluate(..., images=..., labels=...)"
        )
    return _sets_by_url[f"memory:{place}"].splits[split]


def hold(name: str, train: Any, val: Any = None) -> HeldSets:
    """Let `memory:NAME` name these images, as long as the caller holds the returned object.

    Args:
        name: The part of the URL after the colon.
        train: A dataset with a length whose items are (image, label), or dictionaries with "image" and "label"; or a
            pair (images, labels). A label is the index or name of a class, or (K,) of 0, 1 and -1 for images with
            several labels.
        val: The same; None: a fifth of each class of `train`, drawn with seed 0.

    Raises:
        ValueError: One line, for images or labels in other forms, and for images that change when read again.
    """
    url = f"memory:{name}"
    images: dict[Split, DatasetImages] = {}
    raw_labels: dict[Split, list[Any]] = {}
    images["train"], raw_labels["train"] = _read_dataset(url, "train", train)
    if val is not None:
        images["val"], raw_labels["val"] = _read_dataset(url, "val", val)
        if not any(isinstance(label, str) for label in raw_labels["val"]):
            _check_same_classes(url, train, val)
    classes, labels = _classes_and_labels([*raw_labels.values()], url, getattr(train, "classes", None))
    sets = {
        split: ImageSet(url=url, split=split, classes=classes, labels=split_labels, images=images[split])
        for split, split_labels in zip(images, labels, strict=True)
    }
    if val is None:
        whole = replace(sets["train"], notes=(f"{VAL_SHARE:.0%} of each class are held out as validation images",))
        strata = rarest_classes(whole.labels) if whole.has_several_labels else whole.labels
        val_indices = held_out_sample(strata, len(classes) + 1, VAL_SHARE, seed=0)
        indices: dict[Split, np.ndarray] = {
            "train": np.setdiff1d(np.arange(len(whole)), val_indices),
            "val": val_indices,
        }
        for split, part in indices.items():
            sets[split] = replace(whole, split=split, labels=whole.labels[part], images=whole.images.take(part))
    _sets_by_url[url] = held_sets = HeldSets(url=url, splits=sets)
    return held_sets


def _check_same_classes(url: str, train: Any, val: Any) -> None:
    """ValueError if both datasets name their classes, and a number is another class in each, as of two ImageFolders
    of which one lacks a class."""
    pairs = zip(_class_names(train), _class_names(val), strict=False)
    if different := [(number, *names) for number, names in enumerate(pairs) if len(set(names)) > 1]:
        number, of_train, of_val = different[0]
        raise ValueError(
            f"{url}: class {number} is {of_train!r} in train and {of_val!r} in val; give both the same classes in the "
            "same order, or names as labels; if these are two names of a class, set val.classes = train.classes"
        )


def _class_names(dataset: Any) -> list[str]:
    """The class names of a dataset like torchvision's or Hugging Face's, or of the one that it is a subset of; [] if
    it has none."""
    while not hasattr(dataset, "classes") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    features = getattr(dataset, "features", None)
    feature = features.get("label", features.get("labels")) if isinstance(features, Mapping) else None
    names = getattr(dataset, "classes", getattr(feature, "names", None))
    return list(map(str, names)) if isinstance(names, list | tuple | np.ndarray) else []


def _read_dataset(url: str, split: Split, dataset: Any) -> tuple[DatasetImages, list[Any]]:
    """The N images of a dataset, with digests, and their N labels as the dataset has them.

    Raises ValueError for an image in another form, and for images that change when read again.
    """
    dataset = Arrays(*dataset) if isinstance(dataset, tuple) and len(dataset) == 2 else dataset
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ValueError(f"{url}: {split} is a {type(dataset).__name__}; give a dataset with a length, or arrays")
    name, labels, digests, brightest = f"{url}/{split}", [], [], 0
    with Progress(f"reading {name}", len(dataset)) as progress:
        for index in range(len(dataset)):
            try:
                image, label = read_item(dataset, index, f"{name}/{index}")
            except UnreadableImage as error:
                raise ValueError(f"{error.path}: {error.reason}") from error
            digests.append(_pixel_digest(image))
            brightest = max(brightest, int(np.asarray(image).max()))
            labels.append(label)
            progress.advance(1)
    if brightest <= DARK:
        text = f"the brightest of all values of {len(dataset)} images is {brightest} of 255; scale them to 0..255"
        say(f"warning: {name}: {text}, unless they are black", errors=True)
    for index in range(min(IMAGES_READ_TWICE, len(dataset))):
        if _pixel_digest(read_item(dataset, index, name)[0]) != digests[index]:
            raise another_image(f"{name}/{index}")
    digest_rows = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, hashlib.sha256().digest_size)
    return DatasetImages(dataset=dataset, name=name, item_indices=np.arange(len(dataset)), digests=digest_rows), labels


def another_image(path: str) -> ValueError:
    """The error for an image with other pixels than those that the fingerprint covers."""
    return ValueError(f"{path} is another image when read again: leave random augmentation out")


def read_item(dataset: Any, index: int, path: str) -> tuple[Image.Image, Any]:
    """RGB image and label of the dataset's item at an index.

    Raises UnreadableImage if the item cannot be read or has another form; `path` names the image in its message.
    """
    try:
        with _dataset_lock:
            item = dataset[index]
        if isinstance(item, Mapping):
            image, label = _first_value(item, ("image", "img")), _first_value(item, ("label", "labels"))
        else:
            image, label = item[0], item[1]
        return to_rgb_image(image), label
    except Exception as error:  # a dataset may raise any type
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise UnreadableImage(path, " ".join(reason.split()) or reason_of(error)) from error


def _first_value(item: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    """The value of the first of `keys` that the item has. Raises ValueError if it has none."""
    key = next((key for key in keys if key in item), None)
    if key is None:
        raise ValueError(f"an item has {', '.join(item)}, and no {' or '.join(keys)}")
    return item[key]


def to_rgb_image(image: Any) -> Image.Image:
    """RGB image from a PIL image, array or tensor. Raises ValueError for other forms than IMAGE_FORMS."""
    if isinstance(image, Image.Image):
        return image if image.mode == "RGB" else as_rgb(image)
    pixels = _to_array(image)
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if pixels.ndim == 3 and pixels.shape[-1] not in (1, 3):
        pixels = np.moveaxis(pixels, 0, -1)
    if pixels.ndim != 3 or pixels.shape[-1] not in (1, 3) or pixels.dtype.kind not in "buif":
        shape = f"{type(image).__name__} {tuple(getattr(image, 'shape', ()))}"
        raise ValueError(f"an image is a {shape} of {pixels.dtype}; {IMAGE_FORMS}")
    white = 1 if pixels.dtype.kind in "bf" else 255
    if not (pixels.min() >= 0 and pixels.max() <= white):  # also refuses NaN
        raise ValueError(
            f"an image of {pixels.dtype} has values from {pixels.min():g} to {pixels.max():g}; {IMAGE_FORMS}, and "
            "leave normalisation out"
        )
    scaled = pixels if white == 255 else np.rint(255.0 * pixels)
    return Image.fromarray(np.ascontiguousarray(np.broadcast_to(scaled, (*scaled.shape[:2], 3)), np.uint8))


def _to_array(value: Any) -> np.ndarray:
    """A tensor, or any value that NumPy accepts, as an array."""
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def _pixel_digest(image: Image.Image) -> bytes:
    """SHA-256 over size and pixels of an image."""
    return hashlib.sha256(f"{image.size}".encode() + image.tobytes()).digest()


def _classes_and_labels(
    raw_labels: Sequence[Sequence[Any]], url: str, names: Sequence[str] | None
) -> tuple[tuple[str, ...], list[np.ndarray]]:
    """Class names (K) and, for each split, labels (N,), or (N, K) for images with several.

    Args:
        raw_labels: For each split the labels as its dataset has them.
        url: Names the set in messages.
        names: Class names of the dataset, or None. Used if they match the labels.

    Raises:
        ValueError: A split is empty, or labels have other forms than `hold` describes.
    """
    labels = [np.array([_to_array(label).tolist() for label in split_labels]) for split_labels in raw_labels]
    if any(not len(array) for array in labels):
        raise ValueError(f"{url}: a split has no images")
    kinds = {array.dtype.kind for array in labels}
    if not (kinds <= {"i", "u", "b"} or kinds == {"U"}) or {array.ndim for array in labels} not in ({1}, {2}):
        example = next((array for array in labels if array.dtype.kind not in "iubU"), labels[-1])
        value = f"{example.ravel().tolist()[0]!r} ({example.dtype}, {example.ndim} axes)"
        raise ValueError(
            f"{url}: labels such as {value}; give whole numbers or names, one for each image, or as many 0 and 1 as "
            "there are classes"
        )
    if labels[0].ndim == 2:
        count = labels[0].shape[1]
        if not all(array.shape[1] == count and np.isin(array, (-1, 0, 1)).all() for array in labels):
            raise ValueError(f"{url}: several labels an image are 0, 1 or -1 (not judged), one for each class")
        class_names = names if names and len(names) == count else range(count)
        return tuple(str(name) for name in class_names), [array.astype(np.int64) for array in labels]
    values = np.unique(np.concatenate(labels))
    if names and values.dtype.kind in "iu" and values[0] >= 0 and values[-1] < len(names):
        return tuple(map(str, names)), labels
    check_minus_one(url, [str(value) for value in values])
    return tuple(map(str, values)), [np.searchsorted(values, array) for array in labels]
