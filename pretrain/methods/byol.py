"""BYOL (Grill et al. 2020) on a ViT: each view predicts the target network's projection of the other.

Figure 2 and Eq. 2; deepmind-research d8df415, byol/, which is in JAX and has only ResNets. So heads, loss and moving
average are BYOL's, and everything specific to ViTs is MoCo-v3's: trunk, frozen patch embedding, views, AdamW. There are
no recorded outputs of official code to compare with. B images, d projected width.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from engine.settings import UnitInterval
from pretrain.method import Encoder, Step, TrainProgress
from pretrain.methods.mocov3 import RECIPES as MOCOV3
from pretrain.methods.mocov3 import Siamese, SiameseSettings, small_recipes
from pretrain.parts.batch_norm import in_eval_mode
from pretrain.parts.heads import mlp
from pretrain.parts.losses import byol_loss, direction_baseline
from pretrain.recipe import SINCOS_ROWS, VIT_S


@dataclass(frozen=True, kw_only=True)
class Settings(SiameseSettings):
    """The settings that BYOL adds to those of both siamese methods."""

    teacher_momentum: UnitInterval = (
        0.996  # tau, EMA momentum of the target network at the start (section 3.2: for 1000 epochs)
    )


class Byol(Siamese):
    """Views: "first" and "second" (B, 3, S, S). The online network is `base`, the target network `momentum`."""

    remedy = ", or use mocov3, whose targets do not collapse"

    def heads(self) -> tuple[nn.Module, nn.Module]:
        """Two layers each, the second without bias (utils/networks.py:25-50)."""
        hidden, width = self.settings.projector_hidden, self.settings.projector_width
        kind = dict(norm="bn", activation="relu", last_bias=False)
        return mlp((self.spec.width, hidden, width), **kind), mlp((width, hidden, width), **kind)

    def forward(self, views: Mapping[str, Tensor]) -> Step:
        p1, p2 = self.predictions(views)  # (B, d) of each view
        z1, z2 = self.targets(views)  # (B, d) of each view
        return Step(byol_loss(p1, z2) + byol_loss(p2, z1), {})  # both directions (byol_experiment.py:243-250)

    def after_update(self, progress: TrainProgress) -> None:
        """Move the target network towards the online network's new weights (byol_experiment.py:337-343)."""
        self.follow(progress)

    @torch.no_grad()
    def baseline_loss(self, views: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Loss of predicting the mean direction of the targets, computed with running statistics in batch norms."""
        with in_eval_mode(self.momentum):
            return {"loss": torch.stack([direction_baseline(targets) for targets in self.targets(views)]).sum()}

    def encoders(self) -> dict[str, Encoder]:
        return {"online": self.base.encoder(), "target": self.momentum.encoder()}


METHOD = Byol

_OURS = (
    "ours: Grill et al. 2020 (heads, loss; tau 0.99 for 300 epochs, configs/byol.py:23) with MoCo-v3's ViT recipe "
    "(CONFIG.md); no official ViT exists"
)
# Biases and norms have no weight decay, as in BYOL's own code (utils/optimizers.py:30-35).
_VIT_B = replace(MOCOV3["vit_b"], source=_OURS, settings=Settings(teacher_momentum=0.99))
RECIPES = {
    "vit_b": _VIT_B,
    "vit_s": replace(_VIT_B, spec=replace(VIT_S, heads=12, **SINCOS_ROWS)),  # MoCo-v3's ViT-S
    **small_recipes(_VIT_B),
}
