"""What tasks share that train mmsegmentation's and mmdetection's models: rehearsals, and departures from a recipe."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from checkpoints.frozen import FrozenExport, FrozenSpec
from checkpoints.spec import SIZES
from downstream.data.scenes import TINY, SceneSet
from downstream.loop.training import Plan, check_space, norm_warnings, open_both
from downstream.planning import loading_seconds, rehearsed_plan
from engine.resampling import Score
from engine.tasks import Task, Workspace
from engine.work import Kind


@dataclass(frozen=True, kw_only=True)
class Source:
    """The set that a recipe's settings were chosen for."""

    name: str
    classes: int
    images: int  # for training
    settings: tuple[str, ...]  # those that depend on the number of images, their sizes or the classes


class DenseTask(Task):
    """Base of these tasks. Annotated without a comment: settings that all of them have."""

    KEY: ClassVar[str]  # name of its file, and of its folder in the cache
    LARGEST: ClassVar[int] = 8  # images in a forward pass, unless --batch-size is given
    SOURCE: ClassVar[Source]  # of its recipes

    size: str
    branch: str

    def plan(self, export: FrozenExport, train: SceneSet, val: SceneSet, seed: int) -> Plan:
        """The training on a set's scenes, or the first of several."""
        raise NotImplementedError

    def score(self, images: int, classes: int) -> Score:
        """What resamples of so many validation images compute, of predictions that are made up."""
        raise NotImplementedError

    def check_images(self, space: Workspace) -> None:
        check_space(space, self.LAYOUT)

    def benchmark(self, export: FrozenExport, space: Workspace) -> dict[Kind, float]:
        self.check_network(export.spec)
        loading_seconds()  # before anything else that loads the libraries
        plan = self.plan(export, *open_both(space, self.LAYOUT), space.seed)
        classes = len(plan.val.classes)
        operations = self.model_flops(export.spec, classes)["training"]
        return rehearsed_plan(plan, space, self.score(len(plan.val), classes), operations)

    def departures(self, export: FrozenExport, train: SceneSet, batch: Mapping[str, Any]) -> list[str]:
        """How a training differs from its recipe, a line each. batch: facts of its TrainedModel."""
        found, own = norm_warnings(batch), SIZES.get((export.spec.width, export.spec.depth), "another size")
        if self.size and own != self.size:
            found.append(f"the recipe is for ViT-{self.size}, this network is {own}")
        given = str(export.facts.get("branch", ""))
        if self.branch and given and given != self.branch:
            found.append(f"the recipe is for the {self.branch} branch, this is the {given} one")
        return found + self.cropped_otherwise(export.spec) + self.chosen_elsewhere(train)

    def cropped_otherwise(self, spec: FrozenSpec) -> list[str]:
        """A warning where images are cropped at another side than the setting's."""
        return []

    def chosen_elsewhere(self, train: SceneSet) -> list[str]:
        """A warning that names the settings that were chosen for SOURCE, where the scenes are others."""
        source = self.SOURCE
        if len(train.classes) == source.classes or train.url.startswith(TINY):
            return []
        values = (getattr(self, name) for name in source.settings)
        texts = (",".join(map(str, value)) if isinstance(value, tuple) else str(value) for value in values)
        settings = " ".join(f"{name}={text}" for name, text in zip(source.settings, texts, strict=True))
        return [
            f"{settings} were chosen for {source.name}, with {source.images} training images and {source.classes} "
            f"classes; this set has {len(train)} and {len(train.classes)}"
        ]
