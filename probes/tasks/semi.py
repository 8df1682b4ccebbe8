"""Semi-supervised classification: fine-tuning on 1 or 10 % of the training images, for a thousand epochs.

The head reads the first layer of the pretrained projector, as in SimCLR-v2 (Chen et al. 2020). The training is that of
probes/tasks/finetune.py. Subsets are drawn by the seed, unless `lists` names a folder with the published ones.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from engine.tasks import Protocol
from probes.tasks.finetune import BEIT, SMOKE, Finetune


@dataclass(frozen=True, kw_only=True)
class SemiSupervised(Finetune):
    """Settings of one training, those of fine-tuning."""

    COST: ClassVar[float] = 100.0  # a thousand epochs of a hundredth to a tenth of the images


def like(task: Finetune, **settings: Any) -> SemiSupervised:
    """The training of a fine-tuning recipe, with other `settings`."""
    return SemiSupervised(**asdict(task) | settings)


EXTREMA = like(BEIT, lr=5e-6, epochs=1000, warmup_epochs=5, layer_decay=1.0, pool="cls", projector=True, size="")
# Peak 5e-6 * 1024 / 512 is the floor: after its warm-up the rate is constant. timm's optimiser and schedule, whose
# weight decay spares the tokens only of networks that ask for it, as iBOT's does not.
IBOT = replace(
    EXTREMA,
    lr_rule="batch/512",
    schedule="deit",
    start=1e-6,
    floor=1e-5,
    head_scale=1.0,
    decay_tokens=True,
    repeats=3,
)
EXTREMA_SOURCE = (
    "ExtreMA section 4 (head behind the projector's first layer, AdamW, lr 5e-6, 1000 epochs, batch 1024, BEiT's "
    "augmentation); no code released: layer decay, warm-up and the floor of 1e-6 are ours, after iBOT and BEiT"
)
IBOT_SOURCE = (
    "bytedance/ibot evaluation/semi_supervised/eval_cls.py:44-166, 207-256, 641-642, 706-720, 782-787, 860, "
    "evaluation/README.md (--finetune_head_layer 1); its averaged weights, which it does not judge, are left out; it "
    "reports the best epoch on val: select=val"
)


PROTOCOLS = {
    "semi@smoke": Protocol(
        task=like(SMOKE, fraction=0.5, batch=16),
        version=1,
        source="ours: half of the images for seconds, without a projector; not to be compared with published numbers",
    ),
    "semi@extrema_1percent": Protocol(task=replace(EXTREMA, fraction=0.01), version=1, source=EXTREMA_SOURCE),
    "semi@extrema_10percent": Protocol(task=replace(EXTREMA, fraction=0.1), version=1, source=EXTREMA_SOURCE),
    "semi@ibot_1percent": Protocol(task=replace(IBOT, fraction=0.01), version=2, source=IBOT_SOURCE),
    "semi@ibot_10percent": Protocol(task=replace(IBOT, fraction=0.1), version=2, source=IBOT_SOURCE),
}

SUITES = {"smoke": ("semi@smoke",), "full": ("semi@ibot_1percent", "semi@ibot_10percent")}
