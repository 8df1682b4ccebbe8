"""Batch norms synchronised over all processes, by torch's SyncBatchNorm on GPUs and an own one on CPUs; and forward
passes that leave running statistics unchanged."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, distributed, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.modules.batchnorm import _BatchNorm


class SharedBatchNorm(_BatchNorm):
    """SyncBatchNorm for the CPU, which torch lacks. Inputs are (B, C, ...), of the same shape in every process."""

    def _check_input_dim(self, values: Tensor) -> None:
        """Allow any number of dimensions."""

    def forward(self, values: Tensor) -> Tensor:
        if not self.training:
            return super().forward(values)
        exact = values if values.dtype == torch.float64 else values.float()
        dims = [0, *range(2, values.ndim)]  # all but the channels
        count = values.numel() // values.shape[1] * distributed.get_world_size()
        mean = all_reduce(exact.sum(dims, keepdim=True)) / count
        variance = all_reduce((exact - mean).square().sum(dims, keepdim=True)) / count
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean.flatten(), self.momentum)
            self.running_var.lerp_(variance.flatten() * count / (count - 1), self.momentum)
        scaled = (exact - mean) * (variance + self.eps).rsqrt()
        if self.affine:
            scaled = scaled * self.weight.view_as(mean) + self.bias.view_as(mean)
        return scaled.to(values.dtype)


@contextmanager
def in_eval_mode(network: nn.Module) -> Iterator[None]:
    """A block in which `network` is in eval mode: batch norms use their running statistics without updating them or
    communicating, and no paths are dropped. Every module's mode is restored afterwards."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def synchronised(network: nn.Module, device: str = "cpu") -> nn.Module:
    """Replace every batch norm of `network` by one synchronised over all processes, with the same parameters and
    statistics."""
    on_gpu = torch.device(device).type == "cuda"
    return nn.SyncBatchNorm.convert_sync_batchnorm(network) if on_gpu else _shared(network)


def _shared(network: nn.Module) -> nn.Module:
    for name, child in network.named_children():
        setattr(network, name, _shared_norm(child) if isinstance(child, _BatchNorm) else _shared(child))
    return network


def _shared_norm(norm: _BatchNorm) -> SharedBatchNorm:
    assert norm.track_running_stats and norm.momentum is not None  # as in every method
    shared = SharedBatchNorm(norm.num_features, norm.eps, norm.momentum, norm.affine).train(norm.training)
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        setattr(shared, name, getattr(norm, name))
    return shared
