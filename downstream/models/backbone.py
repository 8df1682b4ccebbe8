"""A ViT-export as the backbone of mmseg's and mmdet's models: taps of a few blocks, and from them four scales.

B images, D width, h x w grid of patches, P prefix tokens. Non-square inputs whose sides are multiples of the patch are
encoded on their own grid, with the position tables resized by the rule that the export names.
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

STRIDES = (4, 8, 16, 32)  # of the four scales, in pixels


class DenseViT(ViT):
    """The network of an export whose blocks hold relative position tables of their own, for any grid."""

    def __init__(self, spec: ViTSpec, drop_path: float = 0.0) -> None:
        super().__init__(spec, drop_path)
        self.placed = spec.grid  # the grid of the images in work
        for block in self.trunk.blocks:
            block.attn._get_rel_pos_bias = partial(self._own_bias, block.attn)

    def relative_bias(self, length: int, keep: Tensor | None, grid: tuple[int, int] | None) -> dict:
        if keep is not None or grid is None:
            raise ValueError("dense tasks encode all patches of a grid that they give")
        self.placed = grid
        return {}

    def _own_bias(self, attention: nn.Module) -> Tensor:
        """(1, heads, 1+L, 1+L), what timm's method of this name gives, for the grid in work."""
        table, index = attention.relative_position_bias_table, attention.relative_position_index
        if self.placed != self.spec.grid:
            table = resize_relative(table, self.spec.grid, self.placed)
            index = gen_relative_position_index(self.placed, device=table.device)
        return table[index].permute(2, 0, 1).unsqueeze(0)


def dense_network(
    export: FrozenExport, image_size: int | tuple[int, int], drop_path: float, tables: Tables = "shared"
) -> ViT | OwnNetwork:
    """The export's patch encoder with tables resized for `image_size`, which training then moves.

    tables: whether blocks share a relative position table, see ViTExport.with_tables.

    Class-attention blocks are left out: dense tasks read patches, which these blocks do not change (ExtreMA's README
    has its segmentation follow CAE "without the class token").
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
    """Blocks after which the four maps are taken: 3, 5, 7, 11 of 12 and 7, 11, 15, 23 of 24, as in BEiT, iBOT, CAE and
    MAE's segmentation; the same shares of other depths."""
    return tuple(max(0, round(depth * share) - 1) for share in (1 / 3, 1 / 2, 2 / 3, 1))


class DenseBackbone(BaseModule):
    """Images (B, 3, H, W), sides multiples of the patch -> a map (B, D, h, w) for each of `taps`.

    norm: the final norm on every map; without it, its weights are not trained. frozen: nothing is trained, and the
    network stays in evaluation mode. train_positions: whether the absolute position table is. recompute: keep no
    activations of blocks for the backward pass, but compute them again (two thirds of the speed, far less memory).
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
        self._freeze(train_positions)
        if recompute and not frozen:
            for block in network.trunk.blocks:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    def _freeze(self, train_positions: bool) -> None:
        if self.frozen:
            self.vit.requires_grad_(False)
            return
        trunk, last = self.vit.trunk, max(tap % self.vit.spec.depth for tap in self.taps)
        unused = [*trunk.blocks[last + 1 :], *(m for name in ("norm", "fc_norm") if (m := getattr(trunk, name, None)))]
        used_norm = trunk.norm if self.norm and self.vit.spec.final_norm == "all" else None
        for module in unused:
            module.requires_grad_(module is used_norm)
        if trunk.pos_embed is not None and not train_positions:
            trunk.pos_embed.requires_grad_(False)

    def init_weights(self) -> None:
        """Nothing: mmengine would otherwise call timm's initialisation and erase the pretrained weights."""
        self._is_init = True

    def train(self, mode: bool = True) -> "DenseBackbone":
        return super().train(mode and not self.frozen)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        grid = tuple(side // self.vit.spec.patch_size for side in images.shape[-2:])
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            tokens_of_taps = self.vit(images, layers=self.taps, norm=self.norm)
        maps = (tokens[:, self.vit.spec.prefix :].transpose(1, 2).unflatten(2, grid) for tokens in tokens_of_taps)
        # Channels first in memory too: convolutions pass strides on, and mmcv's compiled RoIAlign ignores them.
        return tuple(map_.contiguous() for map_ in maps)


class Pyramid(BaseModule):
    """Four maps (B, D, h, w) of one stride -> the same at strides 4, 8, 16 and 32.

    Patches of 16: deconvolution, batch norm, GELU, deconvolution; deconvolution; nothing; maximum of 2 x 2 (BEiT, iBOT,
    CAE; mmseg's Feature2Pyramid). Another patch starts elsewhere in that row, the nearest power of two counts.
    """

    def __init__(self, width: int, patch_size: int, batch_norm: type[nn.Module]) -> None:
        super().__init__()
        octaves = [round(log2(patch_size)) - round(log2(stride)) for stride in STRIDES]
        self.scales = nn.ModuleList(scale(width, octave, batch_norm) for octave in octaves)

    def forward(self, maps: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(scale(values) for scale, values in zip(self.scales, maps, strict=True))


def scale(width: int, octaves: int, batch_norm: type[nn.Module]) -> nn.Module:
    """What makes a map (B, D, h, w) larger by 2^octaves, or smaller by 2^-octaves."""
    if octaves <= 0:
        return nn.MaxPool2d(2**-octaves) if octaves else nn.Identity()
    layers: list[nn.Module] = []
    for octave in range(octaves):
        layers += [batch_norm(width), nn.GELU()] if octave else []
        layers.append(nn.ConvTranspose2d(width, width, kernel_size=2, stride=2))
    return nn.Sequential(*layers)
