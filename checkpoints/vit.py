"""The one Vision Transformer of this project: timm's blocks, with four operations that methods and probes share.

    project        images -> patch embeddings; masked methods replace patches by mask tokens after this
    add_positions  adds the position embeddings, resized to any patch grid
    encode         prepends class token and registers, runs blocks and final norm; any subset of patches, any layers
    attention      softmax attention maps of one block

Shapes: B images, L patches, l kept patches, D width, P prefix tokens (class token, registers), N = P + L tokens,
H heads, d channels per head, h x w patch grid.

timm's attention modules return only the weighted values, so the softmax maps are computed here.

Rotary position embeddings (RoPE) rotate pairs of channels of each query and key by angles that depend on the position
of its patch. ViTSpec.rotary names the kind:

  axial    one half of the channels is rotated by the row, the other half by the column, with periods 2 pi theta^(4i/d):
           EVA-02 (Fang et al. 2023), RoPE-ViT (Heo et al. 2024), Perception Encoder (Bolya et al. 2025). Positions are
           patch indices, or are rescaled to the grid of the pretraining (EVA-02 rope.py, VisionRotaryEmbeddingFast,
           ft_seq_len over pt_seq_len)
  centred  like axial with positions from -1 to 1 and periods theta^(4i/d): DINOv3, rope_position_encoding.py
  mixed    each channel is rotated by row and column together, with frequencies trained per block and head: RoPE-ViT
  unit     like mixed with frequencies per block and positions from 0 to 1; registers have positions too: CAPI (Darcet
           et al. 2025)

The angles are those of timm's modules, computed in float32 or more, whatever the precision of the network. timm is
imported by the functions that need it: it takes as long as torch, and a run with nothing left to do builds no network.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from math import isqrt, pi
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import init
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from checkpoints.positions import resize_positions, resize_relative
from checkpoints.spec import ViTSpec
from engine.errors import option

TIMM_CLASSES = {"vit": "VisionTransformer", "beit": "Beit", "eva": "Eva"}  # ViTSpec.family -> timm's class of the trunk
MAX_UNIT_ROTATIONS = 7  # highest frequency of UnitRotary, in full rotations over the image


def attention_map(
    attention: nn.Module,
    tokens: Tensor,
    rows: slice,
    shared_rel_pos_bias: Tensor | None = None,
    rope: Tensor | None = None,
) -> Tensor:
    """Softmax attention (B, H, Q, N) of one of timm's attention modules.

    Args:
        attention: The attention module of a block.
        tokens: Its input (B, N, D), after the block's norm.
        rows: The Q queries to compute, a slice of the N tokens.
        shared_rel_pos_bias: (1, H, N, N), added to the logits.
        rope: Sines and cosines for the patches, as `rotary_tables` returns them for this block.
    """
    query, key = _queries_and_keys(attention, tokens)
    if hasattr(attention, "q_norm"):
        query, key = attention.q_norm(query), attention.k_norm(key)
    if rope is not None:
        query, key = _apply_rotary(query, rope, attention), _apply_rotary(key, rope, attention)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)  # grouped queries: several heads share one key
    logits = query[:, :, rows] * attention.scale @ key.transpose(-2, -1)
    if getattr(attention, "relative_position_bias_table", None) is not None:
        logits = logits + attention._get_rel_pos_bias()[..., rows, :]
    if shared_rel_pos_bias is not None:
        logits = logits + shared_rel_pos_bias[..., rows, :]
    return logits.softmax(dim=-1)


def class_attention_map(attention: nn.Module, tokens: Tensor) -> Tensor:
    """Softmax attention (B, H, 1+L) of timm's ClassAttn on normed tokens (B, 1+L, D); the first token is the query."""
    heads = (attention.num_heads, -1)
    query, key = attention.q(tokens[:, :1]).unflatten(-1, heads), attention.k(tokens).unflatten(-1, heads)
    return torch.einsum("bqhd,bnhd->bhn", query * attention.scale, key).softmax(dim=-1)


def _queries_and_keys(attention: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys, each (B, H, N, d), of tokens (B, N, D), by a joint qkv projection or separate ones."""
    batch, length, _ = tokens.shape
    if attention.qkv is None:
        query = attention.q_proj(tokens).reshape(batch, length, -1, attention.head_dim).transpose(1, 2)
        key = attention.k_proj(tokens).reshape(batch, length, -1, attention.head_dim).transpose(1, 2)
        return query, key
    bias = attention.qkv.bias
    if getattr(attention, "q_bias", None) is not None:
        bias = torch.cat([attention.q_bias, attention.k_bias, attention.v_bias])
    qkv = linear(tokens, attention.qkv.weight, bias)
    query, key, _ = qkv.reshape(batch, length, 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4)
    return query, key


def _apply_rotary(values: Tensor, rope: Tensor, attention: nn.Module) -> Tensor:
    """Queries or keys (B, H, N, d) with those of the patches rotated; prefix tokens stay unchanged."""
    from timm.layers import apply_rot_embed_cat

    prefix = attention.num_prefix_tokens
    patches = apply_rot_embed_cat(values[:, :, prefix:], rope, half=attention.rotate_half)
    return torch.cat([values[:, :, :prefix], patches.type_as(values)], dim=2)


@cache
def rounded_periods() -> type[nn.Module]:
    """The class of DINOv3's rotary embedding with periods rounded to bfloat16, as its files store them; computed in
    float32."""
    from timm.layers import RotaryEmbeddingDinoV3

    class RoundedPeriods(RotaryEmbeddingDinoV3):
        def __init__(self, rope: RotaryEmbeddingDinoV3) -> None:
            super().__init__(
                rope.dim,
                temperature=rope.temperature,
                grid_offset=rope.grid_offset,
                grid_indexing=rope.grid_indexing,
                rotate_half=rope.rotate_half,
            )

        def _compute_periods(self, *args: Any, **kwargs: Any) -> Tensor:
            exact = super()._compute_periods(*args, **kwargs)
            return exact.to(torch.bfloat16).to(exact.dtype)

    return RoundedPeriods


class UnitRotary(nn.Module):
    """Rotary embedding of patches and registers with positions from 0 to 1: CAPI (model.py, Rope and EncoderDecoder).

    freqs: for each block (2, d), the trained frequency of each channel along rows and along columns. Initially the row
    rotates the first half of the channels and the column the second half, so the two channels of a pair
    (rotary_pairs="halves") are rotated by different angles. x cos + rotate_half(x) sin is then no true rotation; this
    is as in the official code.
    """

    def __init__(self, spec: ViTSpec, blocks: int) -> None:
        super().__init__()
        self.spec, channels = spec, spec.width // spec.heads
        rates = 2 * pi * MAX_UNIT_ROTATIONS * spec.rotary_base ** -torch.linspace(0, 1, channels // 4)
        freqs = torch.zeros(2, channels)
        freqs[0, : channels // 2] = freqs[1, channels // 2 :] = rates.repeat(2)
        self.freqs = nn.ParameterList(freqs.clone() for _ in range(blocks))

    def positions(self, grid: tuple[int, int], keep: Tensor | None = None) -> Tensor:
        """(Row, column) positions (R+L, 2) of R registers, then the L patches of `grid`.

        keep: (B, l) indices of the patches to encode; the result is then (B, R+l, 2).
        """
        like = dict(dtype=self.freqs[0].dtype, device=self.freqs[0].device)
        patches = torch.cartesian_prod(*(torch.linspace(0, 1, side, **like) for side in grid))
        patches = patches if keep is None else patches[keep]
        if not self.spec.registers:
            return patches
        registers = torch.zeros(self.spec.registers, 2, **like)
        if self.spec.register_place == "border":  # evenly spaced along the four sides of the unit square
            step = torch.arange(self.spec.registers // 4, **like) * 4 / self.spec.registers
            zero, one = torch.zeros_like(step), torch.ones_like(step)
            sides = [(step, zero), (one, step), (1 - step, one), (zero, 1 - step)]
            registers = torch.cat([torch.stack(side, dim=1) for side in sides])
        if self.spec.register_box == "visible":
            first, last = patches.aminmax(dim=-2, keepdim=True)
            registers = first + registers * (last - first)
        elif keep is not None:
            registers = registers.expand(len(keep), -1, -1)
        return torch.cat([registers, patches], dim=-2)

    def tables(self, positions: Tensor) -> list[Tensor]:
        """Sines and cosines for each block: (N, 2d) at positions (N, 2), or (B, 1, N, 2d) at positions (B, N, 2)."""
        positions = positions if positions.ndim == 2 else positions.unsqueeze(1)
        rows, columns = positions.split(1, dim=-1)
        angles = [rows * by_row + columns * by_column for by_row, by_column in self.freqs]
        return [torch.cat([angle.sin(), angle.cos()], dim=-1) for angle in angles]


def rotary_tables(rope: nn.Module, depth: int, grid: tuple[int, int], keep: Tensor | None) -> list[Tensor]:
    """Sines and cosines for the patches of `grid`, one table for each of `depth` blocks.

    keep: (B, l) indices of the patches to encode, or None for all. Tables are (L, 2d), or (B, 1, l, 2d) with `keep`;
    those of the kind "mixed" (H, L, 2d), or (B, H, l, 2d). Those of the kind "unit" begin with the registers.
    """
    if isinstance(rope, UnitRotary):
        return rope.tables(rope.positions(grid, keep))
    tables = rope.get_embed(shape=list(grid))
    if tables.ndim == 2:  # one table for all blocks
        return [tables if keep is None else tables[keep].unsqueeze(1)] * depth
    return [table if keep is None else table[:, keep].transpose(0, 1) for table in tables]


class PixelTrunk(nn.Module):
    """Stand-in for timm's trunk for raw pixels: a patch embedding is the patch's pixels, and the block is the identity.

    D = 3 p p values of a patch of p x p pixels, channel by channel. No weights are trained, except a norm that
    fine-tuning may add.
    """

    def __init__(self, spec: ViTSpec) -> None:
        super().__init__()
        self.patch_embed = nn.ModuleDict({"proj": nn.PixelUnshuffle(spec.patch_size), "norm": nn.Identity()})
        self.pos_embed = None
        self.blocks = nn.ModuleList([nn.Identity()])
        # Fine-tuning adds a norm after the mean of the patches.
        self.fc_norm = nn.LayerNorm(spec.width, spec.norm_eps) if spec.final_norm == "pooled" else nn.Identity()


def build_trunk(spec: ViTSpec, drop_path: float = 0.0, initialise: bool = True) -> nn.Module:
    """timm's VisionTransformer, Beit or Eva for `spec`. Raises ValueError if timm has no such model.

    initialise: False skips the initial weights where timm offers that, which cuts the time to a fifth.
    """
    if spec.family == "pixels":
        return PixelTrunk(spec)
    import timm
    from timm.layers import RmsNorm

    args = spec.timm_args() | ({} if initialise or spec.family != "vit" else {"weight_init": "skip"})
    try:
        trunk = timm.create_model(spec.architecture, drop_path_rate=drop_path, **args)
    except (RuntimeError, TypeError, AssertionError) as error:
        reason = str(error).partition("\n")[0] or "sizes that do not fit each other"
        raise ValueError(f"timm cannot build {spec.architecture!r}: {reason}") from error
    if type(trunk).__name__ != TIMM_CLASSES[spec.family]:
        raise ValueError(f"{spec.architecture!r} is timm's {type(trunk).__name__}, not its {TIMM_CLASSES[spec.family]}")
    norm1 = trunk.blocks[0].norm1
    norm_class: Callable[..., nn.Module] = RmsNorm if spec.rms_norm else type(norm1)
    if norm1.eps != spec.norm_eps or norm_class is not type(norm1):
        norm_layer = partial(norm_class, eps=spec.norm_eps)
        trunk = timm.create_model(spec.architecture, drop_path_rate=drop_path, norm_layer=norm_layer, **args)
    if hasattr(trunk.patch_embed.norm, "eps"):  # AIMv2's, which timm builds apart from the blocks' norms
        trunk.patch_embed.norm.eps = spec.norm_eps
    if not spec.layer_scale:  # timm ignores init_values=None and takes the architecture's default
        for block in trunk.blocks:
            if hasattr(block, "ls1"):
                block.ls1, block.ls2 = nn.Identity(), nn.Identity()
            elif hasattr(block, "gamma_1"):
                block.gamma_1 = block.gamma_2 = None
    if spec.rotary_rounding != "none":
        trunk.rope = rounded_periods()(trunk.rope)
    if spec.rotary == "unit":
        trunk.rope = UnitRotary(spec, spec.depth)
        for block in trunk.blocks:
            block.attn.num_prefix_tokens = 0  # registers are rotated like patches
    if not spec.proj_bias:
        for block in trunk.blocks:
            for layer in (block.attn.proj, *block.mlp.children()):
                if isinstance(layer, nn.Linear):
                    layer.register_parameter("bias", None)
    return trunk


class ViT(nn.Module):
    """A timm trunk and, if the spec has them, class-attention blocks (ExtreMA).

    Names in the state_dict: `trunk.*` are timm's; `class_attention.*` and `class_query` are saved in extra.safetensors.
    """

    def __init__(self, spec: ViTSpec, drop_path: float = 0.0, initialise: bool = True) -> None:
        super().__init__()
        # A network's own tables are for its image size, whatever the size of those that an export stores.
        self.spec = spec = replace(spec, table_size=None)
        self.trunk = build_trunk(spec, drop_path, initialise)
        if spec.class_attention:
            from timm.models.cait import LayerScaleBlockClassAttn

            self.class_query = nn.Parameter(torch.zeros(1, 1, spec.width))
            nn.init.normal_(self.class_query, std=0.02)
            norm = partial(nn.LayerNorm, eps=spec.norm_eps)
            self.class_attention = nn.ModuleList(
                LayerScaleBlockClassAttn(spec.width, spec.heads, qkv_bias=True, norm_layer=norm, init_values=0.1)
                for _ in range(spec.class_attention)
            )

    def project(self, images: Tensor) -> Tensor:
        """Patch embeddings (B, L, D), row by row and without positions, of normalised images (B, 3, h*p, w*p).

        Raises ValueError if the sides are not multiples of the patch size p.
        """
        patch = self.spec.patch_size
        if images.shape[-2] % patch or images.shape[-1] % patch:
            raise ValueError(
                f"images of {images.shape[-2]} x {images.shape[-1]} px: sides must be multiples of {patch}"
            )
        embed = self.trunk.patch_embed
        return embed.norm(embed.proj(images).flatten(2).transpose(1, 2))

    def add_positions(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """Patches (B, L, D) plus the position embeddings, resized to the `grid` (rows, columns) of the L patches."""
        table = self.trunk.pos_embed
        if table is None:
            return patches
        prefix = table.shape[1] - self.spec.grid[0] * self.spec.grid[1]
        table = resize_positions(table, self.spec.grid, grid, self.spec.position_resize, prefix=prefix)
        return patches + table[:, prefix:]

    def encode(
        self,
        patches: Tensor,
        keep: Tensor | None = None,
        layers: Sequence[int] = (-1,),
        norm: bool = True,
        grid: tuple[int, int] | None = None,
    ) -> list[Tensor]:
        """Tokens (B, P+l, D) after each of `layers`.

        Args:
            patches: Patch embeddings with positions (B, L, D), as `add_positions` returns them.
            keep: (B, l) indices of the patches to encode; None: all.
            layers: Block indices, negative from the end.
            norm: Apply the final norm, to those tokens that it is trained for (`spec.final_norm`), after any block.
            grid: Rows and columns of the L patches; needed if blocks use positions and L is not square.

        The class token of class-attention models exists only after the last block.
        """
        indices = [self._block_index(layer) for layer in layers]
        block_kwargs = self.block_kwargs(patches.shape[1], keep, grid)
        tokens = self._prepend_prefix(patches, keep)
        outputs = {}
        for index, block in enumerate(self.trunk.blocks[: max(indices) + 1]):
            tokens = block(tokens, **block_kwargs[index])
            if index in indices:
                outputs[index] = self._prepend_class_token(tokens) if index == self.spec.depth - 1 else tokens
        return [self.normalise(outputs[index], index) if norm else outputs[index] for index in indices]

    def normalise(self, tokens: Tensor, layer: int = -1) -> Tensor:
        """The final norm applied to the output (B, P+l, D) of `encode(..., norm=False)` for `layer`.

        Only those tokens are normalised that the norm is trained for (`spec.final_norm`).
        """
        if self.spec.final_norm == "all":
            return self.trunk.norm(tokens)
        if self.spec.class_attention and self._block_index(layer) == self.spec.depth - 1:
            return torch.cat([self.trunk.norm(tokens[:, :1]), tokens[:, 1:]], dim=1)
        return tokens

    def forward(self, images: Tensor, layers: Sequence[int] = (-1,), norm: bool = True) -> list[Tensor]:
        """Tokens (B, P+L, D) after each of `layers`, of normalised images (B, 3, H, W)."""
        grid = self.spec.grid_of(images.shape[-2:])
        return self.encode(self.add_positions(self.project(images), grid), layers=layers, norm=norm, grid=grid)

    def attention(self, images: Tensor, layer: int = -1) -> Tensor:
        """Softmax attention (B, H, P+L, P+L) of one block on images (B, 3, H, W); rows are queries.

        Raises ValueError for raw pixels.
        """
        return self.attention_of(*self._tokens_before(images, layer))

    def keys(self, images: Tensor, layer: int = -1) -> Tensor:
        """Keys (B, P+L, D) of one block on images (B, 3, H, W), heads concatenated.

        They are the output of the key projection, before any key norm and rotary embedding. Raises ValueError for raw
        pixels.
        """
        tokens, index, _ = self._tokens_before(images, layer)
        block = self.trunk.blocks[index]
        _, keys = _queries_and_keys(block.attn, tokens if self.spec.norm_after else block.norm1(tokens))
        return keys.transpose(1, 2).flatten(2)

    def _tokens_before(self, images: Tensor, layer: int) -> tuple[Tensor, int, tuple[int, int]]:
        """Input tokens (B, P+L, D) of a block on images (B, 3, H, W), the block's index, and the patch grid."""
        index = self._block_index(layer)
        if not hasattr(self.trunk.blocks[index], "attn"):
            raise ValueError("raw pixels have no attention; name a network")
        grid = self.spec.grid_of(images.shape[-2:])
        patches = self.add_positions(self.project(images), grid)
        block_kwargs = self.block_kwargs(patches.shape[1], None, grid)
        tokens = self._prepend_prefix(patches, None)
        for block, kwargs in zip(self.trunk.blocks[:index], block_kwargs[:index], strict=True):
            tokens = block(tokens, **kwargs)
        return tokens, index, grid

    def attention_of(
        self, tokens: Tensor, layer: int = -1, grid: tuple[int, int] | None = None, rows: slice = slice(None)
    ) -> Tensor:
        """Softmax attention (B, H, Q, P+L) of one block on its input tokens (B, P+L, D).

        rows: the Q queries to compute, by default all P+L.
        """
        index = self._block_index(layer)
        block = self.trunk.blocks[index]
        kwargs = self.block_kwargs(tokens.shape[1] - self.spec.prefix, None, grid)[index]
        return attention_map(block.attn, tokens if self.spec.norm_after else block.norm1(tokens), rows, **kwargs)

    def class_token_attention(self, images: Tensor, layer: int = -1) -> Tensor:
        """Softmax attention (B, H, N) of the class token to all tokens, in the order of `encode`.

        N = P+L in a block of the trunk. If the spec has class-attention blocks, `layer` counts these and N = 1+P+L.
        Raises ValueError if the model has no class token.
        """
        if not self.spec.has_class_token:
            raise ValueError("the model has no class token, so its attention cannot be computed")
        if not self.spec.class_attention:
            return self.spec.class_feature(self.attention(images, layer).transpose(1, 2))
        if not -self.spec.class_attention <= layer < self.spec.class_attention:
            raise ValueError(f"layer {layer}: the model has {self.spec.class_attention} class-attention blocks")
        tokens = self(images, norm=False)[0][:, 1:]
        query = self.class_query.expand(len(tokens), -1, -1)
        for block in self.class_attention[: layer % self.spec.class_attention]:
            query = block(tokens, query)
        block = self.class_attention[layer % self.spec.class_attention]
        return class_attention_map(block.attn, block.norm1(torch.cat([query, tokens], dim=1)))

    def _block_index(self, layer: int) -> int:
        """Index from 0 of a block that may be counted from the end. Raises ValueError for a layer out of range."""
        if not -self.spec.depth <= layer < self.spec.depth:
            raise ValueError(f"layer {layer}: the model has {self.spec.depth} blocks")
        return layer % self.spec.depth

    def _prepend_prefix(self, patches: Tensor, keep: Tensor | None) -> Tensor:
        """Input tokens (B, P+l, D) of the first block: class token and registers, then the kept ones of L patches."""
        if keep is not None:
            patches = patches.gather(1, keep.unsqueeze(-1).expand(-1, -1, patches.shape[-1]))
        trunk, prefix = self.trunk, []
        has_position = trunk.pos_embed is not None and self.spec.class_position
        if self.spec.class_token:
            prefix.append(trunk.cls_token + trunk.pos_embed[:, :1] if has_position else trunk.cls_token)
        if self.spec.registers:
            rows = slice(int(self.spec.class_token), self.spec.prefix)
            prefix.append(trunk.reg_token + (trunk.pos_embed[:, rows] if has_position else 0.0))
        tokens = torch.cat([*(token.expand(len(patches), -1, -1) for token in prefix), patches], dim=1)
        return trunk.norm_pre(tokens) if hasattr(trunk, "norm_pre") else tokens

    def block_kwargs(self, length: int, keep: Tensor | None, grid: tuple[int, int] | None) -> list[dict]:
        """Keyword arguments of each block besides the tokens: rotary tables, a relative position bias, or none.

        length: number of patches L before `keep`. Called once in each pass; subclasses may override it.
        """
        if self.spec.rotary == "none":
            return [self.relative_bias(length, keep, grid)] * self.spec.depth
        tables = rotary_tables(self.trunk.rope, self.spec.depth, self._grid_for(length, grid), keep)
        return [{"rope": table} for table in tables]

    def _grid_for(self, length: int, grid: tuple[int, int] | None) -> tuple[int, int]:
        """Rows and columns of `length` patches: `grid` if given, else the native grid if it fits, else a square.

        Raises ValueError if these do not have `length` patches.
        """
        side = isqrt(length)
        grid = grid or (self.spec.grid if length == self.spec.grid[0] * self.spec.grid[1] else (side, side))
        if grid[0] * grid[1] != length:
            raise ValueError(f"{length} patches are not a {grid[0]} x {grid[1]} grid")
        return grid

    def relative_bias(self, length: int, keep: Tensor | None, grid: tuple[int, int] | None) -> dict:
        """The argument `shared_rel_pos_bias` (1, H, 1+L, 1+L) of all blocks for `grid`, or no argument.

        Raises ValueError if only some patches are encoded, or if per-block tables are for another grid. Called once in
        each pass; subclasses that compute the bias differently override it.
        """
        if self.spec.relative_position == "none":
            return {}
        if keep is not None:
            raise ValueError("a model with relative position bias encodes all patches; replace patches instead")
        grid = self._grid_for(length, grid)
        if self.spec.relative_position == "per_block":
            if grid != self.spec.grid:
                raise ValueError(
                    f"the per-block bias tables are for {self.spec.image_size} px: import with {option('image_size')} "
                    f"{grid[0] * self.spec.patch_size}, or call ViTExport.at_size"
                )
            return {}
        table = resize_relative(self.trunk.rel_pos_bias.relative_position_bias_table, self.spec.grid, grid)
        index = self.trunk.rel_pos_bias.relative_position_index
        if grid != self.spec.grid:
            from timm.models.beit import gen_relative_position_index

            index = gen_relative_position_index(grid, device=table.device)
        return {"shared_rel_pos_bias": table[index].permute(2, 0, 1).unsqueeze(0)}

    def _prepend_class_token(self, tokens: Tensor) -> Tensor:
        """(B, 1+N, D) for class-attention models: their class token attends to the last block's tokens (B, N, D).

        Other models' tokens are returned unchanged.
        """
        if not self.spec.class_attention:
            return tokens
        query = self.class_query.expand(len(tokens), -1, -1)
        for block in self.class_attention:
            query = block(tokens, query)
        return torch.cat([query, tokens], dim=1)


RANDOM_INITS = {Tensor.uniform_, Tensor.normal_, init.uniform_, init.normal_, init.kaiming_uniform_}
TRUNCATION = {Tensor.erfinv_, Tensor.mul_, Tensor.add_, Tensor.clamp_}  # turns uniform numbers into a truncated normal


class skip_init(TorchFunctionMode):
    """Context manager under which modules are built without random initial weights, for weights loaded afterwards.

    Parameters stay as torch.empty allocates them, and random generators do not advance. Constants are still set and
    buffers computed. On the device "meta", skipping saves up to four fifths of the build time, because torch would
    compute the shape of each random tensor in Python.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        arguments = kwargs or {}
        if func in RANDOM_INITS:
            return args[0] if args else arguments["tensor"]
        if func in TRUNCATION and args[0].is_meta:
            return args[0]
        return func(*args, **arguments)
