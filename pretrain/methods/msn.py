"""MSN (Assran et al. 2022): masked and small views predict which prototypes a whole view is close to.

Figure 3 and Eq. 1; facebookresearch/msn 4388dc1, src/msn_train.py, src/losses.py, src/deit.py. The official code sums
the prototypes' gradient over processes; here it is the mean, like all others, which AdamW's normalisation makes almost
the same. Of its options, smoothed labels, frozen prototypes, a prediction head and convolutional stems are not
implemented.
B images, R random and F focal anchor views, V = R + F, L patches, l visible ones, d projected width, K prototypes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import log
from typing import Annotated

import torch
from torch import Tensor, nn

from checkpoints.spec import ViTSpec
from checkpoints.vit import ViT
from engine.precision import l2_normalize
from engine.settings import (
    AreaRange,
    BelowOne,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ReadIf,
    UnitInterval,
    Validated,
)
from pretrain.method import Encoder, Group, Method, Step, TrainProgress, decay_groups
from pretrain.methods.dino import check_crops
from pretrain.parts.colours import Colours
from pretrain.parts.heads import Norm, class_token, mlp, projector_tensors
from pretrain.parts.losses import mean_entropy_loss
from pretrain.parts.masking import order_of, visible_count
from pretrain.parts.teachers import ema_update, frozen_copy, sinkhorn
from pretrain.parts.views import ImageViews, Several, crop, view
from pretrain.parts.weights import msn_vit, truncated_
from pretrain.recipe import VIT_B, VIT_L, VIT_S, Recipe, on_32px, smoke
from pretrain.schedules import CosineTo, CountedCosine

POSITIONS = dict(position="learned", position_resize="bicubic")
STRETCH = 1.25  # length of every schedule, as a multiple of the training's (src/msn_train.py:252-259, 518-561)
JITTER = (0.8, 0.8, 0.8, 0.2)  # brightness, contrast, saturation, hue at strength 1 (src/data_manager.py:64-140)


@dataclass(frozen=True, kw_only=True)
class Settings(Validated):
    """The defaults are those of configs/pretrain/msn_vits16.yaml."""

    prototypes: PositiveInt = 1024  # K, number of prototypes
    head_hidden: PositiveInt = 2048  # width of the projection head's two hidden layers
    head_width: PositiveInt = 256  # width of projections and prototypes (output_dim)
    head_norm: Norm = "bn"  # norm after the projection head's hidden layers
    mask_ratio: BelowOne = 0.15  # share of patches hidden in random views (patch_drop)
    # hide the same patches in all images of a forward pass, as in the code; false: different ones in each image
    shared_mask: Annotated[bool, ReadIf("mask_ratio")] = True
    random_views: PositiveInt = 1  # masked anchor views of an image, of the encoder's image size
    focal_views: NonNegativeInt = 10  # small anchor views of an image, without mask
    focal_size: Annotated[PositiveInt, ReadIf("focal_views")] = 96  # side of a focal view, in pixels
    random_scale: AreaRange = (0.3, 1.0)  # least and largest share of the image's area in a random or target view
    # least and largest share of the image's area in a focal view
    focal_scale: Annotated[AreaRange, ReadIf("focal_views")] = (0.05, 0.3)
    colour_strength: NonNegativeFloat = 0.5  # strength of the colour jitter (color_jitter_strength)
    blur: UnitInterval = 0.5  # probability of Gaussian blur
    temperature: PositiveFloat = 0.1  # tau, temperature of the anchors' predictions
    sharpening: PositiveFloat = 0.25  # T at the start: targets are p^(1/T); the paper's tau+ is tau T
    sharpening_end: PositiveFloat = 0.25  # T at the end; it changes linearly
    sinkhorn: bool = True  # balance the targets over the prototypes by Sinkhorn-Knopp
    memax_weight: NonNegativeFloat = 1.0  # lambda of Eq. 1, weight of the entropy of the mean prediction
    entropy_weight: NonNegativeFloat = 0.0  # weight of the mean entropy of the predictions
    teacher_momentum: UnitInterval = 0.996  # EMA momentum of the target network at the start; rises linearly towards 1
    drop_path: BelowOne = 0.0  # drop path rate of the anchor encoder's last block


class SiameseNetwork(nn.Module):
    """Encoder and projection head, of the anchor and of the target network."""

    def __init__(self, spec: ViTSpec, settings: Settings) -> None:
        super().__init__()
        hidden = settings.head_hidden
        self.vit = msn_vit(ViT(spec, settings.drop_path))
        self.head = truncated_(mlp((spec.width, hidden, hidden, settings.head_width), norm=settings.head_norm))

    def forward(self, images: Tensor, keep: Tensor | None = None) -> Tensor:
        """Images (n, 3, S, S), ids of the visible patches (n, l) or None for all -> projected class tokens (n, d).

        All images of one size go through together, so that the head's batch norms see them all (src/deit.py, forward).
        """
        return self.head(class_token(self.vit, images, keep))

    def encoder(self) -> Encoder:
        """The encoder to export, with the head under the importer's names."""
        return Encoder(vit=self.vit, extra=projector_tensors(self.head))


class Msn(Method):
    """Views: "target" (B, 3, S, S), "random" (B, R, 3, S, S), "focal" (B, F, 3, s, s) if there are focal views, and
    "noise" (B, R, L) for the masks of random views."""

    batch_statistics = True  # me-max and Sinkhorn-Knopp depend on all images of a forward pass
    sync_batch_norm = True  # src/msn_train.py
    remedy = ", or memax_weight higher"

    def __init__(self, spec: ViTSpec, settings: Settings) -> None:
        super().__init__(spec, settings)
        check_crops(spec, focal_size=settings.focal_size if settings.focal_views else spec.side)
        if settings.focal_views and settings.focal_size == spec.side:
            raise ValueError(
                f"focal_size={settings.focal_size}: must differ from image_size, which is the size of random views"
            )
        self.patches = spec.grid[0] * spec.grid[1]
        if not visible_count(self.patches, settings.mask_ratio):
            raise ValueError(f"mask_ratio={settings.mask_ratio} leaves none of {self.patches} patches; lower it")
        if settings.head_norm == "bn":
            self.min_batch, self.min_batch_setting = 2, "head_norm=bn"
        self.anchor = SiameseNetwork(spec, settings)
        self.target = frozen_copy(self.anchor)
        bound = settings.head_width**-0.5
        self.prototypes = nn.Parameter(torch.empty(settings.prototypes, settings.head_width).uniform_(-bound, bound))
        self.sharpening = settings.sharpening

    def views(self) -> ImageViews:
        """Target, random and focal views (src/data_manager.py:64-140); probabilities that are not settings are the
        defaults of Colours."""
        s = self.settings
        jitter = tuple(s.colour_strength * strength for strength in JITTER)
        colours = Colours(jitter=jitter, blur=s.blur)
        large = view([*crop(self.spec.side, s.random_scale, "bilinear"), colours], self.preparation)
        small = view([*crop(s.focal_size, s.focal_scale, "bilinear"), colours], self.preparation)
        views_by_name = {"target": large, "random": Several([large] * s.random_views)}
        views_by_name |= {"focal": Several([small] * s.focal_views)} if s.focal_views else {}
        return ImageViews(views_by_name, {"noise": partial(torch.rand, s.random_views, self.patches)})

    def before_forward(self, progress: TrainProgress) -> None:
        """Set the sharpening T, which changes linearly."""
        s = self.settings
        self.sharpening = s.sharpening + (s.sharpening_end - s.sharpening) * progress.step / (STRETCH * progress.steps)

    def forward(self, views: Mapping[str, Tensor]) -> Step:
        s = self.settings
        anchors = self.anchor_vectors(views)  # z (B, V, d)
        log_p = self.similarities(anchors).log_softmax(dim=-1)  # (B, V, K)
        targets = self.targets(views["target"])  # p+ (B, K)
        p = log_p.exp()

        cross_entropy = -(targets * log_p.mean(dim=1)).sum(dim=-1).mean()
        memax = mean_entropy_loss(p)
        entropy = -(p * log_p).sum(dim=-1).mean()
        loss = torch.stack([cross_entropy, s.memax_weight * memax, s.entropy_weight * entropy]).sum()  # Eq. 1
        logs = {"ce": cross_entropy.detach(), "memax": memax.detach(), "entropy": entropy.detach()}
        return Step(loss, logs | {"prototypes_used": prototypes_used(targets)})

    def anchor_vectors(self, views: Mapping[str, Tensor]) -> Tensor:
        """The anchors' projections z (B, V, d): those of the masked random views, then those of the focal views."""
        random_views, visible_ids = views["random"], self.visible_ids(views["noise"])
        vectors = [self.anchor(random_views.flatten(0, 1), visible_ids).unflatten(0, random_views.shape[:2])]
        if "focal" in views:
            focal_views = views["focal"]
            vectors.append(self.anchor(focal_views.flatten(0, 1)).unflatten(0, focal_views.shape[:2]))
        return torch.cat(vectors, dim=1)

    def visible_ids(self, noise: Tensor) -> Tensor | None:
        """Noise (B, R, L) -> ids of the visible patches (B*R, l), in random order, or None if all are visible
        (src/deit.py:213-255)."""
        if not self.settings.mask_ratio:
            return None
        ids = order_of(noise.flatten(0, 1))[:, : visible_count(self.patches, self.settings.mask_ratio)]
        return ids[:1].expand(len(ids), -1) if self.settings.shared_mask else ids

    def similarities(self, vectors: Tensor) -> Tensor:
        """Projections (..., d) -> cosine similarities to the prototypes divided by tau (..., K), in float32 or higher
        precision."""
        with torch.autocast(vectors.device.type, enabled=False):
            return l2_normalize(vectors) @ l2_normalize(self.prototypes).T / self.settings.temperature

    @torch.no_grad()
    def targets(self, images: Tensor) -> Tensor:
        """Target views (B, 3, S, S) -> the probabilities p+ of the prototypes (B, K) that the anchors predict."""
        similarities = self.similarities(self.target(images))  # (B, K)
        targets = (similarities / self.sharpening).softmax(dim=-1)  # p^(1/T), normalised
        return sinkhorn(targets) if self.settings.sinkhorn else targets

    def baseline_loss(self, views: Mapping[str, Tensor]) -> dict[str, float]:
        """Cross-entropy of uniform predictions. Me-max, which rewards a uniform mean prediction, does not rule them
        out."""
        return {"ce": log(self.settings.prototypes)}

    def groups(self) -> list[Group]:
        """The prototypes are neither decayed nor clipped (src/msn_train.py:327-377, 518-561)."""
        prototypes = Group(parameters={"prototypes": self.prototypes}, weight_decay=0.0, clipped=False)
        network = [(name, parameter) for name, parameter in self.named_parameters() if name != "prototypes"]
        return [*decay_groups(network), prototypes]

    def after_update(self, progress: TrainProgress) -> None:
        ema_update(self.target, self.anchor, self.momentum(progress))

    def momentum(self, progress: TrainProgress) -> float:
        """EMA momentum of the target encoder in this update."""
        start = self.settings.teacher_momentum
        return start + (1.0 - start) * progress.step / (STRETCH * progress.steps)

    def encoders(self) -> dict[str, Encoder]:
        return {"target": self.target.encoder(), "anchor": self.anchor.encoder()}


def prototypes_used(targets: Tensor) -> Tensor:
    """Number of prototypes that are the most likely one of at least one image. targets: (B, K)."""
    return targets.new_zeros(targets.shape[1]).index_fill_(0, targets.argmax(dim=1), 1.0).sum()


METHOD = Msn

_VIT_S = Recipe(
    source="Assran et al. 2022, appendix A.1; msn configs/pretrain/msn_vits16.yaml (16 x 64 images)",
    spec=replace(VIT_S, **POSITIONS),
    settings=Settings(),
    epochs=800,
    batch=1024,
    lr=1e-3,
    lr_batch=0,
    schedule=CountedCosine(warmup=15, start=0.2, floor=1e-6, stretch=STRETCH),
    weight_decay=0.04,
    weight_decay_schedule=CosineTo(end=0.4, stretch=STRETCH, first=1),
    clip=3.0,
)


def _larger(spec: ViTSpec, epochs: int, source: str, **changes) -> Recipe:
    """The recipe of an encoder larger than ViT-S. changes: of the settings."""
    return replace(
        _VIT_S,
        source=f"Assran et al. 2022, appendix A.1 (masks), {source}; else as ViT-S",
        spec=replace(spec, **POSITIONS),
        settings=replace(_VIT_S.settings, **changes),
        epochs=epochs,
    )


_SMALL = dict(head_norm="bn", blur=0.0, random_scale=(0.2, 1.0), focal_views=2, teacher_momentum=0.99)
RECIPES = {
    "vit_s": _VIT_S,
    "vit_s_no_sinkhorn": replace(
        _VIT_S,
        source="Assran et al. 2022, table 11, the best row: no Sinkhorn, me-max of weight 5",
        settings=Settings(sinkhorn=False, memax_weight=5.0),
    ),
    "vit_b": _larger(VIT_B, 600, "table 1", mask_ratio=0.3),
    "vit_b8": _larger(replace(VIT_B, patch_size=8), 600, "table 1", mask_ratio=0.3),
    "vit_b4": _larger(replace(VIT_B, patch_size=4), 300, "table 1", mask_ratio=0.7),
    "vit_l": _larger(VIT_L, 600, "table 8, the best mask; epochs: the released checkpoint's name", mask_ratio=0.5),
    "vit_l7": _larger(
        replace(VIT_L, patch_size=7), 200, "table 1; ours: focal_size, a multiple of 7", mask_ratio=0.7, focal_size=98
    ),
    "32px": on_32px(
        _VIT_S,
        Settings(**_SMALL, prototypes=256, head_hidden=256, head_width=64, focal_size=16),
        source="ours: the ViT-S recipe on CIFAR-10 with two focal views of 16 px, for two cores",
        epochs=6,
        batch=64,
        schedule=CountedCosine(warmup=0.3, start=0.2, floor=1e-6),
    ),
    "smoke": smoke(
        _VIT_S,
        Settings(**_SMALL, prototypes=64, head_hidden=64, head_width=32, focal_size=8, shared_mask=False),
        source="ours: seconds on digits; each image loses patches of its own",
        schedule=CountedCosine(warmup=0.5, start=0.2, floor=1e-6),
    ),
}
