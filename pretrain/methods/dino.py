"""DINO (Caron et al. 2021): every crop of an image predicts the teacher's outputs for its two large ones.

Figure 2 and algorithm 1; facebookresearch/dino 7c446df, main_dino.py. Of its ablations squared errors, Sinkhorn-Knopp,
a predictor and a head without bottleneck are not here. B images, G = 2 global and N local crops, K prototypes.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import log

import torch
from torch import Tensor

from pretrain.method import Step
from pretrain.parts.losses import dino_loss
from pretrain.parts.self_distillation import (
    POSITIONS,
    SMALL,
    SMOKE,
    DistillationSettings,
    SelfDistillation,
    small_recipes,
)
from pretrain.parts.teachers import mean_output
from pretrain.recipe import VIT_B, VIT_S, Recipe
from pretrain.schedules import CosineTo, TableCosine


class Dino(SelfDistillation):
    """Views: "global" (B, G, 3, S, S) and, where there are local crops, "local" (B, N, 3, s, s)."""

    def forward(self, views: Mapping[str, Tensor]) -> Step:
        with torch.no_grad():
            outputs = self.teacher({"global": views["global"]})["global"]
            targets = self.targets(outputs)
        logits = self.student(views)
        loss = dino_loss(logits["global"], logits.get("local"), targets, self.settings.student_temperature)
        return Step(loss, {}, {"centre": mean_output(outputs)})

    def baseline_loss(self, views: Mapping[str, Tensor]) -> dict[str, float]:
        """Loss of a student that finds all prototypes equally likely; also that of a collapsed student and teacher."""
        return {"loss": log(self.settings.prototypes)}


METHOD = Dino

_VIT_S = Recipe(
    source="Caron et al. 2021; dino README.md (vanilla run, 8 x 64 images), main_dino.py:42-130",
    spec=replace(VIT_S, **POSITIONS),
    settings=DistillationSettings(),
    epochs=100,
    batch=512,
    lr=5e-4,
    schedule=TableCosine(warmup=10, floor=1e-6),
    weight_decay=0.04,
    weight_decay_schedule=CosineTo(end=0.4),
    clip=3.0,
    clip_each=True,
)
_VIT_B = replace(
    _VIT_S,
    source="dl.fbaipublicfiles.com/dino/dino_vitbase16_pretrain/args.txt, named by dino's README (32 x 32 images)",
    spec=replace(VIT_B, **POSITIONS),
    settings=DistillationSettings(
        teacher_temperature=0.07,
        teacher_warmup=50,
        freeze_prototypes=3,
        global_scale=(0.25, 1.0),
        local_scale=(0.05, 0.25),
        local_crops=10,
    ),
    epochs=400,
    batch=1024,
    lr=7.5e-4,
    schedule=TableCosine(warmup=10, floor=2e-6),
    clip=0.3,
)
RECIPES = {
    "vit_s": _VIT_S,
    "vit_s_300": replace(
        _VIT_S,
        source="dino README.md, 'Boosting DINO performance' (16 x 64 images)",
        settings=DistillationSettings(teacher_temperature=0.07, teacher_warmup=30, fixed_prototypes=False),
        epochs=300,
        batch=1024,
    ),
    "vit_b": _VIT_B,
    "vit_b_two_crops": replace(
        _VIT_B,
        source="MOCA table 5j (400 epochs without multi-crop); ours: else as vit_b",
        settings=replace(_VIT_B.settings, local_crops=0),
    ),
    **small_recipes(_VIT_S, DistillationSettings(**SMALL), DistillationSettings(**SMOKE)),
}
