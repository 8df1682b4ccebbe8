"""MST (Li et al. 2021), reimplemented from the paper: DINO that hides patches of low attention and restores the image.

No official code was published. Everything is from the paper's appendix, algorithm 1 and the sections named below,
except what is marked "inferred".
B images, G = 2 global and N local crops, L patches of h rows and w columns, D width, d bottleneck, K prototypes.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import log
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from checkpoints.spec import ViTSpec
from engine.precision import to_float32
from engine.settings import NonNegativeFloat, PositiveInt, UnitInterval
from pretrain.method import Reconstruction, Step
from pretrain.methods.dino import (
    GLOBAL_CROPS,
    SMALL,
    SMOKE,
    DistillationSettings,
    SelfDistillation,
    small_recipes,
)
from pretrain.methods.dino import RECIPES as DINO
from pretrain.parts.decoders import WIDTH, convolutional, linear
from pretrain.parts.heads import Norm, PrototypeHead
from pretrain.parts.losses import dino_loss, patch_baseline
from pretrain.parts.masking import mask_at, patchify, take, unpatchify
from pretrain.parts.teachers import mean_output
from pretrain.parts.views import ImageViews
from pretrain.recipe import Recipe

Reduction = Literal["pixel", "mean", "image"]
LocalNorm = Literal["batch", "running"]
# Shares of the chosen tokens that become the mask token, or another token (Devlin et al. 2019, section 3.1).
BERT_MASK, BERT_OTHER = 0.8, 0.1


@dataclass(frozen=True, kw_only=True)
class Settings(DistillationSettings):
    """The columns of table 4 are sampling, mask_chance, per, replace, restore and inst_weight. Inferred, as the paper
    does not give them, are mask_chance, low_fraction, the decoder, reduction and local_norm."""

    head_norm: Norm = "bn"  # of the projection head
    # which patches may be hidden: those that the teacher's class token attends to least, all, or none
    sampling: Literal["attention", "random", "none"] = "attention"
    low_fraction: UnitInterval = 1 / 8  # share of patches that count as least attended, with sampling=attention
    mask_chance: UnitInterval = 0.05  # p, the probability that each of these patches is hidden
    per: Literal["token", "image"] = "token"  # draw for each token, or once for all tokens of an image
    replace: Literal["mask", "bert"] = "mask"  # replace hidden patches by the mask token, or as BERT does
    restore: Literal["all", "masked"] = "all"  # pixels to restore: those of the whole image, or of hidden patches
    inst_weight: NonNegativeFloat = 1.0  # lambda 1, weight of the instance loss (section 7)
    restore_weight: NonNegativeFloat = 0.6  # lambda 2, weight of the restoration loss (section 7)
    decoder: Literal["conv", "linear"] = "conv"  # of pretrain/parts/decoders.py
    decoder_width: PositiveInt = WIDTH  # channels of the conv decoder
    decoder_norm: bool = True  # batch norms in the conv decoder
    # absolute differences are summed over a pixel's channels (pixel), averaged over all values (mean), or summed over
    # the image (image); sums are then averaged
    reduction: Reduction = "pixel"
    # batch norms of the head normalise local crops by statistics of the batch, or by their running statistics
    local_norm: LocalNorm = "batch"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inst_weight == self.restore_weight == 0:
            raise ValueError("inst_weight=0 with restore_weight=0: nothing is left to learn")
        if self.local_crops and not self.inst_weight:
            raise ValueError(
                f"local_crops={self.local_crops} with inst_weight=0: local crops serve only the instance loss; set "
                "local_crops=0"
            )
        if self.sampling == "none" and self.restore == "masked" and self.restore_weight:
            raise ValueError("restore=masked with sampling=none restores nothing: use restore=all")


class Mst(SelfDistillation):
    """Views: DINO's, and "noise" (B, G, 3, L), uniform numbers that decide for each patch whether it is hidden, how it
    is replaced, and by which other patch."""

    def __init__(self, spec: ViTSpec, settings: Settings) -> None:
        super().__init__(spec, settings)
        self.lowest = int(spec.grid[0] * spec.grid[1] * settings.low_fraction)
        if settings.sampling == "attention" and (not self.lowest or spec.depth < 2):
            raise ValueError(
                f"low_fraction={settings.low_fraction} of {spec.grid[0]} x {spec.grid[1]} patches, depth={spec.depth}: "
                "sampling=attention needs at least one patch and two blocks"
            )
        self.batch_statistics |= settings.restore_weight > 0 and settings.decoder == "conv" and settings.decoder_norm
        if not settings.inst_weight:
            self.student.head.requires_grad_(False)
        # Initially zero, like iBOT's (inferred).
        self.mask_token = nn.Parameter(torch.zeros(1, 1, spec.width), requires_grad=settings.sampling != "none")
        self.decoder = None
        if settings.restore_weight:  # (B, D, h, w) -> (B, 3, S, S)
            sizes = (spec.width, spec.patch_size)
            conv = settings.decoder == "conv"
            self.decoder = (
                convolutional(*sizes, settings.decoder_width, settings.decoder_norm) if conv else linear(*sizes)
            )

    def views(self) -> ImageViews:
        draw = partial(torch.rand, GLOBAL_CROPS, 3, self.spec.grid[0] * self.spec.grid[1])
        return replace(super().views(), samplers={"noise": draw})

    def forward(self, views: Mapping[str, Tensor]) -> Step:
        """Algorithm 1: lambda 1 * instance loss + lambda 2 * restoration loss; a loss of weight 0 is not computed."""
        crops, draws = views["global"], views["noise"].flatten(0, 1)  # (B, G, 3, S, S), (B*G, 3, L)
        with torch.no_grad():
            outputs, attention = self.teacher_outputs(crops)
            hidden = self.masked_patches(attention, draws)
        tokens = self.encode_masked(crops, hidden, draws)  # (B*G, P+L, D)
        loss, logs, observed = 0.0, {}, {}
        if self.settings.inst_weight:
            class_tokens = tokens[:, :1].view(*crops.shape[:2], -1)  # (B, G, D)
            instance = self.instance_loss(class_tokens, views.get("local"), self.targets(outputs))
            loss = self.settings.inst_weight * instance
            logs["instance"] = instance.detach()
            observed["centre"] = mean_output(outputs)
        if self.decoder is not None:
            restoration = self.restoration_loss(tokens[:, self.spec.prefix :], crops, hidden)
            loss = loss + self.settings.restore_weight * restoration
            logs["restore"] = restoration.detach()
        return Step(loss, logs, observed)

    def baseline_loss(self, views: Mapping[str, Tensor]) -> dict[str, Tensor | float]:
        """Losses of uniform predictions and of one colour for all pixels; not for restore="masked", whose loss
        depends on the hidden patches."""
        baselines = {"instance": log(self.settings.prototypes)} if self.settings.inst_weight else {}
        if self.decoder is None or self.settings.restore == "masked":
            return baselines
        pixels = views["global"].flatten(0, 1).flatten(2).mT  # (B*G, S*S, 3)
        scale = scale_of(self.settings.reduction, views["global"][0, 0])
        return {**baselines, "restore": scale * patch_baseline(pixels, "l1")}

    def reconstruct(self, images: Tensor, views: Mapping[str, Tensor]) -> Reconstruction | None:
        """The decoder's prediction of images with patches hidden as in training."""
        if self.decoder is None:
            return None
        crops, draws = images.unsqueeze(1), views["noise"][:, 0]
        hidden = self.masked_patches(self.teacher_outputs(crops)[1], draws)
        patches = self.encode_masked(crops, hidden, draws)[:, self.spec.prefix :]
        prediction = to_float32(self.decoder(patches.mT.unflatten(2, self.spec.grid)))
        if self.settings.restore == "all":
            return Reconstruction(images, prediction, hidden, torch.ones_like(hidden))
        size = self.spec.patch_size
        prediction = torch.where(hidden.unsqueeze(-1), patchify(prediction, size), patchify(images, size))
        return Reconstruction(images, unpatchify(prediction, size, self.spec.grid), hidden, hidden)

    def teacher_outputs(self, crops: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Whole global crops (B, G, 3, S, S) -> the teacher's logits (B, G, K), and its class token's attention to each
        patch in the last block, averaged over heads (B*G, L). Either is None if no setting needs it."""
        outputs, attention, vit = None, None, self.teacher.vit
        if self.settings.inst_weight or self.settings.sampling == "attention":
            layers = (-2, -1) if self.settings.sampling == "attention" else (-1,)
            *before, after = vit(crops.flatten(0, 1), layers=layers, norm=False)
            if self.settings.inst_weight:
                classes = vit.normalise(after[:, :1]).view(*crops.shape[:2], -1)
                outputs = self.teacher.head.last_layer(self.embed(self.teacher.head, classes))
            if self.settings.sampling == "attention":
                attention = vit.attention_of(before[0], rows=slice(0, 1))[:, :, 0, self.spec.prefix :].mean(dim=1)
        return outputs, attention

    def masked_patches(self, attention: Tensor | None, draws: Tensor) -> Tensor:
        """Attention (B*G, L), draws (B*G, 3, L) -> (B*G, L) bool, True for patches to hide."""
        noise = draws[:, 0, :1] if self.settings.per == "image" else draws[:, 0]
        chosen = (noise < self.settings.mask_chance).expand(-1, draws.shape[-1])
        if self.settings.sampling == "none":
            return torch.zeros_like(chosen)
        if attention is None:
            return chosen
        return chosen & mask_at(attention.topk(self.lowest, largest=False).indices, draws.shape[-1])

    def encode_masked(self, crops: Tensor, hidden: Tensor, draws: Tensor) -> Tensor:
        """Crops (B, G, 3, S, S), hidden (B*G, L) bool, draws (B*G, 3, L) -> the student's tokens after the final norm
        (B*G, 1+L, D). Hidden patches are replaced after the linear projection (section 11), before positions are added
        (inferred)."""
        vit = self.student.vit
        patches = self.replaced(vit.project(crops.flatten(0, 1)), hidden, draws)
        return vit.encode(vit.add_positions(patches, self.spec.grid))[0]

    def replaced(self, patches: Tensor, hidden: Tensor, draws: Tensor) -> Tensor:
        """Patches (B*G, L, D), hidden (B*G, L) bool, draws (B*G, 3, L) -> the patches with the hidden ones replaced."""
        if self.settings.sampling == "none":
            return patches
        replacement = self.mask_token.to(patches.dtype)
        if self.settings.replace == "bert":
            kind, ids = draws[:, 1:2].mT, (draws[:, 2] * draws.shape[-1]).long()
            # BERT's other token is any word of its vocabulary; here it is another patch of the image (inferred).
            other_or_same = torch.where(kind < BERT_MASK + BERT_OTHER, take(patches, ids), patches)
            replacement = torch.where(kind < BERT_MASK, replacement, other_or_same)
        return torch.where(hidden.unsqueeze(-1), replacement, patches)

    def instance_loss(self, classes: Tensor, local: Tensor | None, targets: Tensor) -> Tensor:
        """Class tokens of the global crops (B, G, D), the local crops (B, N, 3, s, s) or None, targets (B, G, K) -> the
        instance loss: DINO's, which for two crops is that of algorithm 1."""
        head = self.student.head
        vectors = [self.embed(head, classes)]
        if local is not None:
            with running_kept(head, self.settings.local_norm):
                vectors.append(self.embed(head, self.student.class_tokens(local)))
        logits = head.last_layer(torch.cat(vectors, dim=1)).split([part.shape[1] for part in vectors], dim=1)
        return dino_loss(
            logits[0], logits[1] if local is not None else None, targets, self.settings.student_temperature
        )

    def embed(self, head: PrototypeHead, tokens: Tensor) -> Tensor:
        """Class tokens (B, V, D) -> unit vectors (B, V, d). Batch norms normalise each of the V views separately
        (section 3)."""
        if self.settings.head_norm != "bn":
            return head.embed(tokens)
        return torch.stack([head.embed(view) for view in tokens.unbind(dim=1)], dim=1)

    def restoration_loss(self, patches: Tensor, crops: Tensor, hidden: Tensor) -> Tensor:
        """The student's patch tokens (B*G, L, D), the whole crops (B, G, 3, S, S), hidden (B*G, L) bool -> the
        restoration loss."""
        maps = patches.mT.unflatten(2, self.spec.grid).unflatten(0, crops.shape[:2])
        views = zip(maps.unbind(1), crops.unbind(1), hidden.view(*crops.shape[:2], -1).unbind(1), strict=True)
        return torch.stack([self.differences(self.decoder(map), crop, mask) for map, crop, mask in views]).mean()

    def differences(self, images: Tensor, crop: Tensor, hidden: Tensor) -> Tensor:
        """L1 loss between restored images and the original crop, both (B, 3, S, S). hidden: (B, L) bool.

        With restore="masked" it is each image's mean over its hidden patches, 0 if there are none. Algorithm 1 sums
        over the batch, which cannot be meant literally: in section 10 the two losses are about equal.
        """
        scale = scale_of(self.settings.reduction, crop[0])
        if self.settings.restore == "all":
            return scale * F.l1_loss(to_float32(images), crop)
        patches = F.avg_pool2d((to_float32(images) - crop).abs().mean(dim=1), self.spec.patch_size).flatten(1)
        return scale * ((patches * hidden).sum(dim=1) / hidden.sum(dim=1).clamp(min=1)).mean()


def scale_of(reduction: Reduction, image: Tensor) -> int:
    """The factor that turns a mean over the values of an image (3, S, S) into `reduction`."""
    return {"mean": 1, "pixel": len(image), "image": image.numel()}[reduction]


@contextmanager
def running_kept(network: nn.Module, norm: LocalNorm) -> Iterator[None]:
    """A block in which batch norms do not update their running statistics (section 3). norm: the statistics by which
    they normalise."""
    before = [
        (module, module.momentum, module.training) for module in network.modules() if isinstance(module, _BatchNorm)
    ]
    for module, _, training in before:
        module.momentum = 0.0  # weight of the new statistics
        module.train(training and norm == "batch")
    try:
        yield
    finally:
        for module, momentum, training in before:
            module.momentum = momentum
            module.train(training)


METHOD = Mst

_VIT_S = replace(
    DINO["vit_s"],
    source="reimplemented from the paper, without official code: Li et al. 2021, appendix sections 2, 3, 7; "
    "temperatures, momentum and decay as DINO; inferred: mask_chance, low_fraction, decoder, head, crops, clipping",
    settings=Settings(teacher_temperature=0.07, teacher_warmup=30),
    batch=1024,  # for which DINO's rate is 2e-3 (section 7)
)


def _ablation(what: str, **changes) -> Recipe:
    return replace(_VIT_S, source=f"{_VIT_S.source}; {what}", settings=replace(_VIT_S.settings, **changes))


_TABLE_4 = dict(sampling="random", mask_chance=0.15, replace="bert", restore="masked")  # BERT's share, inferred
RECIPES = {
    "vit_s": _VIT_S,
    "vit_s_300": replace(_VIT_S, epochs=300),
    "vit_s_mlm": _ablation("table 4, row 1", **_TABLE_4, inst_weight=0.0, local_crops=0),
    "vit_s_mlm_dino": _ablation("table 4, row 2", **_TABLE_4),
    "vit_s_bert": _ablation("table 4, row 3", replace="bert"),
    "vit_s_random_p0.01": _ablation("section 9", sampling="random", mask_chance=0.01, head_norm="none"),
    "vit_s_random_p0": _ablation("section 9", sampling="none", head_norm="none"),
    # The paper does not give mask_chance: two higher values than the inferred one.
    "vit_s_p0.15": _ablation("ours: sweep of mask_chance", mask_chance=0.15),
    "vit_s_p0.5": _ablation("ours: sweep of mask_chance", mask_chance=0.5),
    **small_recipes(_VIT_S, Settings(**SMALL, decoder_width=64), Settings(**SMOKE, decoder_width=16), epochs=5),
}
