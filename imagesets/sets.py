"""Image sets: what `open_set` gives for a URL, and the two places their images can be, files and memory.

N images, K classes. A set is a listing: it holds names, sizes and labels, reads images on demand, and never writes.
"""

import hashlib
import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import numpy as np
from PIL import Image

from engine.extensions import extensions, load_extension, load_extensions
from engine.files import digest, open_regular
from engine.printing import did_you_mean
from engine.tasks import Split
from imagesets.decoding import UnreadableImage, decode_rgb, pages_of, read_bytes
from imagesets.names import PackedNames
from imagesets.selection import balanced_indices, evenly, held_out_sample, rarest_classes

Read = TypeVar("Read")
SPLITS: tuple[Split, ...] = ("train", "val")
SAMPLED = 16  # images of which the bytes are part of `contents_of`
HEAD = 1 << 16  # bytes of each
NO_VAL = "there is no val split to compare the classes with"  # a note, until images of train are held out for one
Reported = Literal["top1", "mean per class", "mAP", "retrieval"]
OPTIONS = re.compile(r"\?([a-z]+=[^&]*(?:&[a-z]+=[^&]*)*)$")  # at the end of a URL; `x-?.parquet` has none


class ImageSource(Protocol):
    """Where the images of a set are."""

    def path(self, index: int) -> str: ...
    def encoded(self, index: int) -> bytes | None: ...
    def image(self, index: int) -> Image.Image: ...
    def take(self, indices: np.ndarray) -> "ImageSource": ...
    def facts(self) -> tuple[bytes | memoryview, ...]: ...  # what a fingerprint must depend on

    @property
    def changed(self) -> np.ndarray | None: ...  # (N, 2) int64, time (ns) and inode of each file; None: all in memory
    @property
    def contents(self) -> str: ...  # what tells a set from one of the same fingerprint, "" if nothing else can
    @property
    def modified(self) -> int: ...  # when the newest image was changed, ns since 1970; 0 if that is not known


@dataclass(frozen=True, kw_only=True, eq=False)
class FileImages:
    """Image files below `root`; `names` (N) are relative to it, `sizes` (N,) int64 in bytes, `changed` (N, 2) int64
    the times of modification in ns and inodes.

    kept_in: the file that keeps the listing for other runs (imagesets/walk.py), "" if none. called: names (N)
    that count in fingerprints in place of `names`, where the files lie elsewhere than in a folder of class folders.
    """

    root: str
    names: PackedNames
    sizes: np.ndarray
    changed: np.ndarray
    kept_in: str = ""
    called: PackedNames | None = None

    def path(self, index: int) -> str:
        return os.path.join(self.root, self.names[index])

    def encoded(self, index: int) -> bytes:
        path = self.path(index)
        data = read_bytes(path)
        if self.kept_in and (len(data) != self.sizes[index] or os.stat(path).st_mtime_ns != self.changed[index, 0]):
            with suppress(OSError):  # removed already, or not ours to remove: the message says what is wrong anyway
                os.unlink(self.kept_in)
            raise ValueError(
                f"{path}: the file was overwritten after the set was listed (now {len(data)} bytes, then "
                f"{self.sizes[index]}); run the same command again, which lists the images anew"
            )
        return data

    def image(self, index: int) -> Image.Image:
        return decode_rgb(self.encoded(index), self.path(index))

    def take(self, indices: np.ndarray) -> "FileImages":
        return self.renamed(indices, self.called.take(indices) if self.called else None)

    def renamed(self, indices: np.ndarray, called: PackedNames | None) -> "FileImages":
        """The images at `indices` (M,), called otherwise (M)."""
        return replace(
            self,
            names=self.names.take(indices),
            sizes=self.sizes[indices],
            changed=self.changed[indices],
            called=called,
        )

    def facts(self) -> tuple[bytes, ...]:
        names = self.called or self.names
        return names.blob, names.ends.tobytes(), self.sizes.tobytes()

    @cached_property
    def contents(self) -> str:
        return contents_of(self.changed, lambda index: head_of(self.path(index)))

    @property
    def modified(self) -> int:
        return int(self.changed[:, 0].max(initial=0))


def head_of(path: str | Path) -> bytes:
    """The first bytes of a file. OSError or ValueError where it cannot be read."""
    with open_regular(path) as file:
        return file.read(HEAD)


def contents_of(changed: np.ndarray, head: Callable[[int], bytes]) -> str:
    """`SAMPLE-TIMES-ALL`: digests of the first bytes of a few images, of when these were changed, and of when all were.

    changed (N, 2): time and inode of each image's file. head: the first bytes of one. See `differ`.
    """
    few = evenly(len(changed), min(SAMPLED, len(changed)))
    sample = hashlib.sha256()
    for index in few.tolist():
        try:
            sample.update(hashlib.sha256(head(index)).digest())
        except (OSError, ValueError):
            sample.update(b"unreadable")
    times = (
        hashlib.sha256(np.ascontiguousarray(changes).tobytes()).hexdigest()[:16] for changes in (changed[few], changed)
    )
    return "-".join([sample.hexdigest()[:16], *times])


def differ(contents: str, others: str) -> bool:
    """Whether two sets of one fingerprint hold other images, by their `contents`.

    They do where bytes of the sample differ. Where its times are the same and those of all are not, some images were
    overwritten. Where all times differ the files were copied. "": not known.
    """
    if not contents or not others:
        return False
    (sample, few, every), (other_sample, other_few, other_every) = contents.split("-"), others.split("-")
    return sample != other_sample or (few == other_few and every != other_every)


def kept_folder(parent: Path, key: Mapping[str, Any], sets: Sequence["ImageSet | Any"]) -> Path:
    """The folder below `parent` that holds what was made of image sets by `key`, which has their fingerprints.

    A folder from before keys had contents is used as long as no image was changed since.
    """
    older = parent / digest(key)[:32]
    samples = [image_set.contents.partition("-")[0] for image_set in sets]
    if not any(samples) or (
        older.is_dir() and older.stat().st_mtime_ns > max(image_set.modified for image_set in sets)
    ):
        return older
    return parent / digest({**key, "contents": samples})[:32]


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryImages:
    """ImageSource in memory: `pixels` (N, H, W, 3) uint8 under `names` (N), which no file bears."""

    names: PackedNames
    pixels: np.ndarray
    changed: ClassVar[None] = None
    contents: ClassVar[str] = ""  # the fingerprint is of the pixels
    modified: ClassVar[int] = 0

    def path(self, index: int) -> str:
        return self.names[index]

    def encoded(self, index: int) -> None:
        return None

    def image(self, index: int) -> Image.Image:
        return Image.fromarray(self.pixels[index])

    def take(self, indices: np.ndarray) -> "MemoryImages":
        return MemoryImages(names=self.names.take(indices), pixels=self.pixels[indices])

    def facts(self) -> tuple[bytes | memoryview, ...]:
        shape = np.array(self.pixels.shape, np.int64)
        return self.names.blob, self.names.ends.tobytes(), shape.tobytes(), self.pixels.reshape(-1).data


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageSet:
    """One split of a set, in a fixed order.

    labels: (N,) int64 in 0..K-1, indices into `classes` (K names); without labels -1 throughout, and no classes. Of a
    set with several labels an image (N, K): 1 for a class that the image shows, 0 for one that it does not, -1 where
    that is not judged. notes: what was recognised and assumed on opening, for people. reports: the metric that the
    set's papers report; of a retrieval set, train is the database, and classes are no answers.
    """

    url: str
    split: Split
    classes: tuple[str, ...]
    labels: np.ndarray
    images: ImageSource
    notes: tuple[str, ...] = ()
    reports: Reported = "top1"

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def title(self) -> str:
        """`folder:/data/cifar10 val` or `digits val`: for people, without how it was selected from a larger set."""
        return f"{self.url.partition('#')[0].removesuffix(':')} {self.split}"

    @property
    def has_several_labels(self) -> bool:
        """Whether an image may show several classes."""
        return self.labels.ndim == 2

    def path(self, index: int) -> str:
        """The file's path; for an image in memory a name such as "digits:train/17"."""
        return self.images.path(index)

    def image(self, index: int) -> Image.Image:
        """The RGB image, decoded as `imagesets.decoding` says. Raises UnreadableImage."""
        return self.images.image(index)

    def encoded(self, index: int) -> bytes | None:
        """The bytes of the image's file, None for an image in memory. Raises UnreadableImage."""
        return self.images.encoded(index)

    def next_readable(self, index: int, unreadable: dict[int, str], read: Callable[[int], Read]) -> tuple[Read, int]:
        """What `read` makes of image `index`, or of the next one that can be read, and its place; places before it go
        to `unreadable`, with the reason. ValueError where no image of the set can be read."""
        for place in (number % len(self) for number in range(index, index + len(self))):
            try:
                return read(place), place
            except UnreadableImage as error:
                unreadable[place] = error.reason
        raise ValueError(f"{self.url}: none of the {len(self)} images of {self.split} can be read")

    @property
    def changed(self) -> np.ndarray | None:
        """(N, 2) int64, time of modification (ns) and inode of each image's file; None for images in memory."""
        return self.images.changed

    @property
    def contents(self) -> str:
        """What tells the images from others of the same fingerprint; see `contents_of` and `differ`."""
        return self.images.contents

    @property
    def modified(self) -> int:
        """When the newest image was changed, in ns since 1970; 0 if that is not known."""
        return self.images.modified

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 of class names, labels, and of names and file sizes (in memory: names and pixels), in order.

        Where the set lies plays no part, so moving a folder keeps it; nor do the files' contents beyond their sizes,
        since reading 150 GB to name a cache entry would defeat the cache. `contents` stands beside it.
        """
        state = hashlib.sha256()
        for fact in (
            "\0".join(self.classes).encode(errors="surrogateescape"),
            self.labels.tobytes(),
            *self.images.facts(),
        ):
            state.update(len(fact).to_bytes(8, "little"))
            state.update(fact)
        return state.hexdigest()

    @property
    def facts(self) -> dict[str, Any]:
        """JSON values that say which images these are."""
        return {"url": self.url, "split": self.split, "fingerprint": self.fingerprint, "images": len(self)}

    @cached_property
    def pages_note(self) -> str:
        """What to say of TIFF files of several pages, of which the first is read, by a few images; "" if none is."""
        pages = []
        for index in evenly(len(self), min(SAMPLED, len(self))).tolist():
            with suppress(OSError, ValueError):  # unreadable, which is said once it is read
                in_file = isinstance(self.images, FileImages)
                with open_regular(self.path(index)) if in_file else io.BytesIO(self.encoded(index) or b"") as file:
                    pages.append(pages_of(file))
        several = [count for count in pages if count > 1]
        if not several:
            return ""
        return (
            f"TIFF files of several pages among {len(pages)} images of {self.split}: {len(several)}, with "
            f"{sum(several)} pages in all, of which the first alone is read: save each page as a file of its own; "
            "bench data check counts them all"
        )

    def subset(self, indices: np.ndarray, name: str) -> "ImageSet":
        """The images at `indices` (M,), in that order, with all classes kept; `name` is appended to the URL."""
        indices = np.asarray(indices, np.int64)
        url = f"{self.url}#{name}"
        return replace(self, url=url, labels=_frozen(self.labels[indices]), images=self.images.take(indices))

    def limited(self, count: int) -> "ImageSet":
        """At most `count` images, as equally many of each class as there are, evenly spread; no randomness. Of images
        with several labels as many, evenly spread."""
        if count < 1:
            raise ValueError(f"{self.url}: a limit of {count} images leaves none; give 1 or more")
        if count >= len(self):
            return self
        if self.has_several_labels:
            return self.subset(evenly(len(self), count), f"limited-{count}")
        return self.subset(balanced_indices(self.labels, len(self.classes), count), f"limited-{count}")


def open_set(url: str, split: Split) -> ImageSet:
    """Open one split of the set that `url` names, by its scheme: a file of imagesets/schemes/, or a plugin.

    `?val=0.2&seed=0` at its end divides the training images of any set; other options are the scheme's.

    Raises ValueError, one line that says what, where and how to fix, for an unknown scheme, option or split, a missing
    folder or split, an unknown layout, an empty class, classes that differ between the splits, and what cannot be
    listed.
    """
    if split not in SPLITS:
        raise ValueError(f"{url}: no split called {split!r}{did_you_mean(split, SPLITS)}")
    scheme, place = parse_url(url)
    module, options = load_extension("imagesets", scheme), url_options(url)
    share, seed = options.pop("val", ""), options.pop("seed", "0")
    try:
        opened = module.open_split(place, "train" if share else split, **options)
    except OSError as error:
        why = f"{error.filename} ({error.strerror})"
        raise ValueError(
            f"{url}: cannot list or read {why}; check its permissions and that the disk is there"
        ) from error
    except ValueError as error:
        if OPTIONS.search(url):  # the scheme knows its place alone
            raise ValueError(f"{url}: {str(error).removeprefix(f'{scheme}:{place}: ')}") from error
        raise
    if OPTIONS.search(url):
        opened = replace(opened, url=url)
    if share:
        opened = _part(opened, split, float(share), int(seed))
    return replace(opened, labels=_frozen(opened.labels))


def url_options(url: str) -> dict[str, str]:
    """Name -> value of the options at the end of a URL: `folder:/data/x?val=0.2&seed=0`. ValueError for one that its
    scheme does not have or that is given twice, and for a share or a seed that is none."""
    matched = OPTIONS.search(url)
    if not matched:
        return {}
    scheme = url.partition(":")[0]
    pairs = [text.partition("=") for text in matched[1].split("&")]
    options = {name: value for name, _, value in pairs}
    if len(options) < len(pairs):
        raise ValueError(f"{url}: an option is given twice; give each once")
    known = ("val", "seed", *getattr(load_extension("imagesets", scheme), "OPTIONS", ()))
    if unknown := [name for name in options if name not in known]:
        raise ValueError(f"{url}: no option {unknown[0]!r} of {scheme}{did_you_mean(unknown[0], known)}")
    share, seed = options.get("val", ""), options.get("seed", "0")
    if "val" in options and not (re.fullmatch(r"0?\.\d+", share) and float(share)):
        raise ValueError(f"{url}: val={share} is not a fraction between 0 and 1; write ?val=0.2")
    if "seed" in options and not (share and seed.isdecimal() and int(seed) < 1 << 32):
        raise ValueError(f"{url}: a seed is a whole number beside a share; write ?val=0.2&seed=0")
    return options


def _part(train: ImageSet, split: Split, share: float, seed: int) -> ImageSet:
    """The training images less the share of each class that the seed holds out, or these as split val."""
    if not train.classes:
        raise ValueError(f"{train.url}: these images have no labels, by which some could be held out for validation")
    strata = rarest_classes(train.labels) if train.has_several_labels else train.labels
    held = held_out_sample(strata, len(train.classes) + 1, share, seed)
    chosen = held if split == "val" else np.setdiff1d(np.arange(len(train)), held)
    if not len(held):
        raise ValueError(f"{train.url}: every class has one image, so none can be held out for validation; add images")
    notes = [
        *(note for note in train.notes if note != NO_VAL),
        f"val is {len(held)} of the {len(train)} training images: {share:g} of each class, seed {seed}",
    ]
    whole = np.bincount(strata, minlength=len(train.classes) + 1)[:-1]
    if single := [name for name, count in zip(train.classes, whole, strict=True) if count == 1]:
        notes.append(f"{len(single)} classes with one image, {single[0]!r} first: it is in train, and none is in val")
    return replace(train.subset(chosen, split), url=train.url, split=split, notes=tuple(notes))


def open_anew(url: str, split: Split) -> ImageSet:
    """`open_set` without the listing that an earlier run kept: every file is asked for its size and time."""
    opened = open_set(url, split)
    if not (isinstance(opened.images, FileImages) and opened.images.kept_in):
        return opened
    Path(opened.images.kept_in).unlink(missing_ok=True)
    return open_set(url, split)


def splits_of(url: str) -> tuple[Split, ...]:
    """The splits that `url` can have: images without labels are for training alone. ValueError as for parse_url."""
    return load_extension("imagesets", parse_url(url)[0]).SPLITS


def parse_url(url: str, others: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Split a URL into scheme and place, with ~ expanded and without options. Raises ValueError for an unknown or a
    missing scheme, and for wrong options.

    others: schemes that the caller takes beside these, and what follows their colon; for the messages alone.
    """
    scheme, colon, place = url.partition(":")
    if colon and scheme in extensions("imagesets"):
        url_options(url)
        return scheme, os.path.expanduser(OPTIONS.sub("", place))
    places = {name: module.PLACE for name, module in load_extensions("imagesets").items()} | dict(others or {})
    if not colon and scheme in places:
        raise ValueError(f"{url!r} lacks its colon; write {url}:{places[scheme]}")
    if "/" in scheme or not colon:
        raise ValueError(f"{url!r} has no scheme; for a folder write folder:{url} (all: bench list imagesets)")
    likely = did_you_mean(scheme, {name: f"{name}:{what}" for name, what in places.items()}, rest=f":{place}")
    raise ValueError(f"{url!r} has the unknown scheme {scheme!r}{likely}")


def _frozen(labels: np.ndarray) -> np.ndarray:
    labels = np.ascontiguousarray(labels, np.int64)
    labels.flags.writeable = False
    return labels
