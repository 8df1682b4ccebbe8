"""DINO's recording (facebookresearch/dino 7c446df), and what puts DINO, or a method that must equal it, through it."""

from collections.abc import Callable
from dataclasses import replace

import torch
from recorded import close, close_norm, close_states, count, doubled, fill, progress
from recordings import facts, tensors, under
from torch import Tensor

from pretrain.loop.updates import Updates
from pretrain.method import TrainProgress
from pretrain.parts.self_distillation import POSITIONS, DistillationSettings, SelfDistillation
from pretrain.parts.sizes import VIT_SMOKE
from pretrain.recipe import Recipe
from pretrain.schedules import CosineTo, cosine

DATA, CONFIG = doubled(tensors("dino/golden.safetensors")), facts("dino/config.json")
FLOAT64 = 1e-6  # large tensors are recorded in float32
ROUNDING = 1e-12  # a smaller recorded gradient norm is zero in exact arithmetic: the official code ran in float64
STEPS = count(DATA, "step{}/loss")
PER_EPOCH = len(DATA["sched/lr"]) // CONFIG["epochs"]


def decay_end() -> float:
    """Where the recorded weight decay's half cosine goes, which its last step does not quite reach."""
    first, last = DATA["sched/wd"][[0, -1]].tolist()
    left = cosine(1.0, 0.0, 1 - 1 / len(DATA["sched/wd"]))
    return (last - left * first) / (1 - left)


class Watched(Updates):
    """Keeps the student's gradients by their official names, before and after they were clipped."""

    def clipped(self) -> float:
        self.gradients = self.current()
        total = super().clipped()
        self.clipped_gradients = self.current()
        return total

    def current(self) -> dict[str, Tensor]:
        parameters = self.method.student.named_parameters()
        return {name: p.grad.clone() for name, p in parameters if p.requires_grad}


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
    sizes |= dict(heads=CONFIG["heads"], mlp_hidden=len(DATA["student0/backbone.blocks.0.mlp.fc1.weight"]))
    head = under(DATA, "student0/head.mlp.")
    chosen = dict(
        prototypes=CONFIG["out"],
        head_layers=sum(tensor.ndim == 2 for tensor in head.values()),
        head_hidden=CONFIG["hidden"],
        head_norm="bn" if any(name.endswith("running_mean") for name in head) else "none",
        bottleneck=CONFIG["bott"],
        fixed_prototypes=CONFIG["norm_last_layer"],
        teacher_momentum=CONFIG["mom"],
        teacher_temperature=CONFIG["tt"],
        teacher_temperature_start=CONFIG["wtt"],
        teacher_warmup=CONFIG["wtte"],
        local_size=CONFIG["loc"],
        local_crops=CONFIG["nloc"],
        drop_path=0.0,
    )
    return Recipe(
        source="recorded",
        spec=replace(VIT_SMOKE, **sizes, **POSITIONS),
        settings=settings(**chosen | changes),
        epochs=CONFIG["epochs"],
        batch=CONFIG["gbatch"],
        lr=CONFIG["lr"],
        schedule=RecordedRates(),
        weight_decay=DATA["sched/wd"][0].item(),
        weight_decay_schedule=CosineTo(end=decay_end()),
        clip=CONFIG["clip"] or 0.0,
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
    found = {"global": torch.stack(crops[:2], dim=1)}
    return {**found, "local": torch.stack(crops[2:], dim=1)} if CONFIG["nloc"] else found


def now(step: int) -> TrainProgress:
    return progress(step, CONFIG, PER_EPOCH)


def close_weights(method: SelfDistillation, limit: float) -> None:
    """The student and the teacher after all steps."""
    for branch in ("student", "teacher"):
        recorded = under(DATA, f"{branch}{STEPS}/")
        assert recorded
        close_states(getattr(method, branch).state_dict(), recorded, limit, our_name)


def close_gradients(updates: Watched, step: int, limit: float) -> None:
    """Every parameter's gradient norm, before and after clipping; in the first step the gradients themselves too."""
    for kind, ours in (("gradnorm", updates.gradients), ("clipped_gradnorm", updates.clipped_gradients)):
        recorded = {our_name(name): norm for name, norm in under(DATA, f"step{step}/{kind}/").items()}
        assert recorded.keys() == ours.keys()
        for name, norm in recorded.items():
            close_norm(ours[name], norm, limit, f"{name}, {kind}", ROUNDING)
    for name, gradient in under(DATA, f"step{step}/grad/").items():
        close(updates.gradients[our_name(name)], gradient, limit, f"gradient of {name}")


def run_recorded(updates: Watched, limit: float, given: Callable[[int], dict[str, Tensor]] = views) -> None:
    """All steps of a method that must compute what DINO does. given: step -> its views."""
    for step in range(STEPS):
        logs = updates.run([given(step)], now(step))
        close(logs["loss"], DATA[f"step{step}/loss"], limit, f"loss {step}")
        close(updates.method.centre.center, DATA[f"step{step}/center_after"][0], limit, f"centre {step}")
        close_gradients(updates, step, limit)
