"""Several rounds of masks over the same views: which patches a student sees in each, and which its decoder predicts.

MOCA section 3.4; valeoai/MOCA models_moca.py:405-409, util/misc.py:391-444. V views, B images, L patches.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pretrain.parts.masking import kept, order_of


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
        return tuple(kept(self.patches, ratio) for ratio in self.mask_ratios)

    @property
    def decoded(self) -> tuple[int, ...]:
        """Patches in the decoder, the visible ones among them, in each round."""
        return tuple(kept(self.patches, ratio) for ratio in self.decoder_mask_ratios)

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
        orders = [order_of(each.transpose(0, 1).flatten(0, 1)) for each in noise.unbind(dim=1)]
        return [*orders, self.complement(orders[0])] if self.is_paired else orders

    def complement(self, order: Tensor) -> Tensor:
        """The second round's order (B, L): `visible` of what the first left out, what it predicted, and the others.

        Where rounding gives the rounds different numbers to predict, the second one's end a little sooner or later.
        """
        seen, predicted, left = order.tensor_split([self.visible[0], self.decoded[0]], dim=1)
        second = self.visible[1]
        return torch.cat([left[:, :second], predicted, left[:, second:], seen], dim=1)
