"""Attentive probes: heads that pool frozen tokens by attention, from CAPI, V-JEPA 2, efficient probing, CAE and AIM.

All heads of a sweep train on one stream of augmented images, which they share with augmented linear probes of the same
crops. The tokens of an image take L times the memory of one vector, so they are never stored: the images that select a
head go through the backbone after each epoch, and the validation images once at the end. Only their mean patches are on
disk.

B: images of a batch. L: patches. T: tokens to which a head attends. D: width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal, Self

import torch
from torch import Tensor, nn

from checkpoints.frozen import FrozenExport, FrozenSpec
from engine.progress import Progress
from engine.settings import NonNegativeFloat, PositiveFloat, PositiveInt, ReadIf, UnitInterval, check_up_to
from engine.tasks import ADDED, Protocol, Workspace, as_reported
from engine.training.schedules import CosineAhead, CosineToTheEnd, Schedule, TableCosine, TrainProgress, WarmupCosine
from engine.work import Part, Scale, Work
from imagesets.sets import ImageSet
from probes.features.extract import FeatureSet, batch_spans, feature_pass, feature_work, transform_of
from probes.features.kinds import FLOAT, FeatureKind
from probes.linear.attention import (
    AIM_WIDTH,
    CAPI_WIDTH,
    AimHead,
    AttentiveHeads,
    CaeHead,
    CapiHead,
    Vjepa2Head,
    cae_optimizer,
    capi_optimizer,
    ep_head,
    ep_optimizer,
    torch_adamw,
)
from probes.linear.heads import LR_BATCH, Head
from probes.linear.probe import Probe, SweepTask
from probes.linear.stream import FeatureStream
from probes.linear.sweep import Sweep
from probes.linear.train_transform import Augmentation
from probes.scores import Hits, concatenate_hits, hits_of

CAE_FLOOR = 1e-6  # learning rate at the end (tools/run_attentive.py --min_lr)
AIM_FLOOR, AIM_CLIP = 1e-5, 3.0  # learning rate at the end, maximal gradient norm (AIMv2 table A2)
OnTokens = Callable[[dict[str, Tensor], Tensor], None]  # called with readout -> tokens (B, T, D), and labels (B,)


@dataclass(frozen=True, kw_only=True)
class Attentive(SweepTask):
    """Settings of a sweep of attentive heads."""

    head: Literal["capi", "vjepa2", "ep", "cae", "aim"] = "capi"  # source of head, optimiser and schedule
    # Tokens to which a head attends: the patches, or also the class token; cls for networks without patches.
    readout: Literal["patches", "cls+patches", "cls"] = "patches"
    # for vjepa2: blocks of the head, of which the last is cross-attention
    blocks: Annotated[PositiveInt, ReadIf("head", "vjepa2")] = 1
    # for vjepa2 and cae; capi's and aim's have a fixed width
    attention_heads: Annotated[PositiveInt, ReadIf("head", "vjepa2", "cae")] = 16
    queries: Annotated[PositiveInt, ReadIf("head", "ep")] = 32  # for ep
    # for vjepa2: learning rate at the start of the warm-up, for 256 images
    start_lr: Annotated[NonNegativeFloat, ReadIf("head", "vjepa2"), ReadIf("warmup_epochs")] = 0.0
    # For vjepa2: learning rate, for 256 images, and weight decay of an additional head, the first of the sweep, which
    # has no warm-up and whose weight decay falls to 0.
    falling: tuple[PositiveFloat, NonNegativeFloat] | None = field(default=None, metadata=ADDED)
    # timm's name of a policy of AutoAugment or RandAugment for the training crops; empty: none.
    policy: Literal["", "original", "rand-m9-mstd0.5-inc1"] = field(default="", metadata=ADDED)
    # chance of a rectangle of noise in a crop, with a policy
    erase: Annotated[UnitInterval, ReadIf("policy")] = field(default=0.0, metadata=ADDED)
    # For capi: number of feature sources, also linear ones, whose heads share one loss. Only heads of one source are
    # trained; those of the others would change nothing for them but the relative size of Adam's eps.
    sources: Annotated[PositiveInt, ReadIf("head", "capi")] = field(default=1, metadata=ADDED)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_up_to(self, "start_lr", "lrs")

    @property
    def kinds_by_readout(self) -> dict[str, tuple[FeatureKind, ...]]:
        return {self.readout: tuple(FeatureKind(pool, -1, self.norm) for pool in self.readout.split("+"))}  # type: ignore[arg-type]

    @property
    def kinds(self) -> tuple[FeatureKind, ...]:
        return (FeatureKind("cls" if self.readout == "cls" else "avg", -1, self.norm),)

    @property
    def schedule(self) -> Schedule:
        warmup = self.warmup_epochs
        schedules: dict[str, Schedule] = {
            "capi": CosineToTheEnd(warmup=warmup),
            "vjepa2": CosineAhead(warmup=warmup, start=self.start_lr),
            "ep": WarmupCosine(warmup=warmup),
            "cae": TableCosine(warmup=warmup, floor=CAE_FLOOR),
            "aim": WarmupCosine(warmup=warmup, floor=AIM_FLOOR),
        }
        return schedules[self.head]

    def build_head(self, width: int, classes: int) -> nn.Module:
        """A new head. Raises ValueError for a width that does not fit the settings."""
        if self.head == "capi":
            return CapiHead(width, classes)
        if self.head == "aim":
            return AimHead(width, classes)
        if self.head == "ep":
            return ep_head(width, classes, self.queries)
        if self.head == "cae":
            return CaeHead(width, classes, self.attention_heads)
        return Vjepa2Head(width, classes, self.blocks, self.attention_heads)

    def grid(self, scale: float) -> list[Head]:
        """All heads in CAPI's order, by learning rate; the first of equally good ones is selected.

        scale: factor on the learning rates for 256 images.
        """
        heads = [
            Head(readout=self.readout, lr=lr * scale, weight_decay=weight_decay)
            for lr in self.lrs
            for weight_decay in self.weight_decays
        ]
        if self.falling is None:
            return heads
        lr, weight_decay = self.falling
        schedule = CosineAhead()
        falling = Head(
            readout=self.readout, lr=lr * scale, weight_decay=weight_decay, schedule=schedule, decay=schedule
        )
        return [falling, *heads]

    @property
    def decays_and_lrs(self) -> list[tuple[float, float]]:
        return [(head.weight_decay, head.lr) for head in self.grid(1.0)]

    @property
    def augmentation(self) -> Augmentation:
        return replace(super().augmentation, policy=self.policy, erase=self.erase)

    def heads(self, width: int, classes: int, batch: int, space: Workspace, own: range | None = None) -> AttentiveHeads:
        scale = batch / LR_BATCH
        optimizers = {"capi": capi_optimizer, "ep": ep_optimizer, "cae": cae_optimizer}
        return AttentiveHeads(
            self.grid(scale),
            lambda readout: self.build_head(width, classes),
            optimizers.get(self.head, torch_adamw),
            replace(self, start_lr=self.start_lr * scale).schedule,
            sources=self.sources if self.head == "capi" else 0,
            clip=AIM_CLIP if self.head == "aim" else 0.0,
            seed=space.seed,
            device=space.device,
            own=own,
        )

    def with_one_head(self, readout: str) -> Self:
        one = replace(self, lrs=self.lrs[:1], weight_decays=self.weight_decays[:1], falling=None)
        return replace(one, readout=readout)  # type: ignore[arg-type]  # a readout that these settings recorded

    def head_inputs(self, vectors: Tensor) -> Tensor:
        return vectors

    def with_supported_readouts(self, spec: FrozenSpec) -> tuple[Self, dict[str, str]]:
        used = self.readout
        if not spec.has_patches:
            used = "cls"
        elif not spec.has_class_token:
            used = "patches"
        return replace(self, readout=used), {self.readout: used}

    def tokens(self, spec: FrozenSpec) -> int:
        """T, the number of tokens to which a head attends."""
        readouts = self.with_supported_readouts(spec)[0].kinds_by_readout
        return sum(kind.vectors(spec) for kinds in readouts.values() for kind in kinds)

    def check_network(self, spec: FrozenSpec) -> None:
        with torch.device("meta"):
            self.build_head(spec.width, 2)

    def probe(self, export: FrozenExport, space: Workspace) -> "AttentiveProbe":
        return AttentiveProbe.of(self, export, space)

    def passes(self, images: Mapping[str, int]) -> dict[str, int]:
        """Images of forward passes.

        crops: augmented training images. stored: validation and held-out images, whose mean patches are stored.
        evaluated: the images that select a head, in each epoch, and at the end the validation images.
        """
        plan, held_out = self.epoch_plan(images["train"])
        val = images["val"]
        return {
            "crops": self.epochs * plan.images_per_epoch,
            "stored": val + held_out,
            "evaluated": self.epochs * (held_out or val) + val,
        }

    def cost(self, scale: Scale) -> Work:
        spec, passes = scale.spec, self.passes(scale.images)
        plan, _ = self.epoch_plan(scale.images["train"])
        tokens, parameters = self.tokens(spec), self.parameters(spec.width, scale.classes)
        heads, steps = len(self.decays_and_lrs), self.epochs * plan.steps_per_epoch
        flops = 2.0 * (parameters + 2 * tokens * spec.width * self.attention_maps(spec.width))  # of a head on an image
        flops += 24.0 * (self.blocks - 1) * tokens * spec.width**2
        images = 3 * steps * plan.batch + passes["evaluated"]  # a step costs three forward passes
        batch = 2 * FLOAT * plan.batch * tokens * spec.width  # gathered features, and a copy of the batch
        weights = 4 * FLOAT * heads * parameters  # with gradients and two moments
        work = feature_work(
            scale,
            {"val and held out": passes["stored"]},
            feature_pass(scale, passes["crops"], "augmented", "crops"),
            feature_pass(scale, passes["evaluated"], "tokens of evaluated images"),
            # A head has about ten times the operators of a linear one.
            Part(kind="heads", count=10 * steps * heads, flops=flops * images / steps / 10),
            memory=batch + weights,
        )
        return replace(work, iterations=steps, disk=work.disk + 2 * weights)

    def parameters(self, width: int, classes: int) -> int:
        """Number of parameters of a head."""
        with torch.device("meta"):
            return sum(value.numel() for value in self.build_head(width, classes).parameters())

    def attention_maps(self, width: int) -> int:
        """Number of attention maps, softmaxes over the tokens, that a head computes for an image."""
        maps = {"capi": width // CAPI_WIDTH, "aim": width // AIM_WIDTH, "ep": self.queries}
        return maps.get(self.head, self.attention_heads)


@dataclass(frozen=True, kw_only=True)
class AttentiveProbe(Probe):
    """The training of attentive heads.

    `train_features` and `val_features` contain only mean patches; they record which images can be read.
    """

    task: Attentive

    @property
    def head_costs(self) -> list[int]:
        return [self.task.parameters(self.export.spec.width, len(self.train.classes))] * len(self.task.decays_and_lrs)

    @cached_property
    def evaluation_stream(self) -> FeatureStream:
        """A stream for images without augmentation."""
        return self.stream()

    def for_each_batch(self, features: FeatureSet, images: ImageSet, on_tokens: OnTokens) -> None:
        """Call `on_tokens` with the tokens of all readable images, in order and in every process."""
        readable = images.subset(features.indices, "readable")
        labels = torch.from_numpy(features.labels)
        ((readout, kinds),) = self.task.kinds_by_readout.items()
        spans = batch_spans(len(readable), self.chunk)

        def on_round(positions: range, tokens: Tensor, unreadable: Mapping[int, str]) -> None:
            if unreadable:
                path = readable.path(min(unreadable))
                raise ValueError(f"{path}: could be read before and cannot be read now; run the same again")
            on_tokens({readout: tokens}, labels[positions.start : positions.stop].to(tokens.device))
            progress.advance(len(positions))

        transform = transform_of(self.export, self.space, self.task)
        with Progress(f"evaluating on {images.title}", len(readable)) as progress:
            self.evaluation_stream.compute_features(readable, transform, [kinds], spans, on_round)

    def step_heads(self, heads: Any, features: Mapping[str, Tensor], labels: Tensor, progress: TrainProgress) -> None:
        width = self.export.spec.width
        tokens = {readout: rows.unflatten(1, (-1, width)) for readout, rows in features.items()}
        heads.step(tokens, labels, progress)

    def count_hits(self, heads: Any) -> Tensor:
        hits = torch.zeros(len(heads.own), dtype=torch.int64)

        def add_hits(tokens: dict[str, Tensor], labels: Tensor) -> None:
            if heads.own:
                hits.add_(heads.hits(tokens, labels).cpu())

        images = self.val if self.task.select == "val" else self.train.subset(self.held_out_indices, "held-out")
        self.for_each_batch(self.selection_features[0], images, add_hits)
        return hits

    def hits(self, sweep: Sweep) -> dict[str, Hits]:
        heads = sweep.own_reported_heads()
        parts: dict[str, list[Hits]] = {metric: [] for metric in heads}

        def add_hits(tokens: dict[str, Tensor], labels: Tensor) -> None:
            for metric, head in heads.items():
                parts[metric].append(hits_of(head.logits(tokens)[:, 0], labels))

        self.for_each_batch(self.val_features, self.val, add_hits)
        return self.gather_hits(lambda: {metric: concatenate_hits(hits) for metric, hits in parts.items()})

    def cost(self, sweep: Sweep, bears_cost: bool) -> dict[str, float]:
        cost = super().cost(sweep, bears_cost)
        evaluated = self.task.epochs * len(self.selection_features[1]) + len(self.val_features)
        return cost | {"forwards": cost["forwards"] + cost["augmented_forwards"] + evaluated}


MAE_CROPS = Attentive(crop_rule="mae", train_interpolation="bicubic", drop_last=True)
PROTOCOLS = {
    "attentive@capi": Protocol(
        task=Attentive(
            lrs=(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2),
            weight_decays=(5e-4, 1e-3, 5e-2),
            epochs=11,
            warmup_epochs=1,
            drop_last=True,
            train_interpolation="bicubic",
            sources=4,
        ),
        version=2,
        source="facebookresearch/capi 98b4fa1 eval_classification.py:203-243, :306-486: source `patch`, selected on a "
        "tenth of the training images; its 12 500 iterations of 128 x 8, 1250 of them warm-up, are 11 epochs of "
        "ImageNet, and so ours of any set; its number is top1_last, as it selects after the last iteration; the loss "
        "is the mean over the heads of its four sources, of which three are linear, change nothing else and are not "
        "trained",
    ),
    "attentive@vjepa2": Protocol(
        task=Attentive(
            head="vjepa2",
            readout="cls+patches",
            blocks=4,
            lrs=(1.25e-4, 2.5e-4, 3.75e-4, 5e-4),
            start_lr=5e-5,
            weight_decays=(8e-3, 4e-3, 2e-3, 1e-3, 5e-4),
            epochs=20,
            warmup_epochs=5,
            train_interpolation="bicubic",
            interpolation="bilinear",
            falling=(2.5e-4, 1e-3),
            policy="original",
            erase=0.25,
        ),
        version=2,
        source="facebookresearch/vjepa2 c2963a4 configs/eval/vitl/in1k.yaml (4 blocks; batch 16 x 64, so that rates "
        "for 256 images are a quarter), evals/image_classification_frozen/eval.py: it reports the best head on the "
        "validation images; ours: the noise of random erasing is cut to 8 bits",
    ),
    "attentive@ep": Protocol(
        task=replace(MAE_CROPS, head="ep", lrs=(0.1,), epochs=90, warmup_epochs=10, batch=4096),
        version=1,
        source="billpsomas/efficient-probing b8f4fb8 poolings/ep.py, probe_heads.py, main_linprobe.py: 32 queries, blr "
        "0.1, batch 4096, LARS; it reports the best epoch on the validation images",
    ),
    "attentive@aim": Protocol(
        task=Attentive(
            head="aim",
            lrs=(1.25e-5, 2.5e-5, 5e-5, 7.5e-5, 1.25e-4, 2.5e-4, 5e-4),
            weight_decays=(0.05, 0.1),
            epochs=100,
            warmup_epochs=5,
            train_interpolation="bicubic",
            policy="rand-m9-mstd0.5-inc1",
        ),
        version=1,
        source="AIMv2 (arXiv 2411.14402) table A2, IN-1k: batch 1024, so that rates for 256 images are a quarter; head "
        "as in apple/ml-aim 3762121 aim-v1/aim/v1/torch/layers.py; it reports the best of the sweep; its colour jitter "
        "has no effect with timm's policy; ours: only patches are read, and weight decay applies to the whole head",
    ),
    "attentive@cae": Protocol(
        task=Attentive(
            head="cae",
            readout="cls+patches",
            attention_heads=12,
            lrs=(0.0125,),
            epochs=90,
            warmup_epochs=10,
            batch=8192,
            drop_last=True,
            train_interpolation="bicubic",
        ),
        version=2,
        source="lxtGH/CAE tools/run_attentive.py:513-565 (the rate is not scaled with the batch), "
        "models/modeling_finetune.py:141-256 and scripts/cae_base_800e.sh (SGD, rate 0.4 at batch 4 x 8 x 256 = 8192, "
        "so that the rate for 256 images is a 32nd; 90 epochs, 12 attention heads, those of ViT-B); it reports the "
        "best epoch on the validation images; ours: timm's rule of random crops is torchvision's",
    ),
}
PROTOCOLS["attentive@vjepa2_1block"] = PROTOCOLS["attentive@vjepa2"].changed(
    2, f"one block in place of four: {PROTOCOLS['attentive@vjepa2'].source}", blocks=1
)
OTHERS = {name: protocol for name, protocol in PROTOCOLS.items() if name != "attentive@capi"}
for version in (1, 2):
    PROTOCOLS |= as_reported({name: own for name, own in OTHERS.items() if own.version == version}, version)
PROTOCOLS["attentive@smoke"] = Protocol(
    task=Attentive(
        head="vjepa2", attention_heads=1, lrs=(0.005, 0.02), weight_decays=(1e-3,), epochs=8, warmup_epochs=1, batch=32
    ),
    version=1,
    source="ours: a few epochs with one attention head, for any width, to try the machinery",
)

SUITES = {
    "smoke": ("attentive@smoke",),
    "today": ("attentive@capi",),
    "everything": tuple(name for name in PROTOCOLS if name != "attentive@smoke"),
}
