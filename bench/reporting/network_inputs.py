"""What the networks of a pretraining method are given: their images, and which patches of these are hidden.

It is read off the method's own forward pass, so it holds for any method. A patch is hidden where an encoder gets none
for it, or another one than its projection (a mask token, say). L patches, D width.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import default_collate

from checkpoints.spec import Preparation
from checkpoints.vit import ViT
from engine.seeding import AUGMENT, DROP, seeded
from pretrain.method import Method

GREY = 127  # of hidden patches


@dataclass(frozen=True, kw_only=True, eq=False)
class GivenView:
    """One image as one network gets it. pixels (3, H, W), normalised; hidden (h, w) bool."""

    network: str  # "student", which learns by gradients, or "teacher"
    pixels: Tensor
    hidden: np.ndarray

    def same_as(self, other: "GivenView") -> bool:
        """Whether both show the same."""
        same = self.pixels.shape == other.pixels.shape and torch.equal(self.pixels, other.pixels)
        return same and self.network == other.network and np.array_equal(self.hidden, other.hidden)


def method_views(method: Method, image: Image.Image, *seeds: int) -> dict[str, Tensor]:
    """The method's views of one image, drawn by the seeds: a batch of as many copies as a forward pass needs."""
    with seeded(AUGMENT, *seeds):
        views = default_collate([method.views()(image)] * method.min_batch)
    return views | ({"label": torch.zeros(method.min_batch, dtype=torch.int64)} if method.needs_labels else {})


@torch.no_grad()
def given_views(method: Method, views: Mapping[str, Tensor]) -> list[GivenView]:
    """What a forward pass on the views of one image gives to encoders, each once, in the order of the pass."""
    found: list[GivenView] = []
    with ExitStack() as held:
        for module in method.modules():
            if isinstance(module, ViT):
                held.enter_context(_recorded(module, found))
        held.enter_context(seeded(DROP, 0))
        method.eval()(views)  # batch norms of one image have no statistics
    return [view for place, view in enumerate(found) if not any(view.same_as(other) for other in found[:place])]


@contextmanager
def _recorded(vit: ViT, found: list[GivenView]) -> Iterator[None]:
    """A block in which all that `vit` encodes goes to `found`."""
    network = "student" if any(parameter.requires_grad for parameter in vit.parameters()) else "teacher"
    entered: dict[str, Any] = {}

    def project(images: Tensor) -> Tensor:
        entered["images"], entered["patches"] = images, ViT.project(vit, images)
        return entered["patches"]

    def encode(patches: Tensor, keep: Tensor | None = None, *more: Any, **besides: Any) -> list[Tensor]:
        images, patch = entered["images"], vit.spec.patch_size
        grid = (images.shape[-2] // patch, images.shape[-1] // patch)
        whole = vit.place(entered["patches"], grid)
        for row, seen in enumerate(visible_patches(whole, patches, keep)):
            hidden = ~seen.reshape(grid).numpy()
            found.append(GivenView(network=network, pixels=images[row % len(images)], hidden=hidden))
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


def as_image(pixels: Tensor, preparation: Preparation, hidden: np.ndarray | None = None) -> np.ndarray:
    """Normalised pixels (3, H, W) -> colours (H, W, 3) uint8, grey where patches (h, w) are hidden."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (preparation.mean, preparation.std))
    colours = (pixels.detach().float().cpu() * std + mean).clamp(0, 1).mul(255).round().to(torch.uint8)
    found = colours.permute(1, 2, 0).numpy().copy()
    if hidden is not None:
        side = found.shape[0] // hidden.shape[0]
        found[np.kron(hidden, np.ones((side, side), bool))] = GREY
    return found
