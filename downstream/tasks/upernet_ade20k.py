"""Semantic segmentation of ADE20K, or of your own masks: UPerNet trained end to end, or a linear layer, frozen network.

UPerNet is mmseg's UPerHead with an auxiliary FCNHead on the patches of four blocks, resized to four scales. It is
trained on crops of 512 pixels by AdamW with layer-wise learning rate decay. The metric is mIoU over the 2000 validation
images, predicted in sliding windows.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import torch

from checkpoints.export import Tables, check_tables
from checkpoints.frozen import FrozenExport, FrozenSpec
from checkpoints.spec import ViTSpec
from downstream.data.scenes import SceneSet
from downstream.dense_task import Lengths, Source
from downstream.loop.training import Plan, adamw_by_layer
from downstream.segmentation import Segmentation, segmentation_outcome
from engine.settings import (
    BelowOne,
    FactorRange,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ReadIf,
    check_up_to,
)
from engine.tasks import ADDED, Outcome, Protocol, Workspace, settings_of
from engine.training.schedules import MultipliedWarmup, Polynomial

if TYPE_CHECKING:
    from torch import nn

MMSEG_STD = 0.01  # standard deviation of the last layer's initial weights; ours are cut at two of it


WITH_UPERNET = ReadIf("head", "upernet")  # a linear head reads the frozen network


@dataclass(frozen=True, kw_only=True)
class UperNet(Segmentation):
    """Settings of one training."""

    COST: ClassVar[float] = 1000.0  # 160 000 steps of 16 crops: 127 passes, at five times the pixels of 224 x 224
    LAYOUT: ClassVar[str] = "ade20k"
    KEY: ClassVar[str] = "upernet_ade20k"
    VIT_REASON: ClassVar[str] = "UPerNet is trained with four blocks of a ViT"
    SOURCE: ClassVar[Source] = Source(
        name="ADE20K",
        classes=150,
        images=20210,
        settings=("steps", "warmup", "batch", "scale", "ratios", "crop", "stride"),
    )

    head: Literal["upernet", "linear"] = "upernet"  # or a linear layer on the four maps of the frozen network
    lr: PositiveFloat = 1e-4  # peak learning rate, of the heads
    layer_decay: Annotated[Fraction, WITH_UPERNET] = 0.65  # factor on the rate for every block further from the heads
    weight_decay: NonNegativeFloat = 0.05  # weight decay of matrices; biases and norms have none
    steps: PositiveInt = 160000  # steps of the optimizer
    warmup: NonNegativeInt = 1500  # steps over which the rate rises
    batch: PositiveInt = 16  # images in a step
    # side of training crops and evaluation windows in pixels, up to the next multiple of the patch
    crop: PositiveInt = 512
    stride: PositiveInt = 341  # pixels from one evaluation window to the next
    # longer and shorter side that images are fitted into, in pixels
    scale: tuple[PositiveInt, PositiveInt] = (2048, 512)
    ratios: FactorRange = (0.5, 2.0)  # range of the random factor on that in training
    # chance of the last block to be skipped; it rises linearly from 0 at the first
    drop_path: Annotated[BelowOne, WITH_UPERNET] = 0.1
    norm: bool = False  # read all four blocks behind the network's final norm
    channels: Annotated[PositiveInt | None, WITH_UPERNET] = None  # of UPerHead; none: the network's width
    train_positions: Annotated[bool, WITH_UPERNET] = True  # train the position table, resized for the crop
    # weight decay on that table and the class token, as in the mm codebases
    decay_tokens: Annotated[bool, WITH_UPERNET] = True
    # relative position tables: keep one that blocks share, or copy it into each block, which trains it at its own rate,
    # or also add tables of zeros to a network that has none
    tables: Annotated[Tables, WITH_UPERNET] = field(default="shared", metadata=ADDED)
    judge_every: NonNegativeInt = 0  # steps between evaluations; 0: only at the end
    # compute activations again in the backward pass, which takes less memory
    recompute: Annotated[bool, WITH_UPERNET] = False
    size: str = ""  # of the network that the recipe is for (S, B, ...); a result of another one says so
    branch: str = ""  # of a checkpoint that the source evaluates; a result of another one says so

    def __post_init__(self) -> None:
        super().__post_init__()
        check_up_to(self, "warmup", "steps")

    @property
    def frozen(self) -> bool:
        return self.head == "linear"

    @property
    def val_size(self) -> tuple[int, int]:
        """Of an image of 4 : 3, like most of ADE20K, fitted into `scale`."""
        shorter = min(self.scale)
        return min(max(self.scale), shorter * 4 // 3), shorter

    def check_network(self, spec: FrozenSpec) -> None:
        super().check_network(spec)
        if isinstance(spec, ViTSpec):
            check_tables(spec, self.tables)

    def lengths(self, images: int) -> Lengths:
        return Lengths(1, self.steps, self.steps * self.batch, -(-self.steps // (self.judge_every or self.steps)))

    def run(self, export: FrozenExport, space: Workspace) -> Outcome:
        self.check_network(export.spec)
        train, val, missing_classes = self.load_scenes(space)
        trained = self.run_training(self.plan(export, train, val, space.seed), space)
        facts = {"steps": self.steps, "warnings": self.recipe_warnings(export, train, trained.batch)}
        return segmentation_outcome([trained], [train], val, missing_classes, facts)

    def plan(self, export: FrozenExport, train: SceneSet, val: SceneSet, seed: int) -> Plan:
        return Plan(
            task=self.KEY,
            export=export,
            settings=settings_of(self),
            train=train,
            val=val,
            batch=self.batch,
            max_micro_batch=self.MAX_MICRO_BATCH,
            schedule=MultipliedWarmup(schedule=Polynomial(), updates=self.warmup),
            epochs=self.steps,  # of one step each, because the source counts steps
            judge_every=self.judge_every,
            build_data=lambda: self.build_data(train, val, export.spec),
            build_model=lambda synchronised: self.model(export, len(train.classes), synchronised, seed),
            build_optimizer=lambda model: self.optimiser(model, export),
            label=f"{self.head} on {train.url}",
        )

    def model(self, export: FrozenExport, classes: int, synchronised: bool, seed: int) -> "nn.Module":
        from downstream.models.backbone import DenseBackbone, default_taps, dense_network
        from downstream.models.segmentors import linear_head, pyramid, segmentor, upernet_heads

        crop, width = self.side(export.spec), export.spec.width
        backbone = DenseBackbone(
            dense_network(export, crop, 0.0 if self.frozen else self.drop_path, self.tables),
            default_taps(export.spec.depth),
            norm=self.norm,
            frozen=self.frozen,
            train_positions=self.train_positions,
            recompute=self.recompute,
        )
        if self.frozen:
            heads, necks = linear_head(width, classes, maps=4, over_valid=False, std=MMSEG_STD), None
        else:
            heads = upernet_heads(width, classes, self.channels or width, synchronised)
            necks = pyramid(export, synchronised)
        return segmentor(backbone, heads, export, crop, self.stride, seed, necks)

    def optimiser(self, model: "nn.Module", export: FrozenExport) -> torch.optim.Optimizer:
        """AdamW. A linear head's bias has weight decay too, because mmseg does not group the parameters there."""
        if self.frozen:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            return torch.optim.AdamW(trained, lr=self.lr, weight_decay=self.weight_decay)
        return adamw_by_layer(model, export.spec.depth, self)


LUT = UperNet(size="B")
EXTREMA = UperNet(layer_decay=0.85, steps=80000, train_positions=False, tables="per_block", size="B", branch="online")
BEIT = UperNet(lr=7e-4, tables="per_block", size="B")
CAE = UperNet(train_positions=False, tables="fresh", size="B")
IBOT = UperNet(lr=8e-5, norm=True, size="B")
SMOKE = UperNet(
    lr=1e-2,
    layer_decay=0.75,
    steps=80,
    warmup=5,
    batch=8,
    crop=48,
    stride=48,
    scale=(96, 64),
    ratios=(1.0, 1.5),
    drop_path=0.0,
    channels=32,
)


def _protocol(task: UperNet, source: str, version: int = 1) -> Protocol:
    return Protocol(task=task, version=version, source=f"{source}; bfloat16 in place of fp16 with --precision bfloat16")


IBOT_SOURCE = "bytedance/ibot evaluation/README.md (lr, out_with_norm) over evaluation/semantic_segmentation/configs/"

PROTOCOLS = {
    "upernet@smoke": _protocol(SMOKE, "ours: seconds on tiny-ade20k:; not to be compared with published numbers"),
    "ade_linear@smoke": _protocol(
        replace(SMOKE, head="linear", norm=True, lr=5e-3), "ours: seconds on tiny-ade20k:, the frozen network"
    ),
    "upernet@extrema": _protocol(
        EXTREMA,
        "ExtreMA section 4 (80k, lr 1e-4, batch 16, decay 0.85, wd 0.05) and its README (CAE's code without the class "
        "token); from CAE's upernet_cae_base_12_512_slide_160k configuration, inferred: warm-up, drop path 0.1, taps "
        "without norm, frozen position table, UPerHead of 768; a shared relative table is copied into every block "
        "(mmcv_custom/checkpoint.py:390-399); not taken over: use_rel_pos_bias, its tables of zeros, which are for a "
        "sequence with a class token",
        version=2,
    ),
    "upernet@beit": _protocol(
        BEIT,
        "microsoft/unilm beit/semantic_segmentation/configs/beit/upernet/upernet_beit_base_12_512_slide_160k_ade20k_"
        "pt.py (self-supervised ViT-B: lr 7e-4, decay 0.65, wd 0.05, batch 8 x 2, warm-up 1500, drop path 0.1), "
        "mmcv_custom/checkpoint.py:363-371 (its shared relative table copied into every block)",
    ),
    "upernet@cae": _protocol(
        CAE,
        "lxtGH/CAE downstream_tasks/semantic_segmentation/configs_local/cae/upernet/upernet_cae_base_12_512_slide_160k_"
        "ade20k_pt_1e-4.py, for 1600 epochs of pretraining (lr 2e-4 for 800, 3e-4 for 300: README.md), decay 0.65, wd "
        "0.05, batch 8 x 2, warm-up 1500, drop path 0.1; backbone/cae.py: frozen sine positions, a relative table of "
        "zeros in every block",
    ),
    "upernet@cae_L": _protocol(
        replace(CAE, lr=4e-5, layer_decay=0.95, drop_path=0.15, size="L"),
        "lxtGH/CAE downstream_tasks/semantic_segmentation/configs_local/cae/upernet/upernet_cae_large_24_512_slide_"
        "160k_ade20k_pt_decay095_4e-5_dp015.py; else as upernet@cae",
    ),
    "upernet@lut": _protocol(
        LUT,
        "LUT supplementary, table E: 160k, batch 16, lr 1e-4, decay 0.65, warm-up 1500, drop path 0.1, wd 0.05; open "
        'there and as in BEiT\'s configurations: taps without norm, slide 341; its words "no multi-scale training" are '
        "read as one scale in testing, --set upernet_ade20k.ratios=1,1 reads them literally",
    ),
    "upernet@mae": _protocol(
        replace(LUT),
        "open-mmlab/mmsegmentation configs/mae/mae-base_upernet_8xb2-amp-160k_ade20k-512x512.py (onedl 1.4.2: stride "
        "341; upstream has 256) with mmcv 1's schedule; not taken over: its backbone's relative bias and layer scale, "
        "which MAE's weights do not have",
    ),
    "upernet@ibot": _protocol(IBOT, f"{IBOT_SOURCE}upernet/vit_base_512_ade20k_160k.py"),
    "upernet@ibot_S": _protocol(
        replace(IBOT, lr=3e-5, layer_decay=0.9, size="S"),
        f"{IBOT_SOURCE}upernet/vit_small_512_ade20k_160k_ms.py (decay 0.9), tested at one scale",
    ),
    "ade_linear@ibot": _protocol(
        replace(IBOT, head="linear", lr=8e-4, drop_path=0.0),
        f"{IBOT_SOURCE}linear/vit_base_512_ade20k_160k.py; its drop path of 0.1 does nothing in a frozen network",
    ),
}

SUITES = {
    "smoke": ("upernet@smoke",),
    "full": ("upernet@mae", "ade_linear@ibot"),
    "everything": ("upernet@mae", "upernet@ibot", "ade_linear@ibot"),
    "paper:extrema": ("upernet@extrema",),
}
