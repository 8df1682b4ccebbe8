"""Linear heads on shifted and cleaned test sets of ImageNet: V2, ReaL, A, R, Sketch, ObjectNet and C.

Nothing is trained on these sets. The heads are those of a linear probe; a run that has both tasks trains them once.
robustness_finetune.py does the same for fine-tuned networks. The sets are searched for in ImageNet's folder and beside
it, under the names of their archives' folders (probes/shifted.py). Without a folder imagenet-c, its corruptions are
generated from validation images, and their metrics are named generated_....
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from checkpoints.frozen import FrozenExport
from engine.tasks import Outcome, Workspace
from engine.work import Scale, Work
from probes.features.extract import FeatureSet, transform_of
from probes.linear.probe import Probe
from probes.linear.sweep import Sweep
from probes.shifted import ShiftedSets, Shifts, protocol_on_shifts
from probes.tasks.linear import PROTOCOLS as LINEAR
from probes.tasks.linear import Linear


@dataclass(frozen=True, kw_only=True)
class Robustness(Shifts, Linear):
    """Settings of a linear probe and of its evaluation on shifted sets."""

    COST: ClassVar[float] = 3.0  # after the linear probe, whose training it shares

    def probe(self, export: FrozenExport, space: Workspace) -> Probe:
        return Probe.of(self.plain(Linear), export, space)

    def with_further_evaluations(self, outcome: Outcome, probe: Probe, sweep: Sweep) -> Outcome:
        head = sweep.own_reported_heads().get("top1")

        def logits(features: FeatureSet) -> Tensor | None:
            if head is None:
                return None
            blocks = probe.table(features, head.readouts).blocks(np.arange(len(features)))
            return torch.cat([head.logits(inputs)[:, 0].cpu() for inputs, _ in blocks])

        sets = ShiftedSets(
            shifts=self,
            export=probe.export,
            kinds=probe.task.kinds,
            transform=transform_of(probe.export, probe.space, probe.task),
            space=probe.space,
            classes=probe.train.classes,
            val=probe.val,
            logits=logits,
        )
        return super().with_further_evaluations(sets.add_to(outcome), probe, sweep)

    def cost(self, scale: Scale) -> Work:
        heads = self.plain(Linear).cost(scale)
        return self.with_pass(heads, scale, self.generated_images(scale.images["val"]), len(self.kinds))


SOURCE = (
    "V2 (Recht et al. 2019), ReaL (Beyer et al. 2020), A (Hendrycks et al. 2021), R, Sketch (Wang et al. 2019), "
    "ObjectNet (Barbu et al. 2019), C with AlexNet's errors (Hendrycks and Dietterich 2019), by the rules of "
    "facebookresearch/dinov2 eval/linear.py and dinov3 eval/metrics/imagenet_c.py; ours: the generated corruptions"
)


PROTOCOLS = {
    f"robustness@{name}": protocol_on_shifts(Robustness, LINEAR[probe], 2, f"heads of {probe} on {SOURCE}")
    for name, probe in {
        "dinov2": "linear@dinov2",
        "ibot_base": "linear_sgd@ibot_base",
        "cached": "linear_sgd@ibot_base_cached",
    }.items()
}
PROTOCOLS["robustness@smoke"] = PROTOCOLS["robustness@cached"].changed(
    version=1,
    source="ours: robustness@cached with one generated corruption of a few images, to try the machinery",
    corruptions=("contrast",),
    images=100,
)
SUITES = {
    "smoke": ("robustness@smoke",),
    "full": ("robustness@ibot_base",),
    "today": ("robustness@dinov2",),
    "everything": ("robustness@dinov2", "robustness@ibot_base", "robustness@cached"),
}
