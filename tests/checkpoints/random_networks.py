"""Networks whose every parameter is random, so that equal features prove equal networks."""

import torch
from torch import nn


def randomise(network: nn.Module) -> nn.Module:
    """Draw every parameter, scales around one, and switch to evaluation mode."""
    torch.manual_seed(0)
    for name, parameter in network.named_parameters():
        scales = (parameter.ndim == 1 and name.endswith("weight")) or "gamma" in name or "lambda" in name
        nn.init.normal_(parameter, mean=float(scales), std=0.2)
    return network.eval()
