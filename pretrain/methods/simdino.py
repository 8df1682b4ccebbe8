"""SimDINO (Wu et al. 2025): DINO without prototypes, centre and temperatures; a coding rate prevents the collapse.

Section 3.1; github.com/RobinWu218/SimDINO 8149fc4, simdino/main_dino.py.
B images, G = 2 global and N local crops, d bottleneck.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from checkpoints.spec import ViTSpec
from pretrain.method import Step
from pretrain.parts.coding_rate import CodingRateSettings, simdino_loss
from pretrain.parts.self_distillation import POSITIONS, SMALL_CROPS, SMOKE_CROPS, TeacherStudent, small_recipes
from pretrain.recipe import VIT_B, VIT_L, Recipe
from pretrain.schedules import CosineTo, TableCosine


class SimDino(TeacherStudent):
    """Views: "global" (B, G, 3, S, S) and, where there are local crops, "local" (B, N, 3, s, s)."""

    remedy = ", or eps lower"

    def __init__(self, spec: ViTSpec, settings: CodingRateSettings) -> None:
        super().__init__(spec, settings)
        self.batch_statistics = True

    def forward(self, views: Mapping[str, Tensor]) -> Step:
        with torch.no_grad():
            targets = self.teacher({"global": views["global"]})["global"]
        vectors = self.student(views)
        return Step(*simdino_loss(vectors["global"], vectors.get("local"), targets, self.settings))


METHOD = SimDino

_VIT_B = Recipe(
    source="SimDINO README.md (ViT-B/16, 8 x 64 images), simdino/main_dino.py",
    spec=replace(VIT_B, **POSITIONS),
    settings=CodingRateSettings(),
    epochs=100,
    batch=512,
    lr=5e-4,
    schedule=TableCosine(warmup=10, floor=1e-6),
    weight_decay=0.04,
    weight_decay_schedule=CosineTo(end=0.4),
    clip=3.0,
    clip_each=True,
)
RECIPES = {
    "vit_b": _VIT_B,
    "vit_l": replace(_VIT_B, source=f"{_VIT_B.source}; its table of results", spec=replace(VIT_L, **POSITIONS)),
    **small_recipes(_VIT_B, CodingRateSettings(**SMALL_CROPS), CodingRateSettings(**SMOKE_CROPS), of="ViT-B"),
}
