"""What frozen evaluation takes: a ViT-export, or a network of the user's own (own_networks.py).

Tasks on frozen features read what the two have in common: of the spec `size`, `patch_size`, `grid`, `width`, `depth`,
`has_class_token` and `label`; of the export `preparation`, `digest`, `facts`, `parameters` and `build()`, a module of
(B, 3, H, W) -> for each layer tokens (B, P+L, D), P tokens in front of L patches. What only a ViT has they ask for
behind `vit_spec` or `vit_export`, which refuse the others.
"""

from checkpoints.export import ViTExport
from checkpoints.own_networks import OwnExport, OwnSpec
from checkpoints.spec import ViTSpec

FrozenSpec = ViTSpec | OwnSpec
FrozenExport = ViTExport | OwnExport
FROZEN = "what reads frozen features can be run, such as k-NN, linear, low-shot, segmenter_linear and ade_linear"


def vit_spec(spec: FrozenSpec, why: str) -> ViTSpec:
    """The spec, if it is a ViT's. ValueError for a network of the user's own; why: what the task needs a ViT for."""
    if isinstance(spec, ViTSpec):
        return spec
    raise ValueError(f"{spec.reference} is a frozen network of your own, and {why}; {FROZEN}")


def vit_export(export: FrozenExport, why: str) -> ViTExport:
    """The same of an export."""
    if isinstance(export, ViTExport):
        return export
    raise ValueError(f"{export.spec.reference} is a frozen network of your own, and {why}; {FROZEN}")
