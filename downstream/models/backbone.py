"""An export as the backbone of mmseg's and mmdet's models: feature maps after some blocks, and a pyramid made of them.

Images of any size are encoded on their own grid of patches, if their sides are multiples of the patch size; position
tables are resized by the rule that the export names. B images, D width of the network, h x w patches.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import log2

import torch
from mmengine.model import BaseModule
from timm.models.beit import gen_relative_position_index
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from checkpoints.export import Tables, ViTExport
from checkpoints.frozen import FrozenExport, OwnNetwork
from checkpoints.positions import resize_relative
from checkpoints.spec import ViTSpec
from checkpoints.vit import ViT

STRIDES = (4, 8, 16, 32)  # of the four levels of the pyramid, in pixels


class DenseViT(ViT):
    """A ViT whose blocks have relative position tables of their own, resized for the grid of each image."""

    def __init__(self, spec: ViTSpec, drop_path: float = 0.0) -> None:
        super().__init__(spec, drop_path)
        self.current_grid = spec.grid  # grid (h, w) of the images that are being encoded
        for block in self.trunk.blocks:
            block.attn._get_rel_pos_bias = partial(self._relative_bias_of, block.attn)

    def relative_bias(self, length: int, keep: Tensor | None, grid: tuple[int, int] | None) -> dict:
        if keep is not None or grid is None:
            raise ValueError("dense tasks encode all patches of a grid that they give")
        self.current_grid = grid
        return {}

    def _relative_bias_of(self, attention: nn.Module) -> Tensor:
        """Bias (1, heads, 1+L, 1+L) for the current grid of L patches; replaces timm's `_get_rel_pos_bias`."""
        table, index = attention.relative_position_bias_table, attention.relative_position_index
        if self.current_grid != self.spec.grid:
            table = resize_relative(table, self.spec.grid, self.current_grid)
            index = gen_relative_position_index(self.current_grid, device=table.device)
        return table[index].permute(2, 0, 1).unsqueeze(0)


def dense_network(
    export: FrozenExport, image_size: int | tuple[int, int], drop_path: float, tables: Tables = "shared"
) -> ViT | OwnNetwork:
    """The network of an export for images of `image_size`, with trainable position tables of that size.

    Class-attention blocks are left out: dense tasks read patches, which these blocks do not change (ExtreMA's README:
    its segmentation follows CAE "without the class token").

    Args:
        export: an export, or a user's own network, which is built unchanged.
        image_size: side, or height and width, in pixels.
        drop_path: drop path rate of the last block.
        tables: whether blocks share a relative position table, see ViTExport.with_tables.
    """
    if not isinstance(export, ViTExport):
        return export.build()
    if export.spec.class_attention:
        spec = replace(export.spec, class_attention=0, pool="avg")
        export = ViTExport(spec=spec, preparation=export.preparation, tensors=export.tensors)
    if image_size != export.spec.image_size:
        export = export.at_size(image_size)
    export = export.with_tables(tables)
    network = export.build(drop_path)
    if export.spec.relative_position != "per_block":
        return network
    dense = DenseViT(export.spec, drop_path)
    dense.load_state_dict(network.state_dict(), strict=True)
    return dense


def default_taps(depth: int) -> tuple[int, ...]:
    """Indices of the four blocks whose outputs are used, as in the segmentation of BEiT, iBOT, CAE and MAE.

    3, 5, 7, 11 of 12 blocks and 7, 11, 15, 23 of 24; the same fractions of other depths.
    """
    return tuple(max(0, round(depth * share) - 1) for share in (1 / 3, 1 / 2, 2 / 3, 1))


class DenseBackbone(BaseModule):
    """Images (B, 3, H, W) with sides that are multiples of the patch size -> feature maps (B, D, h, w) of some blocks.

    Args:
        network: the network of an export, or a user's own.
        taps: indices of the blocks; negative ones count from the last block.
        norm: apply the final norm to every map. Without it, the norm's weights are not trained.
        frozen: train nothing, and keep the network in evaluation mode.
        train_positions: train the absolute position table.
        recompute: recompute the activations of blocks in the backward pass instead of storing them, at two thirds of
            the speed, to save memory.
    """

    def __init__(
        self,
        network: ViT | OwnNetwork,
        taps: Sequence[int],
        norm: bool = False,
        frozen: bool = False,
        train_positions: bool = True,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.vit, self.taps, self.norm, self.frozen = network, tuple(taps), norm, frozen
        self._set_requires_grad(train_positions)
        if recompute and not frozen:
            for block in network.trunk.blocks:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    def _set_requires_grad(self, train_positions: bool) -> None:
        """Freeze what is not trained: everything, or the parameters that no output depends on and the positions."""
        if self.frozen:
            self.vit.requires_grad_(False)
            return
        trunk = self.vit.trunk
        last = max(tap % self.vit.spec.depth for tap in self.taps)
        for block in trunk.blocks[last + 1 :]:
            block.requires_grad_(False)
        for name in ("norm", "fc_norm"):
            if norm := getattr(trunk, name, None):
                norm.requires_grad_(name == "norm" and self.norm and self.vit.spec.final_norm == "all")
        if trunk.pos_embed is not None and not train_positions:
            trunk.pos_embed.requires_grad_(False)

    def init_weights(self) -> None:
        """Do nothing: mmengine would otherwise call timm's initialisation and overwrite the pretrained weights."""
        self._is_init = True

    def train(self, mode: bool = True) -> "DenseBackbone":
        return super().train(mode and not self.frozen)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        grid = tuple(side // self.vit.spec.patch_size for side in images.shape[-2:])
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            outputs = self.vit(images, layers=self.taps, norm=self.norm)  # (B, prefix + h w, D) of each block
        maps = (tokens[:, self.vit.spec.prefix :].transpose(1, 2).unflatten(2, grid) for tokens in outputs)
        # Channels first in memory too: convolutions keep the strides, and mmcv's compiled RoIAlign ignores them.
        return tuple(feature_map.contiguous() for feature_map in maps)


class Pyramid(BaseModule):
    """Four feature maps (B, D, h, w) -> maps at strides 4, 8, 16 and 32.

    For patches of 16, as in BEiT, iBOT, CAE and mmseg's Feature2Pyramid: two deconvolutions with batch norm and GELU in
    between; one deconvolution; identity; 2 x 2 max pooling. For other patch sizes, rounded to a power of two, there are
    more or fewer of these.
    """

    def __init__(self, width: int, patch_size: int, batch_norm: type[nn.Module]) -> None:
        super().__init__()
        octaves = [round(log2(patch_size)) - round(log2(stride)) for stride in STRIDES]
        self.scales = nn.ModuleList(rescale(width, octave, batch_norm) for octave in octaves)

    def forward(self, maps: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(scale(feature_map) for scale, feature_map in zip(self.scales, maps, strict=True))


def rescale(width: int, octaves: int, batch_norm: type[nn.Module]) -> nn.Module:
    """Layers that enlarge a map (B, D, h, w) to (B, D, h 2^octaves, w 2^octaves); negative octaves make it smaller."""
    if octaves <= 0:
        return nn.MaxPool2d(2**-octaves) if octaves else nn.Identity()
    layers: list[nn.Module] = []
    for octave in range(octaves):
        layers += [batch_norm(width), nn.GELU()] if octave else []
        layers.append(nn.ConvTranspose2d(width, width, kernel_size=2, stride=2))
    return nn.Sequential(*layers)
