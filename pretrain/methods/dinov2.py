"""DINOv2 (Oquab et al. 2024): DINO and iBOT on the same crops, KoLeo on class tokens; DINOv3's Gram anchoring.

Section 4; facebookresearch/dinov2 b8931f7, train/ssl_meta_arch.py, data/collate.py, layers/block.py,
utils/param_groups.py. The official code draws masks for all crops of a batch together; here they are drawn for the
crops of one image, one of which is masked. The shares of masked crops and patches stay the same, and the loader can
draw the masks. Gram anchoring (Simeoni et al. 2025, section 4) is written from the paper. Not implemented: a head with
batch norms for patches, training without separate weights for local crops, and the distillation of the smaller models.
`MaskedDistillation` is the part that SimDINOv2 shares.

B images, G = 2 global and N local crops of side S and s, L patches, m masked ones of all crops, D width, K prototypes.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import log
from typing import Annotated, Literal

import numpy as np
import torch
from msgspec import Meta
from PIL import Image
from timm.layers import DropPath
from timm.models.eva import EvaBlock
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms import Compose

from checkpoints.spec import ViTSpec
from checkpoints.vit import ViT
from engine.precision import to_float32
from engine.settings import (
    AreaRange,
    BelowOne,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ReadIf,
    UnitInterval,
    ascending,
)
from pretrain.method import Group, Step, TrainProgress, Views
from pretrain.methods.dino import (
    GLOBAL_CROPS,
    SMALL,
    SMOKE,
    DistillationSettings,
    MultiCropSettings,
    SelfDistillation,
    TeacherStudent,
    TeacherWarmup,
    check_crops,
    small_recipes,
)
from pretrain.parts.heads import PrototypeHead
from pretrain.parts.losses import Negatives, dino_loss, gram_loss, in_chunks, koleo_loss, masked_patch_loss
from pretrain.parts.mask_shapes import stratified_masks
from pretrain.parts.masking import masked_tokens
from pretrain.parts.teachers import Centre, Temperature, frozen_copy, mean_output, sinkhorn_targets
from pretrain.parts.views import ImageViews, Tensors, Transform, crop, view
from pretrain.parts.weights import dinov2_vit
from pretrain.recipe import VIT_B, VIT_L, VIT_S, Begins, Recipe, Rises
from pretrain.schedules import CosineTo, TableCosine, ramp

MaskRange = Annotated[
    tuple[Fraction, Fraction], Meta(description="two shares of the patches, the smaller one first"), ascending
]
UNDECAYED = re.compile(r"\.bias$|norm|gamma")  # param_groups.py:76-84: tokens and positions are decayed


@dataclass(frozen=True, kw_only=True)
class MaskedSettings(MultiCropSettings):
    """The defaults are those of configs/ssl_default_config.yaml."""

    cls_weight: NonNegativeFloat = 1.0  # weight of the class tokens' loss
    patch_weight: Annotated[NonNegativeFloat, ReadIf("masked_crops")] = 1.0  # weight of the masked patches' loss
    koleo_weight: NonNegativeFloat = 0.1  # weight of KoLeo on the student's class tokens of global crops
    masked_crops: Literal[0, 1, 2] = 1  # how many of an image's two global crops are masked
    # least and largest share of a masked crop's patches that is hidden
    mask_ratio: Annotated[MaskRange, ReadIf("masked_crops")] = (0.1, 0.5)
    # images with KoLeo's neighbours among them, as a GPU's in the source; 0: all
    koleo_images: Annotated[NonNegativeInt, ReadIf("koleo_weight")] = 0
    patch_lr: NonNegativeFloat = 0.2  # factor on the learning rate of the patch embedding
    layer_scale_init: NonNegativeFloat = 1e-5  # initial value of layer scale, if the encoder has it
    teacher_momentum: UnitInterval = 0.992
    global_scale: AreaRange = (0.32, 1.0)
    local_scale: Annotated[AreaRange, ReadIf("local_crops")] = (0.05, 0.32)
    drop_path: BelowOne = 0.3  # drop path rate of the student's last block
    # drop_path in all blocks; false: rates rise linearly from 0 in the first block
    drop_path_uniform: Annotated[bool, ReadIf("drop_path")] = True
    separate_head: bool = False  # masked patches have their own head; false: they share that of the class tokens
    patch_head_layers: Annotated[PositiveInt, ReadIf("separate_head")] = 3  # linear layers of the patch head's MLP
    patch_head_hidden: Annotated[PositiveInt, ReadIf("separate_head")] = 2048  # hidden width of the patch head's MLP
    # width of the patch head's output, before its prototypes
    patch_bottleneck: Annotated[PositiveInt, ReadIf("separate_head")] = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cls_weight == self.patch_weight == 0:
            raise ValueError("cls_weight=0 with patch_weight=0: nothing is left to learn")
        if self.koleo_images == 1:
            raise ValueError("koleo_images=1: an image has no neighbour among one; give 0, or 2 or more")


class MaskedDistillation(TeacherStudent):
    """Base of DINOv2 and SimDINOv2: a student that sees masked global crops and whole local ones.

    Views: "global" (B, G, 3, S, S), "local" (B, N, 3, s, s) and "mask" (B, G, L) bool, True for patches hidden from the
    student.
    """

    min_batch_setting = "koleo_weight"
    zero_lr_epochs = 0  # of the prototypes

    def __init__(self, spec: ViTSpec, settings: MaskedSettings) -> None:
        super().__init__(spec, settings)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, spec.width))
        if settings.koleo_weight:
            self.batch_statistics, self.min_batch = True, 2
            self.chunks = {"koleo_images": settings.koleo_images}
        if settings.separate_head:
            self.student.patch_head = self.new_patch_head()
            self.teacher.patch_head = frozen_copy(self.student.patch_head)

    def new_vit(self) -> ViT:
        s = self.settings
        vit = dinov2_vit(ViT(self.spec), s.layer_scale_init)
        first = s.drop_path if s.drop_path_uniform else 0.0
        return drop_subsets_(vit, np.linspace(first, s.drop_path, self.spec.depth))

    def new_patch_head(self) -> PrototypeHead:
        """The student's separate head for masked patches; in this base class without prototypes."""
        s = self.settings
        return self.head_of(s.patch_head_layers, s.patch_head_hidden, s.patch_bottleneck)

    def views(self) -> Views:
        s = self.settings
        draw = partial(stratified_masks, GLOBAL_CROPS, s.masked_crops, s.mask_ratio, self.spec.grid)
        return replace(super().views(), samplers={"mask": draw})

    def student_tokens(self, views: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None, Tensor]:
        """The student's tokens after the final norm.

        Returns:
            Class tokens of the masked global crops (B, G, D), class tokens of the local crops (B, N, D) or None, and
            patch tokens of the masked global crops (B, G, L, D).
        """
        crops, masks = views["global"], views["mask"]
        tokens = masked_tokens(self.student.vit, crops.flatten(0, 1), masks.flatten(0, 1), self.mask_token)
        tokens = tokens.unflatten(0, crops.shape[:2])
        local = self.student.class_tokens(views["local"]) if "local" in views else None
        return tokens[:, :, 0], local, tokens[:, :, self.spec.prefix :]

    @torch.no_grad()
    def teacher_tokens(self, crops: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
        """Global crops (B, G, 3, S, S), which the teacher sees whole, and masks (B, G, L) -> its class tokens (B, G, D)
        and its tokens of the masked patches (m, D)."""
        tokens = self.teacher.vit(crops.flatten(0, 1))[0].unflatten(0, crops.shape[:2])
        return tokens[:, :, 0], tokens[:, :, self.spec.prefix :][masks]

    def koleo(self, cls_tokens: Tensor) -> Tensor:
        """Sum over the global crops of KoLeo on their class tokens (B, G, D); zero without `koleo_weight`."""
        if not self.settings.koleo_weight:
            return cls_tokens.new_zeros(())
        chunks = in_chunks(cls_tokens, self.settings.koleo_images, "koleo_images")  # (C, G, n, D)
        return torch.stack([koleo_loss(tokens) for tokens in chunks.flatten(0, 1)]).sum() / len(chunks)

    def observe(self, observed: Mapping[str, Tensor], progress: TrainProgress) -> None:
        """Also set the gradients of the registers' rows of the position table to zero: registers have no positions."""
        super().observe(observed, progress)
        table = self.student.vit.trunk.pos_embed
        if table is not None and table.grad is not None and self.spec.class_position:
            table.grad[:, 1 : self.spec.prefix] = 0.0

    def groups(self) -> list[Group]:
        """Groups by learning rate, weight decay, and the part whose gradients are clipped together: encoder, head,
        patch head."""
        s = self.settings
        groups: dict[tuple, dict[str, nn.Parameter]] = defaultdict(dict)
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                part = name.split(".")[1] if name.startswith("student.") else "vit"
                lr_scale = s.patch_lr if ".patch_embed." in name else 1.0
                zero_lr_epochs = self.zero_lr_epochs if ".last_layer." in name else 0
                weight_decay = 0.0 if UNDECAYED.search(name) else None
                groups[lr_scale, weight_decay, zero_lr_epochs, part][name] = parameter
        return [
            Group(
                parameters=parameters,
                weight_decay=weight_decay,
                lr_scale=lr_scale,
                zero_lr_epochs=zero_lr_epochs,
                clipped_with=part,
            )
            for (lr_scale, weight_decay, zero_lr_epochs, part), parameters in groups.items()
        ]


def patch_head(branch: nn.Module) -> PrototypeHead:
    """The head of a branch for masked patches: its separate patch head, or without one the head of class tokens."""
    return getattr(branch, "patch_head", branch.head)


class SubsetDropPath(DropPath):
    """Stochastic depth that computes a residual branch only for the images that keep it (layers/block.py:173-260)."""

    def add(self, tokens: Tensor, branch: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
        """Add the branch's output, divided by the share of the images that keep it, to the tokens (B, N, D) of a random
        share 1 - drop_prob of the images.

        arguments: further arguments of the branch (B, ...), subsetted like the tokens.
        """
        if not self.drop_prob or not self.training:
            return tokens + branch(tokens, *arguments)
        images = len(tokens)
        count = max(int(images * (1 - self.drop_prob)), 1)
        subset = torch.randperm(images)[:count].to(tokens.device)  # drawn on the CPU: the same images on any device
        residuals = branch(tokens[subset], *(argument[subset] for argument in arguments)).to(tokens.dtype)
        return tokens.index_add(0, subset, residuals, alpha=images / len(subset))


class SubsetBlock(Block):
    """timm's block with `SubsetDropPath`."""

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = self.drop_path1.add(tokens, lambda subset: self.ls1(self.attn(self.norm1(subset))))
        return self.drop_path2.add(tokens, lambda subset: self.ls2(self.mlp(self.norm2(subset))))


class SubsetEvaBlock(EvaBlock):
    """timm's block for rotary positions with `SubsetDropPath`. rope: (L, 2d) for all images, or (B, 1, L, 2d)."""

    def forward(self, tokens: Tensor, rope: Tensor | None = None) -> Tensor:
        def scaled(values: Tensor, gamma: Tensor | None) -> Tensor:
            return values if gamma is None else gamma * values

        def attention(subset: Tensor, subset_rope: Tensor | None = rope) -> Tensor:
            return scaled(self.attn(self.norm1(subset), rope=subset_rope), self.gamma_1)

        tokens = self.drop_path1.add(tokens, attention, *([rope] if rope is not None and rope.ndim == 4 else []))
        return self.drop_path2.add(tokens, lambda subset: scaled(self.mlp(self.norm2(subset)), self.gamma_2))


def drop_subsets_(vit: ViT, rates: Sequence[float]) -> ViT:
    """Give every block of `vit`, in place, a `SubsetDropPath` with its own rate."""
    kinds = {Block: SubsetBlock, EvaBlock: SubsetEvaBlock}
    for block, rate in zip(vit.trunk.blocks, rates, strict=True):
        if type(block) not in kinds:
            raise ValueError(f"the encoder's blocks are timm's {type(block).__name__}: they must be Block or EvaBlock")
        block.__class__ = kinds[type(block)]
        block.drop_path1, block.drop_path2 = SubsetDropPath(rate), SubsetDropPath(rate)
    return vit


WITH_GRAM = ReadIf("gram_weight")
GramStart = Annotated[NonNegativeInt, Begins("Gram anchoring would never begin"), WITH_GRAM]
GramRise = Annotated[NonNegativeFloat, Rises("the weight of Gram anchoring"), WITH_GRAM]


@dataclass(frozen=True, kw_only=True)
class Settings(MaskedSettings, DistillationSettings):
    """The defaults are those of configs/ssl_default_config.yaml, which is vitl16_short."""

    fixed_prototypes: bool = False  # the prototypes keep unit length
    teacher_temperature: PositiveFloat = 0.07
    teacher_warmup: TeacherWarmup = 30  # epochs over which the teacher's temperature rises, with every update
    center: Annotated[bool, ReadIf("sinkhorn", False)] = True
    center_momentum: Annotated[UnitInterval, ReadIf("center"), ReadIf("sinkhorn", False)] = 0.9
    sinkhorn: bool = False  # targets by Sinkhorn-Knopp over all processes; false: by centring and a softmax
    # number of prototypes of a separate patch head
    patch_prototypes: Annotated[PositiveInt, ReadIf("separate_head")] = 131072
    gram_weight: NonNegativeFloat = 0.0  # final weight of Gram anchoring; 0: none (DINOv3: 2.0)
    gram_start: GramStart = 1  # epochs before Gram anchoring begins with a first copy of the teacher
    gram_rise: GramRise = 0.0  # epochs over which the weight rises to gram_weight
    # epochs from one copy of the teacher to the next
    gram_refresh: Annotated[PositiveInt, WITH_GRAM, ReadIf("gram_copies")] = 1
    # number of copies made during training; 0: the moving teacher itself is used
    gram_copies: Annotated[NonNegativeInt, WITH_GRAM] = 3
    # side in pixels of the Gram teacher's crops; 0: it sees the global crops
    gram_size: Annotated[NonNegativeInt, WITH_GRAM] = 0
    # negative similarities in the Gram matrices: keep them, set them to 0 (drop), or only the teacher's (drop_teacher)
    gram_negatives: Annotated[Negatives, WITH_GRAM] = "keep"


class DinoV2(MaskedDistillation, SelfDistillation):
    """Views: "global" (B, G, 3, S, S), "local" (B, N, 3, s, s), "mask" (B, G, L) bool, True for hidden patches; with
    `gram_size` also "gram" (B, G, 3, S', S')."""

    sync_batch_norm = False  # processes do not share images in KoLeo either

    def __init__(self, spec: ViTSpec, settings: Settings) -> None:
        super().__init__(spec, settings)
        self.batch_statistics |= settings.sinkhorn  # it balances prototypes over the images of a forward pass
        self.zero_lr_epochs = settings.freeze_prototypes
        uses_centre = settings.center and not settings.sinkhorn
        self.centre.enabled = uses_centre
        patch_prototypes = settings.patch_prototypes if settings.separate_head else settings.prototypes
        self.patch_centre = Centre(patch_prototypes, settings.center_momentum, uses_centre)
        if settings.gram_weight:
            if settings.gram_size:
                check_crops(spec, gram_size=settings.gram_size)
            self.gram_teacher = frozen_copy(self.teacher.vit) if settings.gram_copies else None
        self.gram_weight = 0.0  # in the current update, see `before_forward`

    def new_patch_head(self) -> PrototypeHead:
        s = self.settings
        sizes = (s.patch_head_layers, s.patch_head_hidden, s.patch_bottleneck)
        return self.head_of(*sizes, s.patch_prototypes, s.fixed_prototypes)

    def views(self) -> "ImageViews | GramCrops":
        s, dinov2_views = self.settings, super().views()
        if not (s.gram_weight and s.gram_size):
            return dinov2_views
        colours = tuple(view([colours], self.preparation) for colours in self.global_colours())
        geometry = Compose(crop(max(s.gram_size, self.spec.side), s.global_scale))
        return GramCrops(dinov2_views, geometry, colours, Tensors(self.preparation), s.gram_size, self.spec.side)

    def before_forward(self, progress: TrainProgress) -> None:
        """Set the teacher's temperature and the weight of Gram anchoring, both of which change with every update."""
        s = self.settings
        updates = s.teacher_warmup * progress.steps_per_epoch
        temperatures = Temperature(start=s.teacher_temperature_start, end=s.teacher_temperature, warmup=updates)
        self.teacher_temperature = temperatures.at(progress.step)
        start, rise = s.gram_start * progress.steps_per_epoch, int(s.gram_rise * progress.steps_per_epoch)
        self.gram_weight = ramp(progress.step, start=0, peak=0, end=s.gram_weight, warmup=start, cosine_steps=rise)

    def forward(self, views: Mapping[str, Tensor]) -> Step:
        s, masks, student = self.settings, views["mask"], self.student
        # Targets: the teacher sees the global crops whole. Predictions: the student sees them masked, and local crops.
        cls_targets, patch_targets, observed = self.teacher_targets(views["global"], masks)  # (B, G, K), (m, K)
        cls_tokens, local_cls_tokens, patch_tokens = self.student_tokens(views)

        # DINO: class tokens of all crops predict those of the global crops.
        local_logits = None if local_cls_tokens is None else student.head(local_cls_tokens)  # (B, N, K)
        cls_logits = student.head(cls_tokens)  # (B, G, K)
        cls_loss = dino_loss(cls_logits, local_logits, cls_targets, s.student_temperature)

        # iBOT: masked patches predict the teacher's outputs for the same patches.
        patch_logits = patch_head(student)(patch_tokens[masks])  # (m, K)
        patch_loss = masked_patch_loss(patch_logits, patch_targets, masks, s.student_temperature)

        koleo = self.koleo(cls_tokens)
        loss = s.cls_weight * cls_loss + s.patch_weight * patch_loss + s.koleo_weight * koleo
        logs = {"cls": cls_loss.detach(), "patch": patch_loss.detach(), "koleo": koleo.detach()}
        if s.gram_weight:
            gram = gram_loss(patch_tokens.flatten(0, 1), self.gram_targets(views), s.gram_negatives)
            loss = loss + self.gram_weight * gram
            logs["gram"] = gram.detach()
        return Step(loss, logs, observed)

    @torch.no_grad()
    def gram_targets(self, views: Mapping[str, Tensor]) -> Tensor:
        """The Gram teacher's patch tokens (B*G, L, D), resized to the student's grid."""
        crops = views.get("gram", views["global"]).flatten(0, 1)
        vit = self.teacher.vit if self.gram_teacher is None else self.gram_teacher
        grid = (crops.shape[-2] // self.spec.patch_size, crops.shape[-1] // self.spec.patch_size)
        patch_tokens = vit(crops)[0][:, self.spec.prefix :]
        return resized_tokens(patch_tokens, grid, self.spec.grid)

    @torch.no_grad()
    def teacher_targets(self, crops: Tensor, masks: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Global crops (B, G, 3, S, S), which the teacher sees whole, and masks (B, G, L) -> target probabilities of
        the class tokens (B, G, K) and of the masked patches (m, K), and name -> the mean logits (K,) towards which the
        centre of that name moves."""
        cls_tokens, patch_tokens = self.teacher_tokens(crops, masks)
        cls_logits, patch_logits = self.teacher.head(cls_tokens), patch_head(self.teacher)(patch_tokens)
        if self.settings.sinkhorn:
            cls_targets = sinkhorn_targets(cls_logits, self.teacher_temperature)
            patch_targets = sinkhorn_targets(patch_logits, self.teacher_temperature)
            return cls_targets, patch_targets, {}
        # A forward pass without masked patches does not move the patches' centre.
        patch_mean = mean_output(patch_logits) if len(patch_logits) else self.patch_centre.center
        observed = {"centre": mean_output(cls_logits), "patch_centre": patch_mean}
        patch_targets = self.patch_centre.soften(patch_logits, self.teacher_temperature)
        return self.targets(cls_logits), patch_targets, observed

    def before_update(self, progress: TrainProgress) -> None:
        """Keep the gradients of frozen prototypes, unlike DINO: a learning rate of 0 freezes them, and their gradients
        still count in the clipping and in the optimiser's moments."""

    def after_update(self, progress: TrainProgress) -> None:
        """Move centres and teacher; copy the teacher to the Gram teacher if due."""
        super().after_update(progress)
        s = self.settings
        if s.gram_weight and s.gram_copies:
            updates = progress.step + 1 - s.gram_start * progress.steps_per_epoch  # since Gram anchoring began
            epochs, updates_of_epoch = divmod(updates, progress.steps_per_epoch)
            copy_number, epochs_since_copy = divmod(epochs, s.gram_refresh)
            is_due = updates_of_epoch == 0 and epochs_since_copy == 0 and 0 <= copy_number < s.gram_copies
            if is_due:
                self.gram_teacher.load_state_dict(self.teacher.vit.state_dict())

    def baseline_loss(self, views: Mapping[str, Tensor]) -> dict[str, float]:
        """Losses of uniform predictions; crops without a mask count as 0 in the patch loss."""
        s = self.settings
        patch_prototypes = s.patch_prototypes if s.separate_head else s.prototypes
        masked_share = views["mask"].any(dim=-1).float().mean().item()
        return {"cls": log(s.prototypes)} | ({"patch": masked_share * log(patch_prototypes)} if masked_share else {})


def resized_tokens(
    tokens: Tensor, source: tuple[int, int], target: tuple[int, int], mode: str = "bicubic", antialias: bool = False
) -> Tensor:
    """Interpolate patch tokens (B, L, D) on the `source` grid to (B, L', D) on the `target` grid."""
    if source == target:
        return tokens
    maps = to_float32(tokens).mT.unflatten(-1, source)
    return F.interpolate(maps, target, mode=mode, align_corners=False, antialias=antialias).flatten(2).mT


@dataclass(frozen=True)
class GramCrops:
    """RGB image -> DINOv2's views, and "gram" (G, 3, S', S'): the regions of the global crops at another size, without
    colour augmentation."""

    dinov2_views: ImageViews
    geometry: Transform  # crop and flip, at the larger of the two sizes
    colours: tuple[Callable[[Image.Image], Tensor], ...]  # colour augmentation of each global crop
    to_tensor: Tensors  # normalisation
    gram_size: int  # S', in pixels
    size: int  # S, in pixels

    def __call__(self, image: Image.Image) -> dict[str, Tensor]:
        regions = [self.geometry(image) for _ in self.colours]
        crops = [colours(resized(region, self.size)) for colours, region in zip(self.colours, regions, strict=True)]
        gram_crops = [self.to_tensor(resized(region, self.gram_size)) for region in regions]
        other_makers = {name: make for name, make in self.dinov2_views.makers.items() if name != "global"}
        other_views = replace(self.dinov2_views, makers=other_makers)(image)  # local crops and masks
        return {"global": torch.stack(crops), **other_views, "gram": torch.stack(gram_crops)}


def resized(image: Image.Image, side: int) -> Image.Image:
    """The square image at `side` pixels, bicubic."""
    return image if image.size == (side, side) else image.resize((side, side), Image.Resampling.BICUBIC)


METHOD = DinoV2

_TABLE = dict(layer_scale=True, position_resize="bicubic_offset")
# data/transforms.py:18-21 inverts the probabilities 1.0, 0.1, 0.5 of data/augmentations.py:73-82, also for the released
# weights (dinov3 issue 286 and pull request 342, dinov2 pull request 411).
_CROPS = dict(blur=(0.0, 0.9, 0.5), blur_kernel=9)
_VIT_L = Recipe(
    source="dinov2 configs/train/vitl16_short.yaml over ssl_default_config.yaml (32 x 64 images; 100 epochs of 1250 "
    "updates, 200 of ImageNet-1k here); blur with the probabilities that data/transforms.py inverts",
    spec=replace(VIT_L, **_TABLE),
    settings=Settings(**_CROPS, koleo_images=64, teacher_warmup=60, freeze_prototypes=2),
    epochs=200,
    batch=2048,
    lr=4e-3,
    lr_batch=1024,
    lr_rule="root",
    schedule=TableCosine(warmup=20, floor=1e-6),
    layer_decay=0.9,
    weight_decay=0.04,
    weight_decay_schedule=CosineTo(end=0.4),
    clip=3.0,
)
_UPDATES = 14_197_122 // 3072  # of an epoch of ImageNet-22k; the source's have 1250
_LARGE = Settings(
    **_CROPS,
    koleo_images=32,
    teacher_warmup=round(30 * 1250 / _UPDATES),
    sinkhorn=True,
    separate_head=True,
    prototypes=131072,
    bottleneck=384,
    teacher_momentum=0.994,
    drop_path=0.4,
    local_size=98,
)
_VIT_L_22K = replace(
    _VIT_L,
    source="dinov2 configs/train/vitl14.yaml (96 x 32 images; 500 epochs of 1250 updates, 135 of ImageNet-22k here), "
    "blur as vit_l; ours: whole epochs of the teacher's warm-up (8, there 8.1) and of frozen prototypes (1, there 0.3)",
    spec=replace(
        VIT_L,
        architecture="vit_giant_patch14_dinov2",
        patch_size=14,
        mlp_hidden=2 * 2736,
        **_TABLE,
    ),
    settings=_LARGE,
    epochs=round(500 * 1250 / _UPDATES),
    batch=3072,
    lr=2e-4,
    schedule=TableCosine(warmup=80 * 1250 / _UPDATES, floor=1e-6),
    layer_decay=1.0,
    weight_decay_schedule=CosineTo(end=0.2),
)
_OURS = dict(freeze_prototypes=0, teacher_warmup=0)
# From layer scales of 1e-5, where class tokens see nothing of the image, and at a teacher temperature of 0.07 a short
# training collapses: all outputs become uniform (docs/log.md, 2026-11-29). 0.04 is DINO's.
_SHORT = _OURS | dict(layer_scale_init=1.0, teacher_temperature=0.04)
RECIPES = {
    "vit_l": _VIT_L,
    "vit_b": replace(
        _VIT_L,
        source=f"{_VIT_L.source}; ours: with a ViT-B/16",
        spec=replace(VIT_B, **_TABLE),
    ),
    "vit_s14": replace(
        _VIT_L,
        source="dinov2 configs/eval/vits14_pretrain.yaml (encoder, local crops); ours: else as vit_l. The published "
        "ViT-S is distilled from ViT-g (section 5)",
        spec=replace(VIT_S, architecture="vit_small_patch14_dinov2", patch_size=14, **_TABLE),
        settings=replace(_VIT_L.settings, local_size=98),
    ),
    "vit_l14": _VIT_L_22K,
    "vit_g14": replace(
        _VIT_L_22K,
        source="dinov2 configs/train/vitg14.yaml (12 images a GPU); else as vit_l14; inferred: the batch",
        settings=replace(_LARGE, koleo_images=12),
        spec=replace(_VIT_L_22K.spec, width=1536, depth=40, heads=24, mlp_hidden=2 * 4096),
    ),
    **small_recipes(_VIT_L, Settings(**SMALL | _SHORT), Settings(**SMOKE | _OURS), of="ViT-L"),
}
