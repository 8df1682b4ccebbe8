"""Supervised training as in DeiT (Touvron et al. 2021), with labels: a baseline for self-supervised encoders.

facebookresearch/deit main.py, without distillation and without its averaged weights, which it does not evaluate. The
classifier is not exported: probes report the accuracy. B images, D width, K classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import log

from torch import Tensor, nn
from torch.nn import functional as F

from checkpoints.spec import ViTSpec
from checkpoints.vit import ViT
from engine.precision import to_float32
from engine.settings import AreaRange, BelowOne, NonNegativeFloat, PositiveInt, UnitInterval, Validated
from engine.training.schedules import TimmCosine
from imagesets.augmentation import check_policy, draw_mix, mix_batch, random_transform, smooth_labels
from pretrain.method import Encoder, Group, Method, Step, decay_groups
from pretrain.parts.heads import class_token
from pretrain.parts.views import ImageViews
from pretrain.parts.weights import truncated_, truncated_vit
from pretrain.recipe import VIT_B, VIT_S, Recipe, on_32px, smoke


@dataclass(frozen=True, kw_only=True)
class Settings(Validated):
    """The defaults are DeiT's for ImageNet (table 9; main.py)."""

    classes: PositiveInt = 1000  # K, number of classes
    policy: str = "rand-m9-mstd0.5-inc1"  # timm's name of a RandAugment policy; "": none
    crop_scale: AreaRange = (0.08, 1.0)  # least and largest share of the image's area in the random crop
    flip: UnitInterval = 0.5  # probability of a horizontal flip
    erase: UnitInterval = 0.25  # probability of random erasing, with noise
    mixup: NonNegativeFloat = 0.8  # alpha of mixup; 0: none. Mixup and CutMix are equally likely if both are on
    cutmix: NonNegativeFloat = 1.0  # alpha of CutMix; 0: none
    smoothing: BelowOne = 0.1  # label smoothing: probability mass spread evenly over all classes
    repeated: PositiveInt = 3  # repeated augmentation: how often an image occurs in an epoch, which has fewer images
    drop_path: BelowOne = 0.1  # drop path rate of the last block; rises linearly from 0 in the first

    def __post_init__(self) -> None:
        super().__post_init__()
        check_policy(self.policy)


class Supervised(Method):
    """Views: "image" (B, 3, S, S), "label" (B,) and, with mixup or CutMix, "mix" (B, 4)."""

    needs_labels = True

    def __init__(self, spec: ViTSpec, settings: Settings) -> None:
        super().__init__(spec, settings)
        if not spec.class_token or spec.family != "vit" or spec.final_norm != "all":
            raise ValueError("the encoder needs class_token=True, final_norm=all, no relative position")
        self.batch_statistics, self.repeats = settings.mixup > 0 or settings.cutmix > 0, settings.repeated
        self.vit = truncated_vit(ViT(spec, settings.drop_path))
        self.head = truncated_(nn.Linear(spec.width, settings.classes))

    def views(self) -> ImageViews:
        settings, preparation = self.settings, self.preparation
        make = random_transform(
            self.spec.side,
            preparation.mean,
            preparation.std,
            policy=settings.policy,
            crop_scale=settings.crop_scale,
            flip=settings.flip,
            erase=settings.erase,
            interpolation="bicubic",
        )
        mixes = settings.mixup or settings.cutmix
        return ImageViews({"image": make}, {"mix": partial(draw_mix, settings.mixup, settings.cutmix)} if mixes else {})

    def forward(self, views: Mapping[str, Tensor]) -> Step:
        images = views["image"]
        targets = smooth_labels(views["label"], self.settings.classes, self.settings.smoothing)  # (B, K)
        if "mix" in views:
            images, targets = mix_batch(images, targets, views["mix"][0])  # the first image's numbers decide for all
        logits = self.head(class_token(self.vit, images))  # (B, K)
        return Step(F.cross_entropy(to_float32(logits), targets), {})

    def baseline_loss(self, views: Mapping[str, Tensor]) -> dict[str, float]:
        """Loss of uniform predictions."""
        return {"loss": log(self.settings.classes)}

    def groups(self) -> list[Group]:
        """Weight decay by timm's rule, and none for class token and positions (no_weight_decay of timm's ViT)."""
        return decay_groups(self.named_parameters(), ("vit.trunk.pos_embed", "vit.trunk.cls_token"))

    def encoders(self) -> dict[str, Encoder]:
        return {"encoder": Encoder(vit=self.vit)}


METHOD = Supervised

_VIT_B = Recipe(
    source="Touvron et al. 2021, table 9; facebookresearch/deit main.py; uses labels",
    spec=VIT_B,
    settings=Settings(),
    epochs=300,
    batch=1024,
    lr=5e-4,
    lr_batch=512,
    schedule=TimmCosine(warmup=5, floor=1e-5, start=1e-6, told="epoch"),
    weight_decay=0.05,
)
# Told by epoch, the first two epochs would have the initial rate.
_SHORT = TimmCosine(warmup=0.5, floor=1e-5, start=1e-4, told="update")
_TINY = dict(architecture="vit_tiny_patch16_224", width=192, heads=3, mlp_hidden=768)
RECIPES = {
    "vit_b": _VIT_B,
    "vit_s": replace(_VIT_B, spec=VIT_S),
    "vit_ti": replace(_VIT_B, spec=replace(VIT_S, **_TINY)),
    "32px": on_32px(
        _VIT_B,
        Settings(
            classes=10, policy="", crop_scale=(0.75, 1.0), erase=0.0, mixup=0.0, cutmix=0.0, repeated=1, drop_path=0.0
        ),
        source="ours: CIFAR-10, few epochs for two cores, so crops and flips alone; uses labels",
        epochs=10,
        schedule=_SHORT,
    ),
    "smoke": smoke(
        _VIT_B,
        Settings(classes=10, crop_scale=(0.6, 1.0), flip=0.0, drop_path=0.0),
        source="ours: seconds on digits; uses labels",
        schedule=_SHORT,
    ),
}
