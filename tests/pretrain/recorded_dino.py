"""DINO's recording (facebookresearch/dino 7c446df), and what puts DINO, or a method that must equal it, through it."""

import json
from collections.abc import Callable
from dataclasses import replace

import torch
from recorded import ROOT, close, fill, progress, recording, under
from torch import Tensor

from pretrain.loop.updates import Updates
from pretrain.method import TrainProgress
from pretrain.parts.self_distillation import POSITIONS, DistillationSettings, SelfDistillation
from pretrain.parts.sizes import VIT_SMOKE
from pretrain.recipe import Recipe
from pretrain.schedules import CosineTo

DATA, _ = recording("dino/golden.safetensors")
CONFIG = json.loads((ROOT / "dino/config.json").read_text())
FLOAT64 = 1e-6
STEPS = 2  # one each in the epochs 0 and 1


class Watched(Updates):
    """Keeps the student's gradients by their official names, before and after they were clipped."""

    def clipped(self) -> float:
        self.gradients = self.current()
        total = super().clipped()
        self.clipped_gradients = self.current()
        return total

    def current(self) -> dict[str, Tensor]:
        parameters = self.method.student.named_parameters()
        return {name.replace("vit.trunk.", "backbone."): p.grad.clone() for name, p in parameters if p.requires_grad}


class RecordedRates:
    """The recording keeps the official rate from falling under a floor, so that the first step moves."""

    def at(self, peak: float, progress: TrainProgress) -> float:
        return DATA["sched/lr"][progress.step].item()


def our_name(name: str) -> str:
    """Official parameter name -> ours."""
    return name.replace("backbone.", "vit.trunk.", 1)


def recipe(settings: type[DistillationSettings], **changes) -> Recipe:
    """The recorded training, with settings of this type."""
    sizes = dict(image_size=CONFIG["img"], patch_size=CONFIG["patch"], width=CONFIG["dim"], depth=CONFIG["depth"])
    chosen = settings(
        prototypes=CONFIG["out"],
        head_hidden=CONFIG["hidden"],
        bottleneck=CONFIG["bott"],
        fixed_prototypes=CONFIG["norm_last_layer"],
        teacher_momentum=CONFIG["mom"],
        teacher_temperature=CONFIG["tt"],
        teacher_temperature_start=CONFIG["wtt"],
        teacher_warmup=CONFIG["wtte"],
        local_size=CONFIG["loc"],
        local_crops=CONFIG["nloc"],
        drop_path=0.0,
        **changes,
    )
    return Recipe(
        source="recorded",
        spec=replace(VIT_SMOKE, **sizes, heads=CONFIG["heads"], mlp_hidden=4 * CONFIG["dim"], **POSITIONS),
        settings=chosen,
        epochs=CONFIG["epochs"],
        batch=CONFIG["gbatch"],
        lr=CONFIG["lr"],
        schedule=RecordedRates(),
        weight_decay=0.04,
        weight_decay_schedule=CosineTo(end=0.4),
        clip=CONFIG["clip"],
        clip_each=True,
    )


def recorded_state(method: SelfDistillation) -> dict[str, Tensor]:
    """The state before the first step, for `method`; what DINO does not have stays as it is."""
    state = {f"{branch}.{our_name(name)}": tensor for branch in ("student", "teacher")
             for name, tensor in under(DATA, f"{branch}0/").items()}  # fmt: skip
    return {**method.state_dict(), **state, "centre.center": DATA["center0"][0]}


def prepared(method: type[SelfDistillation], chosen: Recipe, dtype: torch.dtype = torch.float64) -> Watched:
    """The method in the recorded state."""
    built = method(chosen.spec, chosen.settings)
    fill(built, recorded_state(built))
    return Watched(built.to(dtype), chosen)


def views(step: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    crops = [DATA[f"step{step}/crop{number}"].to(dtype) for number in range(2 + CONFIG["nloc"])]
    return {"global": torch.stack(crops[:2], dim=1), "local": torch.stack(crops[2:], dim=1)}


def close_weights(method: SelfDistillation, limit: float) -> None:
    """The student and the teacher after both steps."""
    for branch in ("student", "teacher"):
        for name, end in under(DATA, f"{branch}{STEPS}/").items():
            ours = getattr(method, branch).get_parameter(our_name(name))
            if name.endswith("qkv.bias"):  # the keys' gradient is zero: what Adam makes of it is rounding noise
                width = len(ours) // 3
                ours, end = (torch.cat([bias[:width], bias[2 * width :]]) for bias in (ours, end))
            close(ours, end, limit, f"{branch} {name}")


def close_gradients(updates: Watched, step: int, limit: float) -> None:
    """Every parameter's gradient norm, before and after clipping; in the first step the gradients themselves too."""
    for kind, ours in (("gradnorm", updates.gradients), ("clipped_gradnorm", updates.clipped_gradients)):
        recorded = under(DATA, f"step{step}/{kind}/")
        assert recorded.keys() == ours.keys()
        for name, norm in recorded.items():
            close(ours[name].norm(), norm, limit, f"{kind} of {name}")
    for name, gradient in under(DATA, f"step{step}/grad/").items():
        close(updates.gradients[name], gradient, limit, f"gradient of {name}")


def run_recorded(updates: Watched, limit: float, given: Callable[[int], dict[str, Tensor]] = views) -> None:
    """Both steps of a method that must compute what DINO does. given: step -> its views."""
    for step in range(STEPS):
        logs = updates.run([given(step)], progress(step, CONFIG, 1))
        close(logs["loss"], DATA[f"step{step}/loss"], limit, f"loss {step}")
        close(updates.method.centre.center, DATA[f"step{step}/center_after"][0], limit, f"centre {step}")
        close_gradients(updates, step, limit)
