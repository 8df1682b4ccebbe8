"""DINOv3 (Simeoni et al. 2025): backbone files and teacher checkpoints of its ViTs, SwiGLU and 7B included.

A file tells its head count by the number of its rotary periods. These it keeps in bfloat16 and computes with in float32
(hub/backbones.py, pos_embed_rope_dtype). Its keys have a bias that a mask sets to zero (layers/attention.py,
LinearKMaskedBias). Satellite models, told by the name of their official files, have image statistics of their own.
"""

import torch
from torch import Tensor

from checkpoints.importing import BranchTensors, Conversion, shown_sizes
from checkpoints.reading import ForeignFile
from checkpoints.recognition import BARE, WITHIN
from checkpoints.spec import Preparation, Rounding, ViTSpec

SOURCE = "facebookresearch/dinov3, models/vision_transformer.py, layers/, hub/backbones.py"
BRANCHES = {"teacher": ("teacher.backbone.", "model_ema.backbone.", *BARE), "student": ("student.backbone.",)}
DROPPED = {
    rf"((student|teacher|model_ema)\.backbone\.|{WITHIN})mask_token": "mask token",
    rf"((student|teacher|model_ema)\.backbone\.|{WITHIN})local_cls_norm\.(weight|bias)": "norm of local crops",
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
BASE = 100.0  # of all published models
IMAGE = 224  # hub/backbones.py; the crop of data/transforms.py
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
    masked = all(not bias.chunk(3)[1].any() for bias in biases.values())
    for name, bias in biases.items():
        if masked:
            del tensors[name]
            query, _, value = bias.chunk(3)
            tensors |= {name.replace("qkv.bias", "q_bias"): query, name.replace("qkv.bias", "v_bias"): value}
        else:
            tensors[name] = bias
    spec = _spec(branch, tensors, periods, bool(biases), key_bias=not masked)
    satellite = "sat493m" in branch.file.path.name and branch.options.statistics is None
    return Conversion(spec=spec, tensors=tensors, preparation=SATELLITE if satellite else None)


def _spec(branch: BranchTensors, tensors: dict[str, Tensor], periods: Tensor, biased: bool, key_bias: bool) -> ViTSpec:
    sizes = shown_sizes(branch, tensors)
    gated = "blocks.0.mlp.fc1_g.weight" in tensors
    hidden = tensors.get("blocks.0.mlp.fc2.weight")
    heads, rest = divmod(sizes["width"], 4 * periods.numel())
    if rest or not heads or hidden is None or hidden.ndim != 2:
        raise ValueError(f"{periods.numel()} rotary periods do not fit a width of {sizes['width']}")
    if branch.options.heads not in (None, heads):
        raise ValueError(f"its rotary periods are for {heads} heads, not {branch.options.heads}")
    patch = sizes["patch_size"]
    return ViTSpec(
        architecture="vit_base_patch16_dinov3",
        image_size=IMAGE // patch * patch,
        heads=heads,
        mlp_hidden=hidden.shape[1],
        mlp="gated" if gated else "plain",
        registers=tensors["reg_token"].shape[1] if "reg_token" in tensors else 0,
        qkv_bias=biased,
        key_bias=key_bias,
        layer_scale="blocks.0.gamma_1" in tensors,
        norm_eps=1e-5,  # models/vision_transformer.py, "layernormbf16"
        position="none",
        class_position=False,
        rotary="centred",
        rotary_base=BASE,
        rotary_pairs="halves",
        rotary_rounding=_rounding(periods),
        **sizes,
    )


def _rounding(periods: Tensor) -> Rounding:
    """How the stored periods are rounded. ValueError where they are of another base, or of least and greatest ones."""
    exact = BASE ** (torch.arange(periods.numel(), dtype=torch.float64) / periods.numel())
    kinds: tuple[tuple[Rounding, torch.dtype], ...] = (("none", torch.float32), ("bfloat16", torch.bfloat16))
    for rounding, dtype in kinds:
        expected = exact.float().to(dtype).double()
        if torch.allclose(periods.double(), expected, rtol=1e-6 if rounding == "none" else 0, atol=0):
            return rounding
    raise ValueError(f"its rotary periods are not those of DINOv3's models, of base {BASE:g}, and no others are read")
