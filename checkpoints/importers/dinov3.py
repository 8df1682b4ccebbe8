"""DINOv3 (Simeoni et al. 2025): backbone files and teacher checkpoints of its ViTs, SwiGLU and 7B included.

The number of rotary periods in a file shows the number of heads. Periods are stored in bfloat16 and used in float32
(hub/backbones.py, pos_embed_rope_dtype). Keys have a bias that a mask sets to zero (layers/attention.py,
LinearKMaskedBias). Satellite models, recognised by their official file names, have their own image statistics.
"""

import torch
from torch import Tensor

from checkpoints.importing import BranchTensors, Conversion, trunk_sizes
from checkpoints.reading import ForeignFile
from checkpoints.recognition import ANY_PREFIX, TRUNK_PREFIXES
from checkpoints.spec import Preparation, Rounding, ViTSpec

SOURCE = "facebookresearch/dinov3, models/vision_transformer.py, layers/, hub/backbones.py"
BRANCHES = {"teacher": ("teacher.backbone.", "model_ema.backbone.", *TRUNK_PREFIXES), "student": ("student.backbone.",)}
DROPPED = {
    rf"((student|teacher|model_ema)\.backbone\.|{ANY_PREFIX})mask_token": "mask token",
    rf"((student|teacher|model_ema)\.backbone\.|{ANY_PREFIX})local_cls_norm\.(weight|bias)": "norm of local crops",
    r"(student|teacher|model_ema)\.(dino_head|ibot_head)\..*": "projection heads",
}
RENAMES = {
    r"^storage_tokens$": "reg_token",
    r"\.ls([12])\.gamma$": r".gamma_\1",
    r"\.mlp\.w1\.": ".mlp.fc1_g.",
    r"\.mlp\.w2\.": ".mlp.fc1_x.",
    r"\.mlp\.w3\.": ".mlp.fc2.",
}
PERIODS = "rope_embed.periods"
ROTARY_BASE = 100.0  # of all published models
IMAGE_SIZE = 224  # pixels; hub/backbones.py; the crop of data/transforms.py
SATELLITE = Preparation(mean=(0.430, 0.411, 0.296), std=(0.213, 0.156, 0.143))  # README, models on SAT-493M


def recognise(file: ForeignFile) -> bool:
    return any(name.endswith((PERIODS, "storage_tokens")) for name in file.tensors)


def convert(branch: BranchTensors) -> Conversion:
    tensors = branch.take_trunk(RENAMES)
    periods = branch.take(r"rope_embed\.periods", "periods", biased=False).get("periods")
    masks = branch.take(r"(blocks\.\d+\.attn\.qkv\.)bias_mask", r"\1bias", biased=False)
    if periods is None or not periods.numel():
        raise ValueError(f"no {PERIODS} under {branch.prefix!r}; the file is not complete")
    biases = {name: tensors[name] * masks.get(name, 1) for name in tensors if name.endswith(".attn.qkv.bias")}
    if masks.keys() - biases.keys():
        raise ValueError("it has masks of biases that it does not have; the file is not complete")
    has_key_bias = any(bias.chunk(3)[1].any() for bias in biases.values())
    for name, bias in biases.items():
        if has_key_bias:
            tensors[name] = bias
        else:
            del tensors[name]
            query_bias, _, value_bias = bias.chunk(3)
            tensors[name.replace("qkv.bias", "q_bias")] = query_bias
            tensors[name.replace("qkv.bias", "v_bias")] = value_bias
    spec = _spec(branch, tensors, periods, qkv_bias=bool(biases), key_bias=has_key_bias)
    is_satellite = "sat493m" in branch.file.path.name and branch.options.statistics is None
    return Conversion(spec=spec, tensors=tensors, preparation=SATELLITE if is_satellite else None)


def _spec(
    branch: BranchTensors, tensors: dict[str, Tensor], periods: Tensor, qkv_bias: bool, key_bias: bool
) -> ViTSpec:
    """The spec of a branch: sizes from its `tensors`, the number of heads and the rounding from its rotary periods.

    qkv_bias, key_bias: as in ViTSpec. Raises ValueError if tensors and periods do not fit each other.
    """
    sizes = trunk_sizes(branch, tensors)
    fc2 = tensors.get("blocks.0.mlp.fc2.weight")
    heads, remainder = divmod(sizes["width"], 4 * periods.numel())
    if remainder or not heads or fc2 is None or fc2.ndim != 2:
        raise ValueError(f"{periods.numel()} rotary periods do not fit a width of {sizes['width']}")
    if branch.options.heads not in (None, heads):
        raise ValueError(f"its rotary periods are for {heads} heads, not {branch.options.heads}")
    return ViTSpec(
        architecture="vit_base_patch16_dinov3",
        image_size=IMAGE_SIZE // sizes["patch_size"] * sizes["patch_size"],
        heads=heads,
        mlp_hidden=fc2.shape[1],
        mlp="gated" if "blocks.0.mlp.fc1_g.weight" in tensors else "plain",
        registers=tensors["reg_token"].shape[1] if "reg_token" in tensors else 0,
        qkv_bias=qkv_bias,
        key_bias=key_bias,
        layer_scale="blocks.0.gamma_1" in tensors,
        norm_eps=1e-5,  # models/vision_transformer.py, "layernormbf16"
        position="none",
        class_position=False,
        rotary="centred",
        rotary_base=ROTARY_BASE,
        rotary_pairs="halves",
        rotary_rounding=_rounding(periods),
        **sizes,
    )


def _rounding(periods: Tensor) -> Rounding:
    """How the stored periods are rounded. Raises ValueError for periods that are not those of ROTARY_BASE."""
    exact = ROTARY_BASE ** (torch.arange(periods.numel(), dtype=torch.float64) / periods.numel())
    if torch.allclose(periods.double(), exact.float().double(), rtol=1e-6, atol=0):
        return "none"
    if torch.equal(periods.double(), exact.float().bfloat16().double()):
        return "bfloat16"
    raise ValueError(
        f"its rotary periods are not those of DINOv3's models, of base {ROTARY_BASE:g}, and no others are read"
    )
