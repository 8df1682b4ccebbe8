"""cifar10:PATH, CIFAR-10 (https://www.cs.toronto.edu/~kriz/cifar.html), 50 000 training and 10 000 test images.

Two layouts: class folders, PATH/{train,test}/CLASS/IMAGE, or the official Python batches, PATH/data_batch_1..5,
test_batch and batches.meta (also in PATH/cifar-10-batches-py/). The batches are pickles, which can run any code if
loaded by pickle.load. Here engine/pickles.py reads them, and builds only the types in CIFAR's files.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from engine.files import open_regular
from engine.pickles import read_pickle
from imagesets.listing import open_tree, require_folder
from imagesets.names import PackedNames
from imagesets.sets import ImageSet, MemoryImages, Split

PLACE = "PATH"
SPLITS = ("train", "val")
# The official order, which is also that of the class folders, since it is alphabetical.
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BATCHES = {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "val": ("test_batch",)}
SIDE = 32  # pixels


def open_split(place: str, split: Split) -> ImageSet:
    """Open one split below `place`; split val is CIFAR's test set.

    Raises ValueError for other layouts or classes, and for pickles that could run code.
    """
    url = f"cifar10:{place}"
    require_folder(place, url)
    for folder in (place, os.path.join(place, "cifar-10-batches-py")):
        if any(os.path.isfile(os.path.join(folder, name)) for name in ("batches.meta", *sum(BATCHES.values(), ()))):
            return open_batches(url, Path(folder), split)
    image_set = open_tree(url, place, split)
    if image_set.classes != CLASSES:
        raise ValueError(f"{url}: the class folders are not CIFAR-10's ({', '.join(CLASSES)}); use folder:{place}")
    return image_set


def open_batches(url: str, folder: Path, split: Split) -> ImageSet:
    """Open one split of the official Python batches in `folder`. Raises ValueError for missing or other files."""
    batches = [read_batch(url, folder / name) for name in BATCHES[split]]
    meta = load_cifar_pickle(url, folder / "batches.meta")
    if not isinstance(meta, dict) or tuple(meta.get("label_names", ())) != CLASSES:
        raise ValueError(f"{url}: {folder / 'batches.meta'} does not name CIFAR-10's classes; unpack the archive again")
    names = [
        f"{folder.name}/{batch_name}:{file_name}"
        for batch_name, (_, _, file_names) in zip(BATCHES[split], batches, strict=True)
        for file_name in file_names
    ]
    pixels = np.concatenate([pixels for pixels, _, _ in batches])
    notes = [f"official Python batches in {folder}, read without running them"]
    if split == "val":
        notes.append("test is val")
    return ImageSet(
        url=url,
        split=split,
        classes=CLASSES,
        labels=np.concatenate([labels for _, labels, _ in batches]),
        images=MemoryImages(names=PackedNames.pack(names), pixels=pixels),
        notes=tuple(notes),
    )


def read_batch(url: str, path: Path) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Pixels (N, 32, 32, 3) uint8, labels (N,) int64 and N file names of a batch file. Raises ValueError for others."""
    batch = load_cifar_pickle(url, path)
    try:
        pixels = batch["data"].array().reshape(-1, 3, SIDE, SIDE)
        labels, names = np.array(batch["labels"], np.int64), list(batch["filenames"])
        if not len(pixels) == len(labels) == len(names) or not np.isin(labels, range(len(CLASSES))).all():
            raise ValueError("data, labels and filenames do not fit together")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(f"{type(error).__name__} {error}".split())
        raise ValueError(f"{url}: {path} is not a CIFAR-10 batch ({reason}); unpack the archive again") from error
    return np.ascontiguousarray(pixels.transpose(0, 2, 3, 1)), labels, names


def load_cifar_pickle(url: str, path: Path) -> Any:
    """The value in one of CIFAR's pickles, read without running code of it.

    Raises ValueError for a missing or damaged file, and for names other than those of `stand_ins`.
    """
    try:
        with open_regular(path) as file:
            return read_pickle(file, stand_ins(), "latin1")
    except FileNotFoundError as error:
        raise ValueError(f"{url}: no {path.name} in {path.parent}; unpack cifar-10-python.tar.gz again") from error
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle makes the unpickler raise nearly anything
        reason = " ".join(f"{type(error).__name__} {error}".split())
        raise ValueError(f"{url}: {path} is refused ({reason}); use the official cifar-10-python.tar.gz") from error


def stand_ins() -> dict[str, Callable[..., Any]]:
    """Names that CIFAR's pickles may use -> replacements defined here, so that no NumPy constructor is called.

    They are created for each file, so that one file cannot alter those of the next.
    """

    class ByteType:
        def __init__(self, code: str, *_: Any):
            if code != "u1":
                raise ValueError(f"array of type {code!r} instead of bytes")

        def __setstate__(self, state: Any) -> None:
            pass  # byte order and alignment, which bytes do not have

    class ByteArray:
        def __setstate__(self, state: tuple) -> None:
            _, self.shape, self.dtype, self.column_first, self.raw = state

        def array(self) -> np.ndarray:
            if not isinstance(self.dtype, ByteType):
                raise ValueError("array without a type")
            raw = self.raw.encode("latin1") if isinstance(self.raw, str) else self.raw
            return np.frombuffer(raw, np.uint8).reshape(self.shape, order="F" if self.column_first else "C")

    def reconstruct(*_: Any) -> ByteArray:
        return ByteArray()

    def encode(text: str, encoding: str) -> bytes:
        if encoding not in ("latin1", "latin-1"):
            raise ValueError(f"bytes in the encoding {encoding!r}")
        return text.encode("latin1")

    return {
        "numpy.core.multiarray._reconstruct": reconstruct,
        "numpy._core.multiarray._reconstruct": reconstruct,
        "numpy.ndarray": ByteArray,
        "numpy.dtype": ByteType,
        "_codecs.encode": encode,
    }
