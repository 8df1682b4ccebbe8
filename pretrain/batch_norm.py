"""Batch norms whose statistics are those of all processes' images, on GPUs by torch's own, on CPUs by the one here."""

import torch
from torch import Tensor, distributed, nn
from torch.distributed.nn.functional import all_reduce


class SharedBatchNorm1d(nn.BatchNorm1d):
    """torch's SyncBatchNorm for (B, D) inputs on the CPU, where torch has none. Every process holds as many rows."""

    def forward(self, rows: Tensor) -> Tensor:
        if not self.training:
            return super().forward(rows)
        exact = rows if rows.dtype == torch.float64 else rows.float()
        count = len(rows) * distributed.get_world_size()
        centred = exact - all_reduce(exact.sum(0)) / count
        variance = all_reduce(centred.square().sum(0)) / count
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(exact[0] - centred[0], self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        scaled = centred * (variance + self.eps).rsqrt()
        return (scaled * self.weight + self.bias if self.affine else scaled).to(rows.dtype)


def synchronised(network: nn.Module) -> nn.Module:
    """`network` with every batch norm replaced by one over all processes, on the same parameters and statistics."""
    return nn.SyncBatchNorm.convert_sync_batchnorm(network) if torch.cuda.is_available() else _shared(network)


def _shared(network: nn.Module) -> nn.Module:
    for name, child in network.named_children():
        setattr(network, name, _shared_norm(child) if isinstance(child, nn.BatchNorm1d) else _shared(child))
    return network


def _shared_norm(norm: nn.BatchNorm1d) -> SharedBatchNorm1d:
    assert norm.track_running_stats and norm.momentum is not None  # as in every method
    shared = SharedBatchNorm1d(norm.num_features, norm.eps, norm.momentum, norm.affine).train(norm.training)
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        setattr(shared, name, getattr(norm, name))
    return shared
