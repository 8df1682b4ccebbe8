"""What BEiT and CAE share: images, pictures of them for a tokenizer, masks of blocks, tokens as targets.

B images, L patches, each of which has a token.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from PIL import Image
from torch import Tensor
from torchvision import transforms
from torchvision.transforms.functional import to_tensor

from checkpoints.spec import Preparation, ViTSpec
from pretrain.method import Method, Views
from pretrain.parts import trivial
from pretrain.parts.mask_shapes import BlockMask
from pretrain.parts.tokenizers import SIDE, tokenizer_of
from pretrain.parts.views import Tensors, Transform, TwoSizes, even_jitter


class TokenSettings(Protocol):
    """Those of every method that predicts tokens."""

    tokenizer: str
    codes: int
    colour_jitter: float
    crop_scale: tuple[float, float]


class TokenPrediction(Method):
    """Views: "image" (B, 3, H, W); "picture" (B, 3, 8 h, 8 w) for the tokenizer; "mask" (B, L), True where hidden."""

    def __init__(self, spec: ViTSpec, settings: TokenSettings, draw_mask: BlockMask) -> None:
        super().__init__(spec, settings)
        self.draw_mask = draw_mask
        self.tokenizer = tokenizer_of(settings.tokenizer, settings.codes, spec.grid)
        self.fitted_on = self.tokenizer.fitted_on

    def views(self) -> Views:
        s = self.settings
        return tokenized_view(self.spec, self.preparation, s.crop_scale, s.colour_jitter, self.draw_mask)

    def fit(self, views: Iterable[Mapping[str, Tensor]]) -> None:
        self.tokenizer.fit(batch["picture"] for batch in views)

    def facts(self) -> dict[str, str]:
        return {"tokenizer": self.tokenizer.label}

    def trivial_tokens(self, views: Mapping[str, Tensor]) -> Tensor:
        """The cross-entropy of a prediction that is the same for all patches."""
        return trivial.of_tokens(self.tokenizer(views["picture"]), self.tokenizer.codes)


@dataclass(frozen=True)
class TokenizedView:
    """RGB image -> "image" (3, S, S), normalised; "picture", the same part of it for the tokenizer; "mask" (L,)."""

    steps: tuple[Transform, ...]  # before the crop
    crop: TwoSizes
    tensors: Tensors
    draw_mask: BlockMask

    def __call__(self, image: Image.Image) -> dict[str, Tensor]:
        for step in self.steps:
            image = step(image)
        first, second = self.crop(image)
        return {"image": self.tensors(first), "picture": to_tensor(second), "mask": self.draw_mask()}


def tokenized_view(
    spec: ViTSpec, preparation: Preparation, scale: tuple[float, float], jitter: float, draw_mask: BlockMask
) -> Views:
    """Colours with strength `jitter`, a flip and a crop, of which `scale` is the area (BEiT datasets.py, CAE
    furnace/datasets.py)."""
    steps = [*even_jitter(jitter), transforms.RandomHorizontalFlip()]
    crop = TwoSizes(spec.side, spec.grid[0] * SIDE, scale)
    return TokenizedView(tuple(steps), crop, Tensors(preparation), draw_mask)
