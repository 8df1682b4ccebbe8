"""iBOT against two recorded steps of its official training loop (bytedance/ibot da316d8), in float64; and its masks."""

import random

import numpy as np
import pytest
import torch
from recorded import EXACT, assert_close
from recorded_distillation import RecordedDistillation, crop_major
from recordings import matches

from pretrain.methods.ibot import METHOD, Settings, patch_prototypes
from pretrain.parts.mask_shapes import VaryingMask
from pretrain.parts.teachers import Temperature

SHAPES = {"block": "block", "rand": "random"}
# README: of the sets of masks on larger grids, the official shape, ratios and spreads.
LARGER = {
    "0": ("block", 0.3, 0.0),
    "1": ("block", [0.0, 0.3], [0.0, 0.2]),
    "2": ("rand", [0.0, 0.3], [0.0, 0.2]),
    "3": ("rand", 0.65, 0.2),
}


def several(value: float | list[float], count: int = 1) -> tuple[float, ...]:
    """The official options are a number or a list; one spread is that of all ratios."""
    return tuple(value) if isinstance(value, list) and len(value) > 1 else tuple(np.ravel(value).tolist()) * count


class TestIbot(RecordedDistillation):
    folder, method, options = "ibot", METHOD, Settings
    losses = {"loss": "step{}/loss_loss"}

    def settings(self):
        """Including the recorded options that DINO does not have."""
        config, ratios = self.config, several(self.config["ratio"])
        self.changes = dict(
            patch_temperature=config["tpt"],
            patch_temperature_start=config["wtpt"],
            mask_shape=SHAPES[config["shape"]],
            mask_ratios=ratios,
            mask_spreads=several(config["var"], len(ratios)),
            shared_head=self.shared("student"),
            shared_head_teacher=self.shared("teacher"),
            cls_weight=config["l1"],
            patch_weight=config["l2"],
        )
        return super().settings()

    def shared(self, network):
        return f"model0/{network}.head.last_layer2.weight_v" not in self.data

    def centres(self, step):
        cls, patch = (
            ("center0/cls", "center0/patch")
            if step is None
            else (f"step{step}/center_cls_after", f"step{step}/center_patch_after")
        )
        return {"centre.center": self.data[cls][0], "patch_centre.center": self.data[patch][0, 0]}

    def views(self, forward):
        masks = [self.data[f"step{forward}/mask{number}"].bool().flatten(1) for number in range(2)]
        return {**super().views(forward), "mask": torch.stack(masks, dim=1)}

    def outputs(self, method, step):
        """Outputs of all patches, not only of the masked ones that the loss uses."""
        views = self.views(step)
        masked = method.encode_masked(views["global"], views["mask"])
        unmasked = method.teacher.vit(views["global"].flatten(0, 1))[0].unflatten(0, views["mask"].shape[:2])
        for name, tokens in (("student", masked), ("teacher", unmasked)):
            head = getattr(method, name).head
            vectors = head.embed(tokens)
            yield f"step{step}/{name}_cls", crop_major(head.last_layer(vectors[:, :, 0]))
            yield f"step{step}/{name}_patch", crop_major(patch_prototypes(head)(vectors[:, :, 1:]))
        if self.config["nloc"]:
            local = method.student.head(method.student.class_tokens(views["local"]))
            yield f"step{step}/student_local_cls", crop_major(local)

    def check_update(self, updates, logs, step):
        super().check_update(updates, logs, step)
        for name, weight in (("cls", self.config["l1"]), ("patch", self.config["l2"])):
            assert_close(weight * logs[name], self.data[f"step{step}/loss_{name}"], self.LOSS, f"loss {name} {step}")

    def test_masks_of_the_steps_equal_the_recorded_ones(self):
        """In the official order: every crop of every image, including local ones, whose masks are not used."""
        settings = self.settings()
        draw = VaryingMask(shape=settings.mask_shape, ratios=settings.mask_ratios, spreads=settings.mask_spreads)
        for step in range(self.steps):
            random.seed(self.config["seed"] + step), np.random.seed(self.config["seed"] + step)
            crops = [self.data[f"step{step}/mask{number}"].bool() for number in range(2 + self.config["nloc"])]
            for image in range(self.config["B"]):
                for crop, masks in enumerate(crops):
                    assert torch.equal(draw(tuple(masks.shape[1:])), masks[image]), f"step {step}, {image}, {crop}"


DATA, CONFIG = TestIbot.data, TestIbot.config


@pytest.mark.parametrize("example", [match[0] for match in matches(r"sched/example_patch_temp_.*", DATA)])
def test_temperatures_of_delayed_masks_equal_the_recorded_ones(example):
    (match,) = matches(r"sched/example_patch_temp_mim_start(\d+)_warm(\d+)_ep(\d+)_(.+)to(.+)", [example])
    delay, warmup, epochs = (int(match[number]) for number in (1, 2, 3))
    temperature = Temperature(start=float(match[4]), end=float(match[5]), warmup=warmup, delay=delay)
    assert len(DATA[example]) == epochs
    for epoch, value in enumerate(DATA[example]):
        assert_close(temperature.at(epoch), value, EXACT, f"epoch {epoch}")


@pytest.mark.parametrize("number", sorted({match[1] for match in matches(r"masks14/(\d+)_view\d+", DATA)}))
def test_masks_on_larger_grids_equal_the_recorded_ones(number):
    shape, ratio, spread = LARGER[number]
    ratios = several(ratio)
    draw = VaryingMask(shape=SHAPES[shape], ratios=ratios, spreads=several(spread, len(ratios)))
    random.seed(CONFIG["seed"] + 100 + int(number)), np.random.seed(CONFIG["seed"] + 200 + int(number))
    views = [DATA[match[0]].bool() for match in matches(rf"masks14/{number}_view\d+", sorted(DATA))]
    for image in range(len(views[0])):
        for masks in views:
            ours = draw(tuple(masks.shape[1:]))
            assert torch.equal(ours, masks[image]) and ours.sum() <= (max(ratios) + spread_of(spread)) * ours.numel()


def spread_of(spread: float | list[float]) -> float:
    return max(several(spread))
