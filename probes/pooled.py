"""Base of the probes that read one feature vector per image: the class token, or the mean of the patches.

Of a network that lacks the one that a protocol names, they read the other (probes/features/fallbacks.py).
"""

from dataclasses import dataclass
from typing import Literal

from checkpoints.frozen import FrozenExport, FrozenSpec
from engine.settings import Fraction
from engine.tasks import Outcome, Shared, Task, Workspace
from probes.features.extract import transform_of
from probes.features.fallbacks import record_fallback, with_supported_pool
from probes.features.kinds import FeatureKind


@dataclass(frozen=True, kw_only=True)
class PooledTask(Task):
    """Settings and steps that these probes share; each defines `evaluate`."""

    pool: Literal["cls", "avg"] = "cls"  # the feature: class token or mean of the patches
    crop: Fraction = 0.875  # images are resized to the network's image size / crop, and the centre is taken
    interpolation: Literal["bilinear", "bicubic", "lanczos"] = "bicubic"  # for resizing images

    @property
    def kind(self) -> FeatureKind:
        """The feature that the probe reads."""
        return FeatureKind(self.pool)

    def kinds(self, spec: FrozenSpec) -> tuple[FeatureKind, ...]:
        """All features that the probe reads, `kind` first."""
        return (self.kind,)

    def check_network(self, spec: FrozenSpec) -> None:
        with_supported_pool(self, spec).kind.check(spec, type(self).__module__.rpartition(".")[2])

    def shares(self, export: FrozenExport, space: Workspace) -> Shared:
        kinds = with_supported_pool(self, export.spec).kinds(export.spec)
        return Shared(features={transform_of(export, space, self).name: kinds})

    def run(self, export: FrozenExport, space: Workspace) -> Outcome:
        self.check_network(export.spec)
        task = with_supported_pool(self, export.spec)
        return record_fallback(task.evaluate(export, space), {self.pool: task.pool}, export.spec)

    def evaluate(self, export: FrozenExport, space: Workspace) -> Outcome:
        """The outcome of `run`, whose `pool` is one that the network supports."""
        raise NotImplementedError
