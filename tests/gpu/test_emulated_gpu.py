"""The emulated GPU refuses and allows what CUDA does, and gives the numbers of the CPU."""

import pytest
import torch
from emulated import OnGpu, emulated_gpu
from torch import nn
from torch.nn import functional as F

REFUSED = {
    "sum of two devices": lambda gpu, cpu: gpu + cpu,
    "product": lambda gpu, cpu: gpu @ cpu.T,
    "concatenation": lambda gpu, cpu: torch.cat([gpu, cpu]),
    "numbers stacked": lambda gpu, cpu: torch.stack([gpu.sum(), cpu.sum()]),
    "mask of the CPU": lambda gpu, cpu: torch.where(cpu > 0, gpu, gpu),
    "indices of the GPU": lambda gpu, cpu: cpu[gpu[0].long()],
    "rows written": lambda gpu, cpu: gpu.index_put_((torch.tensor([0]),), cpu[:1]),
    "index on the CPU": lambda gpu, cpu: gpu.gather(1, cpu.long()),
    "numpy": lambda gpu, cpu: gpu.numpy(),
    "numpy, detached": lambda gpu, cpu: gpu.detach().numpy(),
    "generator": lambda gpu, cpu: gpu.normal_(generator=torch.Generator()),
    "generator of a factory": lambda gpu, cpu: torch.rand(3, device="cuda", generator=torch.Generator()),
    "layer elsewhere": lambda gpu, cpu: nn.Linear(4, 2)(gpu),
    "loss": lambda gpu, cpu: F.cross_entropy(gpu, torch.tensor([0, 1, 2])),
    "in a python function": lambda gpu, cpu: F.mse_loss(gpu, cpu),
    "in place": lambda gpu, cpu: gpu.add_(cpu),
    "a list": lambda gpu, cpu: torch._foreach_lerp_([gpu], [cpu], 0.5),
}
ALLOWED = {
    "a number of the CPU": lambda gpu, cpu: gpu * cpu.sum(),
    "indices of the CPU": lambda gpu, cpu: gpu[torch.tensor([2, 0])],
    "copy": lambda gpu, cpu: torch.zeros_like(gpu).copy_(cpu),
    "move": lambda gpu, cpu: gpu + cpu.to(gpu.device),
    "move to another tensor's": lambda gpu, cpu: gpu + cpu.to(gpu),
    "made there": lambda gpu, cpu: gpu + torch.ones(3, 4, device=gpu.device),
    "made alike": lambda gpu, cpu: gpu + torch.ones_like(gpu) + gpu.new_full((4,), 2.0),
    "one hot": lambda gpu, cpu: F.one_hot(gpu.argmax(1), 4) * gpu,
    "item": lambda gpu, cpu: gpu * gpu.sum().item(),
    "mask": lambda gpu, cpu: gpu[gpu > 0].sum(),
    "interpolation": lambda gpu, cpu: F.interpolate(gpu[None, None], scale_factor=2.0, mode="bilinear").sum(),
    "squeezed in place": lambda gpu, cpu: gpu[:, :1].clone().squeeze_(1) + gpu[:, 0],
    "autocast": lambda gpu, cpu: autocast_product(gpu),
}


def autocast_product(values):
    with torch.autocast(values.device.type, torch.bfloat16):
        product = values @ values.T
    assert product.dtype == torch.bfloat16
    return product.float()


def test_mistakes_that_cuda_refuses_raise_errors():
    for name in REFUSED:
        on_cpu = torch.ones(3, 4)
        with emulated_gpu(), pytest.raises((RuntimeError, TypeError)):
            REFUSED[name](torch.ones(3, 4, device="cuda"), on_cpu)


def test_results_equal_those_of_the_cpu():
    for name in ALLOWED:
        torch.manual_seed(0)
        on_cpu = torch.randn(3, 4)
        with emulated_gpu():
            result = ALLOWED[name](on_cpu.cuda(), on_cpu)
            assert isinstance(result, OnGpu) and result.device.type == "cuda"
            assert torch.equal(result.cpu(), ALLOWED[name](on_cpu.clone(), on_cpu).cpu())


def test_training_equals_that_on_the_cpu():
    """Gradients cross devices; parameters remain the same objects, also one that two modules share."""
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 4))
        network[3].weight = network[0].weight
        before = list(network.parameters())
        inputs = torch.randn(5, 4, requires_grad=True)
        with emulated_gpu():
            network.to(device)
            optimiser = torch.optim.AdamW(network.parameters(), lr=0.1, fused=True)
            for _ in range(3):
                optimiser.zero_grad()
                network(inputs.to(device)).square().mean().backward()
                nn.utils.clip_grad_norm_(network.parameters(), 0.1)
                optimiser.step()
        assert all(original is parameter for original, parameter in zip(before, network.parameters(), strict=True))
        assert network[3].weight is network[0].weight and not isinstance(inputs.grad, OnGpu)
        results.append([inputs.grad, *(torch.as_tensor(parameter.tolist()) for parameter in network.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_leaving_the_context_restores_torch():
    with emulated_gpu():
        pass
    assert not isinstance(torch.zeros(2), OnGpu) and torch.ones(2).to("cpu").numpy().sum() == 2
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AssertionError)):
            torch.zeros(2, device="cuda")
