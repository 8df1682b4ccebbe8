"""MSN against two recorded steps of its official training loop (facebookresearch/msn 4388dc1), in float64.

Large tensors are recorded in float32. The end states are compared without tensors whose gradient is zero in exact
arithmetic, since Adam makes steps of its rounding: keys' biases, and constants in front of a batch norm with the
running means that follow.
"""

from dataclasses import replace

import pytest
import torch
from recorded import EXACT, RecordedTraining, assert_close, count, doubled
from recordings import facts, matches, tensors, under

from pretrain.method import TrainProgress
from pretrain.methods.msn import METHOD, POSITIONS, STRETCH, Settings
from pretrain.parts.teachers import sinkhorn
from pretrain.schedules import CosineTo, CountedCosine

DATA, CONFIG = doubled(tensors("msn/golden.safetensors")), facts("msn/config.json")
STEPS = count(DATA, "step{}/loss")
WITH_NORMS = "encoder0/fc.bn1.weight" in DATA
LAYERS = ("fc1", "bn1", "gelu1", "fc2", "bn2", "gelu2", "fc3")
LAYERS = [layer for layer in LAYERS if WITH_NORMS or not layer.startswith("bn")]
NOISE = ("norm.bias", "fc.fc1.bias", "fc.fc2.bias", "fc.bn1.running_mean", "fc.bn2.running_mean") if WITH_NORMS else ()
FLOOR, DECAY = 1e-6, (0.04, 0.4)  # of the official configuration, which the recording keeps


def by_network(data):
    """Rename tensors of both networks and the prototypes to one prefix and "encoder.", "target." or "prototypes".

    Gradients are recorded of the encoder without such a name.
    """
    renamed = {}
    for step in (0, STEPS):
        renamed |= {f"model{step}/prototypes": data[f"prototypes{step}"]}
        for network in ("encoder", "target"):
            renamed |= under(data, f"{network}{step}/", f"model{step}/{network}.")
    for step in range(STEPS):
        gradient = data[f"step{step}/prototypes_grad"]
        renamed |= {f"gradient{step}/prototypes": gradient, f"norm{step}/prototypes": gradient.norm()}
        renamed |= under(data, f"step{step}/grad/", f"gradient{step}/encoder.")
        renamed |= under(data, f"step{step}/gradnorm/", f"norm{step}/encoder.")
    return data | renamed


class TestMsn(RecordedTraining):
    data, method, design = by_network(DATA), METHOD, POSITIONS
    config = CONFIG | {"batch": CONFIG["B"], "wd": DECAY[0]}
    NORM, END, ROUNDING = 1e-6, 1e-6, EXACT
    start, end, rate, norm, gradient = "model0/", f"model{STEPS}/", "step{}/lr_used", "norm{}/", "gradient{}/"
    losses = {"loss": "step{}/loss"} | {name: f"step{{}}/loss_{name}" for name in ("ce", "memax", "entropy")}
    steps = STEPS
    # There is one more momentum than the stretched training has updates.
    steps_per_epoch = next(
        n for n in range(1, 1000) if int(n * CONFIG["epochs"] * STRETCH) + 1 == len(DATA["sched/momentum"])
    )
    test_decayed_parameters = None

    def our_name(self, official):
        network, _, name = official.partition(".")
        if network == "prototypes":
            return network
        ours = {"encoder": "anchor", "target": "target"}[network]
        if not name.startswith("fc."):
            return f"{ours}.vit.trunk.{name}"
        _, layer, kind = name.split(".")
        return f"{ours}.head.{LAYERS.index(layer)}.{kind}"

    def settings(self, **changes):
        config = self.config
        settings = Settings(
            prototypes=config["K"],
            head_hidden=config["hidden"],
            head_width=config["out"],
            head_norm="bn" if WITH_NORMS else "none",
            mask_ratio=config["patch_drop"],
            random_views=config["rand_views"],
            focal_views=config["focal_views"],
            focal_size=config["loc"],
            temperature=config["tau"],
            sharpening=config["start_T"],
            sharpening_end=config["final_T"],
            sinkhorn=config["sinkhorn"],
            memax_weight=config["memax_w"],
            entropy_weight=config["ent_w"],
            teacher_momentum=config["start_m"],
        )
        return replace(settings, **changes)

    def schedule(self):
        start = self.config["start_lr"] / self.config["lr"]
        return CountedCosine(warmup=self.config["warm"], start=start, floor=FLOOR)

    def recipe(self):
        decay = CosineTo(end=DECAY[1], stretch=STRETCH, first=1)
        return replace(super().recipe(), weight_decay_schedule=decay)

    def views(self, forward):
        """The recorded views, and for every image noise whose order is the recorded permutation of the patches."""
        random, focal = self.config["rand_views"], self.config["focal_views"]
        target, *anchors = (self.data[f"step{forward}/view{number}"] for number in range(1 + random + focal))
        views = {"target": target, "random": torch.stack(anchors[:random], dim=1)}
        if focal:
            views["focal"] = torch.stack(anchors[random:], dim=1)
        patches = (self.config["img"] // self.config["patch"]) ** 2
        order = self.data.get(f"step{forward}/patch_perm", torch.arange(patches))
        noise = order.argsort().double() / patches
        return views | {"noise": noise.expand(len(target), random, patches)}

    def outputs(self, method, step):
        """All outputs in the recorded order of views: (B, V, d) -> (V B, d)."""
        views = self.views(step)
        method.before_forward(self.progress(step))
        vectors, target = method.anchor_vectors(views), method.target(views["target"])
        yield f"step{step}/anchor_z", vectors.transpose(0, 1).flatten(0, 1)
        shares = method.similarities(vectors).softmax(dim=-1)
        yield f"step{step}/anchor_probs", shares.transpose(0, 1).flatten(0, 1)
        yield f"step{step}/target_h", target
        yield f"step{step}/targets", method.targets(views["target"])
        method.settings = self.settings(sinkhorn=False)
        yield f"step{step}/targets_sharpened", method.targets(views["target"])

    def check_rates(self, updates, progress, step):
        super().check_rates(updates, progress, step)
        assert_close(updates.rates(progress)[1], self.data[f"step{step}/wd_used"], EXACT, f"weight decay {step}")

    def check_update(self, updates, logs, step):
        recorded = under(self.data, f"step{step}/")
        assert logs["prototypes_used"] == recorded["num_targets_used"]
        clipped = [updates.raw[name].norm() for group in updates.groups if group.clipped for name in group.parameters]
        total = recorded["encoder_total_gradnorm_before_clip"]
        assert_close(torch.stack(clipped).norm(), total, self.NORM, f"gradient norm {step}")
        if "prototypes_after" in recorded:
            assert_close(updates.method.prototypes, recorded["prototypes_after"], self.END, f"prototypes {step}")

    def rounding(self):
        return [f"{network}.{name}" for network in ("encoder", "target") for name in NOISE]

    def test_schedule(self):
        """Sharpening and momentum of a complete training; the peak is the recorded rate's."""
        updates = self.begin()
        for step in range(self.config["epochs"] * self.steps_per_epoch):
            progress = self.progress(step - self.config.get("epoch", 0) * self.steps_per_epoch)
            updates.method.before_forward(progress)
            assert_close(updates.method.sharpening, self.data["sched/sharpen_T"][step], EXACT, f"sharpening {step}")
            momentum = updates.method.momentum(progress)
            assert_close(momentum, self.data["sched/momentum"][step], EXACT, f"momentum {step}")
        assert updates.recipe.peak == self.config["lr"]


@pytest.mark.parametrize("output", matches(r"sinkhorn/output(\d+)", DATA), ids=lambda match: match[0])
def test_sinkhorn_equals_the_recorded_one(output):
    assert_close(sinkhorn(DATA["sinkhorn/input"], int(output[1])), DATA[output[0]], TestMsn.LOSS, output[0])


EXAMPLES = matches(r"sched/example_(lr|wd)_(?:warm(\d+)_)?T(\d+)_(\d+)steps", DATA)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda match: match[0])
def test_schedules_equal_the_recorded_examples(example):
    """With the rates and decays of the official configuration, in epochs of one update."""
    kind, warmup, end, steps = example[1], float(example[2] or 0), int(example[3]), int(example[4])
    rates = CountedCosine(warmup=warmup, start=0.2, floor=FLOOR, stretch=end / steps)
    decays = CosineTo(end=DECAY[1], stretch=end / steps, first=1)
    schedule, peak = (rates, 1e-3) if kind == "lr" else (decays, DECAY[0])
    for step, value in enumerate(DATA[example[0]]):
        progress = TrainProgress(step=step, steps_per_epoch=1, epochs=steps)
        assert_close(schedule.at(peak, progress), value, EXACT, f"{kind} {step}")
