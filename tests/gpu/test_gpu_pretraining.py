"""Every method on a GPU: updates equal the CPU's, in every precision; states and exports move between devices.

The tolerance of half precision is measured in the same test: the CPU's distance from float64 in that precision.
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

# By default a decoder, a teacher, a codebook and a tokenizer; all others in `tox -e all`.
SAMPLE = ("mae", "dino", "moca", "beit")
METHODS = [
    pytest.param(name, marks=() if name in SAMPLE else pytest.mark.exhaustive) for name in source_files("methods")
]
SCALE = 2.0**7  # float16 loss scale: the recipes' initial one is so large that the first updates are skipped
FACTOR = 3.0  # times the CPU's distance from float64 in the same precision
ROUNDING = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}  # plus this relative error


class LossAndGradient(NamedTuple):
    loss: float
    gradient: Tensor  # of all parameters, concatenated, before the optimiser's step


def run_update(name: str, device: str, precision: str) -> LossAndGradient:
    """Run the first update. "float64" starts from the float32 weights and views."""
    work = updates(name, small_recipe(name, clip=0.0), device=device, precision=precision.replace("64", "32"))
    views = batches(work.method, plan())
    if precision == "float64":
        work.method.double()
        views = [{key: as_double(tensor) for key, tensor in view.items()} for view in views]
    if KIND != "cuda":  # the CPU's fused attention has a gradient five times as coarse in float16 (CAN: 1.1 %, not 0.2)
        fit_attention(work.method, "cpu", precision)
    if precision == "float16":
        work.scaler = torch.amp.GradScaler(device, init_scale=SCALE)
    logs = work.run(views, progress(plan()))
    gradients = [parameter.grad for parameter in work.method.parameters() if parameter.grad is not None]
    return LossAndGradient(logs["loss"], torch.cat([gradient.cpu().double().flatten() for gradient in gradients]))


def as_double(values: Tensor) -> Tensor:
    return values.double() if values.is_floating_point() else values


def distances(result: LossAndGradient, exact: LossAndGradient) -> list[float]:
    """Relative distances of loss and gradient."""
    gradient = (result.gradient - exact.gradient).norm() / exact.gradient.norm()
    return [abs(result.loss - exact.loss) / abs(exact.loss), gradient.item()]


def check_update(name: str, precision: str, on_gpu) -> None:
    exact, on_cpu = run_update(name, "cpu", "float64"), run_update(name, "cpu", precision)
    with on_gpu() as device:
        on_device = run_update(name, device, precision)
    for distance, allowed in zip(distances(on_device, exact), distances(on_cpu, exact), strict=True):
        assert distance <= FACTOR * allowed + ROUNDING[precision]


@pytest.mark.parametrize("name", METHODS)
def test_float32_updates_equal_the_cpus(name, on_gpu):
    check_update(name, "float32", on_gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("name", METHODS)
def test_half_precision_updates_are_as_accurate_as_the_cpus(name, on_gpu):
    for precision in DTYPES:
        check_update(name, precision, on_gpu)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["mae", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("moca", "cae", "mocov3"))]
)
def test_training_equals_the_cpus_and_resumes_on_either_device(name, tmp_path, on_gpu):
    """Covers loader, fitted tokenizer, states, log and exports."""
    recipe = {"epochs": 1}
    on_cpu = trainer(name, tmp_path / "cpu", recipe=recipe)
    assert on_cpu.train() == "finished"
    with on_gpu() as device:
        on_device = trainer(name, tmp_path / "gpu", device=device, recipe=recipe)
        assert on_device.train() == "finished"
        cpu_state_on_device = trainer(name, tmp_path / "cpu", device=device, recipe=recipe, resume=True)
        cpu_state_on_device.load()
        assert same(to_cpu(cpu_state_on_device.method.state_dict()), on_cpu.method.state_dict())
    cpu_export, device_export = (ViTExport.load(tmp_path / folder / "export") for folder in ("cpu", "gpu"))
    for key, tensor in cpu_export.tensors.items():
        torch.testing.assert_close(device_export.tensors[key], tensor, rtol=1e-3, atol=1e-4 if KIND == "cuda" else 0)
    device_state_on_cpu = trainer(name, tmp_path / "gpu", recipe=recipe, resume=True)
    device_state_on_cpu.load()
    assert device_state_on_cpu.step == on_device.step
    assert same(device_state_on_cpu.method.state_dict(), to_cpu(on_device.method.state_dict()))


def to_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mae", "dino", "moca"])
def test_compiled_updates_equal_plain_ones(name):
    losses = {}
    for compiled in (False, True):
        work = updates(name, small_recipe(name), device="cuda", compiled=compiled)
        views = batches(work.method, plan())
        losses[compiled] = [work.run(views, progress(plan(), step))["loss"] for step in range(3)]
    assert losses[True] == pytest.approx(losses[False], rel=1e-3)
