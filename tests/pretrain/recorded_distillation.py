"""Recordings of DINO's and iBOT's training loops, in the layout that their READMEs describe."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from recorded import EXACT, RecordedTraining, assert_close, assert_norm_close, count, doubled
from recordings import facts, matches, tensors, under
from torch import Tensor

from pretrain.method import TrainProgress
from pretrain.methods import dino
from pretrain.methods.dino import POSITIONS, DistillationSettings
from pretrain.schedules import CosineTo, TableCosine, cosine


@dataclass(frozen=True)
class RecordedRates:
    """The recorded rates: recordings keep the official rate above a floor, so that the first step has an effect."""

    rates: Tensor

    def at(self, peak: float, progress: TrainProgress) -> float:
        return self.rates[progress.step].item()


def crop_major(outputs: Tensor) -> Tensor:
    """(B, V, ...) -> (V B, ...), the recording's order."""
    return outputs.transpose(0, 1).flatten(0, 1)


def without_second_names(recorded: dict[str, Tensor]) -> dict[str, Tensor]:
    """Drop iBOT's last_layer2 if it is a second name of last_layer."""
    first, second = (recorded.get(f"head.{layer}.weight_v") for layer in ("last_layer", "last_layer2"))
    shared = first is not None and second is not None and torch.equal(first, second)
    return {name: tensor for name, tensor in recorded.items() if not shared or ".last_layer2." not in name}


def by_network(data: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of both networks to one prefix and "student." or "teacher." before the official names.

    Gradients are recorded of the student without such a name.
    """
    steps, renamed = count(data, "step{}/crop0"), dict(data)
    for step in (0, steps):
        for network in ("student", "teacher"):
            tensors_of_network = without_second_names(under(data, f"{network}{step}/"))
            renamed |= {f"model{step}/{network}.{name}": tensor for name, tensor in tensors_of_network.items()}
    for step in range(steps):
        for kind in ("gradnorm", "clipped_gradnorm", "grad"):
            gradients = without_second_names(under(data, f"step{step}/{kind}/"))
            renamed |= {f"{kind}{step}/student.{name}": tensor for name, tensor in gradients.items()}
    return renamed


class RecordedDistillation(RecordedTraining):
    """Large tensors are recorded in float32. The first step is in the epoch that freezes the prototypes, the second
    after it."""

    folder: str
    options: type[DistillationSettings] = DistillationSettings
    changes: Mapping[str, Any] = {}  # of the settings
    design = POSITIONS
    NORM, END, ROUNDING = 1e-6, 1e-6, EXACT
    start, norm, gradient = "model0/", "gradnorm{}/", "grad{}/"
    unrecorded = r"(?!student\.|teacher\.).*"
    test_decayed_parameters = None

    def __init_subclass__(cls) -> None:
        if "folder" not in vars(cls):
            return
        cls.data = by_network(doubled(tensors(f"{cls.folder}/golden.safetensors")))
        config = facts(f"{cls.folder}/config.json")
        cls.config = config | {"batch": config["gbatch"], "wd": cls.data["sched/wd"][0].item()}
        cls.steps, cls.steps_per_epoch = count(cls.data, "step{}/crop0"), len(cls.data["sched/lr"]) // config["epochs"]
        cls.end = f"model{cls.steps}/"

    def centres(self, step: int | None) -> dict[str, Tensor]:
        """Our buffers before the first step (None), or after a step."""
        return {"centre.center": self.data["center0" if step is None else f"step{step}/center_after"][0]}

    def our_name(self, official):
        if official.endswith("backbone.masked_embed"):
            return "mask_token"  # a parameter of the student that our method keeps beside it
        return official.replace("backbone.", "vit.trunk.", 1)

    def first_state(self, method):
        """Tensors that are not recorded keep their values."""
        state = method.state_dict() | self.centres(None)
        return state | {name: tensor.view_as(state[name]) for name, tensor in self.named(self.start).items()}

    def settings(self):
        config, head = self.config, under(self.data, "student0/head.mlp.")
        norms = [name for name, tensor in head.items() if name.endswith("weight") and tensor.ndim == 1]
        with_batch_norms = any(name.endswith("running_mean") for name in head)
        settings = dict(
            prototypes=config["out"],
            head_layers=sum(tensor.ndim == 2 for tensor in head.values()),
            head_hidden=config["hidden"],
            head_norm="bn" if with_batch_norms else "ln" if norms else "none",
            bottleneck=config["bott"],
            fixed_prototypes=config["norm_last_layer"],
            teacher_momentum=config["mom"],
            teacher_temperature=config["tt"],
            teacher_temperature_start=config["wtt"],
            teacher_warmup=config["wtte"],
            local_size=config["loc"],
            local_crops=config["nloc"],
            drop_path=0.0,
        )
        return self.options(**settings | self.changes)

    def schedule(self):
        return RecordedRates(self.data["sched/lr"])

    def recipe(self):
        decay = CosineTo(end=self.decay_end())
        return replace(super().recipe(), lr_batch=256, weight_decay_schedule=decay, clip_each=True)

    def decay_end(self) -> float:
        """End of the recorded weight decay's half cosine, which its last step does not quite reach."""
        first, last = self.data["sched/wd"][[0, -1]].tolist()
        remaining = cosine(1.0, 0.0, 1 - 1 / len(self.data["sched/wd"]))
        return (last - remaining * first) / (1 - remaining)

    def views(self, forward):
        crops = [self.data[f"step{forward}/crop{number}"] for number in range(2 + self.config["nloc"])]
        views = {"global": torch.stack(crops[:2], dim=1)}
        return {**views, "local": torch.stack(crops[2:], dim=1)} if self.config["nloc"] else views

    def check_rates(self, updates, progress, step):
        """The schedule takes the recorded rates, so there is nothing to compare."""

    def check_update(self, updates, logs, step):
        """Compare the centres, and the norms of all gradients after each was clipped."""
        for name, recorded in self.centres(step).items():
            assert_close(updates.method.get_buffer(name), recorded, self.END, f"{name} {step}")
        norms = under(self.data, f"clipped_gradnorm{step}/")
        assert self.names(norms) >= (self.recorded(updates.after_clipping) if self.config["clip"] else set())
        for name, norm in norms.items():
            gradient = updates.after_clipping[self.our_name(name)]
            assert_norm_close(gradient, norm, self.NORM, f"{name}, clipped, step {step}", self.ROUNDING)

    def rounding(self):
        """Constants in front of a batch norm, whose gradients are rounding, and the running means that follow."""
        norms = under(self.data, f"gradnorm{self.steps - 1}/student.")
        constants = {name for name, norm in norms.items() if 0 < norm < self.ROUNDING}
        layers = [int(match[1]) for match in matches(r"head\.mlp\.(\d+)\.bias", constants)]
        constants |= {f"head.mlp.{layer + 1}.running_mean" for layer in layers}
        return {f"{network}.{name}" for network in ("student", "teacher") for name in constants}

    def test_schedule(self):
        recipe, method, data, config = self.recipe(), self.begin().method, self.data, self.config
        rates = TableCosine(warmup=config["warm"], floor=1e-6)
        temperatures = {"teacher_temperature": "teacher_temp", "patch_temperature": "teacher_patch_temp"}
        for step, rate in enumerate(data["sched/lr"]):
            now = self.progress(step)
            method.before_forward(now)
            assert_close(max(rates.at(recipe.peak, now), config["lr0"]), rate, EXACT, f"rate {step}")
            decay = recipe.weight_decay_schedule.at(recipe.weight_decay, now)
            assert_close(decay, data["sched/wd"][step], EXACT, f"weight decay {step}")
            momentum = cosine(config["mom"], 1.0, now.step / now.steps)
            assert_close(momentum, data["sched/momentum"][step], EXACT, f"momentum {step}")
            for ours, recorded in temperatures.items():
                if hasattr(method, ours):
                    assert_close(getattr(method, ours), data[f"sched/{recorded}"][now.epoch], EXACT, f"{ours} {step}")


class RecordedDino(RecordedDistillation):
    """DINO's recording (facebookresearch/dino 7c446df), which methods that extend DINO must repeat too."""

    folder, method = "dino", dino.METHOD
    losses = {"loss": "step{}/loss"}
