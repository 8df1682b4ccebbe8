"""Backbone: an export frozen for evaluation, which computes features of images at the requested layers."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from checkpoints.frozen import FrozenExport
from engine.precision import autocast, compile_blocks, fit_attention


class Features(NamedTuple):
    """Features of B images at one layer, with width D and a grid of h x w patches.

    If a network returns a single vector per image, cls is that vector and h = w = 0.
    """

    cls: Tensor | None  # (B, D) class token; None if the model has none at this layer
    patches: Tensor  # (B, h, w, D)
    avg: Tensor  # (B, D) mean of the patches, with the final norm if it follows the mean; NaN without patches


class Backbone(nn.Module):
    """Frozen network on a device.

    Args:
        export: The network.
        device: Name of the device.
        precision: bfloat16 computes matrix products under autocast; features are float32 in any case.
        compiled: Compile the blocks by torch.compile in the first pass.
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
        self.vit = export.build(any_size=True).to(device).requires_grad_(False)
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
        """Images (B, 3, H, W) uint8 as float32 on the device, normalised with the export's statistics."""
        return (images.to(self.mean.device).float() / 255 - self.mean) / self.std

    @torch.inference_mode()
    def views(self, images: Tensor, layers_and_norms: Sequence[tuple[int, bool]]) -> dict[tuple[int, bool], Features]:
        """Features of prepared images (B, 3, H, W) for each pair (layer, with final norm?), from one forward pass."""
        layers = sorted({layer for layer, _ in layers_and_norms})
        grid = self.spec.grid_of(images.shape[-2:])
        features = {}
        with autocast(images.device.type, self.precision):
            for layer, raw in zip(layers, self.vit(images, layers=layers, norm=False), strict=True):
                for norm in {norm for other_layer, norm in layers_and_norms if other_layer == layer}:
                    tokens = self.vit.normalise(raw, layer) if norm else raw
                    features[layer, norm] = self._split(tokens.float(), grid, norm)
        return features

    @torch.inference_mode()
    def keys(self, images: Tensor) -> Tensor:
        """Keys (B, h, w, D) of the patches of prepared images (B, 3, H, W) in the last block, see `ViT.keys`."""
        grid = self.spec.grid_of(images.shape[-2:])
        with autocast(images.device.type, self.precision):
            keys = self.vit.keys(images)
        return keys[:, keys.shape[1] - grid[0] * grid[1] :].unflatten(1, grid).float()

    def _split(self, tokens: Tensor, grid: tuple[int, int], norm: bool) -> Features:
        """Features from tokens (B, P+L, D). norm: whether the final norm is to be applied."""
        patches = tokens[:, tokens.shape[1] - grid[0] * grid[1] :]
        has_class = self.spec.class_token or tokens.shape[1] > patches.shape[1] + self.spec.registers
        average = patches.mean(dim=1)
        if norm and self.spec.final_norm == "pooled":
            average = self.vit.trunk.fc_norm(average)
        return Features(self.spec.class_feature(tokens) if has_class else None, patches.unflatten(1, grid), average)
