"""ViTSpec: every architectural fact of an exported Vision Transformer, validated; and how its images are prepared.

timm builds the network (`VisionTransformer`, or `Beit` where there is a relative position bias). The fields below
override the named timm architecture, so one base name serves every size. "pixels" is the one name that is not timm's:
no network at all, see checkpoints/baselines.py.
"""

import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

from engine import checks

PositionTable = Literal["learned", "sincos_column_first", "sincos_row_first", "none"]
RelativePosition = Literal["none", "shared", "per_block"]
PositionRule = Literal["bilinear", "bicubic", "bicubic_antialias", "bicubic_offset", "relative_spline", "fixed"]
Pool = Literal["cls", "avg"]
FinalNorm = Literal["all", "class", "pooled", "none"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
# (width, depth) -> size letter of the published models; M is LUT's, g DINOv2's
SIZES = {
    (192, 12): "Ti",
    (384, 12): "S",
    (512, 12): "M",
    (768, 12): "B",
    (1024, 24): "L",
    (1280, 32): "H",
    (1536, 40): "g",
}
HALF = (0.5, 0.5, 0.5)  # the "inception" statistics of BEiT's first release
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)  # openai/CLIP, clip/clip.py, _transform
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
MAX_GRID = 256  # patches a side: 4096 px in patches of 16; attention over more needs terabytes
MAX_BLOCKS = 256  # the deepest published ViTs have 64


@dataclass(frozen=True, kw_only=True)
class ViTSpec:
    """Architectural facts of a ViT."""

    architecture: str  # timm name; decides what no field says (activation, SwiGLU, pre-norm, ...)
    image_size: int  # side of the square image that the position table was made for
    patch_size: int  # side of a patch in pixels
    width: int  # D, channels of a token
    depth: int  # blocks of the trunk
    heads: int  # of the attention
    mlp_hidden: int  # hidden channels of an MLP
    class_token: bool = True  # the sequence begins with a class token
    registers: int = 0  # register tokens after the class token
    qkv_bias: bool = True  # queries, keys and values have biases
    layer_scale: bool = False  # blocks scale their outputs by trained factors
    norm_eps: float = 1e-6  # of every LayerNorm
    position: PositionTable = "learned"  # table that is added to the patches
    class_position: bool = True  # the table's first rows belong to the class token and the registers
    relative_position: RelativePosition = "none"  # bias tables of the attention, one for each block or one for all
    position_resize: PositionRule = "bicubic"  # how the tables go to another grid, see positions.py
    class_attention: int = 0  # CaiT class-attention blocks after the trunk (ExtreMA)
    final_norm: FinalNorm = "all"  # which tokens the last LayerNorm is for; "pooled": after averaging the patches
    pool: Pool = "cls"  # the representation that the source evaluates

    def __post_init__(self) -> None:
        checks.annotations(self)
        if not re.fullmatch(r"\w+", str(self.architecture)):
            raise ValueError(f"architecture={self.architecture!r}: must be timm's name of a model, without a tag")
        checks.truths(self, "class_token", "qkv_bias", "layer_scale", "class_position")
        checks.proper_shares(self, "norm_eps")
        checks.whole_numbers(self, "image_size", "patch_size", "width", "depth", "heads", "mlp_hidden")
        checks.whole_numbers(self, "registers", "class_attention", least=0)
        if self.width % self.heads:
            raise ValueError(f"heads={self.heads} does not divide width={self.width}")
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size={self.image_size} is not a multiple of patch_size={self.patch_size}")
        if self.grid[0] > MAX_GRID:
            raise ValueError(
                f"image_size={self.image_size} with patch_size={self.patch_size} is a grid of {self.grid[0]} x "
                f"{self.grid[0]} patches: at most {MAX_GRID} x {MAX_GRID} can be computed"
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
        if self.class_position and not self.prefix:
            raise ValueError("class_position=True needs class_token=True or registers")
        if self.family == "pixels":
            self._check_pixels()

    def _check_pixels(self) -> None:
        plain = dict(width=3 * self.patch_size**2, depth=1, registers=0, position="none", class_attention=0)
        wrong = [f"{name}={value}" for name, value in plain.items() if getattr(self, name) != value]
        if wrong or self.class_token or self.final_norm not in ("none", "pooled"):
            fix = ", ".join([*wrong, "class_token=False", "final_norm='none'"])
            raise ValueError(f"architecture='pixels' has no network; set {fix}")

    @property
    def family(self) -> Literal["vit", "beit", "pixels"]:
        """Which timm class carries the weights; "pixels": none, as there are none."""
        if self.architecture == "pixels":
            return "pixels"
        return "beit" if self.architecture.startswith("beit") else "vit"

    @property
    def has_class_token(self) -> bool:
        """Whether there is a class token after the last block: the trunk's own, or that of class-attention blocks."""
        return self.class_token or self.class_attention > 0

    @property
    def label(self) -> str:
        """Name for people: ViT-S/16; ViT-64x4/4 where width and depth have no letter of their own."""
        if self.family == "pixels":
            return "raw pixels"
        size = SIZES.get((self.width, self.depth), f"{self.width}x{self.depth}")
        extras = " with relative positions" if self.relative_position != "none" else ""
        extras += f" and {self.class_attention} class-attention blocks" if self.class_attention else ""
        extras += f" and {self.registers} registers" if self.registers else ""
        return f"ViT-{size}/{self.patch_size}{extras}"

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches at the native image size."""
        side = self.image_size // self.patch_size
        return side, side

    @property
    def prefix(self) -> int:
        """Tokens in front of the patches inside the trunk: class token, then registers."""
        return int(self.class_token) + self.registers

    @property
    def mlp_ratio(self) -> float:
        """mlp_hidden over width, as timm wants it: it truncates width * mlp_ratio."""
        ratio = self.mlp_hidden / self.width
        return ratio if int(self.width * ratio) == self.mlp_hidden else (self.mlp_hidden + 0.5) / self.width

    def timm_args(self) -> dict[str, Any]:
        """Arguments for `timm.create_model(architecture, ...)`; JSON values only, they go into config.json."""
        shared = dict(
            img_size=self.image_size,
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
            return shared | dict(
                init_values=1.0 if self.layer_scale else 0.0,  # None would mean the architecture's own
                use_abs_pos_emb=self.position != "none",
                use_rel_pos_bias=self.relative_position == "per_block",
                use_shared_rel_pos_bias=self.relative_position == "shared",
                use_fc_norm=self.final_norm == "pooled",
            )
        return shared | dict(
            class_token=self.class_token,
            no_embed_class=not self.class_position,
            reg_tokens=self.registers,
            pos_embed="none" if self.position == "none" else "learn",
            fc_norm=self.final_norm == "pooled",
            final_norm=self.final_norm != "none",
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON object; `ViTSpec(**object)` is the way back."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """How the source prepares an image: resize the short side to size / crop, take the centre, normalise."""

    mean: tuple[float, float, float] = IMAGENET_MEAN  # of the three channels, pixels being 0 to 1
    std: tuple[float, float, float] = IMAGENET_STD  # of the three channels
    interpolation: str = "bicubic"  # of the resizing
    crop: float = 0.875  # 224 / 256

    def __post_init__(self) -> None:
        checks.annotations(self)
        checks.positive(self, "std")
        checks.factors(self, "crop")
