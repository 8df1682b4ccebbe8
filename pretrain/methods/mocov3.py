"""MoCo-v3 (Chen et al. 2021): each view identifies the other view of its image among those of all images.

Algorithm 1; facebookresearch/moco-v3 c349e6e, moco/builder.py, vits.py, main_moco.py. ViTs alone, not the paper's
ResNets. B images of this process, d projected width.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log

from torch import Tensor, nn

from engine.distributed import current_world
from engine.settings import PositiveFloat
from pretrain.method import Encoder, Group, Step, TrainProgress
from pretrain.parts.heads import mlp
from pretrain.parts.losses import info_nce
from pretrain.parts.siamese import SMALL, SMOKE, Siamese, SiameseSettings, small_siamese_recipes
from pretrain.recipe import SINCOS_ROWS, VIT_B, VIT_S, Recipe
from pretrain.schedules import WarmupCosine

DIRECTIONS = 2  # the loss is the sum over both (builder.py:96)


@dataclass(frozen=True, kw_only=True)
class Settings(SiameseSettings):
    """What MoCo-v3 adds to the settings of both siamese methods."""

    temperature: PositiveFloat = 0.2  # tau of Eq. 1; CONFIG.md, where the parser has 1.0


class MoCoV3(Siamese):
    """Views: "first" and "second" (B, 3, S, S). Accumulation leaves fewer negatives; processes share theirs."""

    def heads(self) -> tuple[nn.Module, nn.Module]:
        """Three and two layers without bias, each followed by a batch norm (builder.py:36-61, 112-122)."""
        hidden, width = self.settings.projector_hidden, self.settings.projector_width
        kind = dict(norm="bn", activation="relu", bias=False, last_norm=True)
        return mlp((self.spec.width, hidden, hidden, width), **kind), mlp((width, hidden, width), **kind)

    def before_forward(self, progress: TrainProgress) -> None:
        """The moving average moves before its pass (builder.py:88-90); all parts of an update see one."""
        if progress.is_first_micro_batch:
            self.follow(progress)

    def forward(self, views: Mapping[str, Tensor]) -> Step:
        q1, q2 = self.predictions(views)
        k1, k2 = self.targets(views)
        return Step(self.contrast(q1, k2) + self.contrast(q2, k1), {})

    def contrast(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Eq. 1 of queries (B, d), whose negatives are the keys of all processes (builder.py:63-73)."""
        return info_nce(queries.unsqueeze(0), keys, self.settings.temperature)

    def baseline_loss(self, views: Mapping[str, Tensor]) -> dict[str, float]:
        """Where all keys are equally likely; with the loss's own factor, see losses.contrastive."""
        images = len(views["first"]) * current_world().size
        return {"loss": DIRECTIONS * 2 * self.settings.temperature * log(images)}

    def groups(self) -> list[Group]:
        """One: biases, norms and the class token decay too (main_moco.py:214-216)."""
        return [Group(parameters={name: p for name, p in self.named_parameters() if p.requires_grad})]

    def encoders(self) -> dict[str, Encoder]:
        return {"base": self.base.encoder(), "momentum": self.momentum.encoder()}


METHOD = MoCoV3

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
    **small_siamese_recipes(_VIT_B, Settings(**SMALL), Settings(**SMOKE)),
}
