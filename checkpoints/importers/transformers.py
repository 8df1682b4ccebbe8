"""Hugging Face transformers: ViT, ViTMAE, DINOv2, DINOv3, I-JEPA, AIMv2, BEiT, data2vec, CLIP, SigLIP: a folder.

It is as save_pretrained writes it. Of CLIP and SigLIP the vision towers are taken; DINOv2 may have registers.

Sizes, head count, activation and LayerNorm eps come from config.json, image statistics from preprocessor_config.json.
Without it, they are those of all published models of the type, where these agree.
Positions go to another grid as the library's own interpolate_pos_encoding does. Heads and text towers are dropped.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from checkpoints.importing import BranchTensors, Conversion, relative_vit
from checkpoints.reading import ForeignFile
from checkpoints.recognition import kind_in
from checkpoints.spec import Preparation, ViTSpec

SOURCE = "huggingface/transformers 5.23, models/*/modeling_*.py"
FIRST = (
    *("embeddings.patch_embeddings.projection.weight", "embeddings.patch_embeddings.weight"),
    "embeddings.patch_embedding.weight",
    "embeddings.patch_embed.weight",
)
TOWERS = (
    "",
    "vit.",
    "dinov2.",
    "dinov2_with_registers.",
    "model.",
    "ijepa.",
    "beit.",
    "data2vec_vision.",
    "vision_model.",
)
BRANCHES = {"encoder": TOWERS}
TOWER = r"((vit|dinov2|dinov2_with_registers|ijepa|beit|data2vec_vision|vision_model)\.)?"
DROPPED = {
    rf"{TOWER}pooler\.dense\.(weight|bias)": "pooler that pretraining did not train",
    rf"{TOWER}embeddings\.mask_token": "mask token",
    rf"{TOWER}embeddings\.position_ids": "made from the image size",
    rf"{TOWER}.*\.relative_position_index": "made from the window size",
    r"(classifier|lm_head|qa_outputs|cls_classifier|distillation_classifier)\..*": "classifier or token head",
    r"layernorm\.(weight|bias)": "norm before a token head",
    r"decoder\..*": "decoder",
    rf"{TOWER}head\..*": "pooling head",
    r"text_model\..*|(visual|text)_projection\.weight|logit_(scale|bias)": "text tower and what joins it",
}
RENAMES = {
    r"^embeddings\.(cls_token|class_embedding)$": "cls_token",
    r"^embeddings\.position_embeddings$|^embeddings\.position_embedding\.weight$": "pos_embed",
    r"^embeddings\.register_tokens$": "reg_token",
    r"^embeddings\.patch_embed(ding|dings)?\.(projection\.)?(weight|bias)$": r"patch_embed.proj.\3",
    r"^embeddings\.rms_norm\.": "patch_embed.norm.",
    r"\.rms_norm([12])\.": r".norm\1.",
    r"^rms_norm\.": "norm.",
    r"\.attention\.out_proj\.": ".attn.proj.",
    r"\.ffn\.(gate|up|down)_proj\.": r".mlp.\1_proj.",
    r"^(encoder\.layers?|layer|model\.layer)\.(\d+)\.": r"blocks.\2.",
    r"\.attention\.attention\.(q|k|v)(uery|ey|alue)\.": r".attn.\1_proj.",
    r"\.(self_attn|attention)\.(q|k|v)_proj\.": r".attn.\2_proj.",
    r"\.(attention\.output\.dense|self_attn\.out_proj|attention\.o_proj)\.": ".attn.proj.",
    r"\.(layernorm_before|layer_norm1)\.": ".norm1.",
    r"\.(layernorm_after|layer_norm2)\.": ".norm2.",
    r"\.(intermediate\.dense|mlp\.weights_in)\.": ".mlp.fc1.",
    r"(blocks\.\d+)\.(output\.dense|mlp\.weights_out|mlp\.down_proj)\.": r"\1.mlp.fc2.",
    r"\.layer_scale([12])\.lambda1$": r".ls\1.gamma",
    r"\.lambda_([12])$": r".gamma_\1",
    r"\.attention\.attention\.relative_position_bias\.": ".attn.",
    r"^encoder\.relative_position_bias\.": "rel_pos_bias.",
    r"^(layernorm|post_layernorm)\.": "norm.",
    r"^pre_layrnorm\.": "norm_pre.",
    r"^pooler\.layernorm\.": "fc_norm.",
}
# Type in config.json -> statistics on which the official code of its published models and the processors of the hub
# agree. Of others they differ: "vit" is Google's (half) and DINO's (imagenet); of I-JEPA and data2vec the official
# trainings have ImageNet's, the processors of the hub half.
STATISTICS = {
    **dict.fromkeys(("vit_mae", "dinov2", "dinov2_with_registers", "dinov3_vit"), "imagenet"),
    **dict.fromkeys(("clip", "clip_vision_model", "aimv2", "aimv2_vision_model"), "clip"),
    **dict.fromkeys(("siglip", "siglip_vision_model", "beit"), "half"),
}
SATELLITE = "; those of satellite images have 0.430,0.411,0.296,0.213,0.156,0.143"
Convert = Callable[[BranchTensors, dict[str, Tensor]], tuple[ViTSpec, dict[str, Tensor]]]


def recognise(file: ForeignFile) -> bool:
    return "config.model_type" in file.facts


def convert(branch: BranchTensors) -> Conversion:
    kind = _kind(branch)
    if kind not in KINDS:
        raise ValueError(f"config.json says {kind!r}; models of {', '.join(KINDS)} are read, and for others none is")
    renames = dict(RENAMES)
    if _setting(branch, "use_gated_mlp", False) or kind.startswith("aimv2"):
        renames |= {r"\.mlp\.gate_proj\.": ".mlp.fc1_g.", r"\.mlp\.up_proj\.": ".mlp.fc1_x."}
    renames[r"\.mlp\.up_proj\."] = renames.get(r"\.mlp\.up_proj\.", ".mlp.fc1.")
    tensors = branch.take_trunk(renames)
    if "cls_token" in tensors and tensors["cls_token"].ndim < 3:
        tensors["cls_token"] = tensors["cls_token"].reshape(1, 1, -1)
    if "pos_embed" in tensors and tensors["pos_embed"].ndim < 3:
        tensors["pos_embed"] = tensors["pos_embed"].unsqueeze(0)
    if "reg_token" in tensors and not tensors["reg_token"].numel():
        del tensors["reg_token"]
    spec, tensors = KINDS[kind](branch, with_joint_projections(tensors))
    return Conversion(spec=spec, tensors=tensors, preparation=_preparation(branch, spec))


def with_joint_projections(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """One projection of queries, keys and values in place of three; biases alike, or of queries and values alone."""
    whole = {name: tensor for name, tensor in tensors.items() if not re.search(r"\.[qkv]_proj\.", name)}
    for start in sorted({name.split("q_proj.")[0] for name in tensors if ".q_proj." in name}):
        for kind in ("weight", "bias"):
            parts = {part: tensors.get(f"{start}{part}_proj.{kind}") for part in "qkv"}
            present = {part: tensor for part, tensor in parts.items() if tensor is not None}
            if len(present) == 3:
                whole[f"{start}qkv.{kind}"] = torch.cat(list(present.values()))
            elif {*present} == {"q", "v"} and kind == "bias":
                whole |= {f"{start}q_bias": present["q"], f"{start}v_bias": present["v"]}
            elif present:
                raise ValueError(f"projections of {start} have a {kind} of {', '.join(present)} alone")
    return whole


def _kind(branch: BranchTensors) -> str:
    return str(branch.file.facts.get("config.model_type"))


def _setting(branch: BranchTensors, name: str, default: Any = None) -> Any:
    value = branch.file.facts.get(f"config.{name}", branch.file.facts.get(f"config.vision_config.{name}", default))
    if value is None:
        raise ValueError(f"config.json has no {name}; take the folder as save_pretrained writes it")
    return value


def _sizes(branch: BranchTensors) -> dict[str, Any]:
    patch, size = _setting(branch, "patch_size"), _setting(branch, "image_size")
    size = size if isinstance(size, list) else [size, size]
    heads = _setting(branch, "num_attention_heads")
    if branch.options.heads not in (None, heads):
        raise ValueError(f"config.json says {heads} heads, not {branch.options.heads}")
    return dict(
        image_size=tuple(side // patch * patch for side in size),  # 378 of 384 px in patches of 14
        patch_size=patch,
        width=_setting(branch, "hidden_size"),
        depth=_setting(branch, "num_hidden_layers"),
        heads=heads,
        norm_eps=_setting(branch, "rms_norm_eps" if _kind(branch).startswith("aimv2") else "layer_norm_eps"),
    )


def _mlp_width(tensors: dict[str, Tensor]) -> int:
    first = tensors.get("blocks.0.mlp.fc1.weight")
    if first is None or first.ndim != 2:
        raise ValueError("it has no MLP in its first block; the folder is not complete")
    return first.shape[0]


def _activation(branch: BranchTensors, architectures: dict[str, str]) -> str:
    """timm's name of a network with the activation that config.json says."""
    name = _setting(branch, "hidden_act")
    if name not in architectures:
        raise ValueError(f"hidden_act={name!r}: a model of this kind is read with {' or '.join(architectures)}")
    return architectures[name]


def _plain(branch: BranchTensors, tensors: dict[str, Tensor], **facts: Any) -> tuple[ViTSpec, dict[str, Tensor]]:
    if "architecture" not in facts:
        facts["architecture"] = _activation(branch, {"gelu": "vit_base_patch16_224"})
    spec = dict(
        mlp_hidden=_mlp_width(tensors),
        qkv_bias="blocks.0.attn.qkv.bias" in tensors,
        position=kind_in(tensors),
        position_resize="bicubic",
    )
    return ViTSpec(**_sizes(branch) | spec | facts), tensors


def _dinov2(branch: BranchTensors, tensors: dict[str, Tensor]) -> tuple[ViTSpec, dict[str, Tensor]]:
    gated = _setting(branch, "use_swiglu_ffn", False)
    name = "vit_giant_patch14_dinov2" if gated else _activation(branch, {"gelu": "vit_base_patch14_dinov2"})
    facts: dict[str, Any] = dict(architecture=name, layer_scale=True)
    if "reg_token" in tensors:  # timm keeps positions for patches only
        tensors["cls_token"] = tensors["cls_token"] + tensors["pos_embed"][:, :1]
        tensors["pos_embed"] = tensors["pos_embed"][:, 1:]
        registers = tensors["reg_token"].shape[1]
        facts |= dict(registers=registers, class_position=False, position_resize="bicubic_antialias")
    return _plain(branch, tensors, **facts)


def _dinov3(branch: BranchTensors, tensors: dict[str, Tensor]) -> tuple[ViTSpec, dict[str, Tensor]]:
    gated = bool(_setting(branch, "use_gated_mlp", False))
    _activation(branch, {"silu" if gated else "gelu": ""})
    tensors = {re.sub(r"\.ls([12])\.gamma$", r".gamma_\1", name): tensor for name, tensor in tensors.items()}
    theta = branch.file.facts.get("config.rope_theta", branch.file.facts.get("config.rope_parameters.rope_theta"))
    if theta is None:
        raise ValueError("config.json has no rope_theta; take the folder as save_pretrained writes it")
    spec = ViTSpec(
        architecture="vit_base_patch16_dinov3",
        mlp_hidden=tensors["blocks.0.mlp.fc2.weight"].shape[1],
        mlp="gated" if gated else "plain",
        registers=tensors["reg_token"].shape[1] if "reg_token" in tensors else 0,
        qkv_bias=any(name.endswith(("q_bias", "qkv.bias")) for name in tensors),
        key_bias="blocks.0.attn.qkv.bias" in tensors,
        layer_scale=True,
        position="none",
        class_position=False,
        rotary="centred",
        rotary_base=float(theta),
        rotary_pairs="halves",
        **_sizes(branch),
    )
    return spec, tensors


def _beit(branch: BranchTensors, tensors: dict[str, Tensor]) -> tuple[ViTSpec, dict[str, Tensor]]:
    _activation(branch, {"gelu": ""})
    if not any(name.endswith("relative_position_bias_table") for name in tensors):
        raise ValueError("it has no relative positions, as BEiT's and data2vec's models have")
    if not {"norm.weight", "fc_norm.weight"} & {*tensors}:
        raise ValueError("it has no norm behind its blocks: its pooling layer was left out; take the official file")
    return relative_vit(branch, tensors, norm_eps=_setting(branch, "layer_norm_eps")), tensors


def _clip(branch: BranchTensors, tensors: dict[str, Tensor]) -> tuple[ViTSpec, dict[str, Tensor]]:
    names = {"quick_gelu": "vit_base_patch16_clip_quickgelu_224", "gelu": "vit_base_patch16_clip_224"}
    return _plain(branch, tensors, architecture=_activation(branch, names))


def _siglip(branch: BranchTensors, tensors: dict[str, Tensor]) -> tuple[ViTSpec, dict[str, Tensor]]:
    name = _activation(branch, {"gelu_pytorch_tanh": "vit_base_patch32_siglip_gap_256"})
    return _plain(branch, tensors, architecture=name, class_token=False, class_position=False, pool="avg")


def _aimv2(branch: BranchTensors, tensors: dict[str, Tensor]) -> tuple[ViTSpec, dict[str, Tensor]]:
    """The activation is that of the gate."""
    _activation(branch, {"silu": ""})
    if "pos_embed" not in tensors:
        raise ValueError("its positions are computed for each image's own grid: take the official file as aimv2:FILE")
    spec = ViTSpec(
        architecture="aimv2_large_patch14_224",
        mlp_hidden=tensors["blocks.0.mlp.fc1_g.weight"].shape[0],
        class_token=False,
        class_position=False,
        qkv_bias=False,
        position=kind_in(tensors),
        position_resize="bicubic_antialias",
        pool="avg",
        **_sizes(branch),
    )
    return spec, tensors


def _ijepa(branch: BranchTensors, tensors: dict[str, Tensor]) -> tuple[ViTSpec, dict[str, Tensor]]:
    return _plain(branch, tensors, class_token=False, class_position=False, pool="avg")


KINDS: dict[str, Convert] = {
    "vit": _plain,
    "vit_mae": _plain,
    "dinov2": _dinov2,
    "dinov2_with_registers": _dinov2,
    "dinov3_vit": _dinov3,
    "ijepa": _ijepa,
    **dict.fromkeys(("aimv2", "aimv2_vision_model"), _aimv2),
    "beit": _beit,
    "data2vec-vision": _beit,
    **dict.fromkeys(("clip", "clip_vision_model"), _clip),
    **dict.fromkeys(("siglip", "siglip_vision_model"), _siglip),
}


def _preparation(branch: BranchTensors, spec: ViTSpec) -> Preparation:
    """As preprocessor_config.json says; the user's statistics before it, those of the type in place of none."""
    facts = branch.file.facts
    mean, std = facts.get("preparation.image_mean"), facts.get("preparation.image_std")
    if branch.options.statistics is not None:
        return branch.options.preparation
    if not (isinstance(mean, list) and isinstance(std, list) and len(mean) == len(std) == 3):
        kind = _kind(branch)
        if kind not in STATISTICS:
            raise ValueError(
                f"there is no preprocessor_config.json with image_mean and image_std, and published models of type "
                f"{kind!r} differ in them; use --statistics imagenet, half or clip"
            )
        others = SATELLITE if kind == "dinov3_vit" else ""
        assumption = f"the image statistics {STATISTICS[kind]!r}, as published models of type {kind!r} have"
        branch.assumed.add(f"{assumption}{others} (--statistics)")
        return replace(branch.options, statistics=STATISTICS[kind]).preparation
    resized = facts.get("preparation.size.shortest_edge", facts.get("preparation.size"))
    crop = 1.0
    if facts.get("preparation.do_center_crop") and isinstance(resized, int) and resized > min(spec.size):
        crop = min(spec.size) / resized
    return Preparation(
        mean=tuple(mean),
        std=tuple(std),
        interpolation={2: "bilinear", 3: "bicubic"}.get(facts.get("preparation.resample", 3), "bicubic"),
        crop=crop,
    )
