"""LUT against recorded steps of its official training loop (naver-ai/lut 4420a27), in float64.

The official teacher also averages decoder and predictor, which it never runs; ours does not have them.
"""

import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from elsewhere import in_processes
from PIL import Image
from recorded import EXACT, RecordedTraining, assert_close, recording
from recordings import under
from small_trainings import forward_pass

from engine.distributed import World
from pretrain.method import TrainProgress
from pretrain.methods.lut import METHOD, RECIPES, Settings
from pretrain.parts.batch_norm import synchronised
from pretrain.parts.masking import mask_at
from pretrain.recipe import SINCOS
from pretrain.schedules import WarmupCosine

DATA, CONFIG = recording("lut/lut_step.safetensors")
ACCUM, ACCUM_CONFIG = recording("lut/lut_accum.safetensors")
VARIANTS, VARIANTS_CONFIG = recording("lut/lut_variants.safetensors")
AUG, AUG_CONFIG = recording("lut/lut_aug.safetensors")
COUNT = "num_batches_tracked"
NAMES = (
    (r"decoder_(embed|blocks|norm)", r"base.decoder.\1"),
    (r"decoder_pred", "base.pixels"),
    (r"mask_token", "base.decoder.mask_token"),
    (r"head", "projector"),
    (r"predictor", "predictor"),
)
PROCESSES = next(count for count in range(2, CONFIG["batch"] + 1) if CONFIG["batch"] % count == 0)  # of the batch


def with_teachers(data):
    """Add the teacher's tensors to the student's under "ema.", without its unused counts of batches after updates."""
    ends = {name: tensor for name, tensor in data.items() if not name.endswith(COUNT)}
    data = data | under(data, "ema0.", "student0.ema.") | under(ends, "ema_after0.", "student_after0.ema.")
    return data | under(ends, "ema_end.", "student_end.ema.")


def accumulated(data):
    """The recording of several forward passes per update, with the total of each, from the start in `data`.

    The end has some tensors, and the norms of all under "norm_of." here. Norms that include the keys' biases are left
    out, since Adam makes steps of their rounding.
    """
    data = {name: tensor for name, tensor in data.items() if name.startswith(("in", "student0."))}
    for name, tensor in with_teachers(ACCUM).items():
        if tensor.ndim or "_end." not in name:
            data[name] = tensor
        elif not name.endswith(("attn.qkv.bias", COUNT)):
            data[re.sub(r"_end\.(ema\.)?(norm\.)?", r"_end.\1norm_of.", name)] = tensor
    for forward in range(ACCUM_CONFIG["steps"]):
        data[f"loss{forward}.total"] = ACCUM_CONFIG["accum_iter"] * ACCUM[f"loss{forward}.scaled_total"]
    return data


class TestLut(RecordedTraining):
    """The limits are those of the README. The recording is float32, and batch norms over a few images enlarge its
    rounding: to 1e-5, 2e-5 and 4e-6 at other sizes."""

    data, config = with_teachers(DATA), CONFIG
    method, design = METHOD, SINCOS
    dtypes = [torch.float64, torch.float32]
    LOSS = 1e-5
    start, end = "student0.", "student_end."
    losses = {"loss": "loss{}.total", "mim": "loss{}.mae", "context": "loss{}.bc"}
    unrecorded = rf".*pos_embed|teacher\..*{COUNT}"
    test_schedule = None

    def our_name(self, official):
        teacher, name = official.startswith("ema."), official.removeprefix("ema.").removeprefix("norm_of.")
        if name == "decoder_pos_embed" or (teacher and re.match(r"decoder_|mask_token|predictor", name)):
            return None
        for pattern, ours in NAMES:
            if re.match(pattern, name):
                name = re.sub(f"^{pattern}", ours, name)
                break
        else:
            name = f"base.vit.trunk.{name}"
        return "teacher." + name.removeprefix("base.") if teacher else name

    def part(self, official, ours):
        return ours.norm() if "norm_of." in official else ours

    def settings(self):
        config = self.config
        return Settings(
            mask_ratio=config["mask_ratio"],
            norm_pixels=config["norm_pix"],
            decoder_width=config["ddim"],
            decoder_depth=config["ddepth"],
            decoder_heads=config["dheads"],
            projector_depth=config["depth_head"],
            predictor_depth=config["depth_pred"],
            head_hidden=config["head_mlp"],
            head_norm=config["norm"].lower(),
            head_activation=config["act"].lower(),
            w_mim=config["w_mae"],
            w_bc=config["w_bc"],
            teacher_momentum=config["ema"],
        )

    def schedule(self):
        return WarmupCosine(warmup=self.config["warmup"], floor=self.config.get("min_lr", 0.0))

    def recipe(self):
        betas = tuple(self.config.get("betas", (0.9, 0.95)))  # the README's, if the configuration has none
        return replace(super().recipe(), betas=betas)

    def views(self, forward):
        return {name: self.data[f"in{forward}.{name}"] for name in ("view1", "view2", "noise")}

    def outputs(self, method, step):
        views, base = self.views(step), method.base
        student = []
        method.predictor.register_forward_hook(lambda module, inputs, output: student.append(output))
        forward_pass(method, views, self.progress(step))
        yield f"out{step}.student_out", torch.cat(student)  # view 1 before view 2
        yield f"out{step}.teacher_out", method.teacher_targets(torch.cat([views["view1"], views["view2"]]))
        if step:
            return
        ids = views["noise"].argsort(dim=1)
        for number, order in enumerate((ids, ids.roll(-base.visible, dims=1)), start=1):
            yield f"out0.latent{number}", base.encode(views[f"view{number}"], order)
            yield f"out0.mask{number}", mask_at(order[:, base.visible :], base.patches)
        prediction = base.pixels(base.decoder(base.encode(views["view1"], ids), ids))
        yield "out0.pred", prediction.gather(1, ids.argsort(dim=1).unsqueeze(-1).expand_as(prediction))

    def check_update(self, updates, logs, step):
        if step == 0 and "student_after0.cls_token" in self.data:
            self.variant(end="student_after0.", unrecorded=".*").check_end(updates.method)

    def accumulated_case(self):
        parts = ACCUM_CONFIG["accum_iter"]
        losses = {"loss": "loss{}.total", "context": "loss{}.bc"}
        case = self.variant(
            data=accumulated(self.data), config=ACCUM_CONFIG, parts=parts, losses=losses, unrecorded=".*"
        )
        case.steps = ACCUM_CONFIG["steps"] // parts
        return case

    def test_updates_of_several_forward_passes(self):
        """Their losses, the gradient's norm, the teacher's momentum and the end."""
        case = self.accumulated_case()
        case.run(case.begin())

    @pytest.mark.parametrize("recorded", ["lut_step", "lut_accum"])
    def test_teacher_momentum(self, recorded):
        """A move at the recorded forward pass leaves the recorded share of the teacher's distance."""
        case = self if recorded == "lut_step" else self.accumulated_case()
        for step in range(case.steps):
            progress = replace(case.progress(step), micro_batch=case.parts - 1)
            assert progress.step * case.parts + progress.micro_batch == case.data[f"ema_it{step}"]
            method = case.begin().method
            with torch.no_grad():
                method.base.vit.trunk.cls_token.fill_(0.0)
                method.teacher["vit"].trunk.cls_token.fill_(1.0)
            method.after_update(progress)
            distance = method.teacher["vit"].trunk.cls_token.mean()
            assert_close(distance, case.data[f"ema_decay{step}"], EXACT, f"momentum {step}")

    @pytest.mark.parametrize("name", VARIANTS_CONFIG["variants"])
    def test_variants_of_heads(self, name):
        recorded = under(VARIANTS, f"{name}.")
        data = {key: t for key, t in self.data.items() if not re.match(r"student0\.(ema\.)?(head|predictor)", key)}
        data |= under(recorded, "student0.", "student0.") | under(recorded, "ema0.", "student0.ema.")
        case = self.variant(data=data, config=CONFIG | VARIANTS_CONFIG["variants"][name])
        updates = case.begin()
        logs = updates.backward(case.views(0), case.progress(0))
        losses = under(recorded, "loss.")
        for ours, theirs in (("loss", "total"), ("mim", "mae"), ("context", "bc")):
            if theirs in losses:
                assert_close(logs[ours], losses.pop(theirs), self.LOSS, ours)
        assert set(losses) <= {"bc_teacher1_student2", "bc_teacher2_student1"}
        norms = under(recorded, "gradnorm.")
        norms.pop("total", None)
        case.check_pass(updates.method, norms, self.NORM, name)
        images = torch.cat([case.data["in0.view1"], case.data["in0.view2"]])
        assert_close(updates.method.teacher_targets(images), recorded["teacher_out"], self.LOSS, "teacher")

    def test_decayed_parameters(self):
        groups = self.begin().groups
        ours = {name for group in groups if group.weight_decay is not None for name in group.parameters}
        assert ours == self.names(self.config["no_decay"])

    @pytest.mark.slow
    def test_processes_with_shares_of_the_batch_repeat_the_updates(self, tmp_path):
        """Batch norms share their statistics, so the processes repeat the recorded updates."""
        in_processes(PROCESSES, run_a_share, tmp_path)
        assert len(list(tmp_path.iterdir())) == PROCESSES

    def test_the_teacher_still_moves_after_the_last_update(self):
        method = self.begin().method
        last = TrainProgress(step=11, steps_per_epoch=3, epochs=4)
        before = method.teacher["vit"].trunk.cls_token.clone()
        method.after_update(last)
        assert not torch.equal(before, method.teacher["vit"].trunk.cls_token)


class Share(TestLut):
    """The same on one process's share of every batch; only the loss is a mean over processes."""

    losses = {"loss": "loss{}.total"}

    def __init__(self, world: World) -> None:
        self.world = world

    def build(self, recipe):
        return synchronised(super().build(recipe))

    def views(self, forward):
        return {name: view.chunk(self.world.size)[self.world.rank] for name, view in super().views(forward).items()}


def run_a_share(world: World, folder: Path) -> None:
    case = Share(world)
    case.run(case.begin(world=world))
    (folder / str(world.rank)).write_text("equal")


@pytest.mark.parametrize("seed", AUG_CONFIG["seeds"])
def test_views_equal_the_recorded_ones_bit_for_bit(seed):
    """With Python's and torch's generators, for torchvision's and Pillow's versions of the recording."""
    size = AUG_CONFIG["input_size"]
    patch = next(side for side in range(size // 2, 0, -1) if size % side == 0)
    padding = AUG_CONFIG.get("crop_padding", Settings.crop_padding)  # that of main_lut.py
    spec = replace(RECIPES["smoke"].spec, image_size=size, patch_size=patch)
    make = METHOD(spec, replace(RECIPES["smoke"].settings, crop_padding=padding)).views()
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
    views = make(Image.fromarray(AUG["in.image_uint8_hwc"].numpy()))
    for name in ("view1", "view2"):
        assert torch.equal(views[name].double(), AUG[f"seed{seed}.{name}"]), name
    assert views["noise"].shape == ((size // patch) ** 2,)
