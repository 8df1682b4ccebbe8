"""Inputs of the networks of pretraining methods: crops, colours and masks of a recipe, without trained weights.

They are recorded during a forward pass of the method with its initial weights, so this works for any method. A patch is
hidden if an encoder does not get it, or gets another token in its place, such as a mask token.

In shapes, L is the number of patches of an image, and D the width.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.pretraining.recipes import choose_recipe
from bench.reports.pictures import Panel, PanelRow, Picture
from bench.reports.visualize import PictureRequest, as_image, image_panel, method_views
from checkpoints.spec import Preparation
from checkpoints.vit import ViT
from engine.extensions import load_extension, source_files
from engine.printing import did_you_mean
from engine.seeding import DROP, seeded
from engine.settings import PositiveInt, Validated
from pretrain.loop.trainer import build
from pretrain.method import Method

MAX_COLUMNS = 8  # panels next to an image; further ones are in rows below


@dataclass(frozen=True, kw_only=True, eq=False)
class EncoderInput:
    """One image as a network gets it."""

    network: str  # "student", which is trained by gradients, or "teacher"
    pixels: Tensor  # (3, H, W), normalised
    hidden: np.ndarray  # (h, w) bool, True for hidden patches

    def same_as(self, other: "EncoderInput") -> bool:
        """Whether both have the same network, pixels and hidden patches."""
        same_pixels = torch.equal(self.pixels, other.pixels)
        return same_pixels and self.network == other.network and np.array_equal(self.hidden, other.hidden)


@dataclass(frozen=True, kw_only=True)
class Masks(Validated):
    """Settings of the picture."""

    methods: tuple[str, ...] = ()  # such as mae,lut; by default all
    recipe: str = ""  # of all these methods, such as 32px; by default the first of each method
    views: PositiveInt | None = None  # most views of each network, student and teacher, that are shown; by default all

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.methods:
            if name not in (known := list(source_files("methods"))):
                raise ValueError(f"methods={name}: there is no such method{did_you_mean(name, known)}")

    def pictures(self, request: PictureRequest) -> Iterator[Picture]:
        """One picture: rows are methods and images, columns the inputs of their networks."""
        rows = []
        for name in self.methods or sorted(source_files("methods")):
            recipe = self.recipe or next(iter(load_extension("methods", name).RECIPES))
            chosen = choose_recipe(name, recipe, ())
            method = build(chosen.module, chosen.recipe, request.seed)
            for number, image in enumerate(request.images):
                inputs = encoder_inputs(method, method_views(method, image.image, request.seed, number))
                panels = self.panels(inputs, method.preparation)
                rows += panel_rows(image_panel(image.image), panels, f"{name} {recipe}")
        yield Picture(
            name="masks",
            rows=tuple(rows),
            note="What the networks of each method are given; hidden patches are grey. Only students get gradients.",
        )

    def panels(self, inputs: list[EncoderInput], preparation: Preparation) -> list[Panel]:
        """Panels of the student's inputs, then of the teacher's; the last caption says how many are not shown."""
        panels = []
        for network in ("student", "teacher"):
            of_network = [input_panel(view, preparation) for view in inputs if view.network == network]
            first_panels = of_network[: self.views]
            if left_out := len(of_network) - len(first_panels):
                first_panels[-1] = replace(first_panels[-1], caption=f"{left_out} more are not shown")
            panels += first_panels
        return panels


def panel_rows(image: Panel, panels: list[Panel], label: str) -> list[PanelRow]:
    """The image and its panels, in rows of MAX_COLUMNS panels."""
    groups = [panels[start : start + MAX_COLUMNS] for start in range(0, len(panels), MAX_COLUMNS)]
    return [
        PanelRow(panels=(None if number else image, *group), label="" if number else label)
        for number, group in enumerate(groups)
    ]


def input_panel(view: EncoderInput, preparation: Preparation) -> Panel:
    """An input of a network, with hidden patches in grey."""
    image = as_image(view.pixels, preparation, view.hidden)
    share = view.hidden.mean()
    title = f"{view.network}, {image.shape[1]} px" + (f", {share:.0%} hidden" if share else "")
    return Panel(values=image, size=image.shape[:2], title=title)


@torch.no_grad()
def encoder_inputs(method: Method, views: Mapping[str, Tensor]) -> list[EncoderInput]:
    """The different inputs of all encoders in a forward pass, in its order. views: of one image (`method_views`)."""
    inputs: list[EncoderInput] = []
    with ExitStack() as stack:
        for module in method.modules():
            if isinstance(module, ViT):
                stack.enter_context(_record_inputs(module, inputs))
        stack.enter_context(seeded(DROP, 0))
        method.eval()(views)  # in training mode, batch norm would need statistics of more than one image
    return [view for number, view in enumerate(inputs) if not any(view.same_as(other) for other in inputs[:number])]


@contextmanager
def _record_inputs(vit: ViT, inputs: list[EncoderInput]) -> Iterator[None]:
    """Within the block, append every image that `vit` encodes to `inputs`."""
    network = "student" if any(parameter.requires_grad for parameter in vit.parameters()) else "teacher"
    projected: dict[str, Any] = {}  # images and patches of the last call of `project`

    def project(images: Tensor) -> Tensor:
        projected["images"], projected["patches"] = images, ViT.project(vit, images)
        return projected["patches"]

    def encode(patches: Tensor, keep: Tensor | None = None, *args: Any, **kwargs: Any) -> list[Tensor]:
        images, patch = projected["images"], vit.spec.patch_size
        grid = (images.shape[-2] // patch, images.shape[-1] // patch)
        all_patches = vit.add_positions(projected["patches"], grid)
        for row, visible in enumerate(visible_patches(all_patches, patches, keep)):
            hidden = ~visible.reshape(grid).numpy()
            inputs.append(EncoderInput(network=network, pixels=images[row % len(images)], hidden=hidden))
        return ViT.encode(vit, patches, keep, *args, **kwargs)

    vit.project, vit.encode = project, encode  # type: ignore[method-assign]
    try:
        yield
    finally:
        del vit.project, vit.encode


def visible_patches(all_patches: Tensor, encoded: Tensor, keep: Tensor | None) -> Tensor:
    """Mask (R, L) bool of the patches that an encoder sees, True for visible. R is B, or M * B for M masks per image.

    Args:
        all_patches: all patches of the images, with positions, (B, L, D).
        encoded: the patches that the encoder gets, (R, L, D) with mask tokens, or (R, l, D) without hidden patches.
        keep: indices (R, l) of the patches in `encoded` that it keeps; None: all.
    """
    all_patches = all_patches.repeat(len(encoded) // len(all_patches), 1, 1)
    if encoded.shape[1] != all_patches.shape[1]:
        # Hidden patches were removed before. With their positions, patches are unique and can be found by value.
        return (all_patches[:, :, None] == encoded[:, None]).all(dim=-1).any(dim=-1)
    is_unchanged = (all_patches == encoded).all(dim=-1)
    if keep is None:
        return is_unchanged
    is_kept = torch.zeros_like(is_unchanged).scatter_(1, keep, True)
    return is_unchanged & is_kept
