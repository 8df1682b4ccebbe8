"""What an example of an importer's files is, and how the network that comes of it is run."""

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
    """tree: dotted official name -> tensor. recorded: our values beside the official ones, in float64."""

    importer: str
    options: ImportOptions
    tree: dict[str, Tensor]
    recorded: Callable[[ViTExport], Pairs]
    facts: dict[str, Any] = field(default_factory=dict)

    def file(self, **changes: Tensor | None) -> ForeignFile:
        """As the reader would return it; `changes` replace tensors, None removes one."""
        tree = {name: tensor for name, tensor in (self.tree | changes).items() if tensor is not None}
        return ForeignFile(path=Path(f"{self.importer}.pth"), sha256="0" * 64, tensors=tree, facts=self.facts)


MADE: list[ViT] = []  # networks that the last imports built, where a test keeps them
_LAST: list[tuple[ViTExport, ViT]] = []  # a comparison asks for the network of one export several times


def network_of(export: ViTExport) -> ViT:
    """In float64."""
    if not _LAST or _LAST[0][0] is not export:
        _LAST[:] = [(export, (MADE.pop() if MADE else export.build()).double())]
    return _LAST[0][1]


def encode(export: ViTExport, images: Tensor, **how: Any) -> Tensor:
    return network_of(export)(images.double(), **how)[0]


def visible(noise: Tensor, mask_ratio: float) -> Tensor:
    """MAE's kept patches: the first int(L * (1 - ratio)) of the noise in ascending order."""
    return noise.argsort(dim=1)[:, : int(noise.shape[1] * (1 - mask_ratio))]


def masked_latent(export: ViTExport, images: Tensor, keep: Tensor) -> Tensor:
    vit = network_of(export)
    return vit.encode(vit.add_positions(vit.project(images.double()), vit.spec.grid), keep=keep)[0]
