"""Initial weights, as the sources draw them: five families, none of which is timm's default.

D width, p patch side.
"""

from collections.abc import Callable
from math import sqrt

import torch
from torch import Tensor, nn

from checkpoints.positions import sincos_positions
from checkpoints.vit import ViT

TOKEN_STD = 0.02


def xavier_(network: nn.Module) -> nn.Module:
    """Every linear layer Xavier-uniform with zero bias, norms 1 and 0 (MAE models_mae.py:82-93, MOCA, LUT, ExtreMA)."""
    return _drawn(network, nn.init.xavier_uniform_)


def truncated_(network: nn.Module, std: float = 0.02, limit: float = 2.0) -> nn.Module:
    """Every linear layer from a normal distribution truncated at +-`limit`, zero bias, norms 1 and 0.

    DINO's and timm's trunc_normal_ truncates at +-2 (vision_transformer.py:161-172); SimMIM at +-std (simmim.py:66-67).
    """
    return _drawn(network, lambda weight: nn.init.trunc_normal_(weight, std=std, a=-limit, b=limit))


def cut_truncated_(network: nn.Module) -> nn.Module:
    """As `truncated_`, cut off at one standard deviation: BEiT's linear layers (beit/modeling_pretrain.py,
    trunc_normal_), and those of CAE's option fix_init_weight."""
    return truncated_(network, TOKEN_STD, limit=TOKEN_STD)


def _drawn(network: nn.Module, draw: Callable[[Tensor], Tensor]) -> nn.Module:
    """`draw` every linear layer's weight; biases 0, norms 1 and 0."""
    for module in network.modules():
        if isinstance(module, nn.Linear):
            draw(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
    return network


def xavier_vit(vit: ViT) -> ViT:
    """MAE's family: Xavier throughout, the patch embedding as a (D, 3 p p) matrix while its bias stays torch's, class
    token N(0, 0.02), fixed sine-cosine positions with the column first (MAE models_mae.py:65-80, ExtreMA
    vits.py:238-281, MOCA MM:432-443)."""
    xavier_(vit)
    trunk = vit.trunk
    trunk.patch_embed.proj.reset_parameters()
    nn.init.xavier_uniform_(trunk.patch_embed.proj.weight.flatten(1))
    for token in (getattr(trunk, "cls_token", None), getattr(vit, "class_query", None)):
        if token is not None:
            nn.init.normal_(token, std=TOKEN_STD)
    fix_sincos_(vit)
    return vit


def fix_sincos_(vit: ViT) -> None:
    """Fixed sine-cosine positions where the encoder has such, the row's channels or the column's first as its spec
    says; zero for the class token."""
    table = vit.trunk.pos_embed
    if table is None:  # rotary positions
        return
    if vit.spec.position == "learned":  # a table that --init brings and that stays trainable
        nn.init.trunc_normal_(table, std=TOKEN_STD)
        return
    first = "row" if vit.spec.position == "sincos_row_first" else "column"
    prefix = table.shape[1] - vit.spec.grid[0] * vit.spec.grid[1]
    with torch.no_grad():
        table.copy_(sincos_positions(vit.spec.grid, vit.spec.width, first, prefix))
    table.requires_grad_(False)


def capi_vit(vit: ViT) -> ViT:
    """MAE's family with registers N(0, 0.02); the last norm's gain stays 1 (CAPI model.py, init_weights)."""
    trunk = xavier_vit(vit).trunk
    if vit.spec.registers:
        nn.init.normal_(trunk.reg_token, std=TOKEN_STD)
    trunk.norm.weight.requires_grad_(False)
    return vit


def moco_vit(vit: ViT, freeze_patches: bool) -> ViT:
    """MoCo-v3's family: Xavier throughout, queries, keys and values as a matrix each; the patch embedding as a
    (D, 3 p p) matrix with zero bias, fixed where asked; class token N(0, 1e-6), fixed sine-cosine positions
    (moco-v3 vits.py:27-69)."""
    trunk = xavier_(vit).trunk
    bound = sqrt(6 / (2 * vit.spec.width))
    for block in trunk.blocks:
        nn.init.uniform_(block.attn.qkv.weight, -bound, bound)
    embed = trunk.patch_embed.proj
    nn.init.xavier_uniform_(embed.weight.flatten(1))
    nn.init.zeros_(embed.bias)
    embed.requires_grad_(not freeze_patches)
    nn.init.normal_(trunk.cls_token, std=1e-6)
    fix_sincos_(vit)
    return vit


def truncated_vit(vit: ViT) -> ViT:
    """DINO's family: truncated normal 0.02 for linear layers, learned positions and class token; torch's own patch
    embedding (DINO vision_transformer.py:161-172)."""
    truncated_(vit)
    vit.trunk.patch_embed.proj.reset_parameters()
    for token in (vit.trunk.pos_embed, vit.trunk.cls_token):
        if token is not None:  # there is no table where positions are rotary
            nn.init.trunc_normal_(token, std=TOKEN_STD)
    return vit


def ijepa_vit(vit: ViT) -> ViT:
    """I-JEPA's family: truncated normal 0.02 for linear layers and the patch embedding, zero biases, fixed sine-cosine
    positions with the column first (I-JEPA src/helper.py, src/models/vision_transformer.py)."""
    embed = truncated_(vit).trunk.patch_embed.proj
    nn.init.trunc_normal_(embed.weight, std=TOKEN_STD)
    nn.init.zeros_(embed.bias)
    fix_sincos_(vit)
    return vit


def nepa_vit(vit: ViT, layer_scale: float) -> ViT:
    """NEPA's family, a timm Eva: truncated normal 0.02 for linear layers, patch embedding and class token, zero biases,
    a layer scale, if any, of `layer_scale` (NEPA models/vit_nepa/modeling_vit_nepa.py)."""
    trunk = truncated_(vit).trunk
    for weight in (trunk.patch_embed.proj.weight, trunk.cls_token):
        nn.init.trunc_normal_(weight, std=TOKEN_STD)
    nn.init.zeros_(trunk.patch_embed.proj.bias)
    fill_layer_scale_(trunk, layer_scale)
    return vit


def dinov2_vit(vit: ViT, layer_scale: float) -> ViT:
    """DINO's family with a class token and registers N(0, 1e-6) and a layer scale, if any, of `layer_scale` (DINOv2
    models/vision_transformer.py). Registers have no positions: their rows of the table are zero."""
    trunk = truncated_vit(vit).trunk
    nn.init.normal_(trunk.cls_token, std=1e-6)
    fill_layer_scale_(trunk, layer_scale)
    if vit.spec.registers:
        nn.init.normal_(trunk.reg_token, std=1e-6)
    if trunk.pos_embed is not None and vit.spec.class_position:
        nn.init.zeros_(trunk.pos_embed.data[:, 1 : vit.spec.prefix])
    return vit


def msn_vit(vit: ViT) -> ViT:
    """DINO's family, but for the patch embedding: normal with the variance of a layer before a ReLU, zero bias (MSN
    src/deit.py:200-211)."""
    embed = truncated_vit(vit).trunk.patch_embed.proj
    nn.init.kaiming_normal_(embed.weight, mode="fan_in", nonlinearity="relu")
    nn.init.zeros_(embed.bias)
    return vit


def beit_token(width: int) -> nn.Parameter:
    """A mask token (1, 1, D) of BEiT's family."""
    token = nn.Parameter(torch.empty(1, 1, width))
    cut_normal_(token)
    return token


def beit_vit(vit: ViT, layer_scale: float) -> ViT:
    """BEiT's family (SimMIM vision_transformer.py:242-280, simmim.py:60-67): normal 0.02 cut off at +-0.02, patch
    embedding included; blocks as `rescale_` has them, and a layer scale, if any, of `layer_scale`; zero relative
    bias."""
    trunk = cut_truncated_(vit).trunk
    embed = trunk.patch_embed.proj
    for tensor in (embed.weight, trunk.cls_token, trunk.pos_embed):
        if tensor is not None:
            cut_normal_(tensor)
    nn.init.zeros_(embed.bias)
    rescale_(trunk.blocks)
    fill_layer_scale_(trunk, layer_scale)
    for block in trunk.blocks:
        for bias in (block.attn.q_bias, block.attn.v_bias):
            nn.init.zeros_(bias)
    return vit


def fill_layer_scale_(trunk: nn.Module, value: float) -> None:
    """Layer scales, where there are any, of `value`."""
    for name, parameter in trunk.blocks.named_parameters():
        if name.endswith(("gamma", "gamma_1", "gamma_2")):
            nn.init.constant_(parameter, value)


@torch.no_grad()
def rescale_(blocks: nn.ModuleList) -> None:
    """Block i, from 1, ends its two branches with weights divided by sqrt(2 i)."""
    for number, block in enumerate(blocks, start=1):
        block.attn.proj.weight.div_(sqrt(2 * number))
        block.mlp.fc2.weight.div_(sqrt(2 * number))


def cae_vit(vit: ViT, layer_scale: float, rescaled: bool) -> ViT:
    """CAE's family (modeling_cae.py:53-83): Xavier for linear layers, BEiT's patch embedding and class token; BEiT's
    throughout where `rescaled` (its option fix_init_weight); fixed sine-cosine positions, a layer scale, if any, of
    `layer_scale`."""
    trunk = (cut_truncated_(vit) if rescaled else xavier_(vit)).trunk
    cut_normal_(trunk.patch_embed.proj.weight)
    cut_normal_(trunk.cls_token)
    nn.init.zeros_(trunk.patch_embed.proj.bias)
    fill_layer_scale_(trunk, layer_scale)
    if rescaled:
        rescale_(trunk.blocks)
    fix_sincos_(vit)
    return vit


def cut_normal_(tensor: Tensor) -> None:
    """N(0, 0.02), cut off at one standard deviation."""
    nn.init.trunc_normal_(tensor, std=TOKEN_STD, a=-TOKEN_STD, b=TOKEN_STD)
