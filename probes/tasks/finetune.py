"""End-to-end fine-tuning: all weights and a linear head, with layer-wise learning rate decay and BEiT's augmentation.

The recipes differ in the features that the head reads (probes/finetune/classifier.py), in the learning rate schedule
(engine/training/schedules.py) and in numbers. A recipe is for one size of network. A network of another size can be
trained, too, and the result contains a warning.

`select` decides which epoch is reported: last, the last one; val, the best one on the validation images, as in most
sources; holdout, the best one on held-out training images.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from checkpoints.export import ViTExport, check_tables
from checkpoints.flops import forward_flops, training_bytes, training_flops
from checkpoints.frozen import FrozenSpec, vit_spec
from checkpoints.spec import SIZES
from engine.errors import option
from engine.precision import autocast, compile_blocks, fit_attention
from engine.tasks import (
    Emit,
    Head,
    Outcome,
    Predicts,
    Protocol,
    Reads,
    SelectOn,
    Task,
    Workspace,
    as_reported,
    settings_of,
    smoke_protocol,
)
from engine.training.schedules import share_of
from engine.work import Part, Scale, Work
from imagesets.sets import ImageSet, training_folder
from imagesets.transforms import EvalTransform, normalise
from probes.features.extract import DecodedBatch, emit_logits
from probes.features.fallbacks import record_fallback, with_supported_pool
from probes.finetune.classifier import Classifier
from probes.finetune.model_selection import Evaluator, ModelSelection
from probes.finetune.settings import FinetuneSettings
from probes.finetune.trainer import Training
from probes.finetune.training_groups import GroupPlan, MixedGroups, group_size, mixed_groups, training_transform
from probes.lowshot.shots import draw_share, lists_read, share_warning
from probes.scores import with_class_means
from probes.splits import check_labels, held_out, not_held_out_warning, open_splits

VERSION = 3  # of training states on disk; raise it when the same settings would train differently
MAX_MICRO_BATCH = {"cpu": 32, "cuda": 128}  # images in a forward pass, unless --batch-size is given


@dataclass(frozen=True, kw_only=True)
class Finetune(FinetuneSettings, Task):
    """Settings of a fine-tuning."""

    COST: ClassVar[float] = 300.0  # a hundred epochs, each of which costs three passes
    NEEDS_WEIGHTS: ClassVar[bool] = False  # whether `outcome` needs the weights of a training that has already ended

    def selecting(self, select: SelectOn) -> "Finetune":
        # A recipe that reports the last epoch trains on all images and selects nothing.
        return replace(self, select=select) if "val" in (select, self.select) else self

    def check_network(self, spec: FrozenSpec) -> None:
        check_tables(vit_spec(spec, "fine-tuning trains the blocks of a ViT"), self.tables)

    def cost(self, scale: Scale) -> Work:
        self.check_network(scale.spec)
        count = round(scale.images["train"] * self.fraction * (1 - self.holdout * (self.select == "holdout")))
        if self.fraction < 1:
            # A small share has at least one image of each class, so it may be larger; `check_images` counts exactly.
            count = max(count, self.batch)
        self.check_batch(count)
        updates = self.epochs * (count // self.batch)
        spec, val, size = scale.spec, scale.images["val"], self.image_size
        held = round(scale.images["train"] * self.fraction * self.holdout) if self.select == "holdout" else 0
        evaluated = -(-self.epochs // self.judge_every) * (held or val) + (val if held else 0)
        micro_batch_size = min(scale.batch_size or max_micro_batch(scale.device), self.batch)
        of = str(self)
        parts = (
            Part(kind="start", count=1, of=of),
            Part(kind="training", count=updates * self.batch, flops=training_flops(spec, size), of=of),
            Part(kind="updates", count=updates, of=of),
            Part(kind="evaluation", count=evaluated, flops=forward_flops(spec, size), of=of),
        )
        memory = training_bytes(spec, micro_batch_size, size)
        state = 12 * training_bytes(spec, 0) / 16  # weights and two moments, without gradients; two states are kept
        return Work(parts=parts, iterations=updates, memory=memory, disk=2 * state)

    def check_images(self, space: Workspace) -> None:
        train, _, _ = self.split_training_images(open_splits(space)[0], space.seed)
        self.check_batch(len(train))

    def reads(self, space: Workspace) -> Reads:
        return lists_read(self.lists, space) if self.fraction < 1 else {}

    def check_batch(self, images: int) -> None:
        """Raises ValueError if the training images are fewer than a batch, and suggests the largest power of 2."""
        if images < self.batch:
            key, batch = type(self).__module__.rpartition(".")[2], 1 << max(images, 1).bit_length() - 1
            remedy = option("settings", {f"{key}.batch": batch}) if batch > 1 or not self.mixes else "add images"
            raise ValueError(f"{images} training images do not fill a batch of {self.batch}; {remedy}")

    def split_training_images(self, train: ImageSet, seed: int) -> tuple[ImageSet, ImageSet | None, str]:
        """The images to train on; the held-out ones, None unless select=holdout; and a warning about a share that is
        larger than the setting, and classes of which no image is held out, "" for none."""
        warning = share_warning(train, self.fraction, self.lists)
        train = draw_share(train, self.fraction, seed, self.lists)
        if self.select != "holdout":
            return train, None, warning
        warning = "; ".join(filter(None, [warning, not_held_out_warning(train.labels, train.classes)]))
        held, name = held_out(train, self.holdout, seed), f"{self.holdout:g}-seed{seed}"
        rest = np.setdiff1d(np.arange(len(train)), held)
        return train.subset(rest, f"without-holdout-{name}"), train.subset(held, f"holdout-{name}"), warning

    def run(self, export: ViTExport, space: Workspace) -> Outcome:
        self.check_network(export.spec)
        train, val = open_splits(space)
        train, held, warning = self.split_training_images(train, space.seed)
        check_labels(train.labels, val.labels, train)
        self.check_batch(len(train))
        task = with_supported_pool(self, export.spec)
        outcome = task.train(export, train, held, val, space)
        if warning:
            facts = dict(outcome.facts)
            outcome = replace(outcome, facts=facts | {"warnings": [*facts["warnings"], warning]})
        return record_fallback(outcome, {self.pool: task.pool}, export.spec)

    def train(
        self, export: ViTExport, train: ImageSet, held: ImageSet | None, val: ImageSet, space: Workspace
    ) -> Outcome:
        """Train on `train` and report on `val`. held: images that select the epoch, or None."""
        training, selection, groups_of = self.prepare(export, train, held, val, space)
        with training.lock():
            training.resume(self.NEEDS_WEIGHTS or bool(space.keep_heads))
            groups = mixed_groups(groups_of(range(training.step, training.steps)), space)
            training.run(groups, selection, f"fine-tuning on {space.data.removesuffix(':')}")
        return self.outcome(export, training, selection, train, val)

    def outcome(
        self, export: ViTExport, training: Training, selection: ModelSelection, train: ImageSet, val: ImageSet
    ) -> Outcome:
        """The outcome of a training that has ended."""
        facts = selection.facts(training.history) | self.facts(training, {"train": train, "val": val})
        facts |= {"transform": selection.val.transform.name, "warnings": self.warnings(export, training.plan)}
        metrics = with_class_means(selection.metrics(training.arrays), val)
        head = Head(tensors=training.reported, classes=train.classes) if training.space.keep_heads else None
        return Outcome(metrics=metrics, arrays=selection.predictions(training.arrays), facts=facts, head=head)

    @property
    def predicts(self) -> Predicts:
        return "classes"

    def apply_head(
        self, head: Head, export: ViTExport, images: ImageSet, space: Workspace, emit: Emit, first: int = 0
    ) -> None:
        """The head is the whole fine-tuned network: its tensors replace those of the export."""
        sized, settings = self.at_image_size(export), with_supported_pool(self, export.spec)
        classifier = Classifier(sized, len(head.classes), settings, seed=0)
        classifier.load_state_dict(dict(head.tensors))
        classifier.to(space.device).eval()
        fit_attention(classifier, space.device, space.precision)
        if space.compiled:
            compile_blocks(classifier, space.device)

        def logits_of(batch: DecodedBatch, span: range) -> torch.Tensor:
            with autocast(space.device, space.precision):
                return classifier(normalise(batch.pixels.to(space.device), export.mean, export.std))

        transform = self.eval_transform(sized, space)
        emit_logits(logits_of, images, transform, replace(space, batch_size=None), emit, first)

    def at_image_size(self, export: ViTExport) -> ViTExport:
        """The export for images of the size that the settings name, if they do."""
        return export if self.image_size in (None, export.spec.image_size) else export.at_size(self.image_size)

    def eval_transform(self, sized: ViTExport, space: Workspace) -> EvalTransform:
        """The transform of validation images for an export `at_image_size`."""
        size = sized.spec.side
        return EvalTransform(size=size, crop=self.crop, interpolation=self.interpolation, decode=space.decode)

    def prepare(
        self, export: ViTExport, train: ImageSet, held: ImageSet | None, val: ImageSet, space: Workspace
    ) -> tuple[Training, ModelSelection, Callable[[range], MixedGroups]]:
        """The training before its first step, the evaluation of its epochs, and a function that returns the groups of
        images on which this process trains in given steps."""
        plan, micro_batch_size = self.plan(len(train), space)
        sized = self.at_image_size(export)
        classifier = Classifier(sized, len(train.classes), self, space.seed)
        key = self.key(export, train, val, plan, micro_batch_size, space)
        folder = space.world.on_rank0(lambda: training_folder(space.cache / "finetune", key, [train, val]))
        training = Training(classifier, self, space, plan=plan, micro_batch_size=micro_batch_size, folder=folder)
        transform = self.eval_transform(sized, space)
        selection = ModelSelection(
            select=self.select,
            val=Evaluator(image_set=val, transform=transform, space=space),
            held_out=Evaluator(image_set=held, transform=transform, space=space) if held else None,
            mean=export.mean,
            std=export.std,
        )

        def groups_of(steps: range) -> MixedGroups:
            return MixedGroups(
                image_set=train,
                plan=plan,
                steps=steps,
                groups=training.groups,
                settings=self,
                transform=training_transform(self, sized.spec.side, export.mean, export.std),
                decode=space.decode,
            )

        return training, selection, groups_of

    def facts(self, training: Training, sets: dict[str, ImageSet]) -> dict[str, Any]:
        """JSON values about the training and its images. sets: the training and validation images, by split."""
        plan, world = training.plan, training.world
        facts: dict[str, Any] = {
            "learning_rate": self.peak,
            "steps": training.steps,
            "batch": {
                "images": plan.batch,
                "at_once": training.micro_batch_size,
                "accumulated": plan.batch // (training.micro_batch_size * world.size),
                "processes": world.size,
                "mixed_together": plan.group,
            },
            **({"crops": "fast"} if training.space.decode == "fast" else {}),
        }
        for split, images in sets.items():
            facts[split] = {
                "url": images.url,
                "fingerprint": images.fingerprint,
                "images": len(images),
                "skipped": dict(sorted(training.skipped[split].items())),
            }
        return facts

    def plan(self, images: int, space: Workspace) -> tuple[GroupPlan, int]:
        """How batches are divided into groups, and how many images of a group one forward pass takes."""
        share = share_of(self.batch, space.world.size)
        if space.batch_size is not None and space.batch_size < 1:
            raise ValueError(f"batch size {space.batch_size}: give 1 or more")
        group = group_size(share, self.mixed_together, even=self.mixes)
        largest = space.batch_size or max_micro_batch(space.device)
        plan = GroupPlan(count=images, batch=self.batch, group=group, seed=space.seed, repeats=self.repeats)
        return plan, group_size(group, largest, even=False)

    def key(
        self,
        export: ViTExport,
        train: ImageSet,
        val: ImageSet,
        plan: GroupPlan,
        micro_batch_size: int,
        space: Workspace,
    ) -> dict[str, Any]:
        """Everything that the bits of a training depend on, as JSON values; names the folder of its states."""
        return {
            "version": VERSION,
            "export": export.digest,
            "settings": settings_of(self),
            "train": train.fingerprint,
            "val": val.fingerprint,
            "plan": asdict(plan),
            "part": micro_batch_size,
            "processes": space.world.size,
            "seed": space.seed,
            "precision": space.precision,
            **({"compiled": True} if space.compiled else {}),
            "decode": space.decode,
            **({"crops": "fast"} if space.decode == "fast" else {}),  # absent if exact, as before "fast" existed
            "skip_bad": space.skip_bad,
            "device": torch.device(space.device).type,
            "threads": torch.get_num_threads(),
        }

    def warnings(self, export: ViTExport, plan: GroupPlan) -> list[str]:
        """Differences between this training and the source's that may change the number, one line each."""
        warnings = [
            f"{name}={rate:g} is above the peak rate, {self.peak:.3g} with batch={self.batch}: raise lr or batch"
            for name, rate in (("start", self.start), ("floor", self.floor))
            if rate > self.peak
        ]
        size = SIZES.get((export.spec.width, export.spec.depth), export.spec.label)
        if self.size and size != self.size:
            warnings.append(f"the recipe is for ViT-{self.size}, the model is {export.spec.label}")
        branch = export.facts.get("branch", self.branch)
        if self.branch and branch != self.branch:
            warnings.append(f"the source fine-tunes the {self.branch} network, this is the {branch} one")
        if self.mixes and plan.group < self.mixed_together:
            warnings.append(f"mixup and cutmix drew from {plan.group} images, not {self.mixed_together}")
        return warnings


def max_micro_batch(device: str) -> int:
    """Images in a forward pass on a device, unless --batch-size is given."""
    return MAX_MICRO_BATCH.get(torch.device(device).type, MAX_MICRO_BATCH["cpu"])


MAE = Finetune(lr=5e-4, mixed_together=32, size="B")
LUT = replace(MAE, lr=2.5e-4, lr_rule="sqrt(batch)/8")
# BEiT's code, on which ExtreMA's and iBOT's are based: its table of learning rates and its head.
BEIT = Finetune(
    lr=4e-3, lr_rule="absolute", warmup_epochs=20, schedule="beit", head_std=0.02, head_scale=1e-3, size="B"
)
EXTREMA = replace(BEIT, lr=1e-3, lr_rule="batch/256", warmup_epochs=5, layer_decay=0.75, branch="online")
IBOT = replace(BEIT, drop_path=0.2, pool="cls", interpolation="bilinear")
MOCA = Finetune(lr=1e-3, drop_path=0.2, size="B", branch="teacher")
DEIT = Finetune(
    lr=5e-4,
    lr_rule="batch/512",
    schedule="deit",
    start=1e-6,
    floor=1e-5,
    layer_decay=1.0,
    pool="cls",
    head_std=0.02,
    mixed_together=256,
    repeats=3,
    size="B",
)
# DeiT's code as iBOT uses it for transfer: no layer decay, and weight decay of the tokens as well.
IBOT_TRANSFER = replace(DEIT, lr=7.5e-6, batch=768, epochs=1000, decay_tokens=True, mixed_together=96)
CAE = replace(
    BEIT, lr=8e-3, batch=4096, warmup_epochs=5, tables="fresh", train_positions=False, pooled_norm="pretrained"
)
MASKFEAT = Finetune(
    lr=1e-3,
    batch=2048,
    warmup_epochs=20,
    floor=4e-6,
    decay_tokens=True,
    head_std=0.02,
    head_scale=1e-3,
    mixed_together=64,
    judge_every=10,
    size="B",
)
SMOKE = Finetune(
    lr=4e-3,
    lr_rule="absolute",
    batch=32,
    epochs=4,
    warmup_epochs=1,
    layer_decay=0.75,
    drop_path=0.0,
    policy="",
    crop_scale=0.8,
    flip=0.0,
    erase=0.0,
    mixup=0.0,
    cutmix=0.0,
)

DEIT_SOURCE = (
    "facebookresearch/deit main.py (lr 5e-4 for 512 images, warm-up from 1e-6, floor 1e-5, repeated augmentation; its "
    "averaged weights are not judged); batch 4 x 256 is that of DeiT's README; it reports the best epoch on val: "
    "select=val"
)
CAE_SOURCE = (
    "lxtGH/CAE tools/run_class_finetuning.py:218-219 (RandAugment), :371-377 (the norm behind the mean starts as the "
    "encoder's), models/modeling_finetune.py:431 (sine positions do not train), :39 (a relative table of zeros in "
    "every block); it reports the best epoch on val: select=val"
)
MASKFEAT_SOURCE = (
    "facebookresearch/SlowFast slowfast/config/defaults.py:1281-1284 (rate and floor grow with the shards); the rate "
    "follows a cosine by update, and tokens have weight decay (ZERO_DECAY_POS_CLS); ours: the warm-up begins at 0, not "
    "1e-8, biases of the new norm and the head at 0, not 0.02 and 2e-5; it reports the best epoch on val: select=val"
)

MAE_SOURCE = "facebookresearch/mae FINETUNE.md and main_finetune.py; it reports the best epoch on val: select=val"
LUT_SOURCE = (
    "LUT supplementary, table D, and naver-ai/lut main_finetune.py:332-334 (blr * sqrt(batch) / 8), mixed by 32 as in "
    "docs/FINETUNE.md, whose blr 1e-3 and layer decay 0.75 for ViT-B differ; it reports the best epoch on val "
    "(select=val)"
)
EXTREMA_SOURCE = (
    "microsoft/ExtreMA finetune/run_class_finetuning.py, modeling_finetune.py:204-276; it reports the best epoch on "
    "val (select=val); mixed by 128 as in its README; "
)
IBOT_SOURCE = (
    "bytedance/ibot run.sh imagenet_cls, evaluation/README.md, run_class_finetuning.py:92 (lr 4e-3; theirs is swept), "
    ":288 (bilinear in evaluation); it reports the best epoch on val: select=val"
)


PROTOCOLS = {
    "finetune@smoke": smoke_protocol(SMOKE, "seconds on digits"),
    "finetune@mae": Protocol(task=MAE, version=2, source=MAE_SOURCE),
    "finetune@mae_L": Protocol(
        task=replace(MAE, lr=1e-3, epochs=50, layer_decay=0.75, drop_path=0.2, size="L"), version=2, source=MAE_SOURCE
    ),
    "finetune@mae_H": Protocol(
        task=replace(MAE, lr=1e-3, epochs=50, layer_decay=0.75, drop_path=0.3, mixed_together=16, size="H"),
        version=3,
        source=MAE_SOURCE,
    ),
    "finetune@lut_S": Protocol(
        task=replace(LUT, lr=5e-4, epochs=300, layer_decay=0.75, size="S"), version=2, source=LUT_SOURCE
    ),
    "finetune@lut": Protocol(task=LUT, version=2, source=LUT_SOURCE),
    "finetune@lut_L": Protocol(task=replace(LUT, lr=1e-3, epochs=50, size="L"), version=2, source=LUT_SOURCE),
    "finetune@lut_docs": Protocol(
        task=replace(LUT, lr=1e-3, layer_decay=0.75),
        version=2,
        source="naver-ai/lut docs/FINETUNE.md, both of its commands (ViT-B, blr 1e-3, layer decay 0.75; 8 x 32 x 4 "
        "images), main_finetune.py:332-334; table D differs, see finetune@lut; it reports the best epoch on val "
        "(select=val)",
    ),
    "finetune@extrema_S": Protocol(
        task=replace(EXTREMA, epochs=200, size="S"),
        version=2,
        source=EXTREMA_SOURCE + "paper, table 13 (IN-1k weights)",
    ),
    "finetune@extrema": Protocol(task=EXTREMA, version=2, source=EXTREMA_SOURCE + "paper, table 13 (IN-1k weights)"),
    "finetune@extrema_22k": Protocol(
        task=replace(EXTREMA, lr=5e-4, layer_decay=0.65, drop_path=0.2),
        version=2,
        source=EXTREMA_SOURCE + "its README's command, for IN-22k weights; appendix E has drop path 0.1",
    ),
    "finetune@extrema_22k_S": Protocol(
        task=replace(EXTREMA, lr=5e-4, epochs=200, layer_decay=0.65, size="S"),
        version=2,
        source=EXTREMA_SOURCE
        + "paper, appendix E and table 13 (IN-22k weights: lr 5e-4, layer decay 0.65; 200 epochs)",
    ),
    "finetune@moca": Protocol(
        task=MOCA,
        version=3,
        source="valeoai/MOCA README.md:125-148, eval_finetune.py (--use_teacher --global_pool --use_fc_norm, 8 x 128, "
        "last epoch)",
    ),
    "finetune@moca_L": Protocol(
        task=replace(MOCA, size="L"),
        version=3,
        source="MOCA table 9 has a ViT-L at 84.9 without stating its training; ours: the training of finetune@moca",
    ),
    "finetune@ibot_S": Protocol(
        task=replace(IBOT, epochs=200, layer_decay=0.75, drop_path=0.1, size="S"), version=3, source=IBOT_SOURCE
    ),
    "finetune@ibot": Protocol(task=IBOT, version=3, source=IBOT_SOURCE),
    "finetune@ibot_L": Protocol(
        task=replace(IBOT, epochs=50, warmup_epochs=5, layer_decay=0.75, drop_path=0.4, mixed_together=64, size="L"),
        version=3,
        source=IBOT_SOURCE,
    ),
    "finetune@simmim": Protocol(
        task=replace(
            BEIT, lr=1.25e-3, lr_rule="batch/512", batch=2048, schedule="simmim", start=1e-6, floor=1e-6, clip=5.0
        ),
        version=2,
        source="microsoft/SimMIM configs/vit_base__800ep/simmim_finetune*.yaml, utils.py:98-284, "
        "main_finetune.py:322-333; batch 2048 is that of its README's Swin command, the yaml leaves the number of "
        "GPUs open; it reports the best epoch on val: select=val",
    ),
    "finetune@beit": Protocol(
        task=BEIT,
        version=2,
        source="microsoft/unilm beit/get_started_for_image_classification.md (ViT-B after self-supervision), "
        "run_class_finetuning.py; best epoch on val",
    ),
    "finetune@msn": Protocol(
        task=replace(MAE, drop_path=0.2),
        version=1,
        source="facebookresearch/msn README.md:121 (fine-tuned by MAE's code) and its paper, appendix A.4 (ViT-B: lr "
        "2e-3 at batch 1024, 100 epochs, warm-up 5, layer decay 0.65, drop path 0.2); else " + MAE_SOURCE,
    ),
    "finetune@beit_L": Protocol(
        task=replace(
            BEIT, lr=1e-3, epochs=50, warmup_epochs=5, layer_decay=0.75, drop_path=0.2, mixed_together=64, size="L"
        ),
        version=1,
        source="microsoft/unilm beit/get_started_for_image_classification.md (BEiT-large after self-supervision, 8 x "
        "64 x 2 images), run_class_finetuning.py; best epoch on val",
    ),
    "finetune@data2vec": Protocol(
        task=replace(BEIT, warmup_epochs=10, drop_path=0.2, weight_decay=0.0, tables="shared"),
        version=2,
        source="facebookresearch/data2vec_vision README.md (ViT-B), run_class_finetuning.py:324-325; its image "
        "statistics are 0.5 unless the export says otherwise (--statistics half on import); best epoch on val",
    ),
    "finetune@data2vec_L": Protocol(
        task=replace(
            BEIT, lr=5e-3, epochs=50, warmup_epochs=5, drop_path=0.25, mixed_together=64, tables="shared", size="L"
        ),
        version=1,
        source="facebookresearch/data2vec_vision README.md (ViT-L, 16 x 64 images; its command names run_cyclical.py, "
        "which takes none of these options, and leaves the warm-up open: 5 epochs as BEiT's L is ours); else as "
        "finetune@data2vec",
    ),
    "finetune@deit": Protocol(
        task=replace(DEIT, epochs=150),
        version=2,
        source="facebookresearch/moco-v3 README.md:85 (DeiT's code, ViT-B for 150 epochs, 83.2) and " + DEIT_SOURCE,
    ),
    "finetune@deit_S": Protocol(
        task=replace(DEIT, epochs=300, size="S"),
        version=3,
        source="facebookresearch/moco-v3 README.md:85 (DeiT's defaults, 300 epochs; 150 are its ViT-B's alone) and "
        + DEIT_SOURCE,
    ),
    "finetune@ibot_transfer": Protocol(
        task=IBOT_TRANSFER,
        version=1,
        source="bytedance/ibot run.sh:223-299 (8 x 96 images, lr 7.5e-6 for 512, 1000 epochs, class token; 7.5e-5 on "
        "Cars, 360 epochs on iNaturalist), evaluation/README.md:117 (no layer decay; ViT-S: lr 5e-5 and 2.5e-5 on "
        "iNaturalist 2018 and 2019), evaluation/eval_cls.py; its averaged weights, which it does not judge, are left "
        "out; it reports the best epoch on val: select=val",
    ),
    "finetune@maskfeat": Protocol(
        task=MASKFEAT,
        version=3,
        source="facebookresearch/SlowFast configs/masked_ssl/in1k_VIT_B_MaskFeat_FT.yaml (lr 2e-3 and floor 1e-6 for "
        "a shard of 8 x 64 images, here four: batch 2048, layer decay 0.65, drop path 0.1, warm-up 20, every 10th "
        "epoch judged); " + MASKFEAT_SOURCE,
    ),
    "finetune@maskfeat_L": Protocol(
        task=replace(
            MASKFEAT,
            epochs=50,
            warmup_epochs=5,
            floor=8e-6,
            layer_decay=0.75,
            mixed_together=32,
            judge_every=1,
            size="L",
        ),
        version=1,
        source="facebookresearch/SlowFast configs/masked_ssl/in1k_VIT_L_MaskFeat_FT.yaml (lr 1e-3 and floor 1e-6 for "
        "a shard of 8 x 32 images, here eight: batch 2048, 50 epochs, layer decay 0.75, drop path 0.1, warm-up 5); "
        + MASKFEAT_SOURCE,
    ),
    "finetune@cae": Protocol(
        task=CAE,
        version=3,
        source="lxtGH/CAE scripts/cae_base_finetune.sh (ViT-B: lr 8e-3 at batch 32 x 128, warm-up 5, layer decay "
        "0.65, drop path 0.1); " + CAE_SOURCE,
    ),
    "finetune@cae_L": Protocol(
        task=replace(CAE, lr=2e-3, epochs=50, layer_decay=0.75, drop_path=0.2, mixed_together=64, size="L"),
        version=1,
        source="lxtGH/CAE scripts/cae_large_finetune.sh (ViT-L: lr 2e-3 at batch 32 x 64 x 2, 50 epochs, layer decay "
        "0.75, drop path 0.2); " + CAE_SOURCE,
    ),
}

# The sources of all other protocols report the best epoch on val.
REPORTS_LAST_EPOCH = ("finetune@smoke", "finetune@moca", "finetune@moca_L")
REPORTED = {name: protocol for name, protocol in PROTOCOLS.items() if name not in REPORTS_LAST_EPOCH}
PROTOCOLS |= as_reported(REPORTED, version=2)
PROTOCOLS |= as_reported({name: protocol for name, protocol in REPORTED.items() if protocol.version == 1})
CHANGED = ("finetune@cae", "finetune@deit_S", "finetune@maskfeat")
PROTOCOLS |= as_reported({name: PROTOCOLS[name] for name in CHANGED}, version=3)
# ExtreMA's appendix E has a drop path of 0.1, its README's command 0.2.
PROTOCOLS |= as_reported({"finetune@extrema_22k": PROTOCOLS["finetune@extrema_22k"]}, version=2, drop_path=0.1)

SUITES = {
    "smoke": ("finetune@smoke",),
    "full": ("finetune@mae",),
    "everything": ("finetune@mae", "finetune@ibot"),
    "paper:extrema": ("finetune@extrema_paper",),
    "paper:lut": ("finetune@lut_paper",),
    "paper:moca": ("finetune@moca",),
}
