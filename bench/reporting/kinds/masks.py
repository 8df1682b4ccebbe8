"""What pretraining methods show their networks: crops, colours and masks, of a recipe, without weights.

It is recorded from each method's own forward pass, with its initial weights, so it holds for any method. A patch is
hidden where an encoder gets none for it, or another one than its projection (a mask token, say). L patches, D width.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.pretraining.recipes import choose_recipe
from bench.reporting.panels import Panel, PanelRow, Picture
from bench.reporting.visualize import PictureRequest, as_image, image_panel, method_views
from checkpoints.spec import Preparation
from checkpoints.vit import ViT
from engine.extensions import load_extension, source_files
from engine.printing import did_you_mean
from engine.seeding import DROP, seeded
from engine.settings import PositiveInt, Validated
from pretrain.loop.trainer import build
from pretrain.method import Method

ACROSS = 8  # panels beside an image; further ones stand below


@dataclass(frozen=True, kw_only=True, eq=False)
class GivenView:
    """One image as one network gets it. pixels (3, H, W), normalised; hidden (h, w) bool, True: not seen."""

    network: str  # "student", which learns by gradients, or "teacher"
    pixels: Tensor
    hidden: np.ndarray

    def same_as(self, other: "GivenView") -> bool:
        """Whether both are the same image with the same patches hidden, of the same network."""
        same_pixels = torch.equal(self.pixels, other.pixels)
        return same_pixels and self.network == other.network and np.array_equal(self.hidden, other.hidden)


@dataclass(frozen=True, kw_only=True)
class Masks(Validated):
    """Settings of the picture."""

    methods: tuple[str, ...] = ()  # such as mae,lut; all, where none is named
    recipe: str = ""  # of all these methods, such as 32px; the first recipe of each, where none is named
    views: PositiveInt | None = None  # of each network, student and teacher, at most; all, where no number is named

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.methods:
            if name not in (known := list(source_files("methods"))):
                raise ValueError(f"methods={name}: there is no such method{did_you_mean(name, known)}")

    def pictures(self, request: PictureRequest) -> Iterator[Picture]:
        """One picture: rows are methods and images, columns what their networks see."""
        rows = []
        for name in self.methods or sorted(source_files("methods")):
            recipe = self.recipe or next(iter(load_extension("methods", name).RECIPES))
            chosen = choose_recipe(name, recipe, ())
            method = build(chosen.module, chosen.recipe, request.seed)
            for number, image in enumerate(request.images):
                views = given_views(method, method_views(method, image.image, request.seed, number))
                panels = self.panels(views, method.preparation)
                rows += panel_rows(image_panel(image.image), panels, f"{name} {recipe}")
        yield Picture(
            name="masks",
            rows=tuple(rows),
            note="What the networks of each method are given; hidden patches are grey. Only students get gradients.",
        )

    def panels(self, views: list[GivenView], preparation: Preparation) -> list[Panel]:
        """The students' views, then the teachers'; of each network the first ones, and how many are not shown."""
        panels = []
        for network in ("student", "teacher"):
            of_network = [view_panel(view, preparation) for view in views if view.network == network]
            first = of_network[: self.views]
            if left_out := len(of_network) - len(first):
                first[-1] = replace(first[-1], caption=f"{left_out} more are not shown")
            panels += first
        return panels


def panel_rows(image: Panel, panels: list[Panel], label: str) -> list[PanelRow]:
    """The image, and its panels in as many rows of ACROSS as they need."""
    parts = [panels[start : start + ACROSS] for start in range(0, len(panels), ACROSS)]
    return [
        PanelRow(panels=(None if number else image, *part), label="" if number else label)
        for number, part in enumerate(parts)
    ]


def view_panel(view: GivenView, preparation: Preparation) -> Panel:
    """What a network sees of one view."""
    colours = as_image(view.pixels, preparation, view.hidden)
    share = view.hidden.mean()
    title = f"{view.network}, {colours.shape[1]} px" + (f", {share:.0%} hidden" if share else "")
    return Panel(values=colours, size=colours.shape[:2], title=title)


@torch.no_grad()
def given_views(method: Method, views: Mapping[str, Tensor]) -> list[GivenView]:
    """What a forward pass on the views of one image gives to encoders, each once, in the order of the pass."""
    given: list[GivenView] = []
    with ExitStack() as stack:
        for module in method.modules():
            if isinstance(module, ViT):
                stack.enter_context(_recorded(module, given))
        stack.enter_context(seeded(DROP, 0))
        method.eval()(views)  # batch norms of one image have no statistics
    return [view for place, view in enumerate(given) if not any(view.same_as(other) for other in given[:place])]


@contextmanager
def _recorded(vit: ViT, given: list[GivenView]) -> Iterator[None]:
    """A block in which all that `vit` encodes is appended to `given`."""
    network = "student" if any(parameter.requires_grad for parameter in vit.parameters()) else "teacher"
    entered: dict[str, Any] = {}

    def project(images: Tensor) -> Tensor:
        entered["images"], entered["patches"] = images, ViT.project(vit, images)
        return entered["patches"]

    def encode(patches: Tensor, keep: Tensor | None = None, *more: Any, **besides: Any) -> list[Tensor]:
        images, patch = entered["images"], vit.spec.patch_size
        grid = (images.shape[-2] // patch, images.shape[-1] // patch)
        whole = vit.add_positions(entered["patches"], grid)
        for row, seen in enumerate(visible_patches(whole, patches, keep)):
            hidden = ~seen.reshape(grid).numpy()
            given.append(GivenView(network=network, pixels=images[row % len(images)], hidden=hidden))
        return ViT.encode(vit, patches, keep, *more, **besides)

    vit.project, vit.encode = project, encode  # type: ignore[method-assign]
    try:
        yield
    finally:
        del vit.project, vit.encode


def visible_patches(whole: Tensor, given: Tensor, keep: Tensor | None) -> Tensor:
    """All placed patches of images (B, L, D), those that an encoder is given (R, l, D), and which of these it keeps
    (R, l') -> which patches it sees (R, L) bool. R is B, or a multiple of it, mask by mask."""
    whole = whole.repeat(len(given) // len(whole), 1, 1)
    if given.shape[1] != whole.shape[1]:
        # A part that was taken before: where a patch is, its position tells.
        return (whole[:, :, None] == given[:, None]).all(dim=-1).any(dim=-1)
    same = (whole == given).all(dim=-1)
    if keep is None:
        return same
    kept = torch.zeros_like(same).scatter_(1, keep, True)
    return same & kept
