"""ViTSpec: the architecture of an exported Vision Transformer, validated; and Preparation: how its images are prepared.

timm builds the network: a `Beit` if there is a relative position bias, an `Eva` if there are rotary positions or no key
bias, else a `VisionTransformer`. Fields override the sizes of the named timm architecture, so that one name serves all
sizes. "pixels" is the only name that is not timm's; it means raw pixels without a network, see checkpoints/resolve.py.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from engine.errors import option
from engine.settings import (
    Fraction,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ProperFraction,
    UnitInterval,
    Validated,
)

if TYPE_CHECKING:
    from torch import Tensor

PositionTable = Literal["learned", "sincos_column_first", "sincos_row_first", "none"]
RelativePosition = Literal["none", "shared", "per_block"]
PositionRule = Literal["bilinear", "bicubic", "bicubic_antialias", "bicubic_offset", "relative_spline", "fixed"]
FinalNorm = Literal["all", "class", "pooled", "none"]
Rotary = Literal["none", "axial", "centred", "mixed", "unit"]
Rounding = Literal["none", "bfloat16"]
Mlp = Literal["plain", "gated", "gated_packed"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
# (width, depth) -> name of the size in publications; M is LUT's, g DINOv2's
SIZES = {
    (192, 12): "Ti",
    (384, 12): "S",
    (512, 12): "M",
    (768, 12): "B",
    (1024, 24): "L",
    (1280, 32): "H",
    (1536, 40): "g",
}
HALF = (0.5, 0.5, 0.5)  # mean and std, timm's "inception" statistics: BEiT's first release
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)  # openai/CLIP, clip/clip.py, _transform
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
ROPE_TYPES = {"axial": "cat", "centred": "dinov3", "mixed": "mixed"}  # Rotary -> timm's rope_type
MAX_GRID = 256  # patches per side: 4096 px in patches of 16; attention over more needs terabytes
MAX_BLOCKS = 256  # the deepest published ViTs have 64


class ImageGrid:
    """Base of specs: sizes of images and patch grids, and the class token of an output."""

    image_size: int | tuple[int, int]
    patch_size: int
    class_tokens: int = 1

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the native image in pixels."""
        return self.image_size if isinstance(self.image_size, tuple) else (self.image_size, self.image_size)

    @property
    def size_text(self) -> str:
        """The native size for users, such as 224 px or 1024 x 768 px."""
        return f"{' x '.join(map(str, dict.fromkeys(self.size)))} px"

    @property
    def side(self) -> int:
        """Side of the native image in pixels. Raises ValueError if it is not square."""
        if isinstance(self.image_size, tuple):
            height, width = self.image_size
            raise ValueError(
                f"the checkpoint is for images of {height} x {width} px and this needs square ones: import it with "
                f"{option('image_size', max(height, width))}"
            )
        return self.image_size

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches at the native image size."""
        return self.grid_of(self.size)

    @property
    def has_patches(self) -> bool:
        """Whether the network returns patch tokens; a network of the user's own may return a single vector."""
        return self.patch_size > 0

    def grid_of(self, size: Sequence[int]) -> tuple[int, int]:
        """Rows and columns of patches of an image of this height and width."""
        return (size[0] // self.patch_size, size[1] // self.patch_size) if self.has_patches else (0, 0)

    def class_feature(self, tokens: "Tensor") -> "Tensor":
        """The class token (B, ...) of tokens (B, P+L, ...); the mean of several class tokens."""
        return tokens[:, 0] if self.class_tokens == 1 else tokens[:, : self.class_tokens].mean(dim=1)


@dataclass(frozen=True, kw_only=True)
class ViTSpec(Validated, ImageGrid):
    """Architectural facts of a ViT."""

    architecture: str  # timm's name; decides what has no field (activation, kind of norm, SwiGLU of a plain ViT, ...)
    image_size: PositiveInt | tuple[PositiveInt, PositiveInt]  # side in pixels of the images, or (height, width)
    patch_size: PositiveInt  # side of a patch in pixels
    width: PositiveInt  # D, channels of a token
    depth: PositiveInt  # blocks of the trunk
    heads: PositiveInt  # attention heads
    mlp_hidden: PositiveInt  # hidden channels of an MLP; with the gate's, if a plain ViT's first layer includes it
    class_token: bool = True  # the sequence begins with a class token
    registers: NonNegativeInt = 0  # register tokens after the class token
    class_tokens: PositiveInt = 1  # with the first registers; their mean is the class feature (Pixio: 8)
    qkv_bias: bool = True  # queries, keys and values have biases
    layer_scale: bool = False  # blocks have LayerScale: trained factors for their outputs
    norm_eps: ProperFraction = 1e-6  # eps of all norms
    position: PositionTable = "learned"  # table that is added to the patches
    class_position: bool = True  # the table's first rows belong to the class token and the registers
    relative_position: RelativePosition = "none"  # relative position bias of the attention
    position_resize: PositionRule = "bicubic"  # rule for resizing the tables, see checkpoints/positions.py
    class_attention: NonNegativeInt = 0  # CaiT class-attention blocks after the trunk (ExtreMA)
    final_norm: FinalNorm = "all"  # tokens that the final norm is applied to; "pooled": the mean of the patches
    pool: Literal["cls", "avg"] = "cls"  # feature that the source evaluates: class token or mean of the patches
    # Image size for which an export's position tables were made, from which they are resized; None: image_size.
    table_size: PositiveInt | tuple[PositiveInt, PositiveInt] | None = None
    # The fields from here on are only for timm's Eva; for other families the architecture decides.
    key_bias: bool = True  # keys have a bias, like queries and values
    rotary: Rotary = "none"  # rotary position embeddings of queries and keys, see checkpoints/vit.py
    rotary_base: PositiveFloat = 10_000.0  # theta: about the longest period over the shortest
    rotary_grid: NonNegativeInt = 0  # side of the grid that axial positions are scaled to; 0: patch indices, not scaled
    rotary_offset: float = 0.0  # added to all positions
    rotary_first: Literal["row", "column"] = "row"  # axis that rotates the first half of the channels
    rotary_pairs: Literal["neighbours", "halves"] = "neighbours"  # which two channels are rotated together
    rotary_rounding: Rounding = "none"  # rounding of the periods, as in DINOv3's files
    split_qkv: bool = False  # queries, keys and values have separate projections
    query_norm: bool = False  # queries and keys are normalised, head by head
    attention_norm: bool = False  # a norm before the attention's output projection
    mlp: Mlp = "plain"  # "gated": SwiGLU with a layer for the gate; "gated_packed": with the gate in the first layer
    mlp_norm: bool = False  # a norm before the MLP's last layer
    first_norm: bool = False  # a norm before the first block
    norm_after: bool = False  # post-norm blocks: the outputs of attention and MLP are normalised, not their inputs
    rms_norm: bool = False  # norms are RMSNorms, which have no bias, whatever the architecture has
    proj_bias: bool = True  # the attention's output projection and the MLP have biases
    # Positions of registers with rotary="unit": along the border of a box, or all in its first corner ...
    register_place: Literal["border", "corner"] = "border"
    register_box: Literal["visible", "image"] = "visible"  # ... the bounding box of the encoded patches, or the image

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("image_size", "table_size"):
            size = getattr(self, name)
            if isinstance(size, tuple) and size[0] == size[1]:
                object.__setattr__(self, name, size[0])
        if self.table_size == self.image_size or self.position == self.relative_position == "none":
            object.__setattr__(self, "table_size", None)
        if not re.fullmatch(r"\w+", self.architecture):
            raise ValueError(f"architecture={self.architecture!r}: must be timm's name of a model, without a tag")
        if self.width % self.heads:
            raise ValueError(f"heads={self.heads} does not divide width={self.width}")
        if any(side % self.patch_size for side in self.size):
            raise ValueError(f"image_size={self.image_size} is not a multiple of patch_size={self.patch_size}")
        if max(self.grid) > MAX_GRID:
            raise ValueError(
                f"image_size={self.image_size} with patch_size={self.patch_size} is a grid of {self.grid[0]} x "
                f"{self.grid[1]} patches: at most {MAX_GRID} x {MAX_GRID} can be computed"
            )
        if max(self.depth, self.class_attention) > MAX_BLOCKS:
            raise ValueError(f"depth={self.depth}, class_attention={self.class_attention}: at most {MAX_BLOCKS} blocks")
        if self.class_attention and self.class_token:
            raise ValueError("class_attention holds the class token itself: set class_token=False")
        if self.pool == "cls" and not self.has_class_token:
            raise ValueError("pool='cls' needs a class token; use pool='avg'")
        if (self.relative_position != "none") != (self.family == "beit"):
            raise ValueError(f"relative_position={self.relative_position!r} does not fit {self.architecture!r}")
        if self.family == "beit" and (not self.class_token or self.registers):
            raise ValueError(f"{self.architecture!r} needs class_token=True, registers=0, as in timm")
        if self.class_tokens > 1 and not (self.class_token and self.class_tokens <= self.prefix):
            raise ValueError(
                f"class_tokens={self.class_tokens} counts the class token and registers, which are {self.prefix}"
            )
        if self.class_position and not self.prefix:
            raise ValueError("class_position=True needs class_token=True or registers")
        if self.family == "pixels":
            self._check_pixels()
        if self.family != "eva":
            self._check_eva_fields()
        elif (self.width // self.heads) % 4 and self.rotary != "none":
            raise ValueError(f"heads={self.heads}: rotary positions need a multiple of 4 channels a head")
        if self.rotary == "unit" and self.class_token:
            raise ValueError("rotary='unit' has no place for a class token; set class_token=False")
        if self.rotary == "unit" and self.register_place == "border" and self.registers % 4:
            raise ValueError(f"registers={self.registers}: a border of four sides needs a multiple of 4")

    def _check_eva_fields(self) -> None:
        """Raise ValueError if a field that has an effect only in timm's Eva is changed in another family."""
        for field in fields(self):
            if field.name in EVA_FIELDS and getattr(self, field.name) != field.default:
                raise ValueError(
                    f"{field.name}={getattr(self, field.name)!r}: only for rotary positions or keys without a bias"
                )

    def _check_pixels(self) -> None:
        """Raise ValueError if a field does not fit raw pixels."""
        required = dict(width=3 * self.patch_size**2, depth=1, registers=0, position="none", class_attention=0)
        changes = [f"{name}={value}" for name, value in required.items() if getattr(self, name) != value]
        if changes or self.class_token or self.final_norm not in ("none", "pooled"):
            remedy = ", ".join([*changes, "class_token=False", "final_norm='none'"])
            raise ValueError(f"architecture='pixels' has no network; set {remedy}")

    @property
    def stored(self) -> "ViTSpec":
        """The same network at the image size of the stored position tables."""
        return replace(self, image_size=self.table_size or self.image_size, table_size=None)

    def with_patch_size(self, patch_size: int) -> "ViTSpec":
        """The same network on patches of another size, and on images that have as many of them."""
        (rows, columns), (stored_rows, stored_columns) = self.grid, self.stored.grid
        return replace(
            self,
            patch_size=patch_size,
            image_size=(rows * patch_size, columns * patch_size),
            table_size=(stored_rows * patch_size, stored_columns * patch_size),
        )

    @property
    def family(self) -> Literal["vit", "beit", "eva", "pixels"]:
        """Which of timm's classes holds the weights; "pixels": raw pixels, without weights."""
        if self.architecture == "pixels":
            return "pixels"
        if self.rotary != "none" or not self.key_bias:
            return "eva"
        return "beit" if self.architecture.startswith(("beit_", "beitv2_")) else "vit"

    @property
    def has_class_token(self) -> bool:
        """Whether there is a class token after the last block, in the trunk or in class-attention blocks."""
        return self.class_token or self.class_attention > 0

    @property
    def label(self) -> str:
        """Name for users, such as ViT-S/16, or ViT-64x4/4 if there is no name for width and depth."""
        if self.family == "pixels":
            return "raw pixels"
        size = SIZES.get((self.width, self.depth), f"{self.width}x{self.depth}")
        extras = " with relative positions" if self.relative_position != "none" else ""
        extras += " with rotary positions" if self.rotary != "none" else ""
        extras += f" and {self.class_attention} class-attention blocks" if self.class_attention else ""
        extras += f" and {self.class_tokens} class tokens" if self.class_tokens > 1 else ""
        registers = self.registers + 1 - self.class_tokens
        extras += f" and {registers} registers" if registers else ""
        return f"ViT-{size}/{self.patch_size}{extras}"

    @property
    def prefix(self) -> int:
        """Number of tokens before the patches in the trunk: class token and registers."""
        return int(self.class_token) + self.registers

    @property
    def mlp_ratio(self) -> float:
        """timm's argument mlp_ratio, chosen so that timm, which truncates width * mlp_ratio, gets mlp_hidden."""
        ratio = self.mlp_hidden / self.width
        return ratio if int(self.width * ratio) == self.mlp_hidden else (self.mlp_hidden + 0.5) / self.width

    def timm_args(self) -> dict[str, Any]:
        """Arguments for `timm.create_model(architecture, ...)`, all JSON values, because config.json stores them."""
        common: dict[str, Any] = dict(
            img_size=self.table_size or self.image_size,  # for which timm finds the tables in a file
            patch_size=self.patch_size,
            embed_dim=self.width,
            depth=self.depth,
            num_heads=self.heads,
            mlp_ratio=self.mlp_ratio,
            qkv_bias=self.qkv_bias,
            init_values=1.0 if self.layer_scale else None,
            num_classes=0,
            global_pool="avg" if self.pool == "avg" or not self.class_token else "token",
        )
        if self.family == "beit":
            return common | dict(
                init_values=1.0 if self.layer_scale else 0.0,  # None would mean the architecture's default
                use_abs_pos_emb=self.position != "none",
                use_rel_pos_bias=self.relative_position == "per_block",
                use_shared_rel_pos_bias=self.relative_position == "shared",
                use_fc_norm=self.final_norm == "pooled",
            )
        if self.family == "eva":
            return common | self._eva_args()
        return common | dict(
            class_token=self.class_token,
            no_embed_class=not self.class_position,
            reg_tokens=self.registers,
            pos_embed="none" if self.position == "none" else "learn",
            fc_norm=self.final_norm == "pooled",
            final_norm=self.final_norm != "none",
        )

    def _eva_args(self) -> dict[str, Any]:
        """Arguments for timm's Eva besides those for all families."""
        return dict(
            class_token=self.class_token,
            no_embed_class=not self.class_position,
            num_reg_tokens=self.registers,
            use_abs_pos_emb=self.position != "none",
            use_rot_pos_emb=self.rotary in ROPE_TYPES,
            rope_type=ROPE_TYPES.get(self.rotary, "cat"),
            rope_temperature=self.rotary_base,
            ref_feat_shape=self.rotary_grid or None,
            rope_grid_offset=self.rotary_offset,
            rope_grid_indexing="ij" if self.rotary_first == "row" else "xy",
            rope_rotate_half=self.rotary_pairs == "halves",
            rope_rescale_coords=None,  # else timm draws a random scale in each training pass
            attn_type="rope" if self.key_bias else "eva",
            qkv_fused=not self.split_qkv,
            qk_norm=self.query_norm,
            scale_attn_inner=self.attention_norm,
            swiglu_mlp=self.mlp != "plain",
            swiglu_align_to=int(self.mlp == "gated"),  # 1: a separate layer for the gate, no channels added
            scale_mlp=self.mlp_norm,
            use_pre_transformer_norm=self.first_norm,
            use_post_norm=self.norm_after,
            use_post_transformer_norm=self.final_norm == "all",
            use_fc_norm=self.final_norm == "pooled",
            dynamic_img_size=True,  # else timm's rotary positions are for one grid
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `ViTSpec(**object)` restores.

        Fields that were added later are omitted at their defaults, so that digests from before they existed stay valid.
        """
        later = EVA_FIELDS | {"table_size", "class_tokens"}
        defaults = {field.name: field.default for field in fields(self) if field.name in later}
        values = asdict(self)
        return {name: value for name, value in values.items() if name not in defaults or value != defaults[name]}


# Names of the fields from key_bias on, which have an effect only in timm's Eva.
_FIELD_NAMES = [field.name for field in fields(ViTSpec)]
EVA_FIELDS = frozenset(_FIELD_NAMES[_FIELD_NAMES.index("key_bias") :])


# Of three channels, pixels being 0 to 1. With those of pixels up to 255, all images would look nearly black.
Means = Annotated[
    tuple[UnitInterval, UnitInterval, UnitInterval],
    Meta(description="three numbers from 0 to 1 (divide by 255 if they are of pixels up to 255)"),
]
Deviations = Annotated[
    tuple[Fraction, Fraction, Fraction],
    Meta(description="three numbers above 0 and up to 1 (divide by 255 if they are of pixels up to 255)"),
]


@dataclass(frozen=True, kw_only=True)
class Preparation(Validated):
    """How images are prepared: resize the short side to size / crop, crop the centre, normalise."""

    mean: Means = IMAGENET_MEAN
    std: Deviations = IMAGENET_STD
    interpolation: str = "bicubic"  # of the resizing
    crop: Fraction = 0.875  # 224 / 256


class PreparesImages:
    """Base of dataclasses with the field `preparation`, whose fields it offers as properties."""

    preparation: Preparation

    @property
    def mean(self) -> tuple[float, float, float]:
        return self.preparation.mean

    @property
    def std(self) -> tuple[float, float, float]:
        return self.preparation.std

    @property
    def crop(self) -> float:
        return self.preparation.crop

    @property
    def interpolation(self) -> str:
        return self.preparation.interpolation
