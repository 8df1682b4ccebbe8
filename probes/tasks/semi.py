"""Semi-supervised classification: fine-tuning on 1 or 10 % of the training images, for a thousand epochs.

The head reads the first layer of the pretrained projector, as in SimCLR-v2 (Chen et al. 2020). The training is that of
probes/tasks/finetune.py. Subsets are drawn by the seed, unless `lists` names a folder with the published lists.
"""

from dataclasses import asdict, dataclass, replace
from typing import ClassVar

from engine.tasks import Protocol, as_reported, smoke_protocol
from probes.lowshot.shots import PUBLISHED_LISTS
from probes.tasks.finetune import BEIT, SMOKE, Finetune


@dataclass(frozen=True, kw_only=True)
class SemiSupervised(Finetune):
    """Settings of a semi-supervised training, which are those of fine-tuning."""

    COST: ClassVar[float] = 100.0  # a thousand epochs of a hundredth to a tenth of the images


EXTREMA = replace(
    SemiSupervised(**asdict(BEIT)),
    lr=5e-6,
    lr_rule="batch/256",
    epochs=1000,
    warmup_epochs=5,
    layer_decay=1.0,
    pool="cls",
    projector=True,
    size="",
)
# The peak 5e-6 * 1024 / 512 equals the floor, so the learning rate is constant after the warm-up. Optimiser and
# schedule are timm's, which exempts tokens from weight decay only if the network requests it; iBOT's does not.
IBOT = replace(
    EXTREMA, lr_rule="batch/512", schedule="deit", start=1e-6, floor=1e-5, head_scale=1.0, decay_tokens=True, repeats=3
)
EXTREMA_SOURCE = (
    "ExtreMA section 4 (head behind the projector's first layer, AdamW, lr 5e-6, 1000 epochs, batch 1024, BEiT's "
    "augmentation); no code released; ours, after iBOT and BEiT: a rate for 256 images, as in its "
    "finetune/run_class_finetuning.py:395, layer decay, warm-up and the floor of 1e-6"
)
IBOT_SOURCE = (
    "bytedance/ibot evaluation/semi_supervised/eval_cls.py:44-166, 207-256, 641-642, 706-720, 782-787, 860, "
    "evaluation/README.md (--finetune_head_layer 1); its averaged weights, which it does not judge, are left out; it "
    "reports the best epoch on val: select=val"
)
PLAIN_SOURCE = (
    "for the networks of ExtreMA table 10 without a projector, BEiT and MAE; ours: the head reads the mean of their "
    f"patches, as in BEiT's fine-tuning; else {EXTREMA_SOURCE}"
)
CLASS_SOURCE = (
    "ours, for files that contain a backbone without its projector: the head reads the class token itself; else "
    f"{EXTREMA_SOURCE}"
)


def subset_protocols(name: str, task: SemiSupervised, source: str, version: int) -> dict[str, Protocol]:
    """The protocols of a recipe on 1 and on 10 % of the images."""
    fractions = {"1percent": 0.01, "10percent": 0.1}
    return {
        f"{name}_{suffix}": Protocol(task=replace(task, fraction=fraction), version=version, source=source)
        for suffix, fraction in fractions.items()
    }


PROTOCOLS = {
    "semi@smoke": smoke_protocol(
        SemiSupervised(**asdict(replace(SMOKE, fraction=0.5, batch=16))),
        "half of the images for seconds, without a projector",
    ),
    **subset_protocols("semi@extrema", EXTREMA, EXTREMA_SOURCE, 3),
    **subset_protocols("semi@ibot", IBOT, IBOT_SOURCE, 3),
    **subset_protocols("semi@extrema_avg", replace(EXTREMA, pool="avg", projector=False), PLAIN_SOURCE, 3),
    **subset_protocols("semi@extrema_cls", replace(EXTREMA, projector=False), CLASS_SOURCE, 3),
}

# ExtreMA's code is based on BEiT's, which reports the best epoch on val.
for recipe, version in (("semi@extrema", 3), ("semi@ibot", 2)):
    reported = {name: PROTOCOLS[name] for name in PROTOCOLS if name.startswith(recipe)}
    PROTOCOLS |= as_reported(reported, version, lists=PUBLISHED_LISTS)

SUITES = {
    "smoke": ("semi@smoke",),
    "full": ("semi@extrema_cls_1percent",),  # needs no projector, which few exports contain
    "everything": ("semi@ibot_1percent", "semi@ibot_10percent"),
    "paper:extrema": ("semi@extrema_1percent_paper", "semi@extrema_10percent_paper"),
}
