"""Masking: which patches a network sees, in one round of masks or several; and patches of pixels as targets.

Masks derive from uniform noise that accompanies the views: one number in [0, 1) for each patch. Ids are the numbers of
patches in raster order, without the class token. A mask is True for hidden patches.
Letters: B images, V views, L patches of p x p pixels on an h x w grid, l selected patches, D width, P prefix tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from checkpoints.vit import ViT
from engine.errors import option


def visible_count(patches: int, ratio: float) -> int:
    """Number of visible patches at a mask ratio, truncated as in every source."""
    return int(patches * (1 - ratio))


def order_of(noise: Tensor) -> Tensor:
    """Noise (..., L) -> ids (..., L), ascending by noise; the first l of them are a random subset."""
    return noise.argsort(dim=-1)


def take(tokens: Tensor, ids: Tensor) -> Tensor:
    """Select the tokens (B, l, D) at ids (B, l) from tokens (B, L, D)."""
    return tokens.gather(1, ids.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))


def mask_at(ids: Tensor, patches: int) -> Tensor:
    """Ids (B, l) -> mask (B, L) bool, True at the ids. patches: L."""
    mask = torch.zeros(len(ids), patches, dtype=torch.bool, device=ids.device)
    return mask.scatter_(1, ids, True)


def with_mask_tokens(patches: Tensor, mask: Tensor, token: Tensor) -> Tensor:
    """Patches (B, L, D) with the hidden ones, where the mask (B, L) is True, replaced by the mask token (1, 1, D)."""
    return torch.where(mask.unsqueeze(-1), token.to(patches), patches)


def masked_tokens(vit: ViT, images: Tensor, mask: Tensor, token: Tensor) -> Tensor:
    """Images (B, 3, H, W), mask (B, L), mask token (1, 1, D) -> the encoder's tokens after the final norm (B, P+L, D).

    The mask token replaces hidden patches before positions are added.
    """
    patches = with_mask_tokens(vit.project(images), mask, token)
    return vit.encode(vit.add_positions(patches, vit.spec.grid))[0]


def hidden_tokens(vit: ViT, images: Tensor, mask: Tensor, token: Tensor) -> Tensor:
    """`masked_tokens` of the M hidden patches of the whole batch (M, D), image by image.

    Images without hidden patches contribute nothing. Raises ValueError if no image has any: the mean over no patches
    is NaN, and the sources stop too (BEiT engine_for_pretraining.py, data2vec engine_for_cyclical.py).
    """
    if not mask.any():
        raise ValueError(
            f"none of the {len(mask)} images of this forward pass has a hidden patch: set more hidden patches or "
            f"smaller blocks of them, or more images per forward pass (batch, {option('micro_batch')})"
        )
    return masked_tokens(vit, images, mask, token)[:, vit.spec.prefix :][mask]


@dataclass(frozen=True, kw_only=True)
class MaskRounds:
    """MOCA's rounds of masks (section 3.4). Raises ValueError for ratios that leave nothing to see or to predict.

    Attributes:
        patches: L.
        mask_ratios: share of the patches that the encoder does not see, for each round.
        decoder_mask_ratios: share of the patches that is not decoded either (partial decoding), for each round; 0
            decodes all.
        complementary: of two rounds, the second sees only patches that the first neither saw nor predicted, and
            predicts the same patches.
    """

    patches: int
    mask_ratios: tuple[float, ...]
    decoder_mask_ratios: tuple[float, ...]
    complementary: bool

    def __post_init__(self) -> None:
        if not self.mask_ratios or len(self.mask_ratios) != len(self.decoder_mask_ratios):
            raise ValueError(
                f"mask_ratios={self.mask_ratios}, decoder_mask_ratios={self.decoder_mask_ratios}: give both one number "
                "per round"
            )
        for visible, decoded in zip(self.visible, self.decoded, strict=True):
            if not 0 < visible < decoded <= self.patches:
                raise ValueError(
                    f"mask_ratios={self.mask_ratios}, decoder_mask_ratios={self.decoder_mask_ratios}: {visible} of "
                    f"{self.patches} patches would be visible and {decoded} decoded; at least one must be visible, and "
                    "more must be decoded"
                )
        if self.is_paired and self.patches - self.decoded[0] < self.visible[1]:
            raise ValueError(
                f"mask_ratios={self.mask_ratios}: the second round needs {self.visible[1]} patches that the first "
                f"neither sees nor predicts, but there are only {self.patches - self.decoded[0]}; set "
                "complementary=False"
            )

    @property
    def visible(self) -> tuple[int, ...]:
        """Number of patches that the encoder sees, in each round."""
        return tuple(visible_count(self.patches, ratio) for ratio in self.mask_ratios)

    @property
    def decoded(self) -> tuple[int, ...]:
        """Number of patches in the decoder, visible ones included, in each round."""
        return tuple(visible_count(self.patches, ratio) for ratio in self.decoder_mask_ratios)

    @property
    def is_paired(self) -> bool:
        """Whether there are two rounds and the second follows from the first; other rounds are independent."""
        return self.complementary and len(self.mask_ratios) == 2

    @property
    def drawn(self) -> int:
        """Number of rounds that need noise of their own."""
        return 1 if self.is_paired else len(self.mask_ratios)

    def orders(self, noise: Tensor) -> list[Tensor]:
        """Noise (B, drawn, V, L) -> ids (V*B, L) for each round: of visible patches, of those to be predicted, and of
        the others."""
        orders = [order_of(round_noise.transpose(0, 1).flatten(0, 1)) for round_noise in noise.unbind(dim=1)]
        return [*orders, self.complement(orders[0])] if self.is_paired else orders

    def complement(self, order: Tensor) -> Tensor:
        """The first round's ids (V*B, L) -> the second round's (V*B, L).

        Patches that the first round neither saw nor predicted become visible, and the same patches are predicted. If
        rounding gives the rounds different numbers of patches to predict, the second predicts a few more or fewer.
        """
        visible, predicted, unused = order.tensor_split([self.visible[0], self.decoded[0]], dim=1)
        count = self.visible[1]
        return torch.cat([unused[:, :count], predicted, unused[:, count:], visible], dim=1)


def patchify(images: Tensor, patch: int) -> Tensor:
    """Images (B, 3, h*p, w*p) -> patches (B, L, p*p*3), ordered by row in the patch, column and channel (MAE
    models_mae.py:95-107). patch: p."""
    batch, channels, height, width = images.shape
    cells = images.reshape(batch, channels, height // patch, patch, width // patch, patch)
    return cells.permute(0, 2, 4, 3, 5, 1).reshape(batch, -1, patch**2 * channels)


EPS = 1e-6  # added to a patch's variance (MAE models_mae.py:207)


def normalised(patches: Tensor) -> Tensor:
    """Patches (..., 3pp) minus their mean, divided by their standard deviation with n-1 (MAE models_mae.py:204-207)."""
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    return (patches - mean) / (variance + EPS).sqrt()
