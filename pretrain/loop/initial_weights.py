"""Starting a training from existing weights: `bench pretrain --init CHECKPOINT`.

The encoders start from the checkpoint, everything else (heads, decoders, predictors, prototypes) from random weights.
The recipe keeps its image size, and position tables are resized to its grid by the rule of the checkpoint's spec. All
other properties of the encoder are the checkpoint's.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from checkpoints.export import ViTExport
from checkpoints.import_options import ImportOptions
from checkpoints.positions import sincos_positions
from checkpoints.resolve import load
from checkpoints.runs import is_run
from checkpoints.spec import ViTSpec
from checkpoints.vit import ViT
from engine.errors import option
from pretrain.loop.exporting import exports_in
from pretrain.method import Method
from pretrain.recipe import Recipe

SIZES = ("patch_size", "width", "depth", "heads", "mlp_hidden")  # sizes for which a recipe's rates were chosen
SINCOS_FIRST: dict[str, Literal["column", "row"]] = {"sincos_column_first": "column", "sincos_row_first": "row"}
AVERAGED = ("teacher", "target", "momentum", "ema")  # the sources' names of branches that are moving averages


@dataclass(frozen=True, kw_only=True)
class InitialWeights:
    """A checkpoint that a training starts from."""

    reference: str  # as the user wrote it
    trained: ViTExport  # for the networks that the optimiser trains
    averaged: ViTExport  # for their moving averages; the same if the checkpoint has only one network
    frozen_epochs: int = 0  # first epochs, in which the encoder is frozen, so that new heads can catch up

    @property
    def name(self) -> str:
        """The checkpoint's name in the recipe and the exports."""
        name = str(self.trained.facts.get("name") or Path(self.reference.rpartition(":")[2]).stem)
        return re.sub(r"[^A-Za-z0-9_.@+-]", "-", name)

    @property
    def assumed(self) -> list[str]:
        """What neither the checkpoint nor the user stated, such as image statistics."""
        return sorted({text for export in (self.trained, self.averaged) for text in export.facts.get("assumed") or ()})

    def recipe(self, recipe: Recipe, changed: Collection[str] = ()) -> Recipe:
        """The recipe with the checkpoint's encoder at the recipe's image size.

        Args:
            recipe: of the training.
            changed: fields of the encoder's spec that the user set, see `conflicts`.

        Raises:
            ValueError: the encoders differ in size, or in a field of `changed`.
        """
        if conflicts := self.conflicts(recipe.spec, changed):
            settings = option("settings", conflicts)
            raise ValueError(f"the checkpoint is a {self.trained.spec.label}, the recipe's encoder is not: {settings}")
        spec = self._adopted(recipe.spec, changed)
        return replace(recipe, spec=replace(spec.stored, image_size=recipe.spec.image_size))

    def conflicts(self, spec: ViTSpec, changed: Collection[str] = ()) -> dict[str, Any]:
        """Field -> the checkpoint's value, of the sizes in which `spec` differs and of other fields in `changed`.

        The image size is free, and so is `pool`, the representation used by exports and k-NN, which does not depend on
        the weights.
        """
        adopted = self._adopted(spec, changed)
        names = dict.fromkeys([*SIZES, *(name for name in changed if name != "image_size")])
        return {n: getattr(adopted, n) for n in names if getattr(spec, n) != getattr(adopted, n)}

    def _adopted(self, spec: ViTSpec, changed: Collection[str]) -> ViTSpec:
        """The checkpoint's spec, with what may follow `spec`."""
        adopted = self.trained.spec
        if self._is_sincos_of(spec):
            adopted = replace(adopted, position=spec.position)
        return replace(adopted, pool=spec.pool) if "pool" in changed else adopted

    def _is_sincos_of(self, spec: ViTSpec) -> bool:
        """Whether the checkpoint's learned table is the sine-cosine table of `spec`, as in timm's copies of MAE."""
        checkpoint_spec = self.trained.spec
        if checkpoint_spec.position != "learned" or spec.position not in SINCOS_FIRST:
            return False
        prefix = checkpoint_spec.prefix if checkpoint_spec.class_position else 0
        order = SINCOS_FIRST[spec.position]
        table = sincos_positions(checkpoint_spec.stored.grid, checkpoint_spec.width, order, prefix)
        return torch.allclose(self.trained.tensors["pos_embed"], table, atol=1e-5)

    def load_into(self, method: Method) -> None:
        """Load the checkpoint into all encoders of a method built with `recipe`, frozen copies included, and set the
        method's image preparation."""
        preparation = self.trained.preparation
        method.preparation = replace(method.preparation, mean=preparation.mean, std=preparation.std)
        for vit in encoders_of(method):
            trains = any(parameter.requires_grad for parameter in vit.parameters())
            export = self.trained if trains else self.averaged
            export = export if export.spec.size == vit.spec.size else export.at_size(vit.spec.image_size)
            vit.load_state_dict(export.build().state_dict())

    def facts(self, method: Method) -> dict[str, Any]:
        """Facts for run.json and the exports: the checkpoint, what was loaded from it, and what has random weights."""
        loaded_ids = {id(parameter) for vit in encoders_of(method) for parameter in vit.parameters()}
        drawn = [p.numel() for p in method.parameters() if p.requires_grad and id(p) not in loaded_ids]
        resized = self.trained.spec.size != method.spec.size
        return {
            "checkpoint": self.name,
            "digests": sorted({self.trained.digest, self.averaged.digest}),
            "method": self.trained.facts.get("method"),
            "branches": sorted({str(export.facts.get("branch")) for export in (self.trained, self.averaged)}),
            "tensors": len(self.trained.tensors) + len(self.trained.extra),
            "drawn_parameters": sum(drawn),
            "resized_from": self.trained.spec.image_size if resized else None,
            "frozen_epochs": self.frozen_epochs,
            "assumed": self.assumed,
            "mean": list(method.preparation.mean),
            "std": list(method.preparation.std),
        }

    def summary(self, method: Method) -> str:
        """One line on what was loaded from the checkpoint and what has random weights."""
        facts = self.facts(method)
        resized = f", resized from {self.trained.spec.size_text}" if facts["resized_from"] else ""
        epochs = f"{self.frozen_epochs} epoch{'s' if self.frozen_epochs > 1 else ''}"
        frozen = f"; the encoder is frozen for {epochs}" if self.frozen_epochs else ""
        return (
            f"{self.reference}: {facts['tensors']} tensors of {' and '.join(facts['branches'])}{resized}; "
            f"{facts['drawn_parameters']:,} other parameters are drawn at random{frozen}"
        )


def initial_weights(reference: str, frozen_epochs: int = 0) -> InitialWeights:
    """Read a checkpoint to start from.

    If it holds a trained network and its moving average, each initialises its counterpart; otherwise its only network
    initialises both.

    Args:
        reference: any reference that `checkpoints.resolve.load` reads, or the folder of a pretraining.
        frozen_epochs: first epochs, in which the encoder is frozen.

    Raises:
        ValueError: the checkpoint cannot be read, or its networks differ in architecture.
    """
    branches = dict(_branches(reference))
    trained = [export for branch, export in branches.items() if branch not in AVERAGED]
    averaged = [export for branch, export in branches.items() if branch in AVERAGED]
    first = next(iter(branches.values()))
    start = InitialWeights(
        reference=reference,
        trained=(trained or [first])[0],
        averaged=(averaged or [first])[0],
        frozen_epochs=frozen_epochs,
    )
    if start.trained.spec != start.averaged.spec:
        raise ValueError(f"{reference}: its branches {' and '.join(branches)} are different networks")
    if start.trained.spec.family == "pixels":
        raise ValueError(f"{reference} has no network to start from")
    return start


def _branches(reference: str) -> Iterator[tuple[str, ViTExport]]:
    """Name and export of each branch of a checkpoint, the one for frozen evaluation first."""
    path = Path(reference).expanduser()
    if is_run(path):
        for _, export in exports_in(path):
            yield export.facts["branch"], export
        return
    first = load(reference)
    yield str(first.facts.get("branch")), first
    # An import records why it dropped tensors; for those of another branch, the reason is `branch NAME`.
    for reason in first.facts.get("dropped", {}) if first.facts.get("source_file") else ():
        if reason.startswith("branch "):
            branch = reason.removeprefix("branch ")
            yield branch, load(reference, ImportOptions(branch=branch))


def encoders_of(method: Method) -> list[ViT]:
    """The networks of a method with the encoder's architecture: those that it exports, and frozen copies of them."""
    exported = [encoder.vit for encoder in method.encoders().values()]
    copies = [module for module in method.modules() if isinstance(module, ViT) and module.spec == method.spec]
    return list(dict.fromkeys([*exported, *copies]))
