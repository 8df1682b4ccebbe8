"""I-JEPA (Assran et al. 2023): from a context block, predict the averaged encoder's features of other blocks.

Figure 3. Written from the paper, with the numbers of facebookresearch/ijepa 52c1ae9, which draws the sizes of blocks
once per batch, with the number of the update as the seed.
B images, L patches on an h x w grid, C context blocks of k patches, M target blocks of n patches, D width.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from checkpoints.spec import ViTSpec
from checkpoints.vit import ViT
from engine.precision import to_float32
from engine.settings import AreaRange, FactorRange, NonNegativeInt, OneOrMore, PositiveInt, UnitInterval, Validated
from pretrain.method import Encoder, Method, Step, TrainProgress, Views, check_encoder
from pretrain.parts.decoders import TokenDecoder
from pretrain.parts.losses import patch_baseline
from pretrain.parts.masking import take
from pretrain.parts.teachers import ema_update, frozen_copy
from pretrain.parts.views import ImageViews, crop, view
from pretrain.parts.weights import TOKEN_STD, ijepa_vit, truncated_
from pretrain.recipe import SINCOS, VIT_H, Recipe, on_32px, smoke
from pretrain.schedules import CosineTo, CountedCosine

TRIES = 20  # positions tried for a context block before one target block fewer is kept out of it


@dataclass(frozen=True, kw_only=True)
class Settings(Validated):
    """The defaults are those of configs/in1k_vith14_ep300.yaml."""

    target_blocks: PositiveInt = 4  # M, number of target blocks of an image
    target_scale: AreaRange = (0.15, 0.2)  # least and largest share of the image's area in a target block
    target_aspect: FactorRange = (0.75, 1.5)  # least and largest height over width of a target block
    context_blocks: PositiveInt = 1  # C, number of context blocks of an image
    # least and largest share of the image's area in a context block, before target blocks are removed from it
    context_scale: AreaRange = (0.85, 1.0)
    context_overlaps: bool = False  # context blocks may contain patches of target blocks
    min_keep: NonNegativeInt = 10  # a block must have more patches than this
    predictor_width: PositiveInt = 384  # token width of the predictor, which has the encoder's number of heads
    predictor_depth: PositiveInt = 12  # blocks of the predictor
    teacher_momentum: UnitInterval = 0.996  # EMA momentum of the target encoder at the start
    teacher_momentum_end: UnitInterval = 1.0  # EMA momentum at the end of its linear rise
    momentum_stretch: OneOrMore = 1.0  # length of the momentum's rise, as a multiple of the training's
    crop_scale: AreaRange = (0.3, 1.0)  # least and largest share of the image's area in a crop


class IJepa(Method):
    """Views: "image" (B, 3, H, W) and "noise" (B, M + C T, 2), the positions of the blocks: one of each target block,
    T = TRIES * (M + 1) to try for each context block.
    """

    batch_statistics = True  # the smallest context of a forward pass determines the size of all its contexts

    def __init__(self, spec: ViTSpec, settings: Settings) -> None:
        super().__init__(spec, settings)
        check_encoder(spec, class_token=False, registers=0, position="sincos_column_first", final_norm="all")
        for share in (0.0, 1.0):
            height, width = block_size(spec.grid, settings.target_scale, settings.target_aspect, share)
            if height * width <= settings.min_keep:
                raise ValueError(
                    f"min_keep={settings.min_keep}: a target block may have only {height} x {width} patches; lower "
                    "min_keep, or raise target_scale"
                )
        self.encoder = ijepa_vit(ViT(spec))
        sizes = (settings.predictor_width, settings.predictor_depth, spec.heads)
        self.predictor = truncated_(TokenDecoder(spec, *sizes, name="predictor"))
        nn.init.trunc_normal_(self.predictor.mask_token, std=TOKEN_STD)
        self.features = truncated_(nn.Linear(settings.predictor_width, spec.width))
        self.target = frozen_copy(self.encoder)
        self.uniform = (0.5, 0.5)

    def views(self) -> Views:
        s = self.settings
        positions = s.target_blocks + s.context_blocks * TRIES * (s.target_blocks + 1)
        image = view(crop(self.spec.side, s.crop_scale, "bilinear", flip=0.0), self.preparation)
        return ImageViews({"image": image}, {"noise": partial(torch.rand, positions, 2)})

    def before_forward(self, progress: TrainProgress) -> None:
        """Draw two numbers that decide the sizes of all target and of all context blocks of the update."""
        uniform = torch.rand(2, generator=torch.Generator().manual_seed(progress.step), dtype=torch.float32)
        self.uniform = tuple(uniform.tolist())

    def forward(self, views: Mapping[str, Tensor]) -> Step:
        images = views["image"]
        contexts, targets = self.block_ids(views["noise"])  # ids (C, B, k) and (M, B, n)
        features = self.target_features(images, targets, contexts=len(contexts))  # (M*C*B, n, D)
        predictions = self.predict(images, contexts, targets)  # (M*C*B, n, D)
        return Step(F.smooth_l1_loss(predictions, features), {})

    @torch.no_grad()
    def target_features(self, images: Tensor, targets: Tensor, contexts: int) -> Tensor:
        """Normalised features of the target blocks (M*C*B, n, D), repeated for each context.

        images: (B, 3, H, W). targets: ids (M, B, n). contexts: C.
        """
        features = to_float32(self.target(images)[0])  # (B, L, D)
        features = F.layer_norm(features, features.shape[-1:])
        block_features = torch.stack([take(features, ids) for ids in targets])  # (M, B, n, D)
        return block_features.repeat(1, contexts, 1, 1).flatten(0, 1)

    def predict(self, images: Tensor, contexts: Tensor, targets: Tensor) -> Tensor:
        """Images (B, 3, H, W), ids of the contexts (C, B, k) and of the targets (M, B, n) -> predictions (M*C*B, n, D).

        Each of the C contexts predicts each of the M targets.
        """
        target_blocks, (context_blocks, _, context_length) = len(targets), contexts.shape  # M, C and k
        context_ids = contexts.flatten(0, 1)  # (C*B, k)
        patches = self.encoder.add_positions(self.encoder.project(images), self.spec.grid)
        context_tokens = self.encoder.encode(patches.repeat(context_blocks, 1, 1), keep=context_ids)[0]  # (C*B, k, D)

        # One row for each pair of a target and a context block.
        target_ids = targets.repeat(1, context_blocks, 1).flatten(0, 1)  # (M*C*B, n)
        ids = torch.cat([context_ids.repeat(target_blocks, 1), target_ids], dim=1)  # (M*C*B, k+n)
        decoded = self.predictor(context_tokens.repeat(target_blocks, 1, 1), ids)
        return to_float32(self.features(decoded[:, context_length:]))

    def block_ids(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Noise (B, M + C T, 2) -> ids of the context blocks (C, B, k) and of the target blocks (M, B, n), both in
        raster order. All contexts are truncated to the length of the shortest."""
        s, grid = self.settings, self.spec.grid
        target_positions, context_positions = noise.tensor_split([s.target_blocks], dim=1)
        target_size = block_size(grid, s.target_scale, s.target_aspect, self.uniform[0])
        context_size = block_size(grid, s.context_scale, (1.0, 1.0), self.uniform[1])
        targets = blocks_at(target_positions, target_size, grid)  # (B, M, L)
        tries = blocks_at(context_positions, context_size, grid).unflatten(1, (s.context_blocks, -1))  # (B, C, T, L)
        contexts, _ = free_blocks(tries, targets[:, :0] if s.context_overlaps else targets, s.min_keep)
        return ids_of(contexts), ids_of(targets)

    def baseline_loss(self, views: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Loss of predicting the same features for all patches."""
        all_ids = torch.arange(self.spec.grid[0] * self.spec.grid[1], device=views["image"].device)
        ids = all_ids.expand(1, len(views["image"]), -1)
        return {"loss": patch_baseline(self.target_features(views["image"], ids, contexts=1), "smooth_l1")}

    def after_update(self, progress: TrainProgress) -> None:
        """Move the target encoder towards the encoder, with a momentum that rises linearly."""
        s = self.settings
        rise = (s.teacher_momentum_end - s.teacher_momentum) / (progress.steps * s.momentum_stretch)  # per update
        momentum = min(s.teacher_momentum + progress.step * rise, s.teacher_momentum_end)
        ema_update(self.target, self.encoder, momentum)

    def encoders(self) -> dict[str, Encoder]:
        return {"target": Encoder(vit=self.target), "context": Encoder(vit=self.encoder)}


def block_size(
    grid: tuple[int, int], scale: tuple[float, float], aspect: tuple[float, float], share: float
) -> tuple[int, int]:
    """Rows and columns of a block, fewer than those of the grid.

    scale: least and largest area, as a share of the grid. aspect: least and largest height over width. share: position
    between least (0) and largest (1) of both, so that large blocks are tall.
    """
    area = int(grid[0] * grid[1] * (scale[0] + share * (scale[1] - scale[0])))
    ratio = aspect[0] + share * (aspect[1] - aspect[0])
    return min(round(sqrt(area * ratio)), grid[0] - 1), min(round(sqrt(area / ratio)), grid[1] - 1)


def blocks_at(positions: Tensor, size: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """Relative positions (B, N, 2) in [0, 1) -> blocks of `size` (B, N, L) bool, True for their patches.

    As in the source, no block touches the last row or column.
    """
    in_block = []  # for rows and for columns: (B, N, h) and (B, N, w), True for those of the block
    for axis, (side, length) in enumerate(zip(grid, size, strict=True)):
        first = (positions[..., axis] * (side - length)).long().unsqueeze(-1)
        indices = torch.arange(side, device=positions.device)
        in_block.append((indices >= first) & (indices < first + length))
    rows, columns = in_block
    return (rows.unsqueeze(-1) & columns.unsqueeze(-2)).flatten(-2)


def free_blocks(tries: Tensor, targets: Tensor, min_keep: int) -> tuple[Tensor, Tensor]:
    """T tries of each context block (B, C, T, L) bool, targets (B, M, L) bool -> the context blocks without target
    patches (B, C, L) bool, and the numbers of the tries that they are from (B, C).

    A context block is its first try with more than `min_keep` patches outside the targets. After every TRIES tries, one
    target fewer is removed from the block, from the last to the first.
    """
    removed_targets = [len(targets[0]) - number // TRIES for number in range(tries.shape[2])]  # at each try
    occupied = torch.stack([targets[:, : max(0, count)].any(dim=1) for count in removed_targets], dim=1)  # (B, T, L)
    free = tries & ~occupied.unsqueeze(1)
    first = (free.sum(dim=-1) > min_keep).int().argmax(dim=-1)
    return free.take_along_dim(first[..., None, None], dim=2).squeeze(2), first


def ids_of(blocks: Tensor) -> Tensor:
    """Blocks (B, N, L) bool -> ids of their patches (N, B, n), in raster order, truncated to the smallest block's n."""
    fewest = int(blocks.sum(dim=-1).amin())
    return (~blocks).int().argsort(dim=-1, stable=True)[..., :fewest].transpose(0, 1)


METHOD = IJepa

_PATCHES = SINCOS | dict(class_token=False, class_position=False, pool="avg")
_VIT_H = Recipe(
    source="Assran et al. 2023, appendix A; ijepa configs/in1k_vith14_ep300.yaml (16 x 128 images)",
    spec=replace(VIT_H, **_PATCHES),
    settings=Settings(),
    epochs=300,
    batch=2048,
    lr=1e-3,
    lr_batch=0,
    schedule=CountedCosine(warmup=40, start=0.2, floor=1e-6, stretch=1.0),
    weight_decay=0.04,
    weight_decay_schedule=CosineTo(end=0.4, first=1),
)
RECIPES = {
    "vit_h": _VIT_H,
    "vit_h16_448": replace(
        _VIT_H,
        source="ijepa configs/in1k_vith16-448_ep300.yaml (128 x 16 images)",
        spec=replace(VIT_H, image_size=448, patch_size=16, **_PATCHES),
    ),
    "32px": on_32px(
        _VIT_H,
        Settings(min_keep=4, predictor_width=64, predictor_depth=3),
        source="ours: the ViT-H recipe on CIFAR-10, for two cores",
        epochs=6,
        warmup=0.3,
    ),
    "smoke": smoke(_VIT_H, Settings(min_keep=0, predictor_width=32, predictor_depth=1, crop_scale=(0.6, 1.0))),
}
