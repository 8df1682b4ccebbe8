"""MoCo-v3 against recorded steps of its official code (facebookresearch/moco-v3 c349e6e), in float64.

Large tensors are recorded in float32. Rate and momentum of a step are those of its fractional epoch.
"""

from dataclasses import replace

import torch
from recorded import EXACT, RecordedTraining, assert_close, count, doubled
from recordings import depth_of, facts, matches, steps_per_epoch, tensors, under

from engine.optimisers import Lars
from pretrain.method import TrainProgress
from pretrain.methods.mocov3 import METHOD, Settings
from pretrain.recipe import SINCOS_ROWS
from pretrain.schedules import WarmupCosine, cosine

DATA, CONFIG = doubled(tensors("mocov3/golden.safetensors")), facts("mocov3/config.json")
STEPS = count(DATA, "step{}/loss")
EPOCHS_OF = [CONFIG["e0"] + 0.5 * step for step in range(STEPS)]  # README: step k is at e0 + 0.5 k
PER_EPOCH = steps_per_epoch([*EPOCHS_OF, *DATA["sched/epochs"].tolist()])
LARS = dict(lr=0.6, weight_decay=1e-2, momentum=0.9)  # README


class TestMocov3(RecordedTraining):
    data, method, design = DATA, METHOD, SINCOS_ROWS
    config = CONFIG | {"batch": CONFIG["gbatch"], "depth": depth_of(under(DATA, "model0/base_encoder."))}
    NORM, END, ROUNDING = 1e-6, 1e-6, EXACT
    start, end, rate, norm, gradient = "model0/", f"model{STEPS}/", "step{}/lr", "step{}/gradnorm/", "step{}/grad/"
    losses = {"loss": "step{}/loss"}
    steps = STEPS
    test_decayed_parameters = None

    def our_name(self, official):
        network, _, name = official.replace("_encoder.", ".").partition(".")
        if name.startswith("head."):
            return f"{network}.{name.replace('head', 'projector', 1)}"
        return f"{network}.vit.trunk.{name}" if network in ("base", "momentum") else official

    def settings(self):
        return Settings(
            projector_hidden=len(self.data["model0/base_encoder.head.0.weight"]),
            projector_width=self.config["out"],
            teacher_momentum=self.config["m"],
            freeze_patches=self.config["freeze_patch"],
            temperature=self.config["T"],
        )

    def schedule(self):
        return WarmupCosine(warmup=self.config["warm"])

    def recipe(self):
        return replace(super().recipe(), lr_batch=256)

    def progress(self, step):
        return self.at(EPOCHS_OF[step])

    def at(self, epoch):
        step = round(epoch * PER_EPOCH)
        return TrainProgress(step=step, steps_per_epoch=PER_EPOCH, epochs=self.config["epochs"])

    def views(self, forward):
        return {name: self.data[f"step{forward}/x{number}"] for number, name in enumerate(("first", "second"), start=1)}

    def outputs(self, method, step):
        """Outputs of predictor and moving average, and both terms of the loss."""
        method.before_forward(self.progress(step))
        queries, keys = method.predictions(self.views(step)), method.targets(self.views(step))
        for number, (query, key, other) in enumerate(zip(queries, keys, reversed(keys), strict=True), start=1):
            yield f"step{step}/q{number}", query
            yield f"step{step}/k{number}", key
            yield f"step{step}/loss_term{number}", method.contrast(query, other)

    def rounding(self):
        """Means after a batch norm and a layer without bias."""
        ends = under(self.data, self.end).items()
        return [name for name, end in ends if end.is_floating_point() and 0 < end.norm() < self.ROUNDING]

    def check_end(self, method):
        super().check_end(method)
        for name in self.rounding():
            assert method.state_dict()[self.our_name(name)].norm() < self.ROUNDING, name

    def test_positions_and_frozen_parameters_are_the_official_ones(self):
        fresh = self.build(self.recipe())
        table = self.data["model0/base_encoder.pos_embed"]
        assert_close(fresh.base.vit.trunk.pos_embed, table, self.LOSS, "positions")
        trained = self.names(under(self.data, "step0/gradnorm/"))
        assert {name for name, p in fresh.named_parameters() if p.requires_grad} == trained

    def test_schedule(self):
        recipe, epochs = self.recipe(), self.data["sched/epochs"].tolist()
        for number, epoch in enumerate(epochs):
            rate = recipe.schedule.at(recipe.peak, self.at(epoch))
            assert_close(rate, self.data["sched/lr"][number], EXACT, f"rate at {epoch}")
        momenta = [*self.data["sched/momentum"], *(self.data[f"step{step}/momentum"] for step in range(STEPS))]
        for epoch, recorded in zip([*epochs, *EPOCHS_OF], momenta, strict=True):
            done = self.at(epoch).step / self.at(epoch).steps
            assert_close(cosine(self.config["m"], 1.0, done), recorded, EXACT, f"momentum at {epoch}")


def test_lars_equals_the_recorded_optimiser():
    names = [match[1] for match in matches(r"lars/(p\d+)_before", DATA)]
    assert names
    parameters = {name: torch.nn.Parameter(DATA[f"lars/{name}_before"].clone()) for name in names}
    optimizer = Lars(list(parameters.values()), **LARS)
    for step in range(count(DATA, f"lars/{names[0]}_after{{}}")):
        for name, parameter in parameters.items():
            parameter.grad = DATA[f"lars/grad{name[1:]}_step{step}"].clone()
        optimizer.step()
        for name, parameter in parameters.items():
            assert_close(parameter, DATA[f"lars/{name}_after{step}"], TestMocov3.END, f"{name} after {step}")
