"""The harness of all golden tests: a method in the recorded state must repeat the recorded official training.

A golden file derives a class from `RecordedTraining`. It says how official names become ours and how the recorded
configuration becomes a recipe, and inherits the tests. Tests without a recording are set to None there.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from copy import copy, deepcopy
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Self

import pytest
import torch
from recordings import ELSEWHERE, absent, facts, tensors, under
from torch import Tensor

from engine.distributed import World
from pretrain.loop.updates import CLIP_EPS, Updates
from pretrain.method import Method, TrainProgress
from pretrain.recipe import VIT_SMOKE, Recipe
from pretrain.schedules import Schedule

# A gradient norm below this, recorded in float32, is rounding of a gradient that is zero in exact arithmetic, such
# as that of a key's bias, which adds a constant to all logits of a softmax.
ROUNDING = 1e-6
TOTALS = ("total_before_clip", "total")  # names of the norm of all gradients
EXACT = 1e-12  # for what both sides compute in float64: rates, momenta, zero gradients
Views = Mapping[str, Tensor]


class WatchedUpdates(Updates):
    """Updates that keep the gradients of the last one by name, before and after clipping."""

    def clip_gradients(self) -> float:
        self.raw = self.gradients()
        total = super().clip_gradients()
        self.after_clipping = self.gradients()
        return total

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in self.method.named_parameters() if p.grad is not None}


class RecordedTraining:
    """Steps of an official training loop, with tests that ours repeats them."""

    # Set by a golden file: the recording, our class, fields of the encoder other than its sizes, and the limits.
    data: Mapping[str, Tensor]
    config: Mapping[str, Any]
    method: type[Method]
    design: Mapping[str, Any] = {}
    dtypes: ClassVar[list[torch.dtype]] = [torch.float64]  # precisions in which our updates are compared
    LOSS, NORM, END = 1e-6, 1e-4, 5e-5  # of losses and outputs, of gradients and their norms, of weights after updates
    RATE, ROUNDING = EXACT, ROUNDING
    # Names of its tensors; {} is the step, or for a loss the forward pass.
    start, end, rate, norm, gradient = "model0.", "model_end.", "lr{}", "gradnorm{}.", "grad{}."
    losses: Mapping[str, str] = {"loss": "loss{}"}  # our log -> recorded name
    unrecorded = ""  # pattern of names in our state that the recording may lack
    decayed, plain = "decay", "no_decay"  # options that list parameters with and without weight decay
    parts = 1  # forward passes of an update

    def settings(self) -> Any:
        """Settings of the method by the recorded options."""
        raise NotImplementedError

    def schedule(self) -> Schedule:
        """Schedule of the recorded learning rate."""
        raise NotImplementedError

    def our_name(self, official: str) -> str | None:
        """Our name of an official parameter or buffer, or None if ours has no such tensor."""
        raise NotImplementedError

    def views(self, forward: int) -> Views:
        """Our method's input in a recorded forward pass."""
        raise NotImplementedError

    def outputs(self, method: Method, step: int) -> Iterable[tuple]:
        """Recorded name, our value before the update `step`, the limit if it is not LOSS, and the compared part of the
        recorded tensor if it is not all of it."""
        return ()

    # Defaults that fit most recordings.

    @cached_property
    def steps(self) -> int:
        return self.config["steps"]

    @cached_property
    def steps_per_epoch(self) -> int:
        return self.steps

    def variant(self, **changes: Any) -> Self:
        """A copy with other attributes, such as another recording or other options."""
        other = copy(self)
        vars(other).update(changes)
        return other

    def recipe(self) -> Recipe:
        config, settings = self.config, self.settings()
        start = under(self.data, self.start).items()
        hidden = next(len(tensor) for name, tensor in start if name.endswith("blocks.0.mlp.fc1.weight"))
        sizes = {"image_size": "img", "patch_size": "patch", "width": "dim", "depth": "depth", "heads": "heads"}
        sizes = {ours: config[official] for ours, official in sizes.items()}
        return Recipe(
            source="recorded",
            spec=replace(VIT_SMOKE, **sizes, mlp_hidden=hidden, **self.design),
            settings=settings,
            epochs=config["epochs"],
            batch=config["batch"] * self.parts,
            lr=config["lr"],
            lr_batch=0,
            schedule=self.schedule(),
            weight_decay=config["wd"],
            betas=tuple(config.get("betas", Recipe.betas)),
            clip=config.get("clip") or 0.0,
        )

    def progress(self, step: int) -> TrainProgress:
        """Progress of the update `step` after the start of the recorded epoch."""
        return TrainProgress(
            step=self.config.get("epoch", 0) * self.steps_per_epoch + step,
            steps_per_epoch=self.steps_per_epoch,
            epochs=self.config["epochs"],
            micro_batches=self.parts,
        )

    def layout(self, official: str, tensor: Tensor) -> Tensor:
        """An official tensor in our layout."""
        return tensor

    def part(self, official: str, ours: Tensor) -> Tensor:
        """The part of our tensor that the official one holds."""
        return ours

    def first_state(self, method: Method) -> Mapping[str, Tensor]:
        """The complete state of our method before the first update."""
        return self.named(self.start)

    def named(self, prefix: str) -> dict[str, Tensor]:
        """The tensors recorded under `prefix`, in our layout and by our names."""
        recorded = {self.our_name(name): self.layout(name, t) for name, t in under(self.data, prefix).items()}
        return {name: tensor for name, tensor in recorded.items() if name is not None}

    def rounding(self) -> Collection[str]:
        """Official names of tensors that end as rounding: those whose gradient is zero in exact arithmetic, of whose
        rounding Adam makes steps, and tensors that follow from them."""
        return ()

    def build(self, recipe: Recipe) -> Method:
        return self.method(recipe.spec, recipe.settings)

    def begin(self, dtype: torch.dtype = torch.float64, world: World | None = None) -> WatchedUpdates:
        """The method in the recorded first state."""
        recipe = self.recipe()
        method = self.build(recipe).to(dtype)
        fill(method, self.first_state(method))
        return WatchedUpdates(method, recipe, world=world)

    def run(self, updates: WatchedUpdates, dtype: torch.dtype = torch.float64) -> None:
        """Run and compare all recorded updates."""
        for step in range(self.steps):
            progress, forwards = self.progress(step), range(step * self.parts, (step + 1) * self.parts)
            self.check_rates(updates, progress, step)
            logs = updates.run([converted(self.views(forward), dtype) for forward in forwards], progress)
            for log, name in self.losses.items():
                recorded = sum(self.data[name.format(forward)] for forward in forwards) / self.parts
                assert_close(logs[log], recorded, self.LOSS, f"{log} {step}")
            self.check_gradients(updates, step)
            self.check_update(updates, logs, step)
        self.check_end(updates.method)

    def check_rates(self, updates: WatchedUpdates, progress: TrainProgress, step: int) -> None:
        assert_close(updates.rates(progress)[0], self.data[self.rate.format(step)], self.RATE, f"learning rate {step}")

    def check_gradients(self, updates: WatchedUpdates, step: int) -> None:
        """Compare the norms of the last update's gradients before clipping and, in float64, the gradients."""
        norms = under(self.data, self.norm.format(step))
        for total in norms.keys() & TOTALS:
            assert_close(updates.norm, norms.pop(total), self.NORM, f"gradient norm {step}")
        assert not norms or self.names(norms) >= self.recorded(updates.raw)
        clip, gradients = updates.recipe.clip, updates.raw
        joint_groups = {group.clipped_with for group in updates.groups if group.clipped}
        if clip and not updates.recipe.clip_each and len(joint_groups) == 1 and all(g.clipped for g in updates.groups):
            scale = max(1.0, (updates.norm + CLIP_EPS) / clip)  # so that the clipped gradients are compared too
            gradients = {name: scale * gradient for name, gradient in updates.after_clipping.items()}
        for name, norm in norms.items():
            gradient = self.part(name, gradients[self.our_name(name)])
            assert_norm_close(gradient, norm, self.NORM, f"{name}, step {step}", self.ROUNDING)
        for name, recorded in under(self.data, self.gradient.format(step)).items():
            gradient = self.part(name, updates.raw[self.our_name(name)])
            if gradient.dtype == torch.float64:
                assert_gradient_close(gradient, self.layout(name, recorded).view_as(gradient), self.NORM, name)

    def check_pass(self, method: Method, norms: Mapping[str, Tensor | float], limit: float, what: str = "") -> None:
        """Compare the gradient norms of one pass; those of parameters that ours does not have must be 0."""
        gradients = {name: p.grad for name, p in method.named_parameters() if p.grad is not None}
        assert gradients.keys() == self.names(norms)
        for official, norm in norms.items():
            if name := self.our_name(official):
                assert_norm_close(gradients[name], norm, limit, f"{official} {what}", self.ROUNDING)
            else:
                assert norm == 0, official

    def check_update(self, updates: WatchedUpdates, logs: Mapping[str, float], step: int) -> None:
        """Compare what else is recorded of an update, such as a teacher or a centre."""

    def check_end(self, method: Method) -> None:
        """Compare all weights and buffers after the updates."""
        ours = method.state_dict()
        compared = self.names(under(self.data, self.end))
        assert compared and compared >= self.recorded(ours), self.recorded(ours) - compared
        rounding = self.rounding()
        for name, recorded in under(self.data, self.end).items():
            our_name = self.our_name(name)
            if our_name and name not in rounding:
                assert_weight_close(self.part(name, ours[our_name]), self.layout(name, recorded), self.END, name)

    def names(self, official: Iterable[str]) -> set[str]:
        return {ours for name in official if (ours := self.our_name(name))}

    def recorded(self, ours: Iterable[str]) -> set[str]:
        """Those of our names that the recording must have."""
        return {name for name in ours if not re.fullmatch(self.unrecorded, name)}

    # Tests.

    def pytest_generate_tests(self, metafunc: Any) -> None:
        if "dtype" in metafunc.fixturenames:
            metafunc.parametrize("dtype", self.dtypes, ids=str)

    def test_updates(self, dtype: torch.dtype) -> None:
        self.run(self.begin(dtype), dtype)

    def test_every_gradient_is_recorded(self) -> None:
        """So the updates compare all gradients."""
        recorded = under(self.data, self.gradient.format(0)) or absent("gradients")
        parameters = self.begin().method.named_parameters()
        trained = {name for name, parameter in parameters if parameter.requires_grad}
        assert trained >= self.names(recorded) >= self.recorded(trained)

    def test_outputs(self) -> None:
        """Outputs of the forward pass before each update, by a copy because batch norms collect statistics."""
        updates, compared = self.begin(), 0
        for step in range(self.steps):
            with torch.no_grad():
                for output in self.outputs(deepcopy(updates.method), step):
                    name, ours = output[:2]
                    if step and name not in self.data:  # most outputs are recorded of the first step alone
                        continue
                    limit = output[2] if len(output) > 2 else self.LOSS
                    theirs, compared = output[3] if len(output) > 3 else self.data[name], compared + 1
                    if ours.is_floating_point():
                        assert_close(ours, theirs, limit, name)
                    else:
                        assert torch.equal(ours, theirs.to(ours.dtype)), name
            updates.run([converted(self.views(step), torch.float64)], self.progress(step))
        assert compared

    def teacher_momenta(self, monkeypatch: pytest.MonkeyPatch, steps: int) -> Tensor:
        """Momenta with which the method's `after_update` moves its teacher in `steps` updates."""
        method, momenta = self.begin().method, []
        module = self.method.__module__
        monkeypatch.setattr(f"{module}.ema_update", lambda teacher, student, momentum: momenta.append(momentum))
        for step in range(steps):
            method.after_update(replace(self.progress(0), step=step))
        return torch.tensor(momenta, dtype=torch.float64)

    def test_decayed_parameters(self) -> None:
        ours = {name: group.weight_decay is None for group in self.begin().groups for name in group.parameters}
        decayed, plain = (self.names(self.config[option]) for option in (self.decayed, self.plain))
        assert ours == dict.fromkeys(decayed, True) | dict.fromkeys(plain, False)

    def test_schedule(self) -> None:
        """Rates and weight decays of a complete training, recorded for every update or in equal steps of epochs."""
        recipe = self.recipe()
        if "sched/lr" in self.data:
            for step, rate in enumerate(self.data["sched/lr"][: self.progress(0).steps]):
                now = replace(self.progress(0), step=step)
                assert_close(recipe.schedule.at(recipe.peak, now), rate, EXACT, f"rate {step}")
                if "sched/wd" in self.data:
                    decay = recipe.weight_decay_schedule.at(recipe.weight_decay, now)
                    assert_close(decay, self.data["sched/wd"][step], EXACT, f"weight decay {step}")
            return
        rates, epochs = self.data["sched.lr"], self.data.get("sched.epoch")
        per_epoch = len(rates) // recipe.epochs if epochs is None else round(1 / float(epochs[1] - epochs[0]))
        for step, rate in enumerate(rates):
            progress = TrainProgress(step=step, steps_per_epoch=per_epoch, epochs=recipe.epochs)
            if epochs is not None:
                assert_close(progress.time, epochs[step], EXACT, f"epoch of update {step}")
            assert_close(recipe.schedule.at(recipe.peak, progress), rate, EXACT, f"update {step}")


def case_classes(base: type[RecordedTraining], cases: Iterable[str]) -> dict[str, type[RecordedTraining]]:
    """A test class for each recorded case, by name: a subclass with the attribute `case`."""
    names = {case: f"Test{case.title().replace('_', '')}" for case in cases}
    return {name: type(name, (base,), {"case": case}) for case, name in names.items()}


def recording(path: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors (floating ones in float64) and configuration of one file, such as "mae/mae_step.safetensors"."""
    return doubled(tensors(path)), facts(path)


def doubled(recorded: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Floating tensors in float64."""
    return converted(recorded, torch.float64)


def converted(recorded: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Floating tensors in `dtype`, others as they are."""
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in recorded.items()}


def fill(network: torch.nn.Module, recorded: Mapping[str, Tensor]) -> None:
    """Load `recorded`, which must have exactly the network's tensors."""
    network.load_state_dict(dict(recorded), strict=True)


def count(names: Mapping[str, Any], pattern: str) -> int:
    """Number of names given by `pattern` with 0, 1, ... in place of its {}."""
    number = 0
    while pattern.format(number) in names:
        number += 1
    return number


def assert_close(ours: Tensor | float, theirs: Tensor | float, limit: float, what: str = "") -> None:
    """Assert a relative L2 difference of at most `limit`, which the message gives."""
    ours, theirs = (torch.as_tensor(value, dtype=torch.float64).detach() for value in (ours, theirs))
    assert ours.shape == theirs.shape, f"{what}: {tuple(ours.shape)}, recorded {tuple(theirs.shape)}"
    difference = ((ours - theirs).norm() / theirs.norm().clamp_min(1e-12)).item()
    assert difference <= limit, f"{what}: relative difference {difference:.2e} is above {limit:.0e}"


def assert_norm_close(
    gradient: Tensor, norm: Tensor | float, limit: float, what: str, rounding: float = ROUNDING
) -> None:
    """The same of a gradient's norm unless both are below `rounding`; where the recorded norm is 0, so is ours.

    In recordings elsewhere it may be rounding instead of 0, as that of attention among one token.
    """
    ours, what = gradient.norm().item(), f"gradient norm of {what}"
    if norm == 0:
        assert ours <= (EXACT if ELSEWHERE else 0), f"{what}: {ours:.2e}, recorded 0"
    elif norm < rounding:
        assert ours < rounding, f"{what}: {ours:.2e}, recorded {float(norm):.2e}"
    else:
        assert_close(ours, norm, limit, what)


def assert_gradient_close(gradient: Tensor, recorded: Tensor, limit: float, what: str) -> None:
    """The same of a gradient, which on both sides may be rounding of zero."""
    norm = recorded.norm()
    if norm < EXACT:
        assert_norm_close(gradient, norm, limit, what, EXACT)
    else:
        assert_close(gradient, recorded, limit, f"gradient of {what}")


def assert_weight_close(ours: Tensor, recorded: Tensor, limit: float, name: str) -> None:
    """The same of a weight after updates by Adam.

    The keys' third of a joint projection's bias is left out: its gradient is zero in exact arithmetic, and Adam makes
    steps of the rounding.
    """
    if name.endswith("attn.qkv.bias"):
        ours, recorded = (torch.cat([bias.chunk(3)[0], bias.chunk(3)[2]]) for bias in (ours, recorded))
    assert_close(ours.view_as(recorded), recorded, limit, name)
