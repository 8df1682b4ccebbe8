"""The form of attention: plain on a CPU in half precision alone, and the same function as the fused one."""

import pytest
import torch
from timm.layers import Attention

from engine.distributed import start_world
from engine.precision import autocast, fit_attention


def fused(precision: str) -> bool:
    network = torch.nn.Sequential(Attention(32, num_heads=2))
    fit_attention(network, "cpu", precision)
    return network[0].fused_attn


def test_half_precision_on_a_cpu_is_plain():
    assert not fused("bfloat16")
    assert not fused("float16")
    assert fused("float32")


def test_a_gpu_keeps_the_fused_kernel():
    network = Attention(32, num_heads=2)
    fit_attention(network, "cuda", "bfloat16")
    assert network.fused_attn


@pytest.mark.parametrize("tokens", [5, 17, 50])
def test_both_forms_are_one_function(tokens):
    """Outputs and gradients in bfloat16 are as near to float64's as the fused kernel's, up to a factor of 2."""
    torch.manual_seed(0)
    network = Attention(64, num_heads=4)
    x = torch.randn(3, tokens, 64)
    truth = passes(network.double(), x.double(), "float32")
    network.float()
    kernel = passes(network, x, "bfloat16")
    fit_attention(network, "cpu", "bfloat16")
    plain = passes(network, x, "bfloat16")
    for exact, theirs, ours in zip(truth, kernel, plain, strict=True):
        assert (ours - exact).norm() <= 2 * (theirs - exact).norm()
        assert (ours - exact).norm() < 0.02 * exact.norm()


def passes(network: torch.nn.Module, x: torch.Tensor, precision: str) -> list[torch.Tensor]:
    """Output, and gradients of the input and the qkv weights for a fixed direction."""
    x = x.clone().requires_grad_()
    with autocast("cpu", precision):
        out = network(x)
    direction = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out).to(out.dtype)
    gradients = torch.autograd.grad(out, (x, network.qkv.weight), direction)
    return [each.double() for each in (out, *gradients)]


def test_float32_runs_without_autocast():
    with autocast("cpu", "float32"):
        assert not torch.is_autocast_enabled("cpu")
    with autocast("cpu", "bfloat16"):
        assert torch.is_autocast_enabled("cpu")


def test_a_gpu_computes_float32_in_float32():
    """Convolutions too, whose inputs torch would round to TF32; a CPU's run touches nothing."""
    switches = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [each.allow_tf32 for each in switches]
    try:
        for device in ("cpu", "cuda"):
            for each in switches:
                each.allow_tf32 = True
            with start_world(device):
                assert [each.allow_tf32 for each in switches] == [device == "cpu"] * 2
    finally:
        for each, value in zip(switches, before, strict=True):
            each.allow_tf32 = value
