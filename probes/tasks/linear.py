"""Linear classifiers on frozen features: by SGD as in DINO, iBOT, MOCA, DINOv2 and MSN, by LARS as in MAE and ExtreMA.

All heads of a sweep (learning rate x readout x weight decay) train together on the same batches. With `augment` the
frozen backbone runs once on every augmented batch, as in the papers; without it the heads train on one cached feature
of each image, which is a protocol of its own (`..._cached`).

Head and epoch are selected on held-out training images (`select` holdout) or, as in the papers, on the validation
images that are reported (`select` val).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from checkpoints.frozen import FrozenExport, FrozenSpec
from engine.tasks import Outcome, SelectOn, Task, Workspace
from engine.work import Kind, Scale, Work
from probes.features.extract import transform_of
from probes.features.kinds import FeatureKind
from probes.linear.probe import Probe, company_of, rehearsed_heads, work_of_heads
from probes.linear.recipes import PUBLISHED, VARIANTS
from probes.linear.settings import LinearSettings
from probes.published import as_reported, changed_protocol, protocols_of
from probes.splits import open_splits


@dataclass(frozen=True, kw_only=True)
class Linear(LinearSettings, Task):
    """A sweep of linear heads."""

    COST: ClassVar[float] = 2.0  # after k-NN, whose pass over the images also serves the cached protocols

    def features(self, export: FrozenExport, space: Workspace) -> dict[str, tuple[FeatureKind, ...]]:
        return {} if self.augment else {transform_of(export, space, self).name: self.suited(export.spec)[0].kinds}

    def stream(self, export: FrozenExport, space: Workspace) -> str:
        return self.augmentation

    def selecting(self, select: SelectOn) -> "Linear":
        return replace(self, select=select)

    def sizes(self, spec: FrozenSpec, images: Mapping[str, int]) -> dict[str, Any]:
        readouts, (plan, held) = self.suited(spec)[0].readouts, self.divided_images(images["train"])
        trained = self.epochs * min(plan.rows, plan.count * plan.size) + held if self.augment else images["train"]
        heads = len(self.lrs) * len(readouts) * len(self.weight_decays)
        steps, passes = self.epochs * plan.count, trained + images["val"]
        found = {"image size": spec.image_size, "heads": heads, "epochs": self.epochs, "steps": steps}
        shared = {"shared stream": self.augmentation} if self.augment else {}
        return found | {"batch": plan.size, "forward passes": passes} | shared

    def work(self, scale: Scale) -> Work:
        return work_of_heads(self.suited(scale.spec)[0], scale)

    def rehearse(self, export: FrozenExport, space: Workspace) -> dict[Kind, float]:
        return rehearsed_heads(self.suited(export.spec)[0], export.spec.width, open_splits(space)[0], space)

    def run(self, export: FrozenExport, space: Workspace) -> Outcome:
        ((_, found),) = self.together([self], export, space)
        if isinstance(found, Exception):
            raise found
        return found

    @classmethod
    def together(
        cls, tasks: Sequence["Linear"], export: FrozenExport, space: Workspace
    ) -> Iterator[tuple[int, Outcome | Exception]]:
        space = replace(space, wanted=wanted_by(tasks, export, space))
        probes: dict[Path, list[tuple[int, Probe]]] = {}  # folder of a training -> who asks for it
        for place, task in enumerate(tasks):
            try:
                probe = Probe.of(task, export, space)
            except Exception as error:  # of this task alone
                yield place, error
            else:
                probes.setdefault(probe.folder, []).append((place, probe))
        if not probes:
            return
        for sweep in company_of([asking[0][1] for asking in probes.values()]).run():
            for number, (place, probe) in enumerate(probes[sweep.folder]):
                yield place, sweep.error or probe.outcome(sweep, spent=not number)


def wanted_by(tasks: Sequence[Linear], export: FrozenExport, space: Workspace) -> dict[str, tuple[Any, ...]]:
    """What these tasks, beside others of the run, read of images without augmentation; one pass extracts it for all."""
    found = dict(space.wanted)
    for task in tasks if len(tasks) > 1 else ():
        with suppress(ValueError):  # a task that does not suit the network fails on its own
            name, kinds = transform_of(export, space, task).name, task.suited(export.spec)[0].kinds
            found[name] = tuple(dict.fromkeys([*found.get(name, ()), *kinds]))
    return found


PAPERS = protocols_of(Linear, PUBLISHED)
OTHERS = protocols_of(Linear, VARIANTS)
CACHED = {
    f"{name}_cached": changed_protocol(
        paper,
        version=paper.version,  # the last change is of both: of the order of augmented images, and of cached ones
        source=f"ours: {name} on un-augmented features, one an image; not to be compared with published numbers",
        augment=False,
    )
    for name, paper in PAPERS.items()
}

PROTOCOLS = PAPERS | CACHED | OTHERS
PROTOCOLS |= as_reported(
    {name: each for name, each in (PAPERS | OTHERS).items() if each.task != each.task.selecting("val")}
)
PROTOCOLS |= as_reported({"linear@msn": PAPERS["linear@msn"]}, version=2)
# Table 12's one rate is the paper's, iBOT's sweep the code's.
PROTOCOLS |= as_reported({"linear_sgd@moca": PAPERS["linear_sgd@moca"]}, lrs=(0.04,))

SUITES = {
    "smoke": ("linear_sgd@ibot_base_cached",),
    "frozen": ("linear_sgd@ibot_base_cached",),
    "full": ("linear_sgd@ibot_base",),  # a sweep: one rate rarely suits a checkpoint of another source
    "everything": tuple(PAPERS | CACHED),
    "paper:extrema": ("linear_lars@extrema_paper",),
    "paper:lut": ("linear_lars@lut_paper",),
    "paper:moca": ("linear_sgd@moca_paper",),
    "paper:mst": ("linear@dino_paper", "linear_sgd@mst_paper"),
}
