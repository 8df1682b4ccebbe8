"""iBOT against two recorded steps of its official training loop (bytedance/ibot da316d8), in float64; and its masks.

The first step is in the epoch that freezes the prototypes, the second after it. Large tensors are recorded in float32.
"""

import random

import numpy as np
import pytest
import torch
from recorded import EXACT, close
from recorded_distillation import FLOAT64, DistillationRecording, Watched
from recordings import matches
from torch import Tensor

from pretrain.methods.ibot import METHOD, Settings, patch_prototypes
from pretrain.parts.mask_shapes import VaryingMask
from pretrain.parts.teachers import Temperature
from pretrain.schedules import TableCosine, cosine

SHAPES = {"block": "block", "rand": "random"}
# README: of the sets of masks on larger grids, the official shape, ratios and spreads.
LARGER = {"0": ("block", 0.3, 0.0), "1": ("block", [0.0, 0.3], [0.0, 0.2]), "2": ("rand", [0.0, 0.3], [0.0, 0.2]),
          "3": ("rand", 0.65, 0.2)}  # fmt: skip


def several(value: float | list[float], count: int = 1) -> tuple[float, ...]:
    """The official options are a number or a list; one spread is that of all ratios."""
    return tuple(value) if isinstance(value, list) and len(value) > 1 else tuple(np.ravel(value).tolist()) * count


class IbotRecording(DistillationRecording):
    def settings(self) -> dict:
        """The recorded options that DINO does not have."""
        config, ratios = self.config, several(self.config["ratio"])
        return dict(
            patch_temperature=config["tpt"],
            patch_temperature_start=config["wtpt"],
            mask_shape=SHAPES[config["shape"]],
            mask_ratios=ratios,
            mask_spreads=several(config["var"], len(ratios)),
            shared_head="head.last_layer2.weight_v" not in self.branch("student0"),
            shared_head_teacher="head.last_layer2.weight_v" not in self.branch("teacher0"),
            cls_weight=config["l1"],
            patch_weight=config["l2"],
        )

    def centres(self) -> dict[str, Tensor]:
        return {"centre.center": self.data["center0/cls"][0], "patch_centre.center": self.data["center0/patch"][0, 0]}

    def views(self, step: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        masks = [self.data[f"step{step}/mask{number}"].bool().flatten(1) for number in range(2)]
        return {**super().views(step, dtype), "mask": torch.stack(masks, dim=1)}


IBOT = IbotRecording("ibot")
DATA, CONFIG = IBOT.data, IBOT.config


@pytest.fixture
def updates() -> Watched:
    return IBOT.prepared(METHOD, IBOT.recipe(Settings, **IBOT.settings()))


def test_recorded_updates(updates):
    for step in range(IBOT.steps):
        logs, method = updates.run([IBOT.views(step)], IBOT.now(step)), updates.method
        for name, weight in (("cls", CONFIG["l1"]), ("patch", CONFIG["l2"])):
            close(weight * logs[name], DATA[f"step{step}/loss_{name}"], FLOAT64, f"loss {name} {step}")
        close(logs["loss"], DATA[f"step{step}/loss_loss"], FLOAT64, f"loss {step}")
        close(method.centre.center, DATA[f"step{step}/center_cls_after"][0], FLOAT64, f"centre {step}")
        close(method.patch_centre.center, DATA[f"step{step}/center_patch_after"][0, 0], FLOAT64, f"centre {step}")
        IBOT.close_gradients(updates, step, FLOAT64)
    IBOT.close_weights(updates.method, FLOAT64)


def crop_major(outputs: Tensor) -> Tensor:
    """(B, V, ...) -> (V B, ...), the recording's order."""
    return outputs.transpose(0, 1).flatten(0, 1)


@torch.no_grad()
def test_forward_pass(updates):
    """All patches' outputs, of which the loss needs those of the masked ones."""
    method, views = updates.method, IBOT.views(0)
    masked = method.encode_masked(views["global"], views["mask"])
    whole = method.teacher.vit(views["global"].flatten(0, 1))[0].unflatten(0, views["mask"].shape[:2])
    for name, tokens in (("student", masked), ("teacher", whole)):
        head = getattr(method, name).head
        vectors = head.embed(tokens)
        close(crop_major(head.last_layer(vectors[:, :, 0])), DATA[f"step0/{name}_cls"], FLOAT64, name)
        close(crop_major(patch_prototypes(head)(vectors[:, :, 1:])), DATA[f"step0/{name}_patch"], FLOAT64, name)
    if CONFIG["nloc"]:
        local = method.student.head(method.student.class_tokens(views["local"]))
        close(crop_major(local), DATA["step0/student_local_cls"], FLOAT64, "local crops")


def test_schedules(updates):
    chosen, method = updates.recipe, updates.method
    rates = TableCosine(warmup=CONFIG["warm"], floor=1e-6)
    for step, rate in enumerate(DATA["sched/lr"]):
        at = IBOT.now(step)
        method.before_forward(at)
        close(max(rates.at(chosen.peak, at), CONFIG["lr0"]), rate, EXACT, f"rate {step}")
        decay = chosen.weight_decay_schedule.at(chosen.weight_decay, at)
        close(decay, DATA["sched/wd"][step], EXACT, f"weight decay {step}")
        close(cosine(CONFIG["mom"], 1.0, at.step / at.steps), DATA["sched/momentum"][step], EXACT, f"momentum {step}")
        close(method.teacher_temperature, DATA["sched/teacher_temp"][at.epoch], EXACT, f"temperature {step}")
        close(method.patch_temperature, DATA["sched/teacher_patch_temp"][at.epoch], EXACT, f"temperature {step}")


@pytest.mark.parametrize("example", [found[0] for found in matches(r"sched/example_patch_temp_.*", DATA)])
def test_temperature_of_patches_that_are_masked_later(example):
    (found,) = matches(r"sched/example_patch_temp_mim_start(\d+)_warm(\d+)_ep(\d+)_(.+)to(.+)", [example])
    delay, warmup, epochs = (int(found[number]) for number in (1, 2, 3))
    temperature = Temperature(start=float(found[4]), end=float(found[5]), warmup=warmup, delay=delay)
    assert len(DATA[example]) == epochs
    for epoch, value in enumerate(DATA[example]):
        close(temperature.at(epoch), value, EXACT, f"epoch {epoch}")


def test_masks_of_the_steps():
    """In the official order: of every image every crop, the local ones too, for which masks are drawn in vain."""
    chosen = {name.removeprefix("mask_"): value for name, value in IBOT.settings().items() if name.startswith("mask_")}
    draw = VaryingMask(**chosen)
    for step in range(IBOT.steps):
        random.seed(CONFIG["seed"] + step), np.random.seed(CONFIG["seed"] + step)
        recorded = [DATA[f"step{step}/mask{number}"].bool() for number in range(2 + CONFIG["nloc"])]
        for image in range(CONFIG["B"]):
            for crop, masks in enumerate(recorded):
                assert torch.equal(draw(tuple(masks.shape[1:])), masks[image]), f"step {step}, {image}, {crop}"


@pytest.mark.parametrize("number", sorted({found[1] for found in matches(r"masks14/(\d+)_view\d+", DATA)}))
def test_masks_on_larger_grids(number):
    shape, ratio, spread = LARGER[number]
    ratios = several(ratio)
    draw = VaryingMask(shape=SHAPES[shape], ratios=ratios, spreads=several(spread, len(ratios)))
    random.seed(CONFIG["seed"] + 100 + int(number)), np.random.seed(CONFIG["seed"] + 200 + int(number))
    views = [DATA[found[0]].bool() for found in matches(rf"masks14/{number}_view\d+", sorted(DATA))]
    for image in range(len(views[0])):
        for masks in views:
            ours = draw(tuple(masks.shape[1:]))
            assert torch.equal(ours, masks[image]) and ours.sum() <= (max(ratios) + spread_of(spread)) * ours.numel()


def spread_of(spread: float | list[float]) -> float:
    return max(several(spread))
