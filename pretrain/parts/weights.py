"""Initial weights as in the sources' code: several families, none of which is timm's default. Functions change the
network in place.

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
    """Xavier-uniform linear layers with zero bias; norms with gain 1 and bias 0 (MAE models_mae.py:82-93, MOCA, LUT,
    ExtreMA)."""
    return _initialise(network, nn.init.xavier_uniform_)


def truncated_(network: nn.Module, std: float = 0.02, limit: float = 2.0) -> nn.Module:
    """Linear layers from a normal distribution truncated at +-`limit`, with zero bias; norms with gain 1 and bias 0.

    DINO and timm truncate at +-2 (vision_transformer.py:161-172), SimMIM at +-std (simmim.py:66-67).
    """
    return _initialise(network, lambda weight: nn.init.trunc_normal_(weight, std=std, a=-limit, b=limit))


def cut_truncated_(network: nn.Module) -> nn.Module:
    """`truncated_` at one standard deviation: BEiT's linear layers (beit/modeling_pretrain.py, trunc_normal_), and
    CAE's with the option fix_init_weight."""
    return truncated_(network, TOKEN_STD, limit=TOKEN_STD)


def _initialise(network: nn.Module, draw_: Callable[[Tensor], Tensor]) -> nn.Module:
    """Fill the weights of linear layers by `draw_`, in place; set biases to 0, and norms to gain 1 and bias 0."""
    for module in network.modules():
        if isinstance(module, nn.Linear):
            draw_(module.weight)
            zero_bias_(module)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            zero_bias_(module)
    return network


def zero_bias_(layer: nn.Module) -> None:
    """Set a layer's bias to 0, if it has one: the patch embedding of CLIP has none."""
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def xavier_vit(vit: ViT) -> ViT:
    """MAE's family: Xavier throughout, with the patch embedding as a (D, 3pp) matrix whose bias stays torch's; class
    token N(0, 0.02); fixed sine-cosine positions (MAE models_mae.py:65-80, ExtreMA vits.py:238-281, MOCA
    models_moca.py:432-443)."""
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
    """Set fixed sine-cosine positions, with the channels of the row or of the column first as the encoder's spec says,
    and zeros for the class token. A learned table is drawn and stays trainable instead."""
    table = vit.trunk.pos_embed
    if table is None:  # rotary positions
        return
    if vit.spec.position == "learned":  # the spec is that of a checkpoint given with --init
        nn.init.trunc_normal_(table, std=TOKEN_STD)
        return
    first = "row" if vit.spec.position == "sincos_row_first" else "column"
    prefix = table.shape[1] - vit.spec.grid[0] * vit.spec.grid[1]
    with torch.no_grad():
        table.copy_(sincos_positions(vit.spec.grid, vit.spec.width, first, prefix))
    table.requires_grad_(False)


def capi_vit(vit: ViT) -> ViT:
    """MAE's family with registers N(0, 0.02) and a final norm whose gain stays 1 (CAPI model.py, init_weights)."""
    trunk = xavier_vit(vit).trunk
    if vit.spec.registers:
        nn.init.normal_(trunk.reg_token, std=TOKEN_STD)
    trunk.norm.weight.requires_grad_(False)
    return vit


def moco_vit(vit: ViT, freeze_patches: bool) -> ViT:
    """MoCo-v3's family: Xavier throughout, with queries, keys and values as separate matrices and the patch embedding
    as a (D, 3pp) matrix with zero bias, fixed with `freeze_patches`; class token N(0, 1e-6); fixed sine-cosine
    positions (moco-v3 vits.py:27-69)."""
    trunk = xavier_(vit).trunk
    bound = sqrt(6 / (2 * vit.spec.width))
    for block in trunk.blocks:
        nn.init.uniform_(block.attn.qkv.weight, -bound, bound)
    embed = trunk.patch_embed.proj
    nn.init.xavier_uniform_(embed.weight.flatten(1))
    zero_bias_(embed)
    embed.requires_grad_(not freeze_patches)
    nn.init.normal_(trunk.cls_token, std=1e-6)
    fix_sincos_(vit)
    return vit


def truncated_vit(vit: ViT) -> ViT:
    """DINO's family: truncated normal 0.02 for linear layers, learned positions and class token; torch's own initial
    weights for the patch embedding (DINO vision_transformer.py:161-172)."""
    truncated_(vit)
    vit.trunk.patch_embed.proj.reset_parameters()
    for token in (vit.trunk.pos_embed, vit.trunk.cls_token):
        if token is not None:  # there is no table of rotary positions
            nn.init.trunc_normal_(token, std=TOKEN_STD)
    return vit


def ijepa_vit(vit: ViT) -> ViT:
    """I-JEPA's family: truncated normal 0.02 for linear layers and the patch embedding, zero biases, fixed sine-cosine
    positions (I-JEPA src/helper.py, src/models/vision_transformer.py)."""
    embed = truncated_(vit).trunk.patch_embed.proj
    nn.init.trunc_normal_(embed.weight, std=TOKEN_STD)
    zero_bias_(embed)
    fix_sincos_(vit)
    return vit


def nepa_vit(vit: ViT, layer_scale: float) -> ViT:
    """NEPA's family, for timm's Eva: truncated normal 0.02 for linear layers, patch embedding and class token; zero
    biases (NEPA models/vit_nepa/modeling_vit_nepa.py). layer_scale: its initial value, if the encoder has one."""
    trunk = truncated_(vit).trunk
    for weight in (trunk.patch_embed.proj.weight, trunk.cls_token):
        nn.init.trunc_normal_(weight, std=TOKEN_STD)
    zero_bias_(trunk.patch_embed.proj)
    fill_layer_scale_(trunk, layer_scale)
    return vit


def dinov2_vit(vit: ViT, layer_scale: float) -> ViT:
    """DINO's family with class token and registers N(0, 1e-6) (DINOv2 models/vision_transformer.py). Registers have no
    positions: their rows in the table are zero. layer_scale: its initial value, if the encoder has one."""
    trunk = truncated_vit(vit).trunk
    nn.init.normal_(trunk.cls_token, std=1e-6)
    fill_layer_scale_(trunk, layer_scale)
    if vit.spec.registers:
        nn.init.normal_(trunk.reg_token, std=1e-6)
    if trunk.pos_embed is not None and vit.spec.class_position:
        nn.init.zeros_(trunk.pos_embed.data[:, 1 : vit.spec.prefix])
    return vit


def msn_vit(vit: ViT) -> ViT:
    """DINO's family, but with a Kaiming-normal patch embedding with zero bias (MSN src/deit.py:200-211)."""
    embed = truncated_vit(vit).trunk.patch_embed.proj
    nn.init.kaiming_normal_(embed.weight, mode="fan_in", nonlinearity="relu")
    zero_bias_(embed)
    return vit


def beit_token(width: int) -> nn.Parameter:
    """A mask token (1, 1, D) with initial weights of BEiT's family."""
    token = nn.Parameter(torch.empty(1, 1, width))
    cut_normal_(token)
    return token


def beit_vit(vit: ViT, layer_scale: float) -> ViT:
    """BEiT's family (SimMIM vision_transformer.py:242-280, simmim.py:60-67): normal 0.02 truncated at +-0.02 for linear
    layers, patch embedding, class token and positions; blocks rescaled by `rescale_`; zero biases.

    layer_scale: its initial value, if the encoder has one.
    """
    trunk = cut_truncated_(vit).trunk
    embed = trunk.patch_embed.proj
    for tensor in (embed.weight, trunk.cls_token, trunk.pos_embed):
        if tensor is not None:
            cut_normal_(tensor)
    zero_bias_(embed)
    rescale_(trunk.blocks)
    fill_layer_scale_(trunk, layer_scale)
    for block in trunk.blocks:
        for bias in (block.attn.q_bias, block.attn.v_bias):
            if bias is not None:
                nn.init.zeros_(bias)
    return vit


def fill_layer_scale_(trunk: nn.Module, value: float) -> None:
    """Set the layer scales of all blocks, if any, to `value`."""
    for name, parameter in trunk.blocks.named_parameters():
        if name.endswith(("gamma", "gamma_1", "gamma_2")):
            nn.init.constant_(parameter, value)


@torch.no_grad()
def rescale_(blocks: nn.ModuleList) -> None:
    """Divide the weights of the last layers of both branches of block i, counted from 1, by sqrt(2 i)."""
    for number, block in enumerate(blocks, start=1):
        block.attn.proj.weight.div_(sqrt(2 * number))
        block.mlp.fc2.weight.div_(sqrt(2 * number))


def cae_vit(vit: ViT, layer_scale: float, rescaled: bool) -> ViT:
    """CAE's family (modeling_cae.py:53-83): Xavier for linear layers, BEiT's patch embedding and class token, fixed
    sine-cosine positions.

    layer_scale: its initial value, if the encoder has one. rescaled: BEiT's weights throughout (fix_init_weight).
    """
    trunk = (cut_truncated_(vit) if rescaled else xavier_(vit)).trunk
    cut_normal_(trunk.patch_embed.proj.weight)
    cut_normal_(trunk.cls_token)
    zero_bias_(trunk.patch_embed.proj)
    fill_layer_scale_(trunk, layer_scale)
    if rescaled:
        rescale_(trunk.blocks)
    fix_sincos_(vit)
    return vit


def cut_normal_(tensor: Tensor) -> None:
    """N(0, 0.02) truncated at one standard deviation."""
    nn.init.trunc_normal_(tensor, std=TOKEN_STD, a=-TOKEN_STD, b=TOKEN_STD)
