"""ExtreMA (Wu et al. 2022): from a fifth of the patches, predict the teacher's representation of the whole image.

Section 3; microsoft/ExtreMA bf30b64, lib/builder.py:75-186, vits.py. The prediction goes one way only: the student
never sees whole images, the teacher never masked ones.
B images, L patches, M masks, k patches that a mask keeps, D width, d projected width.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import log
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torchvision import transforms

from checkpoints.spec import ViTSpec
from checkpoints.vit import ViT
from engine.distributed import current_world
from engine.precision import l2_normalize
from engine.settings import AreaRange, BelowOne, PositiveFloat, PositiveInt, ReadIf, UnitInterval, Validated
from pretrain.method import Encoder, Group, Method, Step, TrainProgress, Views, decay_groups
from pretrain.parts.colours import Colours
from pretrain.parts.heads import mlp
from pretrain.parts.losses import byol_loss, direction_baseline, info_nce
from pretrain.parts.masking import order_of, take, visible_count
from pretrain.parts.teachers import ema_update, frozen_copy
from pretrain.parts.views import ImageViews, crop, view
from pretrain.parts.weights import xavier_, xavier_vit
from pretrain.recipe import SINCOS, VIT_B, VIT_S, Recipe, on_32px, smoke
from pretrain.schedules import CosineTo, WarmupCosine

Sharing = Literal["none", "shared", "independent"]

# The three designs of the instance representation (appendix A), as fields of the encoder's spec. The paper recommends
# the first, and the code has no other. Inferred for the others: the class token has no position embedding, and the
# average is normalised after the mean.
CLASS_ATTENTION = dict(class_token=False, class_position=False, class_attention=2, final_norm="class", **SINCOS)
CLASS_TOKEN = CLASS_ATTENTION | dict(class_attention=0, class_token=True, final_norm="all")
AVERAGE = CLASS_ATTENTION | dict(class_attention=0, final_norm="pooled", pool="avg")


@dataclass(frozen=True, kw_only=True)
class Settings(Validated):
    """`crop` and `colour` are the two factors of table 4, each shared by student and teacher, independent, or none."""

    mask_ratio: BelowOne = 0.8  # share of patches that a mask hides (table 1)
    masks: PositiveInt = 5  # number of masks of an image (tables 2, 3)
    replacement: bool = False  # draw masks with replacement; false: the visible patches of two masks are disjoint
    loss: Literal["byol", "infonce"] = "byol"  # loss between prediction and target (table 6)
    # temperature of InfoNCE, whose negatives are the other images of a forward pass; gradient accumulation leaves fewer
    temperature: Annotated[PositiveFloat, ReadIf("loss", "infonce")] = 0.2
    # random crop and flip: shared by student and teacher, independent, or none (a centre crop) (table 4)
    crop: Sharing = "shared"
    # colour augmentation: shared by student and teacher, independent, or none (table 4)
    colour: Sharing = "independent"
    # least and largest share of the image's area in the random crop
    crop_scale: Annotated[AreaRange, ReadIf("crop", "shared", "independent")] = (0.2, 1.0)
    projector_hidden: PositiveInt = 4096  # hidden width of projector and predictor
    projector_width: PositiveInt = 256  # output width of projector and predictor
    teacher_momentum: UnitInterval = 0.996  # EMA momentum of the teacher at the start; 1 at the end
    drop_path: BelowOne = 0.1  # drop path rate of the student's last block

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.crop == "independent" and self.colour == "shared":
            raise ValueError(
                "colour='shared' with crop='independent': independent crops cannot share their colours; set "
                "colour='independent' or crop='shared'"
            )


class Network(nn.Module):
    """Encoder and projector, of the online and of the momentum network."""

    def __init__(self, spec: ViTSpec, settings: Settings) -> None:
        super().__init__()
        hidden, width = settings.projector_hidden, settings.projector_width
        self.vit = xavier_vit(ViT(spec, settings.drop_path))
        self.projector = xavier_(mlp((spec.width, hidden, hidden, width), norm="ln"))

    def forward(self, patches: Tensor) -> Tensor:
        """Patches with their positions (B, l, D), all of an image's or some -> projected instance representation
        (B, d)."""
        tokens = self.vit.encode(patches, norm=False)[0]  # (B, P+l, D)
        return self.projector(self.instance(tokens))

    def instance(self, tokens: Tensor) -> Tensor:
        """Encoder tokens before the final norm (B, P+l, D) -> instance representation after it (B, D)."""
        spec, trunk = self.vit.spec, self.vit.trunk
        if spec.class_attention or spec.class_token:
            return trunk.norm(tokens[:, 0])  # of the class token alone (vits.py:309-312)
        return trunk.fc_norm(tokens[:, spec.prefix :].mean(dim=1))

    def embed_patches(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) -> patches with their positions (B, L, D)."""
        return self.vit.add_positions(self.vit.project(images), self.vit.spec.grid)

    def encoder(self) -> Encoder:
        """The encoder to export, with the projector under the importer's names."""
        return Encoder(vit=self.vit, extra=self.projector.state_dict(prefix="projector."))


class Extrema(Method):
    """Views: "student" and, if it differs, "teacher" (B, 3, H, W); "noise" (B, 1 or M, L)."""

    def __init__(self, spec: ViTSpec, settings: Settings) -> None:
        super().__init__(spec, settings)
        check_design(spec)
        self.batch_statistics = settings.loss == "infonce"  # its negatives; processes share them
        self.remedy = ", or use loss=infonce, whose targets do not collapse" if settings.loss == "byol" else ""
        self.patches = spec.grid[0] * spec.grid[1]
        self.keep = keep_of(settings, self.patches)
        self.online = Network(spec, settings)
        self.momentum = frozen_copy(self.online)
        width = settings.projector_width
        self.predictor = xavier_(mlp((width, settings.projector_hidden, width), norm="ln"))
        self.teacher_momentum = CosineTo(end=1.0)

    def views(self) -> Views:
        settings, size = self.settings, self.spec.side
        geometry = crop(size, settings.crop_scale, "bilinear")
        if settings.crop == "none":
            geometry = [transforms.Resize(round(size / self.preparation.crop)), transforms.CenterCrop(size)]
        colours = [] if settings.colour == "none" else [Colours()]
        noise = partial(torch.rand, settings.masks if settings.replacement else 1, self.patches)

        # Steps that student and teacher share come first, then those of each.
        shared: list[Any] = []
        independent: list[Any] = []
        (independent if settings.crop == "independent" else shared).extend(geometry)
        (independent if settings.colour == "independent" else shared).extend(colours)
        if not independent:
            return ImageViews({"student": view(shared, self.preparation)}, {"noise": noise})
        own_view = view(independent, self.preparation)
        views = ImageViews({"student": own_view, "teacher": own_view}, {"noise": noise})
        return transforms.Compose([*shared, views]) if shared else views

    def before_forward(self, progress: TrainProgress) -> None:
        """Update the momentum network before its forward pass (builder.py:146-172), once for all micro-batches."""
        if progress.is_first_micro_batch:
            ema_update(self.momentum, self.online, self.teacher_momentum.at(self.settings.teacher_momentum, progress))

    def forward(self, views: Mapping[str, Tensor]) -> Step:
        student_images, teacher_images = views["student"], views.get("teacher", views["student"])
        predictions = self.encode_masked(student_images, views["noise"])  # q (M, B, d), one for each mask
        targets = self.teacher_targets(teacher_images)  # k (B, d)
        return Step(self.loss(predictions, targets), {"spread": spread(targets)})

    def encode_masked(self, images: Tensor, noise: Tensor) -> Tensor:
        """Images (B, 3, H, W), noise (B, 1 or M, L) -> predictions q (M, B, d), for all masks in one pass."""
        visible_ids = visible(noise, self.settings.masks, self.keep)  # (B, M, k)
        patches = take(self.online.embed_patches(images), visible_ids.flatten(1))  # (B, M*k, D)
        by_mask = patches.unflatten(1, (self.settings.masks, self.keep)).transpose(0, 1)  # (M, B, k, D)
        projections = self.online(by_mask.flatten(0, 1))  # (M*B, d)
        return self.predictor(projections).unflatten(0, by_mask.shape[:2])

    @torch.no_grad()
    def teacher_targets(self, images: Tensor) -> Tensor:
        """Whole images (B, 3, H, W) -> the momentum network's projections k (B, d)."""
        return self.momentum(self.momentum.embed_patches(images))

    def loss(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Predictions q (M, B, d), targets k (B, d) -> mean loss over masks and images (builder.py:81-98, 174-186)."""
        if self.settings.loss == "byol":
            return byol_loss(predictions, targets)
        return info_nce(predictions, targets, self.settings.temperature)

    def baseline_loss(self, views: Mapping[str, Tensor]) -> dict[str, Tensor | float]:
        if self.settings.loss == "byol":
            return {"loss": direction_baseline(self.teacher_targets(views.get("teacher", views["student"])))}
        images = len(views["student"]) * current_world().size
        return {"loss": 2 * self.settings.temperature * log(images)}  # with the factor of `losses.contrastive`

    def groups(self) -> list[Group]:
        """Like `decay_groups`, and the class token has no weight decay either (main.py:225-226)."""
        tokens = ("online.vit.class_query", "online.vit.trunk.cls_token")
        return decay_groups(self.named_parameters(), undecayed=tokens)

    def encoders(self) -> dict[str, Encoder]:
        return {"momentum": self.momentum.encoder(), "online": self.online.encoder()}


def visible(noise: Tensor, masks: int, keep: int) -> Tensor:
    """Noise (B, 1 or M, L) -> ids of the patches that each mask keeps (B, M, k), ascending by noise.

    A single draw is divided among the masks, so that their visible patches are disjoint (builder.py:116-144);
    otherwise there is one draw per mask.
    """
    order = order_of(noise)
    masks_of_draw = masks // order.shape[1]
    return order[..., : masks_of_draw * keep].reshape(len(order), masks, keep)


def keep_of(settings: Settings, patches: int) -> int:
    """k, the number of patches that a mask keeps. Raises ValueError if it is 0, or if M disjoint masks would need more
    than the image's `patches`."""
    keep = visible_count(patches, settings.mask_ratio)
    if not keep:
        raise ValueError(f"mask_ratio={settings.mask_ratio} leaves none of {patches} patches; lower it")
    if settings.masks * keep > patches and not settings.replacement:
        raise ValueError(
            f"masks={settings.masks} of {keep} patches each are more than the image's {patches}; use masks="
            f"{patches // keep}, raise mask_ratio={settings.mask_ratio} or set replacement=true"
        )
    return keep


def check_design(spec: ViTSpec) -> None:
    """Raise ValueError if the encoder has none of the three designs."""
    design = CLASS_ATTENTION if spec.class_attention else CLASS_TOKEN if spec.class_token else AVERAGE
    for name in ("position", "class_position", "final_norm"):
        if getattr(spec, name) != design[name]:
            raise ValueError(
                f"{name}={getattr(spec, name)!r} does not fit class_attention={spec.class_attention} with class_token="
                f"{spec.class_token}; set {name}={design[name]}"
            )


def spread(targets: Tensor) -> Tensor:
    """Standard deviation of the normalised targets (B, d), times sqrt(d): 0 if they have collapsed to one direction,
    near 1 if their directions are uniform."""
    return l2_normalize(targets).std(dim=0, correction=0).mean() * targets.shape[1] ** 0.5


METHOD = Extrema

_VIT_B = Recipe(
    source="Wu et al. 2022, section 5.1, table 7: 80 % x 5, shared crop + colour; betas, warm-up and drop path: README",
    spec=replace(VIT_B, **CLASS_ATTENTION),
    settings=Settings(),
    epochs=300,
    batch=2048,
    lr=1.5e-4,
    schedule=WarmupCosine(warmup=40),
    weight_decay=0.1,
    betas=(0.9, 0.95),
)
_VIT_S = replace(
    _VIT_B,
    source="Wu et al. 2022, section 5.1, table 7; ours: the numbers of the README's ViT-B for ViT-S",
    spec=replace(VIT_S, **CLASS_ATTENTION),
)
_22K = dict(
    source="Wu et al. 2022, section 5.1, table 7: ImageNet-22k, same updates; ours: warm-up, ViT-B's numbers for ViT-S",
    epochs=30,
    schedule=WarmupCosine(warmup=4),
)
_FIGURE_5 = dict(
    source="Wu et al. 2022, figure 5; ours: details of the design, which is not in the code",
    settings=Settings(mask_ratio=0.9, masks=8, colour="none"),
)
_ABLATION = replace(
    _VIT_B,
    source="Wu et al. 2022, section 5.1: only crop and flip, shared by both branches; 80 % x 2 (tables 4 to 6)",
    settings=Settings(masks=2, colour="none"),
)
RECIPES = {
    "vit_b": _VIT_B,
    "vit_s": _VIT_S,
    "vit_b_ablation": _ABLATION,
    "vit_b_ablation_600": replace(
        _ABLATION,
        source="Wu et al. 2022, table 12: one mask, 600 epochs; 80 %, 75 % and 90 % by mask_ratio; else section 5.1",
        settings=Settings(masks=1, colour="none"),
        epochs=600,
    ),
    "vit_b_22k": replace(_VIT_B, **_22K),
    "vit_b_22k_ablation": replace(
        _ABLATION,
        source="Wu et al. 2022, table 3 (90 % x 10, fewer by masks) and section 5.1; ours: warm-up",
        settings=Settings(mask_ratio=0.9, masks=10, colour="none"),
        epochs=30,
        schedule=_22K["schedule"],
    ),
    "vit_s_22k": replace(_VIT_S, **_22K),
    "vit_s_class_token": replace(_VIT_S, spec=replace(VIT_S, **CLASS_TOKEN), **_FIGURE_5),
    "vit_s_average": replace(_VIT_S, spec=replace(VIT_S, **AVERAGE), **_FIGURE_5),
    "32px": on_32px(
        _VIT_B,
        Settings(
            masks=2,
            loss="infonce",
            crop_scale=(0.4, 1.0),
            projector_hidden=512,
            projector_width=128,
            teacher_momentum=0.98,
            drop_path=0.0,
        ),
        source="ours: images of 32 px, 2 masks, for two cores; InfoNCE, as BYOL's targets collapse in few updates",
        epochs=2,
        warmup=0.2,
    ),
    "smoke": smoke(
        _VIT_B,
        Settings(projector_hidden=128, projector_width=32, crop_scale=(0.6, 1.0), drop_path=0.0),
        lr=2.5e-4,
    ),
}
