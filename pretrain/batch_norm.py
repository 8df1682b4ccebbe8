"""Batch norms whose statistics are those of all processes' images, on GPUs by torch's own, on CPUs by the one here."""

import torch
from torch import Tensor, distributed, nn
from torch.distributed.nn.functional import all_reduce


class SharedBatchNorm1d(nn.BatchNorm1d):
    """torch's SyncBatchNorm for (B, D) inputs on the CPU, where torch has none. Every process holds as many rows."""

    def forward(self, rows: Tensor) -> Tensor:
        if not self.training:
            return super().forward(rows)
        count = len(rows) * distributed.get_world_size()
        mean, square = (all_reduce(torch.stack([rows.sum(0), rows.square().sum(0)])) / count).unbind()
        variance = square - mean.square()
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean.detach(), self.momentum)
            self.running_var.lerp_(variance.detach() * count / (count - 1), self.momentum)
        return (rows - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias


def synchronised(network: nn.Module) -> nn.Module:
    """`network` with every batch norm replaced by one over all processes."""
    return nn.SyncBatchNorm.convert_sync_batchnorm(network) if torch.cuda.is_available() else _shared(network)


def _shared(network: nn.Module) -> nn.Module:
    for name, child in network.named_children():
        if isinstance(child, nn.BatchNorm1d):
            shared = SharedBatchNorm1d(child.num_features, child.eps, child.momentum, child.affine)
            shared.load_state_dict(child.state_dict())
            setattr(network, name, shared)
        else:
            _shared(child)
    return network
