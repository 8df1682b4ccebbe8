"""What DINOv2 and SimDINOv2 add to a student and a teacher: masked crops, KoLeo, stochastic depth on subsets of the
images.

Oquab et al. 2024, section 4; facebookresearch/dinov2 b8931f7 (train/ssl_meta_arch.py, data/collate.py, layers/block.py,
utils/param_groups.py). Its masks are drawn for the crops of a batch together, here for those of one image: one of the
two is masked. That leaves the shares of masked crops and patches as they are, and the loader can draw them.
Letters: B images, G = 2 global and N local crops, L patches, m masked ones of all crops, D width.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal

import numpy as np
import torch
from msgspec import Meta
from timm.layers import DropPath
from timm.models.eva import EvaBlock
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from checkpoints.spec import ViTSpec
from checkpoints.vit import ViT
from engine.settings import AreaRange, BelowOne, Fraction, NonNegativeFloat, PositiveInt, UnitInterval, ascending
from pretrain.method import Group, TrainProgress, Views
from pretrain.parts.heads import PrototypeHead
from pretrain.parts.losses import koleo_loss
from pretrain.parts.mask_shapes import stratified_masks
from pretrain.parts.masking import masked_tokens
from pretrain.parts.self_distillation import GLOBAL_CROPS, MultiCropSettings, TeacherStudent
from pretrain.parts.teachers import frozen_copy
from pretrain.parts.weights import dinov2_vit

MaskRange = Annotated[
    tuple[Fraction, Fraction], Meta(description="two shares of the patches, the smaller one first"), ascending
]
UNDECAYED = re.compile(r"\.bias$|norm|gamma")  # param_groups.py:76-84: tokens and positions are decayed


@dataclass(frozen=True, kw_only=True)
class MaskedSettings(MultiCropSettings):
    """The defaults are those of configs/ssl_default_config.yaml."""

    cls_weight: NonNegativeFloat = 1.0  # of the class tokens' loss
    patch_weight: NonNegativeFloat = 1.0  # of the masked patches' loss
    koleo_weight: NonNegativeFloat = 0.1  # of KoLeo, on the student's class tokens of global crops
    masked_crops: Literal[0, 1, 2] = 1  # of the two global crops of an image
    mask_ratio: MaskRange = (0.1, 0.5)  # least and largest share of a masked crop's patches that is hidden
    patch_lr: NonNegativeFloat = 0.2  # factor on the rate of the patch embedding
    layer_scale_init: NonNegativeFloat = 1e-5  # where the encoder has a layer scale
    teacher_momentum: UnitInterval = 0.992
    global_scale: AreaRange = (0.32, 1.0)
    local_scale: AreaRange = (0.05, 0.32)
    drop_path: BelowOne = 0.3  # of the student
    drop_path_uniform: bool = True  # in all blocks alike, else from 0 in the first to that in the last
    separate_head: bool = False  # masked patches have a head of their own
    patch_head_layers: PositiveInt = 3  # of its MLP
    patch_head_hidden: PositiveInt = 2048  # hidden width of its MLP
    patch_bottleneck: PositiveInt = 256  # width before its prototypes

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cls_weight == self.patch_weight == 0:
            raise ValueError("cls_weight=0 with patch_weight=0: nothing is left to learn")


class MaskedDistillation(TeacherStudent):
    """Views: "global", "local" and "mask" (B, G, L) bool, True where the student does not see a patch."""

    min_batch_setting = "koleo_weight"

    def __init__(self, spec: ViTSpec, settings: MaskedSettings) -> None:
        super().__init__(spec, settings)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, spec.width))
        if settings.koleo_weight:
            self.batch_statistics, self.min_batch = True, 2
        if settings.separate_head:
            self.student.patch_head = PrototypeHead(
                spec.width,
                settings.patch_prototypes,
                hidden=settings.patch_head_hidden,
                bottleneck=settings.patch_bottleneck,
                layers=settings.patch_head_layers,
                norm=settings.head_norm,
                fixed=settings.fixed_prototypes,
            )
            self.teacher.patch_head = frozen_copy(self.student.patch_head)

    def new_vit(self) -> ViT:
        s = self.settings
        vit = dinov2_vit(ViT(self.spec), s.layer_scale_init)
        first = s.drop_path if s.drop_path_uniform else 0.0
        return drop_subsets_(vit, np.linspace(first, s.drop_path, self.spec.depth))

    def views(self) -> Views:
        s = self.settings
        draw = partial(stratified_masks, GLOBAL_CROPS, s.masked_crops, s.mask_ratio, self.spec.grid)
        return replace(super().views(), drawn={"mask": draw})

    def student_tokens(self, views: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None, Tensor]:
        """The student's normalised class tokens of masked global crops (B, G, D) and of local ones (B, N, D), if any,
        and patch tokens of the global crops (B, G, L, D)."""
        crops, masks = views["global"], views["mask"]
        tokens = masked_tokens(self.student.vit, crops.flatten(0, 1), masks.flatten(0, 1), self.mask_token)
        tokens = tokens.unflatten(0, crops.shape[:2])
        local = self.student.class_tokens(views["local"]) if "local" in views else None
        return tokens[:, :, 0], local, tokens[:, :, self.spec.prefix :]

    @torch.no_grad()
    def teacher_tokens(self, crops: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
        """The teacher's class tokens (B, G, D) of whole crops (B, G, 3, S, S), and its tokens (m, D) of the patches
        that the masks (B, G, L) hide from the student."""
        tokens = self.teacher.vit(crops.flatten(0, 1))[0].unflatten(0, crops.shape[:2])
        return tokens[:, :, 0], tokens[:, :, self.spec.prefix :][masks]

    def koleo(self, classes: Tensor) -> Tensor:
        """KoLeo of each global crop's class tokens (B, G, D), added up."""
        if not self.settings.koleo_weight:
            return classes.new_zeros(())
        return torch.stack([koleo_loss(crop) for crop in classes.unbind(dim=1)]).sum()

    def observe(self, observed: Mapping[str, Tensor], progress: TrainProgress) -> None:
        """Registers have no positions: the gradient of their rows of the table is taken out."""
        super().observe(observed, progress)
        table = self.student.vit.trunk.pos_embed
        if table is not None and table.grad is not None and self.spec.class_position:
            table.grad[:, 1 : self.spec.prefix] = 0.0

    def groups(self) -> list[Group]:
        """By rate, decay, and the part that is clipped by itself: encoder, head, head of patches."""
        s = self.settings
        groups: dict[tuple, dict[str, nn.Parameter]] = defaultdict(dict)
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                part = name.split(".")[1] if name.startswith("student.") else "vit"
                scale = s.patch_lr if ".patch_embed." in name else 1.0
                frozen = self.zero_lr_epochs if ".last_layer." in name else 0
                groups[scale, bool(UNDECAYED.search(name)), frozen, part][name] = parameter
        return [
            Group(
                parameters=group,
                weight_decay=0.0 if plain else None,
                lr_scale=scale,
                zero_lr_epochs=frozen,
                clipped_with=part,
            )
            for (scale, plain, frozen, part), group in groups.items()
        ]

    zero_lr_epochs = 0  # of the prototypes


def patch_head(branch: nn.Module) -> PrototypeHead:
    """The head of a branch that serves masked patches."""
    return getattr(branch, "patch_head", branch.head)


class SubsetDropPath(DropPath):
    """Stochastic depth that computes a branch for a subset of the images alone (layers/block.py:173-260)."""

    def add(self, tokens: Tensor, branch: Callable[..., Tensor], *besides: Tensor) -> Tensor:
        """Tokens (B, N, D) + the branch's for a random share 1 - drop_prob of the images, times the inverse share.

        besides: what the branch takes beside the tokens, (B, ...), of the same images.
        """
        if not self.drop_prob or not self.training:
            return tokens + branch(tokens, *besides)
        images = len(tokens)
        count = max(int(images * (1 - self.drop_prob)), 1)
        kept = torch.randperm(images)[:count].to(tokens.device)  # drawn on the CPU: the same images on any device
        added = branch(tokens[kept], *(values[kept] for values in besides)).to(tokens.dtype)
        return tokens.index_add(0, kept, added, alpha=images / len(kept))


class SubsetBlock(Block):
    """timm's block, whose branches are dropped for subsets of the images."""

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = self.drop_path1.add(tokens, lambda kept: self.ls1(self.attn(self.norm1(kept))))
        return self.drop_path2.add(tokens, lambda kept: self.ls2(self.mlp(self.norm2(kept))))


class SubsetEvaBlock(EvaBlock):
    """The same of the block for rotary positions (L, 2d), equal for all images, or (B, 1, L, 2d)."""

    def forward(self, tokens: Tensor, rope: Tensor | None = None) -> Tensor:
        def scaled(values: Tensor, gamma: Tensor | None) -> Tensor:
            return values if gamma is None else gamma * values

        def attended(kept: Tensor, turned: Tensor | None = rope) -> Tensor:
            return scaled(self.attn(self.norm1(kept), rope=turned), self.gamma_1)

        tokens = self.drop_path1.add(tokens, attended, *([rope] if rope is not None and rope.ndim == 4 else []))
        return self.drop_path2.add(tokens, lambda kept: scaled(self.mlp(self.norm2(kept)), self.gamma_2))


def drop_subsets_(vit: ViT, rates: Sequence[float]) -> ViT:
    """Blocks that drop their branches for subsets of the images, each at its own rate."""
    kinds = {Block: SubsetBlock, EvaBlock: SubsetEvaBlock}
    for block, rate in zip(vit.trunk.blocks, rates, strict=True):
        if type(block) not in kinds:
            raise ValueError(f"the encoder's blocks are timm's {type(block).__name__}: it needs Block or EvaBlock")
        block.__class__ = kinds[type(block)]
        block.drop_path1, block.drop_path2 = SubsetDropPath(rate), SubsetDropPath(rate)
    return vit
