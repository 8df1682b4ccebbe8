"""`bench visualize`: which checkpoints and images a picture shows, at which size, and from a kind of picture to files.

Every file of bench/reporting/kinds/ is a kind. p patch side, h x w grid of patches, D width.
"""

import importlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import default_collate

from bench.cli.settings import changed, read_changes
from bench.reporting.panels import ANIMATED, FPS, Format, Panel, Spot, animated, encoded
from bench.run.checkpoints import checked_name, default_name, load_export
from checkpoints.backbone import Backbone
from checkpoints.export import ViTExport
from checkpoints.spec import Preparation, ViTSpec
from engine.files import write_atomic
from engine.printing import did_you_mean
from engine.seeding import AUGMENT, seeded
from imagesets.decoding import UnreadableImage, decode_rgb, read_bytes
from imagesets.selection import evenly_spaced
from imagesets.sets import ImageSet, open_set, parse_url, splits_of
from imagesets.transforms import FILTERS, planes, resized_size, window_start
from pretrain.method import Method

KINDS = {path.stem.replace("_", "-"): path for path in sorted((Path(__file__).parent / "kinds").glob("[!_]*.py"))}
MAX_GRID = 128  # patches of a side; attention of more takes gigabytes
MAX_PANEL = 448  # pixels of the longer side of an image in a picture, at most
GREY = 127  # of hidden patches


def settings_class(kind: str) -> type:
    """The frozen dataclass of a kind's settings, which has `pictures(request)`: the one that its file defines.
    ValueError gives the choices."""
    if kind not in KINDS:
        raise ValueError(f"no kind of picture is called {kind!r}{did_you_mean(kind, list(KINDS))}")
    module = importlib.import_module(f"bench.reporting.kinds.{KINDS[kind].stem}")
    classes = [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]
    return next(value for value in classes if hasattr(value, "pictures"))


def chosen_kind(kind: str, texts: Sequence[str]) -> Any:
    """The kind's settings with every `NAME=VALUE` of `texts`. ValueError for one that does not fit."""
    return changed(settings_class(kind)(), read_changes(texts, "NAME=VALUE", "layer=-2"))


def draw_pictures(
    kind: Any, request: "PictureRequest", out: Path, formats: Sequence[Format], fps: float = FPS
) -> Iterator[Path]:
    """Draw the pictures of a kind's settings into `out`, each in every format; the paths of the files, as written. fps:
    images a second of an animated format."""
    for picture in kind.pictures(request):
        checkpoints = {viewer.export.digest: viewer.name for viewer in request.checkpoints}
        for form in formats:
            path = out / f"{picture.name}.{form}"
            data = animated(picture, form, fps) if form in ANIMATED else encoded(picture, form, checkpoints)
            write_atomic(path, data)
            yield path


@contextmanager
def errors_naming(name: str) -> Iterator[None]:
    """A block whose ValueErrors begin with a name."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith(f"{name}: "):
            raise
        raise ValueError(f"{name}: {error}") from error


@dataclass(frozen=True, kw_only=True, eq=False)
class NamedImage:
    """An RGB image and its name for people."""

    name: str
    image: Image.Image

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.image.height, self.image.width


@dataclass(frozen=True, kw_only=True)
class PictureRequest:
    """The checkpoints and images of one `bench visualize`, and how they are drawn.

    size: length of the images' short side in pixels for the networks; None: as each network was trained. square: only
    the middle of each image.
    """

    references: tuple[str, ...]  # checkpoints as the user wrote them
    names: tuple[str, ...] | None = None  # of the checkpoints
    sources: tuple[str, ...]  # files, folders, URLs
    split: str | None = None  # of URLs; None: val where there is one
    limit: int | None = 4  # images of each folder or URL; None: all
    size: int | None = None
    square: bool = False
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.names and len(self.names) != len(self.references):
            raise ValueError(
                f"--name: {len(self.names)} names for {len(self.references)} checkpoints; give one for each"
            )
        if self.names and len(set(self.names)) != len(self.names):
            raise ValueError(f"--name {' '.join(self.names)}: each checkpoint needs a name of its own")

    @cached_property
    def checkpoints(self) -> tuple["Viewer", ...]:
        """A viewer for each checkpoint; none is loaded yet."""
        names = self.names or (None,) * len(self.references)
        return tuple(Viewer(reference, name, self) for reference, name in zip(self.references, names, strict=True))

    def viewers(self) -> tuple["Viewer", ...]:
        """The checkpoints. ValueError where there is none."""
        if not self.checkpoints:
            raise ValueError("--checkpoint is missing: name one or several, as bench run takes them")
        return self.checkpoints

    @cached_property
    def images(self) -> tuple[NamedImage, ...]:
        """All images, in the order of the sources. ValueError for one that cannot be read."""
        return tuple(image for source in self.sources for image in self._images_of(source))

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
        """Height and width at which the network sees the image: multiples of its patches nearest to its shape.

        ValueError where that is more than the network, or memory, can take.
        """
        patch, native = spec.patch_size, min(spec.size)
        short = self.size or native
        if spec.relative_position == "per_block" and not (self.square and short == native):
            raise ValueError(f"its position tables are for {spec.size_text} alone: add --square, and leave --size")
        width, height = resized_size(*image.size, short)
        sides = max(1, round(height / patch)) * patch, max(1, round(width / patch)) * patch
        if max(sides) > MAX_GRID * patch:
            raise ValueError(
                f"an image of {sides[0]} x {sides[1]} pixels is more than {MAX_GRID} patches of {patch} a side: "
                "ask for fewer by --size, or add --square"
            )
        return sides


@dataclass(frozen=True, eq=False)
class Viewer:
    """A checkpoint of a request, loaded when it is first asked for, which looks at one image after the other."""

    reference: str
    given_name: str | None
    request: PictureRequest

    @cached_property
    def export(self) -> ViTExport:
        """ValueError, naming the option, where it cannot be loaded."""
        try:
            return load_export(self.reference)[1]
        except (ValueError, OSError) as error:
            text = str(error).removeprefix(self.reference).removeprefix(":").strip()
            raise ValueError(f"--checkpoint {self.reference}: {text}") from error

    @cached_property
    def name(self) -> str:
        """The given name, else its export's own, else one from the reference."""
        if self.given_name:
            return checked_name(self.given_name, "--name")
        return str(self.export.facts.get("name") or default_name(self.reference, self.export.digest))

    @cached_property
    def backbone(self) -> Backbone:
        return Backbone(self.export, self.request.device)

    @property
    def spec(self) -> ViTSpec:
        return self.export.spec

    def resized(self, image: Image.Image) -> Image.Image:
        """The image at the network's size. ValueError names the checkpoint."""
        with errors_naming(self.name):
            height, width = self.request.sides(self.spec, image)
        return image.resize((width, height), FILTERS[self.export.interpolation])

    def tensor(self, image: Image.Image) -> Tensor:
        """The resized image (1, 3, H, W), normalised, on the device."""
        return self.backbone.prepare(planes(self.resized(image))[None])

    def grid(self, tensor: Tensor) -> tuple[int, int]:
        """Rows and columns of the patches of (1, 3, H, W)."""
        return tensor.shape[-2] // self.spec.patch_size, tensor.shape[-1] // self.spec.patch_size

    @torch.inference_mode()
    def patches(self, image: Image.Image, layer: int, norm: bool = True) -> np.ndarray:
        """The image's patch tokens after a block, with `norm` behind the final norm -> (h, w, D) float32."""
        with errors_naming(self.name):
            features = self.backbone.views(self.tensor(image), [(layer, norm)])
        return features[layer, norm].patches[0].cpu().numpy()


def read_image(path: str) -> Image.Image:
    """RGB image of a file. ValueError where it cannot be read."""
    try:
        return decode_rgb(read_bytes(path), path)
    except UnreadableImage as error:
        raise ValueError(f"{path}: cannot be read as an image ({error.reason}); name another one") from error


def image_set_of(source: str, split: str | None) -> ImageSet:
    """The image set that a folder or URL means. ValueError, naming the option, for anything else."""
    url = f"images:{source}" if os.path.isdir(source) else source
    with errors_naming(f"--images {source}"):
        if ":" not in url:
            raise ValueError(f"{source} does not exist; name a file, a folder, or a URL such as digits:")
        parse_url(url)
        splits = splits_of(url)
        if split and split not in splits:
            raise ValueError(f"there is no split {split}, only {' and '.join(splits)}; leave --split")
        return open_set(url, split or ("val" if "val" in splits else splits[0]))


def central_square(image: Image.Image) -> Image.Image:
    """The largest square in the middle of an image."""
    side = min(image.size)
    left, top = window_start(image.width, side), window_start(image.height, side)
    return image.crop((left, top, left + side, top + side))


def image_panel(image: Image.Image, **marks: Any) -> Panel:
    """An image as a panel; large ones are made smaller. marks: other fields of `Panel`."""
    size = image.height, image.width
    if max(size) > MAX_PANEL:
        image = image.copy()
        image.thumbnail((MAX_PANEL, MAX_PANEL))
    return Panel(values=np.asarray(image), size=size, **marks)


def as_image(pixels: Tensor, preparation: Preparation, hidden: np.ndarray | None = None) -> np.ndarray:
    """Normalised pixels (3, H, W) -> colours (H, W, 3) uint8, grey where patches (h, w) are hidden."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (preparation.mean, preparation.std))
    colours = (pixels.detach().float().cpu() * std + mean).clamp(0, 1).mul(255).round().to(torch.uint8)
    image = colours.permute(1, 2, 0).numpy().copy()
    if hidden is not None:
        side = image.shape[0] // hidden.shape[0]
        image[np.kron(hidden, np.ones((side, side), bool))] = GREY
    return image


def method_views(method: Method, image: Image.Image, *seeds: int) -> dict[str, Tensor]:
    """The method's views of one image, drawn by the seeds: a batch of as many copies as a forward pass needs."""
    with seeded(AUGMENT, *seeds):
        views = default_collate([method.views()(image)] * method.min_batch)
    return views | ({"label": torch.zeros(method.min_batch, dtype=torch.int64)} if method.needs_labels else {})


QUARTERS = (0.25, 0.25, 0.75, 0.25, 0.25, 0.75, 0.75, 0.75)  # four patches, as in ExtreMA's figure 1
HEADS = re.compile(r"mean|all|\d+(,\d+)*")


def check_places(at: Sequence[float]) -> None:
    """ValueError unless these are pairs of shares."""
    if not at or len(at) % 2 or not all(0 <= value <= 1 for value in at):
        raise ValueError(f"at={','.join(map(str, at))}: give x,y of each patch, as shares of the image from 0 to 1")


def points_at(at: Sequence[float]) -> tuple[Spot, ...]:
    """Numbered points of x1,y1,x2,y2,..."""
    pairs = zip(at[::2], at[1::2], strict=True)
    return tuple(Spot(x=x, y=y, number=number) for number, (x, y) in enumerate(pairs))


def patches_at(points: Sequence[Spot], grid: tuple[int, int]) -> list[int]:
    """The number, row by row, of the patch in which each point lies."""
    rows, columns = grid
    return [min(int(p.y * rows), rows - 1) * columns + min(int(p.x * columns), columns - 1) for p in points]


def check_heads(heads: str) -> None:
    """ValueError unless this names heads."""
    if not HEADS.fullmatch(heads):
        raise ValueError(f"heads={heads}: write mean, all, or numbers from 0 such as 0,3")


def maps_by_head(maps: Tensor, heads: str) -> dict[str, Tensor]:
    """Maps (H, ...) -> title -> map (...): the mean, untitled, or one head each. ValueError for a head that does not
    exist."""
    if heads == "mean":
        return {"": maps.mean(dim=0)}
    chosen = range(len(maps)) if heads == "all" else [int(number) for number in heads.split(",")]
    if wrong := [number for number in chosen if number >= len(maps)]:
        raise ValueError(f"heads={heads}: there is no head {wrong[0]}, they are numbered 0 to {len(maps) - 1}")
    return {f"head {number}": maps[number] for number in chosen}


def map_panel(values: Tensor, size: tuple[int, int], title: str, frame: int | None = None) -> Panel:
    """An attention map (h, w) over an image of `size`, drawn from 0."""
    caption = f"maximum {float(values.max()):.2g}, patches {float(values.sum()):.0%}"
    return Panel(values=values.numpy(), size=size, low=0.0, title=title, caption=caption, frame=frame)


def attention_note(query: str, layer: int, heads: str) -> str:
    """The line below a picture of attention maps."""
    mean = ", the mean of all heads" if heads == "mean" else ""
    return (
        f"Attention of {query} in {block_text(layer)}{mean}. Each map is drawn from 0, dark, to its maximum, yellow; "
        "it sums to 1 over patches and other tokens."
    )


def block_text(layer: int) -> str:
    """A block for people: `the last block`, `block 3`."""
    return "the last block" if layer == -1 else f"block {layer}"
