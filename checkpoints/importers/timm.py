"""timm: a VisionTransformer, Beit or Eva by name (`timm:NAME`, `hf-hub:ID`, `local-dir:FOLDER`) or file (`timm:PATH`).

Nothing is downloaded unless the reference names the hub or a pretrained timm model. Weights of files, folders and hub
repositories go through reading.py like every foreign file; those of timm's own names are fetched and read by timm.
A file is a state dict, alone or as timm's train.py saves it. No tensor shows its image statistics, and some do not show
its activation or head count either: these are the user's to say, by `--statistics` and timm's name of the model.

`spec_of` reads the sizes and conventions of a model from its modules, not from its name. Taken are timm's
VisionTransformer, its distilled kind (DeiT), Beit and Eva, of parts that the one ViT computes.
"""

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import hf_hub_download, list_repo_files
from timm.layers import (
    AttentionRope,
    GluMlp,
    LayerNorm,
    Mlp,
    PatchEmbed,
    RmsNorm,
    RotaryEmbeddingCat,
    RotaryEmbeddingDinoV3,
    RotaryEmbeddingMixed,
    SwiGLU,
)
from timm.models import beit
from timm.models._hub import load_model_config_from_hf, load_model_config_from_path
from timm.models.beit import Beit
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva, EvaAttention, EvaBlock, EvaBlockPostNorm
from timm.models.vision_transformer import Attention, Block, ResPostBlock, VisionTransformer
from torch import nn
from torch.nn import Identity

from checkpoints.export import ViTExport, digest_of_tensors
from checkpoints.fingerprint import synthetic_image
from checkpoints.folders import WEIGHTS, cache_alone_if_unreachable
from checkpoints.importing import HEADS, BranchTensors, Conversion, plain_vit, relative_vit, shown_sizes, square
from checkpoints.reading import ForeignFile, read_foreign
from checkpoints.recognition import BARE, CLASSIFIER, WITHIN, beyond, kind_in, trunk_of
from checkpoints.spec import Preparation, ViTSpec
from checkpoints.vit import skip_init
from engine.printing import did_you_mean

SOURCE = "huggingface/pytorch-image-models 1.0.31"
BRANCHES = {"model": BARE, "ema": ("state_dict_ema.", "model_ema.")}
DROPPED = {
    rf"({WITHIN}|(state_dict|model)_ema\.)({CLASSIFIER}|head_dist\.(weight|bias))": "classifier",
    rf"({WITHIN}|(state_dict|model)_ema\.)attn_pool\..*": "pooling head",
}
RENAMES = {r"^dist_token$": "reg_token"}  # a distilled DeiT is a plain ViT with a second token
LONGEST_REASON = 300  # characters of a library's message
AGREEMENT = 1e-5  # of the largest value, in float32
CONFUSED = (TypeError, AttributeError, ValueError)  # what settings of a config.json raise that are no settings
CLASSES = (VisionTransformer, VisionTransformerDistilled, Beit, Eva)
# timm's modules (module vision_transformer is models/vision_transformer.py) whose names are ViTs, one resolution each
FAMILY = (
    *("vision_transformer", "beit", "deit", "eva"),
    *("vision_transformer_hybrid", "vision_transformer_relpos", "vision_transformer_sam", "naflexvit"),
)
# What other parts of timm's ViTs do that the one ViT does not.
OTHERWISE = {
    "NaFlexVit": "packs patches of images of any shape and resizes positions by rules of its own",
    "VisionTransformerSAM": "attends within windows, by relative positions of rows and columns",
    "VisionTransformerRelPos": "has relative positions that an MLP makes, or tables without a class token",
    "HybridEmbed": "a convolutional network",
    "DiffAttention": "the difference of two softmax maps",
    "ParallelScalingBlock": "attention and MLP side by side",
    "DiffParallelScalingBlock": "attention and MLP side by side",
}
ROTARY = {RotaryEmbeddingCat: "axial", RotaryEmbeddingDinoV3: "centred", RotaryEmbeddingMixed: "mixed"}
# Sizes of a plain ViT -> timm's name of one; a distilled DeiT is such a ViT with a second token.
PLAIN = "vit_base_patch16_224"


def spec_of(model: nn.Module, reference: str) -> ViTSpec:
    """The spec of a timm model. ValueError names what of it no export can carry."""
    kind = type(model).__name__
    if type(model) not in CLASSES:
        why = f", which {OTHERWISE[kind]}" if kind in OTHERWISE else ""
        raise ValueError(f"{reference} is a {kind}{why}; timm's VisionTransformer, Beit and Eva can be imported")
    for place, part, kinds in _parts(model):
        if not isinstance(part, kinds):
            what = type(part).__name__
            why = f", {OTHERWISE[what]}" if what in OTHERWISE else ""
            raise ValueError(f"{reference} cannot be imported: its {place} is timm's {what}{why}")
    if getattr(model, "pool_include_prefix", False):
        raise ValueError(f"{reference} cannot be imported: it pools registers together with patches")
    patch, across = model.patch_embed.patch_size
    if patch != across:
        raise ValueError(f"{reference}: only square patches can be imported, not {patch} x {across} px")
    facts = _tokens(model) | _block(model) | (_eva(model) if type(model) is Eva else {})
    rows, columns = model.patch_embed.grid_size
    return ViTSpec(
        image_size=(rows * patch, columns * patch),  # what the convolution reads: 378 of 384 px in patches of 14
        patch_size=patch,
        width=model.embed_dim,
        depth=len(model.blocks),
        **facts,
    )


def _parts(model: nn.Module) -> Iterator[tuple[str, object, type | tuple[type, ...]]]:
    """What decides whether our network computes what the model does: place, module, the kinds that it can be."""
    block = model.blocks[0]
    attention, mlp = getattr(block, "attn", None), getattr(block, "mlp", None)
    yield "patch embedding", model.patch_embed, PatchEmbed
    yield "block", block, (Block, ResPostBlock, beit.Block, EvaBlock, EvaBlockPostNorm)
    yield "attention", attention, (Attention, beit.Attention, EvaAttention, AttentionRope)
    yield "gate of the attention", getattr(attention, "gate", None), type(None)
    yield "MLP", mlp, (Mlp, GluMlp, SwiGLU)
    yield "norm", block.norm1, (nn.LayerNorm, LayerNorm, RmsNorm)
    yield "rotary positions", getattr(model, "rope", None), (type(None), *ROTARY)


def _tokens(model: nn.Module) -> dict[str, Any]:
    """Facts of what stands before the first block and behind the last."""
    distilled, relates = isinstance(model, VisionTransformerDistilled), isinstance(model, Beit)
    class_token = model.cls_token is not None
    registers = getattr(model, "reg_token", None)
    rows = 0 if model.pos_embed is None else model.pos_embed.shape[1] - model.patch_embed.num_patches
    pooled = not isinstance(getattr(model, "fc_norm", Identity()), Identity)
    facts: dict[str, Any] = dict(
        architecture=PLAIN if distilled else model.pretrained_cfg["architecture"],
        class_token=class_token,
        registers=int(distilled) + (0 if registers is None else registers.shape[1]),
        position="none" if model.pos_embed is None else "learned",
        class_position=rows > 0,
        position_resize="relative_spline" if relates else "bicubic_antialias",
        final_norm="all" if not isinstance(model.norm, Identity) else "pooled" if pooled else "none",
        pool="cls" if class_token and model.global_pool in ("token", "", "map") else "avg",
    )
    if relates:
        facts["relative_position"] = "shared" if model.rel_pos_bias is not None else "per_block"
    return facts


def _block(model: nn.Module) -> dict[str, Any]:
    block = model.blocks[0]
    attention, mlp = block.attn, block.mlp
    biases = [attention.qkv if attention.qkv is not None else attention.q_proj, attention]
    # fc2 takes the hidden channels of an Eva, which is made by them; a plain ViT is made by what fc1 gives
    hidden = mlp.fc2.in_features if isinstance(model, Eva) else getattr(mlp, "fc1_g", None) or mlp.fc1
    return dict(
        heads=attention.num_heads,
        mlp_hidden=hidden if isinstance(hidden, int) else hidden.out_features,
        qkv_bias=any(getattr(part, name, None) is not None for part in biases for name in ("bias", "q_bias")),
        layer_scale=getattr(block, "gamma_1", None) is not None or hasattr(getattr(block, "ls1", None), "gamma"),
        norm_eps=block.norm1.eps,
    )


def _eva(model: Eva) -> dict[str, Any]:
    """Facts that only an Eva has a choice of."""
    block = model.blocks[0]
    attention, mlp = block.attn, block.mlp
    normed = {
        "query_norm": attention.q_norm,
        "attention_norm": attention.norm,
        "mlp_norm": mlp.norm,
        "first_norm": model.norm_pre,
    }
    return dict(
        key_bias=isinstance(attention, AttentionRope),
        split_qkv=attention.qkv is None,
        mlp="gated" if isinstance(mlp, SwiGLU) else "gated_packed" if isinstance(mlp, GluMlp) else "plain",
        norm_after=isinstance(block, EvaBlockPostNorm),
        **{name: not isinstance(norm, Identity) for name, norm in normed.items()},
        **_rotary(model.rope),
    )


def _rotary(rope: nn.Module | None) -> dict[str, Any]:
    if rope is None:
        return {}
    reference = getattr(rope, "ref_feat_shape", None) or (0, 0)
    if reference[0] != reference[1]:
        raise ValueError(f"its rotary positions refer to a grid of {reference[0]} x {reference[1]}, which is no square")
    return dict(
        rotary=ROTARY[type(rope)],
        rotary_base=float(rope.temperature),
        rotary_grid=reference[0],
        rotary_offset=float(getattr(rope, "grid_offset", 0.0)),
        rotary_first="row" if rope.grid_indexing == "ij" else "column",
        rotary_pairs="halves" if getattr(rope, "rotate_half", False) else "neighbours",
    )


@dataclass(frozen=True)
class TimmModel(ForeignFile):
    """A timm model laid out like a file, with the facts that timm knows of it and what it computes."""

    spec: ViTSpec
    preparation: Preparation
    size: tuple[int, int]  # of timm's images, of which the patches may leave some pixels out
    tokens: torch.Tensor  # forward_features of the synthetic image, (1, P+L, D)


def recognise(file: ForeignFile) -> bool:
    """A trunk by timm's names, with its heads or without, whose positions are not those of another source."""
    tensors = trunk_of(file, rf"{CLASSIFIER}|attn_pool\..*|dist_token|head_dist\.(weight|bias)")
    return bool(tensors) and not beyond(tensors) and kind_in(tensors) in ("learned", "none")


def open_model(reference: str) -> TimmModel:
    """The model that timm calls `reference`, with its pretrained weights. ValueError says why it cannot be loaded."""
    kind, colon, place = reference.partition(":")
    if not colon:
        _spec_of_name(reference)  # before its weights are fetched
    try:
        if kind == "local-dir":
            names = [path.name for path in Path(place).glob("*")]
            model = _filled(reference, Path(place) / _weights_among(names, place))
        else:
            with cache_alone_if_unreachable():
                if kind == "hf-hub":
                    model = _filled(reference, _from_hub(place))
                else:
                    model = timm.create_model(reference, pretrained=True)
    except (RuntimeError, OSError, ArithmeticError, AssertionError, LookupError, *CONFUSED) as error:
        reason = " ".join(str(error).split())[:LONGEST_REASON] or type(error).__name__
        if isinstance(error, KeyError):
            reason = f"its config.json has no {reason}, so it is another library's, which is not read"
        if isinstance(error, json.JSONDecodeError):
            reason = f"its config.json is not valid JSON ({reason}); download or save it again"
        raise ValueError(f"timm cannot load {reference!r}: {reason}") from error
    return timm_model(model, reference)


def is_importable(network: torch.nn.Module) -> bool:
    """Whether a module is one of timm's ViTs that an export can carry."""
    try:
        return isinstance(network, CLASSES) and bool(spec_of(network, "the module"))
    except ValueError:
        return False


def timm_model(model: torch.nn.Module, reference: str) -> TimmModel:
    """A model of timm's with the weights that it has. ValueError says why it cannot be imported."""
    model.eval()
    spec, size = spec_of(model, reference), tuple(model.patch_embed.img_size)
    tensors = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    with torch.inference_mode():
        tokens = model.forward_features(synthetic_image(size).float())
    return TimmModel(
        path=Path(reference),
        sha256=digest_of_tensors(tensors),
        tensors=tensors,
        facts={"licence": model.pretrained_cfg.get("license")},
        spec=spec,
        preparation=_preparation(model, spec.size[0] / size[0]),
        size=size,
        tokens=tokens.clone(),
    )


def _filled(reference: str, weights: Path) -> torch.nn.Module:
    tensors = read_foreign(weights).tensors
    source, _, place = reference.partition(":")
    _, name, settings = (load_model_config_from_hf if source == "hf-hub" else load_model_config_from_path)(place)
    if timm.is_model(name) and name not in timm.list_models(module=FAMILY):
        raise ValueError(f"it is a {name}; timm's VisionTransformer, Beit and Eva can be imported")
    depth = (settings or {}).get("depth", 0)
    if not isinstance(depth, int) or depth > len(tensors):
        raise ValueError(f"its config.json says depth={depth!a:.40}, and {weights.name} holds {len(tensors)} tensors")
    with torch.device("meta"), skip_init():  # shapes must fit before memory is taken for them
        model = timm.create_model(reference, pretrained=False)
        model.load_state_dict(tensors, strict=True, assign=True)
    spec_of(model, "it")  # its grid too: rotary tables are in no file
    with skip_init():
        model = timm.create_model(reference, pretrained=False)
    model.load_state_dict(tensors, strict=True)
    return model


def _from_hub(repository: str) -> Path:
    """Download the weights of a hub repository, `user/name` or `user/name@revision`."""
    name, _, revision = repository.partition("@")
    weights = _weights_among(list_repo_files(name, revision=revision or None), "the repository")
    return Path(hf_hub_download(name, weights, revision=revision or None))


def _weights_among(names: Collection[str], where: str) -> str:
    """Name of the weights file among `names`. ValueError if there is none."""
    if weights := [name for name in WEIGHTS if name in names]:
        return weights[0]
    raise ValueError(f"there is no {' or '.join(WEIGHTS)} in {where}")


def convert(branch: BranchTensors) -> Conversion:
    tensors, options = branch.take_trunk(RENAMES), branch.options
    if isinstance(branch.file, TimmModel):
        if options.heads or options.statistics or options.architecture:
            raise ValueError("timm says the heads, statistics and architecture of its own models: leave these options")
        return Conversion(
            spec=branch.file.spec,
            tensors=tensors,
            preparation=branch.file.preparation,
            check=partial(_check, model=branch.file),
        )
    if options.statistics is None:
        raise ValueError(
            "no tensor tells the image statistics, which differ between timm's models; use "
            "--statistics imagenet (as DeiT), half (as timm's own ImageNet-21k weights) or clip"
        )
    index = branch.file.facts.get("version", 0) == 2  # CheckpointSaver stores the last epoch's; before, it added 1
    return Conversion(spec=_spec_of_file(branch, tensors), tensors=tensors, epochs=branch.epochs(last=index))


def _spec_of_file(branch: BranchTensors, tensors: dict[str, torch.Tensor]) -> ViTSpec:
    """Spec of a file: sizes from its tensors, the rest from the architecture that the user or the file names.

    Without a name, only models whose tensors determine them are accepted: timm has others that share their tensors
    but differ in activation, head count or LayerNorm eps.
    """
    if any(name.endswith("relative_position_bias_table") for name in tensors):
        return relative_vit(branch, tensors)
    if name := branch.options.architecture or _named(branch.file):
        return _spec_by_name(branch, tensors, name)
    unusual = "norm_pre.weight" in tensors or "blocks.0.attn.q_norm.weight" in tensors
    if unusual or "cls_token" not in tensors or not {"norm.weight", "fc_norm.weight"} & {*tensors}:
        raise ValueError(
            "no tensor tells the activation, head count and norms of such a model; use bench import with "
            "--architecture NAME, timm's name of the model"
        )
    rows = tensors["pos_embed"].shape[1] if "pos_embed" in tensors and tensors["pos_embed"].ndim == 3 else 0
    return plain_vit(
        branch,
        tensors,
        heads={width: heads for width, heads in HEADS.items() if width != 1536},  # 16 or 24
        class_position=isqrt(rows) ** 2 != rows,  # no_embed_class: positions of patches alone
        registers=tensors["reg_token"].shape[1] if "reg_token" in tensors and tensors["reg_token"].ndim == 3 else 0,
        qkv_bias="blocks.0.attn.qkv.bias" in tensors,
        layer_scale="blocks.0.ls1.gamma" in tensors,
        position_resize="bicubic_antialias",
    )


def _named(file: ForeignFile) -> str | None:
    """timm's name of the model, as its train.py writes it."""
    name = file.facts.get("arch")
    return name if isinstance(name, str) and timm.is_model(name) else None


def _spec_by_name(branch: BranchTensors, tensors: dict[str, torch.Tensor], name: str) -> ViTSpec:
    """Spec of the named model, at the image size of its position table."""
    named = _spec_of_name(name)
    sizes = shown_sizes(branch, tensors)
    for key, size in sizes.items():
        if size != getattr(named, key):
            raise ValueError(f"{key} of the tensors is {size}, that of {name} is {getattr(named, key)}")
    if "fc_norm.weight" in tensors and "norm.weight" not in tensors:
        named = replace(named, final_norm="pooled", pool="avg")
    rows = tensors["pos_embed"].shape[1] - named.prefix * named.class_position if "pos_embed" in tensors else 0
    if rows in (0, named.grid[0] * named.grid[1]):
        return named
    return replace(named, image_size=square(branch, rows, f"{rows} positions are left for patches:") * named.patch_size)


def _spec_of_name(name: str) -> ViTSpec:
    """Spec of the timm model `name`, built without weights. ValueError for unknown or unsupported models."""
    if not timm.is_model(name):
        known = timm.list_models(module=FAMILY, pretrained="." in name)  # names of weights have a dot
        raise ValueError(f"timm has no model {name!r}{did_you_mean(name, known, 'docs/timm.md')}")
    stem, _, tag = name.partition(".")
    if tag and name not in (known := timm.list_pretrained(f"{stem}.*")):
        raise ValueError(f"timm has no weights {name!r}; it has {', '.join(known) or f'none of {stem}'}")
    with torch.device("meta"), skip_init():
        return spec_of(timm.create_model(name, num_classes=0), name)


def _check(export: ViTExport, model: TimmModel) -> None:
    """ValueError unless our network computes what timm's did: a model may have settings that no tensor shows."""
    height, width = export.spec.size
    with torch.inference_mode():
        ours = export.build()(synthetic_image(model.size)[..., :height, :width].float())[0]
    worst = (ours - model.tokens).abs().max() / model.tokens.abs().max()
    if not worst < AGREEMENT:
        raise ValueError(
            f"{model.path}: features differ from timm's by {worst:.2g}: it has settings beyond those of "
            f"{export.spec.architecture} (another activation, say), which an export cannot carry"
        )


def _preparation(model: torch.nn.Module, read: float) -> Preparation:
    """read: the share of an image's side that the patches cover; the rest of it is cropped instead."""
    settings = model.pretrained_cfg
    return Preparation(
        mean=tuple(settings["mean"]),
        std=tuple(settings["std"]),
        interpolation=settings["interpolation"],
        crop=settings["crop_pct"] * read,
    )
