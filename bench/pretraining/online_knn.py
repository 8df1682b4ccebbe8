"""k-NN accuracy of the encoder while it is pretrained: the k-NN of `bench run`, on features that are not kept."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from checkpoints.export import ViTExport
from engine.tasks import Workspace
from pretrain.method import TrainProgress
from probes.splits import open_splits
from probes.tasks.knn import Knn

K = 20  # what the papers report: best of DINO's four, MOCA's only one


def knn_space(out: Path, data: str, device: str, precision: str, limit: int | None, skip_bad: bool) -> Workspace:
    """Where the k-NN of a training in the folder `out` runs; its precision is the training's, or close to it."""
    return Workspace(
        cache=out / "online-knn",
        data=data,
        device=device,
        precision="float32" if precision == "float32" else "bfloat16",
        limit=limit,
        skip_bad=skip_bad,
    )


@dataclass(frozen=True, kw_only=True)
class OnlineKnn:
    """A monitor for pretrain.loop.trainer.Run; all processes call it, and share the work.

    The gallery are a `fraction` of the training images of `space.data`, drawn by classes with the seed 0 each time, the
    queries its validation images, the feature is the one that the method's source evaluates. `space.cache` holds the
    features of one call, and is deleted after it.
    """

    space: Workspace
    k: int = K
    fraction: float = 1.0

    def check(self) -> None:
        """ValueError where k-NN cannot be computed on these images, before anything is trained."""
        open_splits(self.space)

    def __call__(self, export: ViTExport, progress: TrainProgress) -> Mapping[str, float]:
        """`knn_top1` and `knn_top5` in percent."""
        # torch: FAISS may be missing, and the gallery is searched once
        task = Knn(k=(self.k,), fraction=self.fraction, pool=export.spec.pool, backend="torch")
        world = self.space.world
        world.on_rank0(self.clear)  # what a killed run left
        try:
            numbers = task.run(export, self.space).numbers
        finally:
            if world.is_rank0:
                self.clear()
        return {f"knn_{name.partition('_')[0]}": value for name, value in numbers.items() if name.startswith("top")}

    def clear(self) -> None:
        shutil.rmtree(self.space.cache, ignore_errors=True)
