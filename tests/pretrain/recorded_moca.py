"""The recorded MOCA (valeoai/MOCA) in our terms: names, state, settings, and its draws as the noise we take."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from recorded import doubled, fill
from recordings import facts, tensors
from torch import Tensor

from pretrain.methods.moca import METHOD, Moca, Settings
from pretrain.parts.sizes import SINCOS, VIT_SMOKE
from pretrain.recipe import Recipe
from pretrain.schedules import Constant, CosineTo, WarmupCosine

TINY, CASES = (facts("moca/cases.json")[name] for name in ("tiny_config", "cases"))
TRAIN, MISC = facts("moca/train.json"), facts("moca/misc.json")
INITIAL, INPUTS = (doubled(tensors(f"moca/{name}.safetensors")) for name in ("init_state", "inputs"))
SPEC = replace(
    VIT_SMOKE, image_size=TINY["img_size"], patch_size=TINY["patch_size"], width=TINY["embed_dim"],
    depth=TINY["depth"], heads=TINY["num_heads"], mlp_hidden=len(INITIAL["encoder.blocks.0.mlp.fc1.weight"]),
    norm_eps=TINY["ln_eps"], **SINCOS, pool="avg",
)  # fmt: skip
NAMES = (
    (r"encoder_teacher\.", "teacher.trunk."),
    (r"encoder\.", "student.trunk."),
    (r"encoder_pred\.layers_w\.0\.", "generator."),
    (r"decoder_pred\.layers_w\.0\.", "predictions.0.target.generator."),
    (r"norm_cls_pt\.", "predictions.0.norm."),
    (r"mask_token_cls_pt", "predictions.0.decoder.mask_token"),
    (r"decoder_(embed|blocks|norm)_cls_pt\.", r"predictions.0.decoder.\1."),
    (r"bow_extractor\.bow_extractor\.0\._embedding_ptr", "codebook.oldest"),
    (r"bow_extractor\.bow_extractor\.0\._embedding", "codebook.words"),
    (r"bow_extractor\.bow_extractor\.0\._dist_norm_prev", "codebook.mu_of_update"),
    (r"bow_extractor\.bow_extractor\.0\._dist_norm", "codebook.mu"),
)
LAYERS = {"generator.b0_fc": "layers.0", "generator.b0_bn": "layers.1", "generator.b0_last_layer": "layers.3"}


def our_name(official: str) -> str | None:
    """Official name of a parameter or buffer -> ours; None for what has no place here: constants, a counter."""
    for pattern, ours in NAMES:
        if re.match(pattern, official):
            name = re.sub(pattern, ours, official, count=1)
            for theirs, layer in LAYERS.items():
                name = name.replace(theirs, layer)
            return None if name.endswith(".scale") else name
    return None


def settings(config: Mapping[str, Any], **changes: Any) -> Settings:
    """Settings of a recorded case or run."""
    found = Settings(
        words=TINY["num_words"], new_words=TINY["num_new_words"], border=TINY["skip_offset"],
        inv_delta=TINY["inv_delta"], mask_ratios=tuple(config["mask_ratio"]),
        decoder_mask_ratios=tuple(config["dec_mask_ratio"]), image_weight=config["img_weight"],
        early_layers=(config.get("early_layer", TINY["early_layer"]),), decoder_width=TINY["decoder_embed_dim"],
        decoder_depth=TINY["decoder_depth"], decoder_heads=TINY["decoder_num_heads"], kappa=TINY["kappa"],
        generator_ratio=TINY["pred_mlp_ratio"], teacher_momentum=TINY["momentum"],
        teacher_momentum_end=TINY["momentum"],
    )  # fmt: skip
    return replace(found, **changes)


# A case with both losses, where one is as good as the other.
BOTH = settings(next(case["config"] for case in CASES.values() if 0 < case["config"]["img_weight"] < 1))


def left_out(ours: Moca, name: str) -> bool:
    """Whether our name is of a loss that the method goes without, for which the code keeps a generator."""
    return (ours.generator is None and name.startswith("generator.")) or (
        not ours.predictions and name.startswith("predictions.")
    )


def method(chosen: Settings, avg_pooling: bool = True, dtype: torch.dtype = torch.float64) -> Moca:
    """Our method in the recorded initial state."""
    found = METHOD(replace(SPEC, pool="avg" if avg_pooling else "cls"), chosen).to(dtype)
    expected = found.state_dict()
    named = {ours: tensor for name, tensor in INITIAL.items() if (ours := our_name(name)) and not left_out(found, ours)}
    fill(found, {name: tensor.reshape(expected[name].shape) for name, tensor in named.items()})
    return found


def recipe(args: Mapping[str, Any], chosen: Settings, batch: int) -> Recipe:
    """The recorded optimiser: its rates belong to all processes' and parts' images together."""
    end = args["weight_decay_end"]
    return Recipe(
        source="recorded", spec=SPEC, settings=chosen, epochs=args["max_epochs"], batch=batch, lr=args["lr"],
        lr_batch=0, schedule=WarmupCosine(warmup=args["warmup_epochs"], stretch=args["lr_epochs_mul"]),
        weight_decay=args["weight_decay"], weight_decay_schedule=CosineTo(end=end) if end else Constant(),
        clip=args["clip_grad"] or 0.0,
    )  # fmt: skip


def run_settings(args: Mapping[str, Any], **changes: Any) -> Settings:
    """Settings of a recorded run."""
    return settings(
        args, teacher_momentum=args["alpha"], teacher_momentum_end=1.0 if args["alpha_cos"] else args["alpha"],
        generator_lr=args["lr_wgen"], generator_weight_decay=args["weight_decay_wgen"], **changes,
    )  # fmt: skip


def images(number: int) -> dict[str, Tensor]:
    """A recorded batch of two views."""
    return {"first": INPUTS[f"batch{number}.x1"], "second": INPUTS[f"batch{number}.x2"]}


def noise(*rounds: Tensor) -> Tensor:
    """Noise of each drawn round (V*B, L) -> ours (B, rounds, V, L)."""
    return torch.stack([each.unflatten(0, (2, -1)).transpose(0, 1) for each in rounds], dim=1)


def choices(view: Tensor, order: Tensor, tokens: Tensor) -> Tensor:
    """The view 1 or 2, a permutation of the images and an inner token for the first of them -> numbers (B, 3)."""
    grid = SPEC.grid[0] - 2 * TINY["skip_offset"]
    found = torch.full((len(order), 3), 0.75 if view.item() == 2 else 0.25, dtype=torch.float64)
    order, tokens = order.long(), tokens.long()
    found[order, 1] = torch.arange(len(order), dtype=torch.float64) / len(order)
    found[order[: len(tokens)], 2] = (tokens.double() + 0.5) / grid**2
    return found
