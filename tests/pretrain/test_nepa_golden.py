"""NEPA against recorded steps of its official training (SihanXU/nepa 15ea494), in float64."""

import re
from dataclasses import replace

import torch
from recorded import EXACT, RecordedTraining, assert_close, case_classes, count, doubled
from recordings import facts, tensors, under

from pretrain.method import TrainProgress
from pretrain.methods.nepa import METHOD, RECIPES, Settings
from pretrain.parts.teachers import ema_update
from pretrain.schedules import WarmupCosine

DATA, CONFIG = doubled(tensors("nepa/golden.safetensors")), facts("nepa/config.json")
NAMES = {
    r"embeddings\.cls_token": "cls_token",
    r"embeddings\.patch_embeddings\.projection": "patch_embed.proj",
    r"encoder\.layer\.(\d+)\.": r"blocks.\1.",
    r"attention\.attention\.(query|key|value)\.": lambda match: f"attn.{match[1][0]}_proj.",
    r"attention\.attention\.": "attn.",
    r"attention\.output\.dense": "attn.proj",
    r"layernorm_before": "norm1",
    r"layernorm_after": "norm2",
    r"^layernorm": "norm",
    r"intermediate\.gate_proj": "mlp.fc1_g",
    r"output\.layer_scale\.lambda1": "gamma_2",
    r"layer_scale\.lambda1": "gamma_1",
    r"output\.dense": "mlp.fc2",
}


class RecordedNepa(RecordedTraining):
    method = METHOD
    LOSS, NORM, END = 1e-9, 1e-8, 1e-7
    start, end, norm, gradient = "model0/", "model_end/", "step{}/gradnorm/", "step{}/grad/"
    losses = {"loss": "step{}/loss"}
    unrecorded = r"teacher\..*|.*[qk]_norm\..*"
    steps_per_epoch = 1

    def __init_subclass__(cls) -> None:
        config = CONFIG["cases"][cls.case]
        model, recorded = config["model"], under(DATA, f"{cls.case}/")
        cls.config = config | {"batch": config["B"], "epochs": config["total"], "clip": config["max_norm"]}
        cls.steps = count(recorded, "step{}/loss")
        for step in range(cls.steps):
            recorded[f"step{step}/gradnorm/total"] = recorded[f"step{step}/total_norm"]
        cls.data = recorded
        cls.design = {
            "architecture": RECIPES["vit_b"].spec.architecture,
            "image_size": model["image_size"],
            "patch_size": model["patch_size"],
            "width": model["hidden_size"],
            "depth": model["num_hidden_layers"],
            "heads": model["num_attention_heads"],
            "mlp_hidden": model["intermediate_size"],
            "mlp": "gated" if model["use_gated_mlp"] else "plain",
            "layer_scale": model["layerscale_value"] is not None,
            "query_norm": model["qk_norm"],
            "norm_eps": model["layer_norm_eps"],
        }

    def our_name(self, official):
        name = official.removeprefix("vit_nepa.")
        for pattern, ours in NAMES.items():
            name = re.sub(pattern, ours, name)
        inner = "mlp.fc1_x" if self.design["mlp"] == "gated" else "mlp.fc1"
        return f"vit.trunk.{name.replace('intermediate.up_proj', inner)}"

    def settings(self):
        model = self.config["model"]
        trained = "all" if model["qk_norm_bias"] else "gain" if model["qk_norm_affine"] else "none"
        return Settings(query_norm_trained=trained, average_momentum=self.config["ema"])

    def schedule(self):
        return WarmupCosine(warmup=self.config["warmup"])

    def recipe(self):
        config = self.config
        return replace(
            RECIPES["smoke"],
            spec=replace(RECIPES["smoke"].spec, **self.design),
            settings=self.settings(),
            epochs=config["total"],
            batch=config["batch"],
            lr=config["lr"],
            schedule=self.schedule(),
            weight_decay=config["wd"],
            clip=config["max_norm"],
        )

    def first_state(self, method):
        return method.state_dict() | self.named(self.start)

    def begin(self, *args, **options):
        """With periods in float64 and the recorded factors on the positions."""
        updates = super().begin(*args, **options)
        updates.method.vit.trunk.rope.periods = 1 / self.data["inv_freq"]

        def recorded_factor(progress):
            updates.method.factor = self.factor(progress.step - self.config["first"])

        updates.method.before_forward = recorded_factor
        return updates

    def factor(self, step):
        """Factor by which the recorded coordinates are farther from the centre than those of the patches."""
        if f"step{step}/coords" not in self.data:
            return 1.0
        side = self.config["model"]["image_size"] // self.config["model"]["patch_size"]
        return (self.data[f"step{step}/coords"][0, 0] / (1 / side - 1)).item()

    def progress(self, step):
        return TrainProgress(step=self.config["first"] + step, steps_per_epoch=1, epochs=self.config["total"])

    def views(self, forward):
        return {"image": self.data[f"step{forward}/images"]}

    def outputs(self, method, step):
        if f"step{step}/output" not in self.data:
            return
        method.factor = self.factor(step)
        patches = method.vit.project(self.views(step)["image"])
        yield f"step{step}/embedding", patches, self.NORM, self.data[f"step{step}/embedding"][:, 1:]
        yield f"step{step}/output", method.predict(patches), self.NORM

    def check_rates(self, updates, progress, step):
        assert_close(updates.rates(progress)[0], self.data["sched/lr"][progress.step], EXACT, f"rate {step}")

    def check_update(self, updates, logs, step):
        if step == 0:  # the recorded average starts here, and not at the first update of the schedule
            ema_update(updates.method.teacher, updates.method.vit, 0.0)

    def check_end(self, method):
        super().check_end(method)
        average = {self.our_name(name): tensor for name, tensor in under(self.data, "ema_end/").items()}
        assert average
        for name, tensor in average.items():
            ours = method.state_dict()[name.replace("vit.", "teacher.", 1)]
            assert_close(ours, tensor.view_as(ours), self.END, f"average of {name}")

    def test_decayed_parameters(self):
        decayed = {name for g in self.begin().groups if g.weight_decay is None for name in g.parameters}
        assert decayed == self.names(self.config["decayed"])

    def test_positions(self):
        """The recorded positions are the patches' centres times one factor."""
        recorded = [step for step in range(self.steps) if f"step{step}/coords" in self.data]
        side = self.config["model"]["image_size"] // self.config["model"]["patch_size"]
        axis = (torch.arange(side, dtype=torch.float64) + 0.5) / side * 2 - 1
        for step in recorded:
            assert_close(torch.cartesian_prod(axis, axis) * self.factor(step), self.data[f"step{step}/coords"], 1e-12)
            assert 1 / 2 <= self.factor(step) <= 2


globals().update(case_classes(RecordedNepa, CONFIG["cases"]))
