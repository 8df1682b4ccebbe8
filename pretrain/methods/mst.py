"""MST (Li et al. 2021), reimplemented from the paper: DINO that hides patches of low attention and restores the image.

No official code was published. Everything is from the paper's appendix, algorithm 1 and the sections named below,
except what is marked "inferred".
B images, G = 2 global and N local crops, L patches on an h x w grid, P prefix tokens, D width, d bottleneck,
K prototypes.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import log
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from checkpoints.spec import ViTSpec
from engine.precision import to_float32
from engine.settings import NonNegativeFloat, PositiveInt, ReadIf, UnitInterval
from pretrain.method import Step
from pretrain.methods.dino import GLOBAL_CROPS, SMALL, SMOKE, DistillationSettings, SelfDistillation, small_recipes
from pretrain.methods.dino import RECIPES as DINO
from pretrain.parts.decoders import CONV_CHANNELS, convolutional, linear
from pretrain.parts.heads import Norm, PrototypeHead
from pretrain.parts.losses import dino_loss, patch_baseline
from pretrain.parts.masking import mask_at, take
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

    head_norm: Norm = "bn"  # norm of the projection head
    # patches that may be hidden: those that the teacher's class token attends to least, all (random), or none
    sampling: Literal["attention", "random", "none"] = "attention"
    # share of patches that count as least attended, with sampling=attention
    low_fraction: Annotated[UnitInterval, ReadIf("sampling", "attention")] = 1 / 8
    # p, the probability that a patch that may be hidden is hidden
    mask_chance: Annotated[UnitInterval, ReadIf("sampling", "attention", "random")] = 0.05
    # draw against p for each patch, or once for all patches of an image
    per: Annotated[Literal["token", "image"], ReadIf("sampling", "attention", "random")] = "token"
    # replace hidden patches by the mask token, or as BERT does
    replace: Annotated[Literal["mask", "bert"], ReadIf("sampling", "attention", "random")] = "mask"
    # pixels to restore: those of the whole image, or of hidden patches
    restore: Annotated[Literal["all", "masked"], ReadIf("restore_weight")] = "all"
    inst_weight: NonNegativeFloat = 1.0  # lambda 1, weight of the instance loss (section 7)
    restore_weight: NonNegativeFloat = 0.6  # lambda 2, weight of the restoration loss (section 7)
    # transposed convolutions, or one linear layer for each patch
    decoder: Annotated[Literal["conv", "linear"], ReadIf("restore_weight")] = "conv"
    # channels of the conv decoder
    decoder_width: Annotated[PositiveInt, ReadIf("decoder", "conv"), ReadIf("restore_weight")] = CONV_CHANNELS
    # batch norms in the conv decoder
    decoder_norm: Annotated[bool, ReadIf("decoder", "conv"), ReadIf("restore_weight")] = True
    # restoration loss: mean absolute difference of all values (mean), mean over pixels of its sum over the channels
    # (pixel), or mean over images of its sum over the image (image)
    reduction: Annotated[Reduction, ReadIf("restore_weight")] = "pixel"
    # statistics by which the head's batch norms normalise local crops: the batch's, or the running ones
    local_norm: Annotated[LocalNorm, ReadIf("local_crops")] = "batch"

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
    """Views: DINO's, and "noise" (B, G, 3, L), three uniform numbers that decide for each patch whether it is hidden,
    how it is replaced, and by which other patch."""

    def __init__(self, spec: ViTSpec, settings: Settings) -> None:
        super().__init__(spec, settings)
        self.least_attended = int(spec.grid[0] * spec.grid[1] * settings.low_fraction)  # number of patches
        if settings.sampling == "attention" and (not self.least_attended or spec.depth < 2):
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
            if settings.decoder == "conv":
                self.decoder = convolutional(*sizes, settings.decoder_width, settings.decoder_norm)
            else:
                self.decoder = linear(*sizes)

    def views(self) -> ImageViews:
        draw = partial(torch.rand, GLOBAL_CROPS, 3, self.spec.grid[0] * self.spec.grid[1])
        return replace(super().views(), samplers={"noise": draw})

    def forward(self, views: Mapping[str, Tensor]) -> Step:
        """Algorithm 1: lambda 1 * instance loss + lambda 2 * restoration loss; a loss of weight 0 is not computed."""
        crops, noise = views["global"], views["noise"].flatten(0, 1)  # (B, G, 3, S, S), (B*G, 3, L)

        # The teacher sees the crops whole; the patches that its class token attends to least may be hidden.
        with torch.no_grad():
            teacher_logits, attention = self.teacher_outputs(crops)  # (B, G, K), (B*G, L)
            mask = self.draw_mask(attention, noise)  # (B*G, L), True for hidden patches

        # The student sees the crops with these patches replaced.
        tokens = self.encode_masked(crops, mask, noise)  # (B*G, P+L, D)

        loss, logs, observed = 0.0, {}, {}
        if self.settings.inst_weight:
            cls_tokens = tokens[:, :1].view(*crops.shape[:2], -1)  # (B, G, D)
            instance_loss = self.instance_loss(cls_tokens, views.get("local"), self.targets(teacher_logits))
            loss = self.settings.inst_weight * instance_loss
            logs["instance"] = instance_loss.detach()
            observed["centre"] = mean_output(teacher_logits)
        if self.decoder is not None:
            restoration_loss = self.restoration_loss(tokens[:, self.spec.prefix :], crops, mask)
            loss = loss + self.settings.restore_weight * restoration_loss
            logs["restore"] = restoration_loss.detach()
        return Step(loss, logs, observed)

    def baseline_loss(self, views: Mapping[str, Tensor]) -> dict[str, Tensor | float]:
        """Losses of uniform predictions and of one colour for all pixels; no restoration baseline for
        restore="masked", because that loss depends on the mask."""
        baselines = {"instance": log(self.settings.prototypes)} if self.settings.inst_weight else {}
        if self.decoder is None or self.settings.restore == "masked":
            return baselines
        pixels = views["global"].flatten(0, 1).flatten(2).mT  # (B*G, S*S, 3)
        scale = reduction_scale(self.settings.reduction, views["global"][0, 0])
        return {**baselines, "restore": scale * patch_baseline(pixels, "l1")}

    def teacher_outputs(self, crops: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Global crops (B, G, 3, S, S), which the teacher sees whole -> its logits (B, G, K), and its class token's
        attention to each patch in the last block, averaged over heads (B*G, L). Either is None if no setting needs it.
        """
        vit, needs_attention = self.teacher.vit, self.settings.sampling == "attention"
        if not (self.settings.inst_weight or needs_attention):
            return None, None
        layers = (-2, -1) if needs_attention else (-1,)
        *second_last, last = vit(crops.flatten(0, 1), layers=layers, norm=False)
        logits = attention = None
        if self.settings.inst_weight:
            cls_tokens = vit.normalise(last[:, :1]).view(*crops.shape[:2], -1)  # (B, G, D)
            logits = self.teacher.head.last_layer(self.embed(self.teacher.head, cls_tokens))
        if needs_attention:
            cls_attention = vit.attention_of(second_last[0], rows=slice(0, 1))  # (B*G, heads, 1, P+L)
            attention = cls_attention[:, :, 0, self.spec.prefix :].mean(dim=1)
        return logits, attention

    def draw_mask(self, attention: Tensor | None, noise: Tensor) -> Tensor:
        """Attention (B*G, L) or None, noise (B*G, 3, L) -> mask (B*G, L) bool, True for hidden patches."""
        mask_noise = noise[:, 0, :1] if self.settings.per == "image" else noise[:, 0]
        mask = (mask_noise < self.settings.mask_chance).expand(-1, noise.shape[-1])
        if self.settings.sampling == "none":
            return torch.zeros_like(mask)
        if attention is None:
            return mask
        least_attended = attention.topk(self.least_attended, largest=False).indices
        return mask & mask_at(least_attended, noise.shape[-1])

    def encode_masked(self, crops: Tensor, mask: Tensor, noise: Tensor) -> Tensor:
        """Crops (B, G, 3, S, S), mask (B*G, L), noise (B*G, 3, L) -> the student's tokens after the final norm
        (B*G, P+L, D).

        Hidden patches are replaced after the linear projection (section 11), before positions are added (inferred).
        """
        vit = self.student.vit
        patches = self.replace_hidden(vit.project(crops.flatten(0, 1)), mask, noise)
        return vit.encode(vit.add_positions(patches, self.spec.grid))[0]

    def replace_hidden(self, patches: Tensor, mask: Tensor, noise: Tensor) -> Tensor:
        """Replace the hidden ones of patches (B*G, L, D). mask: (B*G, L). noise: (B*G, 3, L)."""
        if self.settings.sampling == "none":
            return patches
        replacement = self.mask_token.to(patches.dtype)
        if self.settings.replace == "bert":
            choice = noise[:, 1:2].mT  # (B*G, L, 1)
            # BERT's other token is any word of its vocabulary; here it is another patch of the image (inferred).
            other_ids = (noise[:, 2] * noise.shape[-1]).long()
            other_or_same = torch.where(choice < BERT_MASK + BERT_OTHER, take(patches, other_ids), patches)
            replacement = torch.where(choice < BERT_MASK, replacement, other_or_same)
        return torch.where(mask.unsqueeze(-1), replacement, patches)

    def instance_loss(self, cls_tokens: Tensor, local_crops: Tensor | None, targets: Tensor) -> Tensor:
        """DINO's loss, which for two crops is that of algorithm 1.

        cls_tokens: of the global crops (B, G, D). local_crops: (B, N, 3, s, s) or None. targets: (B, G, K).
        """
        head, temperature = self.student.head, self.settings.student_temperature
        vectors = self.embed(head, cls_tokens)  # (B, G, d)
        if local_crops is None:
            return dino_loss(head.last_layer(vectors), None, targets, temperature)
        with keep_running_statistics(head, self.settings.local_norm):
            local_vectors = self.embed(head, self.student.class_tokens(local_crops))  # (B, N, d)
        logits = head.last_layer(torch.cat([vectors, local_vectors], dim=1))
        global_logits, local_logits = logits.split([vectors.shape[1], local_vectors.shape[1]], dim=1)
        return dino_loss(global_logits, local_logits, targets, temperature)

    def embed(self, head: PrototypeHead, tokens: Tensor) -> Tensor:
        """Class tokens of V crops (B, V, D) -> unit vectors (B, V, d). Batch norms normalise each of the V crops of an
        image separately (section 3)."""
        if self.settings.head_norm != "bn":
            return head.embed(tokens)
        return torch.stack([head.embed(view) for view in tokens.unbind(dim=1)], dim=1)

    def restoration_loss(self, patch_tokens: Tensor, crops: Tensor, mask: Tensor) -> Tensor:
        """Mean over the global crops of the restoration loss. The decoder sees one crop of each image at a time.

        patch_tokens: the student's (B*G, L, D). crops: the originals (B, G, 3, S, S). mask: (B*G, L).
        """
        maps = patch_tokens.mT.unflatten(2, self.spec.grid).unflatten(0, crops.shape[:2])  # (B, G, D, h, w)
        masks = mask.view(*crops.shape[:2], -1)  # (B, G, L)
        losses = []
        for crop_maps, crop, crop_mask in zip(maps.unbind(1), crops.unbind(1), masks.unbind(1), strict=True):
            losses.append(self.pixel_loss(self.decoder(crop_maps), crop, crop_mask))
        return torch.stack(losses).mean()

    def pixel_loss(self, restored: Tensor, crop: Tensor, mask: Tensor) -> Tensor:
        """L1 loss between restored and original crops, both (B, 3, S, S). mask: (B, L).

        With restore="masked" it is the mean over images of the mean over an image's hidden patches, which is 0 if there
        are none. Algorithm 1 sums over the batch, which cannot be meant literally: in section 10 the two losses are
        about equal.
        """
        scale = reduction_scale(self.settings.reduction, crop[0])
        if self.settings.restore == "all":
            return scale * F.l1_loss(to_float32(restored), crop)
        pixel_errors = (to_float32(restored) - crop).abs().mean(dim=1)  # (B, S, S)
        patch_errors = F.avg_pool2d(pixel_errors, self.spec.patch_size).flatten(1)  # (B, L)
        return scale * ((patch_errors * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)).mean()


def reduction_scale(reduction: Reduction, image: Tensor) -> int:
    """The factor that turns a mean over the values of an image (3, S, S) into `reduction`."""
    return {"mean": 1, "pixel": len(image), "image": image.numel()}[reduction]


@contextmanager
def keep_running_statistics(network: nn.Module, norm: LocalNorm) -> Iterator[None]:
    """A block in which batch norms do not update their running statistics (section 3). norm: the statistics by which
    they normalise."""
    norms = [module for module in network.modules() if isinstance(module, _BatchNorm)]
    before = [(module, module.momentum, module.training) for module in norms]
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
