"""The one Vision Transformer: a timm trunk behind four operations that serve every method and every probe.

    project   images -> patches                      (mask tokens replace patches after this)
    place     + positions, for any grid
    encode    class token and registers in front, blocks, final norm; any subset of patches, any layers
    attention softmax maps of one block

Letters: B images, L patches, l kept patches, D width, P prefix tokens (class token, registers), N = P + L,
H heads, d channels of a head, h x w grid.

timm's attention modules return the mixed values alone; their softmax maps are computed here. Rotary positions turn
queries and keys of a patch by angles that its position sets, two channels together. Kinds, as a ViTSpec names them:

  axial    half of the channels turn by the row, half by the column, at periods 2 pi theta^(4i/d): EVA-02 (Fang et al.
           2023), RoPE-ViT (Heo et al. 2024), Perception Encoder (Bolya et al. 2025). Positions count patches, or are
           scaled to the grid of the pretraining (EVA-02 rope.py, VisionRotaryEmbeddingFast, ft_seq_len over pt_seq_len)
  centred  the same with positions from -1 to 1, at periods theta^(4i/d): DINOv3, rope_position_encoding.py
  mixed    every channel turns by row and column at once, at trained rates of its block and head: RoPE-ViT
  unit     the same at rates of its block, by positions from 0 to 1; registers have positions too: CAPI (Darcet et al.
           2025)

The numbers are those of timm's modules, computed in float32 at least, whatever the precision of the network.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import isqrt, pi
from typing import Any

import timm
import torch
from timm.layers import RmsNorm, RotaryEmbeddingDinoV3, apply_rot_embed_cat
from timm.models.beit import Beit, gen_relative_position_index
from timm.models.cait import LayerScaleBlockClassAttn
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import init
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from checkpoints.positions import resize_positions, resize_relative
from checkpoints.spec import ViTSpec


def attention_map(
    attention: nn.Module,
    tokens: Tensor,
    rows: slice,
    shared_rel_pos_bias: Tensor | None = None,
    rope: Tensor | None = None,
) -> Tensor:
    """`rows` of the softmax map (B, H, N, N) of `attention` on normed tokens (B, N, D).

    shared_rel_pos_bias: (1, H, N, N). rope: sines and cosines for the patches, see the top of this file.
    """
    query, key = _queries_and_keys(attention, tokens)
    if hasattr(attention, "q_norm"):
        query, key = attention.q_norm(query), attention.k_norm(key)
    if rope is not None:
        query, key = (_turned(values, rope, attention) for values in (query, key))
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)  # several heads of queries share one of keys
    logits = query[:, :, rows] * attention.scale @ key.transpose(-2, -1)
    if getattr(attention, "relative_position_bias_table", None) is not None:
        logits = logits + attention._get_rel_pos_bias()[..., rows, :]
    if shared_rel_pos_bias is not None:
        logits = logits + shared_rel_pos_bias[..., rows, :]
    return logits.softmax(dim=-1)


def class_attention_map(attention: nn.Module, tokens: Tensor) -> Tensor:
    """The softmax map (B, H, 1+L) of timm's ClassAttn on normed tokens (B, 1+L, D); the first token is the query."""
    heads = (attention.num_heads, -1)
    query, key = attention.q(tokens[:, :1]).unflatten(-1, heads), attention.k(tokens).unflatten(-1, heads)
    return torch.einsum("bqhd,bnhd->bhn", query * attention.scale, key).softmax(dim=-1)


def _queries_and_keys(attention: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(B, H, N, d) of both, from one projection or from two."""
    batch, length, _ = tokens.shape
    if attention.qkv is None:
        both = (attention.q_proj(tokens), attention.k_proj(tokens))
        query, key = (values.reshape(batch, length, -1, attention.head_dim).transpose(1, 2) for values in both)
        return query, key
    bias = attention.qkv.bias
    if getattr(attention, "q_bias", None) is not None:
        bias = torch.cat([attention.q_bias, attention.k_bias, attention.v_bias])
    joint = linear(tokens, attention.qkv.weight, bias)
    query, key, _ = joint.reshape(batch, length, 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4)
    return query, key


def _turned(values: Tensor, rope: Tensor, attention: nn.Module) -> Tensor:
    """Queries or keys (B, H, N, d), those of the patches turned by their positions."""
    prefix = attention.num_prefix_tokens
    patches = apply_rot_embed_cat(values[:, :, prefix:], rope, half=attention.rotate_half)
    return torch.cat([values[:, :, :prefix], patches.type_as(values)], dim=2)


class RoundedPeriods(RotaryEmbeddingDinoV3):
    """Rotary positions with periods rounded to bfloat16, as DINOv3's files store them; computed in float32."""

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


class UnitRotary(nn.Module):
    """Rotary positions from 0 to 1 of patches and registers: CAPI (model.py, Rope and EncoderDecoder).

    freqs: of each block (2, d), the rates at which each channel turns by row and by column. As drawn, the row turns the
    first half of the channels and the column the second, so that the channels of a pair (rotary_pairs="halves") turn by
    different angles: x cos + rotate_half(x) sin is no rotation then, nor is it in the source.
    """

    def __init__(self, spec: ViTSpec, blocks: int) -> None:
        super().__init__()
        self.spec, channels = spec, spec.width // spec.heads
        rates = 2 * pi * MAX_RATE * spec.rotary_base ** -torch.linspace(0, 1, channels // 4)
        freqs = torch.zeros(2, channels)
        freqs[0, : channels // 2] = freqs[1, channels // 2 :] = rates.repeat(2)
        self.freqs = nn.ParameterList(freqs.clone() for _ in range(blocks))

    def positions(self, grid: tuple[int, int], keep: Tensor | None = None) -> Tensor:
        """Row and column (R+L, 2) of R registers and the patches of `grid`; with `keep` (B, l), (B, R+l, 2)."""
        like = dict(dtype=self.freqs[0].dtype, device=self.freqs[0].device)
        patches = torch.cartesian_prod(*(torch.linspace(0, 1, side, **like) for side in grid))
        patches = patches if keep is None else patches[keep]
        if not self.spec.registers:
            return patches
        registers = torch.zeros(self.spec.registers, 2, **like)
        if self.spec.register_place == "border":
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
        """For each block sines and cosines (N, 2d) at positions (N, 2), or (B, 1, N, 2d) at positions (B, N, 2)."""
        positions = positions if positions.ndim == 2 else positions.unsqueeze(1)
        rows, columns = positions.split(1, dim=-1)
        angles = [rows * by_row + columns * by_column for by_row, by_column in self.freqs]
        return [torch.cat([angle.sin(), angle.cos()], dim=-1) for angle in angles]


def turns(rope: nn.Module, depth: int, grid: tuple[int, int], keep: Tensor | None) -> list[Tensor]:
    """For each block sines and cosines (L, 2d), or (H, L, 2d) of mixed ones, for the patches of `grid`; for the
    registers before them too where these turn.

    keep: (B, l) indices of the patches to encode; the tables are then (B, 1, l, 2d) or (B, H, l, 2d).
    """
    if isinstance(rope, UnitRotary):
        return rope.tables(rope.positions(grid, keep))
    table = rope.get_embed(shape=list(grid))
    if table.ndim == 2:
        return [table if keep is None else table[keep].unsqueeze(1)] * depth
    return [of_block if keep is None else of_block[:, keep].transpose(0, 1) for of_block in table]


MAX_RATE = 7  # of UnitRotary, in turns over the image
CLASSES = {"vit": VisionTransformer, "beit": Beit, "eva": Eva}  # of each family of ViTSpec


class PixelTrunk(nn.Module):
    """Stand-in for timm's trunk for raw pixels: a patch embedding is the patch's pixels, and the block does nothing.

    D = 3 p p values of a patch of p x p pixels, channel by channel. Nothing in it is trained.
    """

    def __init__(self, spec: ViTSpec) -> None:
        super().__init__()
        self.patch_embed = nn.ModuleDict({"proj": nn.PixelUnshuffle(spec.patch_size), "norm": nn.Identity()})
        self.pos_embed = None
        self.blocks = nn.ModuleList([nn.Identity()])
        # Fine-tuning puts a norm of its own behind the mean of the patches.
        self.fc_norm = nn.LayerNorm(spec.width, spec.norm_eps) if spec.final_norm == "pooled" else nn.Identity()


def build_trunk(spec: ViTSpec, drop_path: float = 0.0, initialise: bool = True) -> nn.Module:
    """timm's VisionTransformer, Beit or Eva for `spec`. Raises ValueError if timm has no such model.

    initialise=False draws no initial weights where timm can leave them out, which takes a fifth of the time.
    """
    if spec.family == "pixels":
        return PixelTrunk(spec)
    args = spec.timm_args() | ({} if initialise or spec.family != "vit" else {"weight_init": "skip"})
    try:
        trunk = timm.create_model(spec.architecture, drop_path_rate=drop_path, **args)
    except (RuntimeError, TypeError, AssertionError) as error:
        reason = str(error).partition("\n")[0] or "sizes that do not fit each other"
        raise ValueError(f"timm cannot build {spec.architecture!r}: {reason}") from error
    if type(trunk) is not CLASSES[spec.family]:
        raise ValueError(
            f"{spec.architecture!r} is timm's {type(trunk).__name__}, not its {CLASSES[spec.family].__name__}"
        )
    kind: Callable[..., nn.Module] = RmsNorm if spec.rms_norm else type(trunk.blocks[0].norm1)
    if trunk.blocks[0].norm1.eps != spec.norm_eps or kind is not type(trunk.blocks[0].norm1):
        norm = partial(kind, eps=spec.norm_eps)
        trunk = timm.create_model(spec.architecture, drop_path_rate=drop_path, norm_layer=norm, **args)
    if not spec.layer_scale:  # timm passes over init_values=None, and takes the architecture's own
        for block in trunk.blocks:
            if hasattr(block, "ls1"):
                block.ls1, block.ls2 = nn.Identity(), nn.Identity()
            elif hasattr(block, "gamma_1"):
                block.gamma_1 = block.gamma_2 = None
    if spec.rotary_rounding != "none":
        trunk.rope = RoundedPeriods(trunk.rope)
    if spec.rotary == "unit":
        trunk.rope = UnitRotary(spec, spec.depth)
        for block in trunk.blocks:
            block.attn.num_prefix_tokens = 0  # registers turn like patches
    if not spec.proj_bias:
        for block in trunk.blocks:
            for layer in (block.attn.proj, *block.mlp.children()):
                if isinstance(layer, nn.Linear):
                    layer.register_parameter("bias", None)
    return trunk


class ViT(nn.Module):
    """A timm trunk and, where the spec has them, class-attention blocks (ExtreMA).

    State-dict names: `trunk.*` are timm's own; `class_attention.*` and `class_query` go to extra.safetensors.
    """

    def __init__(self, spec: ViTSpec, drop_path: float = 0.0, initialise: bool = True) -> None:
        super().__init__()
        self.spec = spec
        self.trunk = build_trunk(spec, drop_path, initialise)
        if spec.class_attention:
            self.class_query = nn.Parameter(torch.zeros(1, 1, spec.width))
            nn.init.normal_(self.class_query, std=0.02)
            norm = partial(nn.LayerNorm, eps=spec.norm_eps)
            self.class_attention = nn.ModuleList(
                LayerScaleBlockClassAttn(spec.width, spec.heads, qkv_bias=True, norm_layer=norm, init_values=0.1)
                for _ in range(spec.class_attention)
            )

    def project(self, images: Tensor) -> Tensor:
        """(B, 3, h*p, w*p) normalised images -> (B, L, D) patch embeddings, row by row, without positions."""
        patch = self.spec.patch_size
        if images.shape[-2] % patch or images.shape[-1] % patch:
            raise ValueError(
                f"images of {images.shape[-2]} x {images.shape[-1]} px: sides must be multiples of {patch}"
            )
        embed = self.trunk.patch_embed
        return embed.norm(embed.proj(images).flatten(2).transpose(1, 2))

    def place(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """(B, L, D) + position table for `grid` -> (B, L, D)."""
        table = self.trunk.pos_embed
        if table is None:
            return patches
        rows = table.shape[1] - self.spec.grid[0] * self.spec.grid[1]
        table = resize_positions(table, self.spec.grid, grid, self.spec.position_resize, prefix=rows)
        return patches + table[:, rows:]

    def encode(
        self,
        patches: Tensor,
        keep: Tensor | None = None,
        layers: Sequence[int] = (-1,),
        norm: bool = True,
        grid: tuple[int, int] | None = None,
    ) -> list[Tensor]:
        """Placed patches (B, L, D) -> for each of `layers` the tokens (B, P+l, D) after that block.

        keep: (B, l) indices of the patches to encode; None: all. layers: block numbers, negative from the end.
        norm: apply the final norm to the tokens it is made for (`spec.final_norm`), after whichever block.
        grid: rows and columns of the L patches; needed where blocks see positions and L is not square.
        The class token of class-attention models exists after the last block alone.
        """
        numbers = [self._block_number(layer) for layer in layers]
        tokens, besides = self._enter(patches, keep, grid)
        outputs = {}
        for number, block in enumerate(self.trunk.blocks[: max(numbers) + 1]):
            tokens = block(tokens, **besides[number])
            if number in numbers:
                outputs[number] = self._with_class(tokens) if number == self.spec.depth - 1 else tokens
        return [self.normalise(outputs[number], number) if norm else outputs[number] for number in numbers]

    def normalise(self, tokens: Tensor, layer: int = -1) -> Tensor:
        """The final norm on what `encode` gives for `layer` without it, for the tokens that the norm is made for."""
        if self.spec.final_norm == "all":
            return self.trunk.norm(tokens)
        if self.spec.class_attention and self._block_number(layer) == self.spec.depth - 1:
            return torch.cat([self.trunk.norm(tokens[:, :1]), tokens[:, 1:]], dim=1)
        return tokens

    def forward(self, images: Tensor, layers: Sequence[int] = (-1,), norm: bool = True) -> list[Tensor]:
        """Whole images: project, place, encode. (B, 3, H, W) -> list of (B, P+L, D)."""
        grid = self.spec.grid_of(images.shape[-2:])
        return self.encode(self.place(self.project(images), grid), layers=layers, norm=norm, grid=grid)

    def attention(self, images: Tensor, layer: int = -1) -> Tensor:
        """Softmax attention (B, H, P+L, P+L) of one block over whole images; row = query. ValueError for raw pixels."""
        return self.attention_of(*self._before(images, layer))

    def keys(self, images: Tensor, layer: int = -1) -> Tensor:
        """Keys (B, P+L, D) of one block over whole images, heads side by side, as its projection gives them: neither
        normalised nor turned by positions. ValueError for raw pixels."""
        tokens, number, _ = self._before(images, layer)
        block = self.trunk.blocks[number]
        keys = _queries_and_keys(block.attn, tokens if self.spec.norm_after else block.norm1(tokens))[1]
        return keys.transpose(1, 2).flatten(2)

    def _before(self, images: Tensor, layer: int) -> tuple[Tensor, int, tuple[int, int]]:
        """Tokens (B, P+L, D) before a block of whole images, the block's number, and the grid of patches."""
        number = self._block_number(layer)
        if not hasattr(self.trunk.blocks[number], "attn"):
            raise ValueError("raw pixels have no attention; name a network")
        grid = self.spec.grid_of(images.shape[-2:])
        tokens, besides = self._enter(self.place(self.project(images), grid), None, grid)
        for block, arguments in zip(self.trunk.blocks[:number], besides[:number], strict=True):
            tokens = block(tokens, **arguments)
        return tokens, number, grid

    def attention_of(
        self, tokens: Tensor, layer: int = -1, grid: tuple[int, int] | None = None, rows: slice = slice(None)
    ) -> Tensor:
        """`attention` of one block, from the tokens (B, P+L, D) before it; rows: the queries to compute."""
        number = self._block_number(layer)
        block = self.trunk.blocks[number]
        besides = self._besides(tokens.shape[1] - self.spec.prefix, None, grid)
        return attention_map(
            block.attn, tokens if self.spec.norm_after else block.norm1(tokens), rows, **besides[number]
        )

    def class_map(self, images: Tensor, layer: int = -1) -> Tensor:
        """The class token's attention (B, H, N) to all tokens, in the order of `encode`. N = P+L in a block of the
        trunk; if the spec has class-attention blocks, `layer` counts these and N = 1+P+L. ValueError without a class
        token."""
        if not self.spec.has_class_token:
            raise ValueError("the model has no class token, whose attention this would be")
        if not self.spec.class_attention:
            return self.attention(images, layer)[:, :, 0]
        if not -self.spec.class_attention <= layer < self.spec.class_attention:
            raise ValueError(f"layer {layer}: the model has {self.spec.class_attention} class-attention blocks")
        tokens = self(images, norm=False)[0][:, 1:]
        query = self.class_query.expand(len(tokens), -1, -1)
        for block in self.class_attention[: layer % self.spec.class_attention]:
            query = block(tokens, query)
        block = self.class_attention[layer % self.spec.class_attention]
        return class_attention_map(block.attn, block.norm1(torch.cat([query, tokens], dim=1)))

    def _block_number(self, layer: int) -> int:
        if not -self.spec.depth <= layer < self.spec.depth:
            raise ValueError(f"layer {layer}: the model has {self.spec.depth} blocks")
        return layer % self.spec.depth

    def _enter(self, patches: Tensor, keep: Tensor | None, grid: tuple[int, int] | None) -> tuple[Tensor, list[dict]]:
        """Prefix tokens in front of the (kept) patches, and what each block takes besides the tokens."""
        besides = self._besides(patches.shape[1], keep, grid)
        if keep is not None:
            patches = patches.gather(1, keep.unsqueeze(-1).expand(-1, -1, patches.shape[-1]))
        trunk, front = self.trunk, []
        placed = trunk.pos_embed is not None and self.spec.class_position
        if self.spec.class_token:
            front.append(trunk.cls_token + trunk.pos_embed[:, :1] if placed else trunk.cls_token)
        if self.spec.registers:
            rows = slice(int(self.spec.class_token), self.spec.prefix)
            table = trunk.pos_embed[:, rows] if placed else 0.0
            front.append(trunk.reg_token + table)
        tokens = torch.cat([*(token.expand(len(patches), -1, -1) for token in front), patches], dim=1)
        return trunk.norm_pre(tokens) if hasattr(trunk, "norm_pre") else tokens, besides

    def _besides(self, length: int, keep: Tensor | None, grid: tuple[int, int] | None) -> list[dict]:
        """What each block takes besides tokens: how patches turn, a relative position bias, or nothing."""
        if self.spec.rotary == "none":
            return [self.relative_bias(length, keep, grid)] * self.spec.depth
        tables = turns(self.trunk.rope, self.spec.depth, self._grid_of(length, grid), keep)
        return [{"rope": table} for table in tables]

    def _grid_of(self, length: int, grid: tuple[int, int] | None) -> tuple[int, int]:
        """Rows and columns of `length` patches: `grid` if given, else the native grid if it fits, else a square."""
        side = isqrt(length)
        grid = grid or (self.spec.grid if length == self.spec.grid[0] * self.spec.grid[1] else (side, side))
        if grid[0] * grid[1] != length:
            raise ValueError(f"{length} patches are not a {grid[0]} x {grid[1]} grid")
        return grid

    def relative_bias(self, length: int, keep: Tensor | None, grid: tuple[int, int] | None) -> dict:
        """What blocks take besides tokens: the shared relative position bias (1, H, 1+L, 1+L) for `grid`, or nothing.

        Called once before the blocks of each pass; subclasses that know the bias otherwise override it.
        """
        if self.spec.relative_position == "none":
            return {}
        if keep is not None:
            raise ValueError("a model with relative position bias encodes all patches; replace patches instead")
        grid = self._grid_of(length, grid)
        if self.spec.relative_position == "per_block":
            if grid != self.spec.grid:
                raise ValueError(
                    f"the per-block bias tables are for {self.spec.image_size} px: import with --image-size "
                    f"{grid[0] * self.spec.patch_size}, or call ViTExport.at_size"
                )
            return {}
        table = resize_relative(self.trunk.rel_pos_bias.relative_position_bias_table, self.spec.grid, grid)
        index = self.trunk.rel_pos_bias.relative_position_index
        if grid != self.spec.grid:
            index = gen_relative_position_index(grid, device=table.device)
        return {"shared_rel_pos_bias": table[index].permute(2, 0, 1).unsqueeze(0)}

    def _with_class(self, tokens: Tensor) -> Tensor:
        """Class-attention models: the class token (B, 1, D), read from the last block's patches, in front of them."""
        if not self.spec.class_attention:
            return tokens
        query = self.class_query.expand(len(tokens), -1, -1)
        for block in self.class_attention:
            query = block(tokens, query)
        return torch.cat([query, tokens], dim=1)


DRAWS = {Tensor.uniform_, Tensor.normal_, init.uniform_, init.normal_, init.kaiming_uniform_}
SCALES = {Tensor.erfinv_, Tensor.mul_, Tensor.add_, Tensor.clamp_}  # what makes a truncated normal of them


class skip_init(TorchFunctionMode):
    """`with skip_init():` builds networks without drawing initial weights that weights of a file will replace.

    Parameters stay as torch.empty makes them, and the random generators as they are. Constants are still set, and
    buffers computed. On the device "meta", where there are no values, torch would work out the shape of each draw in
    Python: it takes up to four fifths of the time of building.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        arguments = kwargs or {}
        if func in DRAWS:
            return args[0] if args else arguments["tensor"]
        if func in SCALES and args[0].is_meta:
            return args[0]
        return func(*args, **arguments)
