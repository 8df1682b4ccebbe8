"""BEiT (Bao et al. 2022): mask tokens replace blocks of patches, and the encoder predicts their visual tokens.

Figure 1 and section 2 of the paper; microsoft/unilm 768a3c8, beit/modeling_pretrain.py, engine_for_pretraining.py.
The code's small autoencoder as tokenizer (--discrete_vae_type customized) is not implemented.
B images, L patches, M hidden patches of the whole batch, D width, K codes of the tokenizer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from torch import Tensor, nn
from torch.nn import functional as F

from checkpoints.spec import ViTSpec
from checkpoints.vit import ViT
from engine.precision import to_float32
from engine.settings import (
    AreaRange,
    BelowOne,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ReadIf,
    TwoOrMore,
    Validated,
)
from pretrain.method import Encoder, Group, Step, check_encoder, decay_groups
from pretrain.parts.mask_shapes import BlockMask
from pretrain.parts.masking import hidden_tokens
from pretrain.parts.tokenizers import TokenPrediction
from pretrain.parts.weights import beit_token, beit_vit, cut_truncated_
from pretrain.recipe import RELATIVE, VIT_B, VIT_L, Recipe, on_32px, smoke
from pretrain.schedules import TableCosine


@dataclass(frozen=True, kw_only=True)
class Settings(Validated):
    """The defaults are those of ViT-B (beit/README.md), except for the tokenizer."""

    tokenizer: str = ""  # file of DALL-E's encoder; "": k-means of patches, fitted to the training images
    codes: Annotated[TwoOrMore, ReadIf("tokenizer", "")] = 8192  # number of codes of k-means
    num_mask_patches: int = 75  # most patches hidden in an image
    min_mask_patches_per_block: int = 16  # fewest patches of a hidden rectangle, before its sides are rounded
    max_mask_patches_per_block: PositiveInt = 196  # most patches that one rectangle newly hides
    layer_scale_start: PositiveFloat = 0.1  # initial value of layer scale
    drop_path: BelowOne = 0.1  # drop path rate of the last block
    colour_jitter: NonNegativeFloat = 0.4  # strength of the jitter of brightness, contrast and saturation
    crop_scale: AreaRange = (0.08, 1.0)  # least and largest share of the image's area in the crop


class BeitPretraining(TokenPrediction):
    """Encoder, mask token and token head. Views: those of `TokenPrediction`."""

    batch_statistics = True  # the loss is a mean over all hidden patches, of which images have different numbers

    def __init__(self, spec: ViTSpec, settings: Settings) -> None:
        check_encoder(spec, relative_position="shared")
        draw_mask = BlockMask(
            spec.grid,
            settings.num_mask_patches,
            settings.min_mask_patches_per_block,
            settings.max_mask_patches_per_block,
        )
        super().__init__(spec, settings, draw_mask)
        self.vit = beit_vit(ViT(spec, settings.drop_path), settings.layer_scale_start)
        self.mask_token = beit_token(spec.width)
        self.lm_head = cut_truncated_(nn.Linear(spec.width, self.tokenizer.codes))

    def forward(self, views: Mapping[str, Tensor]) -> Step:
        mask = views["mask"].bool()
        tokens = self.tokenizer(views["picture"])[mask]  # (M,)
        logits = self.predict(views["image"], mask)  # (M, K)
        is_correct = (logits.detach().argmax(dim=1) == tokens).to(logits.dtype)
        return Step(F.cross_entropy(logits, tokens), {"token_accuracy": is_correct.mean()})

    def predict(self, images: Tensor, mask: Tensor) -> Tensor:
        """Images (B, 3, H, W), mask (B, L) -> logits of the hidden patches' tokens (M, K)."""
        return to_float32(self.lm_head(hidden_tokens(self.vit, images, mask, self.mask_token)))

    def baseline_loss(self, views: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": self.baseline_loss_of_tokens(views)}

    def groups(self) -> list[Group]:
        undecayed = ["vit.trunk.cls_token", "vit.trunk.pos_embed"]  # modeling_pretrain.py:97; the mask token is decayed
        return decay_groups(self.named_parameters(), undecayed)

    def encoders(self) -> dict[str, Encoder]:
        return {"encoder": Encoder(vit=self.vit)}


METHOD = BeitPretraining

_VIT_B = Recipe(
    source="Bao et al. 2022, section 3 and table 8; unilm 768a3c8, beit/README.md (16 x 128 images); its tokenizer is "
    "DALL-E's, --set tokenizer=encoder.pkl",
    spec=replace(VIT_B, **RELATIVE),
    settings=Settings(),
    epochs=800,
    batch=2048,
    lr=1.5e-3,
    lr_batch=0,
    schedule=TableCosine(warmup=10, floor=1e-5),
    weight_decay=0.05,
    clip=3.0,
)
RECIPES = {
    "vit_b": _VIT_B,
    "vit_l": replace(
        _VIT_B,
        source="Bao et al. 2022, table 12 (clipping at 1.0, layer scale 1e-5); else as vit_b",
        spec=replace(VIT_L, **RELATIVE),
        settings=Settings(layer_scale_start=1e-5),
        clip=1.0,
    ),
    "32px": on_32px(
        _VIT_B,
        Settings(codes=512, num_mask_patches=25, min_mask_patches_per_block=5, drop_path=0.0, crop_scale=(0.4, 1.0)),
        epochs=12,
        lr=2e-3,
    ),
    "smoke": smoke(
        _VIT_B,
        Settings(codes=64, num_mask_patches=6, min_mask_patches_per_block=2, drop_path=0.0, crop_scale=(0.6, 1.0)),
    ),
}
