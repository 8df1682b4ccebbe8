"""NCCL, with as many processes as one GPU allows: one."""

import pytest
import torch
from small_trainings import batches, plan, progress, small_recipe, updates
from torch import distributed, nn

from engine.distributed import start_world
from engine.extensions import source_files

pytestmark = pytest.mark.gpu


@pytest.fixture
def world(monkeypatch):
    settings = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with start_world("cuda") as found:
        yield found


def test_objects_go_by_gloo_and_tensors_by_nccl(world):
    everyone = [None]
    distributed.all_gather_object(everyone, {"rank": 0})
    there, here = torch.arange(5.0, device="cuda"), torch.arange(5.0)
    for each in (there, here):
        distributed.all_reduce(each)
        distributed.broadcast(each, 0)
    parts = [torch.empty_like(there)]
    distributed.all_gather(parts, there)
    distributed.barrier()
    assert everyone == [{"rank": 0}] and torch.equal(parts[0].cpu(), here)


@pytest.mark.parametrize("name", list(source_files("methods")))
def test_gradients_through_nccl_are_those_of_one_process(name, world):
    """DistributedDataParallel around the method as with several processes: one update, the same loss and gradients."""
    plain, shared = (updates(name, small_recipe(name), device="cuda") for _ in range(2))
    shared.network = nn.parallel.DistributedDataParallel(
        shared.method, broadcast_buffers=True, gradient_as_bucket_view=True
    )
    views = batches(plain.method, plan())
    first, second = (each.run(views, progress(plan())) for each in (plain, shared))
    assert second == pytest.approx(first, rel=1e-4)


def test_synchronised_batch_norm_is_a_plain_one_over_the_same_images(world):
    """The kernels and the gathering of several processes, which torch leaves out for a single one unless called so."""
    torch.manual_seed(0)
    values = torch.randn(8, 6, device="cuda", requires_grad=True)
    weight, bias = (torch.randn(6, device="cuda") for _ in range(2))
    plain, found = ([torch.zeros(6, device="cuda"), torch.ones(6, device="cuda")] for _ in range(2))
    expected = nn.functional.batch_norm(values, *plain, weight, bias, True, 0.1, 1e-5)
    from torch.nn.modules._functions import SyncBatchNorm

    group = distributed.group.WORLD
    ours = SyncBatchNorm.apply(values, weight, bias, *found, 1e-5, 0.1, group, 1)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(found, plain)
