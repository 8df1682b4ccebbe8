"""`bench visualize`: the checkpoints and images of a picture, and what several kinds of pictures share.

A file of bench/reports/kinds/ defines a kind of picture, which `draw_pictures` draws into files.

In shapes, H x W are pixels, h x w the grid of patches, and D is the width of the network.
"""

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from bench.options import Checked, with_names
from bench.reports.kinds import KINDS
from bench.reports.pictures import Format, Panel, Spot, encoded
from bench.run.checkpoints import default_name, load_export
from checkpoints.backbone import Backbone, Features
from checkpoints.export import ViTExport
from checkpoints.spec import ViTSpec
from engine.errors import UserError, option
from engine.files import write_atomic
from engine.progress import with_progress
from engine.settings import NonNegativeInt, PositiveInt, changed, read_changes
from imagesets.decoding import UnreadableImage, decode_rgb, read_bytes
from imagesets.selection import evenly_spaced
from imagesets.sets import SPLITS, ImageSet, Split, open_set, parse_url, splits_of
from imagesets.transforms import FILTERS, image_to_tensor, resized_size, window_start

MAX_GRID = 128  # patches of a side; attention of more takes gigabytes
MAX_PANEL = 448  # pixels of the longer side of an image in a picture
GREY = 127  # of hidden patches


def chosen_kind(name: str, changes: Sequence[str]) -> Any:
    """A kind of picture with changed settings: an instance of the class of its file that has `pictures(request)`.

    name: a key of KINDS. changes: NAME=VALUE texts. ValueError for an unknown setting or an invalid value.
    """
    module = importlib.import_module(f"bench.reports.kinds.{KINDS[name].stem}")
    own_values = [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]
    settings_class = next(value for value in own_values if hasattr(value, "pictures"))
    return changed(settings_class(), read_changes(changes, "NAME=VALUE", "layer=-2"))


def draw_pictures(kind: Any, request: "PictureRequest", out: Path, formats: Sequence[Format]) -> Iterator[Path]:
    """Draw the pictures of a kind into `out`, each in every format; yields the path of each file once it is written.

    kind: from `chosen_kind`.
    """
    for picture in kind.pictures(request):
        for file_format in formats:
            path = out / f"{picture.name}.{file_format}"
            write_atomic(path, encoded(picture, file_format))
            yield path


@contextmanager
def errors_naming(name: str) -> Iterator[None]:
    """Begin the messages of ValueErrors in a block with a name: `NAME: MESSAGE`."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith(f"{name}: "):
            raise
        raise ValueError(f"{name}: {error}") from error


@dataclass(frozen=True, kw_only=True, eq=False)
class NamedImage:
    """An RGB image with the name that pictures show."""

    name: str
    image: Image.Image

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.image.height, self.image.width


@dataclass(frozen=True, kw_only=True)
class PictureRequest(Checked):
    """The checkpoints and images of one `bench visualize`, and the options that all kinds of pictures share."""

    references: tuple[str, ...]  # to checkpoints, as the user wrote them
    names: tuple[str, ...] = ()  # of the checkpoints; (): `Viewer.name`
    sources: tuple[str, ...]  # of images: files, folders, URLs
    split: Split | None = None  # of URLs; None: val if there is one
    limit: PositiveInt | None = 4  # images of each folder or URL; None: all
    image_size: PositiveInt | None = None  # pixels of the short side for the networks; None: as each source evaluates
    square: bool = False  # crop each image to the square in its middle
    seed: NonNegativeInt = 0
    device: str = "cpu"
    precision: Literal["float32", "bfloat16"] = "float32"  # of the networks

    def __post_init__(self) -> None:
        super().__post_init__()
        with_names(self.references, self.names)  # raises an error for a wrong number of names
        if len(set(self.names)) != len(self.names):
            raise UserError("names", "each checkpoint needs a name of its own", " ".join(self.names))

    @cached_property
    def viewers(self) -> tuple["Viewer", ...]:
        """A viewer for each checkpoint; none is loaded yet."""
        return tuple(Viewer(reference, name, self) for reference, name in with_names(self.references, self.names))

    @cached_property
    def images(self) -> tuple[NamedImage, ...]:
        """All images, in the order of the sources. ValueError for an image that cannot be read."""
        return tuple(image for source in self.sources for image in self._images_of(source))

    def gallery(self, count: int) -> tuple[NamedImage, ...]:
        """At most `count` training images of each source, if all are URLs with a validation split, whose images are
        `images`; none otherwise."""
        urls = all(":" in source and not os.path.exists(source) for source in self.sources)
        if not urls or self.split == "train" or any({*splits_of(url)} != {*SPLITS} for url in self.sources):
            return ()
        return replace(self, split="train", limit=count).images

    def _images_of(self, source: str) -> Iterator[NamedImage]:
        if os.path.isfile(source):
            yield NamedImage(name=Path(source).stem, image=self._cropped(read_image(source)))
            return
        images = image_set_of(source, self.split)
        if self.limit is not None and self.limit < len(images):
            some = evenly_spaced(len(images), self.limit)
            images = images.limited(self.limit) if images.classes else images.subset(some, "some")
        for index in range(len(images)):
            name = Path(images.path(index)).stem
            if images.classes and not images.has_several_labels:
                name = f"{images.classes[images.labels[index]]}: {name}"
            yield NamedImage(name=name, image=self._cropped(images.image(index)))

    def _cropped(self, image: Image.Image) -> Image.Image:
        return central_square(image) if self.square else image

    def sides(self, spec: ViTSpec, image: Image.Image) -> tuple[int, int]:
        """Height and width to which an image is resized for a network: the nearest multiples of the patch size.

        ValueError for a size that the network cannot process, or that would take too much memory.
        """
        patch, native = spec.patch_size, min(spec.size)
        short = self.image_size or native
        if spec.relative_position == "per_block" and not (self.square and short == native):
            fix = f"add {option('square', True)}, and leave {option('image_size')}"
            raise ValueError(f"its position tables are for {spec.size_text} alone: {fix}")
        width, height = resized_size(*image.size, short)
        sides = max(1, round(height / patch)) * patch, max(1, round(width / patch)) * patch
        if max(sides) > MAX_GRID * patch:
            raise ValueError(
                f"an image of {sides[0]} x {sides[1]} pixels is more than {MAX_GRID} patches of {patch} a side: "
                f"ask for fewer by {option('image_size')}, or add {option('square', True)}"
            )
        return sides


@dataclass(frozen=True, eq=False)
class Viewer:
    """A checkpoint of a request, loaded when it is first needed, and its features of single images."""

    reference: str
    given_name: str | None
    request: PictureRequest

    @cached_property
    def loaded(self) -> ViTExport:
        """The checkpoint as dense tasks evaluate it. ValueError, naming the option, if it cannot be loaded."""
        try:
            return load_export(self.reference)[1]
        except (ValueError, OSError) as error:
            text = str(error).removeprefix(self.reference).removeprefix(":").strip()
            raise UserError("checkpoint", text, self.reference) from error

    @cached_property
    def export(self) -> ViTExport:
        """The checkpoint at the size of its published evaluation."""
        with errors_naming(self.name):
            return self.loaded.evaluated_at(self.loaded.evaluation_size)

    @cached_property
    def name(self) -> str:
        """The name that the user gave, or that of the export, or one made from the reference."""
        return self.given_name or default_name(self.loaded, self.reference)

    @cached_property
    def backbone(self) -> Backbone:
        return Backbone(self.export, self.request.device, self.request.precision)

    @property
    def spec(self) -> ViTSpec:
        return self.export.spec

    def resized(self, image: Image.Image) -> Image.Image:
        """The image at the size of `PictureRequest.sides`. ValueError, naming the checkpoint, as there."""
        with errors_naming(self.name):
            height, width = self.request.sides(self.spec, image)
        return image.resize((width, height), FILTERS[self.export.interpolation])

    def tensor(self, image: Image.Image) -> Tensor:
        """The resized image (1, 3, H, W), normalised as the network was trained, on the device."""
        return self.backbone.prepare(image_to_tensor(self.resized(image))[None])

    def grid(self, tensor: Tensor) -> tuple[int, int]:
        """Rows and columns of the patches of an image (1, 3, H, W)."""
        return tensor.shape[-2] // self.spec.patch_size, tensor.shape[-1] // self.spec.patch_size

    def images(self, images: Sequence[NamedImage] | None = None) -> Iterator[NamedImage]:
        """The images of the request, or others, with a line of progress while the network sees them."""
        return with_progress(self.request.images if images is None else images, self.name, "images")

    @torch.inference_mode()
    def features(self, image: Image.Image, layer: int, norm: bool = True) -> Features:
        """The features of an image after a block. norm: apply the final norm to them."""
        with errors_naming(self.name):
            return self.backbone.views(self.tensor(image), [(layer, norm)])[layer, norm]

    def patches(self, image: Image.Image, layer: int, norm: bool = True) -> np.ndarray:
        """The image's patch tokens after a block, (h, w, D) float32. norm: apply the final norm to them."""
        return self.features(image, layer, norm).patches[0].cpu().numpy()

    def class_token(self, image: Image.Image, layer: int) -> np.ndarray:
        """The image's class token after a block and the final norm, (1, 1, D) float32. ValueError if it has none."""
        token = self.features(image, layer).cls
        if token is None:
            raise ValueError(f"{self.name}: it has no class token; compare patches")
        return token.cpu().numpy()[None]


def read_image(path: str) -> Image.Image:
    """The RGB image in a file. ValueError if it cannot be read."""
    try:
        return decode_rgb(read_bytes(path), path)
    except UnreadableImage as error:
        raise UserError("images", f"cannot be read as an image ({error.reason}); name another one", path) from error


def image_set_of(source: str, split: str | None) -> ImageSet:
    """The image set of a folder or URL. split: None for val, if it exists. UserError if it is no such set."""
    url = f"images:{source}" if os.path.isdir(source) else source
    if ":" not in url:
        raise UserError("images", "it does not exist; name a file, a folder, or a URL such as digits:", source)
    try:
        parse_url(url)
        splits = splits_of(url)
        if split and split not in splits:
            raise ValueError(f"there is no split {split}, only {' and '.join(splits)}; leave {option('split')}")
        return open_set(url, split or ("val" if "val" in splits else splits[0]))
    except ValueError as error:
        raise UserError("images", str(error).removeprefix(f"{source}: "), source) from error


def central_square(image: Image.Image) -> Image.Image:
    """The largest square in the middle of an image."""
    side = min(image.size)
    left, top = window_start(image.width, side), window_start(image.height, side)
    return image.crop((left, top, left + side, top + side))


def image_panel(image: Image.Image, **marks: Any) -> Panel:
    """An image as a panel, with at most MAX_PANEL pixels a side. marks: other fields of `Panel`."""
    size = image.height, image.width
    if max(size) > MAX_PANEL:
        image = image.copy()
        image.thumbnail((MAX_PANEL, MAX_PANEL))
    return Panel(values=np.asarray(image), size=size, **marks)


def check_places(at: Sequence[float]) -> None:
    """ValueError unless `at` is x1,y1,x2,y2,... as shares of an image's width and height."""
    if not at or len(at) % 2 or not all(0 <= value <= 1 for value in at):
        raise ValueError(f"at={','.join(map(str, at))}: give x,y of each patch, as shares of the image from 0 to 1")


def points_at(at: Sequence[float]) -> tuple[Spot, ...]:
    """Numbered points at x1,y1,x2,y2,..., shares of an image's width and height."""
    pairs = zip(at[::2], at[1::2], strict=True)
    return tuple(Spot(x=x, y=y, number=number) for number, (x, y) in enumerate(pairs))


def patches_at(points: Sequence[Spot], grid: tuple[int, int]) -> list[int]:
    """The index, row by row, of the patch in which each point lies. grid: rows and columns of patches."""
    rows, columns = grid
    return [min(int(point.y * rows), rows - 1) * columns + min(int(point.x * columns), columns - 1) for point in points]


def block_text(layer: int) -> str:
    """A block in words: `the last block`, `block 3`."""
    return "the last block" if layer == -1 else f"block {layer}"
