"""DINO (Caron et al. 2021): every crop of an image predicts the teacher's outputs for its two large ones.

Figure 2 and algorithm 1; facebookresearch/dino 7c446df, main_dino.py. Of the paper's ablations, the squared error,
Sinkhorn-Knopp, a predictor and a head without bottleneck are not implemented. iBOT, MST, SimDINO and DINOv2 derive from
`TeacherStudent` or `SelfDistillation`.

B images, G = 2 global and N local crops of side S and s, L patches, D width, d bottleneck, K prototypes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from checkpoints.spec import ViTSpec
from checkpoints.vit import ViT
from engine.settings import (
    AreaRange,
    BelowOne,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ReadIf,
    UnitInterval,
    Validated,
)
from pretrain.method import Encoder, Method, Step, TrainProgress, check_encoder
from pretrain.parts.colours import BlurKernel, Colours
from pretrain.parts.heads import Norm, PrototypeHead, class_tokens, projector_tensors
from pretrain.parts.losses import dino_loss
from pretrain.parts.teachers import Centre, Temperature, ema_update, frozen_copy, mean_output
from pretrain.parts.views import ImageViews, crop, multi_crop, view
from pretrain.parts.weights import truncated_vit
from pretrain.recipe import VIT_B, VIT_S, Begins, Recipe, Rises, on_32px, smoke
from pretrain.schedules import CosineTo, TableCosine, cosine

GLOBAL_CROPS = 2
POSITIONS = dict(position="learned", position_resize="bicubic_offset")  # of all methods of DINO's family


@dataclass(frozen=True, kw_only=True)
class MultiCropSettings(Validated):
    """Head, teacher and crops. The defaults are main_dino.py's (49-122)."""

    head_layers: PositiveInt = 3  # linear layers of the projection head's MLP
    head_hidden: PositiveInt = 2048  # hidden width of the projection head's MLP
    bottleneck: PositiveInt = 256  # width of the projection head's output, before the prototypes
    head_norm: Norm = "none"  # norm of the projection head
    teacher_momentum: UnitInterval = 0.996  # EMA momentum of the teacher at the start of training
    teacher_momentum_end: UnitInterval = 1.0  # EMA momentum of the teacher at the end, reached along half a cosine
    global_scale: AreaRange = (0.4, 1.0)  # least and largest share of the image's area in a global crop
    # least and largest share of the image's area in a local crop
    local_scale: Annotated[AreaRange, ReadIf("local_crops")] = (0.05, 0.4)
    local_size: Annotated[PositiveInt, ReadIf("local_crops")] = 96  # side of a local crop in pixels
    local_crops: NonNegativeInt = 8  # number of local crops of an image; 0: none
    # probability of Gaussian blur in the first global crop, in the second, and in local crops
    blur: tuple[UnitInterval, UnitInterval, UnitInterval] = (1.0, 0.1, 0.5)
    # side of the kernel of torchvision's blur, in pixels; 0: Pillow's blur
    blur_kernel: Annotated[BlurKernel, ReadIf("blur")] = 0
    solarise: tuple[UnitInterval, UnitInterval] = (0.0, 0.2)  # probability of solarisation in each global crop
    drop_path: BelowOne = 0.1  # drop path rate of the student's last block


FrozenEpochs = Annotated[NonNegativeInt, Begins("the prototypes would never be trained")]
TeacherWarmup = Annotated[NonNegativeInt, Rises("the teacher's temperature")]


@dataclass(frozen=True, kw_only=True)
class DistillationSettings(MultiCropSettings):
    """Prototypes, temperatures and centre. The defaults are main_dino.py's (49-122)."""

    prototypes: PositiveInt = 65536  # K, number of prototypes: the outputs of the projection head
    fixed_prototypes: bool = True  # the prototypes keep unit length (norm_last_layer)
    freeze_prototypes: FrozenEpochs = 1  # number of first epochs in which the prototypes are frozen
    teacher_temperature: PositiveFloat = 0.04  # temperature of the teacher after its warm-up
    # temperature of the teacher at the start of its warm-up
    teacher_temperature_start: Annotated[PositiveFloat, ReadIf("teacher_warmup")] = 0.04
    teacher_warmup: TeacherWarmup = 0  # epochs of the linear warm-up of the teacher's temperature
    student_temperature: PositiveFloat = 0.1  # temperature of the student
    center: bool = True  # centre the teacher's outputs; false: the ablation of table 7
    center_momentum: Annotated[UnitInterval, ReadIf("center")] = 0.9  # EMA momentum of the centre


class Branch(nn.Module):
    """An encoder and its head: the student or the teacher."""

    def __init__(self, vit: ViT, head: PrototypeHead) -> None:
        super().__init__()
        self.vit, self.head = vit, head

    def class_tokens(self, crops: Tensor) -> Tensor:
        """V crops of one size (B, V, 3, S, S) -> class tokens after the final norm (B, V, D), in one pass."""
        return class_tokens(self.vit, crops)

    def forward(self, crops: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Logits of each crop. crops: name -> V crops of one size (B, V, 3, S, S); the result is name -> (B, V, K).

        The encoder runs once per size, the head once on all crops, so that its batch norms see them together
        (utils.py:594-629).
        """
        cls_tokens = {name: self.class_tokens(group) for name, group in crops.items()}  # (B, V, D)
        shapes = {name: tokens.shape[:2] for name, tokens in cls_tokens.items()}
        logits = self.head(torch.cat([tokens.flatten(0, 1) for tokens in cls_tokens.values()]))
        logits_by_group = logits.split([images * views for images, views in shapes.values()])
        return {
            name: group.unflatten(0, shape)
            for (name, shape), group in zip(shapes.items(), logits_by_group, strict=True)
        }


class TeacherStudent(Method):
    """Base of the methods of DINO's family: student, teacher, their heads, and multi-crop.

    Views: "global" (B, G, 3, S, S) and "local" (B, N, 3, s, s), see parts/views.py.
    """

    sync_batch_norm = True  # main_dino.py:172-181; there are batch norms only with head_norm="bn"
    one_norm = False  # whether a single norm serves all hidden layers of the head

    def __init__(self, spec: ViTSpec, settings: MultiCropSettings) -> None:
        super().__init__(spec, settings)
        check_crops(spec, settings.blur_kernel, local_size=settings.local_size if settings.local_crops else spec.side)
        self.batch_statistics = settings.head_norm == "bn"
        if settings.head_norm == "bn":
            self.min_batch, self.min_batch_setting = 2, "head_norm=bn"
        self.student = Branch(self.new_vit(), self.new_head())
        self.teacher = frozen_copy(self.student)

    def new_vit(self) -> ViT:
        """The student's encoder with fresh weights."""
        return truncated_vit(ViT(self.spec, self.settings.drop_path))

    def new_head(self) -> PrototypeHead:
        """The student's head with fresh weights; in this base class without prototypes."""
        s = self.settings
        return self.head_of(s.head_layers, s.head_hidden, s.bottleneck)

    def head_of(
        self, layers: int, hidden: int, bottleneck: int, prototypes: int = 0, fixed: bool = True
    ) -> PrototypeHead:
        """A head with fresh weights; without prototypes, it outputs unit vectors."""
        widths = [self.spec.width, *[hidden] * (layers - 1), bottleneck]
        return PrototypeHead(widths, prototypes, norm=self.settings.head_norm, fixed=fixed, one_norm=self.one_norm)

    def views(self) -> ImageViews:
        """Multi-crop (main_dino.py:419-464); probabilities that are not settings are the defaults of `Colours`."""
        s = self.settings
        geometry = crop(self.spec.side, s.global_scale)
        large = [view([*geometry, colours], self.preparation) for colours in self.global_colours()]
        colours = Colours(blur=s.blur[-1], blur_kernel=s.blur_kernel)
        small = view([*crop(s.local_size, s.local_scale), colours], self.preparation)
        return multi_crop(large, (small,) * s.local_crops)

    def global_colours(self) -> list[Colours]:
        """The colour augmentation of each global crop."""
        s = self.settings
        probabilities = zip(s.blur[:GLOBAL_CROPS], s.solarise, strict=True)
        return [Colours(blur=blur, blur_kernel=s.blur_kernel, solarise=solarise) for blur, solarise in probabilities]

    def after_update(self, progress: TrainProgress) -> None:
        """Move the teacher towards the student's new weights."""
        s = self.settings
        momentum = cosine(s.teacher_momentum, s.teacher_momentum_end, progress.step / progress.steps)
        for teacher, student in self.averaged_pairs():
            ema_update(teacher, student, momentum)

    def averaged_pairs(self) -> list[tuple[nn.Module, nn.Module]]:
        """Pairs of a part of the teacher and the part of the student that it averages."""
        return [(self.teacher, self.student)]

    def encoders(self) -> dict[str, Encoder]:
        return {"teacher": encoder_of(self.teacher), "student": encoder_of(self.student)}


class SelfDistillation(TeacherStudent):
    """Base of the methods with prototypes, a centre and temperatures."""

    remedy = ", teacher_temperature lower or freeze_prototypes higher"  # advice of main_dino.py's option help

    def __init__(self, spec: ViTSpec, settings: DistillationSettings) -> None:
        super().__init__(spec, settings)
        self.centre = Centre(settings.prototypes, settings.center_momentum, settings.center)
        self.teacher_temperatures = Temperature(
            start=settings.teacher_temperature_start, end=settings.teacher_temperature, warmup=settings.teacher_warmup
        )
        self.teacher_temperature = self.teacher_temperatures.at(0)

    def new_head(self) -> PrototypeHead:
        s = self.settings
        return self.head_of(s.head_layers, s.head_hidden, s.bottleneck, s.prototypes, s.fixed_prototypes)

    def before_forward(self, progress: TrainProgress) -> None:
        self.teacher_temperature = self.teacher_temperatures.at(progress.epoch)

    def observe(self, observed: Mapping[str, Tensor], progress: TrainProgress) -> None:
        """Add the observed mean outputs to the centres of the same names, which move after the update."""
        for name, mean in observed.items():
            self.get_submodule(name).add(mean, progress.micro_batch, progress.micro_batches)

    def targets(self, logits: Tensor) -> Tensor:
        """The teacher's logits (B, G, K) -> target probabilities (B, G, K)."""
        return self.centre.soften(logits, self.teacher_temperature)

    def before_update(self, progress: TrainProgress) -> None:
        """Remove the gradients of frozen prototypes, so that the optimiser skips them, weight decay included
        (utils.py:144-149)."""
        if progress.epoch < self.settings.freeze_prototypes:
            for name, parameter in self.student.head.named_parameters():
                if name.startswith("last_layer"):
                    parameter.grad = None

    def after_update(self, progress: TrainProgress) -> None:
        """Move the centres, which this update's loss has used, and the teacher."""
        for module in self.children():
            if isinstance(module, Centre):
                module.update()
        super().after_update(progress)


def encoder_of(branch: Branch) -> Encoder:
    """The encoder to export, with the head's MLP under the importers' names: semi-supervised recipes use its first
    layer (iBOT evaluation/semi_supervised/eval_cls.py:207-256)."""
    return Encoder(vit=branch.vit, extra=projector_tensors(branch.head.mlp, "projector.mlp."))


def check_crops(spec: ViTSpec, kernel: int = 0, **sizes: int) -> None:
    """Raise ValueError if crops of these sizes cannot be encoded, or blurred by a kernel. sizes: setting -> pixels."""
    check_encoder(spec, class_token=True, final_norm="all", relative_position="none")
    if spec.rotary == "none":
        check_encoder(spec, position="learned")
    for name, size in sizes.items():
        if size % spec.patch_size:
            raise ValueError(f"{name}={size}: must be a multiple of patch_size={spec.patch_size}")
        if size <= kernel // 2:
            raise ValueError(f"{name}={size}: must be larger than {kernel // 2} with blur_kernel={kernel}")
        if spec.position_resize == "fixed" and size != spec.side:
            raise ValueError("position_resize=fixed allows no crops of another size: use bicubic or bicubic_offset")


class Dino(SelfDistillation):
    """Views: "global" (B, G, 3, S, S) and, if there are local crops, "local" (B, N, 3, s, s)."""

    def forward(self, views: Mapping[str, Tensor]) -> Step:
        with torch.no_grad():
            teacher_logits = self.teacher({"global": views["global"]})["global"]  # (B, G, K)
            targets = self.targets(teacher_logits)  # (B, G, K)
        logits = self.student(views)  # global (B, G, K) and local (B, N, K)
        loss = dino_loss(logits["global"], logits.get("local"), targets, self.settings.student_temperature)  # Eq. 3
        return Step(loss, {}, {"centre": mean_output(teacher_logits)})

    def baseline_loss(self, views: Mapping[str, Tensor]) -> dict[str, float]:
        """Loss of uniform predictions, which is also the loss after student and teacher have collapsed to them."""
        return {"loss": log(self.settings.prototypes)}


METHOD = Dino

# Settings of the recipes for small images, on which blur and solarisation leave little to see: ours.
SMALL_CROPS = dict(
    head_hidden=256,
    bottleneck=64,
    local_crops=0,
    local_size=16,
    global_scale=(0.2, 1.0),
    blur=(0.0, 0.0, 0.0),
    solarise=(0.0, 0.0),
    drop_path=0.0,
    teacher_momentum=0.99,
)
SMOKE_CROPS = SMALL_CROPS | dict(head_hidden=64, bottleneck=32, local_size=8)
SMALL = SMALL_CROPS | dict(prototypes=1024, freeze_prototypes=0)
SMOKE = SMOKE_CROPS | dict(prototypes=64, freeze_prototypes=0)


def small_recipes(
    published: Recipe, settings_32px: Any, settings_smoke: Any, epochs: int = 6, of: str = "ViT-S"
) -> dict[str, Recipe]:
    """The recipes "32px" and "smoke" of a method. of: the encoder of the published recipe, for the source. epochs: of
    "32px"."""
    source = f"ours: the {of} recipe on CIFAR-10 without local crops, for two cores"
    ours = replace(published, schedule=TableCosine(warmup=0.5, floor=1e-6))
    return {
        "32px": on_32px(ours, settings_32px, source=source, epochs=epochs, batch=64, warmup=0.3),
        "smoke": smoke(ours, settings_smoke),
    }


_VIT_S = Recipe(
    source="Caron et al. 2021; dino README.md (vanilla run, 8 x 64 images), main_dino.py:42-130",
    spec=replace(VIT_S, **POSITIONS),
    settings=DistillationSettings(),
    epochs=100,
    batch=512,
    lr=5e-4,
    schedule=TableCosine(warmup=10, floor=1e-6),
    weight_decay=0.04,
    weight_decay_schedule=CosineTo(end=0.4),
    clip=3.0,
    clip_each=True,
)
_VIT_B = replace(
    _VIT_S,
    source="dl.fbaipublicfiles.com/dino/dino_vitbase16_pretrain/args.txt, named by dino's README (32 x 32 images)",
    spec=replace(VIT_B, **POSITIONS),
    settings=DistillationSettings(
        teacher_temperature=0.07,
        teacher_warmup=50,
        freeze_prototypes=3,
        global_scale=(0.25, 1.0),
        local_scale=(0.05, 0.25),
        local_crops=10,
    ),
    epochs=400,
    batch=1024,
    lr=7.5e-4,
    schedule=TableCosine(warmup=10, floor=2e-6),
    clip=0.3,
)
RECIPES = {
    "vit_s": _VIT_S,
    "vit_s_300": replace(
        _VIT_S,
        source="dino README.md, 'Boosting DINO performance' (16 x 64 images)",
        settings=DistillationSettings(teacher_temperature=0.07, teacher_warmup=30, fixed_prototypes=False),
        epochs=300,
        batch=1024,
    ),
    "vit_b": _VIT_B,
    "vit_b_two_crops": replace(
        _VIT_B,
        source="MOCA table 5j (400 epochs without multi-crop); ours: else as vit_b",
        settings=replace(_VIT_B.settings, local_crops=0),
    ),
    **small_recipes(_VIT_S, DistillationSettings(**SMALL), DistillationSettings(**SMOKE)),
}
