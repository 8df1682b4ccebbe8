"""An example of an importer's files, and functions that run the imported network in float64."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from checkpoints.export import ViTExport
from checkpoints.import_options import ImportOptions
from checkpoints.reading import ForeignFile
from checkpoints.vit import ViT

Pairs = list[tuple[Tensor, Tensor]]  # ours, recorded


@dataclass(frozen=True, kw_only=True)
class Example:
    """tree: dotted official name -> tensor. recorded: pairs of our and the official values, in float64."""

    importer: str
    options: ImportOptions
    tree: dict[str, Tensor]
    recorded: Callable[[ViTExport], Pairs]
    facts: dict[str, Any] = field(default_factory=dict)

    def file(self, **changes: Tensor | None) -> ForeignFile:
        """The file as the reader returns it; `changes` replace tensors, None removes one."""
        tree = {name: tensor for name, tensor in (self.tree | changes).items() if tensor is not None}
        return ForeignFile(path=Path(f"{self.importer}.pth"), sha256="0" * 64, tensors=tree, facts=self.facts)


BUILT: list[ViT] = []  # networks that the last imports built, in tests that collect them
_LAST: list[tuple[ViTExport, ViT]] = []  # a comparison asks for the network of one export several times


def network_of(export: ViTExport) -> ViT:
    """The export's network in float64."""
    if not _LAST or _LAST[0][0] is not export:
        _LAST[:] = [(export, (BUILT.pop() if BUILT else export.build()).double())]
    return _LAST[0][1]


def encode(export: ViTExport, images: Tensor, **options: Any) -> Tensor:
    return network_of(export)(images.double(), **options)[0]


def visible(noise: Tensor, mask_ratio: float) -> Tensor:
    """MAE's kept patches: the first int(L * (1 - ratio)) of the noise in ascending order."""
    return noise.argsort(dim=1)[:, : int(noise.shape[1] * (1 - mask_ratio))]


def masked_latent(export: ViTExport, images: Tensor, keep: Tensor) -> Tensor:
    vit = network_of(export)
    return vit.encode(vit.add_positions(vit.project(images.double()), vit.spec.grid), keep=keep)[0]
