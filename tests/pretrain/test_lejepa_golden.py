"""LeJEPA against recorded steps of its two official losses, and its statistic with gradients, in float64."""

import re
from typing import ClassVar

import pytest
import torch
from recorded import EXACT, RecordedTraining, assert_close, count, doubled
from recordings import facts, matches, tensors, under

import checkpoints.vit
from checkpoints.positions import resize_positions
from pretrain.methods.lejepa import METHOD, Settings, epps_pulley, random_directions
from pretrain.schedules import Constant, WarmupCosine

DATA, CONFIG = doubled(tensors("lejepa/golden.safetensors")), facts("lejepa/config.json")


def resize_in_float32(table, *sizes, **options):
    return resize_positions(table.float(), *sizes, **options).to(table)


class RecordedLeJepa(RecordedTraining):
    """One of the two losses; the directions are recorded."""

    method, unrecorded = METHOD, r".*num_batches_tracked"
    design = dict(position_resize="bicubic_antialias")
    NORM = END = 1e-7
    LOSS = 1e-9
    steps_per_epoch = 1
    start, end, norm, gradient = "net0/", "net_end/", "step{}/gradnorm/", "step{}/grad/"
    test_decayed_parameters = None
    case: ClassVar[str]
    directions: ClassVar[str]  # their recorded name
    prefixes: ClassVar[dict[str, str]]  # official prefixes -> ours

    def __init_subclass__(cls) -> None:
        cls.config = CONFIG[cls.case] | {"batch": CONFIG[cls.case]["N"], "epochs": CONFIG[cls.case].get("total", 100)}
        cls.data = {name: t for name, t in under(DATA, f"{cls.case}/").items() if "probe" not in name}

    def our_name(self, official):
        """torchvision's MLP numbers a dropout after each activation, which ours does not have."""
        theirs = next(name for name in self.prefixes if official.startswith(name))
        ours = self.prefixes[theirs] + official.removeprefix(theirs)
        return re.sub(r"(?<=projector\.1\.)\d+", lambda layer: str(int(layer[0]) // 4 * 3 + int(layer[0]) % 4), ours)

    def settings(self):
        config = self.config
        return Settings(
            sigreg_weight=config["lamb"],
            projector_hidden=tuple(config["hidden"]),
            projector_width=config["proj"],
            directions=self.data[f"step0/{self.directions}"].shape[1],
            drop_path=0.0,
            **self.options(),
        )

    def build(self, recipe):
        method = super().build(recipe)

        def recorded_directions(progress):
            method.directions = self.data[f"step{progress.step}/{self.directions}"]

        method.before_forward = recorded_directions
        return method

    def check_rates(self, updates, progress, step):
        recorded = self.data.get("sched/lr", [self.config["lr"]] * self.steps)
        assert_close(updates.rates(progress)[0], recorded[step], EXACT, f"learning rate {step}")

    def outputs(self, method, step):
        yield f"step{step}/proj", method.project(self.views(step)), 1e-7

    def rounding(self):
        """Constants in front of a batch norm, and the running means that follow."""
        norms = under(self.data, "step0/gradnorm/")
        means = {name for name in under(self.data, self.end) if name.endswith("running_mean")}
        return means | {name for name, norm in norms.items() if norm < 1e-12}


class TestMinimal(RecordedLeJepa):
    case, directions = "minimal", "directions_raw"
    losses = {"loss": "step{}/lejepa", "prediction": "step{}/inv", "sigreg": "step{}/sigreg"}
    prefixes = {"backbone.head": "projector.0", "backbone.": "vit.trunk.", "proj.": "projector.1."}

    def options(self):
        config = self.config
        return dict(
            embedding=config["emb"], points=config["knots"], global_crops=config["V"], local_crops=0, centre="all"
        )

    def schedule(self):
        return WarmupCosine(warmup=self.config["warm"], floor=self.config["eta_min"], start=0.01)

    def views(self, forward):
        return {"global": self.data[f"step{forward}/views"]}


class TestStablePretraining(RecordedLeJepa):
    case, directions = "views", "directions"
    losses = {"loss": "step{}/loss", "prediction": "step{}/inv_loss", "sigreg": "step{}/sigreg_loss"}
    prefixes = {"backbone.": "vit.trunk.", "projector.": "projector."}
    test_schedule = None

    @pytest.fixture(autouse=True)
    def resize_positions_in_float32(self, monkeypatch):
        """timm resizes position tables in float32 and ours in their own precision."""
        monkeypatch.setattr(checkpoints.vit, "resize_positions", resize_in_float32)

    def options(self):
        config = self.config
        return dict(
            embedding=config["bridge"],
            points=config["points"],
            t_max=config["t_max"],
            global_crops=config["G"],
            local_crops=config["Lc"],
            local_size=config["local"],
            convex=False,
            sigreg_over="all",
        )

    def schedule(self):
        return Constant()

    def views(self, forward):
        kinds = {"global": self.config["G"], "local": self.config["Lc"]}
        return {
            kind: torch.stack([self.data[f"step{forward}/{kind}{number}"] for number in range(crops)], dim=1)
            for kind, crops in kinds.items()
            if crops
        }


@pytest.mark.parametrize("case", range(count(DATA, "stat/case{}/t")))
def test_the_statistic_and_its_gradient_equal_the_recorded_ones(case):
    """For every direction; the recorded value is their mean or sum, where those below `clip` count as 0."""
    data, (t_max, points, _, reduction, clip) = under(DATA, f"stat/case{case}/"), CONFIG["stat"]["cases"][case]
    samples = DATA["stat/x"].clone().requires_grad_()
    statistics = epps_pulley(samples @ data["directions"], t_max, points)
    assert_close(statistics, data["per_slice"], 1e-9, "statistic")
    if clip is not None:
        statistics = epps_pulley(samples @ data["directions"], t_max, points, clip)
    value = statistics.mean() if reduction == "mean" else statistics.sum()
    assert_close(value, data["value"].sum(), 1e-9, "value")
    value.backward()
    assert_close(samples.grad, data["grad"], 1e-9, "gradient")


def test_the_statistic_of_several_views_equals_the_recorded_one():
    samples = DATA["stat/batched_x"].clone().requires_grad_()
    value = epps_pulley(samples @ DATA["stat/minimal_directions"], Settings.t_max, CONFIG["stat"]["knots"]).mean()
    assert_close(value, DATA["stat/minimal_value"], 1e-9, "value")
    value.backward()
    assert_close(samples.grad, DATA["stat/minimal_grad"], 1e-9, "gradient")


@pytest.mark.parametrize("name", [match[0] for match in matches(r"stat/case\d+/value_float32_own_directions", DATA)])
def test_directions_equal_those_of_the_package(name):
    """Drawn on the CPU from the package's seed, in float32."""
    case = int(name.split("/")[1].removeprefix("case"))
    t_max, points, count, reduction, clip = CONFIG["stat"]["cases"][case]
    samples = DATA["stat/x"].float()
    lines = samples @ random_directions(samples.shape[1], count, 7 * case)
    statistics = epps_pulley(lines, t_max, points, clip or 0.0)
    value = {"mean": statistics.mean, "sum": statistics.sum, None: lambda: statistics}[reduction]()
    assert_close(value, DATA[name], 1e-5, "value")
