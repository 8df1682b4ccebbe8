"""A small recipe for DINO and methods based on it."""

from dataclasses import replace

from pretrain.methods.dino import POSITIONS, DistillationSettings
from pretrain.recipe import VIT_SMOKE, Recipe
from pretrain.schedules import Constant, CosineTo

SPEC = replace(VIT_SMOKE, image_size=32, patch_size=8, width=32, depth=2, mlp_hidden=128, **POSITIONS)
SIZES = dict(prototypes=48, head_hidden=64, bottleneck=16, local_size=16, local_crops=3, drop_path=0.0)
TEACHER = dict(teacher_momentum=0.9, teacher_temperature=0.07, teacher_temperature_start=0.04, teacher_warmup=3)


def recipe(settings: type[DistillationSettings], **changes) -> Recipe:
    """A recipe of a short training with settings of this type."""
    return Recipe(
        source="ours",
        spec=SPEC,
        settings=settings(**SIZES | TEACHER | changes),
        epochs=6,
        batch=128,
        lr=0.002,
        lr_batch=0,
        schedule=Constant(),
        weight_decay=0.04,
        weight_decay_schedule=CosineTo(end=0.4),
        clip=0.3,
        clip_each=True,
    )
