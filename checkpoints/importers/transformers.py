"""Hugging Face transformers: folders of ViT, ViTMAE, DINOv2, DINOv3, I-JEPA, AIMv2, BEiT, data2vec, CLIP, SigLIP, Pixio
and NEPA.

A folder is one that save_pretrained wrote. DINOv2 may have registers. Heads and the text towers of CLIP and SigLIP are
dropped. Sizes, number of heads, activation and LayerNorm eps come from config.json, image statistics from
preprocessor_config.json, or from all published models of the type if these agree. Positions are resized by the rule of
the library's interpolate_pos_encoding.
"""

import copy
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from math import isclose, isqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from checkpoints.dotted import split
from checkpoints.export import ViTExport, digest_of_tensors
from checkpoints.fingerprint import synthetic_image
from checkpoints.import_options import are_statistics
from checkpoints.importing import (
    MAX_DIFFERENCE,
    BranchTensors,
    Conversion,
    relative_vit,
    size_from,
    split_class_tokens,
)
from checkpoints.reading import ForeignFile
from checkpoints.recognition import position_kind, video_reason
from checkpoints.spec import Preparation, ViTSpec
from engine.errors import option
from engine.printing import in_words

SOURCE = "huggingface/transformers 5.23, models/*/modeling_*.py"
FIRST = (
    "embeddings.patch_embeddings.projection.weight",
    "embeddings.patch_embeddings.weight",
    "embeddings.patch_embedding.weight",
    "embeddings.patch_embed.weight",
)
TRUNK_PREFIXES = (
    "",
    "vit.",
    "dinov2.",
    "dinov2_with_registers.",
    "model.",
    "ijepa.",
    "beit.",
    "data2vec_vision.",
    "vision_model.",
    "pixio.",
    "vit_nepa.",
)
BRANCHES = {"encoder": TRUNK_PREFIXES}
TOWER = r"((vit|dinov2|dinov2_with_registers|ijepa|beit|data2vec_vision|vision_model|pixio|vit_nepa)\.)?"
DROPPED = {
    rf"{TOWER}pooler\.dense\.(weight|bias)": "pooler that pretraining did not train",
    rf"{TOWER}embeddings\.mask_token": "mask token",
    rf"{TOWER}embeddings\.position_ids": "made from the image size",
    rf"{TOWER}.*\.relative_position_index": "made from the window size",
    r"(classifier|lm_head|qa_outputs|cls_classifier|distillation_classifier)\..*": "classifier or token head",
    r"layernorm\.(weight|bias)": "norm before a token head",
    r"decoder\..*": "decoder",
    rf"{TOWER}head\..*": "pooling head",
    r"fc_norm\.(weight|bias)": "norm of a classifier",
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
    r"\.attention\.attention\.([qk]_norm)\.": r".attn.\1.",
    r"(blocks\.\d+)\.layer_scale\.lambda1$": r"\1.gamma_1",
    r"\.output\.layer_scale\.lambda1$": ".gamma_2",
    r"\.intermediate\.(gate|up)_proj\.": r".mlp.\1_proj.",
    r"^(layernorm|post_layernorm)\.": "norm.",
    r"^pre_layrnorm\.": "norm_pre.",
    r"^pooler\.layernorm\.": "fc_norm.",
}
# Type in config.json -> image statistics, if the official code of all published models and the processors of the hub
# agree on them. They do not for "vit", which is Google's (half) and DINO's (imagenet), nor for I-JEPA and data2vec,
# which were trained with ImageNet's while the hub's processors have half.
STATISTICS = {
    **dict.fromkeys(("vit_mae", "dinov2", "dinov2_with_registers", "dinov3_vit", "pixio"), "imagenet"),
    **dict.fromkeys(("clip", "clip_vision_model", "aimv2", "aimv2_vision_model"), "clip"),
    **dict.fromkeys(("siglip", "siglip_vision_model", "beit", "vit_nepa"), "half"),
}
# `resample` in preprocessor_config.json, a number of PIL.Image.Resampling -> interpolation.
INTERPOLATIONS = {1: "lanczos", 2: "bilinear", 3: "bicubic"}
# Setting of config.json -> timm's names of the tensors that a model has if it is on; of tokens it is their number.
TENSORS_OF = {
    "qkv_bias": r"blocks\.\d+\.attn\.q_proj\.bias",
    "query_bias": r"blocks\.\d+\.attn\.q_proj\.bias",
    "key_bias": r"blocks\.\d+\.attn\.k_proj\.bias",
    "value_bias": r"blocks\.\d+\.attn\.v_proj\.bias",
    "proj_bias": r"blocks\.\d+\.attn\.proj\.bias",
    "mlp_bias": r"blocks\.\d+\.mlp\..*\.bias",
    "layer_scale_init_value": r"blocks\.\d+\.gamma_[12]",
    "use_absolute_position_embeddings": r"pos_embed",
    "use_relative_position_bias": r"blocks\.\d+\.attn\.relative_position_bias_table",
    "use_shared_relative_position_bias": r"rel_pos_bias\.relative_position_bias_table",
    "num_register_tokens": r"reg_token",
    "n_cls_tokens": r"cls_token",
}
SATELLITE_NOTE = "; those of satellite images have 0.430,0.411,0.296,0.213,0.156,0.143"
Convert = Callable[[BranchTensors, dict[str, Tensor]], tuple[ViTSpec, dict[str, Tensor]]]


def recognise(file: ForeignFile) -> bool:
    return "config.model_type" in file.facts


def check(file: ForeignFile) -> None:
    model_type = file.facts.get("config.model_type")
    if model_type not in KINDS:
        reason = video_reason(file.tensors) or f"models of {', '.join(KINDS)} can be read"
        raise ValueError(f"{file.path}: config.json says {model_type!r}; {reason}")


def file_of(network: nn.Module) -> ForeignFile:
    """A model of the library in memory, in the form of its folder: tensors as save_pretrained names them."""
    state = network.state_dict()
    with suppress(ImportError):  # before version 5 modules had the names of their files
        from transformers.core_model_loading import revert_weight_conversion

        state = revert_weight_conversion(network, state)
    tensors = {name: tensor.detach().cpu() for name, tensor in state.items()}
    _, facts = split({"config": json.loads(network.config.to_json_string(use_diff=False))})
    return ForeignFile(Path(type(network).__name__), digest_of_tensors(tensors), tensors, facts)


def compare_features(export: ViTExport, network: nn.Module) -> None:
    """Raise ValueError unless the export computes the features of a model in memory, whose code may be the user's.

    Not compared are NEPA, whose attention the export changes, and backbones, which return maps of features.
    """
    name, model_type = type(network).__name__, network.config.model_type
    if model_type == "vit_nepa":
        return
    tower = getattr(network, "vision_model", network)
    trunk = next(module for module in tower.modules() if hasattr(module, "embeddings"))  # without heads
    trunk = copy.deepcopy(trunk).cpu().float().eval()
    export = export.evaluated_at(export.spec.stored.image_size)
    size = size_from(getattr(trunk.config, "image_size", None)) or export.spec.size  # of its images, patches or not
    image, patch_size = synthetic_image(size).float(), export.spec.patch_size
    height, width = (side // patch_size * patch_size for side in size)
    arguments = {}
    if model_type == "vit_mae":  # hides no patch, and keeps their order
        trunk.config.mask_ratio = 0.0
        arguments["noise"] = torch.arange(export.spec.grid[0] * export.spec.grid[1]).float().unsqueeze(0)
    with torch.inference_mode():
        try:
            expected = getattr(trunk(pixel_values=image, **arguments), "last_hidden_state", None)
        except Exception as error:  # the user's code may raise any type
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise ValueError(f"{name} fails on images {tuple(image.shape)}: {reason}") from error
        if expected is None:
            return
        vit = export.build()
        outputs = [vit(image[..., :height, :width], norm=norm)[0] for norm in (True, False)]  # it may have no norm
    differences = [float((output - expected).abs().max()) for output in outputs if output.shape == expected.shape]
    difference = min(differences, default=float("inf")) / float(expected.abs().max())
    if not difference < MAX_DIFFERENCE:
        raise ValueError(
            f"{name}: its features differ by {difference:.2g} from those of a {model_type} with its config (code of "
            "its own, another activation or a hook, say): give `forward`, a function that reads its features"
        )


def convert(branch: BranchTensors) -> Conversion:
    model_type = _model_type(branch)
    renames = dict(RENAMES)
    if _setting(branch, "use_gated_mlp", False) or model_type.startswith("aimv2"):
        renames |= {r"\.mlp\.gate_proj\.": ".mlp.fc1_g.", r"\.mlp\.up_proj\.": ".mlp.fc1_x."}
    else:
        renames[r"\.mlp\.up_proj\."] = ".mlp.fc1."
    tensors = branch.take_trunk(renames)
    if "cls_token" in tensors and tensors["cls_token"].ndim < 3:
        tensors["cls_token"] = tensors["cls_token"].reshape(1, 1, -1)
    if "pos_embed" in tensors and tensors["pos_embed"].ndim < 3:
        tensors["pos_embed"] = tensors["pos_embed"].unsqueeze(0)
    if "reg_token" in tensors and not tensors["reg_token"].numel():
        del tensors["reg_token"]
    _check_config(branch, tensors)
    spec, tensors = KINDS[model_type](branch, join_projections(tensors))
    rows, columns = spec.grid
    is_square_number = model_type.startswith("dinov2") and isqrt(rows * columns) ** 2 == rows * columns
    if rows != columns and (is_square_number or spec.relative_position != "none"):
        # By Dinov2Embeddings.interpolate_pos_encoding and BeitRelativePositionBias.forward
        raise ValueError(f"transformers mistakes its positions for those of a grid other than {rows} x {columns}")
    size, crop = _processed_size(branch, spec.patch_size)
    preparation = _preparation(branch, spec)
    return Conversion(spec=spec, tensors=tensors, preparation=preparation, evaluation_size=size, evaluation_crop=crop)


def join_projections(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with one projection `qkv` in each block in place of `q_proj`, `k_proj` and `v_proj`.

    Biases are joined as well; if keys have none, they become `q_bias` and `v_bias`. Raises ValueError if any other part
    is missing.
    """
    joined = {name: tensor for name, tensor in tensors.items() if not re.search(r"\.[qkv]_proj\.", name)}
    for prefix in sorted({name.split("q_proj.")[0] for name in tensors if ".q_proj." in name}):
        for kind in ("weight", "bias"):
            parts = {part: tensors.get(f"{prefix}{part}_proj.{kind}") for part in "qkv"}
            present = {part: tensor for part, tensor in parts.items() if tensor is not None}
            if len(present) == 3:
                joined[f"{prefix}qkv.{kind}"] = torch.cat(list(present.values()))
            elif {*present} == {"q", "v"} and kind == "bias":
                joined |= {f"{prefix}q_bias": present["q"], f"{prefix}v_bias": present["v"]}
            elif present:
                raise ValueError(f"projections of {prefix} have a {kind} of {', '.join(present)} alone")
    return joined


def _model_type(branch: BranchTensors) -> str:
    """The type of the model in config.json, such as "dinov2"."""
    return str(branch.file.facts.get("config.model_type"))


def _setting(branch: BranchTensors, name: str, default: Any = None) -> Any:
    """A value in config.json, or in its vision_config. Raises ValueError if there is none and no default."""
    value = branch.file.facts.get(f"config.{name}", branch.file.facts.get(f"config.vision_config.{name}", default))
    if value is None:
        raise ValueError(f"config.json has no {name}; take the folder as save_pretrained writes it")
    return value


def _check_config(branch: BranchTensors, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError if config.json contradicts the tensors, of which the library would then ignore or add some."""
    for name, pattern in TENSORS_OF.items():
        facts = branch.file.facts
        stated = facts.get(f"config.{name}", facts.get(f"config.vision_config.{name}"))
        present = [tensor for key, tensor in tensors.items() if re.fullmatch(pattern, key)]
        count = present[0].shape[1] if present and name.endswith("_tokens") else bool(present)
        if stated is not None and (stated if name.endswith("_tokens") else bool(stated)) != count:
            raise ValueError(
                f"config.json says {name}={stated}, and the tensors {count}: correct config.json, or take the folder "
                "as save_pretrained writes it"
            )


def _sizes(branch: BranchTensors) -> dict[str, Any]:
    """Fields of a ViTSpec in config.json: sizes, number of heads, eps of the norms."""
    sides, patch = size_from(_setting(branch, "image_size")), size_from(_setting(branch, "patch_size"))
    if not sides or not patch or patch[0] != patch[1]:
        raise ValueError("config.json's image_size and patch_size are no sizes in pixels, or its patches no squares")
    patch_size = patch[0]
    heads = _setting(branch, "num_attention_heads")
    if branch.options.heads not in (None, heads):
        raise ValueError(f"config.json says {heads} heads, not {branch.options.heads}")
    is_aimv2 = _model_type(branch).startswith("aimv2")
    return dict(
        image_size=tuple(side // patch_size * patch_size for side in sides),  # 378 of 384 px if patches have 14
        patch_size=patch_size,
        width=_setting(branch, "hidden_size"),
        depth=_setting(branch, "num_hidden_layers"),
        heads=heads,
        norm_eps=_setting(branch, "rms_norm_eps" if is_aimv2 else "layer_norm_eps"),
    )


def _architecture(branch: BranchTensors, by_activation: dict[str, str]) -> str:
    """timm's name of a network with the activation of config.json. Raises ValueError if `by_activation` has none."""
    activation = _setting(branch, "hidden_act")
    if activation not in by_activation:
        raise ValueError(f"hidden_act={activation!r}: a model of this kind is read with {' or '.join(by_activation)}")
    return by_activation[activation]


def _plain(branch: BranchTensors, tensors: dict[str, Tensor], **facts: Any) -> tuple[ViTSpec, dict[str, Tensor]]:
    """Spec and tensors of timm's VisionTransformer. facts: fields of the spec that differ from the usual ones."""
    if "architecture" not in facts:
        facts["architecture"] = _architecture(branch, {"gelu": "vit_base_patch16_224"})
    fc1 = tensors.get("blocks.0.mlp.fc1.weight")
    if fc1 is None or fc1.ndim != 2:
        raise ValueError("it has no MLP in its first block; the folder is not complete")
    fields = dict(
        mlp_hidden=fc1.shape[0],
        qkv_bias="blocks.0.attn.qkv.bias" in tensors,
        position=position_kind(tensors),
        position_resize="bicubic",
    )
    return ViTSpec(**_sizes(branch) | fields | facts), tensors


def _dinov2(branch: BranchTensors, tensors: dict[str, Tensor]) -> tuple[ViTSpec, dict[str, Tensor]]:
    if _setting(branch, "use_swiglu_ffn", False):
        architecture = "vit_giant_patch14_dinov2"
    else:
        architecture = _architecture(branch, {"gelu": "vit_base_patch14_dinov2"})
    facts: dict[str, Any] = dict(architecture=architecture, layer_scale=True)
    if "reg_token" in tensors:  # timm has positions only for patches, so that of the class token is added to it
        tensors["cls_token"] = tensors["cls_token"] + tensors["pos_embed"][:, :1]
        tensors["pos_embed"] = tensors["pos_embed"][:, 1:]
        registers = tensors["reg_token"].shape[1]
        facts |= dict(registers=registers, class_position=False, position_resize="bicubic_antialias")
    return _plain(branch, tensors, **facts)


def _dinov3(branch: BranchTensors, tensors: dict[str, Tensor]) -> tuple[ViTSpec, dict[str, Tensor]]:
    tensors = {re.sub(r"\.ls([12])\.gamma$", r".gamma_\1", name): tensor for name, tensor in tensors.items()}
    theta = branch.file.facts.get("config.rope_theta", branch.file.facts.get("config.rope_parameters.rope_theta"))
    return _centred(branch, tensors, theta, key_bias="blocks.0.attn.qkv.bias" in tensors), tensors


def _centred(branch: BranchTensors, tensors: dict[str, Tensor], theta: Any, **facts: Any) -> ViTSpec:
    """Spec with DINOv3's rotary positions. facts: fields of the spec that differ from the usual ones."""
    is_gated = bool(_setting(branch, "use_gated_mlp", False))
    _architecture(branch, {"silu" if is_gated else "gelu": ""})  # checks the activation
    if theta is None:
        raise ValueError("config.json has no rope_theta; take the folder as save_pretrained writes it")
    fields: dict[str, Any] = dict(
        architecture="vit_base_patch16_dinov3",
        mlp_hidden=tensors["blocks.0.mlp.fc2.weight"].shape[1],
        mlp="gated" if is_gated else "plain",
        registers=tensors["reg_token"].shape[1] if "reg_token" in tensors else 0,
        qkv_bias=any(name.endswith(("q_bias", "qkv.bias")) for name in tensors),
        layer_scale="blocks.0.gamma_1" in tensors,
        position="none",
        class_position=False,
        rotary="centred",
        rotary_base=float(theta),
        rotary_pairs="halves",
    )
    return ViTSpec(**_sizes(branch) | fields | facts)


def _beit(branch: BranchTensors, tensors: dict[str, Tensor]) -> tuple[ViTSpec, dict[str, Tensor]]:
    _architecture(branch, {"gelu": ""})  # checks the activation
    if not any(name.endswith("relative_position_bias_table") for name in tensors):
        raise ValueError("it has no relative positions, as BEiT's and data2vec's models have")
    if not {"norm.weight", "fc_norm.weight"} & {*tensors}:
        raise ValueError("it has no norm behind its blocks: its pooling layer was left out; take the official file")
    return relative_vit(branch, tensors, norm_eps=_setting(branch, "layer_norm_eps")), tensors


def _clip(branch: BranchTensors, tensors: dict[str, Tensor]) -> tuple[ViTSpec, dict[str, Tensor]]:
    names = {"quick_gelu": "vit_base_patch16_clip_quickgelu_224", "gelu": "vit_base_patch16_clip_224"}
    return _plain(branch, tensors, architecture=_architecture(branch, names))


def _siglip(branch: BranchTensors, tensors: dict[str, Tensor]) -> tuple[ViTSpec, dict[str, Tensor]]:
    name = _architecture(branch, {"gelu_pytorch_tanh": "vit_base_patch32_siglip_gap_256"})
    return _plain(branch, tensors, architecture=name, class_token=False, class_position=False, pool="avg")


def _aimv2(branch: BranchTensors, tensors: dict[str, Tensor]) -> tuple[ViTSpec, dict[str, Tensor]]:
    _architecture(branch, {"silu": ""})  # checks the activation, which is that of the gate
    if "pos_embed" not in tensors:
        raise ValueError("its positions are computed for each image's own grid: take the official file as aimv2:FILE")
    spec = ViTSpec(
        architecture="aimv2_large_patch14_224",
        mlp_hidden=tensors["blocks.0.mlp.fc1_g.weight"].shape[0],
        class_token=False,
        class_position=False,
        qkv_bias=False,
        position=position_kind(tensors),
        position_resize="bicubic_antialias",
        pool="avg",
        **_sizes(branch),
    )
    return spec, tensors


def _ijepa(branch: BranchTensors, tensors: dict[str, Tensor]) -> tuple[ViTSpec, dict[str, Tensor]]:
    return _plain(branch, tensors, class_token=False, class_position=False, pool="avg")


def _pixio(branch: BranchTensors, tensors: dict[str, Tensor]) -> tuple[ViTSpec, dict[str, Tensor]]:
    return _plain(branch, tensors, **split_class_tokens(branch, tensors))


def _nepa(branch: BranchTensors, tensors: dict[str, Tensor]) -> tuple[ViTSpec, dict[str, Tensor]]:
    """NEPA (SihanXU/nepa 15ea494, models/vit_nepa), whose attention is causal in pretraining only."""
    if branch.file.facts.get("config.is_causal"):
        branch.assumed.add("attention to all patches, as in NEPA's fine-tuning; pretraining's is causal")
    has_query_norm = bool(_setting(branch, "qk_norm"))
    for block in range(_setting(branch, "num_hidden_layers") * has_query_norm):
        for name in (f"blocks.{block}.attn.q_norm", f"blocks.{block}.attn.k_norm"):  # without parameters, or a bias
            channels = _setting(branch, "hidden_size") // _setting(branch, "num_attention_heads")
            tensors = {f"{name}.weight": torch.ones(channels), f"{name}.bias": torch.zeros(channels)} | tensors
    facts = dict(query_norm=has_query_norm, pool="avg")  # modeling_vit_nepa.py, ViTNepaForImageClassification
    return _centred(branch, tensors, _setting(branch, "rope_theta"), **facts), tensors


# Model type in config.json -> what makes a spec, and the tensors that fit it, of tensors under timm's names.
KINDS: dict[str, Convert] = {
    "vit": _plain,
    "vit_mae": _plain,
    "dinov2": _dinov2,
    "dinov2_with_registers": _dinov2,
    "dinov3_vit": _dinov3,
    "ijepa": _ijepa,
    "pixio": _pixio,
    "vit_nepa": _nepa,
    **dict.fromkeys(("aimv2", "aimv2_vision_model"), _aimv2),
    "beit": _beit,
    "data2vec-vision": _beit,
    **dict.fromkeys(("clip", "clip_vision_model"), _clip),
    **dict.fromkeys(("siglip", "siglip_vision_model"), _siglip),
}


def _processed_size(branch: BranchTensors, patch_size: int) -> tuple[tuple[int, int] | None, float | None]:
    """Height and width of the images that preprocessor_config.json makes, in whole patches, and the centre crop as a
    share of the resized short side; None if it does not say."""
    facts = branch.file.facts
    name = "crop_size" if facts.get("preparation.do_center_crop") else "size"
    sides = [facts.get(f"preparation.{name}.{side}", facts.get(f"preparation.{name}")) for side in ("height", "width")]
    height, width = size_from(sides) or (0, 0)
    size = height // patch_size * patch_size, width // patch_size * patch_size
    if not all(size):
        return None, None
    resized = facts.get("preparation.size.shortest_edge", facts.get("preparation.size"))
    if name == "crop_size" and isinstance(resized, int) and resized > min(height, width):
        return size, min(height, width) / resized
    return size, 1.0


def _preparation(branch: BranchTensors, spec: ViTSpec) -> Preparation:
    """How images are prepared: by the user's statistics, else preprocessor_config.json, else STATISTICS of the type.

    Raises ValueError if none of these has image statistics, or the file prepares images in another way.
    """
    if branch.file.facts.get("preparation.do_flip_channel_order"):
        raise ValueError(
            "preprocessor_config.json has do_flip_channel_order=True, and images are always RGB here: flip the input "
            "channels of the patch embedding, weight.flip(1), and mean and std, and set it to false"
        )
    if branch.options.statistics is not None:
        return branch.options.preparation
    facts = branch.file.facts
    mean, std, interpolation = _processing(facts)
    if mean is None:
        model_type = _model_type(branch)
        if model_type not in STATISTICS:
            raise ValueError(
                f"there is no preprocessor_config.json with image_mean and image_std, and published models of type "
                f"{model_type!r} differ in them; use {option('statistics', 'imagenet')}, half or clip"
            )
        statistics = STATISTICS[model_type]
        note = SATELLITE_NOTE if model_type == "dinov3_vit" else ""
        branch.assumed.add(
            f"the image statistics {statistics!r}, as published models of type {model_type!r} have{note} (--statistics)"
        )
        return replace(branch.options, statistics=statistics).preparation
    if facts.get("preparation.resample") is None:  # the library's processors have defaults that differ by class
        branch.assumed.add(f"{interpolation} resizing: preprocessor_config.json has no `resample`; add it there")
    resized_side = facts.get("preparation.size.shortest_edge", facts.get("preparation.size"))
    crop = 1.0
    if facts.get("preparation.do_center_crop") and isinstance(resized_side, int) and resized_side > min(spec.size):
        crop = min(spec.size) / resized_side
    return Preparation(mean=tuple(mean), std=tuple(std), interpolation=interpolation, crop=crop)


def _processing(facts: Mapping[str, Any]) -> tuple[Any, Any, str]:
    """Mean, std (both None: not stated) and interpolation in preprocessor_config.json.

    Raises ValueError if it prepares images in a way that this project does not.
    """
    names = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std", "resample")
    stated = {name: value for name in names if (value := facts.get(f"preparation.{name}")) is not None}
    mean, std, factor = stated.get("image_mean"), stated.get("image_std"), stated.get("rescale_factor", 1 / 255)
    if stated.get("do_normalize") is False:
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    supported = {
        "do_rescale": stated.get("do_rescale", True) is True,
        "rescale_factor": isinstance(factor, float) and isclose(factor, 1 / 255, rel_tol=1e-4),
        "image_mean": (mean, std) == (None, None) or are_statistics(mean, std),
        "resample": stated.get("resample", 3) in [*INTERPOLATIONS],
    }
    if wrong := [name for name, is_supported in supported.items() if not is_supported]:
        wrong += ["image_std"] if "image_mean" in wrong else []
        kinds = in_words([f"{number} ({name})" for number, name in INTERPOLATIONS.items()])
        raise ValueError(
            f"preprocessor_config.json has {in_words([f'{name}={stated.get(name)}' for name in wrong])}; supported are "
            f"pixels scaled by 1/255, their mean and std from 0 to 1 for three channels, and resample {kinds}: correct "
            f"the file, or replace its values with {option('statistics', 'M,M,M,S,S,S')}"
        )
    return mean, std, INTERPOLATIONS[stated.get("resample", 3)]
