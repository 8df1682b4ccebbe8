"""NCCL with one process, which is all that one GPU allows."""

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
    with start_world("cuda") as connected:
        yield connected


def test_objects_and_tensors_of_both_devices_are_exchanged(world):
    objects = [None]
    distributed.all_gather_object(objects, {"rank": 0})
    on_gpu, on_cpu = torch.arange(5.0, device="cuda"), torch.arange(5.0)
    for tensor in (on_gpu, on_cpu):
        distributed.all_reduce(tensor)
        distributed.broadcast(tensor, 0)
    parts = [torch.empty_like(on_gpu)]
    distributed.all_gather(parts, on_gpu)
    distributed.barrier()
    assert objects == [{"rank": 0}] and torch.equal(parts[0].cpu(), on_cpu)


def test_an_update_through_nccl_equals_a_plain_one(world):
    """The method is wrapped in DistributedDataParallel, as with several processes."""
    for name in source_files("methods"):
        plain, parallel = (updates(name, small_recipe(name), device="cuda") for _ in range(2))
        parallel.network = nn.parallel.DistributedDataParallel(
            parallel.method, broadcast_buffers=True, gradient_as_bucket_view=True
        )
        views = batches(plain.method, plan())
        plain_logs, parallel_logs = (wrapped.run(views, progress(plan())) for wrapped in (plain, parallel))
        assert parallel_logs == pytest.approx(plain_logs, rel=1e-4), name


def test_synchronised_batch_norm_equals_plain_batch_norm(world):
    """Calls torch's function directly, because the module does not synchronise a single process."""
    torch.manual_seed(0)
    values = torch.randn(8, 6, device="cuda", requires_grad=True)
    weight, bias = (torch.randn(6, device="cuda") for _ in range(2))
    plain_statistics, statistics = ([torch.zeros(6, device="cuda"), torch.ones(6, device="cuda")] for _ in range(2))
    expected = nn.functional.batch_norm(values, *plain_statistics, weight, bias, True, 0.1, 1e-5)
    from torch.nn.modules._functions import SyncBatchNorm

    group = distributed.group.WORLD
    ours = SyncBatchNorm.apply(values, weight, bias, *statistics, 1e-5, 0.1, group, 1)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(statistics, plain_statistics)
