"""Weights that exist already as the start of a training: `bench pretrain --init CHECKPOINT`.

The encoders start from the checkpoint, all else (heads, decoders, predictors, prototypes) from drawn weights. The
recipe keeps its image size, and the position tables go to its grid by the rule of the checkpoint's spec; every other
fact of the architecture is the checkpoint's.
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
from checkpoints.spec import ViTSpec
from checkpoints.vit import ViT
from pretrain.loop.exporting import exports_in, is_run
from pretrain.method import Method
from pretrain.recipe import Recipe

SIZES = ("patch_size", "width", "depth", "heads", "mlp_hidden")  # a recipe's rates are made for these
SINCOS_FIRST: dict[str, Literal["column", "row"]] = {"sincos_column_first": "column", "sincos_row_first": "row"}
AVERAGED = ("teacher", "target", "momentum", "ema")  # branches of the sources that are moving averages of another


@dataclass(frozen=True, kw_only=True)
class InitialWeights:
    """A checkpoint that a training starts from."""

    reference: str  # as the user wrote it
    trained: ViTExport  # for the networks that the optimiser trains
    averaged: ViTExport  # for their moving averages; the same where the checkpoint has one network
    frozen_epochs: int = 0  # in which the optimiser leaves the encoder as it is, for new heads to catch up

    @property
    def name(self) -> str:
        """What the recipe and the exports call it."""
        name = str(self.trained.facts.get("name") or Path(self.reference.rpartition(":")[2]).stem)
        return re.sub(r"[^A-Za-z0-9_.@+-]", "-", name)

    def recipe(self, recipe: Recipe, changed: Collection[str] = ()) -> Recipe:
        """The recipe with the checkpoint's encoder at the recipe's image size.

        Args:
            recipe: of the training.
            changed: fields of the encoder's spec that the user set, which the checkpoint must agree with; but for
                `pool`, the representation that exports and k-NN name, which the weights do not decide.

        Raises:
            ValueError: the encoders differ in size, or in a field of `changed`.
        """
        spec, theirs = recipe.spec, self.trained.spec
        sizes = [name for name in SIZES if getattr(spec, name) != getattr(theirs, name)]
        if sizes:
            settings = " ".join(f"{name}={getattr(theirs, name)}" for name in sizes)
            raise ValueError(
                f"the checkpoint is a {theirs.label}, the recipe's encoder a {spec.label}: choose a recipe of that "
                f"size, or --set {settings}"
            )
        if self._is_sincos_of(spec):
            theirs = replace(theirs, position=spec.position)
        if "pool" in changed:
            theirs = replace(theirs, pool=spec.pool)
        wrong = [n for n in changed if n != "image_size" and getattr(spec, n) != getattr(theirs, n)]
        if wrong:
            values = " and ".join(f"{name}={getattr(theirs, name)}" for name in wrong)
            raise ValueError(f"the checkpoint has {values}: remove --set {' '.join(wrong)}")
        return replace(recipe, spec=replace(theirs, image_size=spec.image_size))

    def _is_sincos_of(self, spec: ViTSpec) -> bool:
        """Whether the checkpoint's learned table is the sine-cosine table of `spec`, as in timm's copies of MAE."""
        ours = self.trained.spec
        if ours.position != "learned" or spec.position not in SINCOS_FIRST:
            return False
        prefix = ours.prefix if ours.class_position else 0
        table = sincos_positions(ours.grid, ours.width, SINCOS_FIRST[spec.position], prefix)
        return torch.allclose(self.trained.tensors["pos_embed"], table, atol=1e-5)

    def load_into(self, method: Method) -> None:
        """Set the encoders of a method that was built by `recipe`, frozen copies of them too, and its preparation."""
        theirs = self.trained.preparation
        method.preparation = replace(method.preparation, mean=theirs.mean, std=theirs.std)
        for vit in encoders_of(method):
            trains = any(parameter.requires_grad for parameter in vit.parameters())
            export = self.trained if trains else self.averaged
            export = export if export.spec.size == vit.spec.size else export.at_size(vit.spec.image_size)
            vit.load_state_dict(export.build().state_dict())

    def facts(self, method: Method) -> dict[str, Any]:
        """What run.json and the exports say: the checkpoint, what was taken of it, and what was drawn."""
        parts = {id(parameter) for vit in encoders_of(method) for parameter in vit.parameters()}
        drawn = [p.numel() for p in method.parameters() if p.requires_grad and id(p) not in parts]
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
            "mean": list(method.preparation.mean),
            "std": list(method.preparation.std),
        }

    def summary(self, method: Method) -> str:
        """What was taken and what was drawn, in one line."""
        facts = self.facts(method)
        resized = f", resized from {self.trained.spec.size_text}" if facts["resized_from"] else ""
        epochs = f"{self.frozen_epochs} epoch{'s' if self.frozen_epochs > 1 else ''}"
        frozen = f"; the encoder stays as it is for {epochs}" if self.frozen_epochs else ""
        return (
            f"{self.reference}: {facts['tensors']} tensors of {' and '.join(facts['branches'])}{resized}; "
            f"{facts['drawn_parameters']:,} other parameters are drawn{frozen}"
        )


def initial_weights(reference: str, frozen_epochs: int = 0) -> InitialWeights:
    """Read a checkpoint to start from: whatever `checkpoints.resolve.load` takes, or the folder of a training.

    Where it holds a trained network and its moving average, each goes to its like; otherwise its one network to both.

    Raises:
        ValueError: it cannot be read, or its networks are not alike.
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
    """Branch -> export of a checkpoint, the one that is evaluated frozen first."""
    path = Path(reference).expanduser()
    if is_run(path):
        for _, export in exports_in(path):
            yield export.facts["branch"], export
        return
    first = load(reference)
    yield str(first.facts.get("branch")), first
    for reason in first.facts.get("dropped", {}) if first.facts.get("source_file") else ():
        if reason.startswith("branch "):
            other = reason.removeprefix("branch ")
            yield other, load(reference, ImportOptions(branch=other))


def encoders_of(method: Method) -> list[ViT]:
    """The networks of a method that have the encoder's architecture: those it exports, and frozen copies of them."""
    exported = [encoder.vit for encoder in method.encoders().values()]
    copies = [module for module in method.modules() if isinstance(module, ViT) and module.spec == method.spec]
    return list(dict.fromkeys([*exported, *copies]))
