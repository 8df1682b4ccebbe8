"""Recordings of DINO's and iBOT's training loops, and what puts a method that must equal one through it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from recorded import close, close_norm, close_states, count, doubled, fill, progress
from recordings import facts, matches, tensors, under
from torch import Tensor

from pretrain.loop.updates import Updates
from pretrain.method import TrainProgress
from pretrain.parts.heads import Norm
from pretrain.parts.self_distillation import POSITIONS, DistillationSettings, SelfDistillation
from pretrain.parts.sizes import VIT_SMOKE
from pretrain.recipe import Recipe
from pretrain.schedules import CosineTo, cosine

FLOAT64 = 1e-6  # large tensors are recorded in float32
ROUNDING = 1e-12  # a smaller recorded gradient norm is zero in exact arithmetic: the official code ran in float64
TOKEN = "mask_token"  # the one parameter that is the student's and lies beside it


class Watched(Updates):
    """Keeps the student's gradients by our names, before and after they were clipped."""

    recording: "DistillationRecording"

    def clipped(self) -> float:
        self.raw_gradients = self.current()
        total = super().clipped()
        self.clipped_gradients = self.current()
        return total

    def current(self) -> dict[str, Tensor]:
        """A module that has two names has its gradients under the first, as in the recordings."""
        student, found = self.recording.student(self.method), {}
        for name, tensor in student.items():
            if tensor.requires_grad and all(tensor is not student[other] for other in found):
                found[name] = tensor.grad.clone()
        return found


def our_name(name: str) -> str:
    """Official parameter name -> ours."""
    return name.replace("backbone.masked_embed", TOKEN).replace("backbone.", "vit.trunk.", 1)


def by_our_names(recorded: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """last_layer2 may be iBOT's second name of one module."""
    first, second = (recorded.get(f"head.{layer}.weight_v") for layer in ("last_layer", "last_layer2"))
    shared = first is not None and second is not None and torch.equal(first, second)
    return {our_name(name): tensor for name, tensor in recorded.items() if not shared or ".last_layer2." not in name}


@dataclass(frozen=True)
class RecordedRates:
    """The recordings keep the official rate from falling under a floor, so that the first step moves."""

    rates: Tensor

    def at(self, peak: float, progress: TrainProgress) -> float:
        return self.rates[progress.step].item()


def head_norm(head: Mapping[str, Tensor]) -> Norm:
    """That of the recorded layers."""
    if any(name.endswith("running_mean") for name in head):
        return "bn"
    return "ln" if any(name.endswith("weight") and tensor.ndim == 1 for name, tensor in head.items()) else "none"


class DistillationRecording:
    """One folder of the layout that DINO's and iBOT's READMEs describe."""

    def __init__(self, folder: str) -> None:
        self.data, self.config = doubled(tensors(f"{folder}/golden.safetensors")), facts(f"{folder}/config.json")
        self.steps = count(self.data, "step{}/crop0")
        self.per_epoch = len(self.data["sched/lr"]) // self.config["epochs"]

    def decay_end(self) -> float:
        """Where the recorded weight decay's half cosine goes, which its last step does not quite reach."""
        first, last = self.data["sched/wd"][[0, -1]].tolist()
        left = cosine(1.0, 0.0, 1 - 1 / len(self.data["sched/wd"]))
        return (last - left * first) / (1 - left)

    def recipe(self, settings: type[DistillationSettings], **changes) -> Recipe:
        """The recorded training, with settings of this type."""
        config = self.config
        sizes = dict(image_size=config["img"], patch_size=config["patch"], width=config["dim"], depth=config["depth"])
        hidden = len(self.data["student0/backbone.blocks.0.mlp.fc1.weight"])
        head = under(self.data, "student0/head.mlp.")
        chosen = dict(
            prototypes=config["out"],
            head_layers=sum(tensor.ndim == 2 for tensor in head.values()),
            head_hidden=config["hidden"],
            head_norm=head_norm(head),
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
        return Recipe(
            source="recorded",
            spec=replace(VIT_SMOKE, **sizes, heads=config["heads"], mlp_hidden=hidden, **POSITIONS),
            settings=settings(**chosen | changes),
            epochs=config["epochs"],
            batch=config["gbatch"],
            lr=config["lr"],
            schedule=RecordedRates(self.data["sched/lr"]),
            weight_decay=self.data["sched/wd"][0].item(),
            weight_decay_schedule=CosineTo(end=self.decay_end()),
            clip=config["clip"] or 0.0,
            clip_each=True,
        )

    def centres(self) -> dict[str, Tensor]:
        """The centres before the first step, by our names."""
        return {"centre.center": self.data["center0"][0]}

    def branch(self, name: str) -> dict[str, Tensor]:
        """A recorded network, "student0" say, by our names."""
        found = by_our_names(under(self.data, f"{name}/"))
        assert found, name
        return found

    def prepared(self, method: type[SelfDistillation], chosen: Recipe, dtype: torch.dtype = torch.float64) -> Watched:
        """The method in the recorded state; what the recording does not have stays as it is."""
        built = method(chosen.spec, chosen.settings)
        state = built.state_dict() | self.centres()
        for branch in ("student", "teacher"):
            for name, tensor in self.branch(f"{branch}0").items():
                where = name if name == TOKEN else f"{branch}.{name}"
                state[where] = tensor.view_as(state[where])
        fill(built, state)
        updates = Watched(built.to(dtype), chosen)
        updates.recording = self
        return updates

    def student(self, method: SelfDistillation) -> dict[str, Tensor]:
        """What the official student's state dict has, by our names."""
        state = method.student.state_dict(keep_vars=True)
        return state | ({TOKEN: method.mask_token} if TOKEN in self.branch("student0") else {})

    def views(self, step: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        crops = [self.data[f"step{step}/crop{number}"].to(dtype) for number in range(2 + self.config["nloc"])]
        found = {"global": torch.stack(crops[:2], dim=1)}
        return {**found, "local": torch.stack(crops[2:], dim=1)} if self.config["nloc"] else found

    def now(self, step: int) -> TrainProgress:
        return progress(step, self.config, self.per_epoch)

    def close_weights(self, method: SelfDistillation, limit: float) -> None:
        """The student and the teacher after all steps."""
        for branch, state in (("student", self.student(method)), ("teacher", method.teacher.state_dict())):
            recorded = self.branch(f"{branch}{self.steps}")
            assert recorded.keys() == state.keys()
            recorded = {name: end for name, end in recorded.items() if name not in self.noise()}
            close_states({name: state[name].view_as(end) for name, end in recorded.items()}, recorded, limit)

    def noise(self) -> set[str]:
        """Constants in front of a batch norm, whose gradients are rounding of which Adam makes steps, and the running
        means that follow."""
        found = by_our_names(under(self.data, f"step{self.steps - 1}/gradnorm/"))
        constants = {name for name, norm in found.items() if 0 < norm < ROUNDING}
        layers = [int(at[1]) for at in matches(r"head\.mlp\.(\d+)\.bias", constants)]
        return constants | {f"head.mlp.{layer + 1}.running_mean" for layer in layers}

    def close_gradients(self, updates: Watched, step: int, limit: float) -> None:
        """Every parameter's gradient norm, before and after clipping; in the first step the gradients themselves."""
        kinds = {"gradnorm": updates.raw_gradients}
        kinds |= {"clipped_gradnorm": updates.clipped_gradients} if self.config["clip"] else {}
        for kind, ours in kinds.items():
            recorded = by_our_names(under(self.data, f"step{step}/{kind}/"))
            assert recorded.keys() == ours.keys()
            for name, norm in recorded.items():
                close_norm(ours[name], norm, limit, f"{name}, {kind}", ROUNDING)
        noise = self.noise()
        for name, gradient in by_our_names(under(self.data, f"step{step}/grad/")).items():
            if name not in noise:
                close(updates.raw_gradients[name].view_as(gradient), gradient, limit, f"gradient of {name}")


class DinoRecording(DistillationRecording):
    """DINO's (facebookresearch/dino 7c446df)."""

    def run(self, updates: Watched, limit: float, noise: Callable[[int], dict[str, Tensor]] = lambda step: {}) -> None:
        """All steps of a method that must compute what DINO does. noise: step -> what it takes beside the crops."""
        for step in range(self.steps):
            logs = updates.run([self.views(step) | noise(step)], self.now(step))
            close(logs["loss"], self.data[f"step{step}/loss"], limit, f"loss {step}")
            close(updates.method.centre.center, self.data[f"step{step}/center_after"][0], limit, f"centre {step}")
            self.close_gradients(updates, step, limit)


DINO = DinoRecording("dino")
