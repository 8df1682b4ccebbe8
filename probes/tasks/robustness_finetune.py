"""Fine-tuned networks on shifted and cleaned test sets of ImageNet, the same sets as those of `robustness`.

The training is that of probes/tasks/finetune.py; a run that has both tasks trains once. The weights of the reported
epoch become an export, whose features are extracted and given to the head.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from checkpoints.export import ViTExport
from engine.tasks import Outcome, Protocol
from engine.work import Scale, Work
from imagesets.sets import ImageSet
from probes.features.extract import FeatureSet, transform_of
from probes.features.kinds import FeatureKind
from probes.finetune.model_selection import ModelSelection
from probes.finetune.trainer import Training
from probes.shifted import ShiftedSets, Shifts, protocol_on_shifts
from probes.tasks.finetune import PROTOCOLS as FINETUNE
from probes.tasks.finetune import Finetune


@dataclass(frozen=True, kw_only=True)
class RobustnessFinetune(Shifts, Finetune):
    """Settings of a fine-tuning and of its evaluation on shifted sets."""

    COST: ClassVar[float] = 301.0  # after the fine-tuning, whose training it shares
    NEEDS_WEIGHTS: ClassVar[bool] = True

    def key(self, *args: Any) -> dict[str, Any]:
        return self.plain(Finetune).key(*args)

    def forward_passes(self, val: int) -> int:
        """Images that the fine-tuned network reads: `val` validation images and the generated ones."""
        return val + self.generated_images(val)

    def cost(self, scale: Scale) -> Work:
        training = self.plain(Finetune).cost(scale)
        return self.with_pass(training, scale, self.forward_passes(scale.images["val"]), 1)

    def outcome(
        self, export: ViTExport, training: Training, selection: ModelSelection, train: ImageSet, val: ImageSet
    ) -> Outcome:
        classifier, space = training.classifier, training.space
        classifier.load_state_dict(training.reported)
        tuned = ViTExport.from_vit(classifier.eval().vit, export.preparation)
        kind = FeatureKind(self.pool)

        @torch.inference_mode()
        def logits(features: FeatureSet) -> Tensor:
            rows = torch.tensor(np.asarray(features[kind]), device=space.device)
            return classifier.head(classifier.entry(rows)).cpu()

        sets = ShiftedSets(
            shifts=self,
            export=tuned,
            kinds=[kind],
            transform=transform_of(tuned, space, self),
            space=space,
            classes=train.classes,
            val=val,
            logits=logits,
        )
        return sets.add_to(super().outcome(export, training, selection, train, val))


def robustness_of(name: str, version: int, **shifts: Any) -> Protocol:
    """The protocol that evaluates the networks fine-tuned by the protocol `name`, with settings of `Shifts`."""
    source = f"networks of {name} on the sets of robustness@dinov2, by its rules; ours: with fine-tuned networks"
    return protocol_on_shifts(RobustnessFinetune, FINETUNE[name], version, source, **shifts)


PROTOCOLS = {
    "robustness_finetune@mae": robustness_of("finetune@mae", 2),
    "robustness_finetune@ibot": robustness_of("finetune@ibot", 2),
    "robustness_finetune@smoke": robustness_of("finetune@smoke", 1, corruptions=("contrast",), images=100),
}
SUITES = {
    "smoke": ("robustness_finetune@smoke",),
    "everything": ("robustness_finetune@mae", "robustness_finetune@ibot"),
}
