"""What MoCo-v3 and BYOL share: two views of an image, a base network, its moving average, and a predictor on the base.

Chen et al. 2021, algorithm 1; Grill et al. 2020, figure 2. A method adds the projector's form, its loss, and when the
average moves. Letters: B images of this process, D width, d projected width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from checkpoints.spec import ViTSpec
from checkpoints.vit import ViT
from engine.settings import AreaRange, PositiveInt, UnitInterval, Validated
from pretrain.method import Encoder, Method, TrainProgress
from pretrain.parts.heads import class_token, projector_tensors
from pretrain.parts.teachers import frozen_copy, move
from pretrain.parts.views import ImageViews, two_views
from pretrain.parts.weights import moco_vit
from pretrain.recipe import Recipe, on_32px, smoke
from pretrain.schedules import cosine

VIEWS = ("first", "second")
# Settings of the recipes for small images, on which blur and solarisation leave little to see: ours.
SMALL = dict(projector_hidden=512, projector_width=128, crop_scale=(0.2, 1.0), blur=(0.0, 0.0), solarise=0.0)
SMOKE = SMALL | dict(projector_hidden=64, projector_width=32)


def small_siamese_recipes(published: Recipe, settings_32px: Any, settings_smoke: Any) -> dict[str, Recipe]:
    """ "32px" and "smoke" of a method, by its published recipe for a ViT-B."""
    source = "ours: the ViT-B recipe on 8 x 8 patches of CIFAR-10, without blur, for two cores"
    return {
        "32px": on_32px(published, source, settings_32px, epochs=6, warmup=0.3),
        "smoke": smoke(published, settings_smoke),
    }


@dataclass(frozen=True, kw_only=True)
class SiameseSettings(Validated):
    """The defaults are MoCo-v3's for ViTs (CONFIG.md, main_moco.py:79-106, 262-285)."""

    projector_hidden: PositiveInt = 4096  # width of the hidden layers of projector and predictor
    projector_width: PositiveInt = 256  # of what they give
    teacher_momentum: UnitInterval = 0.99  # of the moving average, at the start
    teacher_momentum_end: UnitInterval = 1.0  # to which a cosine leads it; the start's for none (without --moco-m-cos)
    freeze_patches: bool = True  # whether the patch embedding keeps its random initial weights
    crop_scale: AreaRange = (0.08, 1.0)  # area of a view, as a share of the image's
    blur: tuple[UnitInterval, UnitInterval] = (1.0, 0.1)  # chance for the first and the second view
    solarise: UnitInterval = 0.2  # chance for the second view


class ProjectedViT(nn.Module):
    """Images (B, 3, H, W) -> projections (B, d) of their class tokens."""

    def __init__(self, vit: ViT, projector: nn.Module) -> None:
        super().__init__()
        self.vit, self.projector = vit, projector

    def forward(self, images: Tensor) -> Tensor:
        return self.projector(class_token(self.vit, images))

    def encoder(self) -> Encoder:
        """For the export, with the projector beside it."""
        return Encoder(vit=self.vit, extra=projector_tensors(self.projector))


class Siamese(Method):
    """Views: "first" and "second" (B, 3, S, S). Each passes alone, so that batch norms see one view at a time."""

    sync_batch_norm = True  # main_moco.py:177
    batch_statistics = True
    min_batch, min_batch_setting = 2, "its batch norms: the method"

    def __init__(self, spec: ViTSpec, settings: SiameseSettings) -> None:
        super().__init__(spec, settings)
        if not spec.class_token or spec.family == "beit" or spec.final_norm != "all":
            raise ValueError("the encoder needs class_token=True, final_norm=all and no relative position")
        projector, self.predictor = self.heads()
        self.base = ProjectedViT(moco_vit(ViT(spec), settings.freeze_patches), projector)
        self.momentum = frozen_copy(self.base)

    def heads(self) -> tuple[nn.Module, nn.Module]:
        """A fresh projector (B, D) -> (B, d) and a fresh predictor (B, d) -> (B, d)."""
        raise NotImplementedError

    def views(self) -> ImageViews:
        settings, size = self.settings, self.spec.side
        return two_views(size, settings.crop_scale, settings.blur, settings.solarise, self.preparation)

    def predictions(self, views: Mapping[str, Tensor]) -> list[Tensor]:
        """(B, d) of each view, by base network and predictor."""
        return [self.predictor(self.base(views[name])) for name in VIEWS]

    @torch.no_grad()
    def targets(self, views: Mapping[str, Tensor]) -> list[Tensor]:
        """(B, d) of each view, by the moving average; its batch norms are those of the batch."""
        return [self.momentum(views[name]) for name in VIEWS]

    def follow(self, progress: TrainProgress) -> None:
        """The moving average follows the base network's parameters, never its batch norms' statistics."""
        s = self.settings
        momentum = cosine(s.teacher_momentum, s.teacher_momentum_end, progress.step / progress.steps)
        move(self.momentum, self.base, momentum)
