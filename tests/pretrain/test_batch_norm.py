"""Batch norms over processes have the outputs, gradients and running statistics of one process with all rows."""

import pytest
import torch
from elsewhere import together
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from engine.distributed import World
from pretrain.parts.batch_norm import SharedBatchNorm, synchronised

ROWS, WIDTH = 12, 5
TOLERANCE = dict(rtol=1e-12, atol=1e-12)


def network() -> nn.Sequential:
    """An ordinary norm, one without weights, a frozen one and one in evaluation mode."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH, affine=False)]
    layers += [nn.Unflatten(1, (WIDTH, 1, 1)), nn.BatchNorm2d(WIDTH), nn.Flatten()]
    layers += [nn.Sequential(nn.BatchNorm1d(WIDTH, momentum=0.3).requires_grad_(False)), nn.BatchNorm1d(WIDTH).eval()]
    return nn.Sequential(*layers).double()


def rows() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3 + 100


def results_of(model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    """Outputs (B, D), gradients and state after one pass, none of which is symmetric in the rows."""
    outputs = model(inputs)
    (outputs.cos() * outputs * torch.arange(WIDTH)).mean().backward()
    network = getattr(model, "module", model)
    gradients = {f"gradient.{name}": p.grad for name, p in network.named_parameters() if p.requires_grad}
    return {"outputs": outputs.detach(), **gradients, **network.state_dict()}


def synchronised_results(world: World) -> dict[str, Tensor]:
    model = synchronised(network())
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in network().parameters()]
    assert [m.training for m in model.modules()] == [m.training for m in network().modules()]
    inputs = rows().chunk(world.size)[world.rank]
    return results_of(DistributedDataParallel(model, broadcast_buffers=False), inputs)


@pytest.mark.slow
def test_two_processes_equal_one_with_all_rows():
    first, second = together(synchronised_results)
    expected = results_of(network(), rows())
    assert torch.allclose(
        torch.cat([first.pop("outputs"), second.pop("outputs")]), expected.pop("outputs"), **TOLERANCE
    )
    assert first.keys() == second.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(first[name], value, **TOLERANCE), name
        assert torch.equal(first[name], second[name]), name


def normalise_bfloat16(world: World) -> tuple[torch.dtype, Tensor]:
    outputs = SharedBatchNorm(WIDTH)(rows().chunk(world.size)[world.rank].bfloat16())
    return outputs.dtype, outputs.detach().float()


def test_statistics_of_bfloat16_are_not_rounded():
    (kind, first), (_, second) = together(normalise_bfloat16)
    assert kind == torch.bfloat16
    expected = nn.BatchNorm1d(WIDTH)(rows().bfloat16().float())
    assert torch.allclose(torch.cat([first, second]), expected.bfloat16().float(), rtol=0.02, atol=0.02)
