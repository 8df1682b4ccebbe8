"""What is logged of an encoder during its pretraining, on features not kept: k-NN and health of `bench run`."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from checkpoints.export import ViTExport
from engine.tasks import Outcome, Task, Workspace
from imagesets.sets import open_set, splits_of
from pretrain.method import TrainProgress
from probes.splits import open_splits
from probes.tasks.health import Health
from probes.tasks.knn import Knn

K = 20  # what the papers report: best of DINO's four, MOCA's only one


@dataclass(frozen=True, kw_only=True)
class OnlineProbe:
    """Base of monitors for pretrain.loop.trainer.Run; all processes call them, and share the work. `space.cache` holds
    the features of one call, and is deleted after it."""

    OPTION: ClassVar[str]  # that names the images
    space: Workspace

    def check(self) -> None:
        """ValueError where it cannot be computed on these images, before anything is trained."""
        raise NotImplementedError

    def __call__(self, export: ViTExport, progress: TrainProgress) -> Mapping[str, Any]:
        """Values for the log, and `warnings`, lines."""
        raise NotImplementedError

    def outcome(self, task: Task, export: ViTExport) -> Outcome:
        world = self.space.world
        world.on_rank0(self.clear)  # what a killed run left
        try:
            return task.run(export, self.space)
        finally:
            if world.is_rank0:
                self.clear()

    def clear(self) -> None:
        shutil.rmtree(self.space.cache, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class OnlineKnn(OnlineProbe):
    """k-NN accuracy. The gallery are a `fraction` of the training images of `space.data`, drawn by classes with the
    seed 0 each time, the queries its validation images, the feature is the one that the method's source evaluates."""

    OPTION = "--knn-data"
    k: int = K
    fraction: float = 1.0

    def check(self) -> None:
        open_splits(self.space)

    def __call__(self, export: ViTExport, progress: TrainProgress) -> Mapping[str, Any]:
        """`knn_top1` and `knn_top5` in percent."""
        # torch: FAISS may be missing, and the gallery is searched once
        task = Knn(k=(self.k,), fraction=self.fraction, pool=export.spec.pool, backend="torch")
        numbers = self.outcome(task, export).numbers
        return {f"knn_{name.partition('_')[0]}": value for name, value in numbers.items() if name.startswith("top")}


@dataclass(frozen=True, kw_only=True)
class OnlineHealth(OnlineProbe):
    """Health of the features of the validation images of `space.data`; of all images of a set without labels."""

    OPTION = "--health-data"

    def check(self) -> None:
        self.space.images("val", lambda url, split: open_set(url, split if split in splits_of(url) else "train"))

    def __call__(self, export: ViTExport, progress: TrainProgress) -> Mapping[str, Any]:
        """`health_rankme`, `health_alpha_req`, ..., and a warning where the features have collapsed."""
        self.check()
        outcome = self.outcome(Health(pool=export.spec.pool), export)
        warnings = [f"{line} (health@val on {self.space.data})" for line in outcome.facts["warnings"]]
        return {f"health_{name}": value for name, value in outcome.numbers.items()} | {"warnings": warnings}
