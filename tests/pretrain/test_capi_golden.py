"""CAPI against recorded steps of its official code (facebookresearch/capi 98b4fa1), its masks and Sinkhorn-Knopp, in
float64."""

import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from recorded import EXACT, RecordedTraining, assert_close, case_classes, count, doubled
from recordings import facts, tensors, under

from pretrain.method import TrainProgress
from pretrain.methods.capi import METHOD, RECIPES, Settings, balanced_assignments, visible_and_predicted
from pretrain.schedules import TruncatedCosine

DATA, CONFIG = doubled(tensors("capi/golden.safetensors")), facts("capi/config.json")
SHAPES = {"InverseBlock": "inverse_block", "Block": "block", "Uniform": "random"}
NAMES = {
    r"^cluster\.layer\.": "clusters.",
    r"^student\.head\.last_layer\.": "head.",
    r"^student\.backbone\.": "vit.trunk.",
    r"^ema\.backbone\.": "teacher.trunk.",
    r"^vit\.trunk\.(mask_token|decoder\.)": r"predictor.\1",
    r"^predictor\.decoder\.": "predictor.",
    r"\.encoder\.": ".",
    r"\.registers$": ".reg_token",
    r"\.patch_embed\.": ".patch_embed.proj.",
    r"\.blocks\.(\d+)\.residual1\.fn\.rope\.freqs$": r".rope.freqs.\1",
    r"\.residual([12])\.norm\.": r".norm\1.",
    r"\.residual1\.fn\.": ".attn.",
    r"\.residual2\.fn\.": ".mlp.",
}


class RecordedCapi(RecordedTraining):
    method = METHOD
    LOSS, NORM, END = 1e-9, 1e-8, 1e-7
    start, end, norm, gradient = "model0/", "model_end/", "step{}/gradnorm/", "step{}/grad/"
    losses = {"prediction": "step{}/capi_loss", "clustering": "step{}/clustering_loss"}
    unrecorded = r".*\.norm\.weight"  # gains of ones
    steps_per_epoch = 1

    def __init_subclass__(cls) -> None:
        cls.config, recorded = CONFIG["cases"][cls.case], under(DATA, f"{cls.case}/")
        for when in ("0", "_end"):
            for part in ("student", "ema", "cluster"):
                recorded |= under(recorded, f"{part}{when}/", f"model{when}/{part}.")
        cls.data, cls.steps = recorded, cls.config["steps"]

    @pytest.fixture(autouse=True)
    def recorded_paths(self, monkeypatch):
        monkeypatch.setattr(torch, "randperm", lambda images: next(self.permutations))

    def our_name(self, official):
        if re.match(r"ema\.(head|backbone\.(decoder|mask_token))", official):
            return None  # no loss reads them
        for pattern, ours in NAMES.items():
            official = re.sub(pattern, ours, official)
        return official

    def layout(self, official, tensor):
        return tensor.unsqueeze(0) if official.endswith("mask_token") else tensor

    def settings(self):
        config = self.config
        momentum = config["sched"]["momentum"]
        return Settings(
            clusters=config["clusters"],
            cluster_bias=config["bias"],
            cluster_lr=config["sched"]["cluster_lr"]["base_value"] / config["sched"]["lr"]["base_value"],
            cluster_temperature=config["pt"],
            target_temperature=config["tt"],
            student_temperature=config["st"],
            sinkhorn_iterations=config["sk"],
            sinkhorn_by_position=config["positionwise"],
            mask_shape=SHAPES[config["mask"]],
            mask_roll=config["mask_kw"].get("roll", True),
            mask_ratio=config["ratio"],
            predicted_share=config["sub"],
            predictor_depth=config["ddepth"],
            drop_path=config["drop"],
            patch_lr=config["patch_mult"],
            norm_weight_decay=config["wd"] * config["ln_wd"],
            teacher_momentum=momentum["base_value"],
            teacher_momentum_start=momentum.get("start_warmup_value", 0.0),
            teacher_momentum_end=momentum["final_value"],
            momentum_warmup=momentum["warmup_iters"],
            momentum_cut=momentum.get("truncate_cos", 1.0),
        )

    def schedule(self):
        rates = self.config["sched"]["lr"]
        return TruncatedCosine(
            warmup=rates["warmup_iters"], floor=rates["final_value"], cut=rates.get("truncate_cos", 1.0)
        )

    def recipe(self):
        config, smoke = self.config, RECIPES["smoke"]
        spec = replace(
            smoke.spec,
            image_size=config["img"],
            patch_size=config["patch"],
            width=config["dim"],
            depth=config["depth"],
            heads=config["heads"],
            mlp_hidden=4 * config["dim"],
            registers=config["registers"],
            register_place={"edge": "border", "zeros": "corner"}[config["reg_coords"]],
            register_box="visible" if config["scale_reg"] else "image",
        )
        return replace(
            smoke,
            spec=spec,
            settings=self.settings(),
            epochs=config["iters"],
            batch=config["B"],
            lr=config["sched"]["lr"]["base_value"],
            schedule=self.schedule(),
            weight_decay=config["wd"],
        )

    def build(self, recipe):
        """With gradients of the rotary rates, which are recorded; their learning rate is 0."""
        method = super().build(recipe)
        for part in (method.vit.trunk, method.predictor):
            assert_close(part.rope.freqs[0].double(), self.data["rope_init"], 1e-6, "rotary rates")
            part.rope.requires_grad_(True)
        return method

    def first_state(self, method):
        gains = {name: torch.ones_like(t) for name, t in method.state_dict().items() if name.endswith(".norm.weight")}
        return gains | super().first_state(method)

    def progress(self, step):
        return TrainProgress(step=self.config["first"] + step, steps_per_epoch=1, epochs=self.config["iters"])

    def views(self, forward):
        """Also set the images that stochastic depth keeps."""
        kept = f"step{forward}/drop/{{:02}}"
        self.permutations = (self.data[kept.format(number)] for number in range(count(self.data, kept)))
        images = self.data[f"step{forward}/images"]
        patches = (self.config["img"] // self.config["patch"]) ** 2
        first = patches * torch.arange(len(images)).unsqueeze(1)
        ids = [self.data[f"step{forward}/{kind}_indices"].view(len(images), -1) for kind in ("visible", "predict")]
        return {"image": images, "ids": torch.cat(ids, dim=1) - first}

    def outputs(self, method, step):
        views = self.views(step)
        targets = method.assign(views["image"])[0]
        ids = views["ids"][:, method.mask.visible :]
        predicted = [rows[places] for rows, places in zip(targets, ids, strict=True)]
        yield f"step{step}/targets", torch.cat(predicted), self.NORM

    def check_rates(self, updates, progress, step):
        updates.set_rates(progress)
        for group, ours in zip(updates.optimizer.param_groups, updates.groups, strict=True):
            kind = "cluster_lr" if "clusters.weight" in ours.parameters else "lr"
            scale = 1.0 if kind == "cluster_lr" else ours.lr_scale
            assert_close(group["lr"], scale * self.data[f"sched/{kind}"][progress.step], EXACT, f"{kind} {step}")

    def test_decayed_parameters(self):
        """Factors on rate and decay of all groups; torch's default decay for the clusters."""
        decay = self.config["wd"]
        ours = {
            name: (group.lr_scale, decay if group.weight_decay is None else group.weight_decay)
            for group in self.begin().groups
            for name in group.parameters
        }
        for group in self.config["groups"]:
            for name in group["names"]:
                expected = (group["lr_multiplier"], pytest.approx(group["wd_multiplier"] * decay))
                assert ours.pop(self.our_name(f"student.{name}")) == expected, name
        assert {name: rates[1] for name, rates in ours.items()} == dict.fromkeys(
            self.names(under(self.data, "model0/cluster.", "cluster.")), 0.01
        )

    def test_momentum(self, monkeypatch):
        momenta = self.teacher_momenta(monkeypatch, self.config["iters"])
        assert_close(momenta, self.data["sched/momentum"][: len(momenta)], EXACT, "momentum")

    def test_evaluation(self):
        """Registers and patches of the trained student; the mean over all positions of the predictor's first block."""
        method = self.begin().method.eval()
        method.load_state_dict(method.state_dict() | self.named(self.end))
        images = self.data[f"step{self.steps - 1}/images"][: len(self.data["eval/global"])]
        with torch.no_grad():
            registers, patches = method.vit(images)[0].tensor_split([self.config["registers"]], dim=1)
            method.predictor.blocks = method.predictor.blocks[:1]
            method.predictor.rope.freqs = method.predictor.rope.freqs[:1]
            all_patches = torch.arange(patches.shape[1]).expand(len(images), -1)
            features = method.predict(images, None, all_patches)
        for name, ours in {"registers": registers, "map": patches, "global": features.mean(dim=1)}.items():
            assert_close(ours.view_as(self.data[f"eval/{name}"]), self.data[f"eval/{name}"], self.LOSS, name)


globals().update(case_classes(RecordedCapi, CONFIG["cases"]))


@pytest.mark.parametrize("case", range(len(CONFIG["masks"])))
def test_masks_equal_the_recorded_ones(case):
    side, shape, options, ratio, share, images, seed = CONFIG["masks"][case]
    settings = Settings(
        mask_shape=SHAPES[shape], mask_roll=options.get("roll", True), mask_ratio=ratio, predicted_share=share
    )
    draw = visible_and_predicted((side, side), settings)
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(seed)
    recorded = under(DATA, f"masks/case{case}/")
    predicted = (recorded["predict_indices"].view(images, -1)) % side**2
    for image in range(images):
        visible, ours = draw().split([draw.visible, draw.predicted])
        assert torch.equal(visible, (~recorded["mask"][image]).flatten().nonzero().flatten()), image
        assert torch.equal(ours, predicted[image]), image


@pytest.mark.parametrize("case", range(len(CONFIG["sk"])))
def test_sinkhorn_equals_the_recorded_one(case):
    _, _, _, iterations, temperature = CONFIG["sk"][case]
    recorded = under(DATA, f"sk/case{case}/")
    assert_close(balanced_assignments(recorded["x"] / temperature, iterations), recorded["out"], EXACT)
