"""Attention is unfused on a CPU in half precision alone, where both forms agree; autocast; TF32 is off."""

import pytest
import torch
from timm.layers import Attention

from engine.distributed import start_world
from engine.precision import autocast, fit_attention


@pytest.mark.parametrize(
    ("device", "precision", "fused"),
    [("cpu", "bfloat16", False), ("cpu", "float16", False), ("cpu", "float32", True), ("cuda", "bfloat16", True)],
)
def test_attention_is_unfused_in_half_precision_on_a_cpu(device, precision, fused):
    network = torch.nn.Sequential(Attention(32, num_heads=2))
    fit_attention(network, device, precision)
    assert network[0].fused_attn == fused


@pytest.mark.parametrize("tokens", [5, 17, 50])
def test_fused_and_unfused_attention_agree(tokens):
    """Errors of outputs and gradients in bfloat16, against float64, are at most twice those of the fused kernel."""
    torch.manual_seed(0)
    network = Attention(64, num_heads=4)
    x = torch.randn(3, tokens, 64)
    expected = outputs_and_gradients(network.double(), x.double(), "float32")
    network.float()
    fused = outputs_and_gradients(network, x, "bfloat16")
    fit_attention(network, "cpu", "bfloat16")
    plain = outputs_and_gradients(network, x, "bfloat16")
    for exact, theirs, ours in zip(expected, fused, plain, strict=True):
        assert (ours - exact).norm() <= 2 * (theirs - exact).norm()
        assert (ours - exact).norm() < 0.02 * exact.norm()


def outputs_and_gradients(network: torch.nn.Module, x: torch.Tensor, precision: str) -> list[torch.Tensor]:
    """The output, and gradients of the input and of the qkv weights for a fixed output gradient."""
    x = x.clone().requires_grad_()
    with autocast("cpu", precision):
        out = network(x)
    direction = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out).to(out.dtype)
    gradients = torch.autograd.grad(out, (x, network.qkv.weight), direction)
    return [tensor.double() for tensor in (out, *gradients)]


def test_float32_runs_without_autocast():
    with autocast("cpu", "float32"):
        assert not torch.is_autocast_enabled("cpu")
    with autocast("cpu", "bfloat16"):
        assert torch.is_autocast_enabled("cpu")


def test_float32_on_a_gpu_does_not_use_tf32():
    """Convolutions too, whose inputs torch would round to TF32; a run on a CPU changes no setting."""
    backends = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [backend.allow_tf32 for backend in backends]
    try:
        for device in ("cpu", "cuda"):
            for backend in backends:
                backend.allow_tf32 = True
            with start_world(device):
                assert [backend.allow_tf32 for backend in backends] == [device == "cpu"] * 2
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.allow_tf32 = value
