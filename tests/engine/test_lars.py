"""LARS against recorded steps of MAE's, LUT's and DINO's own optimisers, and heads stacked against heads alone."""

import pytest
import torch
from recordings import facts, tensors

from engine.lars import TRUST, Lars, adapted

DATA, META = tensors("lars/data.safetensors"), facts("lars/meta.json")
CASES = [name for name, case in META["cases"].items() if case["class"].endswith("LARS")]


def is_scaled(case: str, shape: list[int]) -> bool:
    return len(shape) != 1 if case.startswith("dino") else len(shape) > 1


@pytest.mark.parametrize("parameter", META["shapes"])
@pytest.mark.parametrize("case", CASES)
def test_steps_are_the_recorded_ones(case, parameter):
    options, lrs = META["cases"][case]["kwargs"], META["cases"][case]["lrs"]
    value = DATA[f"{case}/init/{parameter}"].clone()
    buffer = torch.zeros_like(value)
    for step, lr in enumerate(lrs):
        direction = DATA[f"{case}/grad{step}/{parameter}"]
        if is_scaled(case, META["shapes"][parameter]):
            trust = options.get("trust_coefficient", TRUST)
            direction = adapted(direction[None], value[None], options["weight_decay"], heads=0, trust=trust)[0]
        buffer.mul_(options.get("momentum", 0.9)).add_(direction)
        value.sub_(lr * buffer)
        torch.testing.assert_close(buffer, DATA[f"{case}/buf{step}/{parameter}"], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(value, DATA[f"{case}/param{step}/{parameter}"], rtol=1e-6, atol=1e-7)


def test_stacked_parameters_do_not_see_each_other():
    generator = torch.Generator().manual_seed(0)
    values, gradients = torch.randn(2, 6, 5, 4, generator=generator, dtype=torch.float64)
    values[:, 2] = 0  # norm 0: not scaled
    gradients[:, 3] = 0
    decays = torch.tensor([0.0, 1e-3, 0.0, 0.0, 0.5], dtype=torch.float64)
    together = adapted(gradients, values, decays.view(1, 5, 1), heads=1)
    for head in range(5):
        alone = adapted(gradients[:, head][None], values[:, head][None], float(decays[head]), heads=0)[0]
        torch.testing.assert_close(together[:, head], alone, rtol=1e-14, atol=0)
    assert torch.equal(together[:, 2], gradients[:, 2]) and not together[:, 3].any()


@pytest.mark.parametrize("case", [name for name in CASES if not name.startswith("dino")])
def test_optimizer_makes_the_recorded_steps(case):
    options = dict(META["cases"][case]["kwargs"])
    options["trust"] = options.pop("trust_coefficient", TRUST)
    parameters = {name: torch.nn.Parameter(DATA[f"{case}/init/{name}"].clone()) for name in META["shapes"]}
    optimizer = Lars(list(parameters.values()), **{name: options[name] for name in options if name != "lr"}, lr=0.0)
    for step, lr in enumerate(META["cases"][case]["lrs"]):
        optimizer.param_groups[0]["lr"] = lr
        for name, parameter in parameters.items():
            parameter.grad = DATA[f"{case}/grad{step}/{name}"].clone()
        optimizer.step()
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter.data, DATA[f"{case}/param{step}/{name}"], rtol=1e-6, atol=1e-7)
