"""Heads trained together against each head alone, with torch's layers, autograd and optimisers."""

import pytest
import torch
from recordings import facts, tensors
from torch import nn
from torch.nn import functional as F

from probes.linear.heads import Head, Heads, HeadSettings, residuals

# Ours in float64: what is left is the rounding of the recording, which is the same on every processor.
DATA = {name: tensor.double() for name, tensor in tensors("lars/data.safetensors").items()}
META = facts("lars/meta.json")
WIDTHS = {"wide": 12, "narrow": 5}
GRID = [
    Head(readout=readout, lr=lr, weight_decay=weight_decay)
    for readout in WIDTHS
    for weight_decay in (0.0, 0.01)
    for lr in (0.01, 0.3, 2.0)
]
STEPS = 25
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


def problem(classes, dtype, rows=64):
    generator = torch.Generator().manual_seed(classes)
    features = {name: torch.randn(rows, width, generator=generator, dtype=dtype) for name, width in WIDTHS.items()}
    return features, torch.randint(0, classes, (rows,), generator=generator)


def factor(step):
    return 0.2 + 0.8 * step / STEPS


class MsnHead(nn.Module):
    """MSN's head, linear_eval.py:251-266."""

    def __init__(self, width, classes):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, features):
        return self.linear(F.normalize(self.norm(features)))


def module_of(heads, index, dtype):
    """A head as a torch module, before training."""
    head = heads.heads[index]
    entries = {"plain": nn.Identity, "batch_norm": nn.BatchNorm1d}
    parameters = heads.copy_head(index).groups[0].parameters
    if heads.settings.entry == "layer_norm":
        module = MsnHead(WIDTHS[head.readout], heads.classes)
        linear = module.linear
    else:
        options = {"affine": False, "eps": heads.settings.eps} if heads.settings.entry == "batch_norm" else {}
        linear = nn.Linear(WIDTHS[head.readout], heads.classes)
        module = nn.Sequential(entries[heads.settings.entry](WIDTHS[head.readout], **options), linear)
    module.to(dtype)
    with torch.no_grad():
        linear.weight.copy_(parameters["weight"].T)
        linear.bias.zero_()
    return module


def torch_sgd_step(parameters, buffers, head, lr, momentum=0.9):
    """torch.optim.SGD."""
    for parameter, buffer in zip(parameters, buffers, strict=True):
        buffer.mul_(momentum).add_(parameter.grad + head.weight_decay * parameter)
        parameter.sub_(lr * buffer)


def lars_step(parameters, buffers, head, lr, momentum=0.9, trust_coefficient=0.001):
    """MAE util/lars.py:18-47."""
    for parameter, buffer in zip(parameters, buffers, strict=True):
        direction = parameter.grad
        if parameter.ndim > 1:
            direction = direction + head.weight_decay * parameter
            size, length = (float((tensor * tensor).sum()) ** 0.5 for tensor in (parameter, direction))
            direction = direction * (trust_coefficient * size / length if size and length else 1.0)
        buffer.mul_(momentum).add_(direction)
        parameter.sub_(lr * buffer)


def msn_step(parameters, buffers, head, lr, momentum=0.9):
    """MSN src/sgd.py, with Nesterov's momentum."""
    for parameter, buffer in zip(parameters, buffers, strict=True):
        change = -lr * (parameter.grad + (head.weight_decay * parameter if parameter.ndim > 1 else 0))
        buffer.mul_(momentum).add_(change)
        parameter.add_(change + momentum * buffer)


def adamw_step(parameters, buffers, head, lr):
    """torch.optim.AdamW itself, which is kept in place of the first buffer."""
    if not isinstance(buffers[0], torch.optim.Optimizer):
        buffers[0] = torch.optim.AdamW(parameters, weight_decay=head.weight_decay)
    buffers[0].param_groups[0]["lr"] = lr
    buffers[0].step()


RECIPES = {
    "adamw": (HeadSettings(optimizer="adamw"), adamw_step),
    "sgd": (HeadSettings(), torch_sgd_step),
    "sgd and batch norm": (HeadSettings(entry="batch_norm"), torch_sgd_step),
    "lars and batch norm": (HeadSettings(optimizer="lars", entry="batch_norm", eps=1e-6), lars_step),
    "msn": (HeadSettings(optimizer="msn", entry="layer_norm"), msn_step),
}


REFERENCES = {"torch.optim.sgd.SGD": torch_sgd_step, "msn_sgd.SGD": msn_step}
REFERENCES |= {"mae_lars.LARS": lars_step, "lut_lars.LARS": lars_step}


def recorded_cases():
    """Cases of the optimisers that train heads: torch's SGD without Nesterov's momentum, and MSN's with it."""
    for name, case in META["cases"].items():
        if case["kwargs"].get("nesterov", False) == (case["class"] == "msn_sgd.SGD") and case["class"] in REFERENCES:
            yield name


def test_reference_steps_equal_the_recorded_ones():
    for parameter in META["shapes"]:
        for case in recorded_cases():
            recorded = META["cases"][case]
            options = {
                name: value for name, value in recorded["kwargs"].items() if name not in ("weight_decay", "nesterov")
            }
            head = Head(readout="wide", lr=1.0, weight_decay=recorded["kwargs"]["weight_decay"])
            value = nn.Parameter(DATA[f"{case}/init/{parameter}"].clone())
            buffer = torch.zeros_like(value)
            for step, lr in enumerate(recorded["lrs"]):
                value.grad = DATA[f"{case}/grad{step}/{parameter}"]
                with torch.no_grad():
                    REFERENCES[recorded["class"]]([value], [buffer], head, lr, **options)
                torch.testing.assert_close(
                    value.detach(), DATA[f"{case}/param{step}/{parameter}"], rtol=1e-6, atol=1e-7
                )


@pytest.mark.parametrize("classes", [7, pytest.param(70, marks=pytest.mark.exhaustive)])
def test_heads_trained_together_equal_heads_trained_alone(classes):
    for name, dtype in [*((name, torch.float64) for name in RECIPES), ("sgd and batch norm", torch.float32)]:
        recipe, step_alone = RECIPES[name]
        features, labels = problem(classes, dtype)
        heads = Heads(GRID, WIDTHS, classes, recipe, batch=64, seed=3, dtype=dtype)
        modules = [module_of(heads, index, dtype) for index in range(len(GRID))]
        buffers = [[torch.zeros_like(p) for p in module.parameters()] for module in modules]
        for step in range(STEPS):
            losses = heads.step(features, labels, factor(step))
            for index, (head, module) in enumerate(zip(GRID, modules, strict=True)):
                loss = F.cross_entropy(module(features[head.readout]), labels)
                torch.testing.assert_close(losses[index], loss.detach(), rtol=10 * TOLERANCE[dtype], atol=1e-6)
                module.zero_grad()
                loss.backward()
                with torch.no_grad():
                    step_alone(list(module.parameters()), buffers[index], head, head.lr * factor(step))
        logits = heads.logits(features)
        for index, (head, module) in enumerate(zip(GRID, modules, strict=True)):
            expected = module.eval()(features[head.readout]).detach()
            scale = float(expected.abs().max())
            assert float((logits[:, index] - expected).abs().max()) / scale < 10 * TOLERANCE[dtype], head
            weight = list(module.parameters())[-2].detach().T
            ours = heads.copy_head(index).groups[0].parameters["weight"]
            assert float((ours - weight).norm() / weight.norm()) < TOLERANCE[dtype], head


def test_hits_agree_with_the_logits():
    features, labels = problem(5, torch.float32)
    heads = Heads(GRID, WIDTHS, 5, HeadSettings(), batch=64)
    for step in range(5):
        heads.step(features, labels, factor(step))
    expected = (heads.logits(features).argmax(dim=2) == labels[:, None]).sum(dim=0)
    assert torch.equal(heads.hits(features, labels), expected) and expected.max() > expected.min()


def test_a_diverged_head_is_recorded_and_does_not_change_the_others():
    features, labels = problem(5, torch.float32)
    finite = [Head(readout="wide", lr=0.1), Head(readout="wide", lr=0.2)]
    alone = Heads(finite, {"wide": 12}, 5, HeadSettings(), batch=64)
    mixed = Heads([*finite, Head(readout="wide", lr=3e38)], {"wide": 12}, 5, HeadSettings(), batch=64)
    for _ in range(10):
        alone.step(features, labels, 1.0)
        mixed.step(features, labels, 1.0)
    assert mixed.diverged[:2].tolist() == [-1, -1] and 0 < mixed.diverged[2] < 10
    for index in range(2):
        weights = (heads.copy_head(index).groups[0].parameters["weight"] for heads in (alone, mixed))
        torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)


def test_large_losses_are_finite():
    logits = torch.tensor([[[0.0, 500.0]], [[500.0, 0.0]]])
    _, losses = residuals(logits, torch.tensor([0, 0]))
    assert losses.isfinite().all() and losses > 40


def test_a_resumed_state_continues_bit_for_bit():
    features, labels = problem(7, torch.float32)
    recipe = HeadSettings(optimizer="lars", entry="batch_norm")
    uninterrupted, stopped, resumed = (Heads(GRID, WIDTHS, 7, recipe, batch=64) for _ in range(3))
    for step in range(6):
        uninterrupted.step(features, labels, factor(step))
        (stopped if step < 3 else resumed).step(features, labels, factor(step))
        if step == 2:
            resumed.load({name: value.clone() for name, value in stopped.state().items()})
    assert uninterrupted.state().keys() == resumed.state().keys()
    assert all(torch.equal(value, resumed.state()[name]) for name, value in uninterrupted.state().items())
