"""MoCo-v3 (Chen et al. 2021): each view identifies the other view of its image among those of all images.

Algorithm 1; facebookresearch/moco-v3 c349e6e, moco/builder.py, vits.py, main_moco.py. Only its ViTs, not its ResNets.
`Siamese` is the part that BYOL shares: two views of an image, a base network with a predictor, and its moving average.
B images of this process, D width, d projected width.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log

import torch
from torch import Tensor, nn

from checkpoints.spec import ViTSpec
from checkpoints.vit import ViT
from engine.distributed import current_world
from engine.settings import AreaRange, PositiveFloat, PositiveInt, UnitInterval, Validated
from pretrain.method import Encoder, Group, Method, Step, TrainProgress, check_encoder
from pretrain.parts.heads import class_token, mlp, projector_tensors
from pretrain.parts.losses import info_nce
from pretrain.parts.teachers import ema_update, frozen_copy
from pretrain.parts.views import ImageViews, two_views
from pretrain.parts.weights import moco_vit
from pretrain.recipe import SINCOS_ROWS, VIT_B, VIT_S, Recipe, on_32px, smoke
from pretrain.schedules import WarmupCosine, cosine

VIEWS = ("first", "second")
DIRECTIONS = 2  # the loss is the sum over both (builder.py:96)


@dataclass(frozen=True, kw_only=True)
class SiameseSettings(Validated):
    """The defaults are MoCo-v3's for ViTs (CONFIG.md, main_moco.py:79-106, 262-285)."""

    projector_hidden: PositiveInt = 4096  # width of the hidden layers of projector and predictor
    projector_width: PositiveInt = 256  # output width of projector and predictor
    teacher_momentum: UnitInterval = 0.99  # momentum of the moving average at the start
    # momentum at the end, reached along half a cosine; equal to teacher_momentum: constant (without --moco-m-cos)
    teacher_momentum_end: UnitInterval = 1.0
    freeze_patches: bool = True  # keep the random initial weights of the patch embedding
    crop_scale: AreaRange = (0.08, 1.0)  # least and largest share of the image's area in a view
    blur: tuple[UnitInterval, UnitInterval] = (1.0, 0.1)  # probability of Gaussian blur in the first and second view
    solarise: UnitInterval = 0.2  # probability of solarisation in the second view


class ProjectedViT(nn.Module):
    """Images (B, 3, H, W) -> projections (B, d) of their class tokens."""

    def __init__(self, vit: ViT, projector: nn.Module) -> None:
        super().__init__()
        self.vit, self.projector = vit, projector

    def forward(self, images: Tensor) -> Tensor:
        return self.projector(class_token(self.vit, images))

    def encoder(self) -> Encoder:
        """The encoder to export, with the projector."""
        return Encoder(vit=self.vit, extra=projector_tensors(self.projector))


class Siamese(Method):
    """Base of MoCo-v3 and BYOL. A method adds the heads, its loss, and when the moving average is updated.

    Views: "first" and "second" (B, 3, S, S). Each has a forward pass of its own, so that batch norms see one view at a
    time.
    """

    sync_batch_norm = True  # main_moco.py:177
    batch_statistics = True
    min_batch, min_batch_setting = 2, "its batch norms: the method"

    def __init__(self, spec: ViTSpec, settings: SiameseSettings) -> None:
        super().__init__(spec, settings)
        check_encoder(spec, class_token=True, final_norm="all", relative_position="none")
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
        """Predictions (B, d) of each view: base network and predictor."""
        return [self.predictor(self.base(views[name])) for name in VIEWS]

    @torch.no_grad()
    def targets(self, views: Mapping[str, Tensor]) -> list[Tensor]:
        """Targets (B, d) of each view: the moving average, whose batch norms use the statistics of the batch."""
        return [self.momentum(views[name]) for name in VIEWS]

    def follow(self, progress: TrainProgress) -> None:
        """Move the moving average towards the base network's parameters; statistics of batch norms are not averaged."""
        s = self.settings
        momentum = cosine(s.teacher_momentum, s.teacher_momentum_end, progress.step / progress.steps)
        ema_update(self.momentum, self.base, momentum)


@dataclass(frozen=True, kw_only=True)
class Settings(SiameseSettings):
    """The settings that MoCo-v3 adds to those of both siamese methods."""

    temperature: PositiveFloat = 0.2  # tau of Eq. 1 (CONFIG.md; the parser's default is 1.0)


class MoCoV3(Siamese):
    """Views: "first" and "second" (B, 3, S, S). Processes share their negatives; gradient accumulation leaves fewer."""

    def heads(self) -> tuple[nn.Module, nn.Module]:
        """Three and two layers without bias, each followed by a batch norm (builder.py:36-61, 112-122)."""
        hidden, width = self.settings.projector_hidden, self.settings.projector_width
        kind = dict(norm="bn", activation="relu", bias=False, last_norm=True)
        return mlp((self.spec.width, hidden, hidden, width), **kind), mlp((width, hidden, width), **kind)

    def before_forward(self, progress: TrainProgress) -> None:
        """Update the moving average before its forward pass (builder.py:88-90), once for all micro-batches."""
        if progress.is_first_micro_batch:
            self.follow(progress)

    def forward(self, views: Mapping[str, Tensor]) -> Step:
        q1, q2 = self.predictions(views)  # (B, d) of each view
        k1, k2 = self.targets(views)  # (B, d) of each view
        return Step(self.contrast(q1, k2) + self.contrast(q2, k1), {})

    def contrast(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Eq. 1: queries (B, d) identify their keys (B, d) among those of all processes (builder.py:63-73)."""
        return info_nce(queries.unsqueeze(0), keys, self.settings.temperature)

    def baseline_loss(self, views: Mapping[str, Tensor]) -> dict[str, float]:
        """Loss if all keys are equally likely, with the factor of `losses.contrastive`."""
        images = len(views["first"]) * current_world().size
        return {"loss": DIRECTIONS * 2 * self.settings.temperature * log(images)}

    def groups(self) -> list[Group]:
        """A single group: biases, norms and the class token are decayed too (main_moco.py:214-216)."""
        return [Group(parameters={name: p for name, p in self.named_parameters() if p.requires_grad})]

    def encoders(self) -> dict[str, Encoder]:
        return {"base": self.base.encoder(), "momentum": self.momentum.encoder()}


METHOD = MoCoV3


def small_recipes(published: Recipe) -> dict[str, Recipe]:
    """The recipes "32px" and "smoke" of a method, from its recipe for a ViT-B; ours. Without blur and solarisation,
    which leave little to see of a small image."""
    source = "ours: the ViT-B recipe on CIFAR-10, without blur, for two cores"
    no_blur = dict(crop_scale=(0.2, 1.0), blur=(0.0, 0.0), solarise=0.0)
    settings = replace(published.settings, **no_blur, projector_hidden=512, projector_width=128)
    return {
        "32px": on_32px(published, settings, source=source, epochs=6, warmup=0.3),
        "smoke": smoke(published, replace(settings, projector_hidden=64, projector_width=32)),
    }


_VIT_B = Recipe(
    source="Chen et al. 2021; moco-v3 CONFIG.md (ViT-Base, batch 4096), main_moco.py",
    spec=replace(VIT_B, **SINCOS_ROWS),
    settings=Settings(),
    epochs=300,
    batch=4096,
    lr=1.5e-4,
    schedule=WarmupCosine(warmup=40),
    weight_decay=0.1,
)
_SPEC_S = replace(VIT_S, heads=12, **SINCOS_ROWS)  # twice those of every other ViT-S (vits.py:115-120)
RECIPES = {
    "vit_b": _VIT_B,
    "vit_s": replace(_VIT_B, source="Chen et al. 2021; moco-v3 CONFIG.md (ViT-Small, 4 nodes)", spec=_SPEC_S),
    "vit_s_1024": replace(
        _VIT_B, source="moco-v3 CONFIG.md (ViT-Small, 1 node, for ease of debugging)", spec=_SPEC_S, batch=1024
    ),
    **small_recipes(_VIT_B),
}
