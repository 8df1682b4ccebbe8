"""timm: a VisionTransformer, Beit or Eva by name (`timm:NAME`, `hf-hub:ID`, `local-dir:FOLDER`) or file (`timm:PATH`).

Nothing is downloaded unless the reference names the hub or a pretrained timm model. Weights of files, folders and hub
repositories are read by reading.py like all foreign files; those of timm's model names are fetched and read by timm. A
file holds a state dict, alone or as timm's train.py saves it. Its tensors do not show the image statistics, and some
not the activation or head count: users state them by `--statistics` and `--architecture`, timm's name of the model.

`spec_of` reads sizes and conventions from the modules of a model, not from its name. It accepts timm's
VisionTransformer, VisionTransformerDistilled (DeiT), Beit and Eva, if checkpoints/vit.py can compute all their parts,
and NaFlexVit for images of one size (--image-size, by default timm's), with its positions at that size.
"""

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import hf_hub_download, list_repo_files
from timm.layers import (
    AttentionRope,
    GELUTanh,
    GluMlp,
    LayerNorm,
    Mlp,
    PatchEmbed,
    RmsNorm,
    RotaryEmbeddingCat,
    RotaryEmbeddingDinoV3,
    RotaryEmbeddingMixed,
    SwiGLU,
    to_2tuple,
)
from timm.models import beit
from timm.models._hub import load_model_config_from_hf, load_model_config_from_path
from timm.models.beit import Beit
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva, EvaAttention, EvaBlock, EvaBlockPostNorm
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import Attention, Block, ResPostBlock, VisionTransformer
from torch import nn
from torch.nn import Identity

from checkpoints.export import ViTExport, digest_of_tensors
from checkpoints.fingerprint import synthetic_image
from checkpoints.folders import WEIGHTS, offline_if_unreachable
from checkpoints.importing import (
    HEADS,
    MAX_DIFFERENCE,
    BranchTensors,
    Conversion,
    absolute,
    plain_vit,
    read_grid,
    relative_vit,
    trunk_sizes,
)
from checkpoints.reading import ForeignFile, read_foreign
from checkpoints.recognition import (
    ANY_PREFIX,
    CLASSIFIER,
    TRUNK_PREFIXES,
    has_class_tokens,
    position_kind,
    trunk_of,
    unsupported_reason,
)
from checkpoints.spec import Preparation, ViTSpec
from checkpoints.vit import skip_init
from engine.errors import option
from engine.files import read_json
from engine.printing import did_you_mean

SOURCE = "huggingface/pytorch-image-models 1.0.31"
BRANCHES = {"model": TRUNK_PREFIXES, "ema": ("state_dict_ema.", "model_ema.")}
DEFAULTS = ("ema", "model")  # timm.models._helpers.load_state_dict(use_ema=True) takes the average if there is one
DROPPED = {
    rf"({ANY_PREFIX}|(state_dict|model)_ema\.)({CLASSIFIER}|head_dist\.(weight|bias))": "classifier",
    rf"({ANY_PREFIX}|(state_dict|model)_ema\.)attn_pool\..*": "pooling head",
}
RENAMES = {r"^dist_token$": "reg_token"}  # a distilled DeiT is a plain ViT with a second token
HARMLESS_ARGUMENTS = re.compile(
    r"num_heads|num_classes|weight_init|fix_init|img_size|dynamic_img_(size|pad)|\w*drop\w*|global_pool"
)
MAX_REASON_LENGTH = 300  # characters of a library's message
INVALID_CONFIG_ERRORS = (TypeError, AttributeError, ValueError)  # raised by timm for invalid settings in a config.json
CLASSES = (VisionTransformer, VisionTransformerDistilled, Beit, Eva, NaFlexVit)
# timm's modules with ViTs of a single resolution ("vision_transformer" is models/vision_transformer.py), of which
# `spec_of` accepts most
VIT_MODULES = (
    "vision_transformer",
    "beit",
    "deit",
    "eva",
    "vision_transformer_hybrid",
    "vision_transformer_relpos",
    "vision_transformer_sam",
    "naflexvit",
)
# Class of timm's -> what it computes that checkpoints/vit.py does not.
UNSUPPORTED = {
    "VisionTransformerSAM": "attends within windows, by relative positions of rows and columns",
    "VisionTransformerRelPos": "has relative positions that an MLP makes, or tables without a class token",
    "HybridEmbed": "a convolutional network",
    "DiffAttention": "the difference of two softmax maps",
    "ParallelScalingBlock": "attention and MLP side by side",
    "DiffParallelScalingBlock": "attention and MLP side by side",
}
ROTARY = {RotaryEmbeddingCat: "axial", RotaryEmbeddingDinoV3: "centred", RotaryEmbeddingMixed: "mixed"}
DISTILLED_ARCHITECTURE = "vit_base_patch16_224"  # a distilled DeiT is exported as a plain ViT with a second token


def spec_of(model: nn.Module, reference: str) -> ViTSpec:
    """The spec of a timm model. Raises ValueError for one with parts that an export cannot represent."""
    class_name = type(model).__name__
    if type(model) not in CLASSES:
        reason = f", which {UNSUPPORTED[class_name]}" if class_name in UNSUPPORTED else ""
        raise ValueError(
            f"{reference} is a {class_name}{reason}; timm's VisionTransformer, Beit and Eva can be imported"
        )
    if isinstance(model, NaFlexVit):
        return replace(spec_of(vit_of_size(model), reference), position_resize="fixed")
    for part_name, part, supported_types in _parts(model):
        if not isinstance(part, supported_types):
            part_type = type(part).__name__
            reason = f", {UNSUPPORTED[part_type]}" if part_type in UNSUPPORTED else ""
            raise ValueError(f"{reference} cannot be imported: its {part_name} is timm's {part_type}{reason}")
    if getattr(model, "pool_include_prefix", False):
        raise ValueError(f"{reference} cannot be imported: it pools registers together with patches")
    patch_height, patch_width = model.patch_embed.patch_size
    if patch_height != patch_width:
        raise ValueError(f"{reference}: only square patches can be imported, not {patch_height} x {patch_width} px")
    rows, columns = model.patch_embed.grid_size
    return ViTSpec(
        image_size=(rows * patch_height, columns * patch_width),  # read by the convolution: 378 of 384 px if p = 14
        patch_size=patch_height,
        width=model.embed_dim,
        depth=len(model.blocks),
        **_token_fields(model),
        **_block_fields(model),
        **(_eva_fields(model) if type(model) is Eva else {}),
    )


def vit_of_size(model: NaFlexVit, size: tuple[int, int] | None = None) -> VisionTransformer:
    """A VisionTransformer that computes what a NaFlexVit does on images of one size, with its blocks and norms.

    size: height and width in pixels; None: timm's. Raises ValueError for positions of other kinds than tables.
    """
    embeds, prefix = model.embeds, bool(model.has_class_token)
    apply = {"learned": embeds._apply_learned_pos_embed, "factorized": embeds._apply_factorized_pos_embed}
    if embeds.pos_embed_type not in apply:
        raise ValueError(f"its positions are of the kind {embeds.pos_embed_type!r}, which only NaFlexVit computes")
    with torch.device(embeds.proj.weight.device), torch.no_grad():
        vit = VisionTransformer(
            img_size=size or tuple(model.pretrained_cfg["input_size"][1:]),
            patch_size=embeds.patch_size,
            embed_dim=model.embed_dim,
            depth=0,
            num_classes=0,
            class_token=prefix,
            reg_tokens=model.num_reg_tokens,
            no_embed_class=True,
            global_pool="token" if model.global_pool == "token" else "avg",
        )
        table = torch.zeros(1, vit.patch_embed.num_patches, model.embed_dim)
        apply[embeds.pos_embed_type](table, list(vit.patch_embed.grid_size))
        order = (0, 3, 1, 2) if embeds.channels_last else (0, 1, 2, 3)
        height, width = embeds.patch_size
        weight = embeds.proj.weight.unflatten(1, (height, width, 3) if embeds.channels_last else (3, height, width))
        vit.patch_embed.proj.weight.copy_(weight.permute(order))
        vit.patch_embed.proj.bias.copy_(embeds.proj.bias)
    vit.pos_embed, vit.cls_token, vit.reg_token = nn.Parameter(table), embeds.cls_token, embeds.reg_token
    vit.blocks, vit.norm, vit.fc_norm = model.blocks, model.norm, model.fc_norm
    is_tanh = isinstance(model.blocks[0].mlp.act, GELUTanh)
    architecture = "vit_base_patch32_siglip_gap_256" if is_tanh else "vit_base_patch16_224"
    vit.pretrained_cfg = {**model.pretrained_cfg, "architecture": architecture}
    return vit


def _parts(model: nn.Module) -> Iterator[tuple[str, object, type | tuple[type, ...]]]:
    """Parts of a model whose types decide whether checkpoints/vit.py can compute it: name, module, supported types."""
    block = model.blocks[0]
    attention, mlp = getattr(block, "attn", None), getattr(block, "mlp", None)
    yield "patch embedding", model.patch_embed, PatchEmbed
    yield "block", block, (Block, ResPostBlock, beit.Block, EvaBlock, EvaBlockPostNorm)
    yield "attention", attention, (Attention, beit.Attention, EvaAttention, AttentionRope)
    yield "gate of the attention", getattr(attention, "gate", None), type(None)
    yield "MLP", mlp, (Mlp, GluMlp, SwiGLU)
    yield "norm", block.norm1, (nn.LayerNorm, LayerNorm, RmsNorm)
    yield "rotary positions", getattr(model, "rope", None), (type(None), *ROTARY)


def _token_fields(model: nn.Module) -> dict[str, Any]:
    """Fields of a spec on tokens and positions before the first block, and on norm and pooling after the last."""
    is_distilled, is_beit = isinstance(model, VisionTransformerDistilled), isinstance(model, Beit)
    has_class_token = model.cls_token is not None
    registers = getattr(model, "reg_token", None)
    prefix_positions = 0 if model.pos_embed is None else model.pos_embed.shape[1] - model.patch_embed.num_patches
    final_norm = "none"
    if not isinstance(model.norm, Identity):
        final_norm = "all"
    elif not isinstance(getattr(model, "fc_norm", Identity()), Identity):
        final_norm = "pooled"
    fields: dict[str, Any] = dict(
        architecture=DISTILLED_ARCHITECTURE if is_distilled else model.pretrained_cfg["architecture"],
        class_token=has_class_token,
        registers=int(is_distilled) + (0 if registers is None else registers.shape[1]),
        position="none" if model.pos_embed is None else "learned",
        class_position=prefix_positions > 0,
        position_resize="relative_spline" if is_beit else "bicubic_antialias",
        final_norm=final_norm,
        pool="cls" if has_class_token and model.global_pool in ("token", "", "map") else "avg",
    )
    if is_beit:
        fields["relative_position"] = "shared" if model.rel_pos_bias is not None else "per_block"
    return fields


def _block_fields(model: nn.Module) -> dict[str, Any]:
    """Fields of a spec on the blocks."""
    block = model.blocks[0]
    attention, mlp = block.attn, block.mlp
    # An Eva's size is the input of fc2, without a packed gate; that of other ViTs the output of fc1, including one.
    fc1 = getattr(mlp, "fc1_g", None) or mlp.fc1
    mlp_hidden = mlp.fc2.in_features if isinstance(model, Eva) else fc1.out_features
    bias_owners = [attention.qkv if attention.qkv is not None else attention.q_proj, attention]
    return dict(
        heads=attention.num_heads,
        mlp_hidden=mlp_hidden,
        qkv_bias=any(getattr(owner, name, None) is not None for owner in bias_owners for name in ("bias", "q_bias")),
        layer_scale=getattr(block, "gamma_1", None) is not None or hasattr(getattr(block, "ls1", None), "gamma"),
        norm_eps=block.norm1.eps,
    )


def _eva_fields(model: Eva) -> dict[str, Any]:
    """Fields of a spec that are fixed for all models but Eva."""
    block = model.blocks[0]
    attention, mlp = block.attn, block.mlp
    mlp_kind = "plain"
    if isinstance(mlp, SwiGLU):
        mlp_kind = "gated"
    elif isinstance(mlp, GluMlp):
        mlp_kind = "gated_packed"
    return dict(
        key_bias=isinstance(attention, AttentionRope),
        split_qkv=attention.qkv is None,
        mlp=mlp_kind,
        norm_after=isinstance(block, EvaBlockPostNorm),
        query_norm=not isinstance(attention.q_norm, Identity),
        attention_norm=not isinstance(attention.norm, Identity),
        mlp_norm=not isinstance(mlp.norm, Identity),
        first_norm=not isinstance(model.norm_pre, Identity),
        **_rotary_fields(model.rope),
    )


def _rotary_fields(rope: nn.Module | None) -> dict[str, Any]:
    """Fields of a spec on rotary positions. Raises ValueError if they are scaled to a grid that is not square."""
    if rope is None:
        return {}
    reference_grid = getattr(rope, "ref_feat_shape", None) or (0, 0)
    if reference_grid[0] != reference_grid[1]:
        raise ValueError(
            f"its rotary positions refer to a grid of {reference_grid[0]} x {reference_grid[1]}, which is no square"
        )
    return dict(
        rotary=ROTARY[type(rope)],
        rotary_base=float(rope.temperature),
        rotary_grid=reference_grid[0],
        rotary_offset=float(getattr(rope, "grid_offset", 0.0)),
        rotary_first="row" if rope.grid_indexing == "ij" else "column",
        rotary_pairs="halves" if getattr(rope, "rotate_half", False) else "neighbours",
    )


@dataclass(frozen=True)
class TimmModel(ForeignFile):
    """A timm model in memory, in the form of a file, with timm's settings and output."""

    spec: ViTSpec
    preparation: Preparation
    size: tuple[int, int]  # timm's height and width of images in pixels, which need not be multiples of a patch
    tokens: torch.Tensor  # (1, P+L, D), forward_features of the synthetic image
    pool: str  # timm's global_pool


def recognise(file: ForeignFile) -> bool:
    """Whether a file holds a trunk under timm's names, perhaps with heads, and no other source's position table."""
    tensors = trunk_of(file, rf"{CLASSIFIER}|attn_pool\..*|dist_token|head_dist\.(weight|bias)")
    is_other = unsupported_reason(tensors) or has_class_tokens(tensors)
    return bool(tensors) and not is_other and position_kind(tensors) in ("learned", "none")


def open_model(reference: str, image_size: int | tuple[int, int] | None = None) -> TimmModel:
    """The model that timm calls `reference`, with its pretrained weights. Raises ValueError if it cannot be loaded.

    image_size: of a NaFlexVit, in pixels.
    """
    scheme, colon, place = reference.partition(":")
    if not colon:
        _spec_of_name(reference)  # refuses unsupported models before their weights are downloaded
    try:
        if scheme == "local-dir":
            weights = Path(place) / _weights_name([path.name for path in Path(place).glob("*")], place)
            read_json(weights.with_name("config.json"))  # refuses pipes, for which timm would wait
            model = _load_weights(reference, weights)
        else:
            with offline_if_unreachable():
                if scheme == "hf-hub":
                    model = _load_weights(reference, _download_weights(place))
                else:
                    model = timm.create_model(reference, pretrained=True)
    except (RuntimeError, OSError, ArithmeticError, AssertionError, LookupError, *INVALID_CONFIG_ERRORS) as error:
        reason = " ".join(str(error).split())[:MAX_REASON_LENGTH] or type(error).__name__
        if isinstance(error, KeyError):
            reason = f"its config.json has no {reason}, so it is another library's, which is not read"
        if isinstance(error, json.JSONDecodeError):
            reason = f"its config.json is not valid JSON ({reason}); download or save it again"
        raise ValueError(f"timm cannot load {reference!r}: {reason}") from error
    return timm_model(model, reference, image_size)


def is_importable(network: torch.nn.Module) -> bool:
    """Whether a module is a timm model that an export can represent."""
    try:
        return isinstance(network, CLASSES) and bool(spec_of(network, "the module"))
    except ValueError:
        return False


def timm_model(model: torch.nn.Module, reference: str, image_size: int | tuple[int, int] | None = None) -> TimmModel:
    """A timm model with its current weights as a TimmModel. Raises ValueError if it cannot be imported.

    reference: its name in messages and in the export. image_size: of a NaFlexVit, in pixels.
    """
    model.eval()
    vit = model
    if isinstance(model, NaFlexVit):
        vit = vit_of_size(model, to_2tuple(image_size) if image_size else None).eval()
    spec, size = spec_of(vit, reference), tuple(vit.patch_embed.img_size)
    spec = replace(spec, position_resize="fixed") if vit is not model else spec
    tensors = {name: tensor.detach().cpu() for name, tensor in vit.state_dict().items()}
    with torch.inference_mode():
        tokens = model.forward_features(synthetic_image(size).float())
    return TimmModel(
        path=Path(reference),
        sha256=digest_of_tensors(tensors),
        tensors=tensors,
        facts={"licence": model.pretrained_cfg.get("license")},
        spec=spec,
        preparation=_preparation(model, spec.size[0] / size[0], reference),
        size=size,
        tokens=tokens.clone(),
        pool=model.global_pool,
    )


def _load_weights(reference: str, weights: Path) -> torch.nn.Module:
    """The model of a hub repository or folder (`hf-hub:ID`, `local-dir:FOLDER`) with the tensors of a weights file.

    Raises ValueError or RuntimeError if config.json and tensors do not fit each other.
    """
    tensors = read_foreign(weights).tensors
    scheme, _, place = reference.partition(":")
    _, name, settings = (load_model_config_from_hf if scheme == "hf-hub" else load_model_config_from_path)(place)
    if timm.is_model(name) and name not in timm.list_models(module=VIT_MODULES):
        raise ValueError(f"it is a {name}; timm's VisionTransformer, Beit and Eva can be imported")
    depth = (settings or {}).get("depth", 0)
    if not isinstance(depth, int) or depth > len(tensors):
        raise ValueError(f"its config.json says depth={depth!a:.40}, and {weights.name} holds {len(tensors)} tensors")
    with torch.device("meta"), skip_init():  # checks all shapes before memory is allocated for them
        model = timm.create_model(reference, pretrained=False)
        model.load_state_dict(tensors, strict=True, assign=True)
    spec_of(model, "it")  # checks the grid, because rotary tables are not in the file
    with skip_init():
        model = timm.create_model(reference, pretrained=False)
    model.load_state_dict(tensors, strict=True)
    return model


def _download_weights(repository: str) -> Path:
    """Path of the downloaded weights of a hub repository, `user/name` or `user/name@revision`."""
    name, _, revision = repository.partition("@")
    weights = _weights_name(list_repo_files(name, revision=revision or None), "the repository")
    return Path(hf_hub_download(name, weights, revision=revision or None))


def _weights_name(names: Collection[str], where: str) -> str:
    """The preferred weights file among file names. Raises ValueError if there is none. where: for the message."""
    if weights := [name for name in WEIGHTS if name in names]:
        return weights[0]
    raise ValueError(f"there is no {' or '.join(WEIGHTS)} in {where}")


def convert(branch: BranchTensors) -> Conversion:
    tensors, options, facts = branch.take_trunk(RENAMES), branch.options, branch.file.facts
    stated = [facts.get(name) for name in ("args.gp", "args.model_kwargs.global_pool")]  # of timm's train.py
    for pool in {branch.file.pool} if isinstance(branch.file, TimmModel) else {*stated}:
        if pool in ("max", "avgmax"):
            branch.assumed.add(
                f"the mean of the patches as the network's feature, which is timm's global_pool={pool!r}"
            )
    if isinstance(branch.file, TimmModel):
        if options.heads or options.statistics or options.architecture:
            raise ValueError("timm says the heads, statistics and architecture of its own models: leave these options")
        return Conversion(
            spec=branch.file.spec,
            tensors=tensors,
            preparation=branch.file.preparation,
            check=partial(_compare_features, model=branch.file),
        )
    if options.statistics is None:
        raise ValueError(
            "no tensor tells the image statistics, which differ between timm's models; use "
            f"{option('statistics', 'imagenet')} (as DeiT), half (as timm's own ImageNet-21k weights) or clip"
        )
    # CheckpointSaver stores the index of the last epoch since version 2; before, it added 1.
    is_last_index = branch.file.facts.get("version", 0) == 2
    return Conversion(spec=_spec_of_file(branch, tensors), tensors=tensors, epochs=branch.epochs(last=is_last_index))


def _spec_of_file(branch: BranchTensors, tensors: dict[str, torch.Tensor]) -> ViTSpec:
    """Spec of a file: sizes from its tensors, the rest from the architecture that the user or the file names.

    Without a name, only models that their tensors determine are accepted, because timm has others with the same tensors
    but another activation, head count or LayerNorm eps. Raises ValueError for those.
    """
    if any(name.endswith("relative_position_bias_table") for name in tensors):
        return relative_vit(branch, tensors)
    if name := branch.options.architecture or _architecture_in(branch.file):
        if not branch.options.architecture and (changes := _changed_arguments(branch.file)):
            raise ValueError(
                f"its training changed {name} by --model-kwargs {' '.join(changes)}, and only models as timm names "
                f"them are read; if one has the same activation and norms, give {option('architecture')} NAME"
            )
        return _spec_by_name(branch, tensors, name)
    is_ambiguous = "norm_pre.weight" in tensors or "blocks.0.attn.q_norm.weight" in tensors
    absent = ["cls_token"] if "cls_token" not in tensors else []
    absent += [] if {"norm.weight", "fc_norm.weight"} & {*tensors} else ["norm.weight"]
    if is_ambiguous or absent:
        without = f"the file has no {' and no '.join(absent)}: if that is right, " if absent else ""
        raise ValueError(
            f"{without}no tensor tells the activation, head count and norms of such a model; give "
            f"{option('architecture')} NAME, timm's name of the model"
        )
    return plain_vit(
        branch,
        tensors,
        heads={width: heads for width, heads in HEADS.items() if width != 1536},  # at 1536 timm has 16 and 24 heads
        class_position=None,
        registers=tensors["reg_token"].shape[1] if "reg_token" in tensors and tensors["reg_token"].ndim == 3 else 0,
        qkv_bias="blocks.0.attn.qkv.bias" in tensors,
        layer_scale="blocks.0.ls1.gamma" in tensors,
        position_resize="bicubic_antialias",
    )


def _architecture_in(file: ForeignFile) -> str | None:
    """timm's name of the model that timm's train.py writes into a file; None if there is none."""
    name = file.facts.get("arch")
    return name if isinstance(name, str) and timm.is_model(name) else None


def _changed_arguments(file: ForeignFile) -> list[str]:
    """Arguments of timm's model that its train.py was told (--model-kwargs), as in "act_layer=relu".

    Without those that do not change the network's features, and the number of heads, which `check_heads` compares.
    """
    prefix = "args.model_kwargs."
    arguments = {name.removeprefix(prefix): value for name, value in file.facts.items() if name.startswith(prefix)}
    return [f"{name}={value}" for name, value in arguments.items() if not HARMLESS_ARGUMENTS.fullmatch(name)]


def _spec_by_name(branch: BranchTensors, tensors: dict[str, torch.Tensor], name: str) -> ViTSpec:
    """Spec of timm's model `name`, at the image size of the file's position table, with the user's number of heads.

    Raises ValueError if the tensors have other sizes than the model, or the file's settings another number of heads.
    """
    spec = _spec_of_name(name)
    if branch.options.heads:
        spec = replace(spec, heads=branch.options.heads)
    else:
        branch.check_heads(spec.heads, f"{name} has")
    for field_name, size in trunk_sizes(branch, tensors).items():
        if size != getattr(spec, field_name):
            raise ValueError(f"{field_name} of the tensors is {size}, that of {name} is {getattr(spec, field_name)}")
    if "fc_norm.weight" in tensors and "norm.weight" not in tensors:
        spec = replace(spec, final_norm="pooled", pool="avg")
    if "pos_embed" not in tensors:
        return spec
    prefixes, rows = (spec.prefix * spec.class_position,), tensors["pos_embed"].shape[1]
    _, height, width = read_grid(branch, spec.patch_size, absolute(rows), prefixes, own=spec.size)
    return replace(spec, image_size=(height * spec.patch_size, width * spec.patch_size))


def _spec_of_name(name: str) -> ViTSpec:
    """Spec of timm's model `name`, built without weights. Raises ValueError for unknown or unsupported models."""
    if not timm.is_model(name):
        choices = timm.list_models(module=VIT_MODULES, pretrained="." in name)  # names of weights have a dot
        raise ValueError(f"timm has no model {name!r}{did_you_mean(name, choices, 'docs/timm.md')}")
    stem, _, tag = name.partition(".")
    if tag and name not in (choices := timm.list_pretrained(f"{stem}.*")):
        raise ValueError(f"timm has no weights {name!r}; it has {', '.join(choices) or f'none of {stem}'}")
    with torch.device("meta"), skip_init():
        return spec_of(timm.create_model(name, num_classes=0), name)


def _compare_features(export: ViTExport, model: TimmModel) -> None:
    """Raise ValueError unless the export computes timm's features: a model may have settings that no tensor shows."""
    height, width = export.spec.size
    with torch.inference_mode():
        tokens = export.build()(synthetic_image(model.size)[..., :height, :width].float())[0]
    difference = (tokens - model.tokens).abs().max() / model.tokens.abs().max()
    if not difference < MAX_DIFFERENCE:
        raise ValueError(
            f"{model.path}: features differ from timm's by {difference:.2g}: it has settings beyond those of "
            f"{export.spec.architecture} (another activation, say), which an export cannot carry"
        )


def _preparation(model: torch.nn.Module, covered: float, reference: str) -> Preparation:
    """How timm prepares images for a model.

    covered: share of an image's side that patches cover; the rest, which timm's model ignores, is cropped away here.
    Raises ValueError for image statistics of pixels from 0 to 255.
    """
    settings = model.pretrained_cfg
    try:
        return Preparation(
            mean=tuple(settings["mean"]),
            std=tuple(settings["std"]),
            interpolation=settings["interpolation"],
            crop=settings["crop_pct"] * covered,
        )
    except ValueError as error:
        raise ValueError(f"{reference}: its pretrained_cfg has {error}") from error
