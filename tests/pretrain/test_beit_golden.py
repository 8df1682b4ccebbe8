"""BEiT against recorded steps of its official training loop (microsoft/unilm 768a3c8, beit/), in float64."""

from dataclasses import replace

import pytest
import torch
from recorded import (
    EXACT,
    check_decay,
    close,
    close_gradients,
    close_norms,
    close_states,
    fill,
    progress,
    recording,
)
from recordings import under
from torch import nn

from pretrain.loop.updates import Updates
from pretrain.method import TrainProgress
from pretrain.methods.beit import METHOD, Settings
from pretrain.parts.sizes import RELATIVE, VIT_SMOKE
from pretrain.recipe import Recipe
from pretrain.schedules import TableCosine

DATA, CONFIG = recording("beit/beit_step.safetensors")
# The recording is float32. Losses and outputs are as close as its README measures. Gradients and what Adam makes of
# them have its limits.
LOSS, NORM, END = 1e-6, 1e-4, 5e-5
HIDDEN = len(DATA["model0.blocks.0.mlp.fc1.weight"])


def our_name(name: str) -> str:
    """Official parameter name -> ours."""
    return name if name.startswith(("mask_token", "lm_head.")) else f"vit.trunk.{name}"


def state(prefix: str) -> dict[str, torch.Tensor]:
    """The recorded parameters under `prefix` by our names."""
    found = {name: tensor for name, tensor in under(DATA, prefix).items() if "relative_position_index" not in name}
    return {our_name(name): tensor for name, tensor in found.items()}


def recipe() -> Recipe:
    spec = replace(VIT_SMOKE, image_size=CONFIG["img"], patch_size=CONFIG["patch"], width=CONFIG["dim"],
                   depth=CONFIG["depth"], heads=CONFIG["heads"], mlp_hidden=HIDDEN,
                   **RELATIVE | {"layer_scale": CONFIG["init_values"] > 0})  # fmt: skip
    settings = Settings(codes=CONFIG["vocab"], num_mask_patches=CONFIG["n_mask"], drop_path=0.0,
                        min_mask_patches_per_block=CONFIG["min_blk"],
                        max_mask_patches_per_block=CONFIG["max_blk"] or CONFIG["n_mask"])  # fmt: skip
    return Recipe(
        source="recorded", spec=spec, settings=settings, epochs=CONFIG["epochs"], batch=CONFIG["batch"],
        lr=CONFIG["lr"], lr_batch=0, weight_decay=CONFIG["wd"], betas=tuple(CONFIG["betas"]),
        clip=CONFIG["clip"] or 0.0, schedule=TableCosine(warmup=CONFIG["warmup"], floor=CONFIG["min_lr"]),
    )  # fmt: skip


def start(dtype: torch.dtype = torch.float64) -> Updates:
    """BEiT in the recorded first state; its tokenizer takes tokens for pictures."""
    chosen = recipe()
    method = METHOD(chosen.spec, chosen.settings).to(dtype)
    method.tokenizer = nn.Identity()
    fill(method, state("model0."))
    return Updates(method, chosen)


def views(step: int, dtype: torch.dtype = torch.float64) -> dict:
    return {"image": DATA[f"in{step}.image"].to(dtype), "picture": DATA[f"out{step}.tokens"],
            "mask": DATA[f"in{step}.mask"].flatten(1)}  # fmt: skip


def test_logits():
    logits = start().method.predict(DATA["in0.image"], DATA["in0.mask"].flatten(1).bool())
    close(logits, DATA["out0.logits_masked"], LOSS, "logits")


def test_full_gradients():
    method = start().method
    method(views(0)).loss.backward()
    close_gradients(method, state("grad0."), NORM)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_recorded_updates(dtype):
    updates = start(dtype)
    for step in range(CONFIG["steps"]):
        now = progress(step, CONFIG, CONFIG["steps"])
        close(updates.rates(now)[0], DATA[f"lr{step}"], EXACT, f"learning rate {step}")
        logs = updates.run([views(step, dtype)], now)
        close(logs["loss"], DATA[f"loss{step}"], LOSS, f"loss {step}")
        close_norms(updates, DATA, NORM, step, our_name)
    close_states(updates.method.state_dict(), state("model_end."), END)


def test_decayed_parameters():
    check_decay(start(), CONFIG["decay"], CONFIG["no_decay"], our_name)


def test_schedule():
    recorded = DATA["sched.lr"]
    per_epoch = len(recorded) // CONFIG["epochs"]
    for step, rate in enumerate(recorded):
        now = TrainProgress(step=step, steps_per_epoch=per_epoch, epochs=CONFIG["epochs"])
        close(recipe().schedule.at(CONFIG["lr"], now), rate, EXACT, f"update {step}")
