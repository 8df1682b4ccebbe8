"""Linear classifiers on frozen features: by SGD as in DINO, iBOT, MOCA, DINOv2 and MSN, by LARS as in MAE and ExtreMA.

All heads of a sweep (learning rate x readout x weight decay) train together on the same batches. With `augment`, the
frozen backbone computes features of every augmented batch, as in the papers; without it, heads train on one cached
feature of each image, which is a protocol of its own (`..._cached`).

Head and epoch are selected on held-out training images (`select` holdout) or, as in the papers, on the validation
images for which the result is reported (`select` val).
"""

from dataclasses import dataclass, field, replace
from typing import Literal, Self

from checkpoints.frozen import FrozenExport, FrozenSpec
from engine.settings import OneOrMoreDifferent
from engine.tasks import ADDED, Outcome, Protocol, Shared, Workspace, as_reported
from engine.training.schedules import Pace, PacedCosine, Schedule
from engine.work import Part, Scale, Work
from probes.features.extract import feature_pass, feature_work, transform_of
from probes.features.fallbacks import supported_readout
from probes.features.kinds import FLOAT, FeatureKind, Readout, kinds_of
from probes.linear.heads import LR_BATCH, Head, Heads, HeadSettings
from probes.linear.probe import Probe, SweepTask
from probes.linear.sweep import Sweep
from probes.scores import with_blocks


@dataclass(frozen=True, kw_only=True)
class Linear(HeadSettings, SweepTask):
    """Settings of a sweep of linear heads."""

    # Inputs of heads: clsN, the class tokens of the last N blocks; avg, the mean patch of the last block; clsN+avg,
    # both; avg@N, the mean patch of the Nth block; cls+avg@N, its class token and mean patch.
    readouts: OneOrMoreDifferent[str] = ("cls1",)
    augment: bool = True  # train on random crops and flips; false: on one cached feature of each image
    pace: Pace = "epoch"  # how often the learning rate changes along its half cosine
    # Blocks to evaluate. all: also trains the same heads on each earlier block and reports their main metric as
    # NAME_blockN, N from 1.
    layers: Literal["last", "all"] = field(default="last", metadata=ADDED)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.entry == "layer_norm") != (self.optimizer == "msn"):
            raise ValueError(
                f"entry={self.entry}, optimizer={self.optimizer}: layer_norm and msn can only be used together"
            )
        for readout in self.readouts:
            kinds_of(readout, self.norm)
        first = Readout.parse(self.readouts[0])
        reads_last_block = len(self.readouts) == 1 and first.blocks == 1 and not first.block
        if self.layers == "all" and (self.augment or not reads_last_block):
            raise ValueError(
                f"layers=all: give augment=false and one readout of the last block (cls1, avg or cls1+avg), not "
                f"augment={str(self.augment).lower()} and readouts={','.join(self.readouts)}"
            )

    @property
    def kinds_by_readout(self) -> dict[str, tuple[FeatureKind, ...]]:
        return {readout: kinds_of(readout, self.norm) for readout in self.readouts}

    @property
    def schedule(self) -> Schedule:
        return PacedCosine(warmup=self.warmup_epochs, pace=self.pace)

    def heads(self, width: int, classes: int, batch: int, space: Workspace, own: range | None = None) -> Heads:
        """All heads of the grid, by readout, then by weight decay, then by learning rate."""
        grid = [
            Head(readout=readout, lr=lr * batch / LR_BATCH, weight_decay=weight_decay)
            for readout in self.readouts
            for weight_decay, lr in self.decays_and_lrs
        ]
        widths = self.widths(width)
        return Heads(grid, widths, classes, self, batch=batch, seed=space.seed, device=space.device, own=own)

    def with_all_blocks(self, spec: FrozenSpec) -> Self:
        """With layers=all, the task whose readouts are those of all blocks, the last first."""
        blocks = range(1, 1 if self.layers == "last" or spec.class_attention else spec.depth)
        earlier = (str(Readout.parse(self.readouts[0])._replace(block=block)) for block in blocks)
        return replace(self, layers="last", readouts=(*self.readouts, *earlier)).with_supported_readouts(spec)[0]

    def with_one_head(self, readout: str) -> Self:
        one = replace(self, lrs=self.lrs[:1], weight_decays=self.weight_decays[:1], layers="last")
        return replace(one, readouts=(readout,))

    def with_supported_readouts(self, spec: FrozenSpec) -> tuple[Self, dict[str, str]]:
        used = {readout: supported_readout(readout, spec) for readout in self.readouts}
        # layers=last, because the training on the last block is the same with layers=all.
        return replace(self, readouts=tuple(dict.fromkeys(used.values())), layers="last"), used

    def probe(self, export: FrozenExport, space: Workspace) -> Probe:
        if self.layers == "all":  # extract the features of all blocks in the pass for the last one
            space = replace(space, wanted={**self.shares(export, space).features, **space.wanted})
        return super().probe(export, space)

    def with_further_evaluations(self, outcome: Outcome, probe: Probe, sweep: Sweep) -> Outcome:
        by_block = {}
        for readout in self.with_all_blocks(probe.export.spec).readouts[len(self.readouts) :]:
            task = replace(self, layers="last", readouts=(readout,))
            by_block[Readout.parse(readout).block] = task.run(probe.export, probe.space)
        return with_blocks(outcome, by_block)

    def shares(self, export: FrozenExport, space: Workspace) -> Shared:
        if self.augment:
            return super().shares(export, space)
        return Shared(features={transform_of(export, space, self).name: self.with_all_blocks(export.spec).kinds})

    def cost(self, scale: Scale) -> Work:
        """Heads train on the training images and are evaluated on held-out ones, or on the validation images.

        A step needs two matrix products with the features: one for the logits, one for the gradient.
        """
        spec, train, val, classes = scale.spec, scale.images["train"], scale.images["val"], scale.classes
        task, (plan, held_out) = self.with_all_blocks(spec), self.epoch_plan(train)
        widths = [width for width in task.widths(spec.width).values() for _ in task.decays_and_lrs]
        steps, product = task.epochs * plan.steps_per_epoch, 2.0 * sum(widths) * classes
        flops = product * (2 * steps * plan.batch + task.epochs * (held_out or val) + val)
        training = Part(kind="heads", count=steps * len(task.readouts))
        training = replace(training, flops=flops / training.count)
        weights = 3 * FLOAT * sum(widths) * classes  # with momentum and gradient
        memory = weights + FLOAT * plan.batch * (sum(widths) / len(widths) + 3 * classes)
        if task.augment:
            passes = {"held out": held_out, "val": val}
            crops = [feature_pass(scale, task.epochs * plan.images_per_epoch, "augmented", "crops")]
        else:
            passes, crops = {"train": train, "val": val}, []
        work = feature_work(scale, passes, *crops, training, kinds=len(task.kinds), memory=memory)
        return replace(work, iterations=steps, disk=work.disk + 2 * weights)


IBOT_LRS = tuple(float(f"{n}e{k}") for k in range(-4, 1) for n in range(1, 10))

LARS = Linear(
    lrs=(0.1,), optimizer="lars", entry="batch_norm", epochs=90, warmup_epochs=10, pace="iteration", batch=4096
)
EXTREMA = replace(LARS, norm=False, interpolation="bilinear")
IBOT = Linear(lrs=IBOT_LRS, readouts=("cls4",))
MAE = replace(LARS, batch=16384, eps=1e-6, drop_last=True, crop_rule="mae", train_interpolation="bicubic")
MOCA = replace(IBOT, readouts=("cls1+avg",), drop_last=True)

PAPERS = {
    "linear_lars@mae": Protocol(
        task=MAE,
        version=2,
        source="facebookresearch/mae main_linprobe.py:44-67, :132-141, :212-262, util/lars.py, FINETUNE.md (batch "
        "512 x 32); 90 epochs are its ViT-B's, L and H train 50",
    ),
    "linear_lars@extrema": Protocol(
        task=EXTREMA,
        version=2,
        source="ExtreMA table 14 (LARS, 0.1, batch 4096, 90 epochs); the released code has no LARS, so MAE's; head, "
        "feature, warm-up and transforms as in the code, see linear_sgd@extrema_code",
    ),
    "linear_sgd@extrema_code": Protocol(
        task=replace(EXTREMA, optimizer="sgd"),
        version=2,
        source="microsoft/ExtreMA main_lincls.py:176-247, :281-296, :522-530 and README: SGD, batch norm of eps 1e-5, "
        "class token before the final norm, bilinear; use the momentum encoder",
    ),
    "linear@dino": Protocol(
        task=replace(IBOT, lrs=(0.001,)),
        version=2,
        source="facebookresearch/dino eval_linear.py:65-129, :237-272, its setting for ViT-S: class tokens of the "
        "last 4 blocks; 0.001 is its default, to be tuned for each checkpoint",
    ),
    "linear@dino_base": Protocol(
        task=replace(IBOT, lrs=(0.001,), readouts=("cls1+avg",)),
        version=2,
        source="facebookresearch/dino eval_linear.py:256-260, its setting for ViT-B: class token and mean patch",
    ),
    "linear_sgd@ibot": Protocol(
        task=IBOT,
        version=2,
        source="bytedance/ibot evaluation/eval_linear_multi.py with run.sh:50-60, its setting for ViT-S: 45 rates at "
        "once, class tokens of the last 4 blocks",
    ),
    "linear_sgd@ibot_base": Protocol(
        task=replace(IBOT, readouts=("cls1+avg",)),
        version=2,
        source="bytedance/ibot evaluation/eval_linear_multi.py with run.sh:50-60, its setting for ViT-B and L: class "
        "token and mean patch",
    ),
    "linear_sgd@moca": Protocol(
        task=MOCA,
        version=3,
        source="valeoai/MOCA eval_linear.py:88-120, :217-230, util/data_utils.py:111-138: iBOT's 45 rates; class "
        "token and mean patch, which its README gives for 79.5 (the paper states one rate, 0.04)",
    ),
    "linear_sgd@mst": Protocol(
        task=Linear(lrs=(0.00024,)),
        version=2,
        source="MST (NeurIPS 2021) appendix: 0.00024, batch 1024, 100 epochs, class token of the last block; ours: a "
        "rate for 256 images, as in DINO's code",
    ),
    "linear@msn": Protocol(
        task=Linear(
            lrs=(0.2,),
            norm=False,
            optimizer="msn",
            entry="layer_norm",
            batch=8192,
            pace="iteration",
            drop_last=True,
            interpolation="bilinear",
        ),
        version=4,
        source="facebookresearch/msn linear_eval.py:90-110, :124-132 (evaluation: Resize 256, bilinear), :251-266, "
        ":343-382, src/sgd.py, src/data_manager.py (drop_last) and configs/eval/lineval_msn_vits16.yaml: rate 6.4 at "
        "batch 256 x 32, which is 0.2 for 256; its paper (appendix A.3) says batch 16 384 instead",
    ),
    "linear@dinov2": Protocol(
        task=Linear(
            lrs=(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1),
            readouts=("cls1", "cls1+avg", "cls4", "cls4+avg"),
            epochs=10,
            pace="iteration",
            train_interpolation="bicubic",
        ),
        version=2,
        source="facebookresearch/dinov2 eval/linear.py:135-151, :235-256, :503-533: 13 rates, batch 128 x 8; its "
        "10 x 1250 iterations are 10 epochs of ImageNet, and so ours of any set",
    ),
}

# For other network sizes, for other networks in a paper's tables, and for papers that state little about the probe.
OTHERS = {
    "linear_lars@mae_L": Protocol(
        task=replace(MAE, epochs=50),
        version=2,
        source="facebookresearch/mae FINETUNE.md (Linear Probing: 50 epochs for ViT-L and ViT-H); else linear_lars@mae",
    ),
    "linear_lars@extrema_avg": Protocol(
        task=replace(EXTREMA, readouts=("avg",)),
        version=2,
        source="ExtreMA section 5.2: BEiT, MAE and data2vec have no holistic representation and are probed on the mean "
        "of their patches, with the settings of table 14; ours: read before the final norm, as in linear_lars@extrema",
    ),
    "linear@mocov3": Protocol(
        task=Linear(lrs=(3.0,), epochs=90, interpolation="bilinear"),
        version=2,
        source="facebookresearch/moco-v3 main_lincls.py and CONFIG.md (ViT-S and ViT-B: --lr=3 for 256 images, batch "
        "1024, 90 epochs, a cosine by epoch, torchvision's bilinear transforms, class token behind the final norm)",
    ),
    "linear@beit": Protocol(
        task=Linear(
            lrs=(0.001,),
            weight_decays=(1e-4,),
            readouts=tuple(f"cls+avg@{block}" for block in range(1, 13)),
            norm=False,
            optimizer="adamw",
        ),
        version=1,
        source="microsoft/unilm beit/run_linear_eval.py:93-139, :167-193 and get_started_for_image_classification.md "
        "(ViT-B: lr 4e-3 at batch 8 x 128, 100 epochs, a cosine by epoch, AdamW, a head on class token and mean patch "
        "of each of the 12 blocks, without norm); it reports the best layer and epoch on val (select=val); its image "
        "statistics are 0.5 unless the export says otherwise (--statistics half on import)",
    ),
    "linear_lars@simmim": Protocol(
        task=replace(MAE, readouts=("avg@8",), norm=False),
        version=2,
        source="SimMIM section 4.2, table 6 (an intermediate layer of ViT-B; its authors in microsoft/SimMIM issue 14: "
        "the mean patch of the 8th); its training is not stated; ours: that of linear_lars@mae",
    ),
    "linear_lars@lut": Protocol(
        task=MAE,
        version=2,
        source="ours: LUT's table B has linear probes of ViT-B without settings; naver-ai/lut has MAE's util/lars.py "
        "but no script, so the settings are those of linear_lars@mae",
    ),
    "linear_sgd@moca_readme": Protocol(
        task=replace(MOCA, select="val"),
        version=1,
        source="valeoai/MOCA README (79.5, --avgpool_patchtokens 2): linear_sgd@moca on all training images, the best "
        "of 45 rates and of the epochs on the validation images; table 9 states nothing else for its ViT-L",
    ),
    "linear_lars@cae": Protocol(
        task=MAE,
        version=2,
        source="lxtGH/CAE scripts/cae_base_800e.sh: MAE's probe at batch 512 x 32, as linear_lars@mae",
    ),
}
CACHED = {
    f"{name}_cached": paper.changed(
        version=paper.version,  # its last change, the order of images, concerns both
        source=f"ours: {name} on un-augmented features, one an image; not to be compared with published numbers",
        augment=False,
    )
    for name, paper in PAPERS.items()
}

LAYERS = {
    "linear_sgd@layers": PAPERS["linear_sgd@ibot_base"].changed(
        version=1,
        source="ours: linear_sgd@ibot_base_cached of every block, whose features one pass extracts",
        augment=False,
        layers="all",
    )
}

PROTOCOLS = PAPERS | CACHED | LAYERS | OTHERS
PROTOCOLS |= as_reported(
    {name: paper for name, paper in (PAPERS | OTHERS).items() if paper.task != paper.task.selecting("val")}
)
PROTOCOLS |= as_reported({"linear@msn": PAPERS["linear@msn"]}, version=2)
# The paper has the one rate of table 12, the code iBOT's sweep.
PROTOCOLS |= as_reported({"linear_sgd@moca": PAPERS["linear_sgd@moca"]}, lrs=(0.04,))

SUITES = {
    "smoke": ("linear_sgd@ibot_base_cached",),
    "frozen": ("linear_sgd@ibot_base_cached",),
    "full": ("linear_sgd@ibot_base",),  # a sweep, because one rate rarely suits checkpoints of other sources
    "today": ("linear@dinov2",),
    "everything": tuple(PAPERS | CACHED | LAYERS),
    "layers": tuple(LAYERS),
    "paper:extrema": ("linear_lars@extrema_paper",),
    "paper:lut": ("linear_lars@lut_paper",),
    "paper:moca": ("linear_sgd@moca_paper",),
    "paper:mst": ("linear@dino_paper", "linear_sgd@mst_paper"),
}
