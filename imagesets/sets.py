"""Image sets: `open_set` opens one split of the set that a URL names, with images in files or in memory.

Shapes: N images, K classes. An ImageSet is a listing: it holds names, sizes and labels, reads images on demand, and
never writes.
"""

import hashlib
import io
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal, Protocol, TypeVar

import numpy as np
from PIL import Image, ImageFile

from engine.extensions import extensions, load_extension, load_extensions
from engine.files import digest, open_regular, read_text, sha256_of_file, write_atomic
from engine.printing import did_you_mean
from engine.tasks import Split
from imagesets.decoding import UnreadableImage, count_pages, decode_rgb, open_header, read_bytes, stored_size
from imagesets.names import PackedNames
from imagesets.selection import balanced_indices, evenly_spaced, held_out_sample, rarest_classes

Read = TypeVar("Read")
SPLITS: tuple[Split, ...] = ("train", "val")
SAMPLED_IMAGES = 16  # images whose first bytes `contents_digest` reads
HEAD_BYTES = 1 << 16  # how many of them
NO_VAL = "there is no val split to compare the classes with"  # a note that holding out images of train removes
ReportedMetric = Literal["top1", "mean per class", "mAP", "retrieval"]
URL_OPTIONS = re.compile(r"\?([a-z]+=[^&]*(?:&[a-z]+=[^&]*)*)$")  # does not match the pattern `x-?.parquet`


class ImageSource(Protocol):
    """Storage of the N images of a set."""

    def path(self, index: int) -> str: ...
    def encoded(self, index: int) -> bytes | None: ...  # bytes of the image's file; None for an image in memory
    def image(self, index: int) -> Image.Image: ...
    def take(self, indices: np.ndarray) -> "ImageSource": ...
    def facts(self) -> tuple[bytes | memoryview, ...]: ...  # values that the set's fingerprint covers

    @property
    def changed(self) -> np.ndarray | None: ...  # (N, 2) int64, time (ns) and inode of each file; None: all in memory
    @property
    def contents(self) -> str: ...  # `contents_digest` of the files; "" if the fingerprint covers all pixels


@dataclass(frozen=True, kw_only=True, eq=False)
class FileImages:
    """Images in files of their own, below the folder `root`."""

    root: str
    names: PackedNames  # (N) paths relative to `root`
    sizes: np.ndarray  # (N,) int64, bytes
    changed: np.ndarray  # (N, 2) int64, modification time (ns) and inode
    listing_file: str = ""  # cache file with this listing (imagesets/walk.py), "" if it is not cached
    fingerprint_names: PackedNames | None = None  # (N) names for fingerprints, if the folders are not those of classes

    def path(self, index: int) -> str:
        return os.path.join(self.root, self.names[index])

    def encoded(self, index: int) -> bytes:
        path = self.path(index)
        data = read_bytes(path)
        if self.listing_file and (
            len(data) != self.sizes[index] or os.stat(path).st_mtime_ns != self.changed[index, 0]
        ):
            with suppress(OSError):  # already removed, or no permission: the error below is raised in any case
                os.unlink(self.listing_file)
            raise ValueError(
                f"{path}: the file was overwritten after the set was listed (now {len(data)} bytes, then "
                f"{self.sizes[index]}); run the same command again, which lists the images anew"
            )
        return data

    def image(self, index: int) -> Image.Image:
        return decode_rgb(self.encoded(index), self.path(index))

    def take(self, indices: np.ndarray) -> "FileImages":
        return self.take_renamed(indices, self.fingerprint_names.take(indices) if self.fingerprint_names else None)

    def take_renamed(self, indices: np.ndarray, fingerprint_names: PackedNames | None) -> "FileImages":
        """The images at `indices` (M,), with other names (M) for fingerprints."""
        return replace(
            self,
            names=self.names.take(indices),
            sizes=self.sizes[indices],
            changed=self.changed[indices],
            fingerprint_names=fingerprint_names,
        )

    def facts(self) -> tuple[bytes, ...]:
        names = self.fingerprint_names or self.names
        return names.blob, names.ends.tobytes(), self.sizes.tobytes()

    @cached_property
    def contents(self) -> str:
        return contents_digest(self.changed, lambda index: read_head(self.path(index)))


def read_head(path: str | Path) -> bytes:
    """The first HEAD_BYTES of a file. Raises OSError or ValueError if it cannot be read."""
    with open_regular(path) as file:
        return file.read(HEAD_BYTES)


def image_size(path: Path) -> tuple[int, int]:
    """Width and height in pixels of an image, from its first bytes if they tell. Raises ValueError, naming the file."""
    return stored_size(read_header(path))


def read_header(path: Path) -> ImageFile.ImageFile:
    """The opened image of a file, from its first bytes if they tell; its pixels cannot be read.

    Raises ValueError, naming the file.
    """
    try:
        return open_header(read_head(path), str(path))
    except (OSError, ValueError):  # also for a long header, or one at the end of the file
        return open_header(read_bytes(str(path)), str(path))


def warnings_of_pages(split: Split, images: int, open_file: Callable[[int], BinaryIO]) -> tuple[str, ...]:
    """A warning about TIFF files of several pages, of which only the first is read; empty if there are none.

    Looks at SAMPLED_IMAGES of the images. open_file: opens the file of the image at an index.
    """
    pages = []
    for index in evenly_spaced(images, min(SAMPLED_IMAGES, images)).tolist():
        with suppress(OSError, ValueError), open_file(index) as file:  # unreadable files are reported when needed
            pages.append(count_pages(file))
    several = [count for count in pages if count > 1]
    if not several:
        return ()
    return (
        f"TIFF files of several pages among {len(pages)} images of {split}: {len(several)}, with {sum(several)} pages "
        "in all, of which only the first is read: save each page as a file of its own; bench data check counts them "
        "all",
    )


def content_digest(content: bytes) -> int:
    """64 bits of a digest of an image's bytes."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def contents_digest(changed: np.ndarray, head: Callable[[int], bytes], annotations: Iterable[str] = ()) -> str:
    """Text `SAMPLE-TIMES-ALL` of three digests, to tell sets with the same fingerprint apart (see `contents_differ`).

    SAMPLE covers the first bytes of SAMPLED_IMAGES images, TIMES the times and inodes of their files, ALL those of all
    files. A fourth digest, of files that are read as a whole, follows if there are any.

    Args:
        changed: (N, 2) int64, modification time (ns) and inode of each image's file.
        head: Returns the first bytes of the image at an index.
        annotations: Paths of these files, whose bytes are annotations of the images.
    """
    sample = evenly_spaced(len(changed), min(SAMPLED_IMAGES, len(changed)))
    bytes_hash = hashlib.sha256()
    for index in sample.tolist():
        try:
            bytes_hash.update(hashlib.sha256(head(index)).digest())
        except (OSError, ValueError):
            bytes_hash.update(b"unreadable")
    times_hash = hashlib.sha256(np.ascontiguousarray(changed[sample]).tobytes())
    all_hash = hashlib.sha256(np.ascontiguousarray(changed).tobytes())
    digests = [part.hexdigest() for part in (bytes_hash, times_hash, all_hash)]
    whole = [sha256_of_file(path) for path in annotations]
    return "-".join(part[:16] for part in [*digests, *([digest(whole)] if whole else [])])


def contents_differ(first: str, second: str) -> bool:
    """Whether the `contents` of two sets with the same fingerprint prove that their images differ.

    They do if the sampled bytes or those of annotations differ, or if the sampled files have the same times and inodes
    but others do not: then some images were overwritten. If the times of all files differ, the files were copied. Empty
    text means unknown. Annotations count only if both have a digest of them, which earlier versions did not record.
    """
    if not first or not second:
        return False
    first_bytes, first_times, first_all, *first_annotations = first.split("-")
    second_bytes, second_times, second_all, *second_annotations = second.split("-")
    if first_annotations and second_annotations and first_annotations != second_annotations:
        return True
    return first_bytes != second_bytes or (first_times == second_times and first_all != second_all)


def cache_folder(parent: Path, key: Mapping[str, Any], sets: Sequence["ImageSet | Any"]) -> Path:
    """The folder below `parent` for results computed from image sets.

    Its name is the digest of `key`, which holds the sets' fingerprints, and of those bytes that `contents` covers, if
    there are any.
    """
    parts = [image_set.contents.split("-") for image_set in sets]
    covered = ["-".join([own[0], *own[3:]]) for own in parts]
    return parent / digest({**key, "contents": covered} if any(covered) else key)[:32]


def training_folder(parent: Path, key: Mapping[str, Any], sets: Sequence["ImageSet | Any"]) -> Path:
    """`cache_folder` for results that whole image sets entered; another one if files were overwritten since an earlier
    use, as `contents_differ` proves. Called in one process."""
    folder, contents = cache_folder(parent, key, sets), [image_set.contents for image_set in sets]
    path = Path(f"{folder}.contents")  # a line for each state in which the sets were used, such as that of a copy
    states = [line.split(" ") for line in read_text(path).splitlines()] if path.exists() else []
    if any(contents_differ(*pair) for state in states for pair in zip(contents, state, strict=True)):
        return parent / digest({**key, "contents": contents})[:32]
    if any(contents) and contents not in states:
        write_atomic(path, "".join(f"{' '.join(state)}\n" for state in [*states, contents]))
    return folder


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryImages:
    """Images as an array in memory."""

    names: PackedNames  # (N) names for messages and fingerprints; there are no such files
    pixels: np.ndarray  # (N, H, W, 3) uint8
    changed: ClassVar[None] = None
    contents: ClassVar[str] = ""  # the fingerprint covers the pixels

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

    Attributes:
        url: The URL that names the set, with `#...` appended for a subset.
        split: "train" or "val".
        classes: K names; empty if there are no labels.
        labels: (N,) int64, indices into `classes`, or -1 for all images without labels. If images may have several
            labels, (N, K): 1 if the image shows the class, 0 if not, -1 if the ground truth does not say.
        images: Storage of the images.
        notes: What was recognised and assumed when the set was opened, for users.
        reports: The metric that papers report on the set. In a retrieval set, train is the database, val the queries,
            and classes are not to be predicted.
    """

    url: str
    split: Split
    classes: tuple[str, ...]
    labels: np.ndarray
    images: ImageSource
    notes: tuple[str, ...] = ()
    reports: ReportedMetric = "top1"

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def title(self) -> str:
        """Name for users, such as `folder:/data/cifar10 val` or `digits val`, without the part `#...` of a subset."""
        return f"{self.url.partition('#')[0].removesuffix(':')} {self.split}"

    @property
    def has_several_labels(self) -> bool:
        """Whether an image may show several classes."""
        return self.labels.ndim == 2

    def path(self, index: int) -> str:
        """Path of the image's file, or a name such as "digits:train/17" for an image in memory."""
        return self.images.path(index)

    def image(self, index: int) -> Image.Image:
        """The RGB image, decoded as described in imagesets/decoding.py. Raises UnreadableImage."""
        return self.images.image(index)

    def encoded(self, index: int) -> bytes | None:
        """The bytes of the image's file, or None for an image in memory. Raises UnreadableImage."""
        return self.images.encoded(index)

    def next_readable(self, index: int, unreadable: dict[int, str], read: Callable[[int], Read]) -> tuple[Read, int]:
        """Read image `index`, or else the next image that can be read, starting over after the last one.

        Args:
            index: Index of the first image to try.
            unreadable: Index -> reason; receives the images that were skipped.
            read: Reads the image at an index; raises UnreadableImage if it cannot.

        Returns:
            The return value of `read`, and the index of that image.

        Raises:
            ValueError: No image of the set can be read.
        """
        for step in range(len(self)):
            candidate = (index + step) % len(self)
            try:
                return read(candidate), candidate
            except UnreadableImage as error:
                unreadable[candidate] = error.reason
        raise ValueError(f"{self.url}: none of the {len(self)} images of {self.split} can be read")

    @property
    def changed(self) -> np.ndarray | None:
        """(N, 2) int64, modification time (ns) and inode of each image's file; None for images in memory."""
        return self.images.changed

    @property
    def contents(self) -> str:
        """Digests that tell sets with the same fingerprint apart, see `contents_digest` and `contents_differ`."""
        return self.images.contents

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 over class names, labels, and names and sizes of the files (in memory: names and pixels).

        It does not depend on the folder, so a set can be moved, nor on the bytes of the files, because reading 150 GB
        to name a cache entry would defeat the cache. `contents` samples the bytes.
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
        """JSON values that identify the images."""
        return {"url": self.url, "split": self.split, "fingerprint": self.fingerprint, "images": len(self)}

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for users about the images, a line each."""
        if isinstance(self.images, FileImages):
            return warnings_of_pages(self.split, len(self), lambda index: open_regular(self.path(index)))
        return warnings_of_pages(self.split, len(self), lambda index: io.BytesIO(self.encoded(index) or b""))

    def subset(self, indices: np.ndarray, name: str) -> "ImageSet":
        """The images at `indices` (M,), in that order, with all classes kept; `#name` is appended to the URL."""
        indices = np.asarray(indices, np.int64)
        url = f"{self.url}#{name}"
        return replace(self, url=url, labels=_read_only(self.labels[indices]), images=self.images.take(indices))

    def limited(self, count: int) -> "ImageSet":
        """At most `count` images, evenly spaced in each class, and equally many of each class if it has enough.

        Images with several labels are evenly spaced in the whole set. Nothing is random. Raises ValueError for a count
        below 1.
        """
        if count < 1:
            raise ValueError(f"{self.url}: a limit of {count} images leaves none; give 1 or more")
        if count >= len(self):
            return self
        if self.has_several_labels:
            return self.subset(evenly_spaced(len(self), count), f"limited-{count}")
        return self.subset(balanced_indices(self.labels, len(self.classes), count), f"limited-{count}")


class MissingSplit(ValueError):
    """A set that could be opened has no images of the split."""


def open_set(url: str, split: Split) -> ImageSet:
    """Open one split of the set that `url` names.

    Args:
        url: SCHEME:PLACE, where SCHEME is a file of imagesets/schemes/ or a plugin. `?val=0.2&seed=0` at its end holds
            out a random part of each class of the training images as split val; other options belong to the scheme.
        split: "train" or "val".

    Raises:
        ValueError: One line for users, for an unknown scheme, option or split, a missing folder or split, an unknown
            layout, an empty class, classes that differ between the splits, or files that cannot be listed.
    """
    if split not in SPLITS:
        raise ValueError(f"{url}: no split called {split!r}{did_you_mean(split, SPLITS)}")
    scheme, place = parse_url(url)
    module, options = load_extension("imagesets", scheme), url_options(url)
    share, seed = options.pop("val", ""), options.pop("seed", "0")
    try:
        image_set = module.open_split(place, "train" if share else split, **options)
    except OSError as error:
        raise ValueError(
            f"{url}: cannot list or read {error.filename} ({error.strerror}); check its permissions and that the disk "
            "is there"
        ) from error
    except ValueError as error:  # most of the scheme's messages begin with the URL, without options
        kind = MissingSplit if isinstance(error, MissingSplit) else ValueError
        raise kind(f"{url}: {str(error).removeprefix(f'{scheme}:{place}: ')}") from error
    if URL_OPTIONS.search(url):
        image_set = replace(image_set, url=url)
    if share:
        image_set = _hold_out(image_set, split, float(share), int(seed))
    return replace(image_set, labels=_read_only(image_set.labels))


def url_options(url: str) -> dict[str, str]:
    """Name -> value of the options at the end of a URL, such as `folder:/data/x?val=0.2&seed=0`.

    Raises ValueError for an option that the scheme does not have or that is given twice, and for an invalid share or
    seed.
    """
    options = parse_options(url, "imagesets", url.partition(":")[0], ("val", "seed"))
    share, seed = options.get("val", ""), options.get("seed", "0")
    if "val" in options and not (re.fullmatch(r"0?\.\d+", share) and float(share)):
        raise ValueError(f"{url}: val={share} is not a fraction between 0 and 1; write ?val=0.2")
    if "seed" in options and not (share and seed.isdecimal() and int(seed) < 1 << 32):
        raise ValueError(f"{url}: a seed is a whole number beside a share; write ?val=0.2&seed=0")
    return options


def parse_options(url: str, kind: str, scheme: str, common: Sequence[str] = ()) -> dict[str, str]:
    """Name -> value of the options of a URL: `common` ones and those of the extension `scheme` of a kind.

    Raises ValueError for an option that does not exist or is given twice.
    """
    match = URL_OPTIONS.search(url)
    if not match:
        return {}
    pairs = [text.partition("=") for text in match[1].split("&")]
    options = {name: value for name, _, value in pairs}
    if len(options) < len(pairs):
        raise ValueError(f"{url}: an option is given twice; give each once")
    known = (*common, *getattr(load_extension(kind, scheme), "OPTIONS", ()))
    if unknown := [name for name in options if name not in known]:
        raise ValueError(f"{url}: no option {unknown[0]!r} of {scheme}{did_you_mean(unknown[0], known)}")
    return options


def _hold_out(train: ImageSet, split: Split, share: float, seed: int) -> ImageSet:
    """Divide training images: val is a random `share` of each class, train the rest; returns the requested one.

    Raises ValueError if there are no labels, or if every class has only one image.
    """
    if not train.classes:
        raise ValueError(
            f"{train.url}: these images have no labels, so none can be held out for validation; omit ?val="
        )
    strata = rarest_classes(train.labels) if train.has_several_labels else train.labels
    val = held_out_sample(strata, len(train.classes) + 1, share, seed)
    if not len(val):
        raise ValueError(f"{train.url}: every class has one image, so none can be held out for validation; add images")
    indices = val if split == "val" else np.setdiff1d(np.arange(len(train)), val)
    notes = [
        *(note for note in train.notes if note != NO_VAL),
        f"val is {len(val)} of the {len(train)} training images: {share:g} of each class, seed {seed}",
    ]
    counts = np.bincount(strata, minlength=len(train.classes) + 1)[:-1]
    if single := [name for name, count in zip(train.classes, counts, strict=True) if count == 1]:
        notes.append(f"{len(single)} classes with one image, {single[0]!r} first: it is in train, and none is in val")
    return replace(train.subset(indices, split), url=train.url, split=split, notes=tuple(notes))


def open_uncached(url: str, split: Split) -> ImageSet:
    """`open_set` without the cached listing of an earlier run: size and time of every file are read again."""
    image_set = open_set(url, split)
    if not (isinstance(image_set.images, FileImages) and image_set.images.listing_file):
        return image_set
    Path(image_set.images.listing_file).unlink(missing_ok=True)
    return open_set(url, split)


def splits_of(url: str) -> tuple[Split, ...]:
    """Splits that a set of this scheme has: only train for images without labels. Raises ValueError as `parse_url`."""
    return load_extension("imagesets", parse_url(url)[0]).SPLITS


def parse_url(url: str, others: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Scheme and place (the part after the colon) of a URL, with ~ expanded and without options.

    others: Schemes that the caller accepts in addition -> description of their place, for error messages. Raises
    ValueError for an unknown or missing scheme, and for wrong options.
    """
    scheme, colon, place = url.partition(":")
    if colon and scheme in extensions("imagesets"):
        url_options(url)
        return scheme, os.path.expanduser(URL_OPTIONS.sub("", place))
    descriptions = {name: module.PLACE for name, module in load_extensions("imagesets").items()} | dict(others or {})
    if not colon and scheme in descriptions:
        raise ValueError(f"{url!r} lacks its colon; write {url}:{descriptions[scheme]}")
    if "/" in scheme or not colon:
        raise ValueError(f"{url!r} has no scheme; for a folder write folder:{url} (all: bench list imagesets)")
    suggestion = did_you_mean(scheme, {name: f"{name}:{text}" for name, text in descriptions.items()}, rest=f":{place}")
    raise ValueError(f"{url!r} has the unknown scheme {scheme!r}{suggestion}")


def _read_only(labels: np.ndarray) -> np.ndarray:
    """The labels as a contiguous int64 array that cannot be written to."""
    labels = np.ascontiguousarray(labels, np.int64)
    labels.flags.writeable = False
    return labels
