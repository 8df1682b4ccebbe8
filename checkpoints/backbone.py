"""Backbone: an export frozen for evaluation. Images in, features of the requested layers out; nothing is trained."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from checkpoints.frozen import FrozenExport
from engine.precision import autocast, compile_blocks, fit_attention


class Features(NamedTuple):
    """Features of B images at one layer. D width, h x w patch grid.

    cls: (B, D), or None if the model has no class token at this layer. patches: (B, h, w, D). If a network returns a
    single vector per image, h = w = 0 and cls is that vector.
    avg: (B, D) mean of the patches, NaN if there are none. If the model's final norm follows the mean, it is applied.
    """

    cls: Tensor | None
    patches: Tensor
    avg: Tensor


class Backbone(nn.Module):
    """Frozen network on `device`. bfloat16 runs matrix products under autocast; results are float32 in any case.

    compiled: by torch.compile, from the first pass on.
    """

    def __init__(
        self,
        export: FrozenExport,
        device: str = "cpu",
        precision: Literal["float32", "bfloat16"] = "float32",
        compiled: bool = False,
    ) -> None:
        super().__init__()
        self.spec = export.spec
        self.vit = export.build().to(device).requires_grad_(False)
        self.precision = precision
        fit_attention(self.vit, device, precision)
        if compiled:
            compile_blocks(self.vit, device)
        for name, values in (("mean", export.mean), ("std", export.std)):
            self.register_buffer(name, torch.tensor(values, device=device).view(1, 3, 1, 1), persistent=False)
        super().train(False)

    def train(self, mode: bool = True) -> "Backbone":
        """Keep evaluation mode, even if a surrounding module is set to training."""
        return super().train(False)

    def prepare(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) uint8 -> float32 on the device, normalised with the export's own statistics."""
        return (images.to(self.mean.device).float() / 255 - self.mean) / self.std

    @torch.inference_mode()
    def views(self, images: Tensor, layers_and_norms: Sequence[tuple[int, bool]]) -> dict[tuple[int, bool], Features]:
        """Prepared images -> (layer, with final norm?) -> Features, all from one pass."""
        layers = sorted({layer for layer, _ in layers_and_norms})
        grid = self.spec.grid_of(images.shape[-2:])
        features = {}
        with autocast(images.device.type, self.precision):
            for layer, raw in zip(layers, self.vit(images, layers=layers, norm=False), strict=True):
                for norm in {norm for of_layer, norm in layers_and_norms if of_layer == layer}:
                    tokens = self.vit.normalise(raw, layer) if norm else raw
                    features[layer, norm] = self._split(tokens.float(), grid, norm)
        return features

    @torch.inference_mode()
    def keys(self, images: Tensor) -> Tensor:
        """Prepared images -> keys (B, h, w, D) of the patches in the last block (`ViT.keys`)."""
        grid = self.spec.grid_of(images.shape[-2:])
        with autocast(images.device.type, self.precision):
            keys = self.vit.keys(images)
        return keys[:, keys.shape[1] - grid[0] * grid[1] :].unflatten(1, grid).float()

    def _split(self, tokens: Tensor, grid: tuple[int, int], norm: bool) -> Features:
        patches = tokens[:, tokens.shape[1] - grid[0] * grid[1] :]
        has_class = self.spec.class_token or tokens.shape[1] > patches.shape[1] + self.spec.registers
        average = patches.mean(dim=1)
        if norm and self.spec.final_norm == "pooled":
            average = self.vit.trunk.fc_norm(average)
        return Features(tokens[:, 0] if has_class else None, patches.unflatten(1, grid), average)
