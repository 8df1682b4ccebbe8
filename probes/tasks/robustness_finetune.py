"""Fine-tuned networks on ImageNet's shifted and cleaned test sets, those of `robustness`.

The training is that of probes/tasks/finetune.py, done once for both where a run has both; its weights of the reported
epoch are an export of their own, whose features the head reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from checkpoints.export import ViTExport
from checkpoints.spec import ViTSpec
from engine.tasks import Outcome, Protocol
from engine.work import Scale, Work
from imagesets.sets import ImageSet
from probes.features.extract import FeatureSet, transform_of
from probes.features.kinds import FeatureKind
from probes.finetune.model_selection import ModelSelection
from probes.finetune.trainer import Training
from probes.shifted import ShiftedSets, Shifts, evaluated_as
from probes.tasks.finetune import PROTOCOLS as FINETUNE
from probes.tasks.finetune import Finetune


@dataclass(frozen=True, kw_only=True)
class RobustnessFinetune(Shifts, Finetune):
    """Settings of a fine-tuning, and what it is evaluated on besides."""

    COST: ClassVar[float] = 301.0  # after the fine-tuning, whose training it shares
    NEEDS_WEIGHTS: ClassVar[bool] = True

    def key(self, *of: Any) -> dict[str, Any]:
        return self.plain(Finetune).key(*of)

    def read(self, val: int) -> int:
        """Images that the trained network reads, of so many validation images: these and the generated ones."""
        return val + self.generated(val)

    def summary(self, spec: ViTSpec, images: Mapping[str, int]) -> dict[str, Any]:
        return super().summary(spec, images) | {"forward passes": self.read(images["val"])}

    def cost(self, scale: Scale) -> Work:
        return self.with_pass(super().cost(scale), scale, self.read(scale.images["val"]), 1)

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
        return sets.added_to(super().outcome(export, training, selection, train, val))


def of_networks(name: str, version: int, **shifts: Any) -> Protocol:
    """The robustness of networks fine-tuned by a protocol."""
    source = f"networks of {name} on the sets of robustness@dinov2, by its rules; ours: that they are fine-tuned"
    return evaluated_as(RobustnessFinetune, FINETUNE[name], version, source, **shifts)


PROTOCOLS = {
    "robustness_finetune@mae": of_networks("finetune@mae", 2),
    "robustness_finetune@ibot": of_networks("finetune@ibot", 2),
    "robustness_finetune@smoke": of_networks("finetune@smoke", 1, corruptions=("contrast",), images=100),
}
SUITES = {
    "smoke": ("robustness_finetune@smoke",),
    "everything": ("robustness_finetune@mae", "robustness_finetune@ibot"),
}
