"""Ways in which a tensor of a file can be wrong, for the tests of importers."""

import re

import torch

# A bias of the keys adds the same constant to all logits of a query, which softmax ignores: it changes no output.
WITHOUT_EFFECT = ("attn.k.bias",)


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Matrices and kernels with their last two axes swapped; vectors reversed."""
    return tensor.flip(0) if tensor.ndim == 1 else tensor.transpose(-1, -2).contiguous()


def redrawn(tensor: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tensor.shape, generator=generator) * tensor.float().std().nan_to_num(1.0).clamp(min=0.02)


def mutations_of(name: str, tensor: torch.Tensor) -> dict[str, dict[str, torch.Tensor | None]]:
    """Kind of change -> changed tensors by name; None removes one.

    Tensors of a block are changed in two of the four ways, those of the next block in the other two.
    """
    mutations = {"dropped": {name: None}, "renamed": {name: None, f"{name}_old": tensor}}
    if name.endswith(WITHOUT_EFFECT):
        return mutations
    mutations["redrawn"] = {name: redrawn(tensor)}
    if not torch.equal(transposed(tensor), tensor):
        mutations["transposed"] = {name: transposed(tensor)}
    numbers = re.findall(r"\d+", name)
    return dict(list(mutations.items())[sum(map(int, numbers)) % 2 :: 2]) if numbers else mutations
