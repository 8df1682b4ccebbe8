"""What a picture shows: images of files, folders and URLs at any size, and checkpoints by name.

p patch side, h x w grid of patches, D width.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import Unpack

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from bench.reporting.panels import Panel, PanelMarks, Spot
from bench.run.checkpoints import checked_name, default_name, opened
from checkpoints.backbone import Backbone
from checkpoints.export import ViTExport
from checkpoints.spec import ViTSpec
from imagesets.decoding import UnreadableImage, decode_rgb, read_bytes
from imagesets.selection import evenly
from imagesets.sets import ImageSet, open_set, parse_url, splits_of
from imagesets.transforms import FILTERS, planes, resized_size, window_start

MAX_GRID = 128  # patches of a side; attention of more takes gigabytes
DRAWN = 448  # pixels of the longer side of an image in a picture, at most


@dataclass(frozen=True, kw_only=True, eq=False)
class ShownImage:
    """name: for people. image: RGB."""

    name: str
    image: Image.Image

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.image.height, self.image.width

    def panel(self, image: Image.Image | None = None, **marks: Unpack[PanelMarks]) -> Panel:
        """The image, or another version of it, as a panel."""
        return image_panel(image or self.image, **marks)


@dataclass(frozen=True, kw_only=True, eq=False)
class ShownCheckpoint:
    """A checkpoint, which is loaded when somebody asks for it. reference: what the user wrote."""

    reference: str
    given: str | None = None  # its name

    @cached_property
    def export(self) -> ViTExport:
        """ValueError, naming the option, where it cannot be loaded."""
        try:
            return opened(self.reference)[1]
        except (ValueError, OSError) as error:
            text = str(error).removeprefix(self.reference).removeprefix(":").strip()
            raise ValueError(f"--checkpoint {self.reference}: {text}") from error

    @cached_property
    def name(self) -> str:
        """The given name, else its export's own, else one from the reference."""
        if self.given:
            return checked_name(self.given, "--name")
        return str(self.export.facts.get("name") or default_name(self.reference, self.export.digest))


@dataclass(frozen=True, kw_only=True)
class PictureRequest:
    """Checkpoints and images of one `bench visualize`, and how they are drawn.

    size: length of the images' short side in pixels for the networks; None: as each network was trained. square: the
    middle of each image alone.
    """

    checkpoints: tuple[ShownCheckpoint, ...]
    sources: tuple[str, ...]  # files, folders, URLs
    split: str | None = None  # of URLs; None: val where there is one
    limit: int | None = 4  # images of each folder or URL; None: all
    size: int | None = None
    square: bool = False
    seed: int = 0
    device: str = "cpu"

    @cached_property
    def images(self) -> tuple[ShownImage, ...]:
        """All images, in the order of the sources. ValueError for one that cannot be read."""
        return tuple(image for source in self.sources for image in self._of(source))

    def _of(self, source: str) -> Iterator[ShownImage]:
        if os.path.isfile(source):
            yield ShownImage(name=Path(source).stem, image=self._part(read_image(source)))
            return
        found = opened_set(source, self.split)
        if self.limit is not None and self.limit < len(found):
            found = found.limited(self.limit) if found.classes else found.subset(evenly(len(found), self.limit), "some")
        for index in range(len(found)):
            name = Path(found.path(index)).stem
            label = found.classes[found.labels[index]] if found.classes and not found.has_several_labels else ""
            yield ShownImage(name=f"{label}: {name}" if label else name, image=self._part(found.image(index)))

    def _part(self, image: Image.Image) -> Image.Image:
        return middle(image) if self.square else image

    def sides(self, spec: ViTSpec, image: Image.Image) -> tuple[int, int]:
        """Height and width at which the network sees the image: multiples of its patches nearest to its shape.

        ValueError where that is more than the network, or memory, can take.
        """
        patch, native = spec.patch_size, min(spec.size)
        short = self.size or native
        if spec.relative_position == "per_block" and not (self.square and short == native):
            raise ValueError(f"its position tables are for {spec.size_text} alone: add --square, and leave --size")
        width, height = resized_size(*image.size, short)
        found = max(1, round(height / patch)) * patch, max(1, round(width / patch)) * patch
        if max(found) > MAX_GRID * patch:
            raise ValueError(
                f"an image of {found[0]} x {found[1]} pixels is more than {MAX_GRID} patches of {patch} a side: "
                "ask for fewer by --size, or add --square"
            )
        return found

    def fitted(self, spec: ViTSpec, image: Image.Image, interpolation: str = "bicubic") -> Image.Image:
        """The image at the network's size."""
        height, width = self.sides(spec, image)
        return image.resize((width, height), FILTERS[interpolation])


@dataclass(frozen=True, eq=False)
class Viewer:
    """A checkpoint on a device, for one image after the other."""

    checkpoint: ShownCheckpoint
    shown: PictureRequest

    @cached_property
    def backbone(self) -> Backbone:
        return Backbone(self.checkpoint.export, self.shown.device)

    @property
    def spec(self) -> ViTSpec:
        return self.checkpoint.export.spec

    def fitted(self, image: Image.Image) -> Image.Image:
        """As the network sees it. ValueError names the checkpoint."""
        with self.named():
            return self.shown.fitted(self.spec, image, self.checkpoint.export.interpolation)

    def tensor(self, image: Image.Image) -> Tensor:
        """The fitted image (1, 3, H, W), normalised, on the device."""
        return self.backbone.prepare(planes(self.fitted(image))[None])

    def grid(self, tensor: Tensor) -> tuple[int, int]:
        """Rows and columns of the patches of (1, 3, H, W)."""
        return tensor.shape[-2] // self.spec.patch_size, tensor.shape[-1] // self.spec.patch_size

    def named(self) -> "Naming":
        """Puts the checkpoint's name before a ValueError."""
        return Naming(self.checkpoint.name)

    @torch.inference_mode()
    def patches(self, image: Image.Image, layer: int) -> np.ndarray:
        """The image's patch tokens after a block, behind the final norm -> (h, w, D) float32."""
        with self.named():
            found = self.backbone.views(self.tensor(image), [(layer, True)])
        return found[layer, True].patches[0].cpu().numpy()


@dataclass(frozen=True)
class Naming:
    """A context whose ValueErrors begin with a name."""

    name: str

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError) and not str(error).startswith(f"{self.name}: "):
            raise ValueError(f"{self.name}: {error}") from error


def image_panel(image: Image.Image, **marks: Unpack[PanelMarks]) -> Panel:
    """An image as a panel; large ones are made smaller."""
    size = image.height, image.width
    if max(size) > DRAWN:
        image = image.copy()
        image.thumbnail((DRAWN, DRAWN))
    return Panel(values=np.asarray(image), size=size, **marks)


def read_image(path: str) -> Image.Image:
    """RGB image of a file. ValueError where it cannot be read."""
    try:
        return decode_rgb(read_bytes(path), path)
    except UnreadableImage as error:
        raise ValueError(f"{path}: cannot be read as an image ({error.reason}); name another one") from error


def viewers(shown: PictureRequest) -> tuple[Viewer, ...]:
    """A viewer for each checkpoint. ValueError where there is none."""
    return tuple(Viewer(checkpoint, shown) for checkpoint in required(shown.checkpoints))


def required(checkpoints: tuple[ShownCheckpoint, ...]) -> tuple[ShownCheckpoint, ...]:
    """The checkpoints. ValueError where there is none."""
    if not checkpoints:
        raise ValueError("--checkpoint is missing: name one or several, as bench run takes them")
    return checkpoints


def middle(image: Image.Image) -> Image.Image:
    """The largest square in the middle of an image."""
    side = min(image.size)
    left, top = window_start(image.width, side), window_start(image.height, side)
    return image.crop((left, top, left + side, top + side))


def opened_set(source: str, split: str | None) -> ImageSet:
    """The image set that a folder or URL means. ValueError, naming the option, for anything else."""
    url = f"images:{source}" if os.path.isdir(source) else source
    with Naming(f"--images {source}"):
        if ":" not in url:
            raise ValueError(f"{source} does not exist; name a file, a folder, or a URL such as digits:")
        parse_url(url)
        splits = splits_of(url)
        if split and split not in splits:
            raise ValueError(f"there is no split {split}, only {' and '.join(splits)}; leave --split")
        return open_set(url, split or ("val" if "val" in splits else splits[0]))


def checkpoints_of(references: Sequence[str], names: Sequence[str] | None) -> tuple[ShownCheckpoint, ...]:
    """ValueError where there are more or fewer names than checkpoints, or two are equal."""
    if names and len(names) != len(references):
        raise ValueError(f"--name: {len(names)} names for {len(references)} checkpoints; give one for each")
    if names and len(set(names)) != len(names):
        raise ValueError(f"--name {' '.join(names)}: each checkpoint needs a name of its own")
    return tuple(
        ShownCheckpoint(reference=reference, given=name)
        for reference, name in zip(references, names or repeat(None, len(references)), strict=True)
    )


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


def of_heads(maps: Tensor, heads: str) -> dict[str, Tensor]:
    """Maps (H, ...) -> title -> map (...): the mean, untitled, or one head each. ValueError for a head that is not
    there."""
    if heads == "mean":
        return {"": maps.mean(dim=0)}
    chosen = range(len(maps)) if heads == "all" else [int(number) for number in heads.split(",")]
    if wrong := [number for number in chosen if number >= len(maps)]:
        raise ValueError(f"heads={heads}: there is no head {wrong[0]}, they are numbered 0 to {len(maps) - 1}")
    return {f"head {number}": maps[number] for number in chosen}


def block_text(layer: int) -> str:
    """A block for people: `the last block`, `block 3`."""
    return "the last block" if layer == -1 else f"block {layer}"


def heads_text(heads: str) -> str:
    """What is drawn of the heads, for people: `, the mean of all heads`."""
    return ", the mean of all heads" if heads == "mean" else ""
