"""The emulated GPU refuses what CUDA refuses, allows what it allows, and has the numbers of the CPU."""

import pytest
import torch
from emulated import OnGpu, emulated_gpu
from torch import nn
from torch.nn import functional as F

REFUSED = {
    "sum of two devices": lambda here, there: here + there,
    "product": lambda here, there: here @ there.T,
    "concatenation": lambda here, there: torch.cat([here, there]),
    "numbers stacked": lambda here, there: torch.stack([here.sum(), there.sum()]),
    "mask of the CPU": lambda here, there: torch.where(there > 0, here, here),
    "indices of the GPU": lambda here, there: there[here[0].long()],
    "rows written": lambda here, there: here.index_put_((torch.tensor([0]),), there[:1]),
    "index on the CPU": lambda here, there: here.gather(1, there.long()),
    "numpy": lambda here, there: here.numpy(),
    "numpy, detached": lambda here, there: here.detach().numpy(),
    "generator": lambda here, there: here.normal_(generator=torch.Generator()),
    "generator of a factory": lambda here, there: torch.rand(3, device="cuda", generator=torch.Generator()),
    "layer elsewhere": lambda here, there: nn.Linear(4, 2)(here),
    "loss": lambda here, there: F.cross_entropy(here, torch.tensor([0, 1, 2])),
    "in a python function": lambda here, there: F.mse_loss(here, there),
    "in place": lambda here, there: here.add_(there),
    "a list": lambda here, there: torch._foreach_lerp_([here], [there], 0.5),
}
ALLOWED = {
    "a number of the CPU": lambda here, there: here * there.sum(),
    "indices of the CPU": lambda here, there: here[torch.tensor([2, 0])],
    "copy": lambda here, there: torch.zeros_like(here).copy_(there),
    "move": lambda here, there: here + there.to(here.device),
    "move to another tensor's": lambda here, there: here + there.to(here),
    "made there": lambda here, there: here + torch.ones(3, 4, device=here.device),
    "made alike": lambda here, there: here + torch.ones_like(here) + here.new_full((4,), 2.0),
    "one hot": lambda here, there: F.one_hot(here.argmax(1), 4) * here,
    "item": lambda here, there: here * here.sum().item(),
    "mask": lambda here, there: here[here > 0].sum(),
    "interpolation": lambda here, there: F.interpolate(here[None, None], scale_factor=2.0, mode="bilinear").sum(),
    "squeezed in place": lambda here, there: here[:, :1].clone().squeeze_(1) + here[:, 0],
    "autocast": lambda here, there: autocast_product(here),
}


def autocast_product(here):
    with torch.autocast(here.device.type, torch.bfloat16):
        product = here @ here.T
    assert product.dtype == torch.bfloat16
    return product.float()


@pytest.mark.parametrize("name", REFUSED)
def test_it_refuses_what_cuda_refuses(name):
    there = torch.ones(3, 4)
    with emulated_gpu(), pytest.raises((RuntimeError, TypeError)):
        REFUSED[name](torch.ones(3, 4, device="cuda"), there)


@pytest.mark.parametrize("name", ALLOWED)
def test_it_computes_what_the_cpu_computes(name):
    torch.manual_seed(0)
    there = torch.randn(3, 4)
    with emulated_gpu():
        found = ALLOWED[name](there.cuda(), there)
        assert isinstance(found, OnGpu) and found.device.type == "cuda"
        assert torch.equal(found.cpu(), ALLOWED[name](there.clone(), there).cpu())


def test_it_trains_like_the_cpu():
    """Gradients cross the devices; parameters stay the objects that they were, also where two modules share one."""
    found = []
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
        assert all(one is other for one, other in zip(before, network.parameters(), strict=True))
        assert network[3].weight is network[0].weight and not isinstance(inputs.grad, OnGpu)
        found.append([inputs.grad, *(torch.as_tensor(each.tolist()) for each in network.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_nothing_is_left_behind():
    with emulated_gpu():
        pass
    assert not isinstance(torch.zeros(2), OnGpu) and torch.ones(2).to("cpu").numpy().sum() == 2
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AssertionError)):
            torch.zeros(2, device="cuda")
