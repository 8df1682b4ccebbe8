"""CAE in the states that its recordings begin with, and their names."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from recorded import fill, recording
from recordings import under
from torch import Tensor, nn

from pretrain.loop.updates import Updates
from pretrain.methods.cae import METHOD, SCALED, Settings
from pretrain.parts.sizes import VIT_SMOKE
from pretrain.recipe import Recipe
from pretrain.schedules import TableCosine

NAMES = (
    (r"^encoder\.", "vit.trunk."),
    (r"^teacher\.", "teacher.trunk."),
    (r"(trunk\.blocks\.\d+\.)gamma_([12])$", r"\1ls\2.gamma"),
    (r"(trunk\.blocks\.\d+\.attn\.)[qv]_bias$", r"\1qkv.bias"),  # with a third for keys, which no softmax sees
    (r"^mask_token$", "regressor.mask_token"),
    (r"^encoder_to_decoder\.", "embed.0."),
    (r"^encoder_to_decoder_norm\.", "embed.1."),
    (r"^pretext_neck\.norm\.", "regressor.norm."),
    (r"^pretext_neck\.norm2\.", "decoder.norm."),
    (r"^pretext_neck\.head\.", "decoder.head."),
    (r"^pretext_neck\.(regressor|decoder)_blocks\.", r"\1.blocks."),
    (r"\.norm1_([qkv])\.", r".norm_\1."),
    (r"\.norm2_cross\.", ".norm2."),
    (r"\.(cross_attn)\.", ".attn."),
    (r"\.mlp_cross\.", ".mlp."),
    (r"\.(gamma_[12])_cross$", r".\1"),
)


def our_name(name: str) -> str:
    """Official parameter name -> ours."""
    for pattern, ours in NAMES:
        name = re.sub(pattern, ours, name)
    return name


def ours(given: Mapping[str, Tensor], official: str) -> Tensor:
    """What the official tensor is in ours, by our names: itself, or a third of a trunk's joint bias."""
    tensor = given[our_name(official)]
    thirds = {"q_bias": 0, "v_bias": 2} if our_name(official).endswith("qkv.bias") else {}
    kind = official.rpartition(".")[2]
    return tensor.chunk(3)[thirds[kind]] if kind in thirds else tensor


def state(official: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A recorded state dict as one of ours."""
    found = {our_name(name): tensor for name, tensor in official.items() if not name.endswith("v_bias")}
    for name, values in official.items():
        queries = official.get(name.replace("v_bias", "q_bias"))
        if name.endswith("v_bias"):
            joint = our_name(name).endswith("qkv.bias")
            found[our_name(name)] = torch.cat([queries, torch.zeros_like(queries), values]) if joint else values
    return found


def cases() -> dict[str, tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]]:
    """Name -> the start and data, the configuration and what was recorded. One without a start of its own has those of
    the main case."""
    main, config = recording("cae/cae_step.safetensors")
    more, configs = recording("cae/cae_variants.safetensors")
    names = ("betas", "eps")  # the variants have the main case's
    found = {"step": (main, config, main)}
    for name, own in configs.items():
        tensors = under(more, f"{name}.")
        own = {key: config[key] for key in names} | own
        found[name] = (tensors if "table" in tensors else main, own, tensors)
    return found


def is_newer(config: Mapping[str, Any]) -> bool:
    """Whether the case is of Atten4Vis/CAE, whose target encoder is the encoder itself, without a momentum: it says how
    names change."""
    return "keys" in config


def recipe(config: dict[str, Any], start: dict[str, Tensor], **changes: Any) -> Recipe:
    """Whatever is not under `encoder` in the recording is by its own configuration."""
    spec = replace(VIT_SMOKE, image_size=config["img"], patch_size=config["patch"], width=config["dim"],
                   depth=config["depth"], heads=config["heads"],
                   mlp_hidden=len(start["model0.encoder.blocks.0.mlp.fc1.weight"]),
                   **SCALED | {"layer_scale": config["init"] > 0})  # fmt: skip
    settings = Settings(
        codes=config["vocab"], num_mask_patches=config["n_mask"], min_mask_patches_per_block=config["min_blk"],
        decoder_width=config["ddim"], decoder_heads=config["dheads"], regressor_depth=config["rdepth"],
        decoder_depth=config["ddepth"], decoder_layer_scale_start=config["dinit"], align_weight=config["align"],
        target_momentum=0.0 if is_newer(config) else config["momentum"], drop_path=0.0, **changes,
    )  # fmt: skip
    return Recipe(
        source="recorded", spec=spec, settings=settings, epochs=config["epochs"], batch=config["batch"],
        lr=config["lr"], lr_batch=0, weight_decay=config["wd"], betas=tuple(config["betas"]),
        clip=config["clip"] or 0.0, schedule=TableCosine(warmup=config["warmup"], floor=config["min_lr"]),
    )  # fmt: skip


def first_state(config: dict[str, Any], start: dict[str, Tensor], **changes: Any) -> Updates:
    """CAE in the recorded first state, on the recorded table; its tokenizer takes tokens for pictures."""
    chosen = recipe(config, start, **changes)
    method = METHOD(chosen.spec, chosen.settings).double()
    method.tokenizer = nn.Identity()
    fill(method, state(under(start, "model0.")))
    method.positions.copy_(start["table"][1:])
    return Updates(method, chosen)


def views(start: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    return {"image": start[f"in{step}.image"], "picture": start[f"in{step}.tokens"].flatten(1),
            "mask": start[f"in{step}.mask"].flatten(1).bool()}  # fmt: skip
