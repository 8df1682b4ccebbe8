"""Every method on a GPU: an update as on the CPU, in every precision; states and exports that cross devices.

What half precision may differ by is measured in the same test: the CPU's distance from float64 in that precision.
"""

from typing import NamedTuple

import pytest
import torch
from emulated import KIND
from small_trainings import batches, plan, progress, same, small_recipe, trainer, updates
from torch import Tensor

from checkpoints.export import ViTExport
from engine.extensions import source_files
from engine.precision import DTYPES, fit_attention

METHODS = list(source_files("methods"))
SCALE = 2.0**7  # of float16's loss: the recipes' first one is lowered by skipping updates
FACTOR = 3.0  # the GPU may be as far from float64 as the CPU in its precision, times this
ROUNDING = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}  # and this much more, relative


class Found(NamedTuple):
    loss: float
    gradient: Tensor  # all parameters' together, before the optimiser moved them


def update(name: str, device: str, precision: str) -> Found:
    """The first update. "float64": everything in it, the weights and views of float32."""
    work = updates(name, small_recipe(name, clip=0.0), device=device, precision=precision.replace("64", "32"))
    views = batches(work.method, plan())
    if precision == "float64":
        work.method.double()
        views = [{key: as_double(each) for key, each in part.items()} for part in views]
    if KIND != "cuda":  # the CPU's fused attention has a gradient five times as coarse in float16 (CAN: 1.1 %, not 0.2)
        fit_attention(work.method, "cpu", precision)
    if precision == "float16":
        work.scaler = torch.amp.GradScaler(device, init_scale=SCALE)
    logs = work.run(views, progress(plan()))
    gradients = [parameter.grad for parameter in work.method.parameters() if parameter.grad is not None]
    return Found(logs["loss"], torch.cat([each.cpu().double().flatten() for each in gradients]))


def as_double(values: Tensor) -> Tensor:
    return values.double() if values.is_floating_point() else values


def distances(found: Found, truth: Found) -> list[float]:
    """Of loss and gradient, relative."""
    gradient = (found.gradient - truth.gradient).norm() / truth.gradient.norm()
    return [abs(found.loss - truth.loss) / abs(truth.loss), gradient.item()]


def check_update(name: str, precision: str, on_gpu) -> None:
    truth, here = update(name, "cpu", "float64"), update(name, "cpu", precision)
    with on_gpu() as device:
        there = update(name, device, precision)
    for found, allowed in zip(distances(there, truth), distances(here, truth), strict=True):
        assert found <= FACTOR * allowed + ROUNDING[precision]


@pytest.mark.parametrize("name", METHODS)
def test_an_update_in_float32_is_the_cpus(name, on_gpu):
    check_update(name, "float32", on_gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("name", METHODS)
def test_an_update_in_half_precision_is_as_near_as_the_cpus(name, precision, on_gpu):
    check_update(name, precision, on_gpu)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cae", "moca", "mocov3"])
def test_a_training_on_a_gpu_is_the_cpus(name, tmp_path, on_gpu):
    """Loader, tokenizer fitted to images, states, log and exports included; and its state resumes on the CPU."""
    recipe = {"epochs": 1}
    here = trainer(name, tmp_path / "cpu", recipe=recipe)
    assert here.train() == "finished"
    with on_gpu() as device:
        there = trainer(name, tmp_path / "gpu", device=device, recipe=recipe)
        assert there.train() == "finished"
        back = trainer(name, tmp_path / "cpu", device=device, recipe=recipe, resume=True)
        back.load()
        assert same(to_cpu(back.method.state_dict()), here.method.state_dict())
    first, second = (ViTExport.load(tmp_path / where / "export") for where in ("cpu", "gpu"))
    for key, tensor in first.tensors.items():
        torch.testing.assert_close(second.tensors[key], tensor, rtol=1e-3, atol=1e-4 if KIND == "cuda" else 0)
    again = trainer(name, tmp_path / "gpu", recipe=recipe, resume=True)
    again.load()
    assert again.step == there.step and same(again.method.state_dict(), to_cpu(there.method.state_dict()))


def to_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mae", "dino", "moca"])
def test_compiled_updates_are_the_networks_to_rounding(name):
    found = {}
    for compiled in (False, True):
        work = updates(name, small_recipe(name), device="cuda", compiled=compiled)
        views = batches(work.method, plan())
        found[compiled] = [work.run(views, progress(plan(), step))["loss"] for step in range(3)]
    assert found[True] == pytest.approx(found[False], rel=1e-3)
