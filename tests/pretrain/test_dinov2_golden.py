"""DINOv2 against recorded steps of its official training loop (facebookresearch/dinov2 b8931f7), in float64."""

import random

import pytest
import torch
from recorded import EXACT, assert_close, case_classes, doubled
from recorded_distillation import crop_major
from recorded_masked import RecordedMasked, mask_order
from recordings import facts, tensors, under

from pretrain.methods.dinov2 import METHOD, Settings, SubsetDropPath, patch_head
from pretrain.parts.losses import koleo_loss
from pretrain.parts.mask_shapes import stratified_masks
from pretrain.parts.teachers import sinkhorn_targets
from pretrain.schedules import TableCosine

DATA, CONFIG = doubled(tensors("dinov2/golden.safetensors")), facts("dinov2/config.json")


class RecordedDinoV2(RecordedMasked):
    folder, method = "dinov2", METHOD
    losses = {name: f"step{{}}/{name}" for name in ("loss", "cls", "patch", "koleo")}

    @classmethod
    def totals(cls, step, prefix):
        """As displayed: KoLeo's loss is weighted and halved, and so is the patch loss."""
        config, cls_loss = cls.config, step["dino_local_crops_loss"] + step["dino_global_crops_loss"]
        koleo, patch = 2 * step["koleo_loss"], 2 * step["ibot_loss"]
        return {
            f"{prefix}cls": cls_loss,
            f"{prefix}patch": patch,
            f"{prefix}koleo": koleo / (config["koleo"] or 1),
            f"{prefix}loss": config["dino"]["w"] * cls_loss + koleo + config["ibot"]["w"] * patch,
        }

    def settings(self):
        config = self.config
        return Settings(
            **self.shared_settings(),
            prototypes=config["dino"]["K"],
            freeze_prototypes=config["freeze"],
            teacher_temperature_start=config["temp"][0],
            teacher_temperature=config["temp"][1],
            teacher_warmup=config["temp"][2],
            sinkhorn=config["centering"] == "sinkhorn_knopp",
            patch_prototypes=config["ibot"]["K"],
        )

    def schedule(self):
        return TableCosine(warmup=self.config["warm"], floor=self.config["min_lr"])

    def centres(self, prefix):
        recorded = under(self.data, prefix)
        names = {"dino": "centre.center", "ibot": "patch_centre.center"}
        return {names[name]: tensor.flatten() for name, tensor in recorded.items()}

    def first_state(self, method):
        return super().first_state(method) | self.centres("center0/")

    def outputs(self, method, step):
        views = self.views(step)
        method.before_forward(self.progress(step))
        for name, centre in self.centres(f"step{step}/center_used/").items():
            assert_close(method.get_buffer(name), centre, self.END, name)
        masks = views["mask"]
        targets, patch_targets, _ = method.teacher_targets(views["global"], masks)
        yield f"step{step}/cls_targets_swapped", crop_major(targets.flip(1)), self.NORM
        yield f"step{step}/patch_targets", mask_order(patch_targets, masks), self.NORM
        classes, local, patches = method.student_tokens(views)
        yield f"step{step}/global_logits", crop_major(method.student.head(classes)), self.NORM
        yield f"step{step}/local_logits", crop_major(method.student.head(local)), self.NORM
        yield f"step{step}/patch_logits", mask_order(patch_head(method.student)(patches[masks]), masks), self.NORM

    def test_temperatures_and_frozen_prototypes(self):
        updates, config = self.begin(), self.config
        for step in range(config["epochs"] * config["epoch_len"]):
            now = self.progress(step - config["first"])
            updates.method.before_forward(now)
            assert_close(updates.method.teacher_temperature, self.data["sched/teacher_temp"][step], EXACT, f"{step}")
            updates.set_rates(now)
            for ours, group in zip(updates.groups, updates.optimizer.param_groups, strict=True):
                if ours.zero_lr_epochs:
                    assert_close(group["lr"], self.data["sched/last_layer_lr"][step], EXACT, f"prototypes' rate {step}")


globals().update(case_classes(RecordedDinoV2, CONFIG["cases"]))


@pytest.mark.parametrize("case", range(len(CONFIG["mask_cases"])))
def test_masks_equal_the_recorded_ones(case):
    side, _, _, crops, ratios, probability, seed = CONFIG["mask_cases"][case]
    random.seed(seed)
    batches = under(DATA, f"masks/case{case}/batch")
    assert batches
    for batch in sorted(batches):
        crops = len(batches[batch])
        masks = stratified_masks(crops, int(crops * probability), tuple(ratios), (side, side))
        assert torch.equal(masks, batches[batch].view_as(masks)), batch


@pytest.mark.parametrize("case", range(len(CONFIG["drop_cases"])))
@pytest.mark.parametrize("scaled", [False, True])
def test_stochastic_depth_equals_the_recorded_one(case, scaled, monkeypatch):
    data = under(DATA, f"drop/case{case}/")
    name = "list_perm" if scaled else "perm"
    monkeypatch.setattr(torch, "randperm", lambda images, device=None: data[name])
    gamma = data["gamma"] if scaled else 1.0
    ours = SubsetDropPath(data["rate"].item()).add(data["x"], lambda kept: gamma * torch.tanh(kept @ data["w"]))
    assert_close(ours, data["list_out_scaled" if scaled else "out"], EXACT)


@pytest.mark.parametrize("temperature", CONFIG["loss_case"]["temps"])
@pytest.mark.parametrize("kind", ["cls", "patch"])
def test_sinkhorn_equals_the_recorded_one(kind, temperature):
    assert_close(sinkhorn_targets(DATA["loss/logits"], temperature), DATA[f"loss/sk_{kind}_{temperature}"], 1e-9)


def test_koleo_equals_the_recorded_one():
    vectors = DATA["loss/koleo_x"].clone().requires_grad_()
    loss = koleo_loss(vectors)
    loss.backward()
    assert_close(loss, DATA["loss/koleo"], 1e-9, "loss")
    assert_close(vectors.grad, DATA["loss/koleo_grad"], 1e-9, "gradient")
