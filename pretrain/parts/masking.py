"""Patches: which of them a network sees, in one round of masks or several, and their pixels as targets.

Masks come from uniform noise that travels with the views: one number in [0, 1) for each patch. Ids are patch numbers,
row by row, without the class token. A mask is True where a patch is hidden.
Letters: B images, V views, L patches of p x p pixels, l kept patches, M masks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from checkpoints.vit import ViT


def visible_count(patches: int, ratio: float) -> int:
    """How many of `patches` stay visible at a mask ratio: the product as written, cut off, as in every source."""
    return int(patches * (1 - ratio))


def order_of(noise: Tensor) -> Tensor:
    """(..., L) noise -> (..., L) ids, ascending by noise; the first l of them are a random subset."""
    return noise.argsort(dim=-1)


def take(tokens: Tensor, ids: Tensor) -> Tensor:
    """Tokens (B, L, D) at ids (B, l) -> (B, l, D)."""
    return tokens.gather(1, ids.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))


def mask_at(ids: Tensor, patches: int) -> Tensor:
    """(B, l) ids -> (B, L) bool, True at the ids."""
    mask = torch.zeros(len(ids), patches, dtype=torch.bool, device=ids.device)
    return mask.scatter_(1, ids, True)


def with_mask_tokens(patches: Tensor, mask: Tensor, token: Tensor) -> Tensor:
    """Patches (B, L, D) with the mask token (1, 1, D) in place of those that the mask (B, L) hides."""
    return torch.where(mask.unsqueeze(-1), token.to(patches), patches)


def masked_tokens(vit: ViT, images: Tensor, mask: Tensor, token: Tensor) -> Tensor:
    """Images (B, 3, H, W) with the mask token in place of what the mask (B, L) hides, before patches get their
    positions -> the encoder's last, normed tokens (B, P+L, D)."""
    patches = with_mask_tokens(vit.project(images), mask, token)
    return vit.encode(vit.place(patches, vit.spec.grid))[0]


def hidden_tokens(vit: ViT, images: Tensor, mask: Tensor, token: Tensor) -> Tensor:
    """`masked_tokens` of the hidden patches (M, D), image by image; M: of the whole batch.

    ValueError where nothing is hidden: the mean over no patches is NaN, at which the sources stop (BEiT
    engine_for_pretraining.py, data2vec engine_for_cyclical.py). An image without hidden patches counts for nothing.
    """
    if not mask.any():
        raise ValueError(
            f"none of the {len(mask)} images of this forward pass hides a patch: ask for more hidden patches or "
            "smaller blocks of them, or for more images in a pass (batch, --micro-batch)"
        )
    return masked_tokens(vit, images, mask, token)[:, vit.spec.prefix :][mask]


@dataclass(frozen=True, kw_only=True)
class MaskRounds:
    """mask_ratios: share of the patches that the encoder does not see, a number for each round.
    decoder_mask_ratios: share that is not decoded either (partial decoding), 0 to decode all.
    complementary: of two rounds, the second one sees nothing of what the first saw or predicts, and predicts the same.
    """

    patches: int
    mask_ratios: tuple[float, ...]
    decoder_mask_ratios: tuple[float, ...]
    complementary: bool

    def __post_init__(self) -> None:
        if not self.mask_ratios or len(self.mask_ratios) != len(self.decoder_mask_ratios):
            raise ValueError(
                f"mask_ratios={self.mask_ratios}, decoder_mask_ratios={self.decoder_mask_ratios}: give both a number "
                "for each round"
            )
        for visible, decoded in zip(self.visible, self.decoded, strict=True):
            if not 0 < visible < decoded <= self.patches:
                raise ValueError(
                    f"mask_ratios={self.mask_ratios}, decoder_mask_ratios={self.decoder_mask_ratios}: {visible} of "
                    f"{self.patches} patches would be seen and {decoded} decoded; some must be seen, more be decoded"
                )
        if self.is_paired and self.patches - self.decoded[0] < self.visible[1]:
            raise ValueError(
                f"mask_ratios={self.mask_ratios}: the second round needs {self.visible[1]} patches that the first "
                f"neither sees nor predicts, there are {self.patches - self.decoded[0]}; set complementary=False"
            )

    @property
    def visible(self) -> tuple[int, ...]:
        """Patches that the encoder sees, in each round."""
        return tuple(visible_count(self.patches, ratio) for ratio in self.mask_ratios)

    @property
    def decoded(self) -> tuple[int, ...]:
        """Patches in the decoder, the visible ones among them, in each round."""
        return tuple(visible_count(self.patches, ratio) for ratio in self.decoder_mask_ratios)

    @property
    def is_paired(self) -> bool:
        """Whether the second of two rounds follows from the first; three or more are always independent."""
        return self.complementary and len(self.mask_ratios) == 2

    @property
    def drawn(self) -> int:
        """Rounds that need noise of their own."""
        return 1 if self.is_paired else len(self.mask_ratios)

    def orders(self, noise: Tensor) -> list[Tensor]:
        """Noise (B, drawn, V, L) -> for each round ids (V*B, L), the visible first, then those to be predicted."""
        orders = [order_of(drawn.transpose(0, 1).flatten(0, 1)) for drawn in noise.unbind(dim=1)]
        return [*orders, self.complement(orders[0])] if self.is_paired else orders

    def complement(self, order: Tensor) -> Tensor:
        """The second round's order (B, L): `visible` of what the first left out, what it predicted, and the others.

        Where rounding gives the rounds different numbers to predict, the second one's end a little sooner or later.
        """
        seen, predicted, left = order.tensor_split([self.visible[0], self.decoded[0]], dim=1)
        second = self.visible[1]
        return torch.cat([left[:, :second], predicted, left[:, second:], seen], dim=1)


def unpatchify(patches: Tensor, patch: int, grid: tuple[int, int]) -> Tensor:
    """What `patchify` made of images (B, 3, h*p, w*p), back."""
    cells = patches.unflatten(1, grid).unflatten(3, (patch, patch, -1))
    return cells.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


EPS = 1e-6  # of a patch's variance (MAE models_mae.py:207)


def patchify(images: Tensor, patch: int) -> Tensor:
    """(B, 3, h*p, w*p) -> (B, L, p*p*3): row in the patch, column in it, channel (MAE models_mae.py:95-107)."""
    batch, channels, height, width = images.shape
    cells = images.reshape(batch, channels, height // patch, patch, width // patch, patch)
    return cells.permute(0, 2, 4, 3, 5, 1).reshape(batch, -1, patch**2 * channels)


def normalised(patches: Tensor) -> Tensor:
    """Each patch (..., 3pp) less its mean, over its standard deviation, with n-1 (MAE models_mae.py:204-207)."""
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    return (patches - mean) / (variance + EPS).sqrt()


def unnormalised(values: Tensor, patches: Tensor) -> Tensor:
    """Values in the place of `normalised(patches)` (..., 3pp), with the mean and the deviation of these patches."""
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    return values * (variance + EPS).sqrt() + mean
