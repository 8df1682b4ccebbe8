"""data2vec against recorded steps of its official loop (facebookresearch/data2vec_vision af9a363), in float64."""

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

from pretrain.loop.updates import Updates
from pretrain.method import TrainProgress
from pretrain.methods.data2vec import METHOD, Settings
from pretrain.parts.sizes import RELATIVE, VIT_SMOKE
from pretrain.recipe import Recipe
from pretrain.schedules import TableCosine

DATA, CONFIG = recording("data2vec/data2vec_step.safetensors")
# The recording is float32. Losses and outputs are as close as its README measures; gradients and what Adam makes of
# them have its limits.
LOSS, NORM, END = 1e-6, 1e-4, 5e-5
HIDDEN = len(DATA["student0.blocks.0.mlp.fc1.weight"])
OWN = ("mask_token", "lm_head.weight", "lm_head.bias")  # beside the encoder; the official teacher's serve nothing


def our_name(name: str) -> str:
    """Official name of a parameter of the student -> ours."""
    return name if name in OWN else f"student.trunk.{name}"


def without_index(recorded: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A recorded state less the index of the bias table, which is made from the window size."""
    return {name: tensor for name, tensor in recorded.items() if not name.endswith("relative_position_index")}


def student(prefix: str) -> dict[str, torch.Tensor]:
    return {our_name(name): tensor for name, tensor in without_index(under(DATA, prefix)).items()}


def teacher(prefix: str) -> dict[str, torch.Tensor]:
    recorded = without_index(under(DATA, prefix))
    return {f"teacher.trunk.{name}": tensor for name, tensor in recorded.items() if name not in OWN}


def recipe() -> Recipe:
    spec = replace(VIT_SMOKE, image_size=CONFIG["img"], patch_size=CONFIG["patch"], width=CONFIG["dim"],
                   depth=CONFIG["depth"], heads=CONFIG["heads"], mlp_hidden=HIDDEN,
                   **RELATIVE | {"layer_scale": CONFIG["init_values"] > 0})  # fmt: skip
    settings = Settings(
        target_layers=tuple(CONFIG["layers"]), post_target_layer_norm=CONFIG["post_ln"], l1_beta=CONFIG["beta"],
        ema_decay=CONFIG["ema"], ema_decay_init=CONFIG["ema_init"], ema_start_at=CONFIG["ema_start_at"],
        num_mask_patches=CONFIG["n_mask"], min_mask_patches_per_block=CONFIG["min_blk"],
        max_mask_patches_per_block=CONFIG["max_blk"] or CONFIG["n_mask"],
        layer_scale_start=CONFIG["init_values"] or Settings.layer_scale_start,
        drop_path=0.0, attn_drop=0.0,
    )  # fmt: skip
    return Recipe(
        source="recorded", spec=spec, settings=settings, epochs=CONFIG["epochs"], batch=CONFIG["batch"],
        lr=CONFIG["lr"], lr_batch=0, schedule=TableCosine(warmup=CONFIG["warmup"], floor=CONFIG["min_lr"]),
        weight_decay=CONFIG["wd"], betas=tuple(CONFIG["betas"]), clip=CONFIG["clip"] or 0.0,
    )  # fmt: skip


def start(dtype: torch.dtype = torch.float64) -> Updates:
    """data2vec in the recorded first state."""
    chosen = recipe()
    method = METHOD(chosen.spec, chosen.settings).to(dtype)
    fill(method, student("student0.") | teacher("ema0."))
    return Updates(method, chosen)


def views(step: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    return {"image": DATA[f"in{step}.image"].to(dtype), "mask": DATA[f"in{step}.mask"].flatten(1)}


def test_forward_pass():
    method, image, mask = start().method, DATA["in0.image"], DATA["in0.mask"].flatten(1).bool()
    outputs = method.teacher(image, layers=method.settings.target_layers, norm=False)
    for layer, tokens in zip(method.settings.target_layers, outputs, strict=True):
        close(tokens[:, 1:], DATA[f"out0.teacher_block{layer}"], LOSS, f"the teacher's block {layer}")
    close(method.predict(image, mask), DATA["out0.student_masked"], LOSS, "prediction")


def test_full_gradients():
    updates = start()
    updates.back_from(views(0), progress(0, CONFIG, CONFIG["steps"]))
    close_gradients(updates.method, student("grad0."), NORM)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_recorded_updates(dtype):
    updates = start(dtype)
    for step in range(CONFIG["steps"]):
        now = progress(step, CONFIG, CONFIG["steps"])
        # They are kept in float32.
        close(updates.rates(now)[0], DATA[f"lr{step}"], LOSS, f"learning rate {step}")
        close(updates.method.momentum(now), DATA[f"ema_decay{step}"], LOSS, f"the teacher's decay {step}")
        logs = updates.run([views(step, dtype)], now)
        close(logs["loss"], DATA[f"loss{step}"], LOSS, f"loss {step}")
        close_norms(updates, DATA, NORM, step, our_name)
    ends = student("model_end.") | teacher("ema_end.")
    assert ends.keys() == updates.method.state_dict().keys()
    close_states(updates.method.state_dict(), ends, END)


def test_schedule():
    rates = DATA["sched.lr"]
    for number, rate in enumerate(rates):
        now = TrainProgress(step=number, steps_per_epoch=len(rates) // CONFIG["epochs"], epochs=CONFIG["epochs"])
        close(recipe().schedule.at(CONFIG["lr"], now), rate, EXACT, f"update {number}")


def test_decayed_parameters():
    check_decay(start(), CONFIG["decay"], CONFIG["no_decay"], our_name)
